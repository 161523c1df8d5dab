"""Machines that tests can lose: network, process and host name of their own on this one, with torchrun on them.

    with Network() as network:
        one = network.machine("node1")
        one.run(sys.executable, "-m", "torch.distributed.run", ..., output=file)

A machine is one namespace each of network, processes, mounts and host name (Linux, as root). What joins them is a
switch in this process, which hands packets from one TUN device to another and can lose them: a kernel without netem
will do. Files are shared, as the disk of a cluster is. Nothing has a name outside and everything hangs
on the process of the test: it ends, however it ends, and the kernel removes processes, namespaces and devices.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEW_MOUNTS, NEW_HOST_NAME, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000  # <sched.h>
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, <sys/prctl.h>
SET_INTERFACE, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # <linux/if_tun.h>: TUNSETIFF, IFF_TUN | IFF_NO_PI
SUBNET = "10.77.0"
libc = ctypes.CDLL(None, use_errno=True)


def missing():
    """Why there can be no machines here, or None."""
    if os.geteuid() or not Path("/dev/net/tun").exists():
        return "only root makes namespaces, and they are joined through /dev/net/tun"
    with contextlib.suppress(OSError):
        with Network() as network:
            network.machine("node1")
            return None
    return "this system gives no namespaces (network, processes, mounts, host name), even to root"


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# ---- the network -----------------------------------------------------------------------------------------------------


class Network(threading.Thread):
    """The switch."""

    def __init__(self):
        super().__init__(daemon=True)
        self.machines, self.unplugged = {}, set()  # machines by the last number of their address
        self.closed = False

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        for machine in list(self.machines.values()):
            machine.kill()
        self.closed = True
        self.join(60)

    def machine(self, name):
        """A new machine, or the same anew after it was killed. The number that its name ends with is its address."""
        number = int(name.lstrip("abcdefghijklmnopqrstuvwxyz-"))
        self.plug(name)
        self.machines[number] = machine = Machine(self, name, number)
        return machine

    def unplug(self, name):
        """Lose all packets to and from a machine from now on; nobody is told, as when a cable is pulled."""
        self.unplugged |= {int(name[-1])}

    def plug(self, name):
        self.unplugged -= {int(name[-1])}

    def run(self):
        while not self.closed:
            devices = {m.device: number for number, m in list(self.machines.items()) if m.device is not None}
            try:
                ready = select.select(list(devices), [], [], 0.05)[0]
            except (OSError, ValueError):  # a device has just been closed
                continue
            for device in ready:
                with contextlib.suppress(OSError, TypeError):  # a machine has just gone
                    packet = os.read(device, 65536)
                    to = packet[19]
                    known = packet[0] >> 4 == 4 and to in self.machines
                    if known and not {to, devices[device]} & self.unplugged:
                        os.write(self.machines[to].device, packet)


class Machine:
    """One of them; `with` is the network's."""

    def __init__(self, network, name, number):
        self.network, self.name, self.device, self.init, self.space = network, name, None, 0, None
        self.control, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, name, str(number), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()], cwd=ROOT, env=environment(),
            )  # fmt: skip
        self.control.settimeout(60)
        said, devices, *_ = socket.recv_fds(self.control, 4096, 1)
        if not devices:
            self.kill()
            raise OSError(f"{name}: {said.decode() or 'ended'}")
        self.init = int(said)  # its first process, as this machine numbers it
        os.set_blocking(devices[0], False)
        self.device, self.space = devices[0], os.open(f"/proc/{self.init}/ns/net", os.O_RDONLY)

    def run(self, *command, output, **variables):
        """Start a command, whose output goes to the end of a file. One at a time."""
        words = dict(command=[str(word) for word in command], output=str(output), variables=variables)
        self.command = b"\0".join(os.fsencode(word) for word in words["command"]) + b"\0"
        self.control.send(json.dumps(words).encode())

    def wait(self, seconds):
        """The exit code of the command. Raise TimeoutError, or OSError when the machine is gone."""
        self.control.settimeout(seconds)
        if not (said := self.control.recv(4096)):
            raise OSError(f"{self.name} is gone")
        return json.loads(said)

    def poll(self):
        """The exit code of the command, None while it runs. Raise OSError when the machine is gone."""
        with contextlib.suppress(BlockingIOError):
            return self.wait(0)

    def kill(self):
        """Kill every process on it at the same instant. The others' kernels are told that connections ended, unless
        the machine was unplugged before: then it has lost its power."""
        self.process.kill()  # what hangs on it goes too
        self.process.wait(60)
        end, device = time.monotonic() + 60, self.device
        while Path(f"/proc/{self.init}").exists() and time.monotonic() < end:
            time.sleep(0.01)
        while device is not None and select.select([device], [], [], 0.05)[0] and time.monotonic() < end:
            time.sleep(0.01)  # what its processes still had to say
        self.control.close()
        self.device = None
        for descriptor in (device, self.space) if device is not None else ():
            os.close(descriptor)  # with these goes the network

    def processes(self):
        """The command's process, while it runs, and those that it started, torchrun's agent and its workers: lists of
        ids. Not the orphans of one that was killed, which become children of the machine's first process, too."""
        parents = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = entry.read_text().rsplit(")", 1)[1].split()[:2]
                if state != "Z":
                    parents[int(entry.parent.name)] = int(parent)
        agents = [pid for pid, parent in parents.items() if parent == self.init and self.is_command(pid)]
        return agents, [pid for pid, parent in parents.items() if parent in agents]

    def is_command(self, pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_bytes() == self.command
        return False


def environment():
    """That of commands: gloo listens on the device, and has no other."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TORCHELASTIC_"))}
    return own | dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GLOO_SOCKET_IFNAME="net0", PYTHONPATH=str(ROOT))


# ---- on the machine --------------------------------------------------------------------------------------------------


def be(name, number, control, parent):
    checked(libc.prctl(DIE_WITH_PARENT, signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)
    with socket.socket(fileno=control) as control:
        try:
            checked(libc.unshare(NEW_MOUNTS | NEW_HOST_NAME | NEW_PROCESSES | NEW_NETWORK))
            socket.sethostname(name)
            inside, outside = os.pipe()
            if first := os.fork():
                device = make_device(number)
                socket.send_fds(control, [str(first).encode()], [device])
                os.close(device)
                os.write(outside, b"+")
                control.close()
                os.waitpid(first, 0)
                os._exit(0)
            checked(libc.prctl(DIE_WITH_PARENT, signal.SIGKILL))
            if os.read(inside, 1) == b"+":
                mount()
                serve(control)
        except OSError as error:
            control.send(str(error).encode())
    os._exit(1)


def make_device(number):
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", b"net0", TUN_WITHOUT_HEADER))
    for words in (f"addr add {SUBNET}.{number}/24 dev net0", "link set net0 up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def mount():
    """Let /proc show this machine's processes, and /etc/hosts the names of all machines."""
    hosts = "127.0.0.1 localhost\n" + "".join(f"{SUBNET}.{n} node{n}\n" for n in range(1, 10))
    with tempfile.NamedTemporaryFile("w") as file:  # the mount keeps it when its name has gone
        file.write(hosts)
        file.flush()
        for words in ("--make-rprivate /", "-t proc proc /proc", f"--bind {file.name} /etc/hosts"):
            subprocess.run(["mount", *words.split()], check=True)
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text("8")  # a dead connection ends after about 100 s, not 15 minutes


def serve(control):
    """Run the commands that come through `control`; answer with their exit codes."""
    while words := control.recv(65536):
        words = json.loads(words)
        with open(words["output"], "ab", buffering=0) as output:
            variables = os.environ | words["variables"]
            pipes = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            code = subprocess.run(words["command"], cwd=ROOT, env=variables, **pipes).returncode
        control.send(json.dumps(code).encode())


if __name__ == "__main__":
    be(sys.argv[1], *map(int, sys.argv[2:]))
