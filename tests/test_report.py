"""scripts.report: page and charts have the numbers of the run folders, and no damaged run breaks the page."""

import dataclasses
import json
import re

import numpy as np
import pytest
from commands import exit_code

from configs.presets import mini
from files import to_json
from scripts import report
from scripts.report import describe_run, make_page
from scripts.shared.runs import read_run

EVIL = "</td><script>document.title='evil'</script>\"'<img src=x onerror=alert(1)>"


def write_run(path, stop=11, **changes):
    """Write a run folder as train_gpt.py leaves it after `stop` of 11 steps, its numbers random. Return its records."""
    config = dataclasses.replace(mini(), steps=11, cooldown_steps=3, val_lengths=(16, 48), val_tokens=96, **changes)
    rng, records = np.random.default_rng([config.seed, len(path.name)]), []
    path.mkdir(parents=True)
    (path / "config.json").write_text(to_json(vars(config)))
    for step in range(stop + 1):
        place = dict(step=step, tokens=step * config.batch_tokens)
        if step:
            records.append(place | dict(train_loss=rng.normal(5), grad_norm=1.0))
        if step % 4 == 0 or step == 11:
            losses = dict(val_loss={n: rng.normal(5) for n in ("16", "48")}, val_tokens={"16": 96, "48": 96})
            records.append(place | losses)
    (path / "metrics.jsonl").write_text("".join(to_json(record) + "\n" for record in records))
    if stop == 11:
        summary = dict(steps=11, tokens=place["tokens"], tokens_per_second=10_007, parameters=12_345, **losses)
        (path / "summary.json").write_text(to_json(summary))
    return records


def table(page):
    """Return the rows as dicts."""
    head, *rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    heads = re.findall(r"<th>(.*?)</th>", head)
    return [dict(zip(heads, re.findall(r"<td>(.*?)</td>", row))) for row in rows]


def shown(*paths):
    return [describe_run(read_run(path)) for path in paths]


def test_the_numbers_come_from_the_files(tmp_path):
    records = write_run(tmp_path / "a-s5", seed=5, method="alibi")
    (tmp_path / "a-s5" / "needle").mkdir()
    (tmp_path / "a-s5" / "needle" / "summary.json").write_text(json.dumps(dict(greedy={"16": 0.625})))
    (run,) = shown(tmp_path / "a-s5")
    page = make_page([run], [])
    (row,) = table(page)
    validations = [r for r in records if "val_loss" in r]
    last = validations[-1]
    expected = {"run": "a-s5", "method": "ALiBi", "state": "finished", "seed": "5", "steps": "11 of 11"}
    expected |= {"parameters": "12,345", "tokens/s": "10,007", "needle at 16": "62.5%", "length": "256"}
    assert row == expected | {f"loss at {n}": f"{last['val_loss'][n]:.4f}" for n in ("16", "48")}
    curves = {"Training loss": {r["tokens"]: r["train_loss"] for r in records if "train_loss" in r and r["step"] > 1}}
    for n in ("16", "48"):
        curves[f"Validation loss at {n} tokens"] = {r["tokens"]: r["val_loss"][n] for r in validations if r["step"]}
    curves[report.BY_LENGTH] = {int(n): loss for n, loss in last["val_loss"].items()}
    assert run.charts == curves
    assert page.count('src="data:image/png') == 1


def test_unfinished_runs_show_their_last_validation(tmp_path):
    records = write_run(tmp_path / "a", stop=6)
    write_run(tmp_path / "new", stop=0)
    (tmp_path / "new" / "metrics.jsonl").unlink()
    started, new = table(make_page(shown(tmp_path / "a", tmp_path / "new"), []))
    loss = [r for r in records if "val_loss" in r][-1]["val_loss"]
    assert (started["state"], started["steps"]) == ("interrupted", "6 of 11")
    assert started["loss at 48"] == f"{loss['48']:.4f}"
    assert (new["steps"], new["loss at 48"]) == ("0 of 11", "")


def test_seeds_are_a_group(tmp_path, monkeypatch):
    drawn = {}
    real = report.draw_panels
    monkeypatch.setattr(report, "draw_panels", lambda *args, **keys: drawn.update(grid=args[1]) or real(*args, **keys))
    for name in ("rope-s0", "rope-s1", "other"):
        write_run(tmp_path / name, method="rope")
    rows = table(make_page(shown(*(tmp_path / name for name in ("rope-s0", "rope-s1", "other"))), []))
    assert [row["run"] for row in rows] == ["rope-s0", "rope-s1", "other"]
    panels = {panel.title: panel for row in drawn["grid"] for panel in row}
    assert [line.look["label"] for line in panels["Training loss"].lines] == ["rope", "rope", "other"]
    assert len({line.look["linestyle"] for line in panels["Training loss"].lines}) == 2


def test_long_curves_are_means_over_bins():
    losses = np.random.default_rng(1).normal(size=4578)
    curve = report.mean_in_bins([dict(tokens=10 * i, train_loss=float(loss)) for i, loss in enumerate(losses)])
    assert len(curve) <= report.CURVE_POINTS
    assert [*curve.values()][1] == pytest.approx(losses[31:62].mean()) and [*curve][1] == 10 * 61


@pytest.mark.parametrize("name, text", [
    ("config.json", '{"method": "ro'), ("summary.json", "[" * 100_000), ("summary.json", '{"steps": 1.5}'),
    ("metrics.jsonl", '{"step": 1, "train_loss": 2.0}\n{}\n'), ("evaluation.json", '{"step": "zz"'),
])
def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path, monkeypatch, name, text):
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "bad")
    (tmp_path / "runs" / "bad" / name).write_text(text)
    (tmp_path / "runs" / "good.failures.txt").write_text("first\nout of memory\n")
    monkeypatch.chdir(tmp_path)
    report.main([])
    page = (tmp_path / "report.html").read_text()
    assert [row["run"] for row in table(page)] == ["good"]
    (bad, good) = re.findall("<li>(.*?)</li>", page, re.DOTALL)
    assert "runs/bad" in bad and "good" in good and "out of memory" in good


def test_no_name_can_leave_its_place_and_the_page_asks_for_nothing(tmp_path):
    evil = tmp_path / EVIL.replace("/", "\u2215")  # the one character that a folder's name cannot have
    write_run(evil)
    evil.with_name(f"{evil.name}.failures.txt").write_text(EVIL)
    report.main([str(evil), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "<img src=x" not in page
    assert not re.search(r"""(src|href)=["'](?!data:image/png)""", page) and "http" not in page.split("<style>")[1]


def test_a_folder_without_runs_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(report.main, []) == 2 and "runs/" in capsys.readouterr().err
