"""The benchmarks: ratios from canned times, the gates, the row of the baseline again, one small run of each command."""

import re

import torch
from attention_cases import random
from commands import exit_code, fixture, parametrize, read_json, rows_of, slow, succeeds
from pytest import approx
from torch.testing import assert_close

from model.attention.blocks import Blocks
from model.attention.check import check_backend
from model.attention.choose import BACKENDS
from model.attention.plan import LayerPlan
from model.attention.reference import plain_attention
from model.methods import MECHANISMS
from results.gpu import attention as gpu
from scripts.bench import __main__ as bench
from scripts.bench import attention, protocol, step
from scripts.bench.trainers import Trainer

FIELDS = (
    "--vocab_size 300 --num_layers 2 --num_heads 2 --model_dim 32 --train_length 24 --batch_tokens 96 "
    "--micro_batch_tokens 48 --compile off --device cpu --length_schedule --cooldown_steps 0 --val_copy_gaps"
).split()
CPU = torch.device("cpu")


@fixture(autouse=True)
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
    assert calls == 3 * [("a", 1), ("b", 1), ("a", 1)]  # the first calls are a trial
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
    }
    assert [entry["kind"] for entry in record["times"]] == ["forward", "both"]
    for entry, text in zip(record["times"], page.split("###")[1:], strict=True):
        rows = rows_of(text)[1:]
        assert [row[0] for row in rows] == ["sdpa:plain", "blocks:si", "sdpa:plain again"]
        for row, seconds in zip(rows, entry["seconds"].values(), strict=True):
            assert len(seconds) == 3 and float(row[1]) == approx(sorted(seconds)[1] * 1e3, abs=1e-3)


def make(name):
    return attention.make_variant(name, 2, 16, CPU)


@fixture
def on_gpu(monkeypatch):
    """Let the benchmark know the variants of results/gpu, as its command does."""
    for known, more in ((MECHANISMS, gpu.MORE_MECHANISMS), (BACKENDS, gpu.MORE_BACKENDS)):
        for name, value in more.items():
            monkeypatch.setitem(known, name, value)
    for name in gpu.MORE_MECHANISMS:
        monkeypatch.setitem(attention.FORMULAS, name, f"nope+{name}")


def test_all_default_variants_are_known():
    for name in [*attention.CUDA, *attention.CPU]:
        make(name)


def test_the_gate_of_a_soft_cap_has_its_formula_and_refuses_plain_attention(on_gpu):
    (_, capped), (_, paper), (_, si) = map(make, ("written:softcap", "written:paper", "flex:si"))
    q, k, v = qkv = 3 * random(3, 1, 2, 130, 16, seed=0)
    hidden = torch.ones(130, 130, dtype=torch.bool).triu(1)
    logits = (20 * torch.tanh(q @ k.mT / 4 / 20)).masked_fill(hidden, -torch.inf)
    assert_close(plain_attention(capped, *qkv), logits.softmax(dim=-1) @ v)
    assert_close(plain_attention(paper, *qkv), plain_attention(si, *qkv))
    assert "output" in check_backend(BACKENDS["sdpa"], capped, CPU, torch.float32, [130], backward=False).problem


@parametrize("formula", ["paper", "softcap"])
def test_flex_evaluates_a_formula_at_each_logit(formula, on_gpu):
    """A test below compares the values with the formula."""
    backend, method = make(f"written:{formula}")
    prepared = backend.prepare(LayerPlan(backend, 2, 16, 1024, 1024), method.score_change)
    captured = [cell.cell_contents for cell in prepared["score_mod"].__closure__]
    assert not any(isinstance(x, torch.Tensor) for x in captured)  # no table


def test_flex_takes_tiles(on_gpu):
    forward = dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64, fwd_num_warps=4, fwd_num_stages=2)
    backward = dict(bwd_BLOCK_M1=32, bwd_BLOCK_N1=128, bwd_BLOCK_M2=128, bwd_BLOCK_N2=32)
    backward |= dict(bwd_num_warps=8, bwd_num_stages=2)
    found = []
    for tiles in ("", "-fwd-128-64-4-2", "-bwd-32-128-128-32-8-2"):
        backend, method = make(f"flex{tiles}:si")
        plan = LayerPlan(backend, 2, 16, 1024, 1024)
        found.append(backend.prepare(plan, method.score_change)["kernel_options"])
    assert found[1:] == [found[0] | forward, found[0] | backward]


def test_a_kernel_by_name_runs_alone(monkeypatch, on_gpu):
    enabled = []
    def spy(*qkv, **more):
        cuda = torch.backends.cuda
        enabled.append((cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for name in ("flash2:plain", "cudnn:plain", "sdpa:plain"):
        make(name)[0].run(*torch.zeros(3, 1, 2, 9, 16), None)
    assert enabled == [(True, False, False), (False, True, False), (True, True, True)]


@slow
def test_flex_runs_forward_on_a_cpu(tmp_path, monkeypatch, on_gpu):
    monkeypatch.setattr(attention, "LENGTHS", (130,))
    sizes = "--device cpu --lengths 130 --heads 2 --head-dim 16 --rounds 1".split()
    names = f"written:paper written:softcap cudnn:plain flex-{gpu.TILES[-1]}:si sdpa:plain".split()
    succeeds(gpu.main, *sizes, "--variants", *names, "--out", tmp_path)
    gate = read_json(tmp_path / "cpu_attention.json")["gate"]
    results = {name: result.split(":")[0] for name, result in gate.items()}
    assert results.pop("cudnn:plain") == "not run" and {*results.values()} == {"passed"}
    names.remove("cudnn:plain")
    forward, both = (list(entry["seconds"]) for entry in read_json(tmp_path / "cpu_attention.json")["times"])
    assert forward == [*names, "written:paper again"] and both == ["sdpa:plain", "sdpa:plain again"]


def test_the_gate_lets_equal_models_pass_and_no_others():
    names = "p_rope p_rope:blocks p_rope/micro_batch_tokens=24 alibi p_rope/timeout=9 p_rope/keep=9".split()
    trainers = {name: Trainer(step.read_variant("quickstart", FIELDS, name), CPU) for name in names}
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
    succeeds(bench.main, *arguments, *FIELDS, "--out", tmp_path)
    record = read_json(tmp_path / "cpu_step_quickstart.json")
    assert {name for name, result in record["gate"].items() if result == "passed"} == {"p_rope", "alibi"}
    assert list(record["seconds"]) == ["p_rope", "alibi", "p_rope again"]
    rows = rows_of(capsys.readouterr().out)[1:]
    for row, times in zip(rows, record["seconds"].values(), strict=True):
        assert float(row[2].replace(",", "")) == approx(96 / sorted(times)[1], abs=1)
        assert row[6] == protocol.ratio_cell(times, record["seconds"]["p_rope"])
