"""Kept runs: the lines of runs.jsonl, and the committed pages, which are made from them alone."""

import json
import re
import shlex
import shutil

import pytest
from commands import ROOT, exit_code, update_json
from test_reproduce import drawn, same, write_run, write_study  # noqa: F401 (drawn is a fixture)

from configs.config import config_hash
from scripts import keep as keep_command
from scripts.reproduce import __main__ as reproduce_command
from scripts.reproduce.__main__ import all_items, read_sections
from scripts.shared.runs import read_runs
from scripts.shared.sweeps import sweep

KEPT = sorted(ROOT.glob("results/*/runs.jsonl"))


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a command in tmp_path: its exit status and its output."""
    monkeypatch.chdir(tmp_path)

    return lambda command, *argv: (exit_code(command.main, argv), capsys.readouterr())


@pytest.mark.slow
def test_pages_from_lines_equal_pages_from_run_folders(tmp_path, call):
    needle = {"greedy": {"256": 0.5}, "by_distance": {"256": {"8": [1, 2]}}}
    write_study(tmp_path / "trained", "figure_train_4k", needle=needle, part=1024, tokens_per_second=9)
    folders = sorted((tmp_path / "trained").iterdir())
    for folder in folders:
        update_json(folder / "config.json", runs_dir="/somewhere/else")
        evaluation = {"step": "step_000640", "val_loss": {"512": 4.5}, "val_tokens": 49_152}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    code, _ = call(keep_command, *folders, "--to", "kept/runs.jsonl")
    assert code == 0
    for folder, line in zip(read_runs(tmp_path / "trained"), read_runs(tmp_path / "kept/runs.jsonl"), strict=True):
        assert config_hash(line.config) == config_hash(folder.config) and line.problems == ()
        assert line.config.validate_as == folder.config.validate_as and line.path.name == folder.path.name
        assert line.summary["val_loss"] == folder.summary["val_loss"] and line.summary["val_loss"]["512"] == 4.5
        assert (line.text, line.needle, line.logged("torch")) == (folder.text, folder.needle, ["2.13.0"])
        assert line.logged("started") == folder.logged("started") == ["2026-11-28T09:30:00+00:00"]
        assert line.summary["tokens_per_second"] == 9 and line.data["validation"] == "v"
    made = []
    for runs_dir in ("trained", "kept/runs.jsonl"):
        code, output = call(reproduce_command, "figure_train_4k", "--scale", "mini", "--runs-dir", runs_dir)
        numbers = (tmp_path / "results/mini/figures/figure_train_4k.png").read_bytes()
        made.append((code, output.out.replace(f"--runs-dir {runs_dir}", ""), numbers))
    assert made[0] == made[1] and "0123abc (21)" in made[0][1]


def test_a_line_is_replaced_and_keeps_copy_gain_and_changed_fields(tmp_path, call):
    changes = dict(steps=400, cooldown_steps=183, length_schedule=(64, 20), dtype="float32", wandb_project="x")
    first, second, *_ = sweep("table_losses", "mini", changes=changes)
    copies = dict(copy_gain={"random": {"128": 2.5}}, copy_loss={"random": {"128": [7.0, 4.5]}})
    folder = write_run(tmp_path / "runs", first, same(first), steps=(0, 400), **copies)
    rows = dict(copy_rows=dict(share=0.5, row_lengths=[[64, 1000]]), train="abc")
    (folder / "data.json").write_text(json.dumps(rows))
    other = write_run(tmp_path / "runs", second, same(second), steps=(0, 400))
    for _ in range(2):
        assert call(keep_command, folder, other, "--to", "runs.jsonl")[0] == 0
    line, _ = (json.loads(text) for text in (tmp_path / "runs.jsonl").read_text().splitlines())
    expected = dict(steps=400, length_schedule=[64, 20], dtype="float32", validate_as=0)
    assert line["changes"] | dict(validate_as=0) == expected
    kept, _ = read_runs(tmp_path / "runs.jsonl")
    assert config_hash(kept.config) == config_hash(first.config) and kept.config.length_schedule == (64, 20)
    assert kept.data["copy_rows"] == rows["copy_rows"] and kept.summary["copy_gain"] == copies["copy_gain"]
    update_json(folder / "summary.json", val_loss={"256": 3.0})
    call(keep_command, folder, "--to", "runs.jsonl")
    assert [run.summary["val_loss"]["256"] for run in read_runs(tmp_path / "runs.jsonl")] == [3.0, 4.0]


@pytest.mark.parametrize("damage", ["no summary", "a damaged line", "no folder"])
def test_unfinished_and_damaged_runs_are_not_kept(tmp_path, call, damage):
    run = sweep("table_losses", "mini")[0]
    folder = write_run(tmp_path / "runs", run, same(run))
    if damage == "no summary":
        (folder / "summary.json").unlink()
    if damage == "a damaged line":
        (folder / "metrics.jsonl").write_text("{\n{}\n")
    if damage == "no folder":
        shutil.rmtree(folder)
    code, output = call(keep_command, folder, "--to", "runs.jsonl")
    assert code == 2 and folder.name in output.err and not (tmp_path / "runs.jsonl").exists()


def test_a_line_of_a_field_that_is_gone_is_a_problem_and_no_error(tmp_path):
    line = json.loads(KEPT[0].read_text().splitlines()[0])
    line["changes"]["gone"] = 1
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    (stored,) = read_runs(tmp_path / "runs.jsonl")
    assert stored.config is None and "gone" in stored.problems[0]


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.parent.name)
def test_committed_tables_follow_from_the_committed_lines(tmp_path, call, kept, drawn):  # noqa: F811
    """Byte for byte, by the command that each section of the page names."""
    place = tmp_path / "results" / kept.parent.name
    place.mkdir(parents=True)
    shutil.copy(kept, place)
    committed = read_sections(kept.parent / "tables.md")
    sections = {item: text for item, text in committed.items() if item in all_items() and "\n- made: " not in text}
    for text in sections.values():
        call(reproduce_command, *shlex.split(re.search(r"^- command: `python (.+)`$", text, re.MULTILINE)[1])[2:])
    again = read_sections(place / "tables.md")
    assert sections and again == sections


def test_kept_runs_are_runs_of_this_version():
    for stored in [stored for file in KEPT for stored in read_runs(file)]:
        assert stored.problems == () and stored.summary["val_loss"], stored.path
