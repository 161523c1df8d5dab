"""What is kept of finished runs, and the committed pages, which are made from that alone."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from test_reproduce import write_run, write_study

from configs.sweeps import sweep
from scripts import keep as keep_command
from scripts.reproduce import __main__ as reproduce_command
from scripts.reproduce.pages import COMPUTED
from scripts.shared.runs import read_runs

ROOT = Path(__file__).parents[1]
KEPT = sorted(path.parent for path in ROOT.glob("results/*/runs") if path.is_dir())


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in tmp_path: its exit status and what it said."""
    monkeypatch.chdir(tmp_path)

    def call(command, *words):
        monkeypatch.setattr(sys, "argv", [command.__name__, *words])
        try:
            command.main()
        except SystemExit as end:
            return end.code, capsys.readouterr()
        return 0, capsys.readouterr()

    return call


@pytest.fixture
def keep(call):
    return lambda: call(keep_command, "trained", "kept")


@pytest.mark.slow
def test_pages_made_from_what_is_kept_are_those_made_from_the_runs(tmp_path, call, keep):
    write_study(tmp_path / "trained", "figure_train_4k", needle={"greedy": {"256": 0.5}})
    for number, path in enumerate((tmp_path / "trained").iterdir()):
        elsewhere = json.loads((path / "config.json").read_text()) | dict(runs_dir="/somewhere/else")
        (path / "config.json").write_text(json.dumps(elsewhere))
        (path / "checkpoints").mkdir()
        evaluation = {"step": "step_000640", "val_loss": {"512": 4.5}, "val_tokens": number}
        (path / "evaluation.json").write_text(json.dumps(evaluation))
    code, said = keep()
    assert code == 0 and said.out.startswith("21 finished runs of ")
    assert {p.name for p in (tmp_path / "kept" / "mini-rope-s0").iterdir()} == {
        "config.json", "evaluation.json", "log.txt", "metrics.jsonl", "needle", "summary.json"}  # fmt: skip
    for before, kept in zip(read_runs(tmp_path / "trained"), read_runs(tmp_path / "kept"), strict=True):
        assert kept.config == dataclasses.replace(before.config, runs_dir="runs")
        assert (kept.summary, kept.problems) == (before.summary, ())
        for name in ("evaluation.json", "needle/summary.json"):
            assert kept.json(name) == before.json(name) is not None
        assert kept.metrics() == [record for record in before.metrics() if "val_loss" in record] != before.metrics()
    pages = []
    for runs_dir in ("trained", "kept"):
        code, said = call(reproduce_command, "figure_train_4k", "--scale", "mini", "--runs-dir", runs_dir)
        data = (tmp_path / "results/mini/figure_train_4k.csv").read_bytes()
        pages.append((code, said.out.replace(f"--runs-dir {runs_dir}", ""), data))
    assert pages[0] == pages[1] and "- commit of the runs: 0123abc (21)" in pages[0][1]


def test_unfinished_runs_are_left_out_and_different_ones_are_not_written_over(tmp_path, keep):
    assert (keep()[0], (tmp_path / "kept").exists()) == (2, False)
    first, second, *_ = sweep("table_losses", "mini")
    folder = write_run(tmp_path / "trained", first, {256: 4.0})
    (write_run(tmp_path / "trained", second, {256: 4.0}) / "summary.json").unlink()
    assert keep()[0] == keep()[0] == 0 and [path.name for path in (tmp_path / "kept").iterdir()] == [first.name]
    shutil.rmtree(folder)
    write_run(tmp_path / "trained", first, {256: 3.0})
    code, said = keep()
    assert code == 2 and said.err.count("\n") == 1
    assert f"kept/{first.name} is a different run (trained again)" in said.err
    (tmp_path / "trained" / first.name / "metrics.jsonl").write_text("{}\n")
    shutil.rmtree(tmp_path / "kept")
    code, said = keep()
    assert code == 2 and said.err.count("\n") == 1 and "metrics.jsonl, line 1" in said.err


@pytest.mark.slow
@pytest.mark.parametrize("results", KEPT, ids=lambda path: path.name)
def test_committed_tables_are_what_the_committed_runs_make(tmp_path, call, results):
    """Byte for byte, by the command that the page itself names."""
    shutil.copytree(results / "runs", tmp_path / "results" / results.name / "runs")
    made = 0
    for page in sorted(results.glob("*.md")):
        command = re.search(r"^- command: `python (.+)`$", page.read_text(), re.MULTILINE)
        if command is None or page.stem in COMPUTED:
            continue
        said = call(reproduce_command, *shlex.split(command[1])[2:])
        again = tmp_path / "results" / results.name / page.name
        assert again.exists() and again.read_bytes() == page.read_bytes(), f"{command[1]}: {said}"
        assert again.with_suffix(".csv").read_bytes() == page.with_suffix(".csv").read_bytes()
        made += 1
    assert made
