"""The sweep runner on real runs of a tiny model: each state a run can be in, stopping and resuming, failures, submitit,
and the wandb sweep."""

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

from configs.command_line import read_config
from configs.config import Config, config_hash
from configs.sweeps import MAIN_METHODS, SCALES, SWEEPS, sweep
from data.text import prepare
from lives import holding
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.run_folder import RunFolder
from scripts import sweep as script
from scripts.runs import read_folders, state

SLOW_FIXTURES = ("finished", "disturbed", "failing")

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
    words = ["table_losses", "--scale", "mini", "--runs-dir", runs, "--methods", *methods.split()]
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
            script.main()
        except SystemExit as exit:
            return exit.code


def command(*words, **variables):
    """Starts the command in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # the log must not need it
    environment |= dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE") | variables
    words = [sys.executable, "-m", "scripts.sweep", *map(str, words)]
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(method="rope", seed=0, **fields):
    return sweep("table_losses", "mini", [seed], [method], SMALL | fields)[0]


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
    del config["bf16_embedding"]
    path.write_text(json.dumps(config))
    before = contents(copied)
    assert here(*options(data, copied)) == 0
    assert contents(copied) == before


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
    seen["state"] = state(run(), read_folders(runs), runs)[0]
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
    assert script.settle(tmp_path / "run", 75, "step 3\n") == "interrupted"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code, outcome", [(0, "interrupted"), (1, "interrupted"), (2, "refused")])
def test_the_mark_of_an_interrupted_run_counts_under_torchrun(tmp_path, code, outcome):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "interrupted").write_text("SIGTERM\n")
    assert script.settle(tmp_path / "run", code, "") == outcome


@pytest.mark.parametrize("code, outcome", [(1, "failed"), (2, "refused"), (-9, "failed")])
def test_exit_code_of_a_process_of_torchrun_counts(tmp_path, code, outcome):
    output = f"[rank0]: ValueError: boom\nRoot Cause:\n  exitcode  : {code} (pid: 7)\n  traceback : none\n=====\n"
    assert script.settle(tmp_path / "run", 1, output) == outcome
    assert (tmp_path / "run.failures.txt").read_text().endswith(f" exit code {code}: [rank0]: ValueError: boom\n")


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
    interrupted, running, other, failed = (runs / run(m).name for m in ("alibi", "p_rope", "yarn", "nope"))
    (interrupted / "summary.json").unlink()
    for folder in (running, other):
        (folder / "checkpoints").mkdir(parents=True)
    (running / "config.json").write_text(json.dumps(run("p_rope").config.to_dict()))
    (other / "config.json").write_text(json.dumps(run("yarn", muon_lr=0.1).config.to_dict()))
    script.beside(failed, ".failures.txt").write_text("2026-01-01T00:00:00 exit code 1: boom\n")
    lock = RunFolder.create(runs, running.name, resume="auto")
    before = contents(runs)
    table, last = dry_run(capsys, options(data, runs, "rope alibi p_rope yarn nope logn_rope"))
    lock.close()
    assert contents(runs) == before
    assert table == dict(
        rope=("finished", "nothing"),
        alibi=("interrupted", f"resume  ({interrupted}, after step_000100)"),
        p_rope=("running", "left alone: another process trains it"),
        yarn=("other", f"left alone  ({other} is of another config (muon_lr 0.1 there, 0.02 here): rename it)"),
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
    for run in sweep("all", scale, seeds=[1], changes=dict(bf16_embedding=True, val_lengths=(64, 256))):
        assert read_config(run.arguments) == run.config


@pytest.mark.parametrize("scale", SCALES)
def test_all_is_every_run_once(scale):
    runs = sweep("all", scale)
    hashes = [config_hash(run.config) for run in runs]
    assert len(set(hashes)) == len(hashes) == len({run.name for run in runs})
    assert set(hashes) == {config_hash(run.config) for name in SWEEPS for run in sweep(name, scale)}


def test_field_that_a_preset_has_already_changes_nothing():
    assert [run.name for run in sweep("table_losses", "mini", changes=dict(steps=1200))] == [
        run.name for run in sweep("table_losses", "mini")
    ]


def test_field_does_not_replace_what_the_sweep_varies():
    runs = sweep("figure_tau", "mini", changes=dict(method_options={"tau": 3.0}, method="rope", seed=7))
    assert {(run.config.method, run.config.seed) for run in runs} == {("scale_invariant_p_rope", 0)}
    assert sorted(run.config.method_options.get("tau", 10) for run in runs) == [0.01, 0.1, 1, 10, 100]


def test_long_name_is_shortened_to_a_hash_and_still_tells_runs_apart():
    changes = dict(SMALL, muon_lr=0.123456789, embedding_lr=0.123456789, head_lr=0.123456789)
    names = [run.name for run in sweep("figure_tau", "mini", changes=changes)]
    assert len(set(names)) == 5 and max(map(len, names)) < 80


def test_field_changes_are_what_was_named():
    words = "--steps 1200 --no_bf16_embedding --val_lengths 64 128 --group=mine --cooldown-steps 9".split()
    expected = dict(steps=1200, bf16_embedding=False, val_lengths=(64, 128), group="mine", cooldown_steps=9)
    assert script.field_changes("mini", words) == expected


WRONG = {  # words, and what the error must say
    "sweep": (["table_loses"], "unknown sweep 'table_loses'; did you mean table_losses?"),
    "field": (["table_losses", "--stepps", "6"], "unknown field --stepps; did you mean --steps"),
    "value": (["table_losses", "--num_heads", "5"], "model_dim 768 is not divisible by num_heads 5"),
    "name": (["table_losses", "--name", "mine"], "--name is set by the sweep"),
    "runs_dir": (["table_losses", "--runs_dir", "mine"], "their place is --runs-dir"),
    "method": (["figure_qq", "--methods", "alibi"], "sweep figure_qq has no method alibi; it has p_rope, rope"),
    "jobs": (["table_losses", "--jobs", "0"], "--jobs must be at least 1"),
    "retries": (["table_losses", "--retries", "-1"], "--retries must not be negative"),
    "gpus": (["table_losses", "--gpus-per-run", "999"], "--gpus-per-run 999, but torch sees"),
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
    return script.places([script.Job(Path("run"), Config(device=device), [])] * 9, at_once, gpus_per_run)


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
