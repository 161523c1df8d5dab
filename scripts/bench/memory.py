"""Count the memory that training and validation need on a GPU, without one.

    python -m scripts.memory gpt_162m_4k gpt_162m_64k
    python -m scripts.memory gpt_304m_4k --length 65536 --tokens 65536

The real model, loss, backward pass and optimizers run on fake tensors, which have shapes and storages but no memory.
Every storage counts from the operation that makes it until nothing refers to it any more, and so do the logits inside
the loss. This is a count and not a measurement, of eager execution: an upper bound of what torch.compile needs, which
keeps fewer intermediate results. The CUDA context, the workspace of PyTorch's own kernels and the gaps that the
allocator leaves are not in it. Attention is counted as PyTorch's fused one; our Triton kernel keeps the same: its
output, and a float32 a query and head.

Where there is a GPU, the same steps run on it, compiled as in training, and torch.cuda.max_memory_allocated is printed.
"""

import argparse
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.config import Config
from configs.presets import preset
from errors import exit_on_user_error
from model.attention.sdpa import prefer_fast_sdpa
from model.loss import LOGIT_BYTES
from runtime.build import build_model, build_optimizers, compile_model, train_step
from runtime.device import choose_compile, device_name
from runtime.processes import World, start_processes
from scripts.shared.tables import markdown_table


class StorageCount(TorchDispatchMode):
    """Bytes of the storages that operations under it have made and that something refers to, now and at most.

    It counts fake tensors as well as real ones. It does not see what an operation allocates for itself alone: for those
    operations `workspace` has a function of their arguments that returns the bytes.
    """

    def __init__(self, workspace: dict[torch._ops.OpOverload, Callable[..., int]]):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()
        self.workspace = workspace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                weakref.finalize(storage, self.add, -storage.nbytes())
                self.add(storage.nbytes())
        if func in self.workspace:
            self.peak = max(self.peak, self.live + self.workspace[func](*args))
        return result

    def add(self, size: int):
        self.live += size
        self.peak = max(self.peak, self.live)

    def start(self):
        self.peak = self.live


def loss_workspace(x: Tensor, head: Tensor, *_) -> int:
    """Return the bytes that model/loss.py takes on a GPU: a chunk of logits, the head in x's dtype, and a chunk's
    gradient of it."""
    logits = len(x) * len(head) * x.element_size()
    return min(logits, LOGIT_BYTES) + 2 * head.numel() * x.element_size()


class CudaMemory(contextlib.nullcontext):
    """What StorageCount has, by PyTorch's own account of the current GPU."""

    live = property(lambda self: torch.cuda.memory_allocated())
    peak = property(lambda self: torch.cuda.max_memory_allocated())
    start = staticmethod(torch.cuda.reset_peak_memory_stats)


def count_memory(config: Config, device: torch.device) -> list[dict]:
    """Return a row of bytes for a training step and one for a validation pass at each length, measured on a GPU.

    activations: what the forward pass keeps for the backward pass. peak: everything that is there at once, also what is
    in none of the columns. The step has two micro-batches: the gradients of the first are there during the second.
    """
    if device.type == "cuda":
        prefer_fast_sdpa(device)
        return run_steps(config, device, CudaMemory(), choose_compile(config.compile, device)[0])
    ops = torch.ops.scale_invariant
    workspace = dict.fromkeys((ops.loss_and_gradients.default, ops.token_losses.default), loss_workspace)
    with FakeTensorMode(), StorageCount(workspace) as memory:
        return run_steps(config, device, memory)


def run_steps(config: Config, device: torch.device, memory, compiled: str | None = None) -> list[dict]:
    """Return the rows of count_memory, of real steps under `memory`, a StorageCount or CudaMemory."""
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)  # as on the GPU that is meant
    with device:
        model = build_model(config, dtype)
    backend = config.attention_backend
    if device.type == "cpu":  # stands for a GPU: what our kernel for CPUs allocates is not the question
        backend = "sdpa"
        for block in model.blocks:
            method = block.attention.method
            method.score_change = method.key_bias = method.window = method.sink = None
    world = World.alone(device)
    optimizers = build_optimizers(config, model, bool(compiled), world)
    compiled_model = compile_model(model, compiled)

    def batch(length: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(2, max(1, config.micro_batch_tokens // length), length, dtype=torch.int64, device=device)

    def describe(work: str, inputs: Tensor, **sizes: int) -> dict:
        return dict(work=work, length=inputs.shape[1], sequences=len(inputs), **sizes, peak=memory.peak)

    plan, micro_batch = model.plan(config.train_length, backend=backend), batch(config.train_length)
    step = functools.partial(train_step, compiled_model, [micro_batch] * 2, plan, optimizers, 1.0, world)
    step()  # makes the optimizer state, and compiles
    before = memory.live
    loss = compiled_model(*micro_batch, plan=plan)
    activations = memory.live - before
    del loss
    memory.start()
    step()
    parameters = storage_bytes(list(model.parameters()))
    held = dict(parameters=parameters, state=storage_bytes(optimizers.state_dict()))
    rows = [describe("training", micro_batch[0], **held, gradients=parameters, activations=activations)]
    for length in config.val_lengths:
        plan, micro_batch = model.plan(length, backend=backend), batch(length)
        with torch.no_grad():  # under inference_mode composite operations are counted as one
            for _ in range(2 if compiled else 1):
                memory.start()
                compiled_model(*micro_batch, plan=plan, per_token=True)
        rows.append(describe("validation", micro_batch[0], **held, gradients=0, activations=0))
    return rows


def storage_bytes(tensors) -> int:
    return sum(x.untyped_storage().nbytes() for x in tree_leaves(tensors) if isinstance(x, Tensor))


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.memory", description=__doc__.split("\n")[0])
    parser.add_argument("presets", nargs="+", metavar="PRESET", help="of configs/presets.py")
    parser.add_argument("--length", type=int, help="training length (default: the preset's)")
    parser.add_argument("--tokens", type=int, help="tokens computed at once (default: the preset's micro_batch_tokens)")
    args = parser.parse_args()
    with exit_on_user_error():
        changes = dict(train_length=args.length, micro_batch_tokens=args.tokens)
        changes = {field: value for field, value in changes.items() if value is not None}
        configs = {name: dataclasses.replace(preset(name), dtype="bfloat16", **changes) for name in args.presets}
        device = start_processes("auto").device
    heads = ["parameters", "gradients", "state", "activations", "peak"]
    table = [["preset", "", "sequences", *heads]]
    for name, config in configs.items():
        for row in count_memory(config, device):
            what = [name, "{work} at {length}".format(**row), str(row["sequences"])]
            table.append(what + [f"{row[head] / 2**30:.2f}" for head in heads])
    how = "counted on fake tensors, in eager execution; not measured"
    if device.type == "cuda":
        how = f"measured on {device_name(device)}"
    print(f"GiB, {how}; bfloat16; torch {torch.__version__}\n\n{markdown_table(table)}")
