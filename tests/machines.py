"""Simulated machines that tests can kill or unplug. torchrun runs on them.

    with Network() as network:
        one = network.machine("node1")
        one.run(sys.executable, "-m", "torch.distributed.run", ..., output=file)

A machine has Linux namespaces: network, processes, mounts and host name. Making them needs root. A switch in this
process passes packets between their TUN devices, and can lose packets; so the kernel needs no netem. Files are shared,
as on a cluster's disk. Everything belongs to the test's process. When it ends, the kernel removes all of it.
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
    """Return why there can be no machines here, or None."""
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
    """The switch between the machines."""

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
        """Start a machine, perhaps again after it was killed. The number at the end of its name is its address."""
        number = int(name.lstrip("abcdefghijklmnopqrstuvwxyz-"))
        self.plug(name)
        self.machines[number] = machine = Machine(self, name, number)
        return machine

    def unplug(self, name):
        """Lose all packets to and from a machine from now on, without notice, as when a cable is pulled."""
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
    """A machine of a network."""

    def __init__(self, network, name, number):
        self.network, self.name, self.device, self.init, self.space = network, name, None, 0, None
        self.control, remote = socket.socketpair()
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, __file__, name, str(number), str(remote.fileno()), str(os.getpid())],
                pass_fds=[remote.fileno()], cwd=ROOT, env=environment(),
            )
        self.control.settimeout(60)
        message, devices, *_ = socket.recv_fds(self.control, 4096, 1)
        if not devices:
            self.kill()
            raise OSError(f"{name}: {message.decode() or 'ended'}")
        self.init = int(message)  # process id of its first process on the real machine
        os.set_blocking(devices[0], False)
        self.device, self.space = devices[0], os.open(f"/proc/{self.init}/ns/net", os.O_RDONLY)

    def run(self, *command, output, **variables):
        """Start a command and append its output to a file. A machine runs one command at a time."""
        request = dict(command=[str(word) for word in command], output=str(output), variables=variables)
        self.control.send(json.dumps(request).encode())

    def wait(self, seconds):
        """Return the exit code of the command. Raise TimeoutError, or OSError when the machine is gone."""
        self.control.settimeout(seconds)
        if not (answer := self.control.recv(4096)):
            raise OSError(f"{self.name} is gone")
        return json.loads(answer)

    def poll(self):
        """Return the exit code of the command, None while it runs. Raise OSError when the machine is gone."""
        with contextlib.suppress(BlockingIOError):
            return self.wait(0)

    def kill(self):
        """Kill every process on it at the same instant.

        The other machines' kernels learn that the connections ended. After `unplug` they do not, as at a loss of power.
        """
        self.process.kill()  # the machine's processes die with it
        self.process.wait(60)
        end, device = time.monotonic() + 60, self.device
        while Path(f"/proc/{self.init}").exists() and time.monotonic() < end:
            time.sleep(0.01)
        while device is not None and select.select([device], [], [], 0.05)[0] and time.monotonic() < end:
            time.sleep(0.01)  # its last packets
        self.control.close()
        self.device = None
        for descriptor in (device, self.space) if device is not None else ():
            os.close(descriptor)  # with these goes the network


def environment():
    """Return the environment of commands. gloo listens on the machine's network device."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TORCHELASTIC_"))}
    return kept | dict(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GLOO_SOCKET_IFNAME="net0", PYTHONPATH=str(ROOT))


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
    for arguments in (f"addr add {SUBNET}.{number}/24 dev net0", "link set net0 up", "link set lo up"):
        subprocess.run(["ip", *arguments.split()], check=True)
    return device


def mount():
    """Let /proc show this machine's processes, and /etc/hosts the names of all machines."""
    hosts = "127.0.0.1 localhost\n" + "".join(f"{SUBNET}.{n} node{n}\n" for n in range(1, 10))
    with tempfile.NamedTemporaryFile("w") as file:  # the mount keeps it when its name has gone
        file.write(hosts)
        file.flush()
        for arguments in ("--make-rprivate /", "-t proc proc /proc", f"--bind {file.name} /etc/hosts"):
            subprocess.run(["mount", *arguments.split()], check=True)
    Path("/proc/sys/net/ipv4/tcp_retries2").write_text("8")  # a dead connection ends after about 100 s, not 15 minutes


def serve(control):
    """Run the commands that come through `control`; answer with their exit codes."""
    while message := control.recv(65536):
        request = json.loads(message)
        with open(request["output"], "ab", buffering=0) as output:
            variables = os.environ | request["variables"]
            pipes = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            code = subprocess.run(request["command"], cwd=ROOT, env=variables, **pipes).returncode
        control.send(json.dumps(code).encode())


if __name__ == "__main__":
    be(sys.argv[1], *map(int, sys.argv[2:]))
