"""The whole way, with real runs of a few steps: a sweep that is killed and resumed, the needle task, every item of
reproduce that they can feed, the report, and an evaluation at four lengths."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from lives import holding

from data.text import prepare
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from scripts.reproduce.pages import ITEMS

ROOT = Path(__file__).parents[1]
METHODS = ["p_rope", "scale_invariant_p_rope"]
COMPLETE = ["table_losses", "table_needle", "figure_train_lengths", "figure_train_4k", "figure_train_16k"]
COMPLETE += ["figure_entropy", "figure_sublog", "figure_sublog_unscaled"]  # of what 2 methods and 3 lengths can feed
LACKING = ["figure_tau", "figure_304m"]
FIELDS = "--vocab_size 384 --num_layers 1 --num_heads 1 --model_dim 32 --steps 30 --cooldown_steps 8 --save_every 5"
FIELDS += " --val_every 10 --val_lengths 256 1024 4096 --val_tokens 8192 --compile off --device cpu"

pytestmark = pytest.mark.slow


def start(*words, **variables):
    """A command in the repository root, one thread, in a process group of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE") | variables
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(*words, code=0):
    process = start(*words)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == code, said[-4000:]
    return said


def kill(process):
    """The sweep and every run that it started, at once and without a word, as a machine that goes down does it."""
    os.kill(process.pid, signal.SIGSTOP)  # so that it starts no more
    children = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout.split("\n")
    parents = {int(pid): int(parent) for pid, parent in (row.split() for row in children if row)}
    doomed = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
        doomed |= more
    for pid in doomed:
        with suppress(ProcessLookupError):  # ended meanwhile
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with data/, and runs/ of the sweeps, the needle task and the evaluation; what each command said."""
    folder, words = tmp_path_factory.mktemp("chain"), random.Random(0)
    vocabulary = ["".join(words.choices("abcdefgh", k=5)) for _ in range(300)]
    for i in range(400):
        (folder / f"{i}.txt").write_text(" ".join(words.choices(vocabulary, k=words.randint(50, 400))))
    prepare([folder], folder / "data", "bpe:384", val_fraction=0.2, name="words")

    common = ["--scale", "mini", "--runs-dir", folder / "runs", "--methods", *METHODS, "--seeds", 0]
    fields = ["--data_dir", folder / "data", *FIELDS.split()]
    said = {}
    sweep = start("-m", "scripts.sweep", "table_losses", *common, *fields, **holding(folder, "tau10.0"))
    deadline = time.monotonic() + 600
    while len(list(folder.glob("runs/*/summary.json"))) < 1 or not interrupted(folder):
        assert sweep.poll() is None and time.monotonic() < deadline, sweep.communicate()[0]
        time.sleep(0.02)
    kill(sweep)
    said["dry run"] = run("-m", "scripts.sweep", "table_losses", *common, *fields, "--dry-run")
    said["resumed"] = run("-m", "scripts.sweep", "table_losses", *common, *fields)
    said["lengths"] = run("-m", "scripts.sweep", "figure_train_lengths", *common, *fields)
    runs = sorted(folder.glob("runs/mini-*-s*/"))
    assert len(runs) == 3  # scale-invariant attention with both tau
    tuning = ["--needle", "steps=3", "sequences=4", "examples=3", "curriculum=0"]
    said["needle"] = run("-m", "scripts.sweep", "table_needle", *common, *tuning, *fields)
    said["evaluate"] = run("-m", "scripts.evaluate", *runs, "--lengths", 128, 512, 2048, 8192, "--device", "cpu")
    said["report"] = run("-m", "scripts.report", "--runs-dir", folder / "runs", "--out", folder / "report.html")
    out = [*common, *tuning, "--out", folder / "out", "--draws", 20, *fields]
    said["all"] = run("-m", "scripts.reproduce", "all", *out, code=1)  # table_llama is not there
    return folder, said


def interrupted(folder):
    """Whether a run has saved its first checkpoint and is not near its end."""
    latest = {path.parents[1]: path.stem for path in sorted(folder.glob("runs/*/checkpoints/step_*.pt"))}
    return any(step < "step_000020" for step in latest.values())


def test_the_killed_sweep_was_resumed_and_every_run_is_finished(made):
    folder, said = made
    assert re.search(r"mini-\S+ +interrupted", said["dry run"]) and re.search(r"mini-\S+ +finished", said["dry run"])
    assert "3 of 3 runs are finished" in said["resumed"] and "6 of 6 runs are finished" in said["lengths"]
    for path in folder.glob("runs/*/"):
        steps = [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]
        losses = [line for line in (path / "metrics.jsonl").read_text().splitlines() if "train_loss" in line]
        assert steps[-1] == 30 and len(losses) == 30, path
        assert load_checkpoint(latest_checkpoint(path / "checkpoints"))["step"] == 30


@pytest.mark.parametrize("item", COMPLETE)
def test_the_item_lacks_nothing(made, item):
    folder, said = made
    page = (folder / "out" / f"{item}.md").read_text()
    assert re.search(rf"{item}\W+complete", said["all"]), said["all"][-3000:]
    if item.startswith("figure"):
        assert (folder / "out" / f"{item}.png").stat().st_size > 10_000
        assert (folder / "out" / f"{item}.pdf").stat().st_size > 1_000
    assert (folder / "out" / f"{item}.csv").read_text().count("\n") > 3 and page


def test_the_tables_hold_the_losses_and_accuracies_of_the_runs(made):
    folder, _ = made
    (name,) = [path.name for path in folder.glob("runs/mini-p_rope-*")]
    loss = json.loads((folder / "runs" / name / "summary.json").read_text())["val_loss"]["256"]
    row = next(line for line in (folder / "out" / "table_losses.md").read_text().splitlines() if "p-RoPE" in line)
    assert f"{loss:.3f}" in row
    page = (folder / "out" / "table_needle.md").read_text()
    assert made[1]["needle"].count("needles found 0.0") == 3 and "0.000" in page and "runs used: 3 of 3" in page
    assert "haystack shards, 3 steps of 4 sequences, 3 examples scored at each length" in page


@pytest.mark.parametrize("item", LACKING)
def test_an_item_that_lacks_runs_names_them_with_the_command(made, item):
    folder, said = made
    (line,) = [line for line in said["all"].splitlines() if line.startswith(f"{item}: incomplete")]
    assert f"missing: `python -m scripts.sweep {item} " in line
    page = folder / "out" / f"{item}.md"
    assert page.exists() != (", 0 of " in line)
    if page.exists():
        page = page.read_text()
        assert "missing" in page and "train_gpt.py" in page and f"scripts.sweep {item}" in page
    else:
        assert line.endswith(f"not written: no run of {item} is there")


def test_the_llama_table_is_said_not_to_be_built(made):
    assert "needs models" in made[1]["all"] and set(ITEMS) > set(COMPLETE)


def test_the_evaluation_is_by_length_and_by_position(made):
    folder, said = made
    assert "8192 (32x)" in said["evaluate"] and "4096-8191" in said["evaluate"]
    for path in folder.glob("runs/mini-*-s*/evaluation.json"):
        assert list(json.loads(path.read_text())["val_loss"]) == ["128", "512", "2048", "8192"]


def test_the_report_holds_every_run(made):
    page = (made[0] / "report.html").read_text()
    assert all(path.name in page for path in made[0].glob("runs/*/"))
