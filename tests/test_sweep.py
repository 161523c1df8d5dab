"""The sweep runner on real runs of a tiny model: each state a run can be in, stopping and resuming, failures, submitit,
and the wandb sweep."""

import collections
import dataclasses
import gzip
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lives import holding
from test_needle_data import hub  # noqa: F401

from configs.command_line import read_config
from configs.config import config_hash
from configs.presets import preset
from configs.sweeps import BEYOND_PAPER, MAIN_METHODS, SCALES, SWEEPS, Run, grid, sweep
from data.text import prepare
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.run_folder import RunFolder
from scripts.reproduce.tables import paper_targets
from scripts.shared.arguments import field_changes
from scripts.shared.runs import read_runs, sidecar, stored_config, train_state
from scripts.sweep.__main__ import main
from scripts.sweep.local import last_step, record_outcome, share_devices

SLOW_FIXTURES = ("finished", "disturbed", "failing", "tuned", "tuned_disturbed", "tuning_fails")

ROOT = Path(__file__).parents[1]
SMALL = dict(
    vocab_size=512, num_layers=1, num_heads=2, model_dim=32,
    train_length=32, batch_tokens=128, micro_batch_tokens=128, steps=100, cooldown_steps=20,
    val_lengths=(32, 64), val_tokens=256, val_every=0, save_every=5,
    compile="off", device="cpu", dtype="float32",
)  # fmt: skip


# ---- data and ways to sweep ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), size=rng.integers(2, 7))) for _ in range(300)]
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(words, size=300)))
    prepare([folder], folder / "shards", "bpe:512", val_fraction=0.2)
    return folder / "shards"


def options(data, runs, methods="rope", seeds="0", **fields):
    words = ["table_losses", "--scale", "small", "--runs-dir", runs, "--methods", *methods.split()]
    words += ["--seeds", *seeds.split(), "--jobs", 1]
    for field, value in (SMALL | dict(data_dir=data) | fields).items():
        words += [f"--{field}", *(value if isinstance(value, tuple) else [value])]
    return [str(word) for word in words]


def here(*words):
    """Calls the command in this process; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sweep", *map(str, words)])
        patch.setenv("OMP_NUM_THREADS", "1")
        try:
            main()
        except SystemExit as exit:
            return exit.code


def command(*words, cwd=ROOT, **variables):
    """Starts the command in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # the log must not need it
    environment |= dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE") | variables
    words = [sys.executable, "-m", "scripts.sweep", *map(str, words)]
    return subprocess.Popen(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(method="rope", seed=0, **fields):
    return sweep("table_losses", "small", [seed], [method], SMALL | fields)[0]


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def trainer(folder):
    """The process id of the run that holds the folder's lock and has saved a checkpoint."""

    def saved():
        return (folder / "checkpoints").is_dir() and latest_checkpoint(folder / "checkpoints")

    wait_for(saved)
    return int((folder / "lock").read_text().split()[1])


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent(pid):
    return int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def weights(folder):
    return load_checkpoint(latest_checkpoint(folder / "checkpoints"))["model"]


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """Run folders of two methods and two seeds, and what the sweep printed. Not to be written to."""
    runs = tmp_path_factory.mktemp("finished") / "runs"
    process = command(*options(data, runs, "rope alibi", "0 1"), "--jobs", 2)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return runs, out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "runs")


def test_every_method_and_seed_is_trained_and_nothing_else_is_left(finished):
    runs, _ = finished
    expected = {run(method, seed).name for method in ("rope", "alibi") for seed in (0, 1)}
    assert {path.name for path in runs.iterdir()} == expected
    for name in expected:
        config = json.loads((runs / name / "config.json").read_text())
        assert f"-{config['method']}-" in name and name.endswith(f"-s{config['seed']}")
        assert config["group"] == "table_losses" and config["steps"] == 100


def test_a_line_with_the_losses_of_every_run(finished):
    runs, out = finished
    for folder in runs.iterdir():
        loss = json.loads((folder / "summary.json").read_text())["val_loss"]
        assert f"{folder.name}: validation loss {loss['32']:.3f} at 32, {loss['64']:.3f} at 64\n" in out
    assert "4 of 4 runs are finished" in out


def test_finished_runs_are_left_alone(finished, data):
    before = contents(finished[0])
    assert here(*options(data, finished[0], "rope alibi", "0 1")) == 0
    assert contents(finished[0]) == before


def test_finished_run_under_another_name_counts(copied, data):
    (copied / run().name).rename(copied / "mine")
    before = contents(copied)
    assert here(*options(data, copied)) == 0
    assert contents(copied) == before


def test_run_of_before_a_field_existed_counts(copied, data):
    path = copied / run().name / "config.json"
    config = json.loads(path.read_text())
    del config["adam_eps"]
    path.write_text(json.dumps(config))
    before = contents(copied)
    assert here(*options(data, copied)) == 0
    assert contents(copied) == before


@pytest.mark.parametrize("method, options, expected", [
    ("rope", {}, {}),
    ("scale_invariant_p_rope", {}, {"tau": 0.625}),
    ("scale_invariant_p_rope", {"tau": 3.0}, {"tau": 3.0}),
    ("pope+scale_invariant", {"tau": 10.0}, {}),
])
def test_a_run_made_while_length_scale_scaled_tau_keeps_its_tau(tmp_path, method, options, expected):
    config = dataclasses.replace(preset("quickstart"), method=method, method_options=options).to_dict()
    config["length_scale"] = config.pop("position_scale")
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = stored_config(tmp_path)
    assert (stored.method_options, stored.position_scale) == (expected, 1 / 16)


@pytest.fixture(scope="module")
def disturbed(data, tmp_path_factory):
    """A run killed once, then the sweep told to stop, then started again: the folder, and what was seen."""
    runs, seen = tmp_path_factory.mktemp("disturbed") / "runs", {}
    folder = runs / run().name
    process = command(*options(data, runs), **holding(tmp_path_factory.mktemp("site")))
    os.kill(trainer(folder), signal.SIGKILL)
    # Until there are words in it, the sweep has only opened it; then it starts the run again.
    seen["failures"] = wait_for(lambda: "".join(path.read_text() for path in runs.glob("*.failures.txt")))
    wait_for(lambda: latest_checkpoint(folder / "checkpoints").name == "step_000010.pt")
    second = trainer(folder)
    process.send_signal(signal.SIGTERM)
    seen["error"], seen["code"] = process.communicate(timeout=600)[1], process.returncode
    seen["alive"] = is_alive(second)
    seen["state"] = train_state(run(), read_runs(runs), runs)[0]
    seen["again"] = here(*options(data, runs))
    return folder, seen


def log(folder):
    return (folder / "log.txt").read_text() if (folder / "log.txt").exists() else ""


def test_killed_run_is_a_failure_with_time_code_and_last_line(disturbed):
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d exit code -9: step \d+/100 .*\n", disturbed[1]["failures"])


def test_stopped_sweep_stops_its_runs_and_says_how_to_go_on(disturbed):
    _, seen = disturbed
    assert seen["code"] == 130 and not seen["alive"] and seen["state"] in ("interrupted", "failed")
    assert "the same command resumes" in seen["error"] and "Traceback" not in seen["error"]


def test_disturbed_run_ends_with_the_weights_of_an_undisturbed_one(disturbed, finished):
    folder, seen = disturbed
    assert seen["again"] == 0
    assert log(folder).count("; resumed at step ") >= 2
    assert_same_weights(folder, finished[0] / folder.name)


def test_success_removes_the_failures_and_the_log(disturbed):
    assert [path.name for path in disturbed[0].parent.iterdir()] == [disturbed[0].name]


# ---- failures --------------------------------------------------------------------------------------------------------


BROKEN = """  # Python runs this when it starts
import os, sys
if "{name}" in sys.orig_argv and any(word.endswith("train_gpt.py") for word in sys.orig_argv):
    print("RuntimeError: broken", file=sys.stderr, flush=True)
    os._exit(1)
"""


@pytest.fixture(scope="module")
def failing(data, tmp_path_factory):
    """Of three runs one always breaks down, and one is refused, as its checkpoint is damaged: the run folders, the exit
    status and stderr."""
    runs = tmp_path_factory.mktemp("failing") / "runs"
    place = tmp_path_factory.mktemp("site")
    (place / "sitecustomize.py").write_text(BROKEN.format(name=run("rope").name))
    checkpoints = runs / run("alibi").name / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step_000005.pt").write_text("junk")
    process = command(*options(data, runs, "rope p_rope alibi"), "--retries", 1, PYTHONPATH=str(place))
    error = process.communicate(timeout=600)[1]
    return runs, process.returncode, error


def failures(runs, method):
    return (runs / f"{run(method).name}.failures.txt").read_text().splitlines()


def test_failing_run_is_tried_again_a_bounded_number_of_times(failing):
    lines = failures(failing[0], "rope")
    assert len(lines) == 2
    assert all("exit code 1: RuntimeError: broken" in line for line in lines)


def test_error_of_the_user_is_not_tried_again(failing):
    (line,) = failures(failing[0], "alibi")
    assert "exit code 2: error: " in line and "step_000005.pt is damaged" in line


def test_the_other_runs_finish(failing):
    runs, code, _ = failing
    assert code == 1
    assert (runs / run("p_rope").name / "summary.json").exists()


def test_every_unfinished_run_is_named_with_its_log(failing):
    runs, _, error = failing
    for method, times in dict(rope="2 times", alibi="1 time").items():
        folder, last = runs / run(method).name, failures(runs, method)[-1]
        assert f"{folder.name}: failed, {folder} failed {times}: {last}; see {folder}.log" in error.splitlines()
        assert last.partition(": ")[2] in (runs / f"{folder.name}.log").read_text()


def test_given_up_until_its_failures_are_deleted(failing, data, tmp_path, capsys):
    runs = shutil.copytree(failing[0], tmp_path / "runs")
    before = contents(runs)
    assert here(*options(data, runs), "--retries", 1) == 1
    assert contents(runs) == before
    here(*options(data, runs), "--retries", 1, "--dry-run")
    assert f"given up: delete {runs}/{run().name}.failures.txt to try again" in capsys.readouterr().out
    here(*options(data, runs), "--retries", 2, "--dry-run")
    assert "failed       try again" in capsys.readouterr().out


def test_error_of_the_user_is_tried_again_by_the_next_sweep(failing, data, tmp_path, capsys):
    runs = shutil.copytree(failing[0], tmp_path / "runs")
    here(*options(data, runs, "alibi"), "--retries", 0, "--dry-run")
    assert "failed       try again" in capsys.readouterr().out


def test_interrupted_run_is_no_failure(tmp_path):
    assert record_outcome(tmp_path / "run", 75, "step 3\n") == "interrupted"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code, outcome", [(0, "interrupted"), (1, "interrupted"), (2, "refused")])
def test_the_mark_of_an_interrupted_run_counts_under_torchrun(tmp_path, code, outcome):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "interrupted").write_text("SIGTERM\n")
    assert record_outcome(tmp_path / "run", code, "") == outcome


@pytest.mark.parametrize("code, outcome", [(1, "failed"), (2, "refused"), (-9, "failed")])
def test_exit_code_of_a_process_of_torchrun_counts(tmp_path, code, outcome):
    output = f"[rank0]: ValueError: boom\nRoot Cause:\n  exitcode  : {code} (pid: 7)\n  traceback : none\n=====\n"
    assert record_outcome(tmp_path / "run", 1, output) == outcome
    assert (tmp_path / "run.failures.txt").read_text().endswith(f" exit code {code}: [rank0]: ValueError: boom\n")


# ---- the second stage: the needle task -------------------------------------------------------------------------------


LONG = dict(train_length=240, batch_tokens=480, micro_batch_tokens=960, val_lengths=(240,), val_tokens=480, steps=12)
LONG |= dict(cooldown_steps=4)
TUNING_STEPS = 150


def needle_options(data, runs, methods="rope", sweep="table_needle", **settings):
    words = options(data, runs, methods, **LONG)
    settings = dict(haystack="shards", steps=TUNING_STEPS, sequences=4, examples=2, curriculum=0) | settings
    return [sweep, *words[1:], "--needle", *(f"{key}={value}" for key, value in settings.items())]


def long_run(method="rope"):
    return run(method, **LONG)


def tuned_steps(folder):
    return last_step(folder / "needle")


def tuner(folder, steps, but=None):
    """The process id of the fine-tuning that holds the folder's lock (not `but`), when it has done so many steps."""

    def holder():
        words = (folder / "needle" / "lock").read_text().split() if tuned_steps(folder) >= steps else []
        return int(words[1]) if words and words[1] != str(but) else None

    return wait_for(holder)


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
    """Run folders of two methods, trained and fine-tuned by one command, and what it printed. Not to be written to."""
    runs = tmp_path_factory.mktemp("tuned") / "runs"
    process = command(*needle_options(data, runs, "rope alibi"), "--jobs", 2)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return runs, out


@pytest.fixture
def copied_tuned(tuned, tmp_path):
    return shutil.copytree(tuned[0], tmp_path / "runs")


def assert_same_tuning(a, b):
    assert_same_weights(a / "needle", b / "needle")
    ours, theirs = (json.loads((folder / "needle" / "summary.json").read_text()) for folder in (a, b))
    assert ours == theirs


def test_one_command_trains_and_fine_tunes_with_the_settings(tuned):
    runs, out = tuned
    assert {path.name for path in runs.iterdir()} == {long_run(method).name for method in ("rope", "alibi")}
    for folder in runs.iterdir():
        summary = json.loads((folder / "needle" / "summary.json").read_text())
        settings = dict(haystack="shards", steps=TUNING_STEPS, sequences=4, examples=2, pretrained="step_000012")
        assert summary | settings == summary and list(summary["greedy"]) == ["240", "960", "3840"]
        shares = ", ".join(f"{share:.3f} at {length}" for length, share in summary["greedy"].items())
        assert f"{folder.name}: validation loss " in out and f"{folder.name}: needles found {shares}\n" in out
    assert "2 of 2 runs are finished" in out


def test_fine_tuned_runs_are_left_alone(tuned, data):
    before = contents(tuned[0])
    assert here(*needle_options(data, tuned[0], "rope alibi")) == 0
    assert contents(tuned[0]) == before


@pytest.mark.parametrize("sweep", ["table_needle", "all"])
def test_run_that_another_sweep_finished_is_only_fine_tuned(copied_tuned, tuned, data, capsys, sweep):
    folder = copied_tuned / long_run().name
    shutil.rmtree(folder / "needle")
    before = contents(copied_tuned)
    table, _ = dry_run(capsys, needle_options(data, copied_tuned, "rope alibi"))
    assert table == dict(rope=("pretrained", "fine-tune  (not fine-tuned yet)"), alibi=("finished", "nothing"))
    table, _ = dry_run(capsys, options(data, copied_tuned, **LONG))
    assert table == dict(rope=("finished", "nothing"))
    assert here(*needle_options(data, copied_tuned, sweep=sweep)) == 0  # with these fields, all has the same one run
    assert "1 of 1 runs are finished" in capsys.readouterr().out
    assert {path: value for path, value in contents(copied_tuned).items() if path in before} == before
    assert_same_tuning(folder, tuned[0] / folder.name)


@pytest.fixture(scope="module")
def tuned_disturbed(data, tmp_path_factory):
    """A run whose fine-tuning is killed once, then the sweep told to stop, then started again: the folder, and what was
    seen."""
    runs, seen = tmp_path_factory.mktemp("tuned_disturbed") / "runs", {}
    folder = runs / long_run().name
    process = command(*needle_options(data, runs))
    first = tuner(folder, 60)
    seen["trained"] = contents(folder / "checkpoints") | {"log": log(folder)}
    os.kill(first, signal.SIGKILL)
    failures = wait_for(lambda: list(runs.glob("*.failures.txt")))
    seen["failures"] = failures[0].read_text()
    second = tuner(folder, 65, but=first)
    process.send_signal(signal.SIGTERM)
    seen["error"], seen["code"] = process.communicate(timeout=120)[1], process.returncode
    seen["alive"], seen["steps"] = is_alive(second), tuned_steps(folder)
    seen["saved"] = latest_checkpoint(folder / "needle" / "checkpoints").stem
    seen["mark"] = (folder / "needle" / "interrupted").read_text()
    seen["again"] = here(*needle_options(data, runs))
    return folder, seen


def test_killed_fine_tuning_is_a_failure_and_the_sweep_goes_on_with_it(tuned_disturbed):
    _, seen = tuned_disturbed
    assert re.fullmatch(r"\S+ exit code -9: fine-tuning .*\n", seen["failures"]) and seen["steps"] >= 65


def test_stopped_sweep_stops_its_fine_tuning_which_saves_its_last_step(tuned_disturbed):
    _, seen = tuned_disturbed
    assert seen["code"] == 130 and not seen["alive"] and "the same command resumes" in seen["error"]
    assert seen["mark"] == "SIGTERM\n" and seen["saved"] == f"step_{seen['steps']:06d}" != f"step_{TUNING_STEPS:06d}"


def test_disturbed_fine_tuning_ends_like_an_undisturbed_one_and_trains_nothing_again(tuned_disturbed, tuned):
    folder, seen = tuned_disturbed
    assert seen["again"] == 0 and contents(folder / "checkpoints") | {"log": log(folder)} == seen["trained"]
    assert_same_tuning(folder, tuned[0] / folder.name)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.fixture(scope="module")
def tuning_fails(data, tuned, tmp_path_factory):
    """Of three runs the fine-tuning of one always breaks down, and that of one is refused, as its checkpoint is
    damaged: the run folders, the exit status and stderr."""
    runs = shutil.copytree(tuned[0], tmp_path_factory.mktemp("tuning_fails") / "runs")
    place = tmp_path_factory.mktemp("site")
    program = BROKEN.format(name=runs / long_run("rope").name).replace("train_gpt.py", "scripts.needle")
    (place / "sitecustomize.py").write_text(program)
    for method in ("rope", "alibi"):
        (runs / long_run(method).name / "needle" / "summary.json").unlink()
    latest_checkpoint(runs / long_run("alibi").name / "needle" / "checkpoints").write_text("junk")
    words = needle_options(data, runs, "rope p_rope alibi")
    process = command(*words, "--retries", 1, PYTHONPATH=str(place))
    error = process.communicate(timeout=600)[1]
    return runs, process.returncode, error


def test_failing_fine_tuning_is_tried_again_a_bounded_number_of_times(tuning_fails):
    runs, code, error = tuning_fails
    lines = (runs / f"{long_run().name}.failures.txt").read_text().splitlines()
    assert code == 1 and len(lines) == 2 and all("exit code 1: RuntimeError: broken" in line for line in lines)
    (refused,) = (runs / f"{long_run('alibi').name}.failures.txt").read_text().splitlines()
    assert "exit code 2: error: " in refused and "is damaged" in refused
    assert (runs / long_run("p_rope").name / "needle" / "summary.json").exists()
    for method in ("rope", "alibi"):
        assert f"{long_run(method).name}: failed, {runs / long_run(method).name} failed " in error


def test_failed_fine_tuning_is_given_up_until_its_failures_are_deleted(tuning_fails, data, capsys):
    words = [*needle_options(data, tuning_fails[0]), "--retries", 1]
    assert "given up: delete " in dry_run(capsys, words)[0]["rope"][1]
    assert dry_run(capsys, [*words[:-1], 2])[0]["rope"][1].startswith("try again")
    table, _ = dry_run(capsys, options(data, tuning_fails[0], **LONG))  # the training has not failed
    assert table == dict(rope=("finished", "nothing"))


def test_dry_run_tells_the_states_of_fine_tuning_apart(copied_tuned, data, capsys):
    rope, alibi = (copied_tuned / long_run(method).name for method in ("rope", "alibi"))
    (alibi / "needle" / "summary.json").unlink()
    lock = RunFolder.create(rope, "needle", resume="auto")
    before = contents(copied_tuned)
    table, _ = dry_run(capsys, needle_options(data, copied_tuned, "rope alibi p_rope"))
    assert table == dict(
        rope=("running", f"left alone: another process trains it  ({rope / 'needle'})"),
        alibi=("interrupted", f"resume  ({alibi / 'needle'}, after step_{TUNING_STEPS:06d})"),
        p_rope=("missing", "train, then fine-tune"),
    )
    lock.close()
    assert here(*needle_options(data, copied_tuned, "alibi", steps=7, haystack="c4"), "--retries", 0) == 1
    assert contents(copied_tuned) == before
    said = capsys.readouterr().err
    assert "needle is of another fine-tuning (haystack shards there, c4 here, steps 150 there, 7 here)" in said


@pytest.mark.parametrize(
    "settings, says",
    [
        (dict(sequences=5), "of another fine-tuning (sequences 4 there, 5 here): delete it to start again"),
        (dict(examples=3), "scored on other examples (2 a length there, 3 here): delete "),
    ],
)
def test_run_fine_tuned_with_other_settings_is_named_and_left_alone(tuned, data, capsys, settings, says):
    before = contents(tuned[0])
    assert here(*needle_options(data, tuned[0], **settings)) == 1
    assert contents(tuned[0]) == before
    assert f"{long_run().name}: other, {tuned[0] / long_run().name / 'needle'} is {says}" in capsys.readouterr().err


def test_scores_that_lack_are_made_and_nothing_is_fine_tuned_again(copied_tuned, tuned, data):
    folder = copied_tuned / long_run().name
    path, before = folder / "needle" / "summary.json", (folder / "needle" / "metrics.jsonl").read_bytes()
    summary = json.loads(path.read_text())
    del summary["greedy"]["3840"]
    path.write_text(json.dumps(summary))
    assert here(*needle_options(data, copied_tuned)) == 0
    assert (folder / "needle" / "metrics.jsonl").read_bytes() == before
    assert_same_tuning(folder, tuned[0] / folder.name)


def test_run_fine_tuned_before_it_was_finished_does_not_count(copied_tuned, data, capsys):
    folder = copied_tuned / long_run().name / "needle"
    for name in ("settings.json", "summary.json"):
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(record | dict(pretrained="step_000005")))
    table, _ = dry_run(capsys, needle_options(data, copied_tuned))
    assert "left alone" in table["rope"][1] and "pretrained step_000005 there, step_000012 here" in table["rope"][1]


@pytest.mark.parametrize("name", ["settings.json", "summary.json"])
def test_damaged_files_of_a_fine_tuning_are_named(copied_tuned, data, capsys, name):
    path = copied_tuned / long_run().name / "needle" / name
    for text in ("{", "[1]"):
        path.write_text(text)
        state, action = dry_run(capsys, needle_options(data, copied_tuned))[0]["rope"]
        assert state == "other" and f"{path} is damaged" in action


def test_first_stage_keeps_the_job_on_the_cluster(tmp_path):
    for suffix in (".log", ".failures.txt", ".job"):
        (tmp_path / f"run{suffix}").write_text("7")
    assert record_outcome(tmp_path / "run", 0, "", is_last=False) == "pretrained"
    assert [path.name for path in tmp_path.iterdir()] == ["run.job"]
    assert record_outcome(tmp_path / "run", 0, "", tmp_path / "run" / "needle") == "finished"
    assert not list(tmp_path.iterdir())


def test_fine_tuning_of_another_process_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    lock = RunFolder.create(tmp_path / "run", "needle")
    assert record_outcome(tmp_path / "run", 2, "error: in use", tmp_path / "run" / "needle") == "running"
    lock.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # no failure


@pytest.mark.slow
def test_c4_is_fetched_once_before_anything_is_trained(hub, data, tmp_path):  # noqa: F811
    environment = dict(
        HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_HOME=str(tmp_path / "hf"), HF_HUB_DISABLE_XET="1",
        HF_HUB_OFFLINE="0", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    words = [*needle_options(data, "runs", "rope alibi", haystack="c4", steps=3, examples=1), "--jobs", 2]
    validation = next(path for path in hub.files if "validation" in path)
    hub.files.pop(validation)
    whole = gzip.compress("".join(json.dumps({"text": "a cab " * 50}) + "\n" for _ in range(100)).encode())
    process = command(*words, cwd=tmp_path, **environment)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 2 and "error: cannot fetch c4-validation" in error.splitlines()[-1]
    assert not list((tmp_path / "runs").iterdir())
    hub.files[validation] = whole
    process = command(*words, cwd=tmp_path, **environment)
    assert process.communicate(timeout=300) and process.returncode == 0
    assert len(hub.fetched) == 2
    for summary in (tmp_path / "runs").glob("*/needle/summary.json"):
        assert json.loads(summary.read_text())["haystack"] == "c4"


# ---- what a dry run says ---------------------------------------------------------------------------------------------


def dry_run(capsys, words):
    """Method: state and action, from the table; and the last line."""
    capsys.readouterr()
    assert here(*words, "--dry-run") is None
    *rows, last = capsys.readouterr().out.splitlines()
    table = {}
    for row in rows:
        name, state, action = re.split(r"  +", row, maxsplit=2)
        table[name.split("-")[1]] = state, action
    return table, last


def test_dry_run_tells_the_states_apart_and_starts_nothing(copied, data, capsys):
    runs = copied
    interrupted, running, other, failed = (runs / run(m).name for m in ("alibi", "p_rope", "logn_p_rope", "nope"))
    (interrupted / "summary.json").unlink()
    for folder in (running, other):
        (folder / "checkpoints").mkdir(parents=True)
    (running / "config.json").write_text(json.dumps(run("p_rope").config.to_dict()))
    (other / "config.json").write_text(json.dumps(run("logn_p_rope", muon_lr=0.1).config.to_dict()))
    sidecar(failed, ".failures.txt").write_text("2026-01-01T00:00:00 exit code 1: boom\n")
    lock = RunFolder.create(runs, running.name, resume="auto")
    before = contents(runs)
    table, last = dry_run(capsys, options(data, runs, "rope alibi p_rope logn_p_rope nope logn_rope"))
    lock.close()
    assert contents(runs) == before
    assert table == dict(
        rope=("finished", "nothing"),
        alibi=("interrupted", f"resume  ({interrupted}, after step_000100)"),
        p_rope=("running", "left alone: another process trains it"),
        logn_p_rope=("other", f"left alone  ({other} is of another config (muon_lr 0.1 there, 0.02 here): rename it)"),
        nope=("failed", f"try again  ({failed} failed 1 time: 2026-01-01T00:00:00 exit code 1: boom)"),
        logn_rope=("missing", "train"),
    )
    assert sorted(last.removeprefix("6 runs: ").split(", ")) == sorted(f"1 {state}" for state, _ in table.values())


def test_run_of_another_process_is_left_alone_and_not_finished(data, tmp_path, capsys):
    folder = RunFolder.create(tmp_path, run().name)
    folder.write_json("config.json", run().config.to_dict())
    before = contents(tmp_path)
    assert here(*options(data, tmp_path)) == 1
    folder.close()
    assert contents(tmp_path) == before
    assert f"{run().name}: running" in capsys.readouterr().err


def test_folder_of_another_config_is_left_alone(data, tmp_path, capsys):
    folder = RunFolder.create(tmp_path, run().name)
    folder.write_json("config.json", run(muon_lr=0.1).config.to_dict())
    folder.close()
    before = contents(tmp_path)
    assert here(*options(data, tmp_path)) == 1
    assert contents(tmp_path) == before
    assert "muon_lr 0.1 there, 0.02 here" in capsys.readouterr().err


def test_finished_run_on_other_data_does_not_count(copied, data, capsys):
    summary = copied / run().name / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | dict(data="0123")))
    table, _ = dry_run(capsys, options(data, copied, "rope alibi"))
    assert table["rope"] == ("other", f"left alone  (trained on other data than {data}: use another --runs-dir)")
    assert table["alibi"][0] == "finished"
    table, _ = dry_run(capsys, options(data.parent / "elsewhere", copied, "rope"))  # without the data: it counts
    assert table["rope"][0] == "finished"


def test_run_with_a_damaged_summary_is_named_and_left_alone(copied, data, capsys):
    summary = copied / run().name / "summary.json"
    summary.write_text(summary.read_text().replace('"steps": 100', '"steps": "100"'))
    before = contents(copied)
    assert here(*options(data, copied)) == 1
    assert contents(copied) == before
    says = f"{summary} is damaged (steps is '100', not a whole number): delete it and run the sweep again"
    assert f"{run().name}: other, {says}" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_run_under_another_name_is_resumed_there(data, finished, copied):
    mine = (copied / run().name).rename(copied / "mine")
    (mine / "summary.json").unlink()
    latest_checkpoint(mine / "checkpoints").unlink()
    assert here(*options(data, copied)) == 0
    assert not (copied / run().name).exists()
    assert_same_weights(mine, finished[0] / run().name)


# ---- which runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_arguments_of_every_run_give_its_config_back(scale):
    for run in sweep("all", scale, seeds=[1], changes=dict(adam_eps=1e-9, val_lengths=(64, 256))):
        assert read_config(run.arguments) == run.config


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_all_is_every_run_once(scale):
    runs = sweep("all", scale)
    hashes = [config_hash(run.config) for run in runs]
    assert len(set(hashes)) == len(hashes) == len({run.name for run in runs})
    papers = {*SWEEPS} - {*BEYOND_PAPER}
    assert set(hashes) == {config_hash(run.config) for name in papers for run in sweep(name, scale)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "scale, runs, haystack, steps", [("paper", 21, "c4", 300), ("small", 21, "c4", 300), ("mini", 27, "shards", 6000)]
)
def test_all_fine_tunes_the_runs_of_the_needle_table_with_the_settings_of_the_scale(scale, runs, haystack, steps):
    table, everything = sweep("table_needle", scale), sweep("all", scale)
    assert [run for run in everything if run.needle] == table and len(table) == runs < len(everything)
    assert {(run.needle.haystack, run.needle.steps) for run in table} == {(haystack, steps)}
    assert not any(run.needle for run in sweep("table_losses", scale))
    (needle,) = {run.needle for run in sweep("all", scale, needle=dict(examples=7)) if run.needle}
    assert (needle.haystack, needle.steps, needle.examples) == (haystack, steps, 7)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SWEEPS)
def test_seeds_that_are_given_are_used_everywhere(name, scale):
    seeds = collections.defaultdict(set)
    for run in sweep(name, scale, seeds=[4, 9]):
        seeds[run.preset, str({k: v for k, v in run.changes.items() if k != "seed"})].add(run.config.seed)
    assert seeds and all(given == {4, 9} for given in seeds.values())


@pytest.mark.parametrize("scale", SCALES)
def test_three_seeds_where_the_paper_has_three(scale):
    """Appendix "Seeds": every method trained at 4k on the 162M model; the rest was run once."""
    for name, three in dict(table_losses=True, table_infini=True, figure_train_4k=True, figure_304m=False,
                            figure_scale_invariant_variants=True, figure_train_16k=False, figure_tau=False).items():
        assert {run.config.seed for run in sweep(name, scale)} == ({0, 1, 2} if three else {0})
    seeds = {run.preset: set() for run in sweep("figure_train_lengths", scale)}
    for run in sweep("figure_train_lengths", scale):
        seeds[run.preset].add(run.config.seed)
    assert [*seeds.values()] == [{0, 1, 2}, {0}, {0}]


def test_what_trains_identically_is_trained_once():
    runs = sweep("figure_train_16k", "paper")
    shown = [method for run in runs for method in run.methods]
    assert sorted(shown) == sorted(paper_methods := {m for m, _ in paper_targets("table_losses")})
    assert len(runs) == 7 < len(paper_methods) and "validate_as" not in runs[0].name
    assert [r.config.method for r in sweep("figure_train_16k", "paper", methods=["yarn"])] == ["rope"]
    assert config_hash(runs[0].config) == config_hash(dataclasses.replace(runs[0].config, validate_as=()))


def test_at_small_scale_the_papers_lengths_are_runs_of_their_own():
    for scale in SCALES:
        options = [run.config.method_options for run in sweep("table_losses", scale, seeds=[0])]
        assert [o for o in options if o] == ([{"slope_scale": 1.0}, {"tau": 0.625}] if scale == "mini" else [])


def test_steps_alone_leave_every_preset_its_share_of_cooldown():
    for run in sweep("all", "mini", seeds=[0], changes=dict(steps=64)):
        base = preset(run.preset)
        assert run.config.cooldown_steps == round(base.cooldown_steps / 10) and read_config(run.arguments) == run.config


def test_open_choices_are_beside_ours():
    runs = {(run.config.method, *run.config.method_options.items()) for run in sweep("open_choices", "paper")}
    assert runs >= {
        ("yarn", ("factor", 1.0)),
        ("alibi", ("slopes", "geometric")),
        ("logn_p_rope", ("context", "length")),
        ("infini_rope", ("segment_length", 512)),
        ("scale_invariant_p_rope", ("terms", "a")),
    }
    assert runs >= {(method,) for method, *_ in runs if method != "yarn"}


def test_field_that_a_preset_has_already_changes_nothing():
    assert [run.name for run in sweep("table_losses", "mini", changes=dict(steps=640))] == [
        run.name for run in sweep("table_losses", "mini")
    ]


@pytest.mark.parametrize("field, value", [("method_options", {"tau": 3.0}), ("method", "rope"), ("seed", 7)])
def test_field_that_the_sweep_sets_itself_is_refused(field, value):
    with pytest.raises(ValueError, match=f"--{field} cannot be set in every run: sweep figure_tau sets it itself"):
        sweep("figure_tau", "mini", changes={field: value})


# ---- own sweeps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch):
    """Adds a sweep called own, of the runs that a function of the scale gives."""
    return lambda function: monkeypatch.setitem(SWEEPS, "own", function)


def test_own_sweep_over_data_and_dtype_trains_every_run_once(own, data, tmp_path, capsys):
    places = [shutil.copytree(data, tmp_path / name) for name in ("a b", "c")]
    shard = next(places[1].glob("*_train_*.bin"))
    words = np.fromfile(shard, np.uint16)
    words[-1] ^= 1  # another text
    words.tofile(shard)
    (places[1] / "manifest.json").unlink()
    axes = dict(data_dir=[str(place) for place in places], dtype=["float32", "bfloat16"])
    own(lambda scale: grid("small_4k", method=["nope"], seed=[0], **axes))
    fields = SMALL | dict(steps=2, cooldown_steps=0, vocab_size=512)
    words = ["own", "--scale", "small", "--runs-dir", tmp_path / "runs"]
    for field, value in fields.items():
        if field not in axes:
            words += [f"--{field}", *(value if isinstance(value, tuple) else [value])]
    assert here(*words) == 0
    configs = [stored_config(path) for path in (tmp_path / "runs").iterdir()]
    wanted = {(place, dtype) for place in axes["data_dir"] for dtype in axes["dtype"]}
    assert {(config.data_dir, config.dtype) for config in configs} == wanted and len(configs) == 4
    before = contents(tmp_path / "runs")
    assert here(*words) == 0 and contents(tmp_path / "runs") == before
    # The folders are found whatever they are called, and data that has moved is still that data.
    for number, path in enumerate([*(tmp_path / "runs").iterdir()]):
        path.rename(path.with_name(f"run{number}"))
    places[0].rename(tmp_path / "moved")
    axes["data_dir"][0] = str(tmp_path / "moved")
    capsys.readouterr()
    assert here(*words, "--dry-run") is None
    assert "4 runs: 4 finished" in capsys.readouterr().out
    (tmp_path / "runs" / "run0" / "summary.json").unlink()
    assert here(*words, "--dry-run") is None
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "interrupted  " in line]
    assert line.startswith("run0 ")


def test_runs_that_differ_outside_the_mathematics_have_names_of_their_own_within_their_sweep_only(own):
    own(lambda scale: grid(scale.base, method=["rope"], dtype=["float32", "bfloat16"], data_dir=["data/a", "data/b"]))
    names = [run.name for run in sweep("own", "mini")]
    assert names == [
        f"mini-rope-data_dirdata_{place}-dtype{dtype}-s0" for dtype in ("float32", "bfloat16") for place in "ab"
    ]
    (plain,) = [run for run in sweep("table_losses", "mini", [0], ["rope"], dict(dtype="float32"))]
    assert (plain.name, plain.distinguishing, plain.identity) == ("mini-rope-s0", (), config_hash(plain.config))
    own(lambda scale: grid(scale.base, data_dir=["data/a", "data_a"]))
    with pytest.raises(ValueError, match="two of its runs would be called mini-"):
        sweep("own", "mini")


def test_table_finds_a_run_of_any_dtype_and_trains_beside_runs_on_other_data(copied, data, tmp_path, capsys):
    words = options(data, copied)
    at = words.index("--dtype")
    table, _ = dry_run(capsys, words[:at] + words[at + 2 :])  # trained with --dtype float32
    assert table["rope"] == ("finished", "nothing")
    (copied / run().name).rename(copied / "elsewhere")
    summary = copied / "elsewhere" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | dict(data="0123")))
    table, _ = dry_run(capsys, words)
    assert table["rope"] == ("missing", "train")


OWN = {  # the runs of a sweep, and what the error must say
    "misspelt": (lambda scale: grid(scale.base, muon_lrr=[0.1]), "no field 'muon_lrr'; did you mean muon_lr"),
    "misspelt run": (lambda scale: [Run("mini", {"zzz": 1})], "a run has no field 'zzz'; see configs/config.py"),
    "preset": (lambda scale: grid("minj", seed=[0]), "unknown preset 'minj'; did you mean mini?"),
    "value": (lambda scale: grid(scale.base, steps=["6"]), "steps must be int, got '6'"),
    "no list": (lambda scale: grid(scale.base, steps=6), "axis steps must be a list of values, got 6"),
    "word": (lambda scale: grid(scale.base, method="rope"), "axis method must be a list of values, got 'rope'"),
    "name": (lambda scale: grid(scale.base, name=["a"]), "sweep own sets name, which is no choice of a sweep's"),
    "empty": (lambda scale: [], "sweep own has no runs: its function in configs/sweeps.py gives none"),
    "empty axis": (lambda scale: grid(scale.base, seed=[]), "sweep own has no runs"),
    "no return": (lambda scale: None, "sweep own has no runs"),
}


@pytest.mark.parametrize("function, says", OWN.values(), ids=OWN)
def test_mistake_in_an_own_sweep_is_one_line(own, tmp_path, capsys, function, says):
    own(function)
    assert here("own", "--scale", "mini", "--runs-dir", tmp_path / "runs", "--dry-run") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error


def test_axis_of_an_own_sweep_is_not_beaten_by_a_field_that_is_given(own, tmp_path, capsys):
    own(lambda scale: grid(scale.base, method=["rope"], muon_lr=[0.01, 0.02]))
    assert here("own", "--scale", "mini", "--runs-dir", tmp_path / "runs", "--muon_lr", "0.01", "--dry-run") == 2
    says = "--muon_lr cannot be set in every run: sweep own sets it itself, to 0.02 in mini-rope-muon_lr0.02-s0"
    assert capsys.readouterr().err == f"error: {says}; leave it out\n"


# ---- names and fields ------------------------------------------------------------------------------------------------


def test_long_name_is_shortened_to_a_hash_and_still_tells_runs_apart():
    changes = dict(SMALL, muon_lr=0.123456789, embedding_lr=0.123456789, head_lr=0.123456789)
    names = [run.name for run in sweep("figure_tau", "mini", changes=changes)]
    assert len(set(names)) == 6 and max(map(len, names)) < 80


def test_field_changes_are_what_was_named():
    words = "--steps 1200 --val_lengths 64 128 --group=mine --cooldown-steps 9".split()
    expected = dict(steps=1200, val_lengths=(64, 128), group="mine", cooldown_steps=9)
    assert field_changes("mini", words) == expected


WRONG = {  # words, and what the error must say
    "sweep": (["table_loses"], "unknown sweep 'table_loses'; did you mean table_losses"),
    "models of others": (["table_llama"], "`python -m scripts.continue_pretraining meta-llama/Llama-2-7b-hf --method"),
    "field": (["table_losses", "--stepps", "6"], "unknown field --stepps; did you mean --steps"),
    "value": (["table_losses", "--num_heads", "5"], "model_dim 768 is not divisible by num_heads 5"),
    "name": (["table_losses", "--name", "mine"], "--name is set by the sweep"),
    "runs_dir": (["table_losses", "--runs_dir", "mine"], "their place is --runs-dir"),
    "method": (["figure_304m", "--methods", "rope"], "sweep figure_304m has no method rope; it has alibi, logn_p_rope"),
    "cooldown": (["all", "--steps", "60", "--cooldown_steps", "99"], "gpt_162m_4k with rope: warmup_steps 0 +"),
    "option": (["table_losses", "--method_options", "tua", "3"], "unknown option 'tua'"),
    "alternative": (["table_losses", "--methods", "nope", "--validate_as", "yarn"], "cannot be validated as yarn"),
    "jobs": (["table_losses", "--jobs", "0"], "--jobs must be at least 1"),
    "retries": (["table_losses", "--retries", "-1"], "--retries must not be negative"),
    "gpus": (["table_losses", "--gpus-per-run", "999"], "--gpus-per-run 999, but torch sees"),
    "needle setting": (["all", "--needle", "step=3"], "the needle task has no setting 'step'; it has haystack, steps"),
    "needle number": (["all", "--needle", "steps=3.5"], "steps of the needle task must be at least 1, got 3.5"),
    "needle word": (["all", "--needle", "steps"], "--needle takes KEY=VALUE, got steps"),
    "needle of others": (["table_losses", "--needle", "steps=3"], "--needle: sweep table_losses fine-tunes no run"),
    "slurm without it": (["table_losses", "--slurm", "time=60"], "--slurm needs --executor slurm"),
    "slurm time": (["table_losses", "--executor", "slurm", "--slurm", "time=24:00:00"], "is in minutes, got 24:00:00"),
    "slurm word": (["table_losses", "--executor", "slurm", "--slurm", "time"], "takes KEY=VALUE, got time"),
    "slurm key": (["table_losses", "--executor", "submitit-local", "--slurm", "tme=60"], "Unknown argument 'tme'"),
}


@pytest.mark.parametrize("words, says", WRONG.values(), ids=WRONG)
def test_wrong_words_are_one_line_and_train_nothing(tmp_path, capsys, words, says):
    assert here(*words, "--runs-dir", tmp_path / "runs") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert not list(tmp_path.glob("runs/mini*")) and not list(tmp_path.glob("runs/*.log"))


def test_help_lists_sweeps_and_scales(capsys):
    assert here("--help") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("all", *SWEEPS, *SCALES))


# ---- devices ---------------------------------------------------------------------------------------------------------


def places(monkeypatch, gpus, visible, at_once, gpus_per_run, device="auto"):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return share_devices([Run("mini", dict(device=device))] * 9, at_once, gpus_per_run)


@pytest.mark.parametrize(
    "gpus, visible, at_once, gpus_per_run, expected",
    [
        (4, "", None, 1, ["0", "1", "2", "3"]),
        (3, "4,6,7", None, 1, ["4", "6", "7"]),
        (5, "", None, 2, ["0,1", "2,3"]),
        (2, "", 3, 1, ["0", "1", "0"]),  # more runs than GPUs share them
        (4, "", 1, 1, ["0"]),
    ],
)
def test_each_run_gets_gpus_of_its_own(monkeypatch, gpus, visible, at_once, gpus_per_run, expected):
    got = places(monkeypatch, gpus, visible, at_once, gpus_per_run)
    assert got == [{"CUDA_VISIBLE_DEVICES": names} for names in expected]


@pytest.mark.parametrize("gpus, device", [(0, "auto"), (4, "cpu")])
def test_without_gpus_the_runs_share_the_cores(monkeypatch, gpus, device):
    cores = len(os.sched_getaffinity(0))
    got = places(monkeypatch, gpus, "", None, 1, device)
    assert len(got) == min(cores, 9)
    assert all(int(place["OMP_NUM_THREADS"]) * len(got) <= cores for place in got)
    assert places(monkeypatch, gpus, "", 1, 1, device) == [{"OMP_NUM_THREADS": str(cores)}]


@pytest.mark.slow
def test_two_processes_a_run(data, tmp_path):
    assert here(*options(data, tmp_path, steps=5, cooldown_steps=1), "--gpus-per-run", 2) == 0
    (folder,) = tmp_path.iterdir()
    assert "on 2 x" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_refused_by_two_processes(data, tmp_path, capsys):
    assert here(*options(data, tmp_path, train_length=128), "--gpus-per-run", 2) == 1
    assert "exit code 2: error: " in capsys.readouterr().err


# ---- clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_preempted_submitit_job_is_queued_again_and_resumes(data, finished, tmp_path, tmp_path_factory):
    folder, place = tmp_path / run().name, tmp_path_factory.mktemp("site")
    process = command(*options(data, tmp_path), "--executor", "submitit-local", **holding(place))
    pid = trainer(folder)
    os.kill(parent(pid), signal.SIGUSR2)  # what submitit has Slurm send before it takes the machine away
    wait_for(lambda: not is_alive(pid))
    (place / "sitecustomize.py").unlink()
    assert process.communicate(timeout=600) and process.returncode == 0
    assert not is_alive(pid) and "; resumed at step " in log(folder)
    assert_same_weights(folder, finished[0] / folder.name)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "submitit"}


@pytest.mark.slow
def test_preempted_submitit_job_resumes_its_fine_tuning(data, tuned, tmp_path):
    folder = tmp_path / long_run().name
    process = command(*needle_options(data, tmp_path), "--executor", "submitit-local")
    pid = tuner(folder, 20)
    os.kill(parent(pid), signal.SIGUSR2)
    assert process.communicate(timeout=300) and process.returncode == 0
    assert not is_alive(pid)
    assert_same_tuning(folder, tuned[0] / folder.name)
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, "submitit"}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A folder of programs that answer as Slurm's do: job numbers count up from 71, `states` holds what sacct says."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    answers = dict(
        srun="exit 1",
        sbatch=f"cat $1 >> {programs}/scripts; echo x >> {programs}/jobs\n"
        f"echo Submitted batch job $((70 + $(wc -l < {programs}/jobs)))",
        sacct=f"cat {programs}/states",
    )
    for name, lines in answers.items():
        (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def test_queued_slurm_jobs_are_not_submitted_twice(slurm, data, tmp_path, capsys):
    runs = tmp_path / "runs"
    words = [*options(data, runs, "rope alibi"), "--executor", "slurm", "--slurm", "partition=big", "time=77"]
    assert here(*words) == 0
    jobs = {method: (runs / f"{run(method).name}.job").read_text() for method in ("rope", "alibi")}
    assert jobs == dict(rope="71", alibi="72")
    batch = (slurm / "scripts").read_text()
    for line in ("partition=big", "time=77", "gpus-per-node=1"):
        assert batch.count(f"#SBATCH --{line}\n") == 2

    (slurm / "states").write_text("JobID|State|NodeList\n71|PENDING|\n72|CANCELLED|\n")
    table, _ = dry_run(capsys, words)
    assert table == dict(rope=("missing", "left alone: queued as job 71"), alibi=("missing", "train"))
    assert here(*words) == 0
    assert (runs / f"{run('rope').name}.job").read_text() == "71"
    assert (runs / f"{run('alibi').name}.job").read_text() == "73"


@pytest.mark.skipif(shutil.which("srun") is not None, reason="this machine has Slurm")
def test_no_slurm_is_one_line(data, tmp_path, capsys):
    assert here(*options(data, tmp_path), "--executor", "slurm") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "srun" in error


# ---- wandb -----------------------------------------------------------------------------------------------------------


def test_wandb_sweep_starts_the_runs_of_the_main_table():
    """With the words that wandb's agent puts in place of ${args}."""
    file = yaml.safe_load((ROOT / "configs" / "wandb_sweep.yaml").read_text())
    methods, seeds = (file["parameters"][axis]["values"] for axis in ("method", "seed"))
    start, program, *words, last = file["command"][1:]
    assert (file["program"], start, program, last) == ("train_gpt.py", "python", "${program}", "${args}")
    configs = [read_config([*words, f"--method={m}", f"--seed={s}"]) for m in methods for s in seeds]
    assert len({config.name for config in configs}) == len(configs)
    assert [config_hash(c) for c in configs] == [config_hash(r.config) for r in sweep("table_losses", "paper")]
    assert methods == MAIN_METHODS and all(c.wandb == "online" for c in configs)
    lengths = {f"val_loss/{length}" for length in configs[0].val_lengths}
    assert file["method"] == "grid" and file["metric"]["goal"] == "minimize" and file["metric"]["name"] in lengths


def wandb_records(path):
    """What an offline run of wandb holds: after 7 bytes, LevelDB's log format in blocks of 32 kB."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, place, whole = path.read_bytes(), 7, b""
    while place < len(raw):
        if 2**15 - place % 2**15 < 7:  # too little for a header: the rest of the block is zeros
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", raw[place : place + 7])
        whole += raw[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb_gets_group_tags_losses_and_tokens_as_axis(data, tmp_path):
    assert here(*options(data, tmp_path, steps=5, cooldown_steps=1, wandb="offline", tags=("mine",))) == 0
    records = list(wandb_records(next(tmp_path.glob("*/wandb/offline-run-*/*.wandb"))))
    (started,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert started.run_group == "table_losses" and set(started.tags) == {"rope", "mine"}
    assert started.display_name == run(steps=5, cooldown_steps=1).name
    assert any(r.metric.glob_name == "*" and r.metric.step_metric == "tokens" for r in records)
    items = [{i.key or "/".join(i.nested_key): i.value_json for i in record.history.item} for record in records]
    assert [item["tokens"] for item in items if "train_loss" in item] == [str(128 * step) for step in range(1, 6)]
    (validation,) = [item for item in items if "val_loss/32" in item]
    assert validation["tokens"] == str(5 * 128) and float(validation["val_loss/64"]) > 0
