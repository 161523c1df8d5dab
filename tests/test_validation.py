"""When a run validates and on how much, in both profiles; and what that costs."""

import dataclasses

import pytest

from configs.config import Config
from configs.presets import preset
from measure.flops import attention_flops_per_token, forward_flops_per_token, validation_share
from measure.validation import validation_plan
from scripts.shared.runs import val_tokens

FULL = 10_485_760


def fast(config: Config) -> Config:
    return dataclasses.replace(config, val_profile="fast")


def test_the_paper_validates_at_all_lengths_in_full_every_125_steps():
    config = preset("gpt_162m_4k")
    plans = {step: validation_plan(config, step) for step in range(4579)}
    assert [step for step, plan in plans.items() if plan] == [*range(0, 4578, 125), 4578]
    assert all(plan in ({}, {4096: FULL, 16_384: FULL, 65_536: FULL}) for plan in plans.values())


def test_fast_validates_the_other_lengths_on_a_quarter_every_500_steps():
    config = fast(preset("gpt_162m_16k"))
    part, full = FULL // 4, {4096: FULL, 16_384: FULL, 65_536: FULL}
    expected = {step: {16_384: FULL} for step in range(0, 4578, 125)}
    expected |= {step: {4096: part, 16_384: FULL, 65_536: part} for step in range(0, 4578, 500)} | {4578: full}
    plans = {step: validation_plan(config, step) for step in range(4579)}
    assert {step: plan for step, plan in plans.items() if plan} == expected


def test_without_val_every_both_validate_at_the_end_only():
    for config in (preset("quickstart"), fast(preset("quickstart"))):
        plans = [validation_plan(config, step) for step in range(config.steps + 1)]
        assert plans == [*[{}] * config.steps, dict.fromkeys((256, 1024, 4096), config.val_tokens)]


@pytest.mark.parametrize("lengths, tokens, part", [((64, 96), 960, 192), ((64, 96), 384, 192), ((16, 48), 48, 48)])
def test_a_part_is_whole_sequences_of_every_length(lengths, tokens, part):
    config = dataclasses.replace(Config(), val_profile="fast", val_lengths=lengths, val_tokens=tokens)
    assert validation_plan(config, 0) == dict.fromkeys(lengths, part)


def test_share_of_the_training_flops():
    """Forward, a token costs 2 (12 d^2 L + d V) + 2 d (T + 1) L: 1.455 GFLOP at 64k."""
    config = preset("gpt_162m_4k")
    forward = {T: 2 * (12 * 768**2 * 12 + 768 * 50304) + 2 * 768 * (T + 1) * 12 for T in (4096, 16_384, 65_536)}
    assert forward[65_536] == pytest.approx(1.4551e9, rel=1e-4)
    training = 4578 * 524_288 * 3 * forward[4096]
    assert validation_share(config) == pytest.approx(38 * FULL * sum(forward.values()) / training, rel=1e-12)
    assert validation_share(config) == pytest.approx(0.399, abs=5e-4)
    others = forward[16_384] + forward[65_536]
    expected = (38 * forward[4096] + (10 / 4 + 1) * others) * FULL / training
    assert validation_share(fast(config)) == pytest.approx(expected, rel=1e-12)


def test_flops_of_wider_queries_and_keys():
    """PoPE's are twice as wide, v is not: one and a half times the operations."""
    wide, plain = (dataclasses.replace(preset("mini"), method=method) for method in ("pope", "rope"))
    assert 2 * attention_flops_per_token(wide, 256) == 3 * attention_flops_per_token(plain, 256)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 256])
def test_flops_of_windows_and_gates(length):
    """Windows cost as many FLOPs as pairs that are seen, counted one by one. Gates cost a matrix product."""
    full = preset("mini")
    windowed = dataclasses.replace(full, num_layers=5, method="rope+window,rope", method_options=dict(window=32))
    seen = [sum(i - j < window for i in range(length) for j in range(i + 1)) for window in (32, length)]
    expected = 4 * full.model_dim * (3 * seen[0] + 2 * seen[1]) // length
    assert attention_flops_per_token(windowed, length) == expected
    rest = forward_flops_per_token(full, length) - attention_flops_per_token(full, length)
    gated = dataclasses.replace(full, method="p_rope+gate")
    more = 2 * full.num_layers * full.model_dim**2
    assert forward_flops_per_token(gated, length) - attention_flops_per_token(gated, length) == rest + more


def test_the_share_counts_other_methods_beyond_the_training_length():
    config = preset("gpt_162m_4k")
    others = dataclasses.replace(config, method="rope", validate_as=("rope_ntk", "yarn"))
    at = {T: validation_share(dataclasses.replace(config, val_lengths=(T,))) for T in config.val_lengths}
    assert validation_share(others) == pytest.approx(at[4096] + 3 * (at[16_384] + at[65_536]), rel=1e-12)


def test_tokens_of_records_of_before_the_profiles():
    assert val_tokens(dict(val_loss={"16": 1.0, "64": 2.0}, val_tokens=128)) == {"16": 128, "64": 128}
    assert val_tokens(dict(val_loss={"16": 1.0}, val_tokens={"16": 64})) == {"16": 64}
