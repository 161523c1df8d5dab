"""The sweep runner on real runs of a tiny model: states, kills and resumes, failures, clusters."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ROOT, exit_code, is_alive, read_json, update_json, wait_for
from lives import holding

from configs.runs import Run
from data.text import prepare
from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.run_folder import RunFolder
from scripts.shared.states import failures, sidecar
from scripts.shared.sweeps import sweep
from scripts.sweep import __main__ as sweep_command
from scripts.sweep import local
from scripts.sweep.cluster import Job

SLOW_FIXTURES = ("finished",)

SMALL = dict(
    vocab_size=512, num_layers=1, num_heads=2, model_dim=32, train_length=240, batch_tokens=480, micro_batch_tokens=960,
    steps=12, cooldown_steps=4, val_lengths=(240,), val_tokens=480, val_every=0, save_every=5,
    val_copy_gaps=(), compile="off", device="cpu", dtype="float32",
)  # fmt: skip
TUNING = dict(haystack="shards", steps=20, sequences=4, examples=2, curriculum=0)


# ---- data and ways to sweep ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), size=rng.integers(2, 7))) for _ in range(300)]
    for i in range(60):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(words, size=300)))
    prepare([folder], folder / "shards", "bpe:512", val_fraction=0.2)
    return folder / "shards"


def options(data, runs, methods="rope", seeds="0", sweep="table_losses", needle=TUNING, **fields):
    argv = [sweep, "--scale", "small", "--runs-dir", runs, "--methods", *methods.split(), "--seeds", *seeds.split()]
    for field, value in (SMALL | dict(data_dir=data) | fields).items():
        argv += [f"--{field}", *(value if isinstance(value, tuple) else [value])]
    if sweep != "table_losses":
        argv += ["--needle", *(f"{key}={value}" for key, value in needle.items())]
    return [*map(str, argv), "--jobs", "1"]


def tuning(*arguments, **fields):
    return options(*arguments, sweep="table_needle", **fields)


def here(*argv):
    """Call the command in this process and return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return exit_code(sweep_command.main, argv)


def command(*argv, **variables):
    """Start the command in a new process."""
    environment = os.environ | dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE") | variables
    argv = [sys.executable, "-m", "scripts.sweep", *map(str, argv)]
    return subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def dry_run(capsys, argv):
    """Return {method: (state, reason)}."""
    capsys.readouterr()
    assert here(*argv, "--dry-run") == 0
    rows = [row.split(maxsplit=2) for row in capsys.readouterr().out.splitlines()[:-1]]
    return {name.split("-")[1]: (state, " ".join(reason)) for name, state, *reason in rows}


def run(method="rope", seed=0, **fields):
    return sweep("table_losses", "small", [seed], [method], SMALL | fields)[0]


def trainer(folder):
    """Return the process id of the run that holds the folder's lock and has saved a checkpoint."""
    wait_for(lambda: (folder / "checkpoints").is_dir() and latest_checkpoint(folder / "checkpoints"))
    return int((folder / "lock").read_text().split()[1])


def assert_same_weights(a, b):
    a, b = (load_checkpoint(latest_checkpoint(folder / "checkpoints"))["model"] for folder in (a, b))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """Return run folders of two methods that one command trained and fine-tuned, and its output."""
    runs = tmp_path_factory.mktemp("finished") / "runs"
    process = command(*tuning(data, runs, "rope alibi"), "--jobs", 2)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return runs, out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "runs")


def test_every_run_is_trained_and_fine_tuned_and_nothing_else_is_left(finished):
    runs, out = finished
    assert {path.name for path in runs.iterdir()} == {run("rope").name, run("alibi").name}
    for folder in runs.iterdir():
        config, summary, needle = (read_json(folder / f"{n}.json") for n in ("config", "summary", "needle/summary"))
        assert f"-{config['method']}-" in folder.name and folder.name.endswith("-s0")
        assert config["group"] == "table_needle" and config["steps"] == summary["steps"] == 12
        assert f"{folder.name}: training finished\n" in out and f"{folder.name}: fine-tuning finished\n" in out
        assert needle | TUNING | dict(pretrained="step_000012") == needle | dict(curriculum=0)
        assert list(needle["greedy"]) == ["240", "960", "3840"]


def test_finished_runs_are_left_alone_whatever_their_name(copied, data):
    (copied / run().name).rename(copied / "mine")
    before = contents(copied)
    assert here(*tuning(data, copied, "rope alibi")) == here(*options(data, copied, "rope alibi")) == 0
    assert contents(copied) == before


@pytest.mark.slow
def test_a_killed_run_of_a_stopped_sweep_ends_like_an_undisturbed_one(data, finished, tmp_path):
    """test_needle.py kills fine-tunings."""
    folder = tmp_path / "runs" / run().name
    process = command(*tuning(data, folder.parent), **holding(tmp_path))
    os.kill(trainer(folder), signal.SIGKILL)
    wait_for(lambda: failures(folder))
    wait_for(lambda: latest_checkpoint(folder / "checkpoints").name == "step_000010.pt")
    pid = trainer(folder)
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in process.communicate(timeout=600)[1] and process.returncode == 130
    assert not is_alive(pid) and len(failures(folder)) == 1
    assert here(*tuning(data, folder.parent)) == 0
    assert (folder / "log.txt").read_text().count("resumed at step ") >= 2
    assert_same_weights(folder, finished[0] / folder.name)
    assert_same_weights(folder / "needle", finished[0] / folder.name / "needle")
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.slow
def test_two_processes_a_run(data, tmp_path, capsys):
    argv = ["--gpus-per-run", 2, "--retries", 0]
    assert here(*options(data, tmp_path / "a", steps=5), *argv) == 0
    assert "2 x CPU" in (tmp_path / "a" / run(steps=5, cooldown_steps=4).name / "log.txt").read_text()
    assert here(*options(data, tmp_path / "b", train_length=480), *argv) == 1  # one sequence for two
    assert " failed " in capsys.readouterr().out


# ---- failures --------------------------------------------------------------------------------------------------------


STAND_IN = """import sys
name = sys.argv[sys.argv.index("--name") + 1]
print(f"RuntimeError: {name}\\ntorchrun writes more", file=sys.stderr)
sys.exit(dict(broken=1, refused=2).get(name, 0))
"""


def test_failed_runs_are_tried_again_users_errors_are_not_and_the_others_finish(tmp_path, monkeypatch):
    (tmp_path / "train_gpt.py").write_text(STAND_IN)
    monkeypatch.setattr(local, "ROOT", tmp_path)
    names = ("broken", "refused", "fine")
    runs = [Run("mini", dict(name=name, runs_dir=str(tmp_path), device="cpu")) for name in names]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/interrupted").write_text("SIGINT\n")  # an earlier attempt was
    local.train(runs, at_once=1, retries=1, signals=())
    lines = {name: failures(tmp_path / name) for name in names}
    assert [len(lines[name]) for name in names] == [2, 1, 0]
    assert all(re.search(r"code 1\b.*RuntimeError: broken$", line) for line in lines["broken"])
    assert re.search(r"code 2\b.*RuntimeError: refused$", lines["refused"][0])
    assert {path.stem for path in tmp_path.glob("*.log")} == {"broken", "refused"}


@pytest.mark.parametrize("code, marks, outcome", [
    (75, [], "interrupted"),
    (0, ["interrupted"], "interrupted"),  # under torchrun
    (1, ["interrupted"], "interrupted"),
    (1, ["interrupted", "failed"], "failed"),  # another rank failed, and torchrun stopped rank 0
    (2, ["interrupted"], "refused"),
    (-9, [], "failed"),
])
def test_outcomes_by_exit_code(tmp_path, code, marks, outcome):
    (tmp_path / "run").mkdir()
    (tmp_path / "run.log").write_text("step 3\n")
    for mark in marks:
        (tmp_path / "run" / mark).write_text("SIGTERM\n")
    assert local.record_outcome(tmp_path / "run", tmp_path / "run", code) == outcome
    assert len(failures(tmp_path / "run")) == (outcome in ("failed", "refused"))


# ---- states ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_states_apart_and_starts_nothing(copied, data, capsys):
    runs = copied
    interrupted, running, other, failed = (runs / run(m).name for m in ("alibi", "p_rope", "logn_p_rope", "nope"))
    (interrupted / "summary.json").unlink()
    for folder in (running, other):
        (folder / "checkpoints").mkdir(parents=True)
    (running / "config.json").write_text(json.dumps(vars(run("p_rope").config)))
    (other / "config.json").write_text(json.dumps(vars(run("logn_p_rope", muon_lr=0.1).config)))
    sidecar(failed, ".failures.txt").write_text("2026-01-01T00:00:00 exit code 1: boom\n")
    lock = RunFolder(runs, running.name, resume="auto")
    before, argv = contents(runs), options(data, runs, "rope alibi p_rope logn_p_rope nope logn_rope")
    table = dry_run(capsys, argv)
    assert contents(runs) == before
    expected = dict(rope="finished", alibi="interrupted", p_rope="running", logn_p_rope="other", nope="failed")
    assert {m: state for m, (state, _) in table.items()} == expected | dict(logn_rope="missing")
    for method, part in dict(logn_p_rope="muon_lr 0.1", nope="exit code 1: boom").items():
        assert part in table[method][1]
    assert here(*options(data, runs, "p_rope logn_p_rope")) == 1  # of others, so left alone
    assert contents(runs) == before
    lock.close()


def test_a_run_on_other_data_or_with_a_damaged_summary_does_not_count(copied, data, capsys):
    summary = copied / run().name / "summary.json"
    text = summary.read_text()
    update_json(summary, data="0123")
    table = dry_run(capsys, options(data, copied, "rope alibi"))
    assert (table["rope"][0], table["alibi"][0]) == ("other", "finished")
    assert dry_run(capsys, options(data.parent / "elsewhere", copied))["rope"][0] == "finished"  # data unknown here
    summary.write_text(text.replace('"steps": 12', '"steps": "12"'))
    assert dry_run(capsys, options(data, copied))["rope"][0] == "other"


@pytest.mark.slow
def test_states_of_fine_tuning(copied, data, finished, capsys):
    folder = copied / run().name
    summary = folder / "needle" / "summary.json"

    def planned(sweep="table_needle", **settings):
        before = contents(copied)
        state, _ = dry_run(capsys, options(data, copied, sweep=sweep, needle=TUNING | settings))["rope"]
        assert contents(copied) == before
        return state

    assert planned() == planned("all") == planned("table_losses") == "finished"
    assert planned(steps=7) == planned(haystack="c4") == planned(examples=3) == "other"
    lock = RunFolder(folder, "needle", resume="auto")
    assert planned() == "running"
    lock.close()
    scores = read_json(summary)
    summary.write_text("{")
    assert planned() == "other"
    del scores["greedy"]["3840"]
    summary.write_text(json.dumps(scores))
    assert planned() == "interrupted"
    assert here(*tuning(data, copied)) == 0  # makes the scores that lack
    assert summary.read_text() == (finished[0] / folder.name / "needle" / "summary.json").read_text()
    shutil.rmtree(folder / "needle")
    assert planned() == "pretrained"


def test_c4_is_fetched_once_before_anything_is_trained(data, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sweep_command, "fetch_c4", lambda place, split: calls.append(split))
    monkeypatch.setattr(sweep_command, "train", lambda runs, *_: calls.append(len(runs)))
    assert here(*tuning(data, tmp_path, "rope alibi", needle=dict(haystack="c4"))) == 1
    assert calls == ["train", "val", 2]


# ---- clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_preempted_job_is_queued_again_and_resumes(data, finished, tmp_path, monkeypatch):
    """submitit's local executor takes Slurm's place."""
    import submitit

    wish = run(data_dir=str(data), runs_dir=str(tmp_path), resume="auto")
    (tmp_path / "site").mkdir()
    for name, value in holding(tmp_path / "site").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    executor = submitit.AutoExecutor(tmp_path / "submitit" / "%j", cluster="local")
    executor.update_parameters(timeout_min=10)
    job = executor.submit(Job(wish, 1, 0))
    pid = trainer(wish.path)
    parent = re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]
    os.kill(int(parent), signal.SIGUSR2)  # what submitit has Slurm send before it takes the machine away
    wait_for(lambda: not is_alive(pid))
    (tmp_path / "site" / "sitecustomize.py").unlink()  # lets training go on
    wait_for(job.done)
    assert_same_weights(wish.path, finished[0] / wish.path.name)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a folder of programs in Slurm's place. Job numbers count up from 71; sacct prints the file `states`."""
    programs = tmp_path / "slurm"
    programs.mkdir()
    number = f"$((70 + $(wc -l < {programs}/jobs)))"
    submit = f"cat $1 >> {programs}/scripts; echo x >> {programs}/jobs; echo Submitted batch job {number}"
    for name, lines in dict(srun="exit 1", sbatch=submit, sacct=f"cat {programs}/states").items():
        (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def test_queued_slurm_jobs_are_not_submitted_twice(slurm, data, tmp_path, capsys):
    runs = tmp_path / "runs"
    argv = [*options(data, runs, "rope alibi"), "--slurm", "partition=big", "time=77"]

    def jobs():
        return {method: (runs / f"{run(method).name}.job").read_text() for method in ("rope", "alibi")}

    assert here(*argv) == 0
    assert jobs() == dict(rope="71", alibi="72")
    batch = (slurm / "scripts").read_text()
    for line in ("partition=big", "time=77", "gpus-per-node=1"):
        assert batch.count(f"#SBATCH --{line}\n") == 2
    (slurm / "states").write_text("JobID|State|NodeList\n71|PENDING|\n72|CANCELLED|\n")
    table = dry_run(capsys, argv)
    assert table == dict(rope=("queued", "job 71"), alibi=("missing", ""))
    assert here(*argv) == 0
    assert jobs() == dict(rope="71", alibi="73")


# ---- devices and the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, visible, at_once, gpus_per_run, device, expected", [
    (4, "", None, 1, "auto", ["0", "1", "2", "3"]),
    (3, "4,6,7", None, 1, "auto", ["4", "6", "7"]),
    (5, "", None, 2, "auto", ["0,1", "2,3"]),
    (2, "", 3, 1, "auto", ["0", "1", "0"]),  # more runs than GPUs share them
    (0, "", None, 1, "auto", None),
    (4, "", None, 1, "cpu", None),
])  # fmt: skip
def test_runs_get_gpus_or_share_the_cores(monkeypatch, gpus, visible, at_once, gpus_per_run, device, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = local.share_devices([Run("mini", dict(device=device))] * 9, at_once, gpus_per_run)
    if expected:
        assert found == [{"CUDA_VISIBLE_DEVICES": names} for names in expected]
    else:
        cores = len(os.sched_getaffinity(0))
        assert len(found) == min(cores, 9) and all(int(f["OMP_NUM_THREADS"]) * len(found) <= cores for f in found)


WRONG = {  # arguments, and the part that the error names
    "sweep": (["table_loses"], "table_losses"),
    "name": (["table_losses", "--name", "mine"], "--name"),
    "method": (["figure_304m", "--methods", "rope"], "rope"),
    "option": (["table_losses", "--method_options", "tua", "3"], "tua"),
    "own": (["figure_tau", "--seed", "7"], "--seed"),
    "jobs": (["table_losses", "--jobs", "0"], "--jobs"),
    "gpus": (["table_losses", "--gpus-per-run", "999"], "--gpus-per-run"),
    "needle setting": (["all", "--needle", "step=3"], "'step'"),
    "haystack": (["all", "--needle", "haystack=shard"], "'shard'"),
    "needle of others": (["table_losses", "--needle", "steps=3"], "--needle"),
    "slurm time": (["table_losses", "--slurm", "time=24:00:00"], "24:00:00"),
    "no slurm": (["table_losses", "--slurm"], "srun"),
}


@pytest.mark.parametrize("argv, names", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_one_line_and_train_nothing(tmp_path, capsys, monkeypatch, argv, names):
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    assert here(*argv, "--runs-dir", tmp_path / "runs") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and names in error
    assert not list(tmp_path.glob("runs/*.log"))
