"""Chooses the backend that runs a method. On CUDA a backend is compared with float64 before its first use.

backend      computes                                used by `auto` for
sdpa         PyTorch's fused causal attention        CUDA: methods that do not change the score (LogN is in q)
flex         FlexAttention, compiled                 CUDA: all other methods; no gradients on a CPU
flex_flash   FlexAttention by FlashAttention-4       nothing; Hopper and Blackwell
cpu          our C++ kernel                          CPU, float32: every softmax but with skip_first
blocks       plain PyTorch, blocks of queries        whatever no other backend runs
"""

import functools

import torch

from errors import UserError, did_you_mean
from model.attention import check
from model.attention.backend import Backend
from model.attention.blocks import Blocks
from model.attention.cpu import CPU
from model.attention.flex import Flex, FlexFlash
from model.attention.sdpa import SDPA
from model.methods.base import AttentionWeights, Method

BACKENDS: dict[str, Backend] = {kind.name: kind() for kind in (SDPA, Flex, FlexFlash, CPU, Blocks)}
AUTOMATIC = {"cuda": ("sdpa", "flex"), "cpu": ("cpu",)}  # by device, the preferred first; blocks after them


def choose_backend(
    method: Method,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    name: str = "auto",
    documents: bool = False,
) -> tuple[Backend, str]:
    """Return the backend that will run, and a reason for the log. On CUDA it has passed its check.

    Methods with AttentionWeights run in `blocks`, whatever the name. documents: attention stays within documents.
    Raise UserError for a named backend that cannot run or fails its check, if no backend passes, and for a method that
    cannot stay within documents.
    """
    if documents:
        method.check_documents()
    if isinstance(method.replacement, AttentionWeights):
        return BACKENDS["blocks"], "plain PyTorch"

    # 1. A wrong backend that the user named ends the run: its gradients would spoil weeks of training without a sign.
    # A kernel under development can raise its limits by error_factor.
    if name != "auto":
        if name not in BACKENDS:
            raise UserError(f"unknown attention backend {name!r}. {did_you_mean(name, ['auto', *BACKENDS])}")
        problem, result = check_once(name, method, device, dtype, documents)
        if problem:
            other, _ = choose_backend(method, device, dtype, documents=documents)
            raise UserError(f"attention_backend {name} cannot run: {problem}. Use {other.name}.")
        return BACKENDS[name], result or "as asked for"

    # 2. Otherwise the first backend that can run.
    reasons = []
    for candidate in (*AUTOMATIC.get(device.type, ()), "blocks"):
        problem, result = check_once(candidate, method, device, dtype, documents)
        if problem is None:
            found = filter(None, (result, *reasons))
            return BACKENDS[candidate], "; ".join(found) or f"the first choice on {device.type}"
        reasons.append(f"{candidate} cannot run: {problem}")
    raise UserError(f"No attention backend is right for {method.name} on {device}: {'; '.join(reasons)}. Use a CPU.")


def check_once(name: str, method: Method, device: torch.device, dtype: torch.dtype, documents: bool) -> check.Checked:
    """Return the reason why a backend cannot run or fails its check, or None; and the check's result for the log."""
    if reason := BACKENDS[name].unsupported(method, device, dtype):
        return check.Checked(reason)
    if documents and not BACKENDS[name].masks_documents:
        return check.Checked("it cannot keep attention within documents")
    # A check takes seconds on a CPU. The tests cover the backends there, and the doctor makes the check.
    if device.type != "cuda" or not torch.cuda.is_available() or torch.compiler.is_compiling():
        return check.Checked(None)
    return cached_check(BACKENDS[name], method, device, dtype, documents=documents)


@functools.lru_cache(maxsize=16)  # not again for each length, or each prompt
def cached_check(*arguments, documents: bool) -> check.Checked:
    return check.check_backend(*arguments, documents=documents)
