"""What docs/reliability.md promises of runs on several machines, with the faults injected (tests/machines.py)."""

import contextlib
import sys
import time

import pytest
from commands import TWO_RANKS, parametrize, promise, shared, slow
from lives import holding
from machines import Network, missing
from test_train import arguments, assert_close_run, assert_same_run, train, train_here

from runtime.metrics import read_metrics

pytestmark = slow
MACHINES = promise(14, "machines that are lost are named, and the run goes on with those that are left or come back")
TOLERANCE = 2e-3  # nats; by 1 process instead of 4, 300 undisturbed steps come to 6e-4
PATIENCE = 480  # seconds without a step after which a run counts as lost; torchrun's exit barrier alone may wait 300
TIMEOUT = 10  # seconds after which a rank is given up: --timeout
QUICK = "join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10,read_timeout=20"
SHORT = "--steps 60 --save_every 5 --val_every 20"


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def network():
    with Network() as network:
        yield network


class Job:
    """A run of train_gpt.py on machines of a network. torchrun on each is started again when it ends, as by a cluster.

    steady: True waits for all machines (--nnodes 2). False goes on with the machines that are there (--nnodes 1:2).
    """

    def __init__(self, network, data, runs, *, machines=2, steady=False, variables={}):
        self.variables = variables | dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.network, self.runs, self.folder = network, runs, runs / "run"
        nodes = machines if steady else f"1:{machines}"
        torchrun = f"--max-restarts=1000 --rdzv_backend=c10d --rdzv_id=chaos --rdzv_conf={QUICK} --nnodes={nodes}"
        argv = arguments(data, runs, f"--resume auto --timeout {TIMEOUT} {SHORT}")
        self.command = [*torchrun.split(), "--nproc_per_node=1", "train_gpt.py", *argv]
        self.rendezvous = "node1"
        self.machines, self.lost = {}, set()  # lost: those that do not come back
        runs.mkdir(exist_ok=True)
        for number in range(machines):
            self.start(f"node{number + 1}")

    def start(self, name):
        machine = self.machines.get(name)
        if machine is None or machine.process.poll() is not None:
            self.machines[name] = machine = self.network.machine(name)
        torchrun = sys.executable, "-m", "torch.distributed.run", f"--rdzv_endpoint={self.rendezvous}:29400"
        machine.run(*torchrun, *self.command, output=self.runs / f"{name}.txt", **self.variables)

    def tend(self):
        """Start torchrun again where it ended before the run was finished. Return whether torchrun runs anywhere."""
        for name in self.machines.keys() - self.lost:
            if self.machines[name].command.poll() is not None and not self.finished:
                self.start(name)
        return any(self.machines[name].command.poll() is None for name in self.machines.keys() - self.lost)

    @property
    def finished(self):
        return (self.folder / "summary.json").exists()

    @property
    def step(self):
        with contextlib.suppress(OSError):
            return max([record["step"] for record in read_metrics(self.folder / "metrics.jsonl")], default=0)
        return 0

    @property
    def output(self):
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.runs.glob("node*.txt")))

    def wait_for(self, condition, patience=PATIENCE):
        """Wait until a function returns True, or a text is in the output. Start torchrun again meanwhile."""
        end = time.monotonic() + patience
        while not (condition() if callable(condition) else condition in self.output):
            assert time.monotonic() < end, f"{condition} in {patience} s:\n{self.output[-9000:]}"
            self.tend()
            time.sleep(0.05)

    def reach(self, step):
        self.wait_for(lambda: self.finished or self.step >= step)

    def finish(self):
        """Wait until the run is finished and has left the machines."""
        while not self.finished:
            self.reach(self.step + 1)
        self.wait_for(lambda: not self.tend(), PATIENCE + 300)


@MACHINES
def test_a_killed_machine_and_a_lost_link_cost_no_bit(data, network, faults, tmp_path):
    """The number of processes stays the same, so all numbers do."""
    undisturbed = train(data, tmp_path / "undisturbed", SHORT, TWO_RANKS)
    job = Job(network, data, tmp_path / "runs", steady=True)
    with faults("machine killed"):
        job.reach(7)
        job.machines["node2"].kill()
        job.start("node2")
    with faults("link down for 1 s"):
        job.reach(max(20, job.step + 1))
        network.unplug("node1")
        time.sleep(1)
        network.plug("node1")
    job.finish()
    assert_same_run(job.folder, undisturbed)


@pytest.fixture
def held(tmp_path):
    """Return variables that make a run wait after each checkpoint, and a function that ends the waiting."""
    folder = tmp_path / "holding"
    folder.mkdir()
    return holding(folder), (folder / "sitecustomize.py").unlink


@shared
def of_one(data, shared_path):
    return train_here(data, shared_path, SHORT)


@MACHINES
@parametrize("failure", ["without power", "link down for ever"])
def test_the_others_go_on_without_a_lost_machine(failure, data, of_one, network, faults, long, held, tmp_path):
    """Three machines with one process each have unequal shares of the 8 sequences of a step. Then there are two."""
    if not long:
        pytest.skip("half a minute and more each: only in the long form")
    variables, release = held
    with faults(f"machine {failure}"):
        job = Job(network, data, tmp_path, machines=3, variables=variables)
        job.wait_for("3 x CPU")
        job.lost.add("node3")
        network.unplug("node3")
        if failure == "without power":
            job.machines["node3"].kill()
        release()
        job.wait_for("error: rank ")
        job.finish()
        if failure != "without power":
            assert job.machines["node3"].command.wait(PATIENCE) != 0
        assert_close_run(job.folder, of_one, TOLERANCE)


@MACHINES
def test_machine_that_comes_back_is_taken_in(data, of_one, network, faults, tmp_path):
    """The run goes on with one process until the machine is back. Then it saves, and two go on. No step is lost."""
    variables = holding(tmp_path, file=f"'{tmp_path}/held ' + os.environ.get('WORLD_SIZE', '')")
    alone, both = (tmp_path / f"held {processes}" for processes in (1, 2))
    alone.touch(), both.touch()
    with faults("machine killed, and back"):
        job = Job(network, data, tmp_path / "runs", variables=variables)
        job.wait_for("2 x CPU")
        job.lost.add("node2")
        job.machines["node2"].kill()
        both.unlink()
        job.wait_for("1 x CPU")
        times = job.output.count("2 x CPU")
        job.lost.clear()
        job.start("node2")
        job.wait_for(lambda: job.output.count("2 x CPU") > times)
        alone.unlink()
        job.finish()
        assert "SIGTERM: " in (job.folder / "log.txt").read_text()
        assert_close_run(job.folder, of_one, TOLERANCE)


@MACHINES
def test_without_the_machine_of_the_rendezvous_the_job_ends_and_starts_elsewhere(
    data, of_one, network, faults, held, tmp_path
):
    variables, release = held
    with faults("machine of the rendezvous killed"):
        job = Job(network, data, tmp_path, variables=variables)
        job.wait_for("2 x CPU")
        job.machines["node1"].kill()
        release()
        assert job.machines["node2"].command.wait(PATIENCE) == 1  # by the process or by torchrun
        job.lost.add("node1")
        job.rendezvous = "node2"
        job.start("node2")
        job.finish()
        assert_close_run(job.folder, of_one, TOLERANCE)
