"""The quickstart's own code on a few steps: it trains every method, ends with table and figure, repeats nothing."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from commands import ROOT, exit_code, read_json, update_json
from tiny_run import sweeps_in_this_process

from configs.presets import quickstart
from data import python_source
from data.shards import open_split, read_manifest
from data.text import load_tokenizer
from scripts import quickstart as script

TINY = "--steps 10 --cooldown_steps 1 --length_schedule 32 2 64 2 --val_tokens 4096 --val_copy_gaps 32 128"
TINY += " --vocab_size 1024 --num_layers 1 --compile off --device cpu"


@pytest.mark.parametrize("name", ["quickstart", "test", "torture"])
def test_help_installs_nothing(tmp_path, name):
    """The folder has no .venv, and there is no Python that could make one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    environment, command = os.environ | dict(PYTHON="/no/python"), ["bash", f"scripts/{name}.sh", "quick", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"scripts/{name}.sh" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


@pytest.mark.parametrize("text, documents", [("taught", 62), ("mini", 120), ("far", 62)])
def test_text_and_tokenizer_come_from_this_machine(text, documents, tmp_path, monkeypatch, capsys):
    names = [f"lib/module_{i}.py" for i in range(60)] + [f"lib/package_{i}/sub.py" for i in range(60)] + ["torch/a.py"]
    for name in (*names, "lib/test/wrong.py", "lib/package_1/tests/wrong.py", "lib/site-packages/wrong.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" + f"def f(x):\n    return x + {len(name)}\n" * 20)
    torch = type("", (), dict(submodule_search_locations=[tmp_path / "torch"]))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: torch)
    python_source.main([text, "--out", str(tmp_path / "data")])
    streams = [open_split(tmp_path / "data", split, 2048) for split in ("train", "val")]
    decode = load_tokenizer(tmp_path / "data").decode
    read = "".join(decode(stream.read(0, len(stream)).tolist()) for stream in streams)
    assert "wrong" not in read and "package_" in read
    share = read_manifest(tmp_path / "data").get("copy_rows", {}).get("share")
    assert share == dict(taught=0.5, far=0, mini=None)[text]
    assert sum(map(int, re.findall(r"(\d+) documents", capsys.readouterr().out))) == documents


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("quickstart") / "My Books", np.random.default_rng(0)
    folder.mkdir()
    words = ["".join(random.choice(list("abcdefghijklmnop"), size=5)) for _ in range(800)]
    for i in range(200):
        (folder / f"{i}.txt").write_text(" ".join(random.choice(words, size=300)))
    rows = python_source.ROW_LENGTHS
    python_source.prepare([folder], folder.parent / "data", "bpe:1024", copy_rows=0.5, row_lengths=rows)
    return folder


def run(books, capsys, *more):
    """Exit code, stdout and stderr of the quickstart on these books."""
    folder = books.parent
    argv = ["--runs-dir", folder / "runs", "--data_dir", folder / "data", *TINY.split(), *more]
    return exit_code(script.main, argv), *capsys.readouterr()


@pytest.mark.slow
def test_a_short_quickstart_trains_every_method_and_repeats_nothing(books, capsys):
    with sweeps_in_this_process():
        code, output, _ = run(books, capsys)
    assert code == 0
    runs = books.parent / "runs"
    rows = [line for line in (runs / "quickstart.md").read_text().splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == list(script.METHODS) and "\n".join(rows) in output
    assert (runs / "quickstart.png").stat().st_size > 10_000
    folders = sorted(path for path in runs.iterdir() if path.is_dir())
    assert read_json(folders[0] / "config.json")["method_options"] == {"slope_scale": 4.0}
    assert "copy rows fit other sequences" in (folders[0] / "log.txt").read_text()  # the rows fit 1,000 steps
    summary = read_json(folders[0] / "summary.json")
    numbers = [f"{loss:.3f}" for loss in summary["val_loss"].values()]
    numbers.append(f"{summary['copy_gain']['random']['128']:.1f}")
    assert [cell.strip() for cell in rows[4].split("|")[1:-1]] == ["ALiBi", *numbers]

    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    assert run(books, capsys)[0] == 0
    update_json(folders[1] / "summary.json", data="0123")  # of a run on another text
    code, _, error = run(books, capsys)
    assert code == 2 and "data" in error
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before


def test_wrong_input_is_one_line(books, capsys, tmp_path):
    assert run(books, capsys, "--muon_rl", "5")[0] == run(books, capsys, "--method", "fox")[0] == 2
    python_source.prepare([books], tmp_path / "plain", "bpe:384", val_fraction=0.2, name="text")
    assert run(books, capsys, "--data_dir", tmp_path / "plain")[0] == 2  # without copy rows


def test_the_rows_of_the_text_follow_the_schedule():
    config = quickstart()
    ends = np.cumsum(config.length_schedule[1::2]) * config.batch_tokens
    assert python_source.ROW_LENGTHS == [*zip(config.length_schedule[::2], ends), (config.train_length, None)]
