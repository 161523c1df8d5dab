"""bench step: the variants compute what they say, a wrong one gets no time, and the numbers in the tables are those of
the seconds that were measured. What is fast is no business of a test."""

import dataclasses
import json
import math
import statistics

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from configs.config import Config
from configs.presets import preset
from model.gpt import GPT
from optim.muon import Muon
from runtime.device import matmul_rate
from scripts.bench import __main__ as bench
from scripts.bench import baselines, protocol
from scripts.bench.peers import with_data
from scripts.bench.profile import category, time_by_category
from scripts.bench.protocol import paired_ratio
from scripts.bench.step import flops_per_token, gate
from scripts.bench.trainers import KINDS, StepBench, StepVariant, fill_zeros, read_variant

TINY = dict(
    vocab_size=300, num_layers=2, num_heads=2, model_dim=32, train_length=24, batch_tokens=96, micro_batch_tokens=48,
    compile="off", device="cpu", dtype="float32",
)  # fmt: skip


def command(monkeypatch, folder, *arguments):
    fields = [word for name, value in (TINY | dict(data_dir=folder / "none")).items() for word in (f"--{name}", value)]
    monkeypatch.setattr("sys.argv", ["bench", "step", "quickstart", *map(str, [*arguments, *fields])])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    return stop.value.code


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def table(page, head):
    """The rows below the heading, as dicts."""
    lines = [cells(line) for line in page.split(head)[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line)) for line in lines[2:]]


def tiny_model(seed=0, method="p_rope"):
    torch.manual_seed(seed)
    shape = {name: TINY[name] for name in ("vocab_size", "num_layers", "num_heads", "model_dim", "train_length")}
    model = GPT(**shape, method=method)
    fill_zeros(model)
    return model


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, (2, 3, 24), generator=generator).unbind()


# ---- the baselines ---------------------------------------------------------------------------------------------------


def test_separate_projections_and_the_plain_loss_are_the_same_function():
    ours, theirs = tiny_model(), tiny_model()
    baselines.separate_projections(theirs)
    losses = (
        ours(*batch(), plan=ours.plan(24)),
        baselines.plain_loss(theirs)(*batch(), plan=theirs.plan(24, backend="sdpa")),
    )
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for a, b in zip(ours.blocks, theirs.blocks):
        separate = torch.stack([p.grad for p in (b.attention.q, b.attention.k, b.attention.v)])
        torch.testing.assert_close(separate, a.attention.qkv.grad, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(theirs.head.grad, ours.head.grad, rtol=1e-4, atol=1e-7)


def test_muon_matrix_by_matrix_makes_the_same_updates():
    generator = torch.Generator().manual_seed(2)
    start = [torch.randn(shape, generator=generator) for shape in [(3, 16, 16), (40, 16), (16, 40)]]
    params = {make: [nn.Parameter(x.clone()) for x in start] for make in (Muon, baselines.MatrixMuon)}
    optimizers = {make: make(own, lr=0.1, dtype=torch.float32) for make, own in params.items()}
    for _ in range(3):
        for grads in zip(*params.values()):
            grad = torch.randn(grads[0].shape, generator=generator)
            for p in grads:
                p.grad = grad.clone()
        for optimizer in optimizers.values():
            optimizer.step()
    for ours, theirs, before in zip(*params.values(), start):
        assert (ours - before).norm() > 0.1
        assert (ours - theirs).norm() < 1e-4 * (ours - before).norm()


def nano_reference(model, tokens, targets):
    """The same in float64, from the formulas of GPT-2."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    def layer_norm(x, g):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * g
    T, H = tokens.shape[1], model.blocks[0].num_heads
    x = w["embedding.weight"][tokens] + w["positions.weight"][:T]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    for i in range(len(model.blocks)):
        def b(name):
            return w[f"blocks.{i}.{name}.weight"]
        q, k, v = (layer_norm(x, b("attention_norm")) @ b("qkv").T).chunk(3, -1)
        def heads(y):
            return y.unflatten(-1, (H, -1)).transpose(1, 2)
        scores = heads(q) @ heads(k).mT / heads(q).shape[-1] ** 0.5
        y = scores.masked_fill(future, -math.inf).softmax(-1) @ heads(v)
        x = x + y.transpose(1, 2).flatten(2) @ b("proj").T
        up = layer_norm(x, b("mlp_norm")) @ b("up").T
        x = x + (up * (1 + torch.erf(up / 2**0.5)) / 2) @ b("down").T
    logits = layer_norm(x, w["norm.weight"]) @ w["embedding.weight"].T
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def test_nanogpt_is_gpt_2():
    torch.manual_seed(3)
    model = baselines.NanoGPT(300, 2, 4, 32, 24, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)  # norms and positions that matter
    assert sum(p.numel() for p in model.parameters()) == 12 * 32**2 * 2 + 32 * 300 + 32 * 24 + 5 * 32
    assert model(*batch()).item() == pytest.approx(nano_reference(model, *batch()).item(), rel=1e-5)


def test_nanogpt_decays_matrices_only():
    model = baselines.NanoGPT(300, 1, 2, 32, 24, torch.float32)
    decay = {p: o.param_groups[0]["weight_decay"] for o in baselines.adamw(model).optimizers.values()
             for p in o.param_groups[0]["params"]}  # fmt: skip
    assert all(decay[p] == (0.1 if p.ndim == 2 else 0.0) for p in model.parameters())


@pytest.mark.parametrize(
    "name, variant",
    [
        ("record8", StepVariant("p_rope", "sdpa", frozenset(["qkv", "muon", "loss", "sdpa"]))),
        ("alibi:blocks-muon-qkv", StepVariant("alibi", "blocks", frozenset(["qkv", "muon"]), "alibi:blocks")),
        ("scale_invariant_p_rope", StepVariant("scale_invariant_p_rope", counterpart="record8+flex")),
        ("nanogpt", StepVariant("")),
    ],
)
def test_read_variant(name, variant):
    assert read_variant(name) == variant or dataclasses.replace(read_variant(name), counterpart="p_rope") == variant


# ---- the gate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_bench(tmp_path):
    config = Config(**TINY | dict(steps=2000, val_lengths=(24,), val_tokens=24, data_dir=str(tmp_path)))
    with_data([], dataclasses.replace(config, data_dir="none"), tmp_path)  # makes tmp_path/zipf
    return StepBench(dataclasses.replace(config, data_dir=str(tmp_path / "zipf")), torch.device("cpu"))


def test_the_gate_lets_equal_models_pass_and_no_others(tiny_bench):
    variants = {name: read_variant(name) for name in ("record8", "p_rope", "p_rope-muon", "nope")}
    variants["wrong"] = variants["broken"] = variants["p_rope"]
    trainers = {name: tiny_bench.build(variant) for name, variant in variants.items()}
    with torch.no_grad():
        trainers["wrong"].model.blocks[1].mlp.up.mul_(1.01)
        trainers["broken"].model.head[0, 0] = torch.nan
    muon = {name: type(t.optimizers.optimizers["matrices"]) for name, t in trainers.items()}
    assert muon["record8"] is muon["p_rope-muon"] is baselines.MatrixMuon and muon["p_rope"] is Muon
    before = trainers["p_rope"].model.blocks[0].mlp.up.detach().clone()
    results = gate(tiny_bench, trainers, variants, steps=5)
    assert (trainers["p_rope"].model.blocks[0].mlp.up - before).norm() > 0.1  # it trains
    for trainer in trainers.values():
        trainer.loader.close()
    assert {name: r["passed"] for name, r in results.items()} == {
        "record8": True, "p_rope": True, "p_rope-muon": True, "nope": True, "wrong": False, "broken": False
    }  # fmt: skip
    assert len(results["p_rope"]["loss"]) == 5


def test_timing_moves_no_weight(tiny_bench):
    trainer = tiny_bench.build(read_variant("p_rope"))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert all(tiny_bench.time(trainer, kind, 2) > 0 for kind in KINDS)
    trainer.loader.close()
    assert all(torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before))
    assert all(p.grad is None for p in trainer.model.parameters())


# ---- the tables ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tables_say_what_was_measured(monkeypatch, tmp_path, capsys):
    names = ["record8", "p_rope", "p_rope-loss", "record8+flex", "nanogpt"]
    # One call a cell: time enough on a busy machine, and little of it used on any.
    monkeypatch.setattr(protocol, "schedule", lambda costs, rounds, *_, **__: (rounds, dict.fromkeys(costs, 1)))
    arguments = [*names, "--rounds", 3, "--steps", 2, "--minutes", 60, "--out", tmp_path]
    assert command(monkeypatch, tmp_path, *arguments) == 0
    page, record = (next(tmp_path.glob(f"*.{kind}")).read_text() for kind in ("md", "json"))
    record = json.loads(record)
    assert capsys.readouterr().out.split() == page.split()
    assert "random tokens (Zipf)" in page and record["problems"].keys() == {"record8+flex"}
    seconds = {
        name: {kind: statistics.median(t) for kind, t in times.items()} for name, times in record["seconds"].items()
    }
    assert list(seconds) == ["record8", "p_rope", "p_rope-loss", "nanogpt", "record8 again"]
    assert all(len(t) == 3 for times in record["seconds"].values() for t in times.values())
    times, use, pairs = (
        table(page, f"## {head}\n") for head in ("Times", "Use of the machine", "Against its counterpart")
    )
    assert [row["variant"] for row in times] == [row["variant"] for row in use] == list(seconds)
    for row, used, (name, s) in zip(times, use, seconds.items()):
        rate = 96 / s["step"]
        assert float(row["tokens/s"].replace(",", "")) == pytest.approx(rate, abs=1)
        assert float(row["share"].strip("%")) == pytest.approx(100 * s["optimizer"] / s["step"], abs=0.01)
        assert float(row["sum"]) == pytest.approx((2 * s["micro"] + s["optimizer"]) / s["step"], abs=1e-3)
        matmul = statistics.fmean(record["matmul_rates"])
        share = 100 * rate * record["flops_per_token"]["model"] / matmul
        assert float(used["of matmul"].strip("%")) == pytest.approx(share, abs=0.1)
        ratio = paired_ratio(record["seconds"][name]["step"], record["seconds"]["record8"]["step"])
        assert row["time to record8"].startswith(f"{ratio[0]:.3f} (")
    assert [(row["variant"], row["to"]) for row in pairs] == [("p_rope", "record8"), ("p_rope-loss", "p_rope")]


@pytest.mark.parametrize("length", [4096, 65_536])
def test_flops_are_those_of_every_matmul(length):
    config = dataclasses.replace(preset("gpt_162m_4k"), train_length=length)
    matmuls = 12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 50304  # multiply-adds a token, forward
    logits = 12 * 768 * (length + 1) / 2  # on average, of q k and the same of p v
    counts = flops_per_token(config)
    assert counts["model"] == 3 * 2 * (matmuls + 2 * logits)
    assert counts["hardware"] == 3 * 2 * matmuls + 3.5 * 2 * 2 * logits
    assert counts["palm"] == 6 * matmuls + 12 * 12 * 768 * length


def test_matmul_rate_is_that_of_a_matmul():
    rate = matmul_rate(torch.device("cpu"), torch.float32, 96, 0.01)
    assert 0 < rate < 1e15


# ---- the profile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, expected",
    [
        (["aten::mm", "scale_invariant::loss_and_gradients"], "matmul"),
        (["nvjet_tst_256x128_64x4_coopB_NNT", "aten::addmm"], "matmul"),
        (["sm90_xmma_gemm_bf16bf16", "aten::bmm"], "matmul"),
        (["aten::bmm", "Optimizer.step#Muon.step"], "optimizer"),
        (["triton_poi_fused_add_3", "Optimizer.step#Adam.step"], "optimizer"),
        (["ncclDevKernel_ReduceScatter_Sum_f32", "c10d::_reduce_scatter_base_"], "communication"),
        (["scale_invariant::cpu_backward", "CompiledFunctionBackward"], "attention"),
        (["cudnn_generated_fort_native_sdpa_sm90", "aten::_scaled_dot_product_cudnn_attention"], "attention"),
        (["aten::slice", "scale_invariant::loss_and_gradients"], "cross-entropy"),
        (["triton_red_fused__log_softmax_2", "CompiledFunction"], "cross-entropy"),
        (["triton_red_fused_mean_mul_pow_rsqrt_1", "CompiledFunction"], "elementwise, norms, copies"),
        (["graph_1_cpp_fused_add_mean_4", "CompiledFunction"], "elementwise, norms, copies"),
        (["Memcpy HtoD (Pinned -> Device)", "aten::copy_"], "elementwise, norms, copies"),
        (["Torch-Compiled Region: 0/0"], None),
        (["CompiledFunctionBackward", "autograd::engine::evaluate_function: CompiledFunctionBackward"], None),
    ],
)
def test_category(names, expected):
    assert category(names) == expected


def test_time_by_category_counts_each_operation_once():
    x = torch.randn(200, 200)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(20):
            x @ x
        x.exp()
        with record_function("Optimizer.step#Muon.step"):
            x @ x
    total, parts = time_by_category(profiler.events(), on_gpu=False)
    *others, last = [e.self_cpu_time_total for e in profiler.events() if e.name == "aten::mm"]
    assert parts["matmul"]["aten::mm"] == pytest.approx(sum(others)) and len(others) == 20
    assert parts["optimizer"]["aten::mm"] == pytest.approx(last)
    assert sum(total.values()) <= sum(e.self_cpu_time_total for e in profiler.events()) * 1.0001


def test_profile_writes_a_trace_and_a_table(monkeypatch, tmp_path):
    assert command(monkeypatch, tmp_path, "p_rope", "--profile", tmp_path / "out", "--steps", 2) == 0
    trace, record = (next((tmp_path / "out").glob(name)) for name in ("*.trace.json", "*24.json"))
    assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])
    record = json.loads(record.read_text())
    assert sum(record["microseconds"].values()) == pytest.approx(1e6 * record["seconds"], rel=0.01)
    assert {"matmul", "optimizer", "cross-entropy", "host"} <= record["microseconds"].keys()
    rows = table(record_page := next((tmp_path / "out").glob("*.md")).read_text(), "# Where a step's time goes")
    assert sum(float(row["share"].strip("%")) for row in rows) == pytest.approx(100, abs=1), record_page
