"""The benchmarks: ratios from canned times, the gates, the row of the baseline again, one small run of each command."""

import re

import pytest
import torch
from commands import exit_code, read_json

from model.attention.blocks import Blocks
from model.attention.choose import BACKENDS
from scripts.bench import __main__ as bench
from scripts.bench import attention, protocol, step
from scripts.bench.trainers import Trainer

FIELDS = (
    "--vocab_size 300 --num_layers 2 --num_heads 2 --model_dim 32 --train_length 24 --batch_tokens 96 "
    "--micro_batch_tokens 48 --compile off --device cpu --length_schedule --cooldown_steps 0 --val_copy_gaps"
).split()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_call(monkeypatch):
    """Make one call of each variant in each round."""
    monkeypatch.setattr(protocol, "ROUND_SECONDS", 0.0)


def numbers(cell):
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


def test_a_ratio_is_the_median_of_the_ratios_of_the_same_round():
    assert numbers(protocol.ratio_cell([2.0, 40.0, 6.0], [1.0, 20.0, 3.0])) == [2, 2, 2]
    # 3 rounds have 27 equally likely draws. The median is the lowest ratio in 7 of them, and the highest in 7.
    assert numbers(protocol.ratio_cell([9.0, 1.0, 4.0], [1.0, 1.0, 2.0])) == [2, 1, 9]


def test_variants_take_turns_forwards_and_backwards_and_the_first_is_measured_twice(monkeypatch):
    calls = []
    timers = {name: lambda count, name=name: calls.append((name, count)) or float(len(calls)) for name in "ab"}
    times = protocol.measure(timers, rounds=2)
    assert "".join(name for name, _ in calls) == "aba" + "aba" + "aba"  # the first calls are a trial
    assert times == {"a": [4, 9], "b": [5, 8], "a again": [6, 7]}
    monkeypatch.setattr(protocol, "ROUND_SECONDS", 15.0)
    calls.clear()
    protocol.measure(timers, rounds=1)  # calls take 1, 2 and 3 seconds
    assert calls[3:] == [("a", 15), ("b", 7), ("a", 5)]


class Wrong(Blocks):
    name = "wrong"
    error_factor = 1.0

    def run(self, *arguments, **more):
        output = super().run(*arguments, **more)
        return 1.01 * output - 0.01 * output.detach()  # its gradient alone is wrong


def test_attention_reports_right_variants_and_refuses_a_planted_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(BACKENDS, "wrong", Wrong())
    sizes = "--device cpu --lengths 130 --heads 2 --head-dim 16 --rounds 3".split()
    variants = "--variants sdpa:plain wrong:si flex_flash:si blocks:si".split()
    assert exit_code(bench.main, ["attention", *sizes, *variants, "--out", tmp_path]) == 1
    page, record = (tmp_path / "cpu_attention.md").read_text(), read_json(tmp_path / "cpu_attention.json")
    assert page == capsys.readouterr().out.rstrip() + "\n"
    assert {"command", "machine", "commit"} <= record.keys()
    assert {name: result.split(":")[0] for name, result in record["gate"].items()} == {
        "sdpa:plain": "passed", "wrong:si": "refused", "flex_flash:si": "not run", "blocks:si": "passed"
    }  # fmt: skip
    assert [entry["kind"] for entry in record["times"]] == ["forward", "both"]
    for entry, text in zip(record["times"], page.split("###")[1:], strict=True):
        rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")][1:]
        assert [row[1].strip() for row in rows] == ["sdpa:plain", "blocks:si", "sdpa:plain again"]
        for row, seconds in zip(rows, entry["seconds"].values(), strict=True):
            assert len(seconds) == 3 and float(row[2]) == pytest.approx(sorted(seconds)[1] * 1e3, abs=1e-3)


def test_all_default_variants_are_known():
    for name in [*attention.CUDA, *attention.CPU]:
        attention.make_variant(name, 2, 16, CPU)


def test_a_variant_is_a_configuration():
    config = step.read_variant("quickstart", FIELDS, "alibi:blocks/micro_batch_tokens=24/method_options=slope_scale 2")
    changes = (config.method, config.attention_backend, config.micro_batch_tokens, config.method_options)
    assert changes == ("alibi", "blocks", 24, {"slope_scale": 2})


def test_the_gate_lets_equal_models_pass_and_no_others():
    names = ["p_rope", "p_rope:blocks", "p_rope/micro_batch_tokens=24", "alibi", "p_rope/timeout=9", "p_rope/keep=9"]
    configs = {name: step.read_variant("quickstart", FIELDS, name) for name in names}
    trainers = {name: Trainer(config, CPU) for name, config in configs.items()}
    with torch.no_grad():
        trainers["p_rope/timeout=9"].model.blocks[1].mlp.up.mul_(1.01)
        trainers["p_rope/keep=9"].model.head[0, 0] = torch.nan
    trainer, problems = trainers["p_rope"], step.gate(trainers, steps=3)
    assert [*problems] == ["p_rope/timeout=9", "p_rope/keep=9"]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert trainer.time_step(2) > 0  # at rate zero
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before))
    trainer.step(lr_factor=1.0)
    assert not any(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before))


def test_step_reports_its_measurements(tmp_path, capsys):
    arguments = "step quickstart p_rope alibi p_rope:flex --rounds 3 --steps 2".split()  # flex cannot train on a CPU
    assert exit_code(bench.main, [*arguments, *FIELDS, "--out", tmp_path]) == 0
    record = read_json(tmp_path / "cpu_step_quickstart.json")
    assert {name for name, result in record["gate"].items() if result == "passed"} == {"p_rope", "alibi"}
    assert list(record["seconds"]) == ["p_rope", "alibi", "p_rope again"]
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    for row, times in zip(rows, record["seconds"].values(), strict=True):
        assert float(row[3].replace(",", "")) == pytest.approx(96 / sorted(times)[1], abs=1)
        assert row[7].strip() == protocol.ratio_cell(times, record["seconds"]["p_rope"])


@pytest.mark.parametrize("arguments, field", [
    ("attention --device cpu --lengths 0", "--lengths"),
    ("attention --device cpu --variants sdpa:nothing", "nothing"),
    ("step no_such_preset p_rope", "no_such_preset"),
    ("step quickstart no_such_method --device cpu", "no_such_method"),
    ("step quickstart p_rope p_rope/batch_tokens=512 --device cpu", "batch_tokens"),
    ("step quickstart --rounds 0 --device cpu", "--rounds"),
    ("step quickstart --wide 1", "--wide"),
])  # fmt: skip
def test_a_mistake_is_exit_code_2_and_names_the_field(arguments, field, capsys):
    assert exit_code(bench.main, arguments.split()) == 2
    message = capsys.readouterr().err
    assert field in message and message.count("\n") == 1
