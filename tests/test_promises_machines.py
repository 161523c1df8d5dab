"""What docs/reliability.md promises of runs on several machines, with the faults really injected (tests/chaos.py)."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from chaos import FAULTS, PATIENCE, Job, compare, disturbed
from lives import holding
from machines import Network, missing
from test_train import make_data, train_here, train_on

pytestmark = pytest.mark.slow
MACHINES = (15, "machines that are lost are named, and the run goes on with those that are left or come back")
SHORT = dict(steps=60, save_every=5, val_every=20)
BETWEEN = "import socket, time; began = time.monotonic(); "
BETWEEN += "print(socket.socket().connect_ex(('node2', 9)), time.monotonic() - began)"


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def network():
    with Network() as network:
        yield network


# ---- the machines themselves -----------------------------------------------------------------------------------------


def test_packets_are_late_and_lost(network, tmp_path):
    output = tmp_path / "output"
    first, _ = network.machine("node1"), network.machine("node2")

    def connect(limit=60):
        output.unlink(missing_ok=True)
        first.run("timeout", limit, sys.executable, "-c", BETWEEN, output=output)
        code = first.wait(limit + 60)
        return code, [float(word) for word in output.read_text().split()]

    code, (answer, _) = connect()
    assert code == 0 and answer == 111  # ECONNREFUSED: it is there, and nobody listens
    network.latency = 0.2
    code, (answer, seconds) = connect()
    assert code == 0 and answer == 111 and seconds >= 0.4
    network.latency, network.loss = 0.0, 1.0
    assert connect(2) == (124, [])
    network.loss, before = 0.0, network.dropped
    network.unplug("node2")
    assert connect(2) == (124, []) and network.dropped > before
    network.plug("node2")
    assert connect()[0] == 0
    with open(f"/proc/{first.init}/ns/net") as before:  # while it is open its number is not given to another
        first.kill()
        after = os.stat(f"/proc/{network.machine('node1').init}/ns/net")
        assert not os.path.samestat(os.fstat(before.fileno()), after)


PARENT = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"


def test_orphans_and_the_dead_are_not_the_command(network):
    machine = network.machine("node1")

    def wait_for(workers):
        end = time.monotonic() + 60
        while len((found := machine.processes())[0]) != bool(workers) or len(found[1]) != workers:
            assert time.monotonic() < end, found
            time.sleep(0.01)
        return found

    machine.run(sys.executable, "-c", PARENT, output="/dev/null")
    [agent], [worker] = wait_for(workers=1)
    os.kill(agent, signal.SIGKILL)
    wait_for(workers=0)
    assert Path(f"/proc/{worker}/stat").read_text().split()[3] == str(machine.init)  # an orphan
    assert machine.wait(60) == -signal.SIGKILL
    machine.run(sys.executable, "-c", PARENT, output="/dev/null")
    [agent], [younger] = wait_for(workers=1)
    os.kill(worker, signal.SIGKILL)  # nobody waits for it: it stays, as a zombie
    assert machine.processes() == ([agent], [younger])


LEFT = """
import sys, time
sys.path.insert(0, "tests")
from machines import Network
with Network() as network:
    machines = [network.machine("node1"), network.machine("node2")]
    for machine in machines:
        machine.run("sleep", "600", output="/dev/null")
    while not all(machine.processes()[0] for machine in machines):
        time.sleep(0.01)
    print(*[pid for machine in machines for pid in (machine.init, *machine.processes()[0])], flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_of_machines_whose_test_is_killed(possible):
    process = subprocess.Popen([sys.executable, "-c", LEFT], stdout=subprocess.PIPE, text=True)
    pids = process.stdout.readline().split()
    assert len(pids) == 4 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"of {pids} some are left"
        time.sleep(0.02)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise(*MACHINES)
@pytest.mark.parametrize("seed", [0])
def test_chaos_costs_no_bit(seed, data, faults, long, tmp_path):
    """On the same number of processes. scripts/torture.sh chaos goes on with this for as long as one likes."""
    rng = random.Random(seed)
    few = dict(processes=2, steps=300) if long else SHORT | dict(processes=1)
    kinds = rng.sample(sorted(FAULTS), len(FAULTS)) if long else ["machine killed", "link down for 1 s"]
    reference, fields = tmp_path / "undisturbed", {k: v for k, v in few.items() if k != "processes"}
    train_on(2 * few["processes"], data, reference, **dict(val_every=100, save_every=20) | fields)
    done = iter(kinds)
    with Network() as network:
        for kind, name, seconds in disturbed(network, data, tmp_path / "runs", rng, kinds, steady=True, **few):
            with faults(next(done)):
                faults.figures.append(f"{kind} ({name}): it trained again after {seconds:.0f} s")
    assert compare(tmp_path / "runs/run", reference / "run", steady=True) == (0, 0)


@pytest.fixture
def held(tmp_path):
    """Variables under which a run waits after each checkpoint, and what lets it go on. So a fault is never too late."""
    folder = tmp_path / "holding"
    folder.mkdir()
    return holding(folder), (folder / "sitecustomize.py").unlink


@pytest.fixture(scope="module")
def of_one(data, tmp_path_factory):
    return train_here(data, tmp_path_factory.mktemp("one"), **SHORT)


@pytest.mark.promise(*MACHINES)
@pytest.mark.parametrize("how", ["without power", "link down for ever"])
def test_lost_machine_is_named_and_the_others_go_on(how, data, of_one, network, faults, long, held, tmp_path):
    """Three of one process, whose shares of the 8 sequences of a step differ, then two."""
    if how != "without power" and not long:
        pytest.skip("only the long form waits until TCP gives up")
    variables, release = held
    with faults(f"machine {how}"):
        job = Job(network, data, tmp_path, machines=3, processes=1, steady=False, variables=variables, **SHORT)
        job.wait_for_words("on 3 x CPU")
        job.lost.add("node3")
        network.unplug("node3")
        if how == "without power":
            job.machines["node3"].kill()
        release()
        seconds = job.wait_for_words("without an answer from rank 2 (on node3)")
        job.finish()
        faults.figures.append(f"machine {how}: named after {seconds:.0f} s")
        if how != "without power":
            assert job.machines["node3"].wait(PATIENCE) != 0
        compare(job.folder, of_one, steady=False)


@pytest.mark.promise(*MACHINES)
def test_machine_that_comes_back_is_taken_in(data, of_one, network, faults, tmp_path):
    """While the run goes on without it: it saves, and no step is lost. There are two processes until one is killed, and
    one until there are two again."""
    variables = holding(tmp_path, file=f"'{tmp_path}/held ' + os.environ.get('WORLD_SIZE', '')")
    alone, both = (tmp_path / f"held {processes}" for processes in (1, 2))
    alone.touch(), both.touch()
    with faults("machine killed, and back"):
        job = Job(network, data, tmp_path / "runs", processes=1, steady=False, variables=variables, **SHORT)
        job.wait_for_words("on 2 x CPU")
        job.lost.add("node2")
        job.machines["node2"].kill()
        both.unlink()
        job.wait_for_words("on 1 x CPU")
        seen = job.said(10**9).count("on 2 x CPU")
        job.lost.clear()
        job.start("node2")
        seconds = job.wait_for(lambda said: said.count("on 2 x CPU") > seen, "that it is two again")
        faults.figures.append(f"machine killed, and back: taken in after {seconds:.0f} s")
        alone.unlink()
        job.finish()
        said = job.said(10**9)
        assert "another process: stopped after step" in said or "SIGTERM: stopped after step" in said
        compare(job.folder, of_one, steady=False)


@pytest.mark.promise(*MACHINES)
def test_without_the_machine_of_the_rendezvous_the_job_ends_and_starts_elsewhere(
    data, of_one, network, faults, held, tmp_path
):
    variables, release = held
    with faults("machine of the rendezvous killed"):
        job = Job(network, data, tmp_path, processes=1, steady=False, variables=variables, **SHORT)
        job.wait_for_words("on 2 x CPU")
        began = time.monotonic()
        job.machines["node1"].kill()
        release()
        assert job.machines["node2"].wait(PATIENCE) == 1
        assert "without an answer from rank 0 (on node1)" in job.said(10**9)
        faults.figures.append(f"machine of the rendezvous killed: the job ended after {time.monotonic() - began:.0f} s")
        job.lost.add("node1")
        job.rendezvous = "node2"
        job.start("node2")
        job.finish()
        compare(job.folder, of_one, steady=False)
