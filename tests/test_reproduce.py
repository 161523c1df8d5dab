"""Tables and figures from run folders with known contents: the numbers, the files, and what is said of bad input."""

import csv
import dataclasses
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from configs.command_line import read_config
from configs.sweeps import SCALES, SWEEPS, sweep
from data.shard_writer import ShardWriter
from data.shards import open_split
from runtime.build import build_model
from runtime.checkpoint import save_checkpoint
from scripts.reproduce import figures, needles, pages
from scripts.reproduce.__main__ import main
from scripts.reproduce.drawing import drawing, legend_below
from scripts.reproduce.figures import tau_of
from scripts.reproduce.tables import paper_targets
from scripts.shared.arguments import field_changes
from scripts.shared.looks import series_label, series_name
from scripts.shared.runs import data_fingerprint, read_runs
from scripts.shared.tables import mean_and_stderr
from scripts.sweep.__main__ import parse_arguments
from scripts.sweep.plan import plan_runs

pytestmark = pytest.mark.slow

TINY = "--num_heads 2 --model_dim 16 --vocab_size 64 --train_length 64 --batch_tokens 64 --steps 2"


def write_run(
    runs_dir, run, losses, *, steps=(0, 200, 400, 640), val_tokens=49_152, data="abc", needle=None, part=None, others={}
):
    """A finished run whose validation loss falls by 0.1 a record to the given losses {length: nats}, and its weights as
    other methods {method: losses}. part: validation
    tokens, before the end, at all lengths but the first (the fast profile); None: records of before the profiles."""
    folder = runs_dir / run.name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(run.config.to_dict()))
    (folder / "log.txt").write_text("python 3\ndevice: an abacus\ncommit: 0123abc\n==== a.py ====\n")
    records = []
    for i, step in enumerate(steps):
        above = 0.1 * (len(steps) - 1 - i)
        loss = {str(n): x + above for n, x in losses.items()}
        as_others = {method: {str(n): x + above for n, x in theirs.items()} for method, theirs in others.items()}
        tokens = val_tokens
        if part:
            few = step < steps[-1]
            tokens = {n: part if few and number else val_tokens for number, n in enumerate(loss)}
        records.append(dict(step=step, tokens=step, val_loss=loss, val_loss_as=as_others, val_tokens=tokens))
    records.insert(1, dict(step=1, tokens=1, train_loss=5.0))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = dict(name=run.name, val_loss={str(n): x for n, x in losses.items()}, val_tokens=tokens, data=data)
    as_others = {method: {str(n): x for n, x in theirs.items()} for method, theirs in others.items()}
    (folder / "summary.json").write_text(json.dumps(summary | dict(steps=steps[-1], val_loss_as=as_others)))
    if needle:
        (folder / "needle").mkdir()
        (folder / "needle" / "summary.json").write_text(json.dumps(needle))
    return folder


def write_study(runs_dir, item, scale="mini", **options):
    """All runs of a study, with losses that differ by series and seed; returns them by (series, seed, length)."""
    random, values = np.random.default_rng(0), {}
    for number, run in enumerate(sweep(item, scale)):
        methods = run.methods
        drawn = {m: {n: 4 + 0.01 * number + random.random() for n in run.config.val_lengths} for m in methods}
        losses, others = drawn[methods[0]], {method: drawn[method] for method in methods[1:]}
        steps = [s * run.config.steps // 4 for s in range(5)]
        write_run(runs_dir, run, losses, steps=steps, others=others, **options)
        shown = {series_label(run.config): losses} | others
        values |= {(name, run.config.seed, n): x for name, theirs in shown.items() for n, x in theirs.items()}
    return values


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs the command on tmp_path's runs: its exit status and what it said."""

    def call(*words):
        arguments = [*words, "--runs-dir", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["reproduce", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, capsys.readouterr()

    return call


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def is_figure(path):
    """A PNG with something drawn on it, and its PDF with embedded TrueType fonts."""
    pixels = matplotlib.image.imread(path.with_suffix(".png"))
    pdf = path.with_suffix(".pdf").read_bytes()
    return pixels.shape[1] == 1350 and pixels.shape[0] > 300 and pixels[..., :3].std() > 0.05 and b"FontFile2" in pdf


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_mean_and_standard_error():
    mean, stderr = mean_and_stderr([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert stderr == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2 / 3))
    assert mean_and_stderr([2.0]) == (2.0, None)
    assert mean_and_stderr([]) == (None, None)


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
    code, said = call("table_losses", "--scale", "mini")
    assert code == 0 and "Missing" not in said.out and "runs used: 27 of 27" in said.out
    table = {(r["method"], int(r["length"])): r for r in rows(tmp_path / "out" / "table_losses.csv")}
    assert len(table) == 12 * 4  # and ALiBi's slopes and tau as in the paper
    assert {m: r["weights_of"] for (m, _), r in table.items() if r["weights_of"]} == dict(
        rope_ntk="rope", yarn="rope", logn_ntk="logn_rope"
    )
    for (method, length), row in table.items():
        three = np.array([values[method, seed, length] for seed in range(3)])
        assert float(row["mean"]) == pytest.approx(three.mean())
        assert float(row["stderr"]) == pytest.approx(three.std(ddof=1) / math.sqrt(3))
        assert row["seeds"] == "3" and row["difference_in_stderrs"] == ""
        paper = paper_targets("table_losses").get((method, length * 16))
        assert row["paper_mean"] == (str(paper["mean"]) if paper else "")
    page = (tmp_path / "out" / "table_losses.md").read_text()
    assert "256 (1x)" in page and "paper 4k (1x)" in page and "not the paper's" in page
    best = min((float(r["mean"]), m) for (m, n), r in table.items() if n == 256)[1]
    line = next(text for text in page.splitlines() if re.match(rf"\| {series_name(best)}\u2020? ", text))
    assert line.split("|")[3].strip().startswith("**")
    assert "0123abc (27)" in page and "an abacus (27)" in page
    assert "RoPE+NTK\u2020" in page and "\u2020 RoPE+NTK and YaRN: the weights of RoPE" in page
    assert "ALiBi, official slopes" in page and "Scale-invariant p-RoPE, \u03c4 = 10" in page
    assert "as if its scaling had not been active" in page


def test_at_paper_scale_the_difference_is_in_combined_standard_errors(tmp_path, call):
    runs = [r for r in sweep("table_losses", "paper") if r.config.method == "rope"]
    for run, loss in zip(runs, (3.25, 3.27, 3.29)):
        write_run(tmp_path / "runs", run, {n: loss for n in run.config.val_lengths}, steps=(0, 4578))
    code, said = call("table_losses", "--methods", "rope")
    row = next(r for r in rows(tmp_path / "out" / "table_losses.csv") if r["length"] == "4096")
    expected = (3.27 - 3.261) / math.hypot(0.02 / math.sqrt(3), 0.001)
    assert code == 0 and float(row["difference_in_stderrs"]) == pytest.approx(expected)
    assert f"+0.009 ({expected:+.1f})" in said.out


def test_one_seed_has_no_standard_error(tmp_path, call):
    for run in sweep("table_losses", "mini", seeds=[1], methods=["alibi"]):
        write_run(tmp_path / "runs", run, {n: 4.5 for n in run.config.val_lengths})
    code, said = call("table_losses", "--scale", "mini", "--seeds", "1", "--methods", "alibi")
    assert code == 0 and "4.500 \u00b1 n/a" in said.out and "one seed" in said.out


def test_without_runs_the_table_is_empty_and_names_commands_that_parse(tmp_path, monkeypatch, call):
    fields = ["--steps", "6", "--cooldown_steps", "2"]
    code, said = call("table_infini", "--scale", "mini", *fields)
    runs = sweep("table_infini", "mini", changes=dict(steps=6, cooldown_steps=2))
    assert code == 1 and "runs used: 0 of 12" in said.out and "3.296 \u00b1 0.003" in said.out
    commands = [shlex.split(part) for part in said.out.split("`") if part.startswith("python ")]
    train = [words for words in commands if words[1] == "train_gpt.py"]
    assert [read_config(words[2:]).to_dict() for words in train] == [
        r.config.to_dict() | dict(runs_dir=str(tmp_path / "runs")) for r in runs
    ]
    [whole] = [words for words in commands if words[2] == "scripts.sweep"]
    monkeypatch.setattr(sys, "argv", whole[2:])
    args, extra = parse_arguments()
    assert sweep(args.sweep, args.scale, args.seeds, args.methods, field_changes("mini", extra)) == runs
    assert [plan.path for plan in plan_runs(runs, args)] == [tmp_path / "runs" / r.name for r in runs]


def test_infini_table_has_the_papers_rule(tmp_path, call):
    code, said = call("table_infini", "--scale", "mini")
    first = [line.split("|")[1].strip() for line in said.out.splitlines() if line.startswith("|")]
    assert first[2:] == ["RoPE", "Scale-invariant p-RoPE", "", "Infini-RoPE", "Infini-p-RoPE"]


def test_runs_on_other_tokens_are_named_and_left_out(tmp_path, call):
    runs = sweep("table_losses", "mini", methods=["rope"])
    for run, data, val_tokens in zip(runs, ("abc", "abc", "other"), (49_152,) * 3):
        write_run(tmp_path / "runs", run, {n: 4.0 + (data == "other") for n in run.config.val_lengths}, data=data)
    code, said = call("table_losses", "--scale", "mini", "--methods", "rope")
    assert code == 1 and "`mini-rope-s2`: left out" in said.out and "runs used: 2 of 3" in said.out
    assert rows(tmp_path / "out" / "table_losses.csv")[0]["mean"] == "4.0"


def test_runs_of_an_item_read_equally_many_tokens():
    """So that the fingerprints of what they read are the same on the same text."""
    for item in SWEEPS:
        for scale in SCALES:
            assert len({run.config.steps * run.config.batch_tokens for run in sweep(item, scale)}) == 1


def test_runs_on_another_validation_text_are_named_and_left_out(tmp_path, call):
    runs = sweep("table_losses", "mini", methods=["rope"], seeds=[0, 1, 2, 3])
    for run, text in zip(runs, (None, "v", "v", "w")):  # the first is of before data.json
        folder = write_run(tmp_path / "runs", run, {n: 4.0 + (text == "w") for n in run.config.val_lengths})
        if text:
            (folder / "data.json").write_text(json.dumps(dict(train="abc", validation=text)))
    code, said = call("table_losses", "--scale", "mini", "--methods", "rope", "--seeds", "0", "1", "2", "3")
    assert code == 1 and "has validation text w; most runs: v" in said.out and "runs used: 3 of 4" in said.out
    assert rows(tmp_path / "out" / "table_losses.csv")[0]["mean"] == "4.0"


def test_the_page_names_the_training_text_and_how_often_it_was_read(tmp_path, call):
    runs = sweep("table_losses", "mini", methods=["rope"])
    for run, counts in zip(runs, ({}, *[dict(tokens=3000, distinct_tokens=2000)] * 2)):
        path = write_run(tmp_path / "runs", run, {n: 4.0 for n in run.config.val_lengths}) / "summary.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | counts))
    code, said = call("table_losses", "--scale", "mini", "--methods", "rope")
    assert code == 0
    texts = "`abc`, not counted (1); `abc`, 2,000 distinct training tokens, read 1.50 times (2)"
    assert f"- training text of the runs: {texts}\n" in said.out


def test_losses_on_other_text_get_into_no_table(tmp_path, call):
    (run,) = sweep("table_losses", "mini", methods=["rope"], seeds=[0])
    folder = write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.5, 4096: 5.0})
    books = dict(step="step_000640", data="data/books", val_tokens=49_152, val_loss={"16384": 6.0, "256": 9.0})
    (folder / "evaluation.json").write_text(json.dumps(dict(other_texts=dict(fedc=books))))
    code, said = call("table_losses", "--scale", "mini", "--methods", "rope", "--seeds", "0")
    table = {r["length"]: r["mean"] for r in rows(tmp_path / "out" / "table_losses.csv")}
    assert code == 1 and table == {"256": "4.0", "1024": "4.5", "4096": "5.0", "16384": ""}
    assert f"python -m scripts.evaluate {folder} --lengths 16384" in said.out and "damaged" not in said.out


def test_models_are_not_looked_at_on_another_text_than_theirs(tmp_path, call):
    fields = write_models(tmp_path, "figure_entropy", num_layers=1, val_tokens=4 * 4096)
    stream = open_split(tmp_path / "data", "val", 64)
    for path, validation in zip((tmp_path / "runs").iterdir(), ("other", *[stream.fingerprint(49_152)] * 2)):
        summary = json.loads((path / "summary.json").read_text())
        (path / "data.json").write_text(json.dumps(dict(train=summary["data"], validation=validation)))
    code, said = call("figure_entropy", "--scale", "mini", "--draws", "2", *fields)
    assert code == 1 and said.out.count("has validation text other") == 1 and "runs used: 2 of 3" in said.out
    shutil.rmtree(tmp_path / "data")
    with ShardWriter(tmp_path / "data", "t", tokenizer="none", vocab_size=64) as writer:
        for split in ("train", "val"):
            writer.write(split, np.zeros(4 * 4096, np.uint16))
        writer.close()
    code, said = call("figure_entropy", "--scale", "mini", "--draws", "2", *fields)
    assert code == 1 and said.out.count("does not hold the validation text") == 2 and "runs used: 0 of 3" in said.out


def test_missing_length_comes_from_the_evaluation_or_is_named(tmp_path, call):
    a, b, c = sweep("table_losses", "mini", methods=["rope"])
    folders = [write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.5, 4096: 5.0}) for run in (a, b, c)]
    evaluation = dict(step="step_000640", val_tokens=49_152, val_loss={"16384": 6.0, "256": 9.0})
    (folders[0] / "evaluation.json").write_text(json.dumps(evaluation))
    (folders[1] / "evaluation.json").write_text(json.dumps(evaluation | dict(val_tokens=1024)))  # other tokens
    code, said = call("table_losses", "--scale", "mini", "--methods", "rope")
    table = {r["length"]: r for r in rows(tmp_path / "out" / "table_losses.csv")}
    assert table["16384"]["mean"] == "6.0" and table["16384"]["seeds"] == "1" and table["256"]["mean"] == "4.0"
    for folder in folders[1:]:
        assert f"python -m scripts.evaluate {folder} --lengths 16384" in said.out
    assert code == 1 and f"scripts.evaluate {folders[0]}" not in said.out and "1-3" in said.out


def test_unfinished_other_diverged_and_damaged_runs_are_named(tmp_path, call):
    runs = sweep("table_losses", "mini", seeds=[0], methods=["rope", "p_rope", "nope", "yarn", "alibi"])
    rope, p_rope, nope, yarn, alibi = (
        write_run(tmp_path / "runs", r, {n: 4.0 for n in r.config.val_lengths}) for r in runs
    )
    (rope / "summary.json").unlink()
    stored = json.loads((p_rope / "config.json").read_text())
    (p_rope / "config.json").write_text(json.dumps(stored | dict(muon_lr=0.5)))
    (nope / "summary.json").write_text((nope / "summary.json").read_text().replace("4.0", "null"))
    (yarn / "summary.json").write_text('{"val_loss": {"256"')
    (alibi / "config.json").write_text("[")
    code, said = call("table_losses", "--scale", "mini", "--seeds", "0", "--methods", *(r.config.method for r in runs))
    assert code == 1 and "runs used: 0 of 5" in said.out
    assert "`mini-rope-s0`: interrupted" in said.out and "--resume auto`" in said.out
    assert "muon_lr 0.5 there, 0.02 here" in said.out
    assert f"{nope / 'summary.json'} has a loss that is not a number" in said.out
    assert f"{yarn / 'summary.json'} is damaged" in said.out
    assert f"{alibi / 'config.json'} is damaged" in said.out


def needle_summary(run, greedy, **settings):
    """What fine-tuning with the settings of scale mini leaves behind, but for `settings`."""
    shares = dict(oracle={"256": 0.99}, greedy=greedy, teacher_forcing=greedy | {"256": 0.95})
    as_others = {method: dict(shares, greedy=dict.fromkeys(greedy, 0.25)) for method in run.config.validate_as}
    return dataclasses.asdict(run.needle) | dict(pretrained="step_000640") | shares | {"as": as_others} | settings


SHARES = {"256": 0.8, "1024": 0.4, "4096": 0.0}


def test_needle_table(tmp_path, call):
    runs = sweep("table_needle", "mini", methods=["alibi", "rope"])
    for run in runs:
        share = 0.9 - 0.1 * run.config.seed
        score = {"256": share, "1024": share / 2, "4096": 0.0}
        if (run.config.method, run.config.seed) == ("rope", 1):
            score.pop("4096")
        if (run.config.method, run.config.seed) == ("rope", 0):
            score["16384"] = 0.1  # needle --lengths
        missing = (run.config.method, run.config.seed) == ("alibi", 2)
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=None if missing else needle_summary(run, score))
    code, said = call("table_needle", "--scale", "mini", "--methods", "alibi", "rope")
    table = {(r["method"], r["metric"], r["length"]): r for r in rows(tmp_path / "out" / "table_needle.csv")}
    three, two = table["rope", "greedy", "256"], table["alibi", "greedy", "1024"]
    assert float(three["mean"]) == pytest.approx(0.8) and float(three["stderr"]) == pytest.approx(0.1 / math.sqrt(3))
    assert float(two["mean"]) == pytest.approx(0.425) and two["seeds"] == "2"
    assert float(table["rope", "teacher forcing", "256"]["mean"]) == pytest.approx(0.95)
    beyond = {method: table[method, "greedy", "16384"]["seeds"] for method in ("alibi", "rope")}
    assert beyond == {"alibi": "0", "rope": "1"} and "16384 (64x) greedy" in said.out
    shown = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in said.out.splitlines() if "|" in line}
    assert (shown["ALiBi"], shown["RoPE"]) == ("2", "1-3")
    assert "yarn" not in {method for method, _, _ in table}  # --methods leaves it out
    call("table_needle", "--scale", "mini", "--methods", "yarn", "--force")
    data = rows(tmp_path / "out" / "table_needle.csv")
    (yarn,) = [r for r in data if (r["metric"], r["length"]) == ("greedy", "256")]
    assert (yarn["method"], yarn["weights_of"], yarn["mean"]) == ("yarn", "rope", "0.25")
    assert table["rope", "greedy", "256"]["paper_mean"] == "0.962"
    settings, path = "--haystack shards --steps 6000 --sequences 8 --examples 100 --curriculum 144", tmp_path / "runs"
    assert code == 1 and f"yet): `python -m scripts.needle {path / 'mini-alibi-s2'} {settings}`" in said.out
    assert f"scripts.needle {path / 'mini-rope-s1'} {settings} --lengths 4096" in said.out
    assert "scripts.sweep table_needle --scale mini" in said.out and "trains and fine-tunes all" in said.out
    settings = f"{SCALES['mini'].needle}"
    assert f"- all fine-tuned and scored with: {settings}\n" in said.out
    assert "0.990" in next(line for line in said.out.splitlines() if line.startswith("| oracle"))


def test_needles_by_distance_are_counted_over_seeds(tmp_path, call):
    runs = sweep("table_needle", "mini", methods=["rope", "p_rope"])
    assert [(run.config.method, run.config.seed) for run in runs[:3]] == [("rope", 0), ("rope", 1), ("rope", 2)]
    counts = [{"256": {"64": [3, 4], "128": [0, 5]}}, {"256": {"128": [2, 5], "32": [1, 1]}, "1024": {"512": [1, 9]}}]
    for run, known in zip(runs, [*counts, {}, {}, {}, {}]):  # the others were scored before there were distances
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, SHARES, by_distance=known))
    _, said = call("table_needle", "--scale", "mini", "--methods", "rope", "p_rope")
    table = rows(tmp_path / "out" / "table_needle_distances.csv")
    assert is_figure(tmp_path / "out" / "table_needle_distances")
    keys = "method", "length", "distance", "found", "needles"
    assert [tuple(r[key] for key in keys) for r in table] == [
        ("rope", "256", "32", "1", "1"),
        ("rope", "256", "64", "3", "4"),
        ("rope", "256", "128", "2", "10"),
        ("rope", "1024", "512", "1", "9"),
    ]
    page = said.out.split("## By distance")[1].splitlines()[2:]
    assert [cell.strip() for cell in page[4].split("|")[2:-1]] == ["length", "32-63", "64-127", "128-255", "512-1023"]
    assert [cell.strip() for cell in page[6].split("|")[1:-1]] == ["RoPE", "256", "1/1", "3/4", "2/10", ""]


def test_needles_against_tau(tmp_path, call, monkeypatch):
    drawn, draw = [], needles.draw_against_tau
    monkeypatch.setattr(needles, "draw_against_tau", lambda path, *rest: (drawn.append(rest[0]), draw(path, *rest)))
    for run in sweep("needle_tau", "mini", seeds=[0, 1]):
        tau, gain = tau_of(run.config), bool(run.config.method_options.get("learn_gain"))
        share = tau / 100 + 0.1 * gain + 0.2 * run.config.seed
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, {"256": share, "1024": 0.0}))
    _, said = call("needle_tau", "--scale", "mini", "--seeds", "0", "1")
    (shares,) = drawn
    found = {key: values for key, values in shares.items() if key[1] == 256}
    ours, gained, pope = "scale_invariant_p_rope", "scale_invariant_p_rope learn_gain=True", "pope+scale_invariant"
    expected = {(ours, 256, tau): tau / 100 for tau in (0.625, 2.5, 10.0, 40.0)}
    expected |= {(gained, 256, 10.0): 0.2, (f"{ours} terms=m", 256, 0.625): 0.00625}
    expected |= {(pope, 256, 0.625): 0.00625, (pope, 256, 10.0): 0.1}
    assert found == {key: pytest.approx([share, share + 0.2]) for key, share in expected.items()}
    assert "| Scale-invariant p-RoPE, a factor of the scores learned by each head, \u03c4 = 10 " in said.out
    assert is_figure(tmp_path / "out" / "needle_tau")


def test_all_is_well_when_all_that_can_be_made_is_there(tmp_path, call, monkeypatch):
    items = {item: pages.ITEMS[item] for item in ("table_losses", "table_llama", "figure_qq")}
    monkeypatch.setattr("scripts.reproduce.__main__.ITEMS", items)
    write_study(tmp_path / "runs", "table_losses")
    code, said = call("all", "--scale", "mini")
    assert code == 0 and said.out.splitlines()[-1] == "all that can be made on this machine is there"
    assert "2 of 3 needs models: table_llama, figure_qq" in said.out


def test_all_seeds_that_there_are_count_unless_some_are_asked_for(tmp_path, call):
    for run in sweep("figure_304m", "mini", seeds=[0, 7, 9]):
        write_run(tmp_path / "runs", run, {n: 4.0 + run.config.seed for n in run.config.val_lengths})
    for words, seeds, mean in ((), "3", 4 + 16 / 3), (("--seeds", "0", "9"), "2", 8.5):
        call("figure_304m", "--scale", "mini", "--force", *words)
        last = [r for r in rows(tmp_path / "out" / "figure_304m.csv") if r["step"] == "640"]
        assert last and all(r["seeds"] == seeds and float(r["mean"]) == pytest.approx(mean) for r in last)


def test_a_run_not_validated_as_another_method_is_named_with_the_command(tmp_path, call):
    (run,) = sweep("table_losses", "mini", seeds=[0], methods=["yarn"])
    assert run.config.method == "rope"
    folder = write_run(tmp_path / "runs", run, {n: 4.0 for n in run.config.val_lengths})
    code, said = call("table_losses", "--scale", "mini", "--seeds", "0", "--methods", "yarn")
    command = f"python -m scripts.evaluate {folder} --lengths 256 1024 4096 16384 --as rope_ntk yarn"
    assert code == 1 and command in said.out
    evaluation = dict(step="step_000640", val_tokens=49_152, val_loss={"256": 4.0})
    evaluation |= dict(val_loss_as=dict(yarn={str(n): 5.0 for n in run.config.val_lengths}))
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    code, said = call("table_losses", "--scale", "mini", "--seeds", "0", "--methods", "yarn")
    (row,) = {(r["method"], r["weights_of"], r["mean"]) for r in rows(tmp_path / "out" / "table_losses.csv")}
    assert code == 0 and row == ("yarn", "rope", "5.0")


def test_a_damaged_run_of_another_seed_or_as_another_method_is_named(tmp_path, call):
    ours, other = sweep("table_losses", "mini", seeds=[0, 5], methods=["yarn"])
    for run in (ours, other):
        same = {n: 4.0 for n in run.config.val_lengths}
        write_run(tmp_path / "runs", run, same, others=dict(rope_ntk=same, yarn=same))
    summary = tmp_path / "runs" / other.name / "summary.json"
    summary.write_text(summary.read_text().replace('"val_loss": {"256": 4.0', '"val_loss": {"256": null'))
    code, said = call("table_losses", "--scale", "mini", "--methods", "yarn")
    assert code == 1 and f"{summary} has a loss that is not a number" in said.out
    summary.write_text(summary.read_text().replace('"val_loss": {"256": null', '"val_loss": {"256": 4.0'))
    summary.write_text(summary.read_text().replace('"yarn": {"256": 4.0', '"yarn": {"256": null'))
    code, said = call("table_losses", "--scale", "mini", "--methods", "yarn")
    assert code == 1 and f"{summary} has a loss that is not a number" in said.out
    assert rows(tmp_path / "out" / "table_losses.csv")[0]["seeds"] == "1"


@pytest.mark.parametrize("value", ['"4.0"', "1e308", "NaN", "[4.0]"])
@pytest.mark.parametrize(
    "item, name", [("table_losses", "summary.json"), ("table_losses", "evaluation.json"),
                   ("figure_304m", "metrics.jsonl"), ("table_needle", "needle/summary.json")]
)  # fmt: skip
def test_a_run_with_a_damaged_number_is_named_and_left_out(tmp_path, call, item, name, value):
    runs = sweep(item, "mini", seeds=[0, 1], methods=["alibi"])[:2]
    for run in runs:
        needle = needle_summary(run, SHARES) if run.needle else None
        folder = write_run(tmp_path / "runs", run, {n: 4.0 for n in run.config.val_lengths}, needle=needle)
        evaluation = dict(step="step_000640", val_tokens=49_152, val_loss={"256": 4.0})
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    path = folder / name
    path.write_text(re.sub(r'"256": [\d.]+', f'"256": {value}', path.read_text()))
    code, said = call(item, "--scale", "mini", "--methods", "alibi", "--seeds", "0", "1")
    assert code == 1 and re.search(rf"{path}(, line 1)? is (damaged|not what a run writes)", said.out)
    found = rows(tmp_path / "out" / f"{item}.csv")
    assert {row["seeds"] for row in found if row.get("mean") and row.get("method", run.config.method)} == {"1"}


def test_nope_is_in_the_left_panel_alone(tmp_path, call, monkeypatch):
    for run in sweep("figure_train_4k", "mini", seeds=[0], methods=["nope", "alibi"]):
        write_run(tmp_path / "runs", run, {n: 4.0 for n in run.config.val_lengths})
    drawn = []
    monkeypatch.setattr(figures, "draw_curves", lambda path, panels, looks, **_: drawn.extend(panels))
    call("figure_train_4k", "--scale", "mini", "--seeds", "0", "--methods", "nope", "alibi")
    assert [{row["series"] for row in shown} for _, shown in drawn] == [{"nope", "alibi"}, {"alibi"}, {"alibi"}]


def test_the_papers_qq_figures_are_not_ours(tmp_path, call):
    code, said = call("figure_qq", "--scale", "mini")
    assert code == 1 and "needs what the commands below measure" in said.out and "figure_qq_ours" in said.out
    command = "`python -m scripts.logit_statistics google/gemma-2-27b --text FILE --out "
    folder = tmp_path / "runs" / "logit_statistics" / "gemma-2-27b"
    assert f"{command}{folder}`, FILE: the introduction of Wikipedia's article on New England" in said.out


@pytest.mark.parametrize(
    "other, says",
    [
        (dict(haystack="c4"), "of another fine-tuning (haystack c4 there, shards here): delete it"),
        (dict(steps=300, sequences=64), "(steps 300 there, 6000 here, sequences 64 there, 8 here)"),
        (dict(examples=50), "scored on other examples (50 a length there, 100 here): delete "),
        (dict(pretrained="step_000600"), "(pretrained step_000600 there, step_000640 here)"),  # when unfinished
    ],
)
@pytest.mark.parametrize("all_others", [False, True])
def test_needle_table_never_mixes_settings(tmp_path, call, other, says, all_others):
    for run in sweep("table_needle", "mini", methods=["rope"]):
        same = run.config.seed != 1 and not all_others
        needle = needle_summary(run, SHARES) if same else needle_summary(run, {n: 0.1 for n in SHARES}, **other)
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle)
    code, said = call("table_needle", "--scale", "mini", "--methods", "rope")
    assert code == 1 and (tmp_path / "out").exists() != all_others
    if not all_others:
        row = rows(tmp_path / "out" / "table_needle.csv")[0]
        assert (row["mean"], row["seeds"]) == ("0.8", "2")
    assert f"`mini-rope-s1`: left out, {tmp_path}/runs/mini-rope-s1/needle is " in said.out and says in said.out
    assert ("all fine-tuned" in said.out) != all_others


def test_needle_table_with_settings_given_by_hand(tmp_path, call):
    words = ["--scale", "mini", "--methods", "rope", "--seeds", "0", "--needle", "haystack=c4", "examples=50"]
    [run] = sweep("table_needle", "mini", [0], ["rope"])
    write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, SHARES, haystack="c4", examples=50))
    code, said = call("table_needle", *words)
    assert code == 0 and re.search("haystack c4, 6000 steps of 8 .* of 144 tokens .*, 50 examples", said.out)
    assert "--needle haystack=c4 examples=50" in said.out  # in the command
    code, said = call("table_losses", *words)
    assert code == 2 and said.err == "error: --needle: table_losses fine-tunes no run\n"


def test_damaged_needle_scores_are_named_and_not_in_the_table(tmp_path, call):
    runs = sweep("table_needle", "mini", methods=["rope"])
    for run in runs:
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, SHARES))
    junk, lacking, _ = (tmp_path / "runs" / run.name / "needle" / "summary.json" for run in runs)
    junk.write_text("{")
    by_distance = {"256": {"64": [1, 2]}}
    damaged = needle_summary(runs[1], {n: 0.1 for n in SHARES}, by_distance=by_distance) | dict(oracle=None)
    lacking.write_text(json.dumps(damaged))
    code, said = call("table_needle", "--scale", "mini", "--methods", "rope")
    row = rows(tmp_path / "out" / "table_needle.csv")[0]
    assert code == 1 and (row["mean"], row["seeds"]) == ("0.8", "1")
    assert all(f"{path} is damaged" in said.out for path in (junk, lacking))
    assert "## By distance" not in said.out


def test_llama_table_without_runs_has_the_papers_numbers(tmp_path, call):
    code, said = call("table_llama")
    assert code == 1 and "None of these runs is there" in said.out
    assert "RoPE+NTK*" in said.out and "**2.252**" in said.out
    command = "python -m scripts.continue_pretraining meta-llama/Llama-2-7b-hf --method yarn --resume auto"
    assert f"`{command} --runs_dir {tmp_path / 'runs' / 'continued'}`" in said.out and "Missing (10)" in said.out


def write_continued(folder, method, losses, before, name=None, **changes):
    summary = dict(method=method, model="models/Llama-2-7b-hf", method_options={}, rescale="no", train_length=4096)
    lengths = ("4096", "16384", "65536")
    summary |= dict(val_loss=dict(zip(lengths, losses)), val_loss_before=dict(zip(lengths, before)))
    summary |= dict(val_tokens=dict.fromkeys(lengths, 2**21), steps=763, tokens=50_003_968, validation="ab" * 8)
    path = folder / "continued" / (name or f"Llama-2-7b-hf-{method}")
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps(summary | changes))
    return path


def test_llama_table_has_ours_beside_the_papers(tmp_path, call):
    runs = tmp_path / "runs"
    write_continued(runs, "rope", (1.9, 7.0, 8.5), (1.9, 7.0, 8.5), steps=0, tokens=0)
    write_continued(runs, "scale_invariant_p_rope", (2.2, 2.21, 2.3), (6.0, 6.1, 6.2))
    gentler = dict(method_options=dict(form="barbero"))
    write_continued(runs, "scale_invariant_p_rope", (2.1, 2.15, 2.2), (3.0, 3.1, 3.2), name="b", **gentler)
    other = write_continued(runs, "alibi", (2.7, 2.7, 2.7), (4.0, 4.0, 4.0), validation="cd" * 8)
    (write_continued(runs, "nope", (4.0, 6.0, 7.0), (9.0, 9.0, 9.0)) / "summary.json").write_text("[]")
    code, said = call("table_llama")
    assert code == 1 and f"{other} is left out" in said.out and "summary.json is damaged" in said.out
    lines = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in said.out.splitlines() if line.startswith("| ")}
    assert lines["RoPE*"] == ["", "**1.900**", "1.968", "", "7.000", "7.036", "", "8.500", "8.815"]
    assert lines["Scale-invariant p-RoPE"][:6] == ["6.000", "2.200", "2.163", "6.100", "2.210", "**2.193**"]
    assert lines["Scale-invariant p-RoPE, form barbero"][1:6] == ["2.100", "", "3.100", "**2.150**", ""]
    assert lines["YaRN"] == ["", "", "**1.957**", "", "", "7.004", "", "", "8.763"]
    assert "models used: 2 of 10" in said.out and "on 50,003,968 tokens" in said.out
    table = rows(tmp_path / "out" / "table_llama.csv")
    key = ("scale_invariant_p_rope", "65536", "{}")
    ours = next(r for r in table if (r["method"], r["length"], r["options"]) == key)
    assert (ours["before"], ours["mean"], ours["paper_mean"]) == ("6.2", "2.3", "2.252")


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds(tmp_path, call):
    values = write_study(tmp_path / "runs", "figure_train_4k")
    code, said = call("figure_train_4k", "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / "figure_train_4k")
    data = rows(tmp_path / "out" / "figure_train_4k.csv")
    assert len(data) == 10 * 3 * 5  # methods, three of them with the weights of another; lengths, validations
    for row in data:
        loss = np.array([values[row["series"], seed, int(row["val_length"])] for seed in range(3)])
        above = 0.1 * (4 - int(row["step"]) / 160)
        assert float(row["mean"]) == pytest.approx(loss.mean() + above)
        assert float(row["stderr"]) == pytest.approx(loss.std(ddof=1) / math.sqrt(3))
    assert "3.28 is left out" in said.out


def test_points_on_a_part_of_the_tokens_are_open_circles(tmp_path, call):
    item = "figure_scale_invariant_variants"
    write_study(tmp_path / "runs", item, part=16_384)
    code, said = call(item, "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / item) and "Open circles" in said.out
    data = rows(tmp_path / "out" / f"{item}.csv")
    assert len(data) == 6 * 3 * 5  # methods, with tau scaled or not, lengths, validations
    for row in data:
        assert row["val_tokens"] == ("49152" if row["val_length"] == "256" or row["step"] == "640" else "16384")


def test_a_mean_is_over_losses_on_the_same_tokens(tmp_path, call):
    for seed, part in enumerate((None, 16_384)):
        (run,) = sweep("figure_train_4k", "mini", seeds=[seed], methods=["rope"])
        write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.1, 4096: 4.2, 16_384: 4.3}, part=part)
    call("figure_train_4k", "--scale", "mini", "--seeds", "0", "1", "--methods", "rope")
    data = rows(tmp_path / "out" / "figure_train_4k.csv")
    steps = {n: [int(r["step"]) for r in data if r["val_length"] == n] for n in ("256", "1024", "4096")}
    assert steps == {"256": [0, 200, 400, 640], "1024": [640], "4096": [640]}


@pytest.mark.parametrize("item, three_seeds", [("figure_train_lengths", ["256"]), ("figure_tau", [])])
def test_curve_figures(item, three_seeds, tmp_path, call):
    write_study(tmp_path / "runs", item)
    code, said = call(item, "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / item)
    found = {(r["series"], r["train_length"]): int(r["seeds"]) for r in rows(tmp_path / "out" / f"{item}.csv")}
    assert len(found) == dict(figure_train_lengths=10 * 3, figure_tau=6)[item]
    assert {length for (_, length), seeds in found.items() if seeds == 3} == set(three_seeds)


def test_half_written_last_line_is_dropped_and_a_damaged_one_named(tmp_path, call):
    runs = sweep("figure_304m", "mini")
    folders = [write_run(tmp_path / "runs", r, {256: 4.0, 1024: 4.1, 4096: 4.2, 16_384: 4.3}) for r in runs]
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 1300, "val_lo')
    lines = (folders[1] / "metrics.jsonl").read_text().splitlines()
    (folders[1] / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))
    code, said = call("figure_304m", "--scale", "mini")
    assert code == 1 and f"{folders[1] / 'metrics.jsonl'}, line 2 is not JSON" in said.out
    methods = {r["series"] for r in rows(tmp_path / "out" / "figure_304m.csv")}
    assert methods == {runs[0].config.method, runs[2].config.method} and "runs used: 2 of 3" in said.out


def test_a_loss_that_is_not_a_number_is_a_gap_in_the_curve(tmp_path, call):
    for run in sweep("figure_train_4k", "mini", seeds=[0, 1], methods=["rope", "alibi"]):
        folder = write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.1, 4096: 4.2, 16_384: 4.3})
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"256": 4.1,', '"256": null,'))
    code, said = call("figure_train_4k", "--scale", "mini", "--seeds", "0", "1", "--methods", "rope", "alibi")
    [gap] = [r for r in rows(tmp_path / "out" / "figure_train_4k.csv") if r["mean"] == "nan"]
    assert (gap["series"], gap["val_length"], gap["step"]) == (run.config.method, "256", "400")
    assert code == 0 and is_figure(tmp_path / "out" / "figure_train_4k")


def test_without_runs_there_is_no_figure(tmp_path, call):
    code, said = call("figure_304m", "--scale", "mini")
    assert code == 1 and "No figure" in said.out and not (tmp_path / "out").exists()
    assert said.err == "not written: no run of figure_304m is there\n"


# ---- theory and trained models ---------------------------------------------------------------------------------------


def write_models(tmp_path, item, num_layers, val_tokens, seeds=None):
    """Untrained tiny models of the study's methods, with checkpoints, and their validation text."""
    writer = ShardWriter(tmp_path / "data", "t", tokenizer="none", vocab_size=64)
    random = np.random.default_rng(0)
    for split, count in dict(train=100, val=val_tokens).items():
        writer.write(split, random.integers(64, size=count).astype(np.uint16))
    writer.close()
    fields = [*TINY.split(), "--num_layers", str(num_layers), "--data_dir", str(tmp_path / "data"), "--device", "cpu"]
    for run in sweep(item, "mini", seeds, changes=field_changes("mini", fields)):
        losses = {n: 4.0 for n in run.config.val_lengths}
        folder = write_run(tmp_path / "runs", run, losses, data=data_fingerprint(run.config))
        (folder / "checkpoints").mkdir()
        torch.manual_seed(run.config.seed)
        model = build_model(run.config, torch.float32)
        save_checkpoint(folder / "checkpoints", 2, dict(step=2, model=model.state_dict()))
    return fields


def test_figure_qq_ours(tmp_path, call):
    fields = write_models(tmp_path, "figure_qq_ours", num_layers=2, val_tokens=400)
    folder = next(f.path for f in read_runs(tmp_path / "runs") if f.config.method == "p_rope")
    next((folder / "checkpoints").iterdir()).unlink()
    code, said = call("figure_qq_ours", "--scale", "mini", *fields)
    assert code == 1 and f"{folder} has no checkpoint" in said.out and "runs used: 2 of 3" in said.out
    for method in ("rope", "scale_invariant_p_rope"):
        assert is_figure(tmp_path / "out" / f"figure_qq_ours_{method}")
    assert len(rows(tmp_path / "out" / "figure_qq_ours.csv")) == 2 * 2 * 2 * 200  # methods, layers, forms, quantiles
    assert len(rows(tmp_path / "out" / "figure_qq_ours_heads.csv")) == 2 * 2 * 2 * 3  # two heads and all


def test_figure_qq_ours_tells_seeds_apart(tmp_path, call):
    fields = write_models(tmp_path, "figure_qq_ours", num_layers=1, val_tokens=400, seeds=[0, 1])
    code, said = call("figure_qq_ours", "--scale", "mini", "--seeds", "0", "1", "--methods", "rope", *fields)
    assert code == 0 and [f"RoPE, seed {seed}" in said.out for seed in range(3)] == [True, True, False]
    drawn = [(tmp_path / "out" / f"figure_qq_ours_rope_s{seed}.png").read_bytes() for seed in range(2)]
    assert drawn[0] != drawn[1]
    assert [row["seed"] for row in rows(tmp_path / "out" / "figure_qq_ours_heads.csv")] == ["0"] * 6 + ["1"] * 6


def test_figure_entropy_with_trained_models(tmp_path, call):
    fields = write_models(tmp_path, "figure_entropy", num_layers=1, val_tokens=4 * 4096)
    code, said = call("figure_entropy", "--scale", "mini", "--draws", "2", *fields)
    assert code == 0, said.out
    assert is_figure(tmp_path / "out" / "figure_entropy")
    data = rows(tmp_path / "out" / "figure_entropy.csv")
    trained = {(r["scheme"], int(r["length"])) for r in data if r["source"] == "trained"}
    assert trained == {(s, 2**k) for s in ("none", "logn", "scale_invariant") for k in range(7, 13)}
    assert {int(r["length"]) for r in data if r["source"] == "iid"} == {2**k for k in range(7, 17)}


def test_figure_entropy_names_a_validation_text_that_is_too_short(tmp_path, call):
    fields = write_models(tmp_path, "figure_entropy", num_layers=1, val_tokens=4 * 4096 - 1)
    code, said = call("figure_entropy", "--scale", "mini", "--draws", "2", *fields)
    assert code == 1 and said.out.count("windows of 4096 tokens") == 3 and "bottom row is left out" in said.out
    assert is_figure(tmp_path / "out" / "figure_entropy")


def test_figure_sublog(tmp_path, call):
    code, said = call("figure_sublog", "--draws", "2")
    assert code == 0 and is_figure(tmp_path / "out" / "figure_sublog")
    data = rows(tmp_path / "out" / "figure_sublog.csv")
    assert len(data) == 10 * 3 and all(0 < float(r["r_squared_sqrt_log_t"]) <= 1 for r in data)


# ---- the command -----------------------------------------------------------------------------------------------------


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize("item", ["figure_304m", "table_losses"])
def test_a_page_of_more_runs_is_kept_unless_forced(tmp_path, call, item):
    runs = sweep(item, "mini", methods=["alibi"], seeds=[0, 1])
    folders = [write_run(tmp_path / "runs", run, {n: 4.0 for n in run.config.val_lengths}) for run in runs]
    words = [item, "--scale", "mini", "--methods", "alibi", "--seeds", "0", "1"]
    assert call(*words)[0] == 0
    page, before, whole = tmp_path / "out" / f"{item}.md", contents(tmp_path / "out"), len(runs)
    assert len(before) == (4 if item == "figure_304m" else 2)
    (folders[0] / "summary.json").unlink()
    code, said = call(*words)
    why = f"not written: {page} was made from {whole} runs, and now there are {whole - 1}: --force writes over it"
    assert code == 1 and said.err == f"{why}\n" and contents(tmp_path / "out") == before
    code, said = call(item, "--scale", "mini", "--methods", "alibi", "--seeds", "1")  # all that is asked for is there
    assert code == 1 and said.err.startswith("not written: ") and contents(tmp_path / "out") == before
    assert call(*words, "--force")[0] == 1
    assert f"- runs used: {whole - 1} of {whole}\n" in page.read_text()
    for folder in folders:
        shutil.rmtree(folder)
    before = contents(tmp_path / "out")
    assert call(*words, "--force")[0] == 1 and contents(tmp_path / "out") == before  # never from none


def test_all_without_runs_writes_over_no_page_that_was_made_from_some(tmp_path, call):
    """The command of docs/reproduce.md in a fresh clone, with the pages that are there."""
    mini = Path(__file__).parents[1] / "results" / "mini"
    shutil.copytree(mini, tmp_path / "out", ignore=shutil.ignore_patterns("runs", "table_infini.*"))
    before = contents(tmp_path / "out")
    code, said = call("all", "--scale", "mini", "--draws", "2")
    after = contents(tmp_path / "out")
    without_runs = ("figure_sublog", "figure_sublog_unscaled", "table_llama", "figure_qq")
    assert {path.stem for path in after if before.get(path) != after[path]} == {*without_runs}
    said_of = dict(line.split(": ", 1) for line in said.out.split("\n\n")[0].splitlines())
    table = tmp_path / "out" / "table_losses.md"
    made = re.search(r"runs used: (\d+) of", table.read_text())[1]
    why = f"not written: {table} was made from {made} runs, and now there are 0"
    assert code == 1 and said_of["table_losses"].endswith(why)
    assert "not written: no run of table_infini is there" in said_of["table_infini"]
    assert "figure_entropy.md was made from" in said_of["figure_entropy"]  # though its top row needs none


def test_all_survives_broken_folders_and_sums_up(tmp_path, call):
    values = write_study(tmp_path / "runs", "table_infini")
    broken = tmp_path / "runs" / "mini-rope-s0"
    (broken / "summary.json").write_text("[1, 2]")
    (broken / "metrics.jsonl").write_text("3\n4\n")
    (tmp_path / "runs" / "mini-infini_rope-s0" / "config.json").write_bytes(b"\xff\x00")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "table_infini.csv").mkdir()  # this item cannot be written
    code, said = call("all", "--scale", "mini", "--draws", "2")
    lines, summary = said.out.split("\n\n")
    said_of = dict(line.split(": ", 1) for line in lines.splitlines())
    assert code == 1 and list(said_of) == list(pages.ITEMS)
    assert said_of["table_infini"].startswith("failed: ")
    assert said_of["table_losses"].startswith("incomplete, 5 of 27 runs; 22 missing: `python -m scripts.sweep table_lo")
    assert said_of["table_llama"].startswith("needs models: ") and said_of["figure_qq"].startswith("needs models: ")
    assert said_of["figure_sublog"].startswith("complete")
    assert f"2 of {len(said_of)} complete: figure_sublog, figure_sublog_unscaled" in summary
    assert len(values) == (12 + 6) * 4
    assert f"2 of {len(said_of)} needs models: table_llama, figure_qq" in summary
    assert f"1 of {len(said_of)} failed: table_infini" in summary


@pytest.mark.parametrize(
    "words, error",
    [
        (["table_loss"], "invalid choice"),
        (["table_losses", "--scale", "huge"], "invalid choice"),
        (["table_losses", "--stepz", "3"], "unknown field --stepz"),
        (["figure_tau", "--methods", "rope"], "has no method rope"),
        (["figure_sublog", "--draws", "1"], "at least 2 draws"),
    ],
)
def test_wrong_usage_is_one_line(words, error, call):
    code, said = call(*words)
    assert code == 2 and error in said.err.splitlines()[-1] and "Traceback" not in said.err


def test_a_legend_is_not_wider_than_its_figure(tmp_path):
    for words, fits in (("short", 4), ("a series whose name goes on and on for a while", 2)):
        with drawing(tmp_path / "figure", 1, 3, height=2.0) as (figure, axes):
            for number in range(4):
                axes[0, 0].plot([0, 1], label=f"{words} {number}")
            legend_below(figure, axes, 4)
            (legend,) = figure.legends
            assert legend._ncols == fits and legend.get_window_extent().width <= figure.bbox.width
            assert len(legend.get_texts()) == 4
