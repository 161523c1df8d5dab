"""When a run validates and on how much, in each profile; and what that costs."""

import dataclasses
from functools import partial

from commands import parametrize
from pytest import approx

from configs.presets import preset
from measure.flops import attention_flops_per_token, forward_flops_per_token, validation_share
from measure.validation import validation_gaps, validation_plan

FULL = 10_485_760
ALL = dict.fromkeys((4096, 16_384, 65_536), FULL)
MATRICES = 12 * 768**2 * 12 + 768 * 50304
FORWARD = {T: 2 * MATRICES + 2 * 768 * (T + 1) * 12 for T in ALL}  # FLOPs a token
PAPER = preset("gpt_162m_4k")
changed = partial(dataclasses.replace, PAPER)


def plans(config):
    """Return the plans of all validations of a run, by step."""
    by_step = {step: validation_plan(config, step) for step in range(config.steps + 1)}
    return {step: plan for step, plan in by_step.items() if plan}


def test_the_paper_validates_at_all_lengths_in_full_every_125_steps():
    assert plans(PAPER) == dict.fromkeys([*range(0, 4578, 125), 4578], ALL)


def test_fast_validates_the_other_lengths_on_a_quarter_every_500_steps():
    often, seldom = {16_384: FULL}, {4096: FULL // 4, 16_384: FULL, 65_536: FULL // 4}
    expected = dict.fromkeys(range(0, 4578, 125), often) | dict.fromkeys(range(0, 4578, 500), seldom)
    assert plans(dataclasses.replace(preset("gpt_162m_16k"), val_profile="fast")) == expected | {4578: ALL}


@parametrize("profile", ["paper", "fast", "light"])
def test_without_val_every_all_profiles_validate_at_the_end_only(profile):
    assert plans(changed(val_every=0, val_profile=profile)) == {4578: ALL}


def test_light_validates_short_lengths_and_gaps_on_a_sixteenth():
    config = changed(train_length=512, batch_tokens=512, val_profile="light", val_copy_gaps=(256, 1024, 1025))
    light = {4096: FULL // 16}
    assert plans(config) == dict.fromkeys(range(0, 4578, 125), light) | {4578: ALL}
    assert validation_gaps(config, light, last=False) == [256, 1024]  # at most twice the training length
    assert validation_gaps(config, ALL, last=True) == [256, 1024, 1025]
    twice = dataclasses.replace(config, val_lengths=2 * config.val_lengths)
    assert validation_gaps(twice, ALL, last=True) == [256, 1024, 1025]


@parametrize("lengths, tokens, part", [
    ((64, 96), 960, 192),
    ((64, 96), 384, 192),
    ((16, 48), 48, 48),
])
def test_a_part_is_whole_sequences_of_every_length(lengths, tokens, part):
    config = changed(val_profile="fast", val_lengths=lengths, val_tokens=tokens)
    assert validation_plan(config, 0) == dict.fromkeys(lengths, part)


def test_share_of_the_training_flops():
    """Forward, a token costs 2 (12 d^2 L + d V) + 2 d (T + 1) L: 1.455 GFLOP at 64k."""
    assert FORWARD[65_536] == approx(1.4551e9, rel=1e-4)
    training = 4578 * 524_288 * 3 * FORWARD[4096]
    share = 38 * FULL * sum(FORWARD.values()) / training
    assert validation_share(PAPER) == approx(share, rel=1e-12) and share == approx(0.399, abs=5e-4)
    others = FORWARD[16_384] + FORWARD[65_536]
    expected = (38 * FORWARD[4096] + (10 / 4 + 1) * others) * FULL / training
    assert validation_share(changed(val_profile="fast")) == approx(expected, rel=1e-12)


def test_the_share_counts_other_methods_beyond_the_training_length():
    at = {T: validation_share(changed(val_lengths=(T,))) for T in ALL}
    share = validation_share(changed(method="rope", validate_as=("rope_ntk", "yarn")))
    assert share == approx(at[4096] + 3 * (at[16_384] + at[65_536]), rel=1e-12)


def test_flops_of_wider_queries_and_keys():
    """PoPE's are twice as wide, v is not: one and a half times the operations."""
    wide, plain = (attention_flops_per_token(changed(method=method), 256) for method in ("pope", "rope"))
    assert 2 * wide == 3 * plain


@parametrize("length", [1, 31, 32, 33, 256])
def test_flops_of_windows_and_gates(length):
    """Windows cost as many FLOPs as pairs that are seen, counted one by one. Gates cost a matrix product."""
    windowed = changed(num_layers=5, method="rope+window,rope", method_options=dict(window=32))
    distances = [i - j for i in range(length) for j in range(i + 1)]
    near = sum(distance < 32 for distance in distances)
    expected = 4 * 768 * (3 * near + 2 * len(distances)) // length
    assert attention_flops_per_token(windowed, length) == expected
    more = forward_flops_per_token(changed(method="p_rope+gate"), length) - forward_flops_per_token(PAPER, length)
    assert more == 2 * 12 * 768**2
