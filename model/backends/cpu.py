"""Our kernel for CPUs (model/kernels/cpu.py): every method, tile by tile in the core's cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from model.backends.base import EXTRAS, Call, find_unsupported
from model.context import local_shard
from model.kernels import cpu
from model.methods.base import Method, ScoreChange


class Prepared(NamedTuple):
    tables: Tensor  # a_t and m_t by distance, (2, 1 or H, Tk): see make_tables
    window: int | None = None


def find_problem(method: Method, device: torch.device, dtype: torch.dtype) -> str | None:
    return find_unsupported(method, tuple(EXTRAS)) or cpu.find_problem(device, dtype)


def prepare(score_change: ScoreChange | None, call: Call, earlier: Prepared | None = None) -> Prepared:
    tables = cpu.make_tables(score_change, call.num_heads, call.head_dim, call.key_length)
    return Prepared(local_shard(tables, 1, call.context), call.window)


def run(
    q: Tensor, k: Tensor, v: Tensor, *,
    q_offset: int = 0, prepared: Prepared | None = None, key_bias: Tensor | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    tables, window = prepared or Prepared(cpu.make_tables(None, 1, q.shape[3], k.shape[2]))
    more = {name: x if x is None else x.float() for name, x in (("key_bias", key_bias), ("sink", sink))}
    return cpu.cpu_attention(q, k, v, tables, q_offset=q_offset, window=window, **more)
