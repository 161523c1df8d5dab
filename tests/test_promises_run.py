"""What docs/reliability.md promises about runs, each with the fault really injected (tests/lives.py)."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lives import ROOT, STAGES, Lives
from test_train import arguments, assert_close_run, assert_same_run, make_data

from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.metrics import read_metrics

pytestmark = pytest.mark.slow
KILLS = (1, "killed at any instant, a run goes on bit for bit")
RESUME = (2, "resumed on another division of the work, a run goes on with the same losses; another run is refused")
SIGNALS = (3, "told to stop, a run saves within a step")
DISK = (4, "a full or read-only disk costs no checkpoint")
NONFINITE = (7, "a step that is not finite changes no weight")
RANKS = (8, "a rank that dies or hangs is named, and torchrun's restart goes on")
LONG = (11, "memory, files and time of a step do not grow")
LOCK = (12, "a run folder has one user")
CORRUPTION = (13, "flipped bits in checkpoints and in the memory of a rank are found")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def lives():
    with Lives() as lives:
        yield lives


@pytest.fixture(scope="module")
def undisturbed(data, lives, tmp_path_factory):
    """The run folder of 20 steps. Not to be written to."""
    runs = tmp_path_factory.mktemp("undisturbed")
    code, said = lives.live(arguments(data, runs), runs / "output")
    assert code == 0, said
    return runs / "run"


def at(stage, count=1, do="kill", moment=0.0, **more):
    return dict(stage=stage, count=count, do=do, moment=moment, **more)


def one_line(said):
    """The single error line of what was said."""
    assert "Traceback" not in said, said
    (line,) = [line for line in said.splitlines() if "error: " in line]
    return line


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.promise(*KILLS)
def test_killed_at_random_moments_in_every_stage(data, lives, faults, long, tmp_path):
    rng = random.Random(time.time_ns() if long else 1)
    each = 14 if long else 2
    stages = STAGES * each
    rng.shuffle(stages)
    fields = dict(steps=10 * len(stages), save_every=2, val_every=4, keep=1 + rng.randrange(2))
    code, said = lives.live(arguments(data, tmp_path / "undisturbed", **fields), tmp_path / "output")
    assert code == 0, said
    words = arguments(data, tmp_path, resume="auto", **fields)
    for stage in stages:
        with faults(f"in {stage}"):
            often = 3 if stage == "step" else 12 if "write" in stage and "checkpoint" not in stage else 1
            fault = at(stage, rng.randint(1, often), moment=rng.choice([0, 1, rng.random()]), seconds=0.02)
            code, said = lives.live(words, tmp_path / "output", fault)
            assert code == -signal.SIGKILL, said
            records = read_metrics(tmp_path / "run" / "metrics.jsonl")
            steps = [r["step"] for r in records if "train_loss" in r]
            checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
            saved = load_checkpoint(checkpoint)["step"] if checkpoint else 0
            assert steps == list(range(1, len(steps) + 1)) and len(steps) >= saved
    code, said = lives.live(words, tmp_path / "output")
    assert code == 0, said
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed" / "run")
    assert sorted(p.name for p in (tmp_path / "run").rglob("*.partial")) == []


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.promise(*RESUME)
def test_resumed_in_other_micro_batches_and_processes(data, undisturbed, lives, faults, long, tmp_path):
    rng = random.Random(2)
    for number in range(40 if long else 4):
        processes = 2 if long and number % 10 == 0 else 1
        with faults(f"resumed in other micro-batches by {processes}"):
            runs, sizes = tmp_path / str(number), rng.sample([16, 32, 64, 128], 3)
            for size in sizes[:2]:
                words = arguments(data, runs, resume="auto", micro_batch_tokens=size)
                code, said = lives.live(words, tmp_path / "output", at("step", rng.randint(2, 9)))
                assert code == -signal.SIGKILL, said
            words = arguments(data, runs, resume="auto", micro_batch_tokens=sizes[2])
            code, said = lives.live(words, tmp_path / "output") if processes == 1 else on_two_ranks(words, {})[:2]
            assert code == 0, said
            assert_close_run(runs / "run", undisturbed)


@pytest.mark.promise(*RESUME)
def test_another_run_or_other_data_is_refused_unless_forced(data, lives, faults, tmp_path):
    words = arguments(data, tmp_path, resume="auto")
    assert lives.live(words, tmp_path / "output", at("step", 8))[0] == -signal.SIGKILL
    log = (tmp_path / "run/log.txt").read_text()
    other_data = make_data(tmp_path / "other", seed=1)
    changes = dict(
        seed=1, method="p_rope", num_layers=1, num_heads=1, model_dim=64, train_length=32, batch_tokens=256, steps=21,
        cooldown_steps=5, muon_lr=0.03, adam_betas=(0.8, 0.95), head_lr=0.003,
    )  # fmt: skip
    for change in [*({field: value} for field, value in changes.items()), dict(data_dir=other_data)]:
        with faults("resumed as another run"):
            words = arguments(**dict(data=data, runs=tmp_path, resume="auto") | change)
            code, said = lives.live(words, tmp_path / "output")
            named = "other data" if "data_dir" in change else f"{next(iter(change))} "
            assert code == 2 and named in one_line(said) and "--force" in said, said
            assert (tmp_path / "run/log.txt").read_text() == log
    for change in (dict(muon_lr=0.03), dict(data_dir=other_data)):
        with faults("resumed as another run by force"):
            runs = tmp_path / next(iter(change))
            shutil.copytree(tmp_path / "run", runs / "run")
            words = arguments(**dict(data=data, runs=runs, resume="auto") | change)
            code, said = lives.live([*words, "--force"], tmp_path / "output")
            assert code == 0 and "resumed at step 5" in said, said


# ---- signals ---------------------------------------------------------------------------------------------------------

PLACES = ["step", "validation", "checkpoint write", "rename of the checkpoint", "metrics write"]


@pytest.mark.promise(*SIGNALS)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_told_to_stop_it_saves_and_exits_with_75(name, data, undisturbed, lives, faults, long, tmp_path):
    rng = random.Random(name)
    for place in PLACES if long else rng.sample(PLACES, 2):
        for count in (2, 3):
            with faults(f"{name} in {place}"):
                runs = tmp_path / f"{place}{count}"
                words = arguments(data, runs, resume="auto")
                code, said = lives.live(words, tmp_path / "output", at(place, count, name, rng.random()))
                assert code == 75 and f"{name}: stopped after step" in said, said
                steps = [r["step"] for r in read_metrics(runs / "run/metrics.jsonl") if "train_loss" in r]
                saved = load_checkpoint(latest_checkpoint(runs / "run/checkpoints"))["step"]
                first, last = map(int, re.search("it happened after (.*) to (.*) steps", said).groups())
                assert saved == steps[-1] and first <= saved <= last + 1
                assert (runs / "run/interrupted").read_text() == f"{name}\n"
                code, said = lives.live(words, tmp_path / "output")
                assert code == 0 and not (runs / "run/interrupted").exists(), said
                assert_same_run(runs / "run", undisturbed)


@pytest.mark.promise(*SIGNALS)
def test_before_the_first_step_and_at_a_second_ctrl_c_it_leaves_at_once(data, lives, faults, tmp_path):
    for place, do, expected in (("log write", "SIGTERM", 75), ("validation", "SIGUSR1", 75), ("step", "twice", 130)):
        with faults(f"{do} in the first {place}"):
            runs = tmp_path / place
            code, said = lives.live(arguments(data, runs), tmp_path / "output", at(place, 1, do))
            assert code == expected, said
            assert latest_checkpoint(runs / "run/checkpoints") is None
            assert (runs / "run/interrupted").exists()


@pytest.mark.promise(*SIGNALS)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.usefixtures("started")
def test_while_it_imports_there_is_nothing_to_save(name, data, faults, tmp_path):
    with faults(f"{name} while it imports"):
        process = started("train_gpt.py", *arguments(data, tmp_path))
        wait_for(lambda: imports(process, "libtorch"), process)
        process.send_signal(signal.Signals[name])
        said = process.communicate(timeout=600)[0].decode()
        assert process.returncode == 75 and said == f"{name}: stopped; there was nothing to save\n", said
        assert not (tmp_path / "run").exists()


@pytest.mark.promise(*SIGNALS)
@pytest.mark.parametrize("command", ["scripts.evaluate", "scripts.needle", "scripts.sweep", "data.text"])
@pytest.mark.usefixtures("started")
def test_ctrl_c_while_a_command_imports_is_a_word(command, faults):
    with faults("Ctrl-C while a command imports"):
        process = started("-m", command, "nothing")
        wait_for(lambda: imports(process, "/numpy/"), process)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=600)[0].decode()
        assert process.returncode in (130, -signal.SIGINT) and said == "interrupted\n", said


@pytest.mark.promise(*SIGNALS)
@pytest.mark.usefixtures("started")
def test_ctrl_c_in_data_text_is_a_word_and_leaves_no_shards(faults, tmp_path):
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    words = (" ".join(f"{(i * k) % 9973:x}" for k in range(1, 40)) for i in range(60_000))
    text.write_text("".join(json.dumps(dict(text=line)) + "\n" for line in words))
    with faults("Ctrl-C while text is encoded"):
        process = started("-m", "data.text", text, "--tokenizer", "bpe:300", "--out", out)
        wait_for(lambda: list(out.glob("*.bin*")), process)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=600)[0].decode()
        assert process.returncode in (130, -signal.SIGINT) and said.endswith("interrupted\n"), said
        assert "Traceback" not in said and list(out.glob("*.bin*")) == []


def started(*words):
    command, environment = [sys.executable, *map(str, words)], os.environ | dict(OMP_NUM_THREADS="1")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def imports(process, library):
    """Whether the process has begun to load a library."""
    return library in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.promise(*SIGNALS)
def test_compilers_end_with_it(data, faults, tmp_path):
    with faults("SIGTERM while it compiles"):
        compiler = dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), TORCHINDUCTOR_COMPILE_THREADS="2")
        environment = os.environ | compiler | dict(OMP_NUM_THREADS="1")
        command = [sys.executable, "train_gpt.py", *map(str, arguments(data, tmp_path, compile="model"))]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        compilers = []
        while not compilers and process.poll() is None:
            compilers = [p for p in session(process.pid) if "cc1plus" in p]
        assert compilers, process.stdout.read()
        process.terminate()
        assert process.wait(600) == 75
        end = time.monotonic() + 600
        while left := session(process.pid):
            assert time.monotonic() < end, left
            time.sleep(0.05)


def session(leader):
    """The command lines of the processes that were started from a process."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=,args=", "-s", str(leader)], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.split()[1][0] != "Z"]


@pytest.mark.promise(*SIGNALS)
def test_under_torchrun_the_launcher_of_the_docs_exits_with_75(data, undisturbed, faults, tmp_path):
    page = (ROOT / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"```bash\n(#!/bin/bash\n# launch.sh.*?)```", page, re.DOTALL)
    script = block.replace("runs/gpt_162m_4k-scale_invariant_p_rope-s0", str(tmp_path / "run"))
    script = script.replace("--nproc_per_node=8", "--nproc_per_node=2").replace(".venv/bin/python", sys.executable)
    script = script.replace("gpt_162m_4k", " ".join(map(str, arguments(data, tmp_path, steps=100_000, val_every=0))))
    assert script.count(str(tmp_path / "run")) == 1
    with faults("SIGTERM to torchrun"):
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | dict(OMP_NUM_THREADS="1"),
        )  # fmt: skip
        try:
            wait_for(lambda: len(read_metrics(tmp_path / "run/metrics.jsonl")) > 3, process)
            os.killpg(process.pid, signal.SIGTERM)  # as Slurm's scancel does
            assert process.wait(600) == 75, process.stdout.read().decode()[-3000:]
        finally:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)])
        last = read_metrics(tmp_path / "run/metrics.jsonl")[-1]["step"]
        assert load_checkpoint(latest_checkpoint(tmp_path / "run/checkpoints"))["step"] == last > 1


def wait_for(condition, process, seconds=600):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate()[0].decode()[-3000:])


# ---- disk ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.promise(*DISK)
def test_full_or_read_only_disk(data, undisturbed, lives, faults, long, disk, tmp_path):
    rng = random.Random(4)
    places = ["checkpoint write", "metrics write", "log write", "rename of the checkpoint"]
    bitten = 0
    for number in range(48 if long else 6):
        place, do = places[number % 4], "read_only" if number % 3 == 2 else "full"
        with faults(f"{do.replace('_', '-')} in {place}"):
            runs = disk / str(number)
            count = 2 if "checkpoint" in place else 12 if place == "metrics write" else 9
            fault = at(place, count, do, disk=str(disk), leave=rng.choice([0, 5000, 40_000, rng.randrange(300_000)]))
            fault["places"] = [str(runs / "run" / name) for name in ("checkpoints", "metrics.jsonl", "log.txt")]
            words = arguments(data, runs, resume="auto")
            code, said = lives.live(words, tmp_path / "output", fault)
            finished = code == 0  # what was left was enough
            bitten += not finished
            if not finished:
                assert code == 2 and str(runs / "run") in one_line(said), said
                assert re.search("No space left|Read-only file system", one_line(said)), said
                whole = latest_checkpoint(runs / "run/checkpoints")
                assert do == "read_only" or not list(runs.rglob("*.partial"))
                metrics = runs / "run/metrics.jsonl"
                done = max([r["step"] for r in read_metrics(metrics)], default=0) if metrics.exists() else 0
                least = (done - 1) // 5 * 5 - 5  # one more may have been under way
                assert (load_checkpoint(whole)["step"] if whole else 0) >= least
            if do == "read_only":
                subprocess.run(["umount", *fault["places"]], check=True)
            (disk / "filler").unlink(missing_ok=True)
            code, said = lives.live(words, tmp_path / "output")
            assert code == 0, said
            assert_same_run(runs / "run", undisturbed)
            shutil.rmtree(runs)
    assert bitten > number // 2


@pytest.mark.promise(*DISK)
@pytest.mark.parametrize("place, count", [("checkpoint write", 2), ("rename of the checkpoint", 2)])
def test_a_disk_with_room_for_two_checkpoints_is_enough_to_go_on(place, count, data, lives, faults, disk, tmp_path):
    """Of 3.3 MB each on 8 MB, when one is kept; the second kill leaves another that has not its name yet."""
    words = arguments(data, disk, resume="auto", keep=1, model_dim=128)
    with faults(f"killed in {place} on a small disk"):
        assert lives.live(words, tmp_path / "output", at(place, count))[0] == -signal.SIGKILL
        (saved,) = (disk / "run/checkpoints").glob("*.pt")
        assert shutil.disk_usage(disk).free < 2 * saved.stat().st_size
        code, said = lives.live(words, tmp_path / "output")
        assert code == 0, said
    (disk / "run/summary.json").unlink()
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 50_000))
    code, said = lives.live(words, tmp_path / "output")
    needs = re.search(r"needs ([\d.]+) MB of disk, but ([\d.]+) kB are free: make room", one_line(said))
    assert code == 2 and 3 < float(needs[1]) < 4 and 0 < float(needs[2]) <= 50  # and none is 0.0


@pytest.mark.promise(*DISK)
def test_with_wandb_too_a_full_disk_is_the_last_line(data, faults, disk, tmp_path):
    with faults("full in metrics write, with wandb"):
        count = FULL_AFTER.format(disk=str(disk))
        words = arguments(data, disk, wandb="offline", steps=2000, cooldown_steps=0, val_every=0)
        process = started("-c", count, *words)
        said = process.communicate(timeout=600)[0].decode()
        assert process.returncode == 2, said
        assert one_line(said) == said.splitlines()[-1] and "No space left" in said and "socket" not in said, said


FULL_AFTER = """
import sys
sys.path.insert(0, "tests")
import lives, train_gpt
from runtime.metrics import Metrics

write, records = Metrics.write, []

def filling(self, record):
    records.append(1)
    if len(records) == 30:
        lives.fill_disk(dict(disk="{disk}", leave=0))
    write(self, record)

Metrics.write = filling
train_gpt.main()
"""


# ---- numbers that are not finite -------------------------------------------------------------------------------------

AFTER = """
import json, sys
sys.path.insert(0, "tests")
import lives, torch, train_gpt

steps, weights, step = [], {}, train_gpt.train_step

def watched(model, *rest):
    steps.append(len(steps) + 1)
    weights[len(steps)] = [p.detach().clone() for p in model.parameters()]
    watched.parameters = list(model.parameters())
    return step(model, *rest)

train_gpt.train_step = watched
fault, poisoned = json.loads(sys.argv[1]), int(sys.argv[2])
exit = lives.os._exit

def report(code):
    after = weights.get(poisoned + 1) or [p.detach() for p in watched.parameters]
    same = all(torch.equal(a, b) for a, b in zip(weights[poisoned], after))
    print(f"rank {lives.os.environ.get('RANK', 0)}: weights {'kept' if same else 'changed'}", flush=True)
    exit(code)

lives.os._exit = report
lives.live(sys.argv[3:], fault)
"""


@pytest.mark.promise(*NONFINITE)
@pytest.mark.parametrize("value", ["nan", "inf", "gradient"])
def test_not_finite_on_one_rank(value, data, faults, long, tmp_path):
    short = {"nan": [(1, "skip"), (2, "stop")], "inf": [(2, "stop")], "gradient": [(2, "skip")]}
    for processes, on in ((1, "stop"), (2, "stop"), (2, "skip")) if long else short[value]:
        with faults(f"{value} on one rank of {processes}, {on}"):
            runs = tmp_path / f"{processes}{on}"
            # Step 8 comes while the checkpoint of step 5 is still being written.
            fault = json.dumps(at("step", 8, value, rank=processes - 1, disk_seconds=1))
            words = [fault, "8", *map(str, arguments(data, runs, on_nonfinite=on))]
            script = tmp_path / "after.py"
            script.write_text(AFTER)
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            done = subprocess.run(
                [sys.executable, *(launcher if processes > 1 else []), script, *words], cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
                env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
            )  # fmt: skip
            said = done.stdout
            assert [f"rank {r}: weights kept" in said for r in range(processes)] == [True] * processes, said
            if on == "skip":
                assert done.returncode == 0, said
                steps = [r for r in read_metrics(runs / "run/metrics.jsonl") if "train_loss" in r]
                assert [r.get("skipped", 0) for r in steps] == [0] * 7 + [1] * 13
                assert load_checkpoint(latest_checkpoint(runs / "run/checkpoints"))["skipped"] == 1
                continue
            assert done.returncode == (2 if processes == 1 else 1), said
            (line,) = [line for line in said.splitlines() if "error: " in line]
            dump = runs / "run/nonfinite_000008.json"
            for words in ("step 8: ", "token 256 of chain_train_000002.bin", "step_000005.pt", str(dump)):
                assert words in line
            assert dump.stat().st_size < 50_000 and len(json.loads(dump.read_text())["ranks"]) == processes


@pytest.mark.promise(*NONFINITE)
def test_the_dump_says_which_sequence_and_which_parameter(data, lives, faults, tmp_path):
    """Weights that overflow are a fault that is still there when the step is repeated."""
    with faults("overflow in the model"):
        words = arguments(data, tmp_path, embedding_lr=1e30, muon_lr=1e30)
        code, said = lives.live(words, tmp_path / "output")
        assert code == 2, said
        (dump,) = (tmp_path / "run").glob("nonfinite_*.json")
        (rank,) = json.loads(dump.read_text())["ranks"]
        assert len(rank["sequence_losses"]) == 8
        assert any(row[3] for row in rank["parameters"].values())  # gradients that are not finite


# ---- several ranks ---------------------------------------------------------------------------------------------------


def on_two_ranks(words, fault, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "tests/lives.py", json.dumps(fault), *map(str, words)], cwd=ROOT, text=True, timeout=600,
        env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - began


@pytest.mark.promise(*RANKS)
@pytest.mark.parametrize(
    "do, says",
    [
        ("kill", "without an answer from rank 1"),
        ("hang", "without an answer from rank 1"),
        ("memory", "rank 1 is out of memory"),
    ],
)
def test_lost_rank_is_named_and_ends_the_job(do, says, data, faults, long, tmp_path):
    for stage in ("step", "validation") if long else ("step",):
        with faults(f"{do} of a rank in a {stage}"):
            words = arguments(data, tmp_path / stage, timeout=15)
            code, said, seconds = on_two_ranks(words, at(stage, 3, do, rank=1))
            assert code == 1 and says in said, said
            faults.figures.append(
                f"{do} in a {stage}: the job ended after {seconds:.0f} s, start included (timeout 15 s)"
            )


@pytest.mark.promise(*RANKS)
def test_torchruns_restart_goes_on_by_itself(data, undisturbed, faults, tmp_path):
    """One of two workers is killed in each of the first two attempts."""
    with faults("two kills of a worker under --max-restarts 2"):
        words = arguments(data, tmp_path, resume="auto")
        faulty = at("step", 7, "kill", rank=1, attempts=[0, 1])
        code, said, _ = on_two_ranks(words, faulty, "--max-restarts=2")
        assert code == 0, said
        assert_close_run(tmp_path / "run", undisturbed)


# ---- flipped bits ----------------------------------------------------------------------------------------------------


@pytest.mark.promise(*CORRUPTION)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(data, undisturbed, lives, faults, long, tmp_path):
    rng = random.Random(3)
    words = arguments(data, tmp_path / "killed", resume="auto")
    assert lives.live(words, tmp_path / "output", at("step", 13))[0] == -signal.SIGKILL
    for number in range(30 if long else 3):
        damage = ("flipped bit", "flipped bit", "cut off")[number % 3]
        with faults(f"{damage} in the newest checkpoint of a run"):
            runs = tmp_path / str(number)
            shutil.copytree(tmp_path / "killed", runs)
            newest = runs / "run/checkpoints/step_000010.pt"
            content = bytearray(newest.read_bytes())
            place = rng.randrange(len(content))
            content[place] ^= 1 << rng.randrange(8)
            newest.write_bytes(content[:place] if damage == "cut off" else content)
            code, said = lives.live(arguments(data, runs, resume="auto"), tmp_path / "output")
            assert code == 0 and "resumed at step 5" in said, said
            log = (runs / "run/log.txt").read_text()
            for text in (said, log):
                assert re.search(r"step_000010\.pt is damaged \(.*\): step_000005\.pt is taken instead", text), text
            assert (runs / "run/checkpoints/step_000010.pt.damaged").exists()
            assert_same_run(runs / "run", undisturbed)


@pytest.mark.promise(*CORRUPTION)
def test_a_rank_with_other_weights_ends_the_job_and_is_named(data, undisturbed, faults, long, tmp_path):
    """Before the validation after step 10, or between it and the checkpoint; then the run goes on from step 5."""
    rng = random.Random(6)
    for rank, count in ((0, 4), (1, 5)) if long else ((1, 5),):
        with faults("flipped bit in the weights of a rank of a run"):
            runs = tmp_path / str(rank)
            flipped = dict(bucket=rng.randrange(4), bit=rng.randrange(31))
            fault = at("comparison", count, "flip", rank=rank, disk_seconds=1, **flipped)
            code, said, _ = on_two_ranks(arguments(data, runs), fault)
            (line,) = [line for line in said.splitlines() if "error: " in line]
            assert code == 1 and f"step 10: the weights of rank {rank} on " in line, said
            assert latest_checkpoint(runs / "run/checkpoints").name == "step_000005.pt"
            code, said, _ = on_two_ranks(arguments(data, runs, resume="auto"), {})
            assert code == 0 and "resumed at step 5" in said, said
            assert_close_run(runs / "run", undisturbed)


# ---- long runs -------------------------------------------------------------------------------------------------------


@pytest.mark.promise(*LONG)
def test_nothing_grows(data, faults, long, tmp_path):
    steps = 20_000 if long else 600
    fields = dict(num_layers=1, batch_tokens=16, cooldown_steps=0, save_every=steps // 20, val_every=steps // 10)
    words = [str(word) for word in arguments(data, tmp_path, steps=steps, **fields)]
    folder, samples = tmp_path / "run", []
    metrics = folder / "metrics.jsonl"
    with faults(f"{steps} steps"):
        process = subprocess.Popen(
            [sys.executable, "train_gpt.py", *words], cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None:
            time.sleep(0.1 if long else 0.02)
            with contextlib.suppress(OSError, IndexError):  # it begins or ends
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                files = sum(path.suffix != ".partial" for path in folder.rglob("*"))
                samples.append((metrics.stat().st_size, pages, files))
        assert process.wait() == 0
        warm = [sample for sample in samples if sample[0] > 0.2 * metrics.stat().st_size]  # it has saved and validated
        quarter = len(warm) // 4
        memory = [statistics.median(pages for _, pages, _ in part) for part in (warm[:quarter], warm[-quarter:])]
        growth = memory[1] / memory[0] - 1
        assert growth < 0.01, f"memory grew by {growth:.2%}"
        assert len({files for _, _, files in warm}) <= 3  # a checkpoint more for a moment; the summary
        lines = [line for line in metrics.read_text().splitlines() if "val_loss" not in line]
        longest = max(len(line) + 1 for line in lines)
        assert longest <= 400
        seconds = [16 / json.loads(line)["tokens_per_second"] for line in lines]
        # The fastest tenth of a quarter of the steps: what other processes on the machine disturb least.
        fast = [
            statistics.quantiles(part, n=10)[0]
            for part in (seconds[steps // 5 :][: steps // 4], seconds[-steps // 4 :])
        ]
        faults.figures.append(
            f"{steps} steps: memory {growth:+.2%} from the second quarter to the last, {len(warm)} samples; at most "
            f"{longest} bytes of metrics a step; time of a step {fast[1] / fast[0] - 1:+.1%}"
        )
        if long:
            assert fast[1] / fast[0] < 1.1


# ---- one user a folder -----------------------------------------------------------------------------------------------


@pytest.mark.promise(*LOCK)
def test_second_process_is_refused_until_the_first_is_killed(data, lives, faults, tmp_path):
    words = [str(word) for word in arguments(data, tmp_path, resume="auto", steps=100_000, val_every=0, save_every=100)]
    first = subprocess.Popen(
        [sys.executable, "train_gpt.py", *words], cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(lambda: latest_checkpoint(tmp_path / "run/checkpoints"), first)
    with faults("second process"):
        code, said = lives.live(words, tmp_path / "output")
        assert code == 2 and f"in use by process {first.pid}" in one_line(said), said
        assert first.poll() is None
    with faults("second process after the first was killed"):
        first.kill()
        first.wait()
        code, said = lives.live(words, tmp_path / "output", at("step", 3, "SIGTERM"))
        assert code == 75, said
