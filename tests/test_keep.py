"""Kept runs: the lines of runs.jsonl, and the committed pages, which are made from them alone."""

import re
import shlex
import shutil

import pytest
from commands import ROOT, exit_code, parametrize, slow, update_json, write_files
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


@slow
def test_pages_from_lines_equal_pages_from_run_folders(tmp_path, call):
    needle = {"greedy": {"256": 0.5}, "by_distance": {"256": {"8": [1, 2]}}}
    write_study(tmp_path / "trained", "figure_train_4k", needle=needle, part=1024, tokens_per_second=9)
    folders = sorted((tmp_path / "trained").iterdir())
    for folder in folders:
        update_json(folder / "config.json", runs_dir="/somewhere/else")
        evaluation = '{"step": "step_000640", "val_loss": {"512": 4.5}, "val_tokens": 49152}'
        write_files(folder, {"evaluation.json": evaluation})
    assert call(keep_command, *folders, "--to", "kept/runs.jsonl")[0] == 0

    def facts(run):
        return config_hash(run.config), run.config.validate_as, run.path.name, run.logged("started"), run.needle

    lines = read_runs(tmp_path / "kept/runs.jsonl")
    assert [*map(facts, lines)] == [*map(facts, read_runs(tmp_path / "trained"))]
    for line in lines:
        assert line.summary["val_loss"]["512"] == 4.5 and line.summary["tokens_per_second"] == 9
        assert line.logged("torch") == ["2.13.0", "2.14.0+cu130"] and line.problems == ()
    made = []
    for runs_dir in ("trained", "kept/runs.jsonl"):
        _, output = call(reproduce_command, *f"figure_train_4k --scale mini --runs-dir {runs_dir}".split())
        figure = (tmp_path / "results/mini/figures/figure_train_4k.png").read_bytes()
        made.append((output.out.replace(f"--runs-dir {runs_dir}", ""), figure))
    assert made[0] == made[1] and "0123abc (21)" in made[0][0]


def test_a_line_is_replaced_and_keeps_copy_gain_and_changed_fields(tmp_path, call):
    changes = dict(steps=400, cooldown_steps=183, length_schedule=(64, 20), dtype="float32", wandb_project="x")
    first, second, *_ = sweep("table_losses", "mini", changes=changes)
    gain = {"random": {"128": 2.5}}
    folder = write_run(tmp_path / "runs", first, same(first), steps=(0, 400), copy_gain=gain)
    other = write_run(tmp_path / "runs", second, same(second), steps=(0, 400))

    def keep_again():
        assert call(keep_command, folder, other, "--to", "runs.jsonl")[0] == 0
        return read_runs(tmp_path / "runs.jsonl")

    keep_again()
    kept, _ = keep_again()
    fields = dict(steps=400, length_schedule=[64, 20], dtype="float32")
    assert kept.line["changes"] | fields == fields | dict(validate_as=kept.line["changes"]["validate_as"])
    assert config_hash(kept.config) == config_hash(first.config) and kept.config.length_schedule == (64, 20)
    assert kept.summary["copy_gain"] == gain
    update_json(folder / "summary.json", val_loss=kept.summary["val_loss"] | {"256": 3.0})
    assert [run.summary["val_loss"]["256"] for run in keep_again()] == [3.0, 4.0]
    assert call(keep_command, folder, folder, "--to", "twice.jsonl")[0] == 2


@parametrize("damage", [
    lambda folder: (folder / "summary.json").unlink(),
    lambda folder: write_files(folder, {"metrics.jsonl": "{\n{}\n"}),
    shutil.rmtree,
])
def test_unfinished_and_damaged_runs_are_not_kept(tmp_path, call, damage):
    run = sweep("table_losses", "mini")[0]
    folder = write_run(tmp_path / "runs", run, same(run))
    damage(folder)
    code, output = call(keep_command, folder, "--to", "runs.jsonl")
    assert code == 2 and folder.name in output.err and not (tmp_path / "runs.jsonl").exists()


def test_a_file_with_another_ending_is_refused_and_left_alone(tmp_path, call):
    write_files(tmp_path, {"runs.json": "{}\n"})
    folder = write_run(tmp_path / "runs", sweep("table_losses", "mini")[0], {256: 4.0})
    assert call(keep_command, folder, "--to", "runs.json")[0] == 2
    assert (tmp_path / "runs.json").read_text() == "{}\n"


def test_a_line_of_a_field_that_is_gone_is_a_problem_and_no_error(tmp_path):
    line, *_ = KEPT[0].read_text().splitlines(keepends=True)
    write_files(tmp_path, {"runs.jsonl": line.replace('"changes": {', '"changes": {"gone": 1, ')})
    (stored,) = read_runs(tmp_path / "runs.jsonl")
    assert stored.config is None and "gone" in stored.problems[0]


@slow
@parametrize("kept", KEPT, ids=lambda path: path.parent.name)
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
    for file in KEPT:
        for stored in read_runs(file):
            assert stored.problems == () and stored.summary["val_loss"], stored.path
