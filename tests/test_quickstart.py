"""The quickstart's own code, on a few steps: it trains every method, ends with table and figure, repeats nothing."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.command_line import read_config
from configs.presets import quickstart
from data.shard_writer import ShardWriter
from data.shards import open_split
from data.tokenizer import load_tokenizer
from scripts import quickstart as script
from scripts.shared.runs import data_fingerprint
from scripts.shared.tables import loss_table

ROOT = Path(__file__).parents[1]


def test_loss_table_gives_lengths_in_multiples_of_the_training_length_and_the_rise():
    results = [
        dict(name="a", train_length=16, val_loss={"16": 1.25, "64": 1.5}),
        dict(name="other", train_length=16, val_loss={"16": 2.0, "64": 1.0}),
    ]
    head, rule, first, second = loss_table(results).splitlines()
    assert head.split("|")[1:-1] == [" run   ", " 16 (1x) ", " 64 (4x) ", " 64 - 16 "]
    assert first.split() == "| a | 1.250 | 1.500 | +0.250 |".split()
    assert second.split() == "| other | 2.000 | 1.000 | -1.000 |".split()
    assert len({len(line) for line in (head, rule, first, second)}) == 1


@pytest.mark.parametrize("name, says", [("quickstart", "--text FOLDER"), ("test", "quick"), ("torture", "promises")])
@pytest.mark.parametrize("words", [["--help"], ["quick", "-h"]])
def test_help_installs_nothing(tmp_path, name, says, words):
    """In a folder without .venv, with no Python that could make one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    environment = os.environ | dict(PYTHON="/no/python")
    command = ["bash", f"scripts/{name}.sh", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and says in done.stdout and "setup.sh" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requirements.txt", "scripts"]


def test_text_and_tokenizer_come_from_this_machine(tmp_path, monkeypatch):
    """On some files in place of the whole library: test folders, installed packages and other files are left out."""
    modules = [f"module_{i}.py" for i in range(60)] + [f"package/sub/module_{i}.py" for i in range(60, 63)]
    for name in (*modules, "test/wrong.py", "package/tests/wrong.py", "site-packages/wrong.py", "wrong.txt"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path.stem}\n" + "def f(x):\n    return x + 1\n" * 20)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    script.make_data(tmp_path / "data", "python")
    decode = load_tokenizer(tmp_path / "data").decode
    vocab_size = quickstart().vocab_size
    streams = [open_split(tmp_path / "data", split, vocab_size) for split in ("train", "val")]
    text = "".join(decode(stream.read(0, len(stream)).tolist()) for stream in streams)
    assert text.count("# module_") == 63 and "wrong" not in text
    assert text.count("<|endoftext|>") == 61  # the package is one document

    before = (tmp_path / "data" / "manifest.json").stat().st_mtime_ns
    script.make_data(tmp_path / "data", "python")
    assert (tmp_path / "data" / "manifest.json").stat().st_mtime_ns == before

    next((tmp_path / "data").glob("*_val_*.bin")).unlink()
    with pytest.raises(ValueError, match="missing.*: delete the folder and run this again"):
        script.make_data(tmp_path / "data", "python")


@pytest.mark.slow
def test_a_short_quickstart_on_own_text_trains_every_method_and_repeats_nothing(tmp_path):
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnop"), size=5)) for _ in range(800)]
    (tmp_path / "My Books").mkdir()
    for i in range(260):
        (tmp_path / "My Books" / f"{i}.txt").write_text(" ".join(random.choice(words, size=300)))
    command = [sys.executable, "-m", "scripts.quickstart", "--text", tmp_path / "My Books"]
    command += ["--runs-dir", tmp_path / "runs", "--data-dir", tmp_path / "data", "--vocab_size", "4096"]
    command += "--steps 2 --cooldown_steps 1 --val_tokens 4096 --compile off --device cpu".split()
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr[-2000:]
    table = (tmp_path / "runs" / "quickstart-my-books.md").read_text()
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == list(script.SHOWN)
    assert set(script.SHOWN) == set(script.RUNS)
    assert table in first.stdout + "\n"
    assert (tmp_path / "runs" / "quickstart-my-books.png").stat().st_size > 10_000
    folders = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert len(folders) == len(script.RUNS)
    methods = [json.loads((folder / "config.json").read_text())["method"] for folder in folders]
    assert sorted(methods) == sorted(arguments[1] for arguments in script.RUNS.values())

    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and table in again.stdout + "\n"
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before
    other = subprocess.run([*command, "--muon_lr", "5"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    rope = tmp_path / "runs" / "quickstart-my-books-rope"
    assert other.returncode == 2 and other.stdout == ""
    differ = f"{rope} is a finished run of another configuration (muon_lr 0.02 there, 5.0 here)"
    assert other.stderr == f"error: {differ}: delete it, or name another --runs-dir\n"
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before
    options = [json.loads((folder / "config.json").read_text())["method_options"] for folder in folders]
    assert sorted(options, key=str) == [{"slope_scale": 1}, {"tau": 10}, {}, {}, {}, {}]


@pytest.fixture
def finished(tmp_path):
    """A finished run as the quickstart leaves it, and the words that it was asked for with."""
    with ShardWriter(tmp_path / "data", "packages", tokenizer="none", vocab_size=quickstart().vocab_size) as writer:
        writer.write("train", np.arange(5000) % 2048)
        writer.write("val", [1, 2, 3])
        writer.close()
    words = ["--method", "rope", "--data_dir", str(tmp_path / "data"), "--steps", "10", "--val_tokens", "4096"]
    config, folder = read_config(["quickstart", *words]), tmp_path / "runs" / "rope"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    summary = dict(steps=10, val_loss={"256": 4.0}, val_tokens=4096, data=data_fingerprint(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder, words


@pytest.mark.parametrize("same", [[], ["--device", "cpu"], ["--wandb", "offline"], ["--keep", "1"]])
def test_the_same_run_is_not_trained_again(finished, same):
    folder, words = finished
    script.train_all({folder: [*words, *same]})


@pytest.mark.parametrize(
    "words, says",
    [
        (["--steps", "20"], "(steps 10 there, 20 here, cooldown_steps "),
        (["--method_options", "base", "64"], "(method_options {} there, {'base': 64} here)"),
        (["--dtype", "float32"], "(dtype auto there, float32 here)"),
        (["--val_tokens", "8192"], "(val_tokens 4096 there, 8192 here)"),
    ],
)
def test_a_finished_run_of_other_fields_is_not_shown_as_the_result(finished, words, says):
    folder, asked = finished
    with pytest.raises(ValueError, match="a finished run of another configuration .*: delete it") as error:
        script.train_all({folder: [*asked, *words]})
    assert says in str(error.value)


def test_a_finished_run_on_other_text_is_not_shown_as_the_result(finished):
    folder, words = finished
    summary = folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | dict(data="0123")))
    with pytest.raises(ValueError, match="was trained on other text than .*data holds now: delete it, or name another"):
        script.train_all({folder: words})


@pytest.mark.parametrize("text, says", [("nowhere", "no such folder; it is python, pg19 or a folder of .txt files")])
def test_a_text_that_is_not_there_is_one_line(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        script.make_data(tmp_path / "data", text)


def test_shards_of_other_text_are_not_taken_for_it(tmp_path):
    writer = ShardWriter(tmp_path, "python", tokenizer="none", vocab_size=16)
    writer.write("train", [1, 2, 3])
    writer.close()
    with pytest.raises(ValueError, match="holds other text than --text python makes: delete it, or name another"):
        script.make_data(tmp_path, "python")


def test_what_shows_at_mini_is_what_its_table_says():
    with open(ROOT / "results" / "mini" / "table_losses.csv", newline="") as file:
        found = {(row["method"], row["length"]): float(row["mean"]) for row in csv.DictReader(file) if row["mean"]}
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in script.mini_table().splitlines()]
    assert head[:3] == ["run", "seeds", "256"] and {row[0] for row in rows} >= {"RoPE", "scale-invariant p-RoPE"}
    for label, _, *losses in rows:
        name = script.SHOWN[label]
        assert losses == [f"{found[name, length]:.3f}" for length in head[2:]]
