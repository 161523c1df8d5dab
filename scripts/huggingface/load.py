"""Reads models of Hugging Face's, from a folder or from the hub: configuration, tokenizer and weights.

Nothing that a model brings along runs: its code is never trusted, keys of its configuration that name code are left
out, and weights are read from safetensors alone. What the user can put right is a ValueError of one line. transformers
is optional here: it is imported when the first of these functions needs it.
"""

import json
import math
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from errors import require

FAMILIES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}  # class by model_type
# Keys that name code to run, or say how weights are stored that are not plain numbers.
NOT_OURS = ("auto_map", "attn_implementation", "experts_implementation")
RECORD = "attention_method"  # the field of a configuration where a conversion is written down
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def import_transformers():
    """Return the module transformers. ValueError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        install = "pip install -r requirements-extras.txt"
        raise ValueError(f"this needs transformers, which cannot be imported ({error}): {install}") from error
    return transformers


@contextmanager
def reading(name: str, what: str):
    """Make of what goes wrong while `what` of a model is read a ValueError of one line."""
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    kinds = OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, SafetensorError
    kinds += (hub.StrictDataclassError,)
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except kinds as error:
        page, chain = f"https://huggingface.co/{name}", [error]
        while chain[-1].__cause__ or chain[-1].__context__:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)

        def caused_by(kind):
            return any(isinstance(one, kind) for one in chain)

        if caused_by(hub.GatedRepoError):
            words = f"{name} is gated: ask for access at {page}, then log in with `hf auth login`"
        elif caused_by(hub.RepositoryNotFoundError):
            words = f"the hub has no model {name}, or it is private: look at the name, or log in with `hf auth login`"
        elif caused_by(hub.HFValidationError):
            words = f"{name} is neither a folder here nor a name on the hub, such as meta-llama/Llama-2-7b-hf"
        elif caused_by((hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled)):
            words = (
                f"{name} is no folder here, not in the cache, and the hub cannot be reached: connect, or give a folder"
            )
        else:
            words = f"{what} of {name} cannot be read: {' '.join(str(error).split())[:300] or repr(error)}"
        raise ValueError(words) from error


def read_config(name: str, **changes):
    """Return the configuration of a model, a folder or a name on the hub, with these fields changed.

    That of a converted model (attention.py) is that of the model before, and its field RECORD.
    ValueError for a model that is not there or not to be had, of an unsupported family, or quantised, for a damaged
    configuration and for unknown fields.
    """
    transformers, name = import_transformers(), str(name)
    if Path(name).is_dir():
        require((Path(name) / "config.json").is_file(), f"{name} is not a model's folder: it has no config.json")
    with reading(name, "the configuration"):
        fields, _ = transformers.PreTrainedConfig.get_config_dict(name)
        require(isinstance(fields, Mapping), "config.json holds no object")
    family = fields.get("model_type")
    known = isinstance(family, str) and family in FAMILIES
    require(known, f"{name} is of the family {family}, which is not supported: {' and '.join(FAMILIES)} are")
    require(not fields.get("quantization_config"), f"{name} is quantised: give the model that it was made from")
    fields = {key: value for key, value in fields.items() if key not in NOT_OURS and not key.startswith("_")}
    if record := fields.get(RECORD):
        known = isinstance(record, Mapping) and isinstance(record.get("rope_parameters"), Mapping)
        require(known, f"the configuration of {name} is damaged: what it says of {RECORD} is no record of a conversion")
        fields["rope_parameters"] = record["rope_parameters"]
    with reading(name, "the configuration"):
        config = model_class(family).config_class.from_dict(fields)
    for key, value in changes.items():
        require(hasattr(config, key), f"the configuration of {name} has no field {key}")
        setattr(config, key, value)
    return config


def read_tokenizer(name: str, vocab_size: int | None = None):
    """Return a model's own tokenizer. ValueError if there is none to be had, or if it has more than vocab_size ids."""
    transformers, name = import_transformers(), str(name)
    with reading(name, "the tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    fits = vocab_size is None or len(tokenizer) <= vocab_size
    require(fits, f"the tokenizer of {name} has {len(tokenizer)} ids, its model {vocab_size}: they are of two models")
    return tokenizer


def model_class(family: str) -> type[nn.Module]:
    """Return the class of a causal language model, by its model_type, one of FAMILIES."""
    return getattr(import_transformers(), FAMILIES[family])


def meta_model(config) -> nn.Module:
    """Return the model of a configuration on the meta device: shapes without memory."""
    with torch.device("meta"):
        return model_class(config.model_type)(config)


def count_parameters(config) -> int:
    """Return the number of parameters, those that are used twice counted once."""
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a device, infinite where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf
    group = Path("/sys/fs/cgroup")  # of a container, which may be allowed less than the machine has
    for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        paths = [group / f"memory.{x}" if limit == "max" else group / "memory" / f"memory.{x}" for x in (limit, used)]
        try:
            free = min(free, int(paths[0].read_text()) - int(paths[1].read_text()))
        except (OSError, ValueError):  # no such file, or no limit
            pass
    return free


def check_memory(name: str, needed: float, device: torch.device | str, what: str = "weights"):
    """Say on stderr how many bytes are needed and how many the device has free; ValueError if these are fewer."""
    device = torch.device(device)
    free = free_memory(device)
    words = f"the {what} of {name} need {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} GiB free"
    print(words, file=sys.stderr)
    require(needed <= free, f"{words}: take a larger machine, a smaller model or a smaller dtype")


def check_index(name: str):
    """Raise ValueError if the index of a model's files names others than safetensors, which would be opened too."""
    with reading(name, "the index of the weights"):
        path = import_transformers().utils.cached_file(
            name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False
        )
        files = json.loads(Path(path).read_text())["weight_map"].values() if path else ()
        others = sorted(file for file in set(files) if not file.endswith(".safetensors"))
    require(not others, f"{name} has weights that are not in safetensors ({', '.join(others[:3])})")


def load_model(
    name: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", device_map=None, **changes
) -> nn.Module:  # fmt: skip
    """Return a model with its weights in this dtype, on this device, ready to be trained or run.

    changes: of fields of the configuration. device_map: accelerate's, such as "auto", to spread a model over GPUs, host
    memory and disk; else all of it must fit the device: that is checked, and said on stderr, before anything is loaded.
    ValueError as in read_config, and for weights that are missing, damaged, not in safetensors, or too large.
    """
    device, config = torch.device(device), read_config(name, **changes)
    converted = getattr(config, RECORD, None)
    require(not converted, f"{name} was converted to another attention method: load it with load_converted")
    if device_map is None:
        with reading(str(name), "the configuration"):
            needed = count_parameters(config) * dtype.itemsize
        check_memory(name, needed, device)
        device_map = None if device.type == "cpu" else {"": device}
    check_index(str(name))
    with reading(str(name), "the weights"):
        model, info = model_class(config.model_type).from_pretrained(
            str(name), config=config, dtype=dtype, device_map=device_map, use_safetensors=True,
            attn_implementation="eager" if config.model_type == "gemma2" else "sdpa",  # never one that a folder names
            output_loading_info=True,
        )  # fmt: skip
    missing = sorted(info["missing_keys"])
    require(not missing, f"{name} lacks {len(missing)} of its weights, among them {', '.join(missing[:3])}")
    return model
