"""Loads Hugging Face models from a folder or the hub, and saves converted models.

Loading never runs code of a model, because it uses the classes of transformers and reads only safetensors. transformers
is an optional dependency, so it is imported when it is first needed.
"""

import importlib.util
import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn

from errors import require
from files import naming, replace_text
from scripts.hf.convert import RECORD, convert
from scripts.hf.modules import export_modules

FAMILIES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}  # class by model_type
METHOD = ".self_attn.method."  # part of the name of a method's parameter
CODE = "modeling_method_llama"


def import_transformers():
    """Return the module transformers. Raise ValueError if it is not installed."""
    installed = importlib.util.find_spec("transformers")
    require(installed, "transformers is not installed. Run `pip install -r requirements-extras.txt`.")
    import transformers

    return transformers


def read_config(name: str | Path):
    """Return the configuration of a model. name: a folder, or a name on the hub.

    A converted model has the original configuration and the field RECORD. Raise OSError or ValueError if the model does
    not exist, and ValueError if it is of another family.
    """
    transformers = import_transformers()
    gguf = Path(name).suffix == ".gguf"
    require(not gguf, f"{name} is a GGUF file. Make a folder of it, as docs/huggingface.md shows.")
    fields, _ = transformers.PreTrainedConfig.get_config_dict(str(name))
    family = "llama" if RECORD in fields else fields.get("model_type")
    require(family in FAMILIES, f"{name} is a model of type {family}. Use a model of type {' or '.join(FAMILIES)}.")
    if record := fields.get(RECORD):
        fields["rope_parameters"] = record["rope_parameters"]
    fields["model_type"] = family
    return getattr(transformers, FAMILIES[family]).config_class.from_dict(fields)


def load_model(
    name: str | Path, *, dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu"
) -> nn.Module:
    """Return a model with its weights in this dtype ("auto": the stored dtype), on this device.

    A converted model gets its attention method. Raise as read_config does, and ValueError for missing weights.
    """
    from safetensors.torch import load_file

    # 1. The original model.
    device, config = torch.device(device), read_config(name)
    record = config.__dict__.pop(RECORD, None)
    model_class = getattr(import_transformers(), FAMILIES[config.model_type])
    model_class._keys_to_ignore_on_load_unexpected = [METHOD.replace(".", r"\.")]
    model, info = model_class.from_pretrained(
        str(name),
        config=config,
        dtype=dtype,
        device_map=None if device.type == "cpu" else {"": device},
        use_safetensors=True,
        attn_implementation="eager",
        output_loading_info=True,
    )

    # 2. The method of a converted model, and its parameters.
    missing = {*info["missing_keys"]}
    if record:
        convert(model, record["name"], train_length=record["train_length"], **record["options"])
        missing |= {key for key, _ in model.named_parameters() if METHOD in key}
        folder = name if Path(name).is_dir() else snapshot_download(str(name))
        for path in Path(folder).glob("*.safetensors"):
            learned = {key: value for key, value in load_file(path).items() if METHOD in key}
            model.load_state_dict(learned, strict=False)
            missing -= learned.keys()
    require(not missing, f"{name} lacks weights, such as {', '.join(sorted(missing)[:3])}. Download it again.")
    return model


def save_model(model: nn.Module, folder: str | Path):
    """Write a converted model with its code to a folder that load_model reads.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) reads it, too.
    """
    config, path = model.config, Path(folder) / "config.json"
    hook, config.rope_parameters = config.rope_parameters, getattr(config, RECORD)["rope_parameters"]
    with naming("write", Path(folder)):
        model.save_pretrained(folder)
    config.rope_parameters = hook
    names = {"AutoConfig": "MethodLlamaConfig", "AutoModelForCausalLM": "MethodLlamaForCausalLM"}
    fields = json.loads(path.read_text())
    fields |= {"model_type": "method_llama", "architectures": [names["AutoModelForCausalLM"]]}
    fields["auto_map"] = {auto: f"{CODE}.{name}" for auto, name in names.items()}
    replace_text(path, json.dumps(fields, indent=2) + "\n")
    for name, text in export_modules(f"scripts.hf.{CODE}").items():
        replace_text(Path(folder) / name, text)
