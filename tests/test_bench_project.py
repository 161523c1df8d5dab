"""bench project: every number of its tables follows from the inputs that its head states."""

import dataclasses
import json

import pytest

from configs.presets import preset
from runtime.flops import training_flops_per_token, validation_share
from scripts.bench import __main__ as bench
from scripts.bench.project import build_optimizers_of, project_run, split_batch, tokens_per_second

SPEED = dict(nvlink=100e9, network=10e9, latency=0.0)


def table(page, head):
    """The rows below the heading, as lists of cells."""
    part = page.split(f"\n## {head}\n")[1].split("\n## ")[0]
    return [[c.strip() for c in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]


def test_a_batch_is_shared_by_data_and_then_by_context_parallelism():
    config = preset("gpt_162m_64k")  # 8 sequences, 6 heads; 3 and 6 do not divide a length of 2^16
    shared = [split_batch(config, n) for n in (1, 2, 8, 16, 3, 12, 32)]
    assert shared == [(1, 8), (1, 4), (1, 1), (2, 1), None, None, None]
    assert split_batch(preset("gpt_304m_4k"), 7 * 64) == (2, 1)


def test_communication_is_that_of_the_bytes_and_bandwidths():
    config = preset("quickstart")
    parameters = 2 * 2048 * 128 + 3 * 12 * 128**2
    row = project_run(config, 2, 1e6, **SPEED)
    sent = build_optimizers_of(config, 2).bytes_a_step()
    assert {key: row[key] for key in sent} == sent and sent["reduce_scatter"] == 4 * parameters
    assert row["compute"] == 2048 / 2 / 1e6 and row["same_batch"]
    # Half of a rank's bytes are for the other rank, once to sum and once to collect.
    assert row["communication"] == pytest.approx((sent["reduce_scatter"] / 2 + sent["all_gather"]) / 100e9)
    assert row["efficiency"] == row["compute"] / (row["compute"] + row["communication"])
    slower = project_run(config, 2, 1e6, **SPEED | dict(latency=1e-3))
    collectives = 2 * len(build_optimizers_of(config, 2).all_buckets())
    assert slower["communication"] - row["communication"] == pytest.approx(1e-3 * collectives)


def test_beyond_a_node_the_network_carries_each_gpus_share():
    row = project_run(preset("gpt_162m_4k"), 32, 1e5, **SPEED)
    assert row["all_reduce"] == row["all_gather"] == row["reduce_scatter"] / 8 >= 162_201_600 * 4 / 8
    in_node = (row["reduce_scatter"] / 8 + row["all_gather"]) * 7 / 100e9
    assert row["communication"] == pytest.approx(in_node + 2 * row["all_reduce"] * 3 / 4 / 10e9)


def test_context_parallelism_adds_its_bytes():
    row = project_run(preset("gpt_162m_64k"), 16, 1e5, **SPEED)
    # 12 layers, q k v y and their gradients, half a sequence of 768 numbers in 2 bytes
    assert (row["context"], row["all_to_all"]) == (2, 12 * 8 * 32_768 * 768 * 2)
    in_node = (row["reduce_scatter"] / 8 + row["all_gather"]) * 7 + row["all_to_all"] / 2
    assert row["communication"] == pytest.approx(in_node / 100e9 + row["all_reduce"] / 10e9)


def test_a_batch_too_small_for_the_gpus_grows_and_says_so():
    row = project_run(preset("gpt_162m_64k"), 64, 1e5, **SPEED)
    assert (row["context"], row["batch"], row["same_batch"]) == (1, 64 * 65_536, False)
    hours = 4578 * 524_288 / (64 * 65_536) * (row["compute"] + row["communication"]) / 3600
    assert row["hours"] == pytest.approx(hours)


def test_the_command_prints_hours_from_assumed_and_from_measured_rates(monkeypatch, tmp_path):
    config = preset("gpt_162m_4k")
    seconds = dict(p_rope=dict(step=[1.0, 2.0, 9.0]))
    measured = tmp_path / "step.json"
    measured.write_text(json.dumps(dict(config=config.to_dict(), seconds=seconds, device="a GPU")))
    command = f"bench project gpt_162m_4k gpt_304m_4k --gpus 1 8 --mfu 0.5 --variant p_rope --results {measured}"
    monkeypatch.setattr("sys.argv", [*command.split(), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == 0
    page = (tmp_path / "cpu_project.md").read_text()
    first, second = table(page, "Runs")[2:]
    assert first[2] == "262,144 tokens/s, a GPU" and float(first[4]) == pytest.approx(4578 * 2 / 3600, abs=0.01)
    rate = 0.5 * 989.4e12 / training_flops_per_token(preset("gpt_304m_4k"))
    assert second[2] == f"{rate:,.0f} tokens/s, assumed"
    hours, with_paper, with_fast = map(float, first[4:7])
    fast = validation_share(dataclasses.replace(config, val_profile="fast"))
    assert with_paper / hours - 1 == pytest.approx(validation_share(config), abs=0.01)
    assert with_fast / hours - 1 == pytest.approx(fast, abs=0.01)
    rows = table(page, "gpt_162m_4k")[2:]
    assert [row[0] for row in rows] == ["1", "8"] and rows[0][-2] == "100.0%" and rows[0][-1] == first[4]


def test_a_result_at_another_shape_is_not_taken():
    config = preset("gpt_162m_4k")
    record = dict(config=config.to_dict(), seconds=dict(p_rope=dict(step=[1.0])), device="a GPU")
    assert tokens_per_second(config, [record], "p_rope") == (524_288, "a GPU")
    assert tokens_per_second(config, [record], "alibi") is None
    assert tokens_per_second(preset("gpt_162m_16k"), [record], "p_rope") is None
