"""Loads converted models (attention.py) that save_pretrained has written."""

from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from errors import require
from scripts.huggingface.attention import attention_layers, convert
from scripts.huggingface.load import RECORD, import_transformers, load_model, read_config, reading


def load_converted(folder: Path | str, **how) -> nn.Module:
    """Return the converted model in a folder, with what its method has learned, and the factors of rescale.

    how: see load_model. ValueError as there, for a model that is not a converted one, and for a damaged folder.
    """
    record = getattr(read_config(folder), RECORD, None)
    require(record, f"{folder} is no converted model: load it with load_model")
    with reading(str(folder), f"the configuration's {RECORD}"):
        name, train_length, options = str(record["name"]), int(record["train_length"]), dict(record["options"])
    with without_warnings():  # of weights that the model before the conversion does not have
        model = load_model(folder, **{RECORD: None}, **how)
    convert(model, name, train_length=train_length, **options)
    tensors = method_tensors(Path(folder))
    with torch.no_grad():
        for number, layer in enumerate(attention_layers(model)):
            prefix = f"model.layers.{number}.self_attn."
            for own, parameter in layer.method.named_parameters():
                stored = tensors.get(f"{prefix}method.{own}")
                fits = stored is not None and stored.shape == parameter.shape
                require(fits, f"{folder} lacks {prefix}method.{own}, which {name} learns, or has it in another shape")
                parameter.copy_(stored)
            factor = tensors.get(f"{prefix}score_factor")
            if factor is not None:
                layer.score_factor = factor.to(layer.q_proj.weight.device)
    return model


@contextmanager
def without_warnings():
    """Let transformers report errors alone."""
    logging = import_transformers().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def method_tensors(folder: Path) -> dict[str, Tensor]:
    """Return by name the tensors of a folder that are a method's."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with reading(str(folder), path.name), safe_open(path, "pt") as file:
            names = [name for name in file.keys() if ".self_attn.method." in name or name.endswith(".score_factor")]
            found |= {name: file.get_tensor(name) for name in names}
    return found
