"""What docs/reliability.md promises of runs, each with the fault really injected (tests/lives.py)."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import (
    CORRUPTION,
    ROOT,
    TWO_RANKS,
    environment,
    is_alive,
    parametrize,
    promise,
    python,
    shared,
    slow,
    table,
    wait_for,
)
from lives import STAGES, server
from test_data import flip
from test_train import arguments, assert_close_run, assert_same_run, newest, newest_state, steps_and_validations

from runtime.checkpoint import list_checkpoints, load_checkpoint

pytestmark = slow
KILLS = promise(1, "killed at any instant, a run goes on bit for bit")
RESUME = promise(2, "resumed on another division of the work, a run goes on with the same losses")
SIGNALS = promise(3, "told to stop, a run saves within a step")
DISK = promise(4, "a full disk costs no checkpoint")
NONFINITE = promise(7, "a step that is not finite changes no weight")
RANKS = promise(8, "a rank that dies or hangs ends the job, and torchrun's restart goes on")


@shared
def lives():
    with server() as live:
        yield live


@pytest.fixture
def live(data, lives, tmp_path):
    """Return a function that runs train_gpt.py in a folder, see lives.server."""

    def live(runs=tmp_path, more="", fault=None, processes=1, code=0):
        argv = arguments(data, runs, f"--resume auto {more}")
        return lives(argv, tmp_path / "output", fault, processes, code)

    return live


def at(stage, count=1, do="kill", **more):
    return dict(stage=stage, count=count, do=do, **more)


def error_of(output):
    """Return the error line, which all ranks print alike."""
    assert 'train_gpt.py", line' not in output, output  # a traceback
    (line,) = {line for line in output.splitlines() if line.startswith("error: ")}
    return line


def steps_of(runs):
    steps, _ = steps_and_validations(runs / "run")
    return [r["step"] for r in steps]


def saved_step(runs):
    return newest_state(runs / "run")["progress"]["step"] if newest(runs / "run") else 0


# ---- kill -9 and resuming --------------------------------------------------------------------------------------------


@KILLS
def test_killed_at_every_kind_of_moment(live, faults, long, tmp_path):
    rng = random.Random(time.time_ns() if long else 1)
    stages = [stage for stage in STAGES if stage != "comparison"] * (14 if long else 1)
    rng.shuffle(stages)
    more = f"--steps {4 * len(stages)} --save_every 2 --val_every 4 --keep {1 + rng.randrange(2)}"
    live(tmp_path / "undisturbed", more)
    for stage in stages:
        with faults(f"at {stage}"):
            most = {"metrics": 5, "log": 5}.get(stage, 3)
            live(tmp_path, more, at(stage, rng.randint(1, most)), code=-signal.SIGKILL)
            steps = steps_of(tmp_path) if (tmp_path / "run/metrics.jsonl").exists() else []
            assert steps == list(range(1, len(steps) + 1)) and len(steps) >= saved_step(tmp_path)
    live(tmp_path, more)
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed/run")
    assert not list((tmp_path / "run").rglob("*.partial"))


@RESUME
def test_resumed_in_other_micro_batches_and_on_another_number_of_processes(finished, live, faults, tmp_path):
    with faults("resumed in other micro-batches by two processes, then by one"):
        live(tmp_path, "--micro_batch_tokens 16", at("step", 7), code=-signal.SIGKILL)
        live(tmp_path, "--micro_batch_tokens 64", at("step", 8, "SIGTERM"), processes=2)  # from step 5 on
        assert saved_step(tmp_path) == 13
        live(tmp_path, "--micro_batch_tokens 32")
        assert_close_run(tmp_path / "run", finished)


def test_losses_do_not_depend_on_the_number_of_processes(finished, live, tmp_path):
    live(processes=3)  # of 8 sequences
    assert_close_run(tmp_path / "run", finished)
    for processes in (1, 2):
        live(tmp_path / str(processes), f"--init_from {finished} --data_seed 1", processes=processes)
    assert_close_run(tmp_path / "2/run", tmp_path / "1/run")


# ---- signals ---------------------------------------------------------------------------------------------------------


@SIGNALS
@parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_told_to_stop_it_saves_and_exits_with_75(name, finished, live, faults, tmp_path):
    for stage, count in (("batch", 7), ("validation", 4), ("checkpoint write", 3)):
        with faults(f"{name} at {stage}"):
            runs = tmp_path / stage.replace(" ", "_")
            live(runs, fault=at(stage, count, name), code=75)
            assert saved_step(runs) == steps_of(runs)[-1] < 20 and (stage != "batch" or saved_step(runs) == 7)
            assert (runs / "run/interrupted").read_text() == f"{name}\n"
            live(runs)
            assert not (runs / "run/interrupted").exists()
            assert_same_run(runs / "run", finished)


@SIGNALS
@parametrize("fault, code", [(at("log", 1, "SIGTERM"), 75), (at("batch", 2, "twice"), 130)])
def test_before_the_first_step_and_at_a_second_ctrl_c_it_leaves_at_once(fault, code, live, faults, tmp_path):
    with faults(f"{fault['do']} at {fault['stage']}"):
        live(fault=fault, code=code)
        assert saved_step(tmp_path) == 0 and (tmp_path / "run/interrupted").exists()


COMPILING = """
import os, signal, subprocess
from runtime.signals import StopRequest
with StopRequest():
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@SIGNALS
def test_compilers_end_with_it(faults):
    with faults("SIGTERM while it compiles"):
        compiler = int(python("-c", COMPILING, code=75).stdout)
        wait_for(lambda: not is_alive(compiler), seconds=60)


@SIGNALS
def test_under_torchrun_the_launcher_of_the_docs_exits_with_75(data, faults, tmp_path):
    page = (ROOT / "docs/train.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n# launch.sh.*?)```", page, re.DOTALL)
    run = str(tmp_path / "run")
    for text, ours in {
        "runs/gpt_162m_4k-scale_invariant_p_rope-s0": run,
        "--nproc_per_node=8": "--nproc_per_node=2",
        ".venv/bin/python": sys.executable,
        "gpt_162m_4k": " ".join(arguments(data, tmp_path, "--steps 100000 --val_every 0")),
    }.items():
        script = script.replace(text, ours)
    assert script.count(run) == 1
    with faults("SIGTERM to torchrun"), open(tmp_path / "output", "w+") as output:
        process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdout=output, stderr=output,
                                   start_new_session=True, env=environment())
        try:
            wait_for(lambda: process.poll() is not None or newest(tmp_path / "run"))
            os.killpg(process.pid, signal.SIGTERM)  # as Slurm's scancel does
            assert process.wait(600) == 75, (tmp_path / "output").read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert saved_step(tmp_path) == steps_of(tmp_path)[-1] > 1


# ---- full disks, and numbers that are not finite ---------------------------------------------------------------------


@DISK
@table("stage, count, size", """
    checkpoint write | 1  | 0
    checkpoint write | 2  | 60000
    metrics          | 12 | 0
    log              | 9  | 0
""")
def test_full_disk(stage, count, size, finished, live, faults, tmp_path):
    with faults(f"full at {stage}"):
        output = live(fault=at(stage, int(count), "full", bytes=int(size)), code=2)
        assert str(tmp_path / "run") in error_of(output), output
        assert not list((tmp_path / "run").rglob("*.partial"))
        live()
        assert_same_run(tmp_path / "run", finished)


@NONFINITE
@parametrize("choice", ["skip", "stop"])
@parametrize("value, processes", [("nan", 1), ("inf", 1), ("gradient", 2)])
def test_a_nonfinite_step_is_skipped_or_ends_the_run(choice, value, processes, finished, live, faults, tmp_path):
    with faults(f"{value} on one rank of {processes}, {choice}"):
        fault = at("batch", 8, value, rank=processes - 1)
        code = 0 if choice == "skip" else 2 if processes == 1 else 1
        output = live(more=f"--on_nonfinite {choice}", fault=fault, processes=processes, code=code)
        if choice == "skip":
            steps, _ = steps_and_validations(tmp_path / "run")
            assert [r.get("skipped", 0) for r in steps] == [0] * 7 + [1] * 13
            assert [r["step"] for r in steps if r["train_loss"] is None] == ([] if value == "gradient" else [8])
            assert newest_state(tmp_path / "run")["progress"]["skipped"] == 1
            heads = [load_checkpoint(path)["model"]["head"] for path in list_checkpoints(tmp_path / "run/checkpoints")]
            assert not torch.equal(*heads)  # of steps 15 and 20: the later steps train
            return
        for named in ("step 8", "token 256", "chain_train_000002.bin", "step_000005.pt", "on_nonfinite"):
            assert named in error_of(output)
        assert saved_step(tmp_path) == 5 and not (tmp_path / "run/summary.json").exists()
        live(processes=processes)
        assert_close_run(tmp_path / "run", finished)


# ---- several ranks ---------------------------------------------------------------------------------------------------


@RANKS
@parametrize("do", ["kill", "hang", "memory"])
def test_a_lost_rank_ends_the_job(do, live, faults, tmp_path):
    with faults(f"{do} of a rank"):
        fault = at("batch", 1 if do == "memory" else 3, do, rank=1)
        output = live(more="--timeout 20", fault=fault, processes=2, code=1)
        assert re.search(r"rank 1\b.*--micro_batch_tokens" if do == "memory" else r"error: rank 0\b", output), output
        assert (tmp_path / "run/failed").exists() == (do == "memory")


@RANKS
def test_torchruns_restart_goes_on_by_itself(data, finished, faults, tmp_path):
    """One of two workers is killed in each of the first two attempts."""
    with faults("two kills of a worker under --max-restarts 2"):
        fault = json.dumps(at("step", 7, "kill", rank=1, attempts=[0, 1]))
        argv = arguments(data, tmp_path, "--resume auto")
        python(*TWO_RANKS, "--max-restarts=2", "tests/lives.py", fault, *argv)
        assert_close_run(tmp_path / "run", finished)


# ---- flipped bits ----------------------------------------------------------------------------------------------------


@CORRUPTION
def test_a_damaged_checkpoint_is_left_for_the_older_one(finished, live, faults, long, tmp_path):
    rng = random.Random(3)
    live(tmp_path / "killed", fault=at("step", 13), code=-signal.SIGKILL)
    for number in range(30 if long else 2):
        damage = ("flipped bit", "cut off")[number % 2]
        with faults(f"{damage} in the newest checkpoint of a run"):
            runs = shutil.copytree(tmp_path / "killed", tmp_path / str(number))
            damaged, before = list_checkpoints(runs / "run/checkpoints")
            content = damaged.read_bytes()
            bit = rng.randrange(8 * len(content))
            damaged.write_bytes(content[: bit // 8] if damage == "cut off" else flip(content, bit))
            output = live(runs)
            assert damaged.name in output and before.name in output, output
            assert damaged.with_name(damaged.name + ".damaged").exists()
            assert_same_run(runs / "run", finished)


@CORRUPTION
def test_a_rank_with_other_weights_ends_the_job_and_is_named(finished, live, faults, tmp_path):
    with faults("flipped bit in the weights of a rank of a run"):
        fault = at("comparison", 2, "flip", rank=1, place=561)  # before the checkpoint of step 10
        output = live(fault=fault, processes=2, code=1)
        assert re.search(r"\bstep 10\b", output) and "rank 1 " in output, output
        assert saved_step(tmp_path) == 5
        live(processes=2)
        assert_close_run(tmp_path / "run", finished)
