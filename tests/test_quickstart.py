"""The quickstart's own code on a few steps: it trains every method, ends with table and figure, repeats nothing."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from configs.presets import quickstart
from data import python_source
from data.shards import open_split, read_manifest
from data.text import load_tokenizer
from scripts import quickstart as script
from scripts.shared.tables import loss_table

ROOT = Path(__file__).parents[1]
TINY = "--steps 10 --cooldown_steps 1 --length_schedule 32 2 64 2 --val_tokens 4096 --val_copy_gaps 32 128"
TINY += " --vocab_size 1024 --num_layers 1 --compile off --device cpu"


def test_loss_table_gives_lengths_in_multiples_of_the_training_length_and_the_rise():
    results = [
        dict(name="a", train_length=16, val_loss={"16": 1.25, "64": 1.5}),
        dict(name="other", train_length=16, val_loss={"16": 2.0, "64": 1.0}),
    ]
    head, rule, first, second = loss_table(results).splitlines()
    assert head.split("|")[1:-1] == [" run   ", " 16 (1x) ", " 64 (4x) ", " 64 - 16 "]
    assert first.split() == "| a | 1.250 | 1.500 | +0.250 |".split()
    assert second.split() == "| other | 2.000 | 1.000 | -1.000 |".split()


@pytest.mark.parametrize("name", ["quickstart", "test", "torture"])
@pytest.mark.parametrize("words", [["--help"], ["quick", "-h"]])
def test_help_installs_nothing(tmp_path, name, words):
    """In a folder without .venv, with no Python that could make one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    environment = os.environ | dict(PYTHON="/no/python")
    command = ["bash", f"scripts/{name}.sh", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and f"scripts/{name}.sh" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requirements.txt", "scripts"]


def library(folder, modules=60):
    """A folder as the standard library's, with things in it that are no text to train on."""
    names = [f"module_{i}.py" for i in range(modules)] + [f"package_{i}/sub.py" for i in range(modules)]
    for name in (*names, "test/wrong.py", "package_1/tests/wrong.py", "site-packages/wrong.py", "wrong.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path.stem}\n" + f"def f(x):\n    return x + {len(name)}\n" * 20)
    return folder


@pytest.mark.parametrize("text, documents", [("taught", 62), ("mini", 120)])
def test_text_and_tokenizer_come_from_this_machine(text, documents, tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library(tmp_path / "lib")))
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "tensor.py").write_text("# torch_tensor\n" + "y = 1\n" * 3000)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: type("", (), dict(submodule_search_locations=[torch])))
    python_source.main([text, "--out", str(tmp_path / "data")])
    decode, size = load_tokenizer(tmp_path / "data").decode, 2048 if text == "mini" else 1024
    read = {}
    for split in ("train", "val"):
        stream = open_split(tmp_path / "data", split, size)
        read[split] = decode(stream.read(0, len(stream)).tolist())
    assert "wrong" not in "".join(read.values())
    if text == "mini":
        assert "copy_rows" not in read_manifest(tmp_path / "data")
        assert "".join(read.values()).count("<|endoftext|>") == documents and "torch_tensor" not in read["train"]
    else:
        lengths = read_manifest(tmp_path / "data")["copy_rows"]["row_lengths"]
        assert lengths == [[32, 200 * 2048], [64, 600 * 2048], [256, None]]
    with pytest.raises(SystemExit) as end:
        python_source.main([text, "--out", str(tmp_path / "data")])
    assert end.value.code == 2


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder, random = tmp_path_factory.mktemp("quickstart") / "My Books", np.random.default_rng(0)
    folder.mkdir()
    words = ["".join(random.choice(list("abcdefghijklmnop"), size=5)) for _ in range(800)]
    for i in range(200):
        (folder / f"{i}.txt").write_text(" ".join(random.choice(words, size=300)))
    return folder


def run(books, capsys, *more):
    """Exit code, stdout and stderr of the quickstart on these books."""
    folder, code = books.parent, 0
    words = ["--text", books, "--runs-dir", folder / "runs", "--data_dir", folder / "data", *TINY.split(), *more]
    try:
        script.main([*map(str, words)])
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_short_quickstart_on_own_text_trains_every_method_and_repeats_nothing(books, capsys):
    code, output, _ = run(books, capsys)
    assert code == 0
    runs = books.parent / "runs"
    rows = [line for line in (runs / "quickstart.md").read_text().splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == list(script.METHODS) and "\n".join(rows) in output
    assert (runs / "quickstart.png").stat().st_size > 10_000
    folders = sorted(path for path in runs.iterdir() if path.is_dir())
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert sorted(c["method"] for c in configs) == sorted(method for method, _ in script.METHODS.values())
    assert [c["method_options"] for c in configs if c["method_options"]] == [{"slope_scale": 16}]
    summary = json.loads((folders[0] / "summary.json").read_text())
    row = next(row for row in rows if row.split("|")[1].strip() == "ALiBi (slopes x 16)")
    assert f"{summary['val_loss']['256']:.3f}" in row and f"{summary['copy_gain']['random']['128']:.1f}" in row

    before = [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders]
    assert run(books, capsys)[0] == 0
    path = folders[1] / "summary.json"  # of a run on another text
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(data="0123")))
    code, _, error = run(books, capsys)
    assert code == 2 and "data" in error
    assert [(folder / "metrics.jsonl").stat().st_mtime_ns for folder in folders] == before


def test_wrong_input_is_one_line(books, capsys, tmp_path):
    assert run(books, capsys, "--muon_rl", "5")[0] == 2
    assert run(tmp_path / "nowhere", capsys)[0] == 2
    python_source.prepare([books], tmp_path / "plain", "bpe:384", val_fraction=0.2, name="text")
    assert run(books, capsys, "--data_dir", tmp_path / "plain")[0] == 2  # without copy rows


def test_the_rows_of_the_text_are_those_of_the_schedule():
    config, end = quickstart(), 0
    expected = []
    for length, steps in zip(config.length_schedule[::2], config.length_schedule[1::2]):
        end += steps * config.batch_tokens
        expected.append((length, end))
    assert python_source.ROW_LENGTHS == [*expected, (config.train_length, None)]
