"""Rotations have the papers' numbers. At far positions, rotations, a_t and m_t equal the reference."""

import pytest
import reference
import torch
from attention_cases import assert_near, attend, parse, random_qkv
from commands import parametrize
from test_methods import make
from torch.testing import assert_close


def test_frequencies_have_the_published_numbers():
    """The paper has the bases 40,890 and 167,200 of NTK for 4 and 16 times the training length."""
    for s, base in {1: 10_000, 4: 40_890, 16: 167_200}.items():
        assert reference.ntk_frequencies(128, s)[63].item() ** (-64 / 63) == pytest.approx(base, rel=2e-4)
    k, p_rope = torch.arange(64).double(), reference.half_truncate_frequencies(128)
    assert_close(p_rope, torch.where(k < 32, 1024 ** (-k / 31), 0))
    barbero = reference.barbero_frequencies(128, share=0.75)
    assert_close(barbero, torch.where(k < 48, 10_000 ** (-k / 64), 0))


@parametrize("train_length, low, high", [(4096, 20, 46), (16_384, 30, 55)])
def test_yarn_keeps_the_pairs_up_to_low_and_slows_those_from_high_on_by_s(train_length, low, high):
    theta, gain = reference.rotation("yarn", 128, train_length, 4 * train_length)
    share_kept = (theta / reference.rope_frequencies(128) - 1 / 4) / (3 / 4)
    assert_close(share_kept, ((high - torch.arange(64).double()) / (high - low)).clamp(0, 1))
    assert gain == pytest.approx(1.1386, rel=1e-4)  # in both q and k


@torch.no_grad()
@parametrize("head_dim, train_length, target_length, keys", [
    (16, 4096, 65_536, 65_536),
    (128, 4096, 16_384, 3000),
    (16, 65_536, 262_144, 3000),  # yarn's ramp ends beyond the last pair, so this pair keeps a part of its frequency
])
@parametrize("case", """rope | p_rope | p_rope form=barbero share=0.75 | rope_ntk | rope_ntk stretch=4.0
    | yarn | scale_invariant_p_rope | scale_invariant_nope tau=3.0""".split("|"))
def test_the_last_position_is_as_exact_as_in_float64(case, head_dim, train_length, target_length, keys):
    """One query over all keys. Angles computed in float32 would be wrong by up to 65535 * 2^-24 radians."""
    name, options = parse(case)
    q, k, v = (x.float() for x in random_qkv(1, head_dim, keys, batch=1))
    q = 4 * q[:, :, -1:]
    exact = [x.double() for x in (q, k, v)]
    known = dict(options, train_length=train_length, target_length=target_length)
    expected = reference.attend(name, *exact, q_offset=keys - 1, **known)
    method = make(name, 1, head_dim, train_length, **options)
    assert_near(attend(method, q, k, v, target_length=target_length), expected, 2e-5)
