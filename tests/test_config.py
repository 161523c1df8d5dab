"""Presets, validation and hash of the configuration, and how it is read from the command line."""

import dataclasses
import importlib
import re
from operator import attrgetter
from typing import get_args

import pytest
import torch
from commands import exit_code, fails, parametrize, refuses, table
from pytest import approx

import train_gpt
from configs.config import NOT_HASHED, Config, config_hash
from configs.presets import PRESETS, preset
from data.loader import micro_batch_size, rank_sequences
from errors import UserError, exit_on_user_error
from model.gpt import GPT
from model.methods import METHODS
from optim.schedule import lr_factor
from runtime.build import read_run
from scripts.shared.arguments import Parser, add_run_options

FIELDS = [field.name for field in dataclasses.fields(Config)]
DEFAULTS = vars(Config())


@parametrize("processes", [1, 2, 4, 8])
@parametrize("name", PRESETS)
def test_a_step_divides_among_processes(name, processes):
    config = preset(name)
    if name in ("mini_1024", "mini_4096", "far"):  # four, two and one sequence: these are for a CPU
        processes = min(processes, config.batch_tokens // config.train_length)
    share = rank_sequences(config.batch_tokens, config.train_length, 0, processes)
    size = micro_batch_size(len(share), config.train_length, config.micro_batch_tokens)
    assert config.batch_tokens % (size * config.train_length * processes) == 0
    assert size * config.train_length <= config.micro_batch_tokens
    assert size == 14 or (name, processes) != ("gpt_304m_4k", 4)


# ---- the paper: appendix "Further experimental details" ----

PAPER = f"""--vocab_size 50304 --num_layers 12 --num_heads 6 --model_dim 768 --position_scale 1
    --steps 4578 --batch_tokens {8 * 65536} --val_lengths 4096 16384 65536 --val_tokens 10485760 --val_every 125
    --muon_lr 0.02 --muon_momentum 0.95 --embedding_lr 0.3 --head_lr 0.002 --scalar_lr 0.002 --adam_betas 0.9 0.95 """
PAPER_304M = PAPER + f"""--num_layers 16 --num_heads 8 --model_dim 1024
    --steps 10900 --batch_tokens {224 * 4096} --muon_lr 0.015 --val_every 250"""


@parametrize("name, train_length, tokens, paper, steps, factors", [
    ("gpt_162m_4k", 4096, 2.4e9, PAPER, (0, 3270, 3924, 4577), [1, 1, 0.5, 1 / 1308]),
    ("gpt_162m_16k", 16_384, 2.4e9, PAPER, (3269,), [1]),
    ("gpt_162m_64k", 65_536, 2.4e9, PAPER, (3269,), [1]),
    ("gpt_304m_4k", 4096, 1e10, PAPER_304M, (0, 5450, 10_900), [1, 0.5, 0]),
])
def test_the_presets_are_the_papers(name, train_length, tokens, paper, steps, factors):
    c = preset(name)
    papers = read_run(f"{name} --train_length {train_length} {paper}".split())
    assert c == dataclasses.replace(papers, name=c.name, muon_lr=c.muon_lr) and c.method_options == {}
    assert c.muon_lr == approx(papers.muon_lr)
    assert c.steps * c.batch_tokens == approx(tokens, rel=1e-3)
    assert [lr_factor(c, step) for step in steps] == approx(factors)


@table("method, part, option, of_the_paper, scaled", """
    rope                   | rotation     | base        | 10000 | 625
    yarn                   | rotation     | base        | 10000 | 625
    p_rope                 | rotation     | base        | 1024  | 64
    scale_invariant_p_rope | score_change | tau         | 10    | 10
    alibi                  | score_change | slope_scale | 1     | 16
    log_offset             | query_scale  | offset      | 500   | 31.25
    nape                   | score_change | slope_scale | 1     | 16
    grape_ap               | replacement.alibi | slope_scale | 1 | 16
    fire                   | replacement  | c           | 0.1   | 1.6
    fire                   | replacement  | threshold   | 512   | 32
""")
@parametrize("name", ["mini", "mini_4096"])
def test_lengths_in_tokens_are_scaled_by_one_factor(name, method, part, option, of_the_paper, scaled):
    mini = dataclasses.replace(preset(name), method=method)
    paper = dataclasses.replace(mini, position_scale=1.0)
    given = dataclasses.replace(mini, method_options={option: 7.0})  # options are taken as they are
    with torch.device("meta"):
        methods = [GPT(config).blocks[0].attention.method for config in (mini, paper, given)]
    assert [*map(attrgetter(f"{part}.{option}"), methods)] == [float(scaled), float(of_the_paper), 7]


# ---- the hash ----

HASHED = set("""
    seed data_seed init_from method method_options position_scale document_mask
    vocab_size num_layers num_heads model_dim train_length length_schedule batch_tokens
    steps schedule warmup_steps cooldown_steps muon_lr muon_momentum embedding_lr head_lr scalar_lr adam_betas adam_eps
""".split())


def with_another(field):
    """Return the default configuration with another value of this field."""
    kinds = get_args(Config.__dataclass_fields__[field].type)
    match DEFAULTS[field]:
        case str():
            other = (kinds or ["other"])[-1]
        case dict():
            other = {"tau": 3.0}
        case tuple(value):
            other = value[::-1] or (kinds[0](64), kinds[0](8))
        case value:
            other = value / 2 if isinstance(value, float) else 2 * value or 1
    schedule = "trapezoid" if field == "warmup_steps" else DEFAULTS["schedule"]
    return dataclasses.replace(Config(), **{"schedule": schedule, field: other})


def test_the_hash_changes_with_mathematics_alone():
    assert HASHED ^ NOT_HASHED == set(FIELDS)
    assert {config_hash(with_another(field)) for field in NOT_HASHED} == {config_hash(Config())}
    assert len({config_hash(with_another(field)) for field in {*HASHED, "keep"}}) == len(HASHED) + 1


def test_the_hash_does_not_depend_on_the_order_of_options_or_the_type_of_a_number():
    one, other = dict(a=3, b=5.0), dict(b=5, a=3.0)
    assert config_hash(Config(method_options=one)) == config_hash(Config(method_options=other))
    assert config_hash(Config(scalar_lr=1)) == config_hash(Config(scalar_lr=1.0)) != config_hash(Config())


# ---- values ----

BAD_VALUES = [
    (0, "vocab_size num_layers num_heads model_dim train_length batch_tokens micro_batch_tokens val_tokens"),
    (0, "keep timeout adam_eps"),
    (-1, "seed steps warmup_steps cooldown_steps val_every save_every"),
    *((value, "muon_lr embedding_lr head_lr scalar_lr adam_eps timeout position_scale muon_momentum")
      for value in (-0.1, float("nan"), float("inf"))),
    (1, "warmup_steps"),
    (4579, "cooldown_steps"),
    ((8,), "length_schedule"),
    ((8, 4578), "length_schedule"),
    ((8192, 1), "length_schedule"),
    (4097, "train_length"),
    (2**63, "seed"),
    (10**400, "keep"),
    (10**10, "num_layers"),
    (1.0, "muon_momentum"),
    ((0.9, float("nan")), "adam_betas"),
    ("0", "seed"),  # this and the next two: as a user's sweep may have them
    (None, "muon_lr"),
    ([4096], "val_lengths"),
    ((), "val_lengths"),
    ((0,), "val_lengths"),
    *((name, "name") for name in ("a/b", "..", ".hidden", "a b", "-x", "a\n", "x" * 201)),
]


@parametrize("value, field", [(value, field) for value, fields in BAD_VALUES for field in fields.split()])
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(value, field):
    with refuses(field):
        Config(**{field: value})


# ---- the command line ----


@table("arguments, field, value", """
    mini --steps 90                                           | cooldown_steps  | 26
    mini --steps 90 --cooldown_steps 7                        | cooldown_steps  | 7
    mini --cooldown_steps 7                                   | steps           | 640
    quickstart --steps 100                                    | length_schedule | (32, 20, 64, 40)
    quickstart --steps 100 --length_schedule 64 20            | cooldown_steps  | 29
    quickstart --steps 2                                      | length_schedule | (64, 1)
    quickstart --method_options tau 3                         | method_options  | {'tau': 3}
    quickstart --method_options tau 0.5 skip_first True       | method_options  | {'tau': 0.5, 'skip_first': True}
    quickstart --method_options form barbero                  | method_options  | {'form': 'barbero'}
    quickstart --val_lengths 256 1024                         | val_lengths     | (256, 1024)
    quickstart --steps=7 --cooldown_steps=0 --length_schedule | length_schedule | ()
    quickstart --muon_lr 3e-2                                 | muon_lr         | 0.03
    quickstart --adam_betas .8 .99                            | adam_betas      | (0.8, 0.99)
    quickstart --group=--x                                    | group           | '--x'
    quickstart --timeout 60                                   | timeout         | 60.0
    quickstart --steps 3 --steps=4                            | steps           | 4
    quickstart --name mine                                    | name            | 'mine'
    quickstart                                                | name            | 'quickstart-scale_invariant_p_rope-s0'
    quickstart --method rope --seed 3                         | name            | 'quickstart-rope-s3'
    quickstart --val-lengths 8 --seed=3                       | val_lengths     | (8,)
    quickstart --runs_dir=~/runs                              | runs_dir        | '/the/home/runs'
    quickstart --runs_dir ~/runs                              | runs_dir        | '/the/home/runs'
""")
def test_a_field_is_set_by_its_name(arguments, field, value, monkeypatch):
    """The text of a value shows its type. A path may begin at the home folder."""
    monkeypatch.setenv("HOME", "/the/home")
    assert repr(getattr(read_run(arguments.split()), field)) == value


@table("arguments, named", """
    quickstar                              | quickstar quickstart
    quickstart --stpes 3                   | --stpes --steps
    quickstart --val-lenths=256            | --val-lenths --val_lengths
    quickstart --val_lengths 4 -steps 4    | -steps --steps
    quickstart --num_heads 3               | num_heads
    quickstart --method p_ropee            | p_ropee p_rope
    quickstart --validate_as p_ropee       | p_ropee p_rope
    quickstart --method_options tua 3      | tua tau
    quickstart --steps many                | --steps
    quickstart --steps                     | --steps
    quickstart --steps 4 stray             | stray
    quickstart --steps -1                  | steps
    quickstart --device=tpu                | --device
    quickstart --adam_betas 0.9            | --adam_betas
    quickstart --val_lengths 8 x           | --val_lengths
    quickstart --method_options tau 3 base | --method_options
""")
def test_a_bad_argument_is_refused_in_one_line_with_the_nearest_name(arguments, named, capsys):
    with refuses(*named.split()):
        read_run(arguments.split())
    assert capsys.readouterr().err == ""


@table("command, arguments, named", """
    train_gpt                  | quickstart --data_dir /nowhere --method_options basse 64           | 'basse'
    data.download              | fineweb10B --shards 104 --out x                                    | 103
    scripts.evaluate           | --far 1                                                            | RUN
    scripts.record.__main__    | fly                                                                | fly
    scripts.doctor             | quickstart --data_dir /nowhere --method_options basse 64           | 'basse'
    scripts.doctor             | gpt_162m                                                           | gpt_162m
    scripts.doctor             | mini --stpes 3                                                     | --stpes
    scripts.doctor             | mini --method rop                                                  | rop
    scripts.doctor             | mini --fly                                                         | --fly
    scripts.bench.__main__     | attention --fly                                                    | --fly
    scripts.bench.__main__     | attention --device cpu --lengths 0                                 | --lengths
    scripts.bench.__main__     | attention --device cpu --variants sdpa:nothing                     | nothing
    scripts.bench.__main__     | attention --device cpu --variants cpu:softcap                      | softcap
    scripts.bench.__main__     | attention --device cpu --variants flex-fwd-1:si                    | fwd-1
    scripts.bench.__main__     | step no_such_preset p_rope                                         | no_such_preset
    scripts.bench.__main__     | step quickstart no_such_method --device cpu                        | no_such_method
    scripts.bench.__main__     | step quickstart p_rope p_rope/batch_tokens=512 --device cpu        | batch_tokens
    scripts.bench.__main__     | step quickstart rope --data_dir /nowhere --method_options basse 64 | 'basse'
    scripts.bench.__main__     | step quickstart --rounds 0 --device cpu                            | --rounds
    scripts.bench.__main__     | step quickstart --wide 1                                           | --wide
    scripts.reproduce.__main__ | nothing                                                            | nothing
    scripts.reproduce.__main__ | table_loss                                                         | table_loss
    scripts.reproduce.__main__ | table_losses --scale huge                                          | huge
    scripts.reproduce.__main__ | table_losses --stepz 3                                             | --stepz
    scripts.reproduce.__main__ | figure_tau --methods rope                                          | rope
    scripts.sweep.__main__     | table_losses --data_dir /nowhere --method_options basse 64         | 'basse'
    scripts.sweep.__main__     | table_loses                                                        | table_losses
    scripts.sweep.__main__     | table_losses --name mine                                           | --name
    scripts.sweep.__main__     | figure_304m --methods rope                                         | rope
    scripts.sweep.__main__     | table_losses --method_options tua 3                                | tua
    scripts.sweep.__main__     | figure_tau --seed 7                                                | --seed
    scripts.sweep.__main__     | table_losses --jobs 0                                              | --jobs
    scripts.sweep.__main__     | all --jobs x                                                       | --jobs
    scripts.sweep.__main__     | table_losses --gpus-per-run 999                                    | --gpus-per-run
    scripts.sweep.__main__     | all --needle step=3                                                | step=3
    scripts.sweep.__main__     | all --needle haystack=shard                                        | 'shard'
    scripts.sweep.__main__     | table_losses --needle steps=3                                      | --needle
    scripts.sweep.__main__     | table_losses --muon_lr -1                                          | muon_lr
""")
def test_wrong_usage_ends_every_command_before_it_starts_in_one_line(
    command, arguments, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    fails(capsys, named, importlib.import_module(command).main, *arguments.split())
    assert not [*tmp_path.rglob("*.log")]


def test_options_may_have_hyphens_or_underscores():
    parser = Parser("command", "")
    add_run_options(parser)
    assert parser.parse_args(["--runs_dir=here"]) == parser.parse_args(["--runs-dir", "here"])


def test_an_error_of_several_lines_is_printed_as_one(capsys):
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError("two\nlines")
    assert capsys.readouterr().err == "error: two lines\n"


def test_too_little_memory_is_one_line(capsys):
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        torch.empty(2**46)  # beyond the addresses of a process
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_help_lists_every_field_and_without_a_preset_the_presets(capsys):
    assert exit_code(train_gpt.main, ["quickstart", "--help"]) == exit_code(train_gpt.main, ["--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert all(name in output for name in (*PRESETS, *METHODS, *map("--{}".format, FIELDS)))
    assert re.search(r"--keep\b[^(]*\(default: 2\)", output)
    assert re.search(r"--adam_betas\b[^(]*\(default: 0.9 0.95\)", output)
