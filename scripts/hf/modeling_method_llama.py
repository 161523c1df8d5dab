"""A converted Llama model (convert.py) that transformers loads without this repository (modules.py)."""

from transformers import LlamaConfig, LlamaForCausalLM

from scripts.hf.convert import RECORD, convert


class MethodLlamaConfig(LlamaConfig):
    model_type = "method_llama"  # under the name llama, transformers would compute RoPE attention instead


class MethodLlamaForCausalLM(LlamaForCausalLM):
    config_class = MethodLlamaConfig
    _keep_in_fp32_modules_strict = ["method"]  # a method has few parameters, and rounding them would cost accuracy

    def __init__(self, config: MethodLlamaConfig):
        """Build a Llama model with the attention method that its configuration records."""
        record = getattr(config, RECORD)
        config.rope_parameters = record["rope_parameters"]
        super().__init__(config)
        convert(self, record["name"], train_length=record["train_length"], **record["options"])
