"""Presets, validation and hash of the configuration, and how it is read from the command line."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_methods import NAMES, assert_refused

from configs.command_line import read_config
from configs.config import NOT_MATHEMATICS, Config, config_hash, setting
from configs.presets import PRESETS, preset
from data.loader import micro_batch_size
from errors import did_you_mean
from optim.schedule import lr_factor
from runtime.build import build_model

ROOT = Path(__file__).parent.parent
FIELDS = [field.name for field in dataclasses.fields(Config)]

every_preset = pytest.mark.parametrize("name", PRESETS)
small_models = dict(vocab_size=64, num_layers=1, num_heads=2, model_dim=32, train_length=8, batch_tokens=64,
                    val_lengths=(8, 16), val_tokens=64, steps=1, cooldown_steps=0)


# ---- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NAMES)
@every_preset
def test_every_preset_builds_with_every_method(name, method):
    with torch.device("meta"):
        model = build_model(dataclasses.replace(preset(name), method=method), torch.bfloat16)
    assert len(model.blocks) == preset(name).num_layers


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@every_preset
def test_a_step_divides_among_processes(name, processes):
    config = preset(name)
    if name in ("mini_1024", "mini_4096"):  # two sequences and one: these are for a CPU
        processes = min(processes, config.batch_tokens // config.train_length)
    size = micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, processes)
    assert config.batch_tokens % (size * config.train_length * processes) == 0
    assert size * config.train_length <= config.micro_batch_tokens


@pytest.mark.parametrize("name, sequences", [("gpt_162m_4k", 128), ("gpt_162m_16k", 32), ("gpt_162m_64k", 8),
                                             ("gpt_304m_4k", 224)])
def test_sequences_in_a_step(name, sequences):
    assert preset(name).batch_tokens == sequences * preset(name).train_length


def test_the_304m_step_is_two_micro_batches_of_28_sequences_on_4_devices():
    config = preset("gpt_304m_4k")
    assert micro_batch_size(config.batch_tokens, config.train_length, config.micro_batch_tokens, 4) == 28


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
])
@pytest.mark.parametrize("name", ["mini", "mini_1024", "mini_4096", "mini_large"])
def test_what_is_a_length_in_tokens_is_scaled_at_small_scale(name, method, part, option, of_the_paper, scaled):
    """And by the same factor at all training lengths of the scale, as the paper keeps one base and one tau."""
    config = dataclasses.replace(preset(name), method=method)

    def value(config):
        with torch.device("meta"):
            return getattr(getattr(build_model(config, torch.float32).blocks[0].attention.method, part), option)

    assert value(config) == scaled
    assert value(dataclasses.replace(config, position_scale=1.0)) == of_the_paper
    assert value(dataclasses.replace(config, method_options={option: 7.0})) == 7  # what is given is taken as it is


def test_mini_presets_differ_in_the_training_length_alone():
    """As in the paper: the same bases, tokens a step and steps."""
    mini = preset("mini")
    for length in (1024, 4096):
        assert preset(f"mini_{length}") == dataclasses.replace(mini, train_length=length)
    paper = preset("gpt_162m_4k")
    assert preset("gpt_162m_16k") == dataclasses.replace(paper, train_length=16_384)
    assert mini.val_tokens // max(mini.val_lengths) > 2 and mini.cooldown_steps == round(640 * 1308 / 4578)


@pytest.mark.parametrize("arguments, steps, warmup, cooldown", [
    (["--steps", "90"], 90, 0, 26),
    (["--steps=320"], 320, 0, 92),
    (["--steps", "90", "--cooldown_steps", "7"], 90, 0, 7),
    (["--cooldown_steps", "7"], 640, 0, 7),
    (["--steps", "1"], 1, 0, 0),
])
def test_steps_alone_leave_the_cooldown_its_share(arguments, steps, warmup, cooldown):
    config = read_config(["mini", *arguments])
    assert (config.steps, config.warmup_steps, config.cooldown_steps) == (steps, warmup, cooldown)


# ---- hash ------------------------------------------------------------------------------------------------------------

OTHER = dict(
    name="other", runs_dir="elsewhere", seed=1, resume="auto", force=True, on_nonfinite="skip", timeout=60.0,
    tags=("a",), group="sweep", wandb="offline", wandb_project="other",
    method="rope", method_options=dict(tau=3.0), position_scale=0.5, validate_as=("yarn",), vocab_size=50432,
    num_layers=11, num_heads=12, model_dim=384, data_dir="data/fineweb100B", train_length=16_384,
    length_schedule=(4096, 8), batch_tokens=262_144,
    micro_batch_tokens=65_536, steps=4577, schedule="trapezoid", warmup_steps=1, cooldown_steps=1000, muon_lr=0.015,
    muon_momentum=0.9, embedding_lr=0.2, head_lr=0.003, scalar_lr=0.003, adam_betas=(0.9, 0.99), adam_eps=1e-9,
    val_lengths=(4096,), val_tokens=65_536, val_every=250, val_profile="fast",
    device="cpu", dtype="bfloat16", compile="off", attention_backend="blocks", save_every=0,
    keep=1, init_from="runs/x", val_copy_gaps=(32, 512),
)


MATHEMATICS = set("""
    seed init_from method method_options position_scale
    vocab_size num_layers num_heads model_dim train_length length_schedule batch_tokens
    steps schedule warmup_steps cooldown_steps muon_lr muon_momentum embedding_lr head_lr scalar_lr adam_betas adam_eps
""".split())


def test_every_field_is_mathematics_or_not():
    assert set(OTHER) == set(FIELDS) == MATHEMATICS | NOT_MATHEMATICS


def other_value(field):
    """A change of this field, and of the fields without which it is refused."""
    needs = dict(warmup_steps=dict(schedule="trapezoid"), schedule=dict(cooldown_steps=0))
    return {field: OTHER[field]} | needs.get(field, {})


@pytest.mark.parametrize("base", [Config(), preset("quickstart")], ids=["default", "quickstart"])
@pytest.mark.parametrize("field", FIELDS)
def test_the_hash_changes_with_mathematics_alone(field, base):
    base = dataclasses.replace(base, model_dim=1536, train_length=4096, batch_tokens=524_288, position_scale=1.0,
                               val_tokens=131_072, val_lengths=(4096, 16_384))
    other = dataclasses.replace(base, **other_value(field))
    assert (config_hash(other) == config_hash(base)) == (field not in MATHEMATICS)


def test_steps_alone_leave_the_length_schedule_its_share():
    assert read_config(["quickstart", "--steps", "100"]).length_schedule == (32, 20, 64, 40)
    assert read_config(["quickstart", "--steps", "2"]).length_schedule == (64, 1)


def test_the_hashes_of_single_changes_all_differ():
    changed = [config_hash(dataclasses.replace(Config(), **other_value(field)))
               for field in MATHEMATICS]
    assert len(set(changed)) == len(changed)


def test_the_hash_does_not_depend_on_the_order_of_options():
    options = dict(tau=3.0, base=500.0, form="barbero")
    backwards = dict(reversed(options.items()))
    assert config_hash(Config(method_options=options)) == config_hash(Config(method_options=backwards))


def test_the_hash_is_the_same_in_every_process():
    code = "from configs.config import *; from configs.presets import *; print(*map(config_hash, map(preset, PRESETS)))"
    for seed in ("1", "2"):
        output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True,
                                         env=os.environ | dict(PYTHONHASHSEED=seed))
        assert output.split() == [config_hash(preset(p)) for p in PRESETS]


# ---- validation ------------------------------------------------------------------------------------------------------

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("field, value", [
    *((field, value) for field in ("vocab_size", "num_layers", "num_heads", "model_dim", "train_length", "batch_tokens",
                                   "micro_batch_tokens", "steps", "val_tokens", "keep") for value in (0, -1)),
    *((field, -1) for field in ("seed", "warmup_steps", "cooldown_steps", "val_every",
                                "save_every")),
    *((field, value) for field in ("muon_lr", "embedding_lr", "head_lr", "scalar_lr", "adam_eps", "timeout")
      for value in (-0.1, NAN, INFINITY)),
    *(("position_scale", value) for value in (0.0, -1.0, NAN, INFINITY)),
    ("validate_as", ("yarn", "yarn")), ("validate_as", "yarn"), ("warmup_steps", 1), ("schedule", "cosine"),
    ("cooldown_steps", 4579), ("length_schedule", (8,)), ("length_schedule", (8192, 1)), ("length_schedule", (8, 4578)),
    ("adam_eps", 0.0), ("timeout", 0.0), ("timeout", 1e12), ("seed", 2**63), ("keep", 10**400), ("name", "x" * 300),
    # of another type, as a config.json may have it
    ("num_heads", 2.0), ("steps", True), ("seed", "0"), ("muon_lr", "0.1"), ("force", 1), ("name", None),
    ("tags", "ab"), ("tags", (1,)),
    ("method", ("rope",)), ("method_options", ()), ("method_options", dict(tau=dict())), ("method_options", {3: 3}),
    ("val_lengths", [4096]), ("val_lengths", (4096.0,)), ("adam_betas", (0.9,)), ("adam_betas", 0.9),
    ("dtype", "float16"), ("device", ["cpu"]), ("resume", True),
    *(("muon_momentum", value) for value in (-0.1, 1.0, NAN)),
    *(("adam_betas", value) for value in ((0.9, 1.0), (-0.1, 0.95), (0.9, NAN))),
    ("num_heads", 7), ("model_dim", 770), ("train_length", 4097), ("batch_tokens", 524_289), ("val_tokens", 10_485_761),
    ("val_lengths", ()), ("val_lengths", (0,)), ("val_lengths", (4096, -4096)), ("val_lengths", (4096, 4096)),
    *(("name", value) for value in ("a/b", "..", ".hidden", "a b", "-x", "a\n")),
])
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(field, value):
    with assert_refused(field):
        Config(**{field: value})


def test_a_new_field_brings_its_limits_along():
    @dataclasses.dataclass(frozen=True)
    class Wider(Config):
        dropouts: tuple[float, ...] = setting((0.0,), at_least=0, less_than=1)

    assert Wider(dropouts=(0, 0.5)).dropouts == (0, 0.5)
    with assert_refused("dropouts must be less than 1, got"):
        Wider(dropouts=(0.5, 1.0))
    with assert_refused("dropouts must be at least 0, got"):
        Wider(dropouts=(NAN,))


def test_a_limit_that_does_not_exist_is_an_error():
    with pytest.raises(AssertionError, match="at_lest.*at_least"):
        setting(1, at_lest=1)


number = st.integers(-2, 70) | st.sampled_from([2**31, 2**63])
real = st.floats() | st.sampled_from([0.0, 0.02, 0.95])
VALUES = {field.name: number if field.type is int else real if field.type is float else st.just(OTHER[field.name])
          for field in dataclasses.fields(Config)}
VALUES |= dict(name=st.text(max_size=5), adam_betas=st.tuples(real, real), val_lengths=st.lists(number).map(tuple))


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_any_values_make_a_config_or_a_value_error(values):
    try:
        config = dataclasses.replace(Config(**small_models), **values)
    except ValueError as error:
        assert "\n" not in str(error) and any(field in str(error) for field in [*values, "validation length"])
    else:
        assert len(config_hash(config)) == 12


@settings(max_examples=60, deadline=None)
@example(method="rope_ntk", num_layers=1, num_heads=1, head_dim=2, train_length=1, sequences=1, position_scale=1.0)
@given(method=st.sampled_from(NAMES), num_layers=st.integers(1, 2), num_heads=st.integers(1, 3),
       head_dim=st.integers(1, 18), train_length=st.integers(1, 9), sequences=st.integers(1, 3),
       position_scale=st.sampled_from([1.0, 1.0, 1 / 16, 1e-9, 1e9]))
def test_any_valid_small_config_trains_or_is_a_value_error(method, num_layers, num_heads, head_dim, train_length,
                                                           sequences, position_scale):
    config = Config(**small_models | dict(
        method=method, num_layers=num_layers, num_heads=num_heads, model_dim=num_heads * head_dim,
        train_length=train_length, batch_tokens=sequences * train_length, position_scale=position_scale,
    ))
    try:
        model = build_model(config, torch.float32)
    except ValueError as error:
        assert "\n" not in str(error)
        assert head_dim % 4 or position_scale < 1e-3  # only rotary embeddings may refuse these
        return
    tokens = torch.arange(sequences * 4 * train_length).view(sequences, -1) % config.vocab_size
    loss = model(tokens, tokens)  # at four times the training length
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(64.0).log().item(), rel=1e-5)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# ---- the command line ------------------------------------------------------------------------------------------------


def test_a_preset_alone_is_that_preset_with_a_name():
    config = read_config(["quickstart"])
    assert config == dataclasses.replace(preset("quickstart"), name="quickstart-scale_invariant_p_rope-s0")


@pytest.mark.parametrize("arguments, field, value", [
    (["--method_options", "tau", "3"], "method_options", dict(tau=3)),
    (["--method-options", "tau", "0.5", "form", "barbero"], "method_options", dict(tau=0.5, form="barbero")),
    (["--method_options", "delta", "True"], "method_options", dict(delta=True)),
    (["--val_lengths", "256", "1024"], "val_lengths", (256, 1024)),
    (["--val-lengths", "512"], "val_lengths", (512,)),
    (["--steps=7", "--cooldown_steps=0", "--length_schedule"], "steps", 7),
    (["--muon_lr", "3e-2"], "muon_lr", 0.03),
    (["--adam_betas", ".8", ".99"], "adam_betas", (0.8, 0.99)),
    (["--tags", "a", "b"], "tags", ("a", "b")),
    (["--tags=a", "b"], "tags", ("a", "b")),
    (["--tags"], "tags", ()),
    (["--group=--x"], "group", "--x"),
    (["--group", "-1"], "group", "-1"),
    (["--method_options", "tau", "-1e-3", "base", "-inf"], "method_options", dict(tau=-0.001, base=-INFINITY)),
    (["--timeout", "60"], "timeout", 60.0),
    (["--steps", "3", "--steps=4"], "steps", 4),
    (["--name", "mine"], "name", "mine"),
    (["--method", "rope", "--seed", "3"], "name", "quickstart-rope-s3"),
])
def test_a_field_is_set_by_its_name(arguments, field, value):
    result = getattr(read_config(["quickstart", *arguments]), field)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize("arguments, wrong, right", [
    (["quickstar"], "quickstar", "quickstart"),
    (["gpt_162m"], "gpt_162m", "gpt_162m_"),
    (["quickstart", "--stpes", "3"], "--stpes", "--steps"),
    (["quickstart", "--method-option", "tau", "3"], "--method_option", "--method_options"),
    (["quickstart", "--val_length=256"], "--val_length", "--val_lengths"),
])
def test_an_unknown_preset_or_field_is_refused_with_the_nearest(arguments, wrong, right):
    with assert_refused(wrong, f"did you mean.*{right}"):
        read_config(arguments)


def test_an_unknown_method_is_refused_with_the_nearest():
    with assert_refused("p_ropee", "did you mean.*p_rope"):
        build_model(read_config(["quickstart", "--method", "p_ropee"]), torch.float32)


@pytest.mark.parametrize("arguments", [["--steps", "many"], ["--device", "tpu"], ["stray"]])
def test_a_bad_value_on_the_command_line_is_one_line(arguments, capsys):
    with pytest.raises(ValueError, match=rf"^[^\n]*{arguments[0]}[^\n]*; --help lists all fields$"):
        read_config(["quickstart", *arguments])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments, takes", [
    (["--steps"], "INT, got ''"),
    (["--steps", "4", "stray"], "INT, got '4 stray'"),
    (["--device=tpu"], "auto|cpu|cuda, got 'tpu'"),
    (["--adam_betas", "0.9"], "FLOAT FLOAT, got '0.9'"),
    (["--val_lengths", "8", "x"], "INT ..., got '8 x'"),
    (["--method_options", "tau", "3", "base"], "NAME VALUE ..., got 'tau 3 base'"),
    (["--force", "True"], "no value, got 'True'"),
    (["--no_force", "False"], "no value, got 'False'"),
])
def test_a_bad_value_is_answered_with_what_the_field_takes(arguments, takes):
    with assert_refused(re.escape(f"{arguments[0].split('=')[0]} takes {takes}; --help lists all fields")):
        read_config(["quickstart", *arguments])


def test_what_is_suggested_for_an_unknown_name():
    assert did_you_mean("tua", ["base", "tau"], "see there") == "did you mean tau?"
    assert did_you_mean("rope", ["p_rope", "ropes", "base"]) == "did you mean ropes or p_rope?"
    assert did_you_mean("x", ["base", "tau"]) == "there are: base, tau"
    assert did_you_mean("x", []) == "there are: none"
    assert did_you_mean("x", ["base", "tau"], "see there") == "see there"


def test_an_option_of_one_dash_is_not_taken_for_a_value():
    with assert_refused("unknown field -steps; did you mean --steps?"):
        read_config(["quickstart", "--tags", "a", "-steps", "4"])


def test_a_value_that_config_refuses_is_refused_in_one_line():
    with assert_refused("steps", "at least 1, got 0"):
        read_config(["quickstart", "--steps", "0"])


def test_help_lists_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        read_config(["quickstart", "--help"])
    assert stop.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    for field in FIELDS:
        assert f"--{field}" in output
    assert "--keep INT Checkpoints kept. (default: 2)" in output
    assert "--adam_betas FLOAT FLOAT Betas of Adam. (default: 0.9 0.95) --adam_eps" in output


@pytest.mark.parametrize("arguments, code", [([], 2), (["--help"], 0), (["-h"], 0)])
def test_without_a_preset_the_presets_are_listed(arguments, code, capsys):
    with pytest.raises(SystemExit) as stop:
        read_config(arguments)
    assert stop.value.code == code
    output = capsys.readouterr().out
    assert all(name in output for name in PRESETS)
