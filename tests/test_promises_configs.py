"""Promise 10: whatever is on the command line, the run either trains or is refused with one line. Random
configurations, good and bad, of every field and every method."""

import contextlib
import dataclasses
import io
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import hypothesis
import pytest
import torch
import torch._dynamo  # here once, or else in every process by its optimizers
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_methods import NAMES
from test_train import FIELDS as FIELDS_OF_A_RUN
from test_train import here, make_data

import train_gpt
from configs.config import Config
from model.methods import method_options
from runtime.device import compile_problem
from runtime.metrics import read_metrics

pytestmark = pytest.mark.promise(10, "every config trains or is refused")

EXIT = os._exit  # which a fixture below changes
FIELDS_OF_A_RUN = FIELDS_OF_A_RUN | dict(data_dir="data", resume="never", steps=2, cooldown_steps=0)
FIELDS = [field.name for field in dataclasses.fields(Config)]
def one_of(*values):
    return st.sampled_from(values)

# Values that are right on their own, where they are not part of a shape (below). Most runs are of two steps.
GOOD = dict(
    name=one_of("run", "a.b_c+d=e-f", "0", "x" * 100), runs_dir=one_of("runs", "runs/deeper/still", "."),
    seed=one_of(0, 1, 2**31, 2**63 - 1), resume=one_of("never", "auto"), force=st.booleans(),
    on_nonfinite=one_of("stop", "skip"), timeout=one_of(600, 1, 0.001, 1e6), tags=one_of((), ("a", "b c"), ("x" * 64,)),
    group=one_of("", "sweep", "a/b"), wandb=st.just("off"), wandb_project=one_of("p", ""),
    method=one_of(*NAMES), validate_as=one_of((), (), (), (), ("yarn",), ("rope_ntk", "yarn"), ("logn_ntk",)),
    switch_method_at=one_of(0, 0, 0, 0, 0, 0.5), switch_method_to=st.just("nope"),
    switch_warmup_steps=one_of(0, 0, 0, 0, 0, 1),
    position_scale=one_of(1.0, 0.0625, 1e-9, 1e9), vocab_size=st.integers(64, 100),
    num_layers=st.integers(1, 3), data_dir=st.just("data"), micro_batch_tokens=st.integers(1, 300),
    steps=one_of(2, 2, 2, 1, 3), schedule=one_of("constant_linear", "cosine", "trapezoid"),
    length_schedule=st.just(()),
    warmup_steps=one_of(0, 0, 0, 0, 0, 1), cooldown_steps=one_of(0, 0, 0, 0, 1, 2),
    muon_lr=one_of(0, 1e-300, 0.02, 10), muon_momentum=one_of(0, 0.5, 0.95, 0.999999999999),
    embedding_lr=one_of(0, 0.3, 10), head_lr=one_of(0, 0.002, 10, 1e38), scalar_lr=one_of(0, 0.002, 10),
    adam_betas=one_of((0, 0), (0.9, 0.95), (0.999999, 0)), adam_eps=one_of(1e-30, 1e-8, 1),
    val_every=one_of(0, 1, 2, 1000), val_profile=one_of("paper", "fast"), device=one_of("cpu", "auto"),
    dtype=one_of("auto", "float32", "bfloat16"), compile=st.just("off"),
    attention_backend=one_of("auto", "auto", "auto", "cpu", "blocks", "sdpa"), context_parallel=st.just(1),
    save_every=one_of(0, 1, 2, 1000), keep=one_of(1, 2, 50), compare_every=one_of(0, 0, 1, 2),
)  # fmt: skip

# What makes a run together: these fields are drawn at once.
SHAPE = "num_heads model_dim train_length batch_tokens val_lengths val_tokens".split()

NASTY = ("", "many", "nan", "inf", "-inf", "-1", "0", "1.5", "1e308", "1e-320", "1e400", str(2**31 - 1), str(2**64),
         "9" * 400, "True", "None", "float32", "\x00", "é", "a b", "../x", "--", "-")  # fmt: skip

# Sizes that only cost memory or hours are not what this is about.
SIZES = "vocab_size num_layers num_heads model_dim steps val_tokens".split()
BAD = {field: one_of(*(word for word in NASTY if field not in SIZES or not re.match(r"\d{3}", word)))
       for field in FIELDS}  # fmt: skip
BAD |= dict(
    name=one_of("a/b", "..", "/", "", " ", "a\nb", "-x", "x" * 300), runs_dir=one_of("data/manifest.json", "/proc", ""),
    data_dir=one_of("nowhere", "", "/dev/null", "data/manifest.json", "runs", "\x00"), tags=one_of("", "é", "a" * 500),
    method_options=one_of("tau", "", "a b", "tau 3 tau", "tau -1", "base True", "num_heads 3", "name x", "self 1"),
    adam_betas=one_of("1", "1 0.9", "nan nan", "0.9 1", "0.9 0.95 0.99", "inf 0", "-0.1 0.5"),
    val_lengths=one_of("", "0", "-8", "8 8", "7", "16 48", str(2**40), "x", "1.5"),
    context_parallel=one_of(0, 2, 3, -1), validate_as=one_of("", "yarn yarn", "nope", "rope", "alibi x"),
    attention_backend=one_of("triton", "flex", "fast", ""), adam_eps=one_of(0, -1, "nan", 1e-320, "inf", 1e300),
)  # fmt: skip
STRAY = [["stray"], ["--stpes", "3"], ["--steps"], ["--help-me"], ["--"], ["--=3"], ["--steps=2=2"], ["\x00"]]


@st.composite
def shapes(draw, processes=1):
    """Of several processes, mostly such that can be divided among them."""
    whole = draw(one_of(processes, processes, 1))
    heads, length = draw(st.integers(1, 4)) * whole, draw(one_of(1, 2, 7, 16, 64)) * whole
    head_dim = draw(one_of(4, 8, 16, 4, 8, 16, 1, 2, 3, 6))
    lengths = draw(st.lists(one_of(length, 1, 3, 8, 16, 48, 64), min_size=1, max_size=3, unique=True))
    lengths = list(dict.fromkeys(n * whole if n % whole else n for n in lengths))
    batch_tokens, val_tokens = length * draw(st.integers(1, 5)) * whole, math.lcm(*lengths) * draw(st.integers(1, 4))
    return dict(num_heads=heads, model_dim=heads * head_dim, train_length=length, batch_tokens=batch_tokens,
                val_lengths=tuple(lengths), val_tokens=val_tokens)  # fmt: skip


def option_values(parameter):
    """Values of the type of an option, which it may refuse all the same."""
    kinds = {bool: one_of("True", "False"), int: one_of("1", "3", "64"), float: one_of("0.5", "1", "100.0")}
    words = {"slopes": "official geometric", "form": "barbero half_truncate", "context": "row length"}
    words |= {"terms": "both a m"}
    types = getattr(parameter.annotation, "__args__", (parameter.annotation,))
    return (
        st.one_of(*(values for kind, values in kinds.items() if kind in types))
        if str not in types
        else one_of(*words.get(parameter.name, "float32 bfloat16").split())
    )


@st.composite
def command_lines(draw, processes=1, **fixed):
    """Words for train_gpt.py: a good configuration in which, half of the time, something may be wrong."""
    values = draw(shapes(processes)) | {field: draw(values) for field, values in GOOD.items()} | fixed
    known = method_options(values["method"])
    chosen = draw(st.lists(one_of(*known), max_size=3, unique=True)) if known else []
    wrong = draw(st.booleans())
    nasty = one_of(*NASTY) if wrong and draw(st.booleans()) else st.nothing()
    options = [(option, draw(option_values(known[option]) | nasty)) for option in chosen]
    values["method_options"] = tuple(word for option in options for word in option)
    assert {*values} == {*FIELDS}, "a field without values to try: add it to GOOD"
    stray = []
    if wrong:
        for field in draw(st.lists(one_of(*FIELDS), max_size=2, unique=True)):
            values[field] = tuple(str(draw(BAD[field])).split(" "))
        stray = draw(one_of(*STRAY)) if draw(one_of(*range(8))) == 7 else []
    return command(values) + stray


def command(values: dict) -> list[str]:
    words = ["quickstart"]
    for field, value in values.items():
        if value is True or value is False:
            words += [f"--{'' if value else 'no_'}{field}"]
        else:
            words += [f"--{field}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, which runs are started in."""
    folder = tmp_path_factory.mktemp("place")
    make_data(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(os, "_exit", exit_like_a_process)
        yield folder


def exit_like_a_process(code):
    raise SystemExit(code)


def run_here(words: list[str]) -> tuple[int, str]:
    """Its exit code, and what it says of errors."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            here(train_gpt.main, *words)
    except SystemExit as exit:
        return exit.code, said.getvalue()
    return 0, said.getvalue()


def run_on_two(words: list[str]) -> tuple[int, str]:
    """The same of two processes, forked from this one, which end with the same code; what both say is one time here."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = dict(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")
    children, said = [], [tempfile.TemporaryFile("w+") for _ in range(2)]
    for rank in range(2):
        if pid := os.fork():
            children.append(pid)
            continue
        code = 1
        try:
            torch.set_num_threads(1)
            os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            sys.stdout, sys.stderr = open(os.devnull, "w"), said[rank]
            for descriptor in (1, 2):  # PyTorch's own warnings
                os.dup2(sys.stdout.fileno(), descriptor)
            warnings.simplefilter("ignore")
            signal.alarm(120)  # for one that waits for ever
            code = 0
            here(train_gpt.main, *words)
        except SystemExit as exit:
            code = exit.code
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            said[rank].flush()
            EXIT(code)
    codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children}
    lines = {}
    for file in said:
        file.seek(0)
        lines |= dict.fromkeys(file.read().splitlines(keepends=True))
    assert len(codes) == 1, f"exit codes {codes}: {''.join(lines)}"
    return codes.pop(), "".join(lines)


def outcome_of(words: list[str], place: Path, run=run_here) -> str:
    """trained, refused, or stopped at a step that is not finite; anything else is an AssertionError."""
    before = {path for path in place.rglob("*")}
    code, error = run(words)
    new = {path for path in place.rglob("*")} - before
    try:
        if code == 0:
            folder = next(path.parent for path in new if path.name == "summary.json")
            steps = int(words[words.index("--steps") + 1])
            records = read_metrics(folder / "metrics.jsonl")
            assert [r["step"] for r in records if "lr" in r] == [*range(1, steps + 1)]
            for r in records:
                assert None not in [*r.get("val_loss", {}).values(), *r.get("scores_std", [])]
            assert run(words)[0] == (0 if "auto" in words[words.index("--resume") + 1] else 2)
            return "trained"
        assert code == 2, f"exit code {code}: {error}"
        assert re.fullmatch(r"error: [^\n]+\n", error), error
        if re.match(r"error: step \d+: ", error):
            dumped = any(path.name.startswith("nonfinite_") for path in new)
            assert dumped or "the last update made weights that are not finite" in error, error
            return "stopped"
        assert not new, f"left behind: {sorted(new)}"
        return "refused"
    finally:
        for path in sorted(new):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def try_configs(command_lines, place, faults, count, seed=None, run=run_here, kind="configs"):
    outcomes = dict(trained=0, refused=0, stopped=0)

    @settings(max_examples=count, derandomize=seed is None, database=None, deadline=None, print_blob=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(command_lines)
    def each(words):
        with faults(kind):
            outcomes[outcome_of(words, place, run)] += 1

    if seed is not None:
        print(f"hypothesis seed {seed}")  # which pytest shows when it fails
        hypothesis.seed(seed)(each)
    each()
    return outcomes


# What once ended deep inside, or left something behind.
FOUND = [
    "--seed 18446744073709551616", "--keep " + "9" * 400, "--adam_eps 0", "--timeout 1e300", "--name " + "x" * 300,
    "--muon_lr 1e300", f"--vocab_size {2**63 - 1}", f"--model_dim {2**63 - 4}", "--num_layers 10000000000",
    "--batch_tokens 2000000000000", "--tags " + "x" * 65,
    *(f"--method {method} --method_options {options}" for method, options in (
        ("rope", "num_heads 3"), ("rope", "name x"), ("rope", "base_length 0"), ("rope", "position_scale 0.5"),
        ("yarn", "base 1e-320"), ("rope_ntk", "factor 1e300"), ("alibi", "slopes inf"), ("logn_rope", "init 1e39"),
        ("nape", "delta nan"), ("scale_invariant_rope", "tau 1e-320"), ("rope", "base 1e400"))),
]  # fmt: skip


@pytest.mark.parametrize("words", FOUND)
def test_what_was_found_is_refused_in_one_line(words, place, faults):
    with faults("configs"):
        assert outcome_of(command(FIELDS_OF_A_RUN) + words.split(), place) == "refused"


@pytest.mark.parametrize("fields", [
    dict(num_heads=1, train_length=1, batch_tokens=3, val_lengths=(1, 2), val_tokens=2, position_scale=1.0),
    dict(method="rope", method_options=("base", 2**64)),
], ids=["a token a sequence", "an integer beyond 64 bits"])  # fmt: skip
def test_what_was_found_trains(fields, place, faults):
    with faults("configs"):
        assert outcome_of(command(FIELDS_OF_A_RUN | fields), place) == "trained"


def test_an_empty_tag_is_refused_here_and_not_by_wandb(place, faults):
    with faults("configs"):
        assert outcome_of([*command(FIELDS_OF_A_RUN), "--tags", ""], place) == "refused"


def test_a_key_that_wandb_refuses_leaves_no_folder_behind(place, faults, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    (place / "runs").mkdir(exist_ok=True)
    with faults("configs"):
        assert outcome_of([*command(FIELDS_OF_A_RUN), "--wandb", "online"], place) == "refused"


@pytest.mark.parametrize("field", ["embedding_lr", "head_lr"])
def test_a_huge_learning_rate_ends_at_a_step_that_is_named(field, place, faults):
    with faults("configs"):
        assert outcome_of(command(FIELDS_OF_A_RUN | {field: 1e38}), place) == "stopped"


@pytest.mark.slow
def test_every_config_trains_or_is_refused_in_one_line(place, faults, long):
    count, seed = (400, random.randrange(2**32)) if long else (40, None)
    outcomes = try_configs(command_lines(), place, faults, count, seed)
    faults.figures.append(f"of {sum(outcomes.values())} configs " + ", ".join(f"{n} {k}" for k, n in outcomes.items()))
    assert outcomes["trained"] > 0 and outcomes["refused"] > 0


@pytest.mark.slow
def test_so_it_does_on_two_processes(place, faults, long):
    count, seed = (50, random.randrange(2**32)) if long else (5, None)
    lines, kind = command_lines(2, timeout=600), "configs on 2 processes"
    outcomes = try_configs(lines, place, faults, count, seed, run_on_two, kind)
    faults.figures.append(f"of {count} {kind} " + ", ".join(f"{n} {k}" for k, n in outcomes.items()))
    assert not long or outcomes["trained"] > 0


@pytest.mark.slow
@pytest.mark.skipif(compile_problem(torch.device("cpu")) is not None, reason="torch.compile does not work")
@pytest.mark.parametrize("compile", ["model", "blocks"])
def test_so_it_does_when_compiled(compile, place, faults, long):
    if not long:
        pytest.skip("of the long form")
    outcomes = try_configs(command_lines(compile=compile), place, faults, 5, random.randrange(2**32))
    assert outcomes["trained"] > 0
