"""scripts/bench/memory.py: the count on fake tensors is what the allocator of a CPU really hands out, and a validation
keeps no logits."""

import dataclasses
import json
import runpy

import pytest
import torch
from test_train import here, make_data
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from configs.presets import preset
from data.shards import open_split
from model import loss
from runtime.build import build_model, build_optimizers, train_step
from runtime.processes import World
from runtime.validation import Validation
from scripts.bench import memory
from scripts.bench.memory import StorageCount, count_memory, run_steps

CPU = torch.device("cpu")


def allocated(tmp_path, function) -> int:
    """Most bytes that the CPU's allocator had handed out at once while the function ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


def test_a_storage_counts_once_and_until_nothing_refers_to_it():
    with StorageCount({}) as memory:
        x = torch.empty(1000)
        y = x.view(10, 100).mT
        z = y + 1
        assert (memory.live, memory.peak) == (8000, 8000)
        del x
        assert memory.live == 8000  # y is the same memory
        del y
        assert (memory.live, memory.peak) == (4000, 8000)
        memory.start()
        z.add_(1)
    assert (memory.live, memory.peak) == (4000, 4000)


def test_workspace_counts_while_its_operation_runs():
    with StorageCount({torch.ops.aten.mm.default: lambda a, b: 5 * len(a)}) as memory:
        x = torch.empty(100, 100)
        y = x @ x
    assert (memory.live, memory.peak) == (2 * y.nbytes, 2 * y.nbytes + 500)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, dict(train_length=512, num_layers=5, num_heads=2, model_dim=56, vocab_size=777)]
)
def test_the_count_on_fake_tensors_is_what_is_allocated(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(loss, "CPU_LOGITS", 1)  # chunks so small that their logits, not in this count, make no peak
    fields = dict(method="p_rope", dtype="float32", val_lengths=(384,), val_tokens=384) | changes
    config = dataclasses.replace(preset("quickstart"), **fields)
    with FakeTensorMode(), StorageCount({}) as memory:
        training, validation = run_steps(config, CPU, memory)

    model = build_model(config, torch.float32)
    optimizers = build_optimizers(config, model, False, World.alone(CPU))

    def inputs(length):
        tokens = torch.zeros(2, config.micro_batch_tokens // length, length, dtype=torch.int64)
        (plan,) = model.plan(length, backend="sdpa")
        return tokens, (plan,), tokens.nbytes + plan.cos.nbytes + plan.sin.nbytes

    tokens, plan, extra = inputs(config.train_length)
    def step():
        return train_step(model, [tokens] * 2, plan, optimizers, 1.0, World.alone(CPU))
    step()
    there = training["parameters"] + training["state"]
    assert training["peak"] == pytest.approx(there + extra + allocated(tmp_path, step), rel=0.01)
    with torch.no_grad():
        tokens, plan, extra_too = inputs(384)
        def passing():
            return model(*tokens, plan=plan, per_token=True)
        expected = there + extra + extra_too + allocated(tmp_path, passing)
    assert validation["peak"] == pytest.approx(expected, rel=0.03)  # the kernels' workspace is not in the count


def test_a_validation_keeps_no_logits(tmp_path):
    data = make_data(tmp_path / "data")
    fields = dict(vocab_size=65_536, model_dim=8, num_heads=1, num_layers=1, method="p_rope", dtype="float32")
    fields |= dict(val_lengths=(256,), val_tokens=768, micro_batch_tokens=768)
    config = dataclasses.replace(preset("quickstart"), **fields)
    model, stream = build_model(config, torch.float32), open_split(data, "val", 64)
    validation = Validation(config, model, model, {"p_rope": {256: model.plan(256)}}, stream, World.alone(CPU))
    peak = allocated(tmp_path, lambda: validation.losses({256: 768}))
    assert peak < 0.5 * 768 * config.vocab_size * 4  # all logits in float32: 201 MB


@pytest.mark.slow
def test_training_and_validation_at_64k_fit_a_gpu_of_80_gb():
    rows = count_memory(dataclasses.replace(preset("gpt_162m_64k"), val_lengths=(65_536,)), CPU)
    assert [(row["work"], row["length"]) for row in rows] == [("training", 65_536), ("validation", 65_536)]
    assert rows[0]["parameters"] == 4 * 162_201_600 and rows[0]["activations"] > 20e9
    assert all(row["peak"] < 80e9 for row in rows)


def test_the_table_says_that_it_is_a_count(capsys):
    here(memory.main, "quickstart", "--length", 64, "--tokens", 128)
    text = capsys.readouterr().out
    assert "counted on fake tensors" in text and "not measured" in text and "training at 64" in text


def test_a_length_that_does_not_fit_a_step_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        here(lambda: runpy.run_module("scripts.memory", run_name="__main__"), "quickstart", "--length", 100)
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith("error: train_length 100 does not divide")
