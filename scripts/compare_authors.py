"""Compare attention methods with code of others on random inputs, run beside ours in float64: values and gradients.

    python -m scripts.compare_authors fla CHECKOUT      CHECKOUT: the folder of a clone of its repository

Only the functions named here are taken out of their files, so that what their packages import need not be there
(einops must be, for fla and pope). Casts to float32, theirs and ours, are widened to float64. See results/authors.md.
"""

import __future__

import ast
import math
import sys
import types
from collections import namedtuple
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from errors import exit_on_user_error, require
from model.attention import attend
from model.methods import LearnedSink, SlidingWindow, make_method
from model.methods.base import Method

B, H, T, D = 2, 4, 150, 32  # more than two blocks of 64 tokens, the last one not full


def take(file: Path, *names: str, **namespace) -> list:
    """Return functions or classes of a file, which see these names, each other, and what such code often imports."""
    require(file.is_file(), f"there is no {file}: give the name of a comparison and a clone of its repository")
    parts = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", None) in names]
    namespace |= dict(
        torch=torch, F=F, nn=nn, math=math, Tensor=torch.Tensor, Parameter=nn.Parameter, __name__="theirs"
    )
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(parts, []), str(file), "exec", flags=flags, dont_inherit=True), namespace)
    return [namespace[name] for name in names]


def from_einops():
    try:
        import einops
    except ImportError:
        raise ValueError("einops is not installed: pip install einops") from None
    return vars(einops)


def ours(method, *qkv, x=None):
    return attend(method.double(), *qkv, x=x, backend="blocks")  # plain PyTorch, which runs in float64


def softmax_attention(logits, v):
    return logits.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(dim=-1) @ v


def by_token(*tensors):
    return [x.transpose(1, 2) for x in tensors]  # (B, H, T, ...) <-> (B, T, H, ...)


def fresh(name):
    """Return a method whose parameters are random, of the size 1 over the root of their inputs."""
    method = make_method(name, num_heads=H, head_dim=D, train_length=T).double()
    for parameter in method.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return method


def fla(checkout, q, k, v, x):
    method = fresh("fox")
    (fox,) = take(checkout / "fla/ops/forgetting_attn/naive.py", "naive_forgetting_attn", **from_einops())
    yield "fox", *by_token(fox(*by_token(q, k, v, method.of_tokens(x)))), ours(method, q, k, v, x=x)


def stick_breaking(checkout, q, k, v, x):
    (theirs,) = take(checkout / "stickbreaking_attention/sb_ref.py", "stickbreaking")
    output, left = theirs(q, k, v, torch.ones(T, T).triu().bool(), torch.ones(T, T).tril(-1))
    yield "stick_breaking", output + left.unsqueeze(-1) * v, ours(fresh("stick_breaking"), q, k, v)


def pope(checkout, q, k, v, x):
    others = dict(cat=torch.cat, autocast=torch.autocast, slice_right_at_dim=lambda x, length, dim: x)  # as q is whole
    names = dict(PolarEmbedReturn=namedtuple("PolarEmbedReturn", "freqs bias"), **others)
    turn, *_ = take(checkout / "PoPE_pytorch/pope.py", "apply_pope_to_qk", "exists", **from_einops(), **names)
    angles, method = torch.outer(torch.arange(T) * 1.0, 1e4 ** -(torch.arange(D) / D)), fresh("pope")
    new_q, new_k = turn((angles, method.rotation.delta), q, k)
    yield "pope", softmax_attention(new_q @ new_k.mT / D**0.5, v), ours(method, q, k, v)


def kerple(checkout, q, k, v, x):
    names = dict(get_model_parallel_world_size=lambda: 1, get_model_parallel_rank=lambda: 0)
    kinds = take(checkout / "megatron/mpu/layers.py", "ParallelKerpleLog", "ParallelKerplePower", **names)
    arguments = types.SimpleNamespace(num_attention_heads=H, pos_emb="kerple_power_ap_", params_dtype=q.dtype)
    for name, kind in zip(("kerple_log", "kerple_power"), kinds):
        with mock.patch("torch.cuda.current_device", lambda: "cpu"):
            penalty, method = kind(arguments), fresh(name)
        change = method.score_change
        p = change.log_p.exp() if name == "kerple_log" else 2 * change.logit_p.sigmoid()
        penalty.bias_a.data, penalty.bias_p.data = (n.data[:, None, None] for n in (change.log_a.exp(), p))
        yield name, softmax_attention(penalty(q @ k.mT / D**0.5), v), ours(method, q, k, v)
    (alibi,) = take(checkout / "megatron/model/positional_embeddings.py", "AliBi")  # of another paper, but there
    yield "alibi", softmax_attention(alibi(H, 1, 0)(q @ k.mT / D**0.5), v), ours(fresh("alibi"), q, k, v)


def fire(checkout, q, k, v, x):
    (kind,) = take(checkout / "cramming/architectures/embeddings.py", "FIRE")
    for name, threshold in (("fire", 512.0), ("fire, a threshold of 20 tokens", 20.0)):  # beyond all tokens, among them
        theirs, method = kind(H, init_L=threshold, eps=0.0).eval(), fresh("fire")
        learned, (first, _, last) = method.replacement, theirs.mlp
        learned.threshold = threshold
        theirs.c.data, theirs.L_multiplier.data = 0.1 * learned.log_c.data.exp(), learned.log_threshold.data.exp()
        for weight, one in ((first.weight[:, 0], "slope"), (first.bias, "offset"), (last.weight, "output")):
            weight.data.copy_(getattr(learned, one).data.squeeze(0))
        yield name, softmax_attention(q @ k.mT / D**0.5 + theirs(T, "cpu"), v), ours(method, q, k, v)


def gpt_oss(checkout, q, k, v, x):
    (sdpa,) = take(checkout / "gpt_oss/torch/model.py", "sdpa")
    for window in (T, 37):
        mechanisms = LearnedSink(H, D, T, sink_init=0.7), SlidingWindow(H, D, T, window=window)
        method = Method("own", H, D, T, mechanisms).double()
        rows = [sdpa(q.unsqueeze(2), k, v, method.sink.logit, D**-0.5, window) for q, k, v in zip(*by_token(q, k, v))]
        yield f"sink, window {window}", *by_token(torch.stack(rows).unflatten(-1, (H, D))), ours(method, q, k, v)


def largest_difference(one, other):
    return (one - other).abs().max().item()


def main(argv: list[str]):
    comparisons = {compare.__name__: compare for compare in (fla, stick_breaking, pope, kerple, fire, gpt_oss)}
    require(len(argv) == 2 and argv[0] in comparisons, f"usage: {'|'.join(comparisons)} CHECKOUT")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((B, H, T, D),) * 3 + ((B, T, H * D),)]
    for name, *outputs in comparisons[argv[0]](Path(argv[1]), *inputs):
        weights = torch.randn(outputs[0].shape)
        gradients = (torch.autograd.grad(y, inputs, weights, materialize_grads=True) for y in outputs)
        apart = max(map(largest_difference, *gradients))
        print(f"{name}: outputs {largest_difference(*outputs):.1e} apart, gradients {apart:.1e}")


if __name__ == "__main__":
    wide = mock.patch.multiple(torch, float=torch.float64, float32=torch.float64)
    with exit_on_user_error(), wide, mock.patch("torch.Tensor.float", torch.Tensor.double):
        main(sys.argv[1:])
