"""The quickstart's own code on a few steps: it trains every method, ends with table and figure, repeats nothing."""

import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
from commands import ROOT, exit_code, names, one_error, parametrize, read_json, shared, slow, update_json, write_files
from test_text import make_documents, write_lines
from tiny_run import sweeps_in_this_process

from configs.presets import quickstart
from data import python_source
from data.shards import open_split, read_manifest
from data.text import load_tokenizer, prepare
from scripts import quickstart as script

TINY = "--steps 10 --cooldown_steps 1 --length_schedule 32 2 64 2 --val_tokens 4096 --val_copy_gaps 32 128"
TINY += " --vocab_size 1024 --num_layers 1 --compile off --device cpu"


@parametrize("name", ["quickstart", "test", "torture"])
def test_help_installs_nothing(tmp_path, name):
    """The folder has no .venv, and there is no Python that could make one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    environment, command = os.environ | dict(PYTHON="/no/python"), ["bash", f"scripts/{name}.sh", "quick", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"scripts/{name}.sh" in done.stdout
    assert names(tmp_path) == ["scripts"]


@parametrize("text, documents, share", [("taught", 62, 0.5), ("mini", 120, None), ("far", 62, 0)])
def test_text_and_tokenizer_come_from_this_machine(text, documents, share, tmp_path, monkeypatch, capsys):
    files = [name.format(i) for i in range(60) for name in ("lib/module_{}.py", "lib/package_{}/sub.py")]
    files += "torch/a.py lib/test/wrong.py lib/package_1/tests/wrong.py lib/site-packages/wrong.py".split()
    write_files(tmp_path, {name: f"# {name}\n" + f"def f(x):\n    return x + {len(name)}\n" * 20 for name in files})
    torch = SimpleNamespace(submodule_search_locations=[tmp_path / "torch"])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: torch)
    out = tmp_path / "data"
    python_source.main([text, "--out", str(out)])
    read = ""
    for split in ("train", "val"):
        stream = open_split(out, split, 2048)
        read += load_tokenizer(out).decode(stream.read(0, len(stream)).tolist())
    assert "wrong" not in read and "package_" in read
    assert read_manifest(out).get("copy_rows", {}).get("share") == share
    assert sum(map(int, re.findall(r"(\d+) documents", capsys.readouterr().out))) == documents


@shared
def books(shared_path):
    write_lines(shared_path / "books.jsonl", make_documents(3000))
    rows = python_source.ROW_LENGTHS
    prepare([shared_path / "books.jsonl"], shared_path / "data", "bpe:1024", copy_rows=0.5, row_lengths=rows)
    return shared_path


def run(books, more=""):
    """Return the exit code of the quickstart on these books."""
    return exit_code(script.main, f"--runs-dir {books}/runs --data_dir {books}/data {TINY} {more}".split())


@slow
def test_a_short_quickstart_trains_every_method_and_repeats_nothing(books, capsys):
    with sweeps_in_this_process():
        assert run(books) == 0
    runs = books / "runs"
    rows = [line for line in (runs / "quickstart.md").read_text().splitlines() if line.startswith("|")]
    assert "\n".join(rows) in capsys.readouterr().out
    cells = [re.findall(r"[^|\s][^|]*[^|\s]", row) for row in rows[2:]]
    assert [row[0] for row in cells] == [*script.METHODS]
    assert (runs / "quickstart.png").stat().st_size > 10_000
    alibi, other, *_ = folders = sorted(path for path in runs.iterdir() if path.is_dir())
    assert read_json(alibi / "config.json")["method_options"] == {"slope_scale": 4.0}
    summary = read_json(alibi / "summary.json")
    losses = [f"{loss:.3f}" for loss in summary["val_loss"].values()]
    assert cells[2] == ["ALiBi", *losses, f"{summary['copy_gain']['random']['128']:.1f}"]

    def times():
        return [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]

    before = times()
    assert run(books) == 0
    update_json(other / "summary.json", data="0123")  # of a run on another text
    capsys.readouterr()
    assert run(books) == 2 and "data" in one_error(capsys)
    assert times() == before


def test_wrong_input_is_refused(books, tmp_path):
    prepare([books / "books.jsonl"], tmp_path / "plain", "bpe:384", val_fraction=0.2, name="text")
    for more in ("--muon_rl 5", "--method fox", f"--data_dir {tmp_path}/plain"):  # the last has no copy rows
        assert run(books, more) == 2


def test_the_rows_of_the_text_follow_the_schedule():
    config = quickstart()
    ends = np.cumsum(config.length_schedule[1::2]) * config.batch_tokens
    assert python_source.ROW_LENGTHS == [*zip(config.length_schedule[::2], ends), (config.train_length, None)]
