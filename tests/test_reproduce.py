"""Tables and figures from runs with known contents: the numbers, the files, and what is missing."""

import csv
import dataclasses
import json
import math
import re
import sys

import matplotlib.image
import numpy as np
import pytest
import torch

from configs.sweeps import SCALES, SWEEPS, sweep
from data.shard_writer import ShardWriter
from runtime.build import build_model
from runtime.checkpoint import save_checkpoint
from scripts.reproduce import figures, needles, pages
from scripts.reproduce.__main__ import main
from scripts.reproduce.drawing import drawing, legend_below
from scripts.reproduce.figures import mean_over_seeds, tau_of
from scripts.reproduce.tables import paper_targets
from scripts.shared.arguments import field_changes
from scripts.shared.looks import method_name, series_label, series_name
from scripts.shared.runs import data_fingerprint, read_runs
from scripts.shared.tables import mean_and_stderr

pytestmark = pytest.mark.slow

TINY = "--num_heads 2 --model_dim 16 --vocab_size 64 --train_length 64 --batch_tokens 64 --steps 2"


def write_run(
    runs_dir, run, losses, *, steps=(0, 200, 400, 640), val_tokens=49_152, data="abc", needle=None, part=None,
    others={}, **summary,
):  # fmt: skip
    """A finished run whose validation loss falls by 0.1 a record to the given losses {length: nats}.

    others: losses of its weights as other methods, {method: losses}. part: validation tokens, before the end, at all
    lengths but the first (the fast profile).
    """
    folder = runs_dir / run.name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(run.config.to_dict()))
    (folder / "log.txt").write_text("python 3, torch 2.13.0\ndevice: an abacus\ncommit: 0123abc\n==== a.py ====\n")
    records = [dict(step=1, tokens=1, train_loss=5.0)]
    for i, step in enumerate(steps):
        above = 0.1 * (len(steps) - 1 - i)
        record = dict(step=step, tokens=step, val_loss={str(n): x + above for n, x in losses.items()})
        record["val_loss_as"] = {m: {str(n): x + above for n, x in found.items()} for m, found in others.items()}
        record["val_tokens"] = dict.fromkeys(record["val_loss"], val_tokens)
        if part and step < steps[-1]:
            record["val_tokens"] |= dict.fromkeys([*record["val_loss"]][1:], part)
        records.append(record)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    last = {key: records[-1][key] for key in ("val_loss", "val_loss_as", "val_tokens")}
    summary = dict(name=run.name, data=data, steps=steps[-1], tokens=1000, **last) | summary
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "data.json").write_text(json.dumps(dict(train=data, validation="v")))
    if needle:
        (folder / "needle").mkdir()
        (folder / "needle" / "summary.json").write_text(json.dumps(needle))
    return folder


def write_study(runs_dir, item, scale="mini", **options):
    """All runs of a study, with losses that differ by series and seed; returns them by (series, seed, length)."""
    random, values = np.random.default_rng(0), {}
    for number, run in enumerate(sweep(item, scale)):
        drawn = {m: {n: 4 + 0.01 * number + random.random() for n in run.config.val_lengths} for m in run.methods}
        losses, others = drawn[run.methods[0]], {method: drawn[method] for method in run.methods[1:]}
        steps = [s * run.config.steps // 4 for s in range(5)]
        write_run(runs_dir, run, losses, steps=steps, others=others, **options)
        shown = {series_label(run.config): losses} | others
        values |= {(name, run.config.seed, n): x for name, found in shown.items() for n, x in found.items()}
    return values


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs the command on tmp_path's runs, with --csv: its exit status and its output."""

    def call(*words):
        arguments = [*words, "--csv", "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["reproduce", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr()

    return call


def rows(tmp_path, name):
    with open(tmp_path / "out" / "csv" / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def is_figure(path):
    """A PNG of the page's width with something drawn on it."""
    pixels = matplotlib.image.imread(path.with_suffix(".png"))
    return pixels.shape[1] == 1350 and pixels.shape[0] > 300 and pixels[..., :3].std() > 0.05


def cells_of(text):
    """The table rows of a text, by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)}


def same(run, value=4.0):
    return {n: value for n in run.config.val_lengths}


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_mean_and_standard_error():
    mean, stderr = mean_and_stderr([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert stderr == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2 / 3))
    assert mean_and_stderr([2.0]) == (2.0, None) and mean_and_stderr([]) == (None, None)


def test_methods_of_mechanisms_have_names():
    assert method_name("pope+scale_invariant+gate") == "Scale-invariant PoPE, gated output"
    assert method_name("p_rope+forget") == "p-RoPE, forgetting"
    assert method_name("scale_invariant_nope,rope+window,rope+window") == "Scale-invariant NoPE; 2 x RoPE, window"


def test_paper_targets_are_whole():
    counts = dict(table_losses=30, table_needle=30, table_infini=12, table_llama=30)
    assert {name: len(paper_targets(name)) for name in counts} == counts
    losses = paper_targets("table_losses")
    assert losses["p_rope", 65_536] == dict(mean=5.735, stderr=0.085, seeds=3, note="", remark="")
    odd = {(name, m) for name in counts for (m, _), target in paper_targets(name).items() if target["remark"]}
    assert odd == {*((name, "yarn") for name in counts if name != "table_infini"), ("table_llama", "rope_ntk")}
    for name in ("table_losses", "table_infini"):  # the paper's bold is the lowest of its column
        for length in (4096, 16_384, 65_536):
            column = {m: t for (m, n), t in paper_targets(name).items() if n == length}
            lowest = min(t["mean"] for t in column.values())
            assert all(("bold" in t["note"]) == (t["mean"] == lowest) for t in column.values())


def test_table_losses_has_means_errors_and_the_papers_numbers(tmp_path, call):
    values = write_study(tmp_path / "runs", "table_losses")
    code, output = call("table_losses", "--scale", "mini")
    assert code == 0 and "missing" not in output.out and "runs used: 27 of 27" in output.out
    table = {(r["method"], int(r["length"])): r for r in rows(tmp_path, "table_losses")}
    assert len(table) == 12 * 4  # the published slopes of ALiBi and the scaled tau among them
    lenders = {m: r["weights_of"] for (m, _), r in table.items() if r["weights_of"]}
    assert lenders == dict(rope_ntk="rope", yarn="rope", logn_ntk="logn_rope")
    for (method, length), row in table.items():
        three = np.array([values[method, seed, length] for seed in range(3)])
        assert float(row["mean"]) == pytest.approx(three.mean())
        assert float(row["stderr"]) == pytest.approx(three.std(ddof=1) / math.sqrt(3))
        assert row["seeds"] == "3"
        paper = paper_targets("table_losses").get((method, length * 16))
        assert row["paper_mean"] == (str(paper["mean"]) if paper else "")
    best = min((float(r["mean"]), m) for (m, n), r in table.items() if n == 256)[1]
    line = next(text for text in output.out.splitlines() if re.match(rf"\| {series_name(best)}\u2020? ", text))
    assert line.split("|")[3].strip().startswith("**")
    assert "0123abc (27)" in output.out and "an abacus (27)" in output.out
    assert {"RoPE+NTK\u2020", "ALiBi, official slopes", "Scale-invariant p-RoPE, \u03c4 = 0.625"} <= {
        *cells_of(output.out)
    }


def test_one_seed_has_no_standard_error(tmp_path, call):
    for run in sweep("table_losses", "mini", seeds=[1], methods=["alibi"]):
        write_run(tmp_path / "runs", run, same(run, 4.5))
    code, output = call("table_losses", "--scale", "mini", "--seeds", "1", "--methods", "alibi")
    assert code == 0 and "4.500 \u00b1 n/a" in output.out


def test_without_runs_nothing_is_written_and_the_sweep_is_named(tmp_path, call):
    code, output = call("table_infini", "--scale", "mini", "--steps", "6", "--cooldown_steps", "2")
    assert code == 1 and "runs used: 0 of 12" in output.out and "3.296 \u00b1 0.003" in output.out
    assert "scripts.sweep table_infini --scale mini" in output.out and "--steps 6 --cooldown_steps 2`" in output.out
    assert [*cells_of(output.out)] == ["method", "RoPE", "Scale-invariant p-RoPE", "", "Infini-RoPE", "Infini-p-RoPE"]
    assert not (tmp_path / "out").exists()


def test_runs_of_an_item_read_equally_many_tokens():
    """So that the fingerprints of what they read are the same on the same text."""
    for item in SWEEPS:
        for scale in SCALES:
            assert len({run.config.steps * run.config.batch_tokens for run in sweep(item, scale)}) == 1


@pytest.mark.parametrize("field", ["train", "validation", "val_tokens"])
def test_runs_on_another_text_are_named_and_left_out(tmp_path, call, field):
    runs = sweep("table_losses", "mini", methods=["rope"])
    for run in runs:
        folder = write_run(tmp_path / "runs", run, same(run))
    path = folder / ("summary.json" if field == "val_tokens" else "data.json")
    stored = json.loads(path.read_text())
    stored[field] = 1024 if field == "val_tokens" else "other"
    path.write_text(json.dumps(stored))
    if field == "train":
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | dict(data="other")))
    code, output = call("table_losses", "--scale", "mini", "--methods", "rope")
    assert code == 1 and "`mini-rope-s2`" in output.out and "runs used: 2 of 3" in output.out


def test_missing_lengths_come_from_the_evaluation_or_are_named(tmp_path, call):
    runs = sweep("table_losses", "mini", methods=["rope"])
    folders = [write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.5, 4096: 5.0}) for run in runs]
    evaluation = dict(step="step_000640", val_tokens=49_152, val_loss={"16384": 6.0, "256": 9.0})
    (folders[0] / "evaluation.json").write_text(json.dumps(evaluation))
    (folders[1] / "evaluation.json").write_text(json.dumps(evaluation | dict(val_tokens=1024)))  # other tokens
    elsewhere = dict(other_texts=dict(fedc=evaluation))
    (folders[2] / "evaluation.json").write_text(json.dumps(elsewhere))
    code, output = call("table_losses", "--scale", "mini", "--methods", "rope")
    table = {r["length"]: r for r in rows(tmp_path, "table_losses")}
    assert table["16384"]["mean"] == "6.0" and table["16384"]["seeds"] == "1" and table["256"]["mean"] == "4.0"
    for folder in folders[1:]:
        assert f"python -m scripts.evaluate {folder} --lengths 16384" in output.out
    assert code == 1 and f"scripts.evaluate {folders[0]}" not in output.out


def test_unfinished_other_diverged_and_damaged_runs_are_named(tmp_path, call):
    runs = sweep("table_losses", "mini", seeds=[0], methods=["rope", "p_rope", "nope", "yarn", "alibi"])
    rope, p_rope, nope, alibi, _ = (write_run(tmp_path / "runs", run, same(run)) for run in runs)
    (rope / "summary.json").unlink()
    stored = json.loads((p_rope / "config.json").read_text())
    (p_rope / "config.json").write_text(json.dumps(stored | dict(muon_lr=0.5)))
    (nope / "summary.json").write_text((nope / "summary.json").read_text().replace("4.0", "null"))
    (alibi / "config.json").write_text("[")
    code, output = call(
        "table_losses", "--scale", "mini", "--seeds", "0", "--methods", *(r.config.method for r in runs)
    )
    assert code == 1 and "runs used: 1 of 5" in output.out
    missing = {line for line in output.out.splitlines() if line.startswith("- missing")}
    for name, reason in [("rope", "interrupted"), ("p_rope", "muon_lr"), ("nope", "summary.json"), ("alibi", "config")]:
        assert any(f"`mini-{name}-s0`" in line and reason in line for line in missing), (name, missing)


def test_all_seeds_that_there_are_count_unless_some_are_asked_for(tmp_path, call):
    for run in sweep("figure_304m", "mini", seeds=[0, 7, 9]):
        write_run(tmp_path / "runs", run, same(run, 4.0 + run.config.seed))
    for words, seeds, mean in ((), "3", 4 + 16 / 3), (("--seeds", "0", "9"), "2", 8.5):
        call("figure_304m", "--scale", "mini", "--force", *words)
        last = [r for r in rows(tmp_path, "figure_304m") if r["step"] == "640"]
        assert last and all(r["seeds"] == seeds and float(r["mean"]) == pytest.approx(mean) for r in last)


# ---- needles ---------------------------------------------------------------------------------------------------------


def needle_summary(run, greedy, **settings):
    """What fine-tuning with the settings of scale mini leaves behind, but for `settings`."""
    shares = dict(oracle={"256": 0.99}, greedy=greedy, teacher_forcing=greedy | {"256": 0.95})
    as_others = {method: dict(shares, greedy=dict.fromkeys(greedy, 0.25)) for method in run.config.validate_as}
    return dataclasses.asdict(run.needle) | dict(pretrained="step_000640") | shares | {"as": as_others} | settings


SHARES = {"256": 0.8, "1024": 0.4, "4096": 0.0}


def test_needle_table(tmp_path, call):
    for run in sweep("table_needle", "mini", methods=["alibi", "rope"]):
        method, seed, share = run.config.method, run.config.seed, 0.9 - 0.1 * run.config.seed
        score = {"256": share, "1024": share / 2, "4096": 0.0}
        if (method, seed) == ("rope", 1):
            score.pop("4096")
        if (method, seed) == ("rope", 0):
            score["16384"] = 0.1  # needle --lengths
        missing = (method, seed) == ("alibi", 2)
        other = dict(steps=300) if (method, seed) == ("alibi", 1) else {}
        needle = None if missing else needle_summary(run, score, **other)
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle)
    code, output = call("table_needle", "--scale", "mini", "--methods", "alibi", "rope")
    table = {(r["method"], r["metric"], r["length"]): r for r in rows(tmp_path, "table_needle")}
    three, one = table["rope", "greedy", "256"], table["alibi", "greedy", "1024"]
    assert float(three["mean"]) == pytest.approx(0.8) and float(three["stderr"]) == pytest.approx(0.1 / math.sqrt(3))
    assert float(one["mean"]) == pytest.approx(0.45) and one["seeds"] == "1" and three["paper_mean"] == "0.962"
    assert float(table["rope", "teacher forcing", "256"]["mean"]) == pytest.approx(0.95)
    assert {m: table[m, "greedy", "16384"]["seeds"] for m in ("alibi", "rope")} == {"alibi": "0", "rope": "1"}
    assert cells_of(output.out)["oracle"][1] == "0.990" and "yarn" not in {method for method, _, _ in table}
    missing = [line for line in output.out.splitlines() if line.startswith("- missing")]
    for name, reason in [("alibi-s2", "not fine-tuned"), ("alibi-s1", "steps 300"), ("rope-s1", "4096")]:
        assert any(f"`mini-{name}`" in line and reason in line for line in missing), (name, missing)
    assert code == 1 and f"{SCALES['mini'].needle}" in output.out
    call("table_needle", "--scale", "mini", "--methods", "yarn", "--force")
    (yarn,) = [r for r in rows(tmp_path, "table_needle") if (r["metric"], r["length"]) == ("greedy", "256")]
    assert (yarn["method"], yarn["weights_of"], yarn["mean"]) == ("yarn", "rope", "0.25")


def test_needles_by_distance_are_counted_over_seeds(tmp_path, call):
    runs = sweep("table_needle", "mini", methods=["rope"])
    counts = [{"256": {"64": [3, 4], "128": [0, 5]}}, {"256": {"128": [2, 5], "32": [1, 1]}, "1024": {"512": [1, 9]}}]
    for run, known in zip(runs, [*counts, {}]):
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, SHARES, by_distance=known))
    _, output = call("table_needle", "--scale", "mini", "--methods", "rope")
    assert is_figure(tmp_path / "out" / "figures" / "table_needle_distances")
    keys = "method", "length", "distance", "found", "needles"
    assert [tuple(r[key] for key in keys) for r in rows(tmp_path, "table_needle_distances")] == [
        ("rope", "256", "32", "1", "1"),
        ("rope", "256", "64", "3", "4"),
        ("rope", "256", "128", "2", "10"),
        ("rope", "1024", "512", "1", "9"),
    ]
    table = output.out.split("### By distance")[1].splitlines()
    assert "| RoPE   |    256 |   1/1 |    3/4 |    2/10 |          |" in table


def test_needles_against_tau(tmp_path, call, monkeypatch):
    drawn = []
    monkeypatch.setattr(needles, "draw_lines", lambda path, panels, **_: drawn.append((path.name, panels)))
    for run in sweep("needle_tau", "mini", seeds=[0, 1]):
        gain = bool(run.config.method_options.get("learn_gain"))
        share = tau_of(run.config) / 100 + 0.1 * gain + 0.2 * run.config.seed
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, {"256": share, "1024": 0.0}))
    call("needle_tau", "--scale", "mini", "--seeds", "0", "1")
    lines = dict(drawn)["needle_tau"]["256 tokens (1x)"]
    found = {look["label"]: dict(zip(taus, means)) for look, taus, means, _ in lines}
    assert found["Scale-invariant p-RoPE"] == pytest.approx({t: t / 100 + 0.1 for t in (0.625, 2.5, 10.0, 40.0)})
    gained = found["Scale-invariant p-RoPE, a factor of the scores learned by each head"]
    assert gained == pytest.approx({10.0: 0.3}) and len(found["Scale-invariant PoPE"]) == 2


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds(tmp_path, call):
    values = write_study(tmp_path / "runs", "figure_train_4k")
    code, _ = call("figure_train_4k", "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / "figure_train_4k")
    data = rows(tmp_path, "figure_train_4k")
    assert len(data) == 10 * 3 * 5  # methods, three of them with the weights of another; lengths, validations
    for row in data:
        loss = np.array([values[row["series"], seed, int(row["val_length"])] for seed in range(3)])
        above = 0.1 * (4 - int(row["step"]) / 160)
        assert float(row["mean"]) == pytest.approx(loss.mean() + above)
        assert float(row["stderr"]) == pytest.approx(loss.std(ddof=1) / math.sqrt(3))


def test_points_on_a_part_of_the_tokens_are_marked(tmp_path, call):
    item = "figure_scale_invariant_variants"
    write_study(tmp_path / "runs", item, part=16_384)
    code, output = call(item, "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / item) and "Open circles" in output.out
    data = rows(tmp_path, item)
    assert len(data) == 6 * 3 * 5  # methods, with tau scaled or not, lengths, validations
    for row in data:
        assert row["val_tokens"] == ("49152" if row["val_length"] == "256" or row["step"] == "640" else "16384")


def test_a_mean_is_over_losses_on_the_same_tokens(tmp_path, call):
    for seed, part in enumerate((None, 16_384)):
        (run,) = sweep("figure_train_4k", "mini", seeds=[seed], methods=["rope"])
        write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.1, 4096: 4.2, 16_384: 4.3}, part=part)
    call("figure_train_4k", "--scale", "mini", "--seeds", "0", "1", "--methods", "rope")
    data = rows(tmp_path, "figure_train_4k")
    steps = {n: [int(r["step"]) for r in data if r["val_length"] == n] for n in ("256", "1024", "4096")}
    assert steps == {"256": [0, 200, 400, 640], "1024": [640], "4096": [640]}


@pytest.mark.parametrize("item, three_seeds", [("figure_train_lengths", ["256"]), ("figure_tau", [])])
def test_curve_figures(item, three_seeds, tmp_path, call):
    write_study(tmp_path / "runs", item)
    code, _ = call(item, "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / item)
    found = {(r["series"], r["train_length"]): int(r["seeds"]) for r in rows(tmp_path, item)}
    assert len(found) == dict(figure_train_lengths=10 * 3, figure_tau=6)[item]
    assert {length for (_, length), seeds in found.items() if seeds == 3} == set(three_seeds)


def test_a_loss_that_is_not_a_number_is_a_gap_and_a_damaged_record_is_named(tmp_path, call):
    runs = sweep("figure_train_4k", "mini", seeds=[0], methods=["rope", "alibi", "p_rope"])
    folders = {run.config.method: write_run(tmp_path / "runs", run, same(run)) for run in runs}
    text = (folders["alibi"] / "metrics.jsonl").read_text()
    (folders["alibi"] / "metrics.jsonl").write_text(text.replace('"256": 4.1,', '"256": null,'))
    lines = (folders["p_rope"] / "metrics.jsonl").read_text().splitlines()
    (folders["p_rope"] / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    code, output = call("figure_train_4k", "--scale", "mini", "--seeds", "0", "--methods", "rope", "alibi", "p_rope")
    [gap] = [r for r in rows(tmp_path, "figure_train_4k") if r["mean"] == "nan"]
    assert (gap["series"], gap["val_length"], gap["step"]) == ("alibi", "256", "400")
    assert code == 1 and is_figure(tmp_path / "out" / "figures" / "figure_train_4k")
    assert f"{folders['p_rope'] / 'metrics.jsonl'}, line 2" in output.out and "runs used: 2 of 3" in output.out


def test_nope_is_in_the_left_panel_alone(tmp_path, call, monkeypatch):
    for run in sweep("figure_train_4k", "mini", seeds=[0], methods=["nope", "alibi"]):
        write_run(tmp_path / "runs", run, same(run))
    drawn = []
    monkeypatch.setattr(figures, "draw_curves", lambda path, panels, *_: drawn.extend(panels))
    call("figure_train_4k", "--scale", "mini", "--seeds", "0", "--methods", "nope", "alibi")
    assert [{row["series"] for row in shown} for _, shown in drawn] == [{"nope", "alibi"}, {"alibi"}, {"alibi"}]


# ---- theory and trained models ---------------------------------------------------------------------------------------


def write_models(tmp_path, item, num_layers, val_tokens, seeds=None):
    """Untrained tiny models of the study's methods, with checkpoints, and their validation text."""
    random = np.random.default_rng(0)
    with ShardWriter(tmp_path / "data", "t", tokenizer="none", vocab_size=64) as writer:
        for split, count in dict(train=100, val=val_tokens).items():
            writer.write(split, random.integers(64, size=count).astype(np.uint16))
        writer.close()
    fields = [*TINY.split(), "--num_layers", str(num_layers), "--data_dir", str(tmp_path / "data"), "--device", "cpu"]
    for run in sweep(item, "mini", seeds, changes=field_changes("mini", fields)):
        folder = write_run(tmp_path / "runs", run, same(run), data=data_fingerprint(run.config))
        (folder / "data.json").unlink()
        (folder / "checkpoints").mkdir()
        torch.manual_seed(run.config.seed)
        model = build_model(run.config, torch.float32)
        save_checkpoint(folder / "checkpoints", 2, dict(step=2, model=model.state_dict()))
    return fields


def test_figure_qq_ours(tmp_path, call):
    fields = write_models(tmp_path, "figure_qq_ours", num_layers=1, val_tokens=400, seeds=[0, 1])
    folder = next(f.path for f in read_runs(tmp_path / "runs") if f.config.method == "p_rope")
    next((folder / "checkpoints").iterdir()).unlink()
    code, output = call("figure_qq_ours", "--scale", "mini", "--seeds", "0", "1", *fields)
    assert code == 1 and f"`{folder.name}`" in output.out and "runs used: 5 of 6" in output.out
    drawn = [tmp_path / "out" / "figures" / f"figure_qq_ours_rope_s{seed}.png" for seed in range(2)]
    assert all(map(is_figure, drawn)) and drawn[0].read_bytes() != drawn[1].read_bytes()
    heads = rows(tmp_path, "figure_qq_ours_heads")
    assert len(heads) == 5 * 2 * 3  # models, forms, two heads and all
    assert "| RoPE, seed 1 " in output.out


def test_figure_entropy_of_trained_models(tmp_path, call):
    fields = write_models(tmp_path, "figure_entropy", num_layers=1, val_tokens=4 * 4096)
    code, output = call("figure_entropy", "--scale", "mini", "--draws", "2", *fields)
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / "figure_entropy"), output.out
    data = rows(tmp_path, "figure_entropy")
    trained = {(r["scheme"], int(r["length"])) for r in data if r["source"] == "trained models"}
    assert trained == {(s, 2**k) for s in ("none", "logn", "scale_invariant") for k in range(7, 13)}
    assert {int(r["length"]) for r in data if r["source"] == "iid scores"} == {2**k for k in range(7, 17)}


def test_figure_entropy_shows_one_point_a_length_whatever_the_seeds():
    one, two = dict(mean=1.0, stderr=0.5), dict(mean=3.0, stderr=0.1)
    assert mean_over_seeds([one, two], length=8) == dict(length=8, mean=2.0, stderr=1.0)
    assert mean_over_seeds([one], length=8) == dict(length=8, mean=1.0, stderr=0.5)


def test_models_whose_text_is_too_short_or_another_are_named(tmp_path, call):
    fields = write_models(tmp_path, "figure_entropy", num_layers=1, val_tokens=4 * 4096 - 1)
    other = sorted((tmp_path / "runs").iterdir())[0]
    (other / "data.json").write_text(json.dumps(dict(validation="other")))
    code, output = call("figure_entropy", "--scale", "mini", "--draws", "2", *fields)
    assert code == 1 and "runs used: 0 of 3" in output.out and f"`{other.name}`" in output.out
    assert is_figure(tmp_path / "out" / "figures" / "figure_entropy")


def test_figure_sublog(tmp_path, call):
    code, _ = call("figure_sublog", "--draws", "2")
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / "figure_sublog")
    assert len(rows(tmp_path, "figure_sublog")) == 10 * 3


def test_the_papers_qq_figures_name_their_commands(tmp_path, call):
    code, output = call("figure_qq", "--scale", "mini")
    assert code == 0 and "python -m scripts.logit_statistics google/gemma-2-27b --text FILE" in output.out


def test_table_llama_has_the_papers_numbers_and_our_rows(tmp_path, call):
    before = {"4096": 6.0, "16384": 6.1, "65536": 6.2}
    common = dict(
        model="meta-llama/Llama-2-7b-hf", train_length=4096, validation="v", val_tokens=1000, tokens=50_003_968
    )
    ours = dict(method="scale_invariant_p_rope", rescale=False, val_loss_before=before)
    loss = {"4096": 2.2, "16384": 2.21, "65536": 2.3}
    runs = dict(
        rope=dict(method="rope", method_options={}, steps=0, rescale=False, val_loss_before=before,
                  val_loss={"4096": 1.9, "16384": 7.0, "65536": 8.5}),
        ours=ours | dict(method_options={}, steps=95, val_loss=loss),
        form=ours | dict(method_options={"form": "barbero"}, steps=95, val_loss=loss | {"4096": 2.1}),
        text=ours | dict(method_options={}, steps=95, val_loss=loss, validation="other"),
    )  # fmt: skip
    for name, run in runs.items():
        (tmp_path / "runs" / "continued" / name).mkdir(parents=True)
        (tmp_path / "runs" / "continued" / name / "summary.json").write_text(json.dumps(common | run))
    code, output = call("table_llama")
    table = cells_of(output.out)
    assert table["RoPE*"] == ["", "**1.900**", "1.968", "", "7.000", "7.036", "", "8.500", "8.815"]
    assert table["Scale-invariant p-RoPE"][:3] == ["6.000", "2.200", "2.163"]
    assert table["Scale-invariant p-RoPE, form barbero"][:3] == ["6.000", "2.100", ""]
    assert table["YaRN"] == ["", "", "**1.957**", "", "", "7.004", "", "", "8.763"]
    assert code == 1 and "models used: 2 of 10" in output.out and "`text`" in output.out


# ---- the command -----------------------------------------------------------------------------------------------------


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("item", ["figure_304m", "table_losses"])
def test_a_section_of_more_runs_is_kept_unless_forced(tmp_path, call, item):
    runs = sweep(item, "mini", methods=["alibi"], seeds=[0, 1])
    folders = [write_run(tmp_path / "runs", run, same(run)) for run in runs]
    words = [item, "--scale", "mini", "--methods", "alibi", "--seeds", "0", "1"]
    assert call(*words)[0] == 0
    call("figure_sublog", "--scale", "mini", "--draws", "2")  # another section of the page
    page, before = tmp_path / "out" / "tables.md", contents(tmp_path / "out")
    (folders[0] / "summary.json").unlink()
    assert call(*words)[0] == 1 and contents(tmp_path / "out") == before
    assert call(*words, "--force")[0] == 1
    assert (
        f"- runs used: {len(runs) - 1} of {len(runs)}\n" in page.read_text()
        and "## figure_sublog\n" in page.read_text()
    )
    for folder in folders:
        (folder / "config.json").unlink()
    before = contents(tmp_path / "out")
    assert call(*words, "--force")[0] == 1 and contents(tmp_path / "out") == before  # never from none


def test_all_makes_each_item_and_sums_up(tmp_path, call, monkeypatch):
    items = ("table_losses", "table_llama", "table_infini", "figure_sublog")
    monkeypatch.setattr("scripts.reproduce.__main__.ITEMS", {item: pages.ITEMS[item] for item in items})
    write_study(tmp_path / "runs", "table_infini")
    (tmp_path / "runs" / "mini-infini_rope-s0" / "summary.json").write_text("[1, 2]")
    code, output = call("all", "--scale", "mini", "--draws", "2")
    outcomes = dict(line.split(": ", 1) for line in output.out.splitlines())
    assert code == 1 and list(outcomes) == list(items)
    assert outcomes["table_losses"].startswith("incomplete, 6 of 27 runs")
    assert outcomes["table_infini"].startswith("incomplete, 11 of 12 runs")
    assert outcomes["table_llama"].startswith("needs models") and outcomes["figure_sublog"].startswith("complete")
    assert [*pages.read_sections(tmp_path / "out" / "tables.md")] == [items[0], items[2], items[1], items[3]]


@pytest.mark.parametrize(
    "words, named",
    [
        (["table_loss"], "table_loss"),
        (["table_losses", "--scale", "huge"], "huge"),
        (["table_losses", "--stepz", "3"], "--stepz"),
        (["table_losses", "--needle", "examples=3"], "--needle"),
        (["figure_tau", "--methods", "rope"], "rope"),
        (["figure_sublog", "--draws", "1"], "draws"),
    ],
)
def test_wrong_usage_is_one_line(words, named, call):
    code, output = call(*words)
    assert code == 2 and named in output.err.splitlines()[-1] and "Traceback" not in output.err


def test_a_legend_is_not_wider_than_its_figure(tmp_path):
    for words, fits in (("short", 4), ("a series whose name goes on and on for a while", 2)):
        with drawing(tmp_path / "figure", 1, 3, height=2.0) as (figure, axes):
            for number in range(4):
                axes[0, 0].plot([0, 1], label=f"{words} {number}")
            legend_below(figure, axes, 4)
            (legend,) = figure.legends
            assert legend._ncols == fits and legend.get_window_extent().width <= figure.bbox.width
            assert len(legend.get_texts()) == 4
