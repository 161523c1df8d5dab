"""A run on two machines, to which everything happens that a cluster does to one: bash scripts/torture.sh chaos

Prints a line for every fault, and at the end a table of them. Runs follow one another until the time is up. Each ends
with the weights and losses of one to which nothing happened: bit for bit where it waits for both machines
(--nnodes 2), up to rounding (TOLERANCE) where it goes on with one (--nnodes 1:2). What happens is drawn from the seed;
at which instruction it strikes differs.
"""

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machines import Network, missing
from test_train import arguments, make_data, steps_and_validations

from runtime.checkpoint import latest_checkpoint, load_checkpoint
from runtime.metrics import read_metrics

TOLERANCE = 2e-3  # nats of the loss of a step; by 1 process instead of 4, 300 steps undisturbed come to 6e-4
PATIENCE = 480  # seconds without a step after which a run counts as lost; torchrun's exit barrier alone may wait 300
TIMEOUT = 10  # seconds after which a rank is given up: --timeout
QUICK = "join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10,read_timeout=20"


class Job:
    """A run of train_gpt.py on machines of a network: torchrun on each, started anew where it ended, as by a cluster.

    steady: whether all machines are waited for (--nnodes 2) or those that are there go on (--nnodes 1:2).
    """

    def __init__(self, network, data, runs, *, machines=2, processes=2, steady=True, variables={}, **fields):
        self.variables = variables | dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.network, self.runs, self.folder = network, runs, runs / "run"
        fields = dict(resume="auto", timeout=TIMEOUT, steps=300, val_every=100, save_every=20) | fields
        self.command = [
            "--max-restarts=1000", "--rdzv_backend=c10d",
            "--rdzv_id=chaos", f"--rdzv_conf={QUICK}", f"--nproc_per_node={processes}",
            f"--nnodes={machines if steady else f'1:{machines}'}", "train_gpt.py", *arguments(data, runs, **fields),
        ]  # fmt: skip
        self.names = [f"node{number}" for number in range(1, machines + 1)]
        self.rendezvous = "node1"
        self.machines, self.codes, self.lost = {}, {}, set()  # lost: those that do not come back
        runs.mkdir(exist_ok=True)
        for name in self.names:
            self.start(name)

    def start(self, name):
        machine = self.machines.get(name)
        if machine is None or machine.device is None:
            self.machines[name] = machine = self.network.machine(name)
        self.codes[name] = None
        torchrun = sys.executable, "-m", "torch.distributed.run", f"--rdzv_endpoint={self.rendezvous}:29400"
        output = self.runs / f"{name}.txt"
        machine.run(*torchrun, *self.command, output=output, **self.variables)

    def tend(self):
        """Start torchrun again on the machines where it ended before the run was finished."""
        for name in self.names:
            if name in self.lost:
                continue
            if self.codes[name] is None:
                self.codes[name] = self.machines[name].poll()
            if self.codes[name] is not None and not self.finished:
                self.start(name)

    @property
    def finished(self):
        return (self.folder / "summary.json").exists()

    @property
    def step(self):
        with contextlib.suppress(OSError):
            return max([record["step"] for record in read_metrics(self.folder / "metrics.jsonl")], default=0)
        return 0

    def reach(self, step, patience=PATIENCE):
        """Wait until the run is past this step, or finished. Return the seconds that it took."""
        began = time.monotonic()
        while not self.finished and self.step < step:
            assert time.monotonic() < began + patience, f"no step {step} in {patience} s:\n{self.said()}"
            self.tend()
            time.sleep(0.05)
        return time.monotonic() - began

    def finish(self, patience=PATIENCE):
        """Wait until the run is finished and has left the machines."""
        began, at = time.monotonic(), self.step
        while not self.finished:
            self.reach(at + 1, patience)
            at = self.step
        while any(self.codes[name] is None for name in self.names if name not in self.lost):
            assert time.monotonic() < began + patience + 300, f"torchrun does not end:\n{self.said()}"
            self.tend()
            time.sleep(0.05)

    def wait_for_words(self, words, patience=PATIENCE):
        """Wait until a machine has said this. Return the seconds that it took."""
        return self.wait_for(lambda said: words in said, words, patience)

    def wait_for(self, true_of, words, patience=PATIENCE):
        """Wait until this is true of what the machines have said. Return the seconds that it took."""
        began = time.monotonic()
        while not true_of(said := self.said(10**9)):
            assert time.monotonic() < began + patience, f"nobody said {words!r} in {patience} s:\n{said[-9000:]}"
            self.tend()
            time.sleep(0.1)
        return time.monotonic() - began

    def said(self, characters=3000):
        return "\n".join(
            f"==== {path.name} ====\n{path.read_text(errors='replace')[-characters:]}"
            for path in sorted(self.runs.glob("node*.txt"))
        )

    # ---- faults ------------------------------------------------------------------------------------------------------

    def signal(self, name, number, rng, agent=False):
        """Send a signal to a worker of the machine, or to its agent. Return the process's id, if there was one."""
        agents, workers = self.machines[name].processes()
        with contextlib.suppress(ProcessLookupError, IndexError):
            pid = rng.choice(agents if agent else sorted(workers))
            os.kill(pid, number)
            return pid

    def stop(self, name, rng):
        """Tell torchrun to stop, and wait until it has."""
        pid = self.signal(name, signal.SIGTERM, rng, agent=True)
        end = time.monotonic() + PATIENCE
        while pid in self.machines[name].processes()[0]:
            assert time.monotonic() < end, f"torchrun does not stop:\n{self.said()}"
            time.sleep(0.05)

    def pause(self, name, rng, seconds):
        pid = self.signal(name, signal.SIGSTOP, rng)
        time.sleep(seconds)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def unplug(self, name, seconds):
        self.network.unplug(name)
        time.sleep(seconds)
        self.network.plug(name)

    def lose(self, name, seconds, power=False):
        """Kill all processes of a machine at once; with `power`, nobody hears of it. It is back after some seconds."""
        if power:
            self.network.unplug(name)
        self.machines[name].kill()
        time.sleep(seconds)
        self.start(name)

    def disturb(self, latency, loss, seconds):
        self.network.latency = self.network.jitter = latency
        self.network.loss = loss
        time.sleep(seconds)
        self.network.latency = self.network.jitter = self.network.loss = 0.0


FAULTS = {  # what happens to the job on a machine; times in seconds
    "worker killed": lambda job, name, rng: job.signal(name, signal.SIGKILL, rng),
    "worker stopped for 1 s": lambda job, name, rng: job.pause(name, rng, 1),
    "worker stopped for 20 s": lambda job, name, rng: job.pause(name, rng, 2 * TIMEOUT),
    "torchrun killed": lambda job, name, rng: job.signal(name, signal.SIGKILL, rng, agent=True),
    "torchrun told to stop": lambda job, name, rng: job.stop(name, rng),
    "machine killed": lambda job, name, rng: job.lose(name, rng.choice([0, 5])),
    "machine without power": lambda job, name, rng: job.lose(name, rng.choice([0, 15]), power=True),
    "link down for 1 s": lambda job, name, rng: job.unplug(name, 1),
    "link down for 30 s": lambda job, name, rng: job.unplug(name, 30),
    "packets late and lost": lambda job, name, rng: job.disturb(0.02, 0.02, 5),
}


def disturbed(network, data, runs, rng, faults, *, steady, say=print, **fields):
    """Yield (kind, machine, seconds until the run was past the step at which it happened), one fault after another."""
    job = Job(network, data, runs, steady=steady, **fields)
    at = rng.randint(3, 25)
    for kind in faults:
        job.reach(at)
        if job.finished:
            break
        at, name = job.step, rng.choice(job.names)
        say(f"step {at}: {kind}, {name}")
        FAULTS[kind](job, name, rng)
        yield kind, name, job.reach(at + 1)
        at = job.step + rng.randint(2, 25)
    job.finish()


def compare(folder, reference, steady):
    """Raise AssertionError where a run differs from one to which nothing happened. Return the largest differences of a
    step's loss and of a weight."""
    (ours, our_validations), (theirs, their_validations) = map(steps_and_validations, (folder, reference))
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    assert [r["step"] for r in our_validations] == [r["step"] for r in their_validations]
    loss = max(abs(a["train_loss"] - b["train_loss"]) for a, b in zip(ours, theirs))
    states = [load_checkpoint(latest_checkpoint(f / "checkpoints")) for f in (folder, reference)]
    weights, expected = (state["model"] for state in states)
    assert weights.keys() == expected.keys()
    weight = max((weights[name] - expected[name]).abs().max().item() for name in weights)
    if steady:
        assert loss == weight == 0 and all(torch.equal(weights[name], expected[name]) for name in weights)
    assert loss <= TOLERANCE, f"a loss differs by {loss}"
    return loss, weight


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    began, rng = time.monotonic(), random.Random(args.seed)
    count, lost, slowest, runs = collections.Counter(), collections.Counter(), collections.defaultdict(float), []

    def say(words):
        print(f"{time.monotonic() - began:6.0f} s  {words}", flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        folder = Path(folder)
        data, quiet = make_data(folder / "data"), folder / "undisturbed"
        with Network() as network:
            Job(network, data, quiet).finish()
        say("the undisturbed run is there")
        pending = []
        while time.monotonic() < began + 60 * args.minutes:
            steady, place = len(runs) % 2 == 0, folder / str(len(runs))
            if len(pending) < 8:  # every kind as often as any other
                pending += rng.sample(sorted(FAULTS), len(FAULTS))
            plan, pending = pending[:8], pending[8:]
            say(f"run {len(runs) + 1}: {'--nnodes 2' if steady else '--nnodes 1:2'}")
            done = []
            try:
                with Network() as network:
                    for kind, name, seconds in disturbed(network, data, place, rng, plan, steady=steady, say=say):
                        say(f"... training again after {seconds:.0f} s")
                        done.append(kind)
                        slowest[kind] = max(slowest[kind], seconds)
                    loss, weight = compare(place / "run", quiet / "run", steady)
                runs.append((steady, len(done), loss, weight))
                say(f"run {len(runs)} ended as it should: losses differ by {loss:.1e}, weights by {weight:.1e}")
            except AssertionError as error:
                say(f"LOST: {error}")
                lost.update(plan[: len(done) + 1][-1:])
                runs.append((steady, len(done), float("nan"), float("nan")))
            count.update(done)
            pending = plan[len(done) :] + pending
            shutil.rmtree(place)
    report(args, count, lost, slowest, runs)
    return 1 if lost else 0


def report(args, count, lost, slowest, runs):
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"\n    bash scripts/torture.sh chaos --minutes {args.minutes:g} --seed {args.seed}\n")
    cores = len(os.sched_getaffinity(0))
    print(f"Commit {commit}; torch {torch.__version__}, {cores} cores for 2 machines of 2 processes each.")
    print("\n| fault | injected | survived | lost | at most until it trained again, s |\n|---|---:|---:|---:|---:|")
    for kind in FAULTS:
        print(f"| {kind} | {count[kind] + lost[kind]} | {count[kind]} | {lost[kind]} | {slowest[kind]:.0f} |")
    print(f"| all | {sum(count.values()) + sum(lost.values())} | {sum(count.values())} | {sum(lost.values())} | |")
    for steady, words in ((True, "--nnodes 2"), (False, "--nnodes 1:2")):
        own = [run for run in runs if run[0] == steady and run[2] == run[2]]
        if own:
            loss, weight = (max(run[i] for run in own) for i in (2, 3))
            print(f"\n{len(own)} runs with {words}: losses differ by {loss:.1e} nats at most, weights by {weight:.1e}.")


if __name__ == "__main__":
    sys.exit(main())
