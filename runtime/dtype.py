"""Choose the dtype of the computation: on a CPU, the one in which this model trains faster there."""

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress

import torch

from configs.config import Config
from model.kernels import cpu
from runtime.build import build_model

ROUNDS = 5  # of which the fastest counts: the cores of a CPU are often shared with others
MOST_TOKENS = 1024


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation; parameters are float32 whatever it is.

    auto is bfloat16 on CUDA. On a CPU that multiplies bfloat16 it is what a measurement found faster, else float32.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        return torch.bfloat16
    seconds = layer_seconds(config) if cpu.multiplies_bfloat16() else {"float32": 0.0}
    return getattr(torch, min(seconds, key=seconds.get))


def explain_dtype(config: Config, device: torch.device) -> str:
    """Return the measurement that chose the dtype, in words for the log; "" where there was none."""
    if config.dtype != "auto" or device.type == "cuda" or not cpu.multiplies_bfloat16():
        return ""
    times = (f"{1e3 * seconds:.1f} ms in {name}" for name, seconds in layer_seconds(config).items())
    return f" (a layer and the head: {', '.join(times)})"


def layer_seconds(config: Config) -> dict[str, float]:
    """Return how long one layer and the head take in each dtype on this CPU, forward and backward, by its name.

    It is measured once for a processor, a number of threads and a shape, and kept beside the compiled kernel: a resumed
    run, and every process of one, must find the same dtype.
    """
    config = dataclasses.replace(config, num_layers=1, bf16_embedding=False, fp8_head=False)
    shape = config.vocab_size, config.num_heads, config.model_dim, config.train_length, config.method
    where = cpu.processor_flags(), torch.get_num_threads(), torch.__version__
    key = hashlib.sha256(json.dumps([*shape, config.method_options, *where]).encode()).hexdigest()[:16]
    path = cpu.cache_folder() / f"dtype-{key}.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        pass
    except ValueError:  # damaged
        path.unlink()
    measured = json.dumps(measure_layer(config))
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file, suppress(FileExistsError):
        file.write(measured)
        file.flush()
        os.link(file.name, path)  # unless another process was first: then its numbers count
    return json.loads(path.read_text())


def measure_layer(config: Config) -> dict[str, float]:
    """Return the seconds of layer_seconds, measured now, on one sequence of random tokens; no random state changes."""
    generator = torch.Generator().manual_seed(0)
    length = min(config.train_length, MOST_TOKENS)
    inputs, targets = torch.randint(config.vocab_size, (2, 1, length), generator=generator)
    with torch.random.fork_rng(devices=[]):
        models = {name: build_model(config, getattr(torch, name)) for name in ("float32", "bfloat16")}
    seconds = {name: float("inf") for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            began = time.perf_counter()
            model(inputs, targets).backward()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds
