"""The benchmarks: ratios from canned times, the gates, the row of the baseline again, one small run of each command."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from configs.command_line import read_config
from scripts.bench import __main__ as bench
from scripts.bench import protocol, step
from scripts.bench.attention import CPU, CUDA, SPECIAL, Case, formula_of, make_attend
from scripts.bench.trainers import RandomTokens, Trainer

FIELDS = (
    "--vocab_size 300 --num_layers 2 --num_heads 2 --model_dim 32 --train_length 24 --batch_tokens 96 "
    "--micro_batch_tokens 48 --compile off --device cpu --data_dir none --length_schedule "
    "--cooldown_steps 0 --val_copy_gaps"
).split()
CASE = Case(batch=1, heads=2, length=130, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))


def command(*arguments):
    """Return the exit code of the command."""
    with pytest.raises(SystemExit) as stop:
        bench.main([*map(str, arguments)])
    return stop.value.code


def first_cells(text):
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


@pytest.fixture
def one_call(monkeypatch):
    """Make one call of each variant in each round, however busy the machine is."""
    monkeypatch.setattr(protocol, "schedule", lambda costs, rounds, seconds: (rounds, dict.fromkeys(costs, 1)))


# ---- the protocol ----------------------------------------------------------------------------------------------------


def test_paired_ratio_is_the_median_of_the_ratios_of_the_same_round():
    assert protocol.paired_ratio([2.0, 40.0, 6.0], [1.0, 20.0, 3.0]) == (2, 2, 2)
    # Of 3 rounds the median is the lowest ratio in 7 of the 27 equally likely draws, and the highest in 7.
    assert protocol.paired_ratio([9.0, 1.0, 4.0], [1.0, 1.0, 2.0]) == (2, 1, 9)
    assert protocol.paired_ratio([1.0] * 99 + [50.0], [1.0] * 100) == (1, 1, 1)


def test_schedule_fits_the_time():
    costs = {"fast": 0.001, "slow": 0.1}
    assert protocol.schedule(costs, 7, 1.5) == (7, {"fast": 107, "slow": 1})
    assert protocol.schedule(costs, 7, 0.0) == (3, {"fast": 1, "slow": 1})
    assert protocol.schedule(costs, 7, 1e6) == (7, {"fast": 1500, "slow": 15})


def test_variants_take_turns_forwards_and_backwards(one_call):
    calls = []
    timers = {name: lambda count, name=name: calls.append(name) or float(len(calls)) for name in "abc"}
    times = protocol.measure(timers, rounds=3, seconds=1.0)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"  # the first calls are a trial
    assert times == {"a": [4, 9, 10], "b": [5, 8, 11], "c": [6, 7, 12]}
    assert list(protocol.with_baseline_again(timers)) == ["a", "b", "c", "a again"]


def test_a_variant_that_fails_stops_no_other_and_none_begins_after_the_deadline():
    made, problems = protocol.build_variants({"bad": lambda: 1 / 0, "good": lambda: 2}, deadline=float("inf"))
    assert made == {"good": 2} and problems.keys() == {"bad"}
    assert protocol.build_variants({"good": lambda: 2}, deadline=0.0)[1].keys() == {"good"}


# ---- attention -------------------------------------------------------------------------------------------------------


SIZES = "--device cpu --lengths 130 --heads 2 --head-dim 16 --rounds 3".split()


def wrong_gradient(case):
    attend = make_attend("blocks:si", case)
    return lambda q, k, v: 1.001 * (output := attend(q, k, v)) - 0.001 * output.detach()


def test_a_variant_with_a_planted_fault_gets_no_time_and_exit_code_1(tmp_path, one_call, monkeypatch):
    monkeypatch.setitem(SPECIAL, "blocks:si:wrong", wrong_gradient)
    variants = ["dense:si", "blocks:si:wrong", "blocks:si"]
    assert command("attention", *SIZES, "--variants", *variants, "--out", tmp_path) == 1
    record = json.loads((tmp_path / "cpu_attention.json").read_text())
    assert {name: result["passed"] for name, result in record["gate"].items()} == dict(zip(variants, [1, 0, 1]))
    assert record["lengths"][0]["seconds"].keys() == {"dense:si", "blocks:si", "dense:si again"}


def test_attention_prints_a_row_a_variant_and_the_baseline_again(tmp_path, one_call, capsys):
    variants = ["sdpa:plain", "flex:plain", "dense:si"]  # FlexAttention has no backward pass on a CPU
    assert command("attention", *SIZES, "--variants", *variants, "--out", tmp_path) == 0
    page, record = ((tmp_path / f"cpu_attention.{kind}").read_text() for kind in ("md", "json"))
    record = json.loads(record)
    assert page.splitlines()[2:] == capsys.readouterr().out.rstrip().splitlines()
    assert first_cells(page.split("## Length")[1]) == ["variant", "sdpa:plain", "dense:si", "sdpa:plain again"]
    assert {"command", "device", "versions", "commit", "dtype", "heads", "head_dim"} <= record.keys()
    assert all(len(times["both"]) == 3 and min(times["both"]) > 0 for times in record["lengths"][0]["seconds"].values())


def test_the_formula_as_written_is_scale_invariant_attention(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    score_mod = make_attend("flex:si:written", CASE).keywords["score_mod"]
    distance, score = torch.tensor([0, 1, 7, 129]), torch.tensor([0.3, -0.2, 1.0, 0.5])
    a, m = CASE.method("si").score_change.coefficients(distance.double(), 0)
    logits = score_mod(score, 0, 0, torch.tensor(129), 129 - distance)
    torch.testing.assert_close(logits, (a * score + m).float())


def test_all_names_of_variants_have_a_formula():
    assert {CASE.method(formula_of(name)).name for name in [*CUDA, *CPU, *SPECIAL]} == {
        "nope", "scale_invariant_nope", "alibi"
    }  # fmt: skip
    q, k, v, dout = CASE.inputs()
    assert q.shape == dout.shape == (1, 2, 130, 16) and not v.is_contiguous()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(make_attend("dense:plain", CASE)(q, k, v), expected)


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_variant_is_a_configuration():
    config = step.read_variant("quickstart", FIELDS, "alibi:blocks/micro_batch_tokens=24/method_options=slope_scale 2")
    changes = (config.method, config.attention_backend, config.micro_batch_tokens, config.method_options)
    assert changes == ("alibi", "blocks", 24, {"slope_scale": 2})


def test_the_gate_lets_equal_models_pass_and_no_others():
    names = ["p_rope", "p_rope:blocks", "p_rope/micro_batch_tokens=24", "alibi", "p_rope/timeout=9", "p_rope/keep=9"]
    configs = {name: step.read_variant("quickstart", FIELDS, name) for name in names}
    trainers = {name: Trainer(config, torch.device("cpu")) for name, config in configs.items()}
    with torch.no_grad():
        trainers["p_rope/timeout=9"].model.blocks[1].mlp.up.mul_(1.01)
        trainers["p_rope/keep=9"].model.head[0, 0] = torch.nan
    before = trainers["p_rope"].model.blocks[0].mlp.up.detach().clone()
    results = step.gate(trainers, steps=3)
    for trainer in trainers.values():
        trainer.loader.close()
    assert [result["passed"] for result in results.values()] == [True, True, True, True, False, False]
    assert [result["first"] for result in results.values()] == ["p_rope"] * 3 + ["alibi"] + ["p_rope"] * 2
    assert (trainers["p_rope"].model.blocks[0].mlp.up - before).norm() > 0.1  # it trains


def test_timing_moves_no_weight():
    trainer = Trainer(read_config(["quickstart", *FIELDS]), torch.device("cpu"))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with trainer.loader:
        assert trainer.time_step(2) > 0
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before))
    assert trainer.backends == "cpu" or trainer.backends == "blocks"


def test_random_tokens_are_the_same_each_time_and_fall_off_as_one_over_the_rank():
    tokens = RandomTokens().read(7, 30_000, 300)
    assert (tokens == RandomTokens().read(7, 30_000, 300)).all() and tokens.min() == 0 and tokens.max() < 300
    assert 1.8 < (tokens == 0).sum() / (tokens == 1).sum() < 2.2


def test_step_reports_what_it_measured(tmp_path, one_call, capsys):
    variants = ["p_rope", "alibi", "p_rope:flex"]  # FlexAttention cannot train on a CPU
    assert command("step", "quickstart", *variants, *FIELDS, "--rounds", 3, "--steps", 2, "--out", tmp_path) == 0
    page, record = ((tmp_path / f"cpu_step_quickstart_24.{kind}").read_text() for kind in ("md", "json"))
    record = json.loads(record)
    assert page.splitlines()[2:] == capsys.readouterr().out.rstrip().splitlines()
    assert record["problems"].keys() == {"p_rope:flex"} and record["gate"]["alibi"]["passed"]
    assert list(record["seconds"]) == ["p_rope", "alibi", "p_rope again"]
    rows = [line.split("|") for line in page.split("## Times")[1].splitlines() if line.startswith("| ")]
    for row, times in zip(rows[1:], record["seconds"].values(), strict=True):
        assert float(row[3].replace(",", "")) == pytest.approx(96 / sorted(times)[1], abs=1)
        assert row[7].strip() == protocol.ratio_cell(times, record["seconds"]["p_rope"])


@pytest.mark.parametrize("difference, code", [(0.0, 0), (0.1, 1)])
def test_checkouts_are_compared_by_their_steps_and_losses(difference, code, tmp_path, monkeypatch):
    order = []

    def train(checkout, preset, fields, steps):
        order.append(str(checkout))
        slow = 2.0 if checkout.name == "after" else 1.0
        return [9.0] * 10 + [slow] * 3, [3.0] * 12 + [3.0 + difference * (slow - 1)]

    monkeypatch.setattr(step, "train", train)
    arguments = ["--checkouts", "before", "after", "--rounds", 2, "--steps", 3, "--out", tmp_path]
    assert command("step", "quickstart", *FIELDS, *arguments) == code
    assert order == ["before", "after", "before", "before", "after", "before"]
    record = json.loads((tmp_path / "cpu_step_checkouts_quickstart.json").read_text())
    assert record["seconds"] == {"before": [1.0, 1.0], "after": [2.0, 2.0], "before again": [1.0, 1.0]}


@pytest.mark.slow
def test_a_checkout_trains(tmp_path):
    from test_train import make_data

    fields = [*FIELDS, "--data_dir", str(make_data(tmp_path / "data"))]
    seconds, losses = step.train(Path(bench.__file__).parents[2], "quickstart", fields, steps=12)
    assert len(seconds) == len(losses) == 12 and min(seconds) > 0 and losses[-1] < losses[0]


@pytest.mark.parametrize("arguments, field", [
    ("attention --device cpu --lengths 0", "lengths"),
    ("attention --device cpu --minutes 0", "minutes"),
    ("attention --device cpu --variants blocks", "blocks"),
    ("attention --device cpu --variants sdpa:nothing", "nothing"),
    ("attention --device cpu --out /dev/null/x", "/dev/null/x"),
    ("step no_such_preset p_rope", "no_such_preset"),
    ("step quickstart no_such_method --device cpu", "no_such_method"),
    ("step quickstart p_rope p_rope/batch_tokens=512 --device cpu", "batch_tokens"),
    ("step quickstart --rounds 0 --device cpu", "--rounds"),
    ("step quickstart --wide 1", "--wide"),
    ("step quickstart --device cpu --checkouts a a", "--checkouts"),
])  # fmt: skip
def test_a_mistake_is_exit_code_2_and_names_the_field(arguments, field, capsys):
    assert command(*arguments.split()) == 2
    message = capsys.readouterr().err
    assert field in message and message.count("\n") == 1
