"""The configuration of an exported model: the fields of a run that its weights and its attention depend on."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class MethodGPTConfig(PreTrainedConfig):
    """Holds the arguments of GPT (gpt.py), with their types checked. max_position_embeddings is the longest validated
    length. Other programs stop there by default, but the model has no limit."""

    model_type = "method_gpt"
    attribute_map = {
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    }

    vocab_size: int = 50304
    num_layers: int = 12
    num_heads: int = 6
    model_dim: int = 768
    train_length: int = 4096
    method: str = "scale_invariant_p_rope"
    method_options: dict[str, int | float | bool | str | None] | None = None
    position_scale: int | float = 1.0
    max_position_embeddings: int = 65_536
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
