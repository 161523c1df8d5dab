"""The rotary tables, read off the logits: which pair turns how fast, for which length, and how exactly far away."""

import numpy as np
import pytest
import reference
import torch
from attention_cases import attend, random_qkv
from test_methods import make as make_short
from torch.testing import assert_close

from model.attention.reference import attention_logits


def make(name, num_heads=1, head_dim=128, train_length=4096, **options):
    return make_short(name, num_heads, head_dim, train_length, **options)


@torch.no_grad()
def turning(method, target_length):
    """Return the radians a token of every pair, (D/2,), and the factor on its part of the logit, (D/2,).

    Probe k has a query of ones in x_k, and a key of ones in x_k or in x_(k+D/2). Their logits t tokens apart are
    cos(t theta_k) and -sin(t theta_k), times the factor over sqrt(D).
    """
    D, T = method.head_dim, 128
    probes = torch.eye(D, dtype=torch.float64)[:, None, None].expand(-1, 1, T, -1)  # (D, 1, T, D)
    queries = probes[: D // 2].repeat(2, 1, 1, 1)
    logits = attention_logits(method, queries, probes, target_length=target_length)[:, 0, -1].flip(-1)  # (D, t)
    cos, minus_sin = (logits * D**0.5).chunk(2)
    angle = np.unwrap(torch.atan2(-minus_sin, cos).numpy())  # (D/2, t); no pair turns by more than one radian a token
    factor = torch.hypot(cos, minus_sin)
    assert_close(factor, factor[:, :1].expand_as(factor), rtol=1e-6, atol=0)
    return torch.from_numpy(angle[:, -1] / (T - 1)), factor[:, 0]


def near(found, expected, rtol=1e-4, atol=0.0):
    assert_close(found, torch.as_tensor(expected).double().expand_as(found), rtol=rtol, atol=atol)


def test_rope_and_p_rope_turn_at_the_published_frequencies():
    k = torch.arange(64).double()
    rope, factor = turning(make("rope"), 65536)
    near(rope, 10000 ** (-k / 64), atol=1e-9)
    near(factor, 1, rtol=1e-6)
    p_rope, _ = turning(make("p_rope"), 65536)
    near(p_rope, torch.where(k < 32, 1024 ** (-k / 31), 0), rtol=1e-5)
    for share in (0.5, 0.75):
        barbero, _ = turning(make("p_rope", form="barbero", share=share), 4096)
        assert torch.equal(barbero, torch.where(k < 64 * share, rope, 0))


@pytest.mark.parametrize("name, options, target_length, base", [
    ("rope_ntk", {}, 4096, 10000),
    ("rope_ntk", {}, 16384, 40890),
    ("logn_ntk", {}, 65536, 167200),
    ("rope_ntk", dict(stretch=4.0), 4096, 10000),
    ("rope_ntk", dict(stretch=4.0), 65536, 40890),
])
def test_ntk_bases(name, options, target_length, base):
    theta, _ = turning(make(name, **options), target_length)
    k = torch.tensor([1, 63])
    near(theta[k] ** (-64 / k), base, rtol=2e-4)


@pytest.mark.parametrize("train_length, low, high", [(4096, 20, 46), (16384, 30, 55)])
def test_yarn_keeps_the_pairs_up_to_low_and_slows_those_from_high_on_by_s(train_length, low, high):
    theta, factor = turning(make("yarn", train_length=train_length), 4 * train_length)
    rope, _ = turning(make("rope", train_length=train_length), 4 * train_length)
    near(theta[: low + 1], rope[: low + 1])
    near(theta[high:], rope[high:] / 4)
    ramp = (theta / rope - 1 / 4) / (3 / 4)  # linear in k from 1 down to 0
    near(ramp[low : high + 1], torch.linspace(1, 0, high - low + 1), rtol=0, atol=1e-4)
    near(factor, 1.1386**2)  # in both q and k


def test_yarn_s_ramp_may_end_beyond_the_last_pair():
    """With D = 16 and 65536 tokens, high = 9 of 8 pairs. So even the last pair keeps a part of its frequency."""
    theta, _ = turning(make("yarn", head_dim=16, train_length=65536), 4 * 65536)
    expected = reference.yarn_frequencies(16, 4.0, 65536)
    assert expected[-1] > 10000 ** (-14 / 16) / 4 * 1.5
    near(theta, expected)


@pytest.mark.parametrize("name", ["rope", "p_rope", "rope_ntk", "yarn"])
def test_position_65535_is_rotated_as_in_float64(name):
    """One sharp query over 65536 keys; angles computed in float32 would be wrong by up to 65535 * 2^-24 radians."""
    q, k, v = (x.detach().float() for x in random_qkv(1, 16, 65536, batch=1))
    q = 4 * q[:, :, -1:]
    expected = reference.attend(name, q.double(), k.double(), v.double(), train_length=4096, q_offset=65535)
    near(attend(make(name, head_dim=16), q, k, v).double(), expected, rtol=0, atol=2e-5)
