"""Loads Hugging Face models, from a folder or the hub: configuration, tokenizer, weights.

No code of a model is run: weights come from safetensors alone, and keys that name code are dropped. transformers is an
optional dependency, so it is imported when it is first needed.
"""

from pathlib import Path

import psutil
import torch
from torch import nn

from errors import require
from scripts.hf.attention import FAMILIES, RECORD, convert

NAMES_CODE = ("auto_map", "attn_implementation", "experts_implementation")  # keys of a configuration
METHOD = ".self_attn.method."  # in the names of parameters that a method has learned
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def import_transformers():
    """Return the module transformers. Raises ValueError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        message = f"transformers cannot be imported ({error}). Run `pip install -r requirements-extras.txt`."
        raise ValueError(message) from error
    return transformers


def read_config(name: str | Path, **changes):
    """Return the configuration of a model, a folder or a name on the hub, with changed fields.

    That of a converted model is the original's, with the field RECORD.
    Raises OSError if there is no such model, ValueError if it is of another family, quantised or damaged.
    """
    transformers, name = import_transformers(), str(name)
    fields, _ = transformers.PreTrainedConfig.get_config_dict(name)
    family = fields.get("model_type")
    require(family in FAMILIES, f"{name} is of the model family {family}. Use {' or '.join(FAMILIES)}.")
    require(not fields.get("quantization_config"), f"{name} is quantised. Use the model it was made from.")
    fields = {key: value for key, value in fields.items() if key not in NAMES_CODE and not key.startswith("_")}
    if record := fields.get(RECORD):
        fields["rope_parameters"] = record["rope_parameters"]
    return model_class(family).config_class.from_dict(fields | changes)


def read_tokenizer(name: str | Path, vocab_size: int):
    """Return a model's own tokenizer. Raises OSError without one, ValueError if it has more than vocab_size ids."""
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
    message = f"the tokenizer of {name} has {len(tokenizer)} ids, its model {vocab_size}. Use files of one model."
    require(len(tokenizer) <= vocab_size, message)
    return tokenizer


def model_class(family: str) -> type[nn.Module]:
    """Return the class of a causal language model, by its model_type, one of FAMILIES."""
    return getattr(import_transformers(), FAMILIES[family])


def meta_model(config) -> nn.Module:
    """Return the model of a configuration on the meta device: shapes without memory."""
    with torch.device("meta"):
        return model_class(config.model_type)(config)


def check_memory(name: str, needed: float, device: torch.device):
    """Raise ValueError if a device has fewer than `needed` bytes free."""
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
    message = f"{name} needs {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB free"
    require(needed <= free, f"{message}. Use more memory, a smaller model or shorter sequences.")


def load_model(
    name: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    device_map: str | dict | None = None, **changes,
) -> nn.Module:  # fmt: skip
    """Return a model with its weights in this dtype, on this device. A converted model has its method.

    changes: fields of the configuration. device_map: accelerate's, such as "auto", spreads a model over GPUs, host
    memory and disk; without it, all of the model must fit the device. Raises as read_config does, and ValueError for
    weights that are missing or too large.
    """
    device, config = torch.device(device), read_config(name, **changes)
    record = config.__dict__.pop(RECORD, None)
    if device_map is None:
        check_memory(str(name), dtype.itemsize * sum(p.numel() for p in meta_model(config).parameters()), device)
        device_map = None if device.type == "cpu" else {"": device}
    own_class = model_class(config.model_type)
    own_class._keys_to_ignore_on_load_unexpected = [METHOD.replace(".", r"\.")]
    model, info = own_class.from_pretrained(
        str(name), config=config, dtype=dtype, device_map=device_map, use_safetensors=True,
        attn_implementation="eager" if config.model_type == "gemma2" else "sdpa", output_loading_info=True,
    )  # fmt: skip
    missing = sorted(info["missing_keys"])
    require(not missing, f"{name} lacks {len(missing)} weights, such as {', '.join(missing[:3])}. Get it again.")
    if record:
        convert(model, record["name"], train_length=record["train_length"], **record["options"])
        load_method(model, Path(name))
    return model


def load_method(model: nn.Module, folder: Path):
    """Load the learned parameters of a converted model's method. Raises ValueError if the folder lacks some."""
    from safetensors import safe_open

    stored = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            stored |= {key: file.get_tensor(key) for key in file.keys() if METHOD in key}
    lacking = sorted({key for key, _ in model.named_parameters() if METHOD in key} - stored.keys())
    require(not lacking, f"{folder} lacks {len(lacking)} weights, such as {', '.join(lacking[:3])}. Get it again.")
    model.load_state_dict(stored, strict=False)
