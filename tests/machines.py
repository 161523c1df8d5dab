"""Simulated machines that tests can kill or unplug. torchrun runs on them.

    with Network() as network:
        one = network.machine("node1")
        one.run(sys.executable, "-m", "torch.distributed.run", ..., output=file)

A machine has Linux namespaces: network, processes, mounts and host name. Making them needs root, and the programs
unshare, nsenter and ip. A bridge joins the machines. Files are shared, as on a cluster's disk. A machine ends with its
standard input, so nothing outlives the test's process.
"""

import subprocess
import tempfile

import psutil
from commands import ROOT, environment

SUBNET = "10.77.0"
ADDRESSES = {f"node{n}": (f"{SUBNET}.{n}", f"02:00:00:00:00:0{n}") for n in range(1, 10)}  # IP, MAC
SWITCH = """
ip link add bridge type bridge
ip link set bridge up
echo
read
"""
# All addresses are known in advance. Otherwise a lost machine would be "unreachable", not silent, after some seconds.
MACHINE = """
echo
read
mount --make-rprivate /
mount --bind {hosts} /etc/hosts
hostname {name}
echo 8 > /proc/sys/net/ipv4/tcp_retries2  # a dead connection ends after about 100 s, not 15 minutes
ip link set net0 address {mac}
ip addr add {ip}/24 dev net0
ip link set lo up
ip link set net0 up
{neighbours}
echo
read
"""


def missing():
    """Return why there can be no machines here, or None."""
    try:
        with Network() as network:
            network.machine("node1")
    except (OSError, subprocess.SubprocessError) as error:
        return f"this system gives no namespaces, or no bridge ({error})"


class Namespaces:
    """A shell in new namespaces. It is their first process."""

    def __init__(self, script, *kinds):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        command = ["unshare", "--fork", "--kill-child", *kinds, "bash", "-ec", script]
        self.process = subprocess.Popen(command, **pipes)
        self.wait()

    def wait(self):
        """Wait until the script writes an empty line."""
        line = self.process.stdout.readline()
        if line != "\n":
            raise OSError(line)

    def enter(self, *command, **options):
        """Start a command in the namespaces."""
        (first,) = psutil.Process(self.process.pid).children()
        entering = ["nsenter", f"--target={first.pid}", "--net", "--uts", "--mount", "--pid", f"--wd={ROOT}"]
        return subprocess.Popen([*entering, *command], **options)

    def kill(self):
        """Kill every process in the namespaces at the same instant."""
        for first in psutil.Process(self.process.pid).children():
            first.kill()
        self.process.wait(60)


class Network:
    """The switch between the machines."""

    def __enter__(self):
        self.switch = Namespaces(SWITCH, "--net")
        self.machines = {}
        return self

    def __exit__(self, *exception):
        for namespaces in (*self.machines.values(), self.switch):
            if namespaces.process.poll() is None:
                namespaces.kill()

    def machine(self, name):
        """Start a machine, perhaps again after it was killed."""
        if name in self.machines:
            self.ip(f"link del {name}")  # unless the kernel has deleted it
        machine = self.machines[name] = Machine(self, name)
        return machine

    def ip(self, arguments):
        return self.switch.enter("ip", *arguments.split(), stderr=subprocess.DEVNULL).wait(60)

    def unplug(self, name):
        """Lose all packets to and from a machine from now on, without notice, as when a cable is pulled."""
        assert self.ip(f"link set {name} nomaster") == 0

    def plug(self, name):
        assert self.ip(f"link set {name} up master bridge") == 0


class Machine(Namespaces):
    """A machine of a network. After `kill`, the other machines' kernels learn that the connections ended.

    After `unplug` they do not, as at a loss of power.
    """

    def __init__(self, network, name):
        ip, mac = ADDRESSES[name]
        others = [pair for pair in ADDRESSES.values() if pair != (ip, mac)]
        others = "\n".join(f"ip neigh add {a} lladdr {b} dev net0 nud permanent" for a, b in others)
        with tempfile.NamedTemporaryFile("w") as hosts:  # the mount keeps it when its name has gone
            hosts.write("127.0.0.1 localhost\n" + "".join(f"{a} {node}\n" for node, (a, _) in ADDRESSES.items()))
            hosts.flush()
            script = MACHINE.format(name=name, ip=ip, mac=mac, hosts=hosts.name, neighbours=others)
            super().__init__(script, "--net", "--uts", "--mount", "--pid", "--mount-proc")
            ends = f"net0 netns {self.process.pid} type veth peer name {name} netns {network.switch.process.pid}"
            subprocess.run(["ip", "link", "add", *ends.split()], check=True)
            network.plug(name)
            self.process.stdin.write("\n")
            self.process.stdin.flush()
            self.wait()

    def run(self, *command, output, **variables):
        """Start a command and append its output to a file. A machine runs one command at a time."""
        with open(output, "ab") as file:
            streams = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            self.command = self.enter(*command, env=environment(GLOO_SOCKET_IFNAME="net0", **variables), **streams)
