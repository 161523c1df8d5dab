"""The sweep runner on real runs of a tiny model: states, kills and resumes, failures."""

import json
import os
import re
import shutil
import signal
from contextlib import closing
from unittest.mock import patch

from commands import (
    environment,
    exit_code,
    fixture,
    is_alive,
    names,
    read_json,
    shared,
    slow,
    start,
    succeeds,
    table,
    unchanged,
    update_json,
    wait_for,
    write_files,
)
from lives import holding
from test_text import make_documents, write_lines
from test_train import assert_same_numbers, newest, newest_state

from configs.command_line import read_fields
from configs.runs import Run
from data.text import prepare
from runtime.run_folder import RunFolder
from scripts.shared.states import failures, sidecar
from scripts.shared.sweeps import sweep
from scripts.sweep import __main__ as sweep_command
from scripts.sweep import local

SLOW_FIXTURES = ("finished",)

SMALL = "--vocab_size 512 --num_layers 1 --num_heads 2 --model_dim 32 --train_length 240 --batch_tokens 480 "
SMALL += "--micro_batch_tokens 960 --steps 12 --cooldown_steps 4 --val_lengths 240 --val_tokens 480 --val_every 0 "
SMALL += "--save_every 5 --val_copy_gaps --compile off --device cpu --dtype float32"
TUNING = dict(haystack="shards", steps=20, sequences=4, examples=2, curriculum=0)


# ---- data and ways to sweep ------------------------------------------------------------------------------------------


@shared
def data(shared_path):
    write_lines(shared_path / "tales.jsonl", make_documents(2000))
    prepare([shared_path], shared_path / "shards", "bpe:512", val_fraction=0.2)
    return shared_path / "shards"


def options(data, runs, methods="rope", sweep="table_losses", needle=TUNING, more=""):
    argv = f"{sweep} --scale small --jobs 1 --runs-dir {runs} --methods {methods} --seeds 0 --data_dir {data}"
    settings = [f"{key}={value}" for key, value in needle.items()]
    return [*f"{argv} {SMALL} {more}".split(), *([] if sweep == "table_losses" else ["--needle", *settings])]


def tuning(*arguments, **fields):
    return options(*arguments, sweep="table_needle", **fields)


@fixture(autouse=True, scope="module")
def one_thread():
    with patch.dict(os.environ, environment()):
        yield


def here(*argv):
    """Call the command in this process and return its exit status."""
    return exit_code(sweep_command.main, argv)


def command(*argv, **variables):
    """Start the command in a new process."""
    return start("-m", "scripts.sweep", *argv, **variables)


def dry_run(capsys, argv):
    """Return {method: (state, reason)}."""
    capsys.readouterr()
    succeeds(sweep_command.main, *argv, "--dry-run")
    rows = re.findall(r"^\S+?-(\w+)-\S+ +(\w+) *(.*?) *$", capsys.readouterr().out, re.MULTILINE)
    return {method: (state, reason) for method, state, reason in rows}


def run(method="rope", more=""):
    return sweep("table_losses", "small", [0], [method], read_fields(f"{SMALL} {more}".split()))[0]


def trainer(folder):
    """Return the process id of the run that holds the folder's lock and has saved a checkpoint."""
    wait_for(lambda: newest(folder))
    return int((folder / "lock").read_text().split()[1])


def assert_same_weights(a, b):
    assert_same_numbers(newest_state(a)["model"], newest_state(b)["model"])


# ---- training --------------------------------------------------------------------------------------------------------


@shared
def finished(data, shared_path):
    """Return run folders of two methods that one command trained and fine-tuned, and its output."""
    runs = shared_path / "runs"
    process = command(*tuning(data, runs, "rope alibi"), "--jobs", 2)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return runs, out


@fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "runs")


def test_every_run_is_trained_and_fine_tuned_and_nothing_else_is_left(finished):
    runs, out = finished
    assert names(runs) == [run("alibi").name, run("rope").name]
    for method in ("rope", "alibi"):
        name = run(method).name
        config, needle = (read_json(runs / name / f"{part}.json") for part in ("config", "needle/summary"))
        assert (config["method"], config["seed"], config["group"]) == (method, 0, "table_needle")
        assert f"{name}: training finished\n" in out and f"{name}: fine-tuning finished\n" in out
        assert needle | TUNING | dict(pretrained="step_000012") == needle
        assert [*needle["greedy"]] == ["240", "960", "3840"]


def test_finished_runs_are_left_alone_whatever_their_name(copied, data):
    (copied / run().name).rename(copied / "mine")
    with unchanged(copied):
        assert here(*tuning(data, copied, "rope alibi")) == here(*options(data, copied, "rope alibi")) == 0


@slow
def test_a_killed_run_of_a_stopped_sweep_ends_like_an_undisturbed_one(data, finished, tmp_path):
    """test_needle.py kills fine-tunings."""
    folder = tmp_path / "runs" / run().name
    process = command(*tuning(data, folder.parent), **holding(tmp_path))
    os.kill(trainer(folder), signal.SIGKILL)
    wait_for(lambda: failures(folder) and newest(folder).name == "step_000010.pt")
    pid = trainer(folder)
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in process.communicate(timeout=600)[1] and process.returncode == 130
    assert not is_alive(pid) and len(failures(folder)) == 1
    assert here(*tuning(data, folder.parent)) == 0
    assert (folder / "log.txt").read_text().count("resumed at step ") >= 2
    assert_same_weights(folder, finished[0] / folder.name)
    assert_same_weights(folder / "needle", finished[0] / folder.name / "needle")
    assert names(folder.parent) == [folder.name]


@slow
def test_two_processes_a_run(data, tmp_path, capsys):
    argv = ["--gpus-per-run", 2]
    assert here(*options(data, tmp_path, more="--steps 5"), *argv) == 0
    assert "2 x CPU" in (tmp_path / run(more="--steps 5").name / "log.txt").read_text()
    assert here(*options(data, tmp_path, more="--train_length 480"), *argv) == 1  # one sequence for two
    assert " refused" in capsys.readouterr().out


# ---- failures --------------------------------------------------------------------------------------------------------


STAND_IN = """import sys
name = sys.argv[sys.argv.index("--name") + 1]
print(f"RuntimeError: {name}\\ntorchrun writes more", file=sys.stderr)
sys.exit(dict(broken=1, refused=2).get(name, 0))
"""


def test_failed_runs_are_tried_again_users_errors_are_not_and_the_others_finish(tmp_path, monkeypatch):
    write_files(tmp_path, {"train_gpt.py": STAND_IN, "broken/interrupted": "SIGINT\n"})  # an earlier attempt was
    monkeypatch.setattr(local, "ROOT", tmp_path)
    outcomes = ("broken", "refused", "fine")
    runs = [Run("mini", dict(name=name, runs_dir=str(tmp_path), device="cpu")) for name in outcomes]
    local.train(runs, at_once=1, retries=1)
    broken, refused, fine = (failures(tmp_path / name) for name in outcomes)
    assert len(broken) == 2 and all(re.search(r"code 1\b.*RuntimeError: broken$", line) for line in broken)
    assert len(refused) == 1 and re.search(r"code 2\b.*RuntimeError: refused$", refused[0])
    assert fine == [] and {path.stem for path in tmp_path.glob("*.log")} == {"broken", "refused"}


@table("code, marks, log, outcome", """
    75 |                    |                  | interrupted
    0  | interrupted        |                  | interrupted
    1  | interrupted        | SignalException  | interrupted
    1  | interrupted        | ChildFailedError | failed
    1  | interrupted failed |                  | failed
    2  | interrupted        |                  | refused
    -9 |                    | step 3           | failed
""")
def test_outcomes_by_exit_code(tmp_path, code, marks, log, outcome):
    """Under torchrun, an interrupted run ends with 0 or 1. ChildFailedError, or both marks: another rank failed."""
    run = tmp_path / "run"
    write_files(run, dict.fromkeys(["../run.log", *marks.split()], log))
    assert local.record_outcome(run, run, int(code)) == outcome
    assert len(failures(run)) == (outcome in ("failed", "refused"))


# ---- states ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_states_apart_and_starts_nothing(copied, data, capsys):
    interrupted, running, other, failed = (run(m).name for m in ("alibi", "p_rope", "logn_p_rope", "nope"))
    (copied / interrupted / "summary.json").unlink()
    for name, config in {running: run("p_rope"), other: run("logn_p_rope", "--muon_lr 0.1")}.items():
        write_files(copied / name, {"config.json": json.dumps(vars(config.config))})
    sidecar(copied / failed, ".failures.txt").write_text("2026-01-01T00:00:00 exit code 1: boom\n")
    with closing(RunFolder(copied, running, resume="auto")), unchanged(copied):
        found = dry_run(capsys, options(data, copied, "rope alibi p_rope logn_p_rope nope logn_rope"))
        expected = dict(rope="finished", alibi="interrupted", p_rope="running", logn_p_rope="other", nope="failed")
        assert {m: state for m, (state, _) in found.items()} == expected | dict(logn_rope="missing")
        assert "muon_lr 0.1" in found["logn_p_rope"][1] and "exit code 1: boom" in found["nope"][1]
        assert here(*options(data, copied, "p_rope logn_p_rope")) == 1  # of others, so left alone


def test_a_run_on_other_data_or_with_a_damaged_summary_does_not_count(copied, data, capsys):
    def state(data):
        return dry_run(capsys, options(data, copied))["rope"][0]

    summary = copied / run().name / "summary.json"
    right = read_json(summary)["data"]
    assert state(data) == "finished"
    update_json(summary, data="0123")
    assert state(data) == "other" and state(data.parent / "elsewhere") == "finished"  # data unknown here
    update_json(summary, data=right, steps="12")
    assert state(data) == "other"


@slow
def test_states_of_fine_tuning(copied, data, capsys):
    folder = copied / run().name
    summary = folder / "needle/summary.json"

    def planned(sweep="table_needle", **settings):
        return dry_run(capsys, options(data, copied, sweep=sweep, needle=TUNING | settings))["rope"][0]

    assert planned() == planned("all") == planned("table_losses") == "finished"
    assert planned(steps=7) == planned(haystack="c4") == planned(examples=3) == "other"
    with closing(RunFolder(folder, "needle", resume="auto")):
        assert planned() == "running"
    scores = read_json(summary)
    summary.write_text("{")
    assert planned() == "other"
    lengths = [*scores["greedy"]][:2]
    summary.write_text(json.dumps(scores | dict(greedy={length: scores["greedy"][length] for length in lengths})))
    assert planned() == "interrupted"
    assert here(*tuning(data, copied)) == 0  # makes the scores that lack
    assert read_json(summary) == scores
    shutil.rmtree(folder / "needle")
    assert planned() == "pretrained"


def test_c4_is_fetched_once_before_anything_is_trained(data, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sweep_command, "fetch_c4", lambda place, split: calls.append(split))
    monkeypatch.setattr(sweep_command, "train", lambda runs, *_: calls.append(len(runs)))
    assert here(*tuning(data, tmp_path, "rope alibi", needle=dict(haystack="c4"))) == 1
    assert calls == ["train", "val", 2]


# ---- devices ---------------------------------------------------------------------------------------------------------


@table("gpus, visible, at_once, gpus_per_run, device, expected", """
    4 |       |   | 1 | auto | 0 1 2 3
    3 | 4,6,7 |   | 1 | auto | 4 6 7
    5 |       |   | 2 | auto | 0,1 2,3
    2 |       | 3 | 1 | auto | 0 1 0
    0 |       |   | 1 | auto |
    4 |       |   | 1 | cpu  |
""")
def test_runs_get_gpus_or_share_the_cores(monkeypatch, gpus, visible, at_once, gpus_per_run, device, expected):
    """More runs than GPUs share them."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("OMP_NUM_THREADS")
    at_once = int(at_once) if at_once else None
    found = local.share_devices([Run("mini", dict(device=device))] * 9, at_once, int(gpus_per_run))
    if expected:
        assert found == [{"CUDA_VISIBLE_DEVICES": names} for names in expected.split()]
    else:
        cores = len(os.sched_getaffinity(0))
        assert len(found) == min(cores, 9) and all(int(f["OMP_NUM_THREADS"]) * len(found) <= cores for f in found)
