"""Presets, validation and hash of the configuration, and how it is read from the command line."""

import dataclasses
import re

import pytest
import torch
from commands import exit_code
from test_methods import NAMES, assert_refused

from configs.command_line import read_config
from configs.config import NOT_HASHED, Config, config_hash
from configs.presets import PRESETS, preset
from data.loader import micro_batch_size, rank_sequences
from errors import did_you_mean
from optim.schedule import lr_factor
from runtime.build import build_model

FIELDS = [field.name for field in dataclasses.fields(Config)]


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("name", ["quickstart", "mini_large", "gpt_162m_4k", "gpt_304m_4k"])  # every shape
def test_every_preset_builds_with_every_method(name, method):
    with torch.device("meta"):
        model = build_model(dataclasses.replace(preset(name), method=method), torch.bfloat16)
    assert len(model.blocks) == preset(name).num_layers


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("name", PRESETS)
def test_a_step_divides_among_processes(name, processes):
    config = preset(name)
    if name in ("mini_1024", "mini_4096", "far"):  # four, two and one sequence: these are for a CPU
        processes = min(processes, config.batch_tokens // config.train_length)
    size = micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, processes)
    assert config.batch_tokens % (size * config.train_length * processes) == 0
    assert size * config.train_length <= config.micro_batch_tokens


def test_the_304m_step_is_four_micro_batches_of_14_sequences_on_4_devices():
    config = preset("gpt_304m_4k")
    assert config.batch_tokens == 224 * config.train_length
    assert micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, 4) == 14


@pytest.mark.parametrize("processes, sizes", [(3, 8), (5, 7), (7, 7)])  # 128 sequences, at most 8 in a micro-batch
def test_shares_that_are_prime_have_few_micro_batches(processes, sizes):
    ranks = [micro_batch_size(128 * 4096, 4096, 8 * 4096, processes, rank) for rank in range(processes)]
    assert max(ranks) <= 8 and ranks[0] == sizes
    shares = [len(rank_sequences(128 * 4096, 4096, rank, processes)) for rank in range(processes)]
    assert [-(-share // size) for share, size in zip(shares, ranks)] == [-(-share // 8) for share in shares]


def learning_rates(config, steps):
    schedule = dict(steps=config.steps, schedule=config.schedule, warmup_steps=config.warmup_steps,
                    cooldown_steps=config.cooldown_steps)
    return [lr_factor(step, **schedule) for step in steps]


@pytest.mark.parametrize("name, train_length", [("gpt_162m_4k", 4096), ("gpt_162m_16k", 16384),
                                                  ("gpt_162m_64k", 65536)])
def test_the_162m_presets_are_the_paper_s(name, train_length):
    """Appendix "Further experimental details"."""
    c = preset(name)
    assert (c.num_layers, c.model_dim, c.num_heads, c.vocab_size, c.train_length) == (12, 768, 6, 50304, train_length)
    assert (c.muon_lr, c.muon_momentum, c.embedding_lr, c.head_lr, c.scalar_lr) == (0.02, 0.95, 0.3, 0.002, 0.002)
    assert (c.adam_betas, c.method_options, c.position_scale) == ((0.9, 0.95), {}, 1)
    assert (c.steps, c.batch_tokens) == (4578, 8 * 65536)
    assert c.steps * c.batch_tokens == pytest.approx(2.4e9, rel=1e-3)
    assert learning_rates(c, [0, 3269, 3270, 3270 + 654, 4577]) == pytest.approx([1, 1, 1, 0.5, 1 / 1308])
    assert (c.val_lengths, c.val_tokens, c.val_every) == ((4096, 16384, 65536), 10_485_760, 125)


def test_the_304m_preset_is_the_paper_s():
    c, small = preset("gpt_304m_4k"), preset("gpt_162m_4k")
    assert (c.num_layers, c.model_dim, c.num_heads, c.train_length) == (16, 1024, 8, 4096)
    assert c.muon_lr == pytest.approx(0.015)
    for field in ("vocab_size", "muon_momentum", "embedding_lr", "head_lr", "scalar_lr", "adam_betas", "val_lengths"):
        assert getattr(c, field) == getattr(small, field)
    assert (c.steps, c.val_every) == (10_900, 250)
    assert c.steps * c.batch_tokens == pytest.approx(1e10, rel=1e-3)
    assert learning_rates(c, [0, 5450, 10_900]) == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("method, part, option, of_the_paper, scaled", [
    ("rope", "rotation", "base", 10_000, 625),
    ("yarn", "rotation", "base", 10_000, 625),
    ("p_rope", "rotation", "base", 1024, 64),
    ("scale_invariant_p_rope", "score_change", "tau", 10, 10),
    ("alibi", "score_change", "slope_scale", 1, 16),
    ("log_offset", "query_scale", "offset", 500, 31.25),
])
@pytest.mark.parametrize("name", ["mini", "mini_4096"])
def test_lengths_in_tokens_are_scaled_by_the_same_factor_at_every_training_length(name, method, part, option,
                                                                                  of_the_paper, scaled):
    config = dataclasses.replace(preset(name), method=method)

    def value(config):
        with torch.device("meta"):
            return getattr(getattr(build_model(config, torch.float32).blocks[0].attention.method, part), option)

    assert value(config) == scaled
    assert value(dataclasses.replace(config, position_scale=1.0)) == of_the_paper
    assert value(dataclasses.replace(config, method_options={option: 7.0})) == 7  # options are taken as they are


def test_mini_presets_differ_in_the_training_length_alone():
    mini = preset("mini")
    for length in (1024, 4096):
        assert preset(f"mini_{length}") == dataclasses.replace(mini, train_length=length)
    assert mini.cooldown_steps == round(640 * 1308 / 4578)


@pytest.mark.parametrize("arguments, field, value", [
    (["mini", "--steps", "90"], "cooldown_steps", 26),
    (["mini", "--steps", "90", "--cooldown_steps", "7"], "cooldown_steps", 7),
    (["mini", "--cooldown_steps", "7"], "steps", 640),
    (["quickstart", "--steps", "100"], "length_schedule", (32, 20, 64, 40)),
    (["quickstart", "--steps", "100", "--length_schedule", "64", "20"], "cooldown_steps", 29),
    (["quickstart", "--steps", "2"], "length_schedule", (64, 1)),
])
def test_steps_alone_leave_cooldown_and_length_schedule_their_share(arguments, field, value):
    assert getattr(read_config(arguments), field) == value


OTHER = dict(
    name="other", runs_dir="elsewhere", seed=1, resume="auto", on_nonfinite="skip", timeout=60.0,
    tags=("a",), group="sweep", wandb="offline", wandb_project="other",
    method="rope", method_options=dict(tau=3.0), position_scale=0.5, validate_as=("yarn",), vocab_size=50432,
    num_layers=11, num_heads=12, model_dim=384, data_dir="data/fineweb100B", train_length=16_384,
    length_schedule=(4096, 8), batch_tokens=262_144,
    micro_batch_tokens=65_536, steps=4577, schedule="trapezoid", warmup_steps=1, cooldown_steps=1000, muon_lr=0.015,
    muon_momentum=0.9, embedding_lr=0.2, head_lr=0.003, scalar_lr=0.003, adam_betas=(0.9, 0.99), adam_eps=1e-9,
    val_lengths=(4096,), val_tokens=65_536, val_every=250, val_profile="fast",
    device="cpu", dtype="bfloat16", compile="off", attention_backend="blocks", save_every=0,
    keep=1, init_from="runs/x", val_copy_gaps=(32, 512), val_far_windows=8,
)


HASHED = set("""
    seed init_from method method_options position_scale
    vocab_size num_layers num_heads model_dim train_length length_schedule batch_tokens
    steps schedule warmup_steps cooldown_steps muon_lr muon_momentum embedding_lr head_lr scalar_lr adam_betas adam_eps
""".split())


def test_every_field_is_mathematics_or_not():
    assert set(OTHER) == set(FIELDS) == HASHED | NOT_HASHED


def other_value(field):
    """A change of this field, and of the field without which it is refused."""
    return {field: OTHER[field]} | (dict(schedule="trapezoid") if field == "warmup_steps" else {})


@pytest.mark.parametrize("field", FIELDS)
def test_the_hash_changes_with_mathematics_alone(field):
    other = dataclasses.replace(Config(), **other_value(field))
    assert (config_hash(other) == config_hash(Config())) == (field not in HASHED)


def test_the_hashes_of_single_changes_all_differ():
    changed = [config_hash(dataclasses.replace(Config(), **other_value(field))) for field in HASHED]
    assert len(set(changed)) == len(changed)


def test_the_hash_does_not_depend_on_the_order_of_options():
    options = dict(tau=3.0, base=500.0, form="barbero")
    backwards = dict(reversed(options.items()))
    assert config_hash(Config(method_options=options)) == config_hash(Config(method_options=backwards))


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("field, value", [
    *((field, 0) for field in ("vocab_size", "num_layers", "num_heads", "model_dim", "train_length", "batch_tokens",
                               "micro_batch_tokens", "val_tokens", "keep", "timeout", "adam_eps")),
    *((field, -1) for field in ("seed", "steps", "warmup_steps", "cooldown_steps", "val_every", "save_every")),
    *((field, value) for field in ("muon_lr", "embedding_lr", "head_lr", "scalar_lr", "adam_eps", "timeout",
                                   "position_scale", "muon_momentum") for value in (-0.1, NAN, INFINITY)),
    ("warmup_steps", 1), ("cooldown_steps", 4579), ("length_schedule", (8,)), ("length_schedule", (8, 4578)),
    ("length_schedule", (8192, 1)), ("train_length", 4097),
    ("seed", 2**63), ("keep", 10**400), ("num_layers", 10**10), ("muon_momentum", 1.0), ("adam_betas", (0.9, NAN)),
    ("seed", "0"), ("muon_lr", None), ("val_lengths", [4096]),  # as a user's sweep may have them
    ("num_heads", 7), ("val_lengths", ()), ("val_lengths", (0,)),
    *(("name", value) for value in ("a/b", "..", ".hidden", "a b", "-x", "a\n", "x" * 201)),
])
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(field, value):
    with assert_refused(field):
        Config(**{field: value})


@pytest.mark.parametrize("arguments, field, value", [
    (["--method_options", "tau", "3"], "method_options", dict(tau=3)),
    (["--method_options", "tau", "-0.5", "form", "barbero", "delta", "True"], "method_options",
     dict(tau=-0.5, form="barbero", delta=True)),
    (["--val_lengths", "256", "1024"], "val_lengths", (256, 1024)),
    (["--steps=7", "--cooldown_steps=0", "--length_schedule"], "length_schedule", ()),
    (["--muon_lr", "3e-2"], "muon_lr", 0.03),
    (["--adam_betas", ".8", ".99"], "adam_betas", (0.8, 0.99)),
    (["--group=--x"], "group", "--x"),
    (["--timeout", "60"], "timeout", 60.0),
    (["--steps", "3", "--steps=4"], "steps", 4),
    (["--name", "mine"], "name", "mine"),
    ([], "name", "quickstart-scale_invariant_p_rope-s0"),
    (["--method", "rope", "--seed", "3"], "name", "quickstart-rope-s3"),
])
def test_a_field_is_set_by_its_name(arguments, field, value):
    result = getattr(read_config(["quickstart", *arguments]), field)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("arguments, wrong, right", [
    (["quickstar"], "quickstar", "quickstart"),
    (["quickstart", "--stpes", "3"], "--stpes", "--steps"),
    (["quickstart", "--val-lengths=256"], "--val-lengths", "--val_lengths"),
    (["quickstart", "--tags", "a", "-steps", "4"], "-steps", "--steps"),
    (["quickstart", "--method", "p_ropee"], "p_ropee", "p_rope"),
])
def test_an_unknown_name_is_refused_with_the_nearest(arguments, wrong, right):
    with assert_refused(wrong, right):
        build_model(read_config(arguments), torch.float32)


@pytest.mark.parametrize("arguments, named", [
    (["--steps", "many"], "--steps"),
    (["--steps"], "--steps"),
    (["--steps", "4", "stray"], "stray"),
    (["--steps", "-1"], "steps"),
    (["--device=tpu"], "--device"),
    (["--adam_betas", "0.9"], "--adam_betas"),
    (["--val_lengths", "8", "x"], "--val_lengths"),
    (["--method_options", "tau", "3", "base"], "--method_options"),
])
def test_a_bad_value_on_the_command_line_is_refused_in_one_line(arguments, named, capsys):
    with assert_refused(named):
        read_config(["quickstart", *arguments])
    assert capsys.readouterr().err == ""


def test_near_names_are_suggested_for_an_unknown_name():
    close = did_you_mean("tua", ["base", "tau"], "see there")
    assert "tau" in close and "base" not in close
    several = did_you_mean("rope", ["p_rope", "ropes", "base"])
    assert several.index("ropes") < several.index("p_rope") and "base" not in several
    all_names = did_you_mean("x", ["base", "tau"])
    assert "base" in all_names and "tau" in all_names
    assert did_you_mean("x", ["base", "tau"], "see there") == "see there"


def test_help_lists_every_field_and_without_a_preset_the_presets(capsys):
    assert exit_code(read_config, ["quickstart", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert all(f"--{field}" in output for field in FIELDS)
    assert re.search(r"--keep\b[^(]*\(default: 2\)", output)
    assert re.search(r"--adam_betas\b[^(]*\(default: 0.9 0.95\)", output)
    assert exit_code(read_config, ["--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in PRESETS)
