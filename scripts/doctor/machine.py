"""The machine: what is there, found out in `gather`; what follows from it, in functions of these facts alone."""

import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from configs.config import Config
from data.shards import read_manifest
from runtime.build import checkpoint_bytes
from runtime.checkpoint import space_needed
from runtime.device import compile_problem, cuda_failure, device_name, gpu_files, unused_gpu
from runtime.flops import training_flops_per_token
from runtime.run_folder import format_bytes, git_commit
from scripts.bench.project import build_optimizers_of
from scripts.bench.protocol import versions
from scripts.doctor.findings import Finding, Settings, one_line

SMI_FIELDS = ("name", "driver_version", "memory.total", "memory.used")  # memory in MiB
LAPTOP_FLOPS = 1e16  # of a run: hours on a CPU; more takes days
BUSY = 0.3  # of the cores, before the doctor begins
NO_COMPILER = "apt install gcc g++ python3-dev, or name a compiler in CC and CXX"


def about(settings: Settings) -> Iterator[dict[str, str]]:
    """Yield what every page of results says about the machine."""
    device = torch.device("cuda" if torch.cuda.is_available() and settings.config.device != "cpu" else "cpu")
    commit = git_commit(Path(__file__).parent) or "unknown"
    yield dict(device=device_name(device), versions=versions(device), commit=commit)


def machine(settings: Settings) -> Iterator[Finding]:
    """Yield what the machine has and lacks for this run."""
    facts = gather(settings.config)
    yield find_gpu(facts)
    if facts["gpus"]:
        yield from find_on_gpus(facts)
    yield find_load(facts)
    yield from find_room(facts)
    yield find_data(facts)
    yield find_compilers(facts)
    device = torch.device("cuda" if facts["gpus"] else "cpu")
    yield find_compile(device, compile_problem(device))
    if facts["gpus"]:
        yield find_nccl(len(facts["gpus"]), nccl_problem(), facts["nccl"])


# ---- the facts -------------------------------------------------------------------------------------------------------


def gather(config: Config) -> dict:
    """Return the facts about the machine that the functions below judge, as plain values."""
    gpus = []
    if torch.cuda.is_available() and config.device != "cpu":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = (properties.major, properties.minor)
            gpus.append(dict(name=properties.name, capability=capability, memory=properties.total_memory))
    run = Path(config.runs_dir) / config.name / "checkpoints"
    existing = next(path for path in [run, *run.absolute().parents] if path.exists())
    return dict(
        wanted=config.device,
        torch=torch.__version__,
        cuda=torch.version.cuda,
        codes=torch.cuda.get_arch_list() if gpus else [],
        files=gpu_files(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        failure="" if gpus else cuda_failure(),
        gpus=gpus,
        smi=nvidia_smi() if gpu_files() else [],
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else None,
        triton=find_spec("triton") is not None,
        processor=processor_name(),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        compilers={name: compiler(name) for name in ("CC", "CXX")},
        headers=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        memory=psutil.virtual_memory().total,
        memory_free=psutil.virtual_memory().available,
        disk=config.runs_dir,
        disk_free=shutil.disk_usage(existing).free,
        disk_needed=space_needed(run, checkpoint_bytes(build_optimizers_of(config, 1)), config.keep),
        data_dir=config.data_dir,
        data=read_manifest(Path(config.data_dir)) is not None,
        flops=training_flops_per_token(config) * config.batch_tokens * config.steps,
    )


def nvidia_smi() -> list[dict[str, str]]:
    """Return a dict a GPU of what nvidia-smi says of SMI_FIELDS; [] where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=15).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(SMI_FIELDS, (value.strip() for value in line.split(",")))) for line in lines]


def processor_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.machine()


def compiler(variable: str) -> str | None:
    """Return the path of the C (CC) or C++ (CXX) compiler that is used here, None without one."""
    usual = dict(CC=["gcc", "clang"], CXX=["g++", "clang++"])[variable]
    return next(filter(None, map(shutil.which, [os.environ.get(variable) or usual[0], *usual])), None)


# ---- what follows from them ------------------------------------------------------------------------------------------


def find_gpu(facts: dict) -> Finding:
    """Return whether there is a GPU to train on."""
    smi, files = facts["smi"], facts["files"]
    driver = f", driver {smi[0]['driver_version']}" if smi else ""
    if gpus := facts["gpus"]:
        names = ", ".join(f"{gpu['name']} ({format_bytes(gpu['memory'])})" for gpu in gpus)
        return Finding("GPU", "OK", f"{names}{driver}, torch {facts['torch']} for CUDA {facts['cuda']}", numbers=facts)
    if facts["wanted"] != "cpu":
        if problem := unused_gpu(files, facts["visible"], facts["cuda"], facts["failure"]):
            said, advice = problem.split("): ", 1)
            return Finding("GPU", "broken", f"{said}){driver}", advice, facts)
        if files and facts["cuda"] is None:
            said = f"{files[0]} is a GPU{driver}, but torch {facts['torch']} is a build for CPUs"
            return Finding("GPU", "slow", said, "install torch's build for CUDA (pytorch.org)", facts)
    said = f"none; {facts['processor']}, {facts['threads']} threads"
    if facts["flops"] > LAPTOP_FLOPS:
        return Finding(
            "GPU", "slow", said, "a CPU takes days or years for this preset: quickstart and mini are for it", facts
        )
    return Finding("GPU", "OK", said, numbers=facts)


def find_on_gpus(facts: dict) -> Iterator[Finding]:
    """Yield what the GPUs can do with this torch, and whether others use them."""
    for gpu in {gpu["name"]: gpu for gpu in facts["gpus"]}.values():
        major, minor = gpu["capability"]
        said = f"{gpu['name']} has compute capability {major}.{minor}"
        if not has_code(facts["codes"], major, minor):
            advice = "install a torch that was built for it (pytorch.org)"
            yield Finding("GPU code", "broken", f"{said}; torch has code for {', '.join(facts['codes'])}", advice)
        elif (major, minor) < (8, 0):
            advice = "an A100 or newer: our kernels need 8.0, and bfloat16 in hardware"
            yield Finding("GPU code", "slow", said, advice)
        else:
            yield Finding("GPU code", "OK", said)
    if not facts["triton"]:
        yield Finding("Triton", "slow", "not installed: no kernel of ours, nothing compiled", "pip install triton")
    for number, gpu in enumerate(facts["smi"]):
        if gpu["memory.used"].isdecimal() and int(gpu["memory.used"]) > 0.1 * float(gpu["memory.total"]):
            said = f"GPU {number}: {gpu['memory.used']} of {gpu['memory.total']} MiB are used"
            yield Finding(
                "GPU memory", "slow", said, "others are on it: see nvidia-smi; times and memory are not its own"
            )


def has_code(codes: list[str], major: int, minor: int) -> bool:
    """Tell whether a torch with code for these (of torch.cuda.get_arch_list) runs on a GPU of this capability: machine
    code (sm_) of the same major version and no later minor one, or PTX (compute_) of no later version."""
    for kind, digits in re.findall(r"(sm|compute)_(\d+)", " ".join(codes)):
        built = int(digits[:-1]), int(digits[-1])
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False


def find_load(facts: dict) -> Finding:
    """Return whether others use the cores, by the load of the last minute."""
    said = f"{facts['load']:.1f} of {facts['cores']} cores were in use"
    if facts["load"] <= BUSY * facts["cores"]:
        return Finding("load", "OK", said)
    advice = "times below are not this machine's own; threads that share a core wait for each other (OMP_NUM_THREADS)"
    return Finding("load", "slow", said, advice)


def find_room(facts: dict) -> Iterator[Finding]:
    """Yield whether memory and disk are enough."""
    needed, free = facts["disk_needed"], facts["disk_free"]
    said = f"{format_bytes(free)} free for {facts['disk']}, checkpoints need {format_bytes(needed)}"
    if free > needed:
        yield Finding("disk", "OK", said)
    else:
        yield Finding("disk", "broken", said, "make room, or --runs_dir on another disk, or a smaller --keep")
    said = f"{format_bytes(facts['memory_free'])} of {format_bytes(facts['memory'])} free"
    if facts["memory_free"] > needed:  # a checkpoint is gathered there before it is written
        yield Finding("memory", "OK", said)
    else:
        yield Finding("memory", "slow", said, "a checkpoint is gathered there: end other programs")


def find_data(facts: dict) -> Finding:
    """Return whether the training text is there; the other parts take random tokens instead."""
    if facts["data"]:
        return Finding("data", "OK", f"shards in {facts['data_dir']}")
    fineweb = "fineweb" in facts["data_dir"]
    advice = "python -m data.download fineweb10B" if fineweb else "bash scripts/quickstart.sh makes it"
    return Finding("data", "not run", f"no shards in {facts['data_dir']}: random tokens stand in for them", advice)


def find_compilers(facts: dict) -> Finding:
    """Return whether there are the compilers that our kernels, Triton and torch.compile take."""
    compilers = facts["compilers"]
    said = ", ".join(f"{variable} {path or 'not found'}" for variable, path in compilers.items())
    said += f", Python.h {'found' if facts['headers'] else 'not found'}"
    complete = all(compilers.values()) and facts["headers"]
    return Finding("compilers", "OK", said) if complete else Finding("compilers", "slow", said, NO_COMPILER)


def find_compile(device: torch.device, problem: str | None) -> Finding:
    """Return whether torch.compile works. problem: of compile_problem."""
    if problem is None:
        return Finding("torch.compile", "OK", f"compiles for {device.type}")
    said = f"does not work: {one_line(problem, 120)}; runs go on without it"
    return Finding("torch.compile", "slow", said, f"if it is the compiler: {NO_COMPILER}")


def find_nccl(gpus: int, problem: str | None, version: str | None) -> Finding:
    """Return whether GPUs can work together. problem: of nccl_problem."""
    if problem is None:
        return Finding("NCCL", "OK", f"{version}, a sum on one of {gpus} GPUs")
    state = "broken" if gpus > 1 else "slow"
    return Finding("NCCL", state, problem, "only several GPUs need it: one trains without; NCCL_DEBUG=INFO says more")


def nccl_problem() -> str | None:
    """Return why NCCL cannot sum a tensor over a group of one process, or None."""
    try:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        numbers = torch.arange(3.0, device="cuda")
        dist.all_reduce(numbers)
        return None if numbers.tolist() == [0, 1, 2] else f"its sum is wrong: {json.dumps(numbers.tolist())}"
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {one_line(error, 120)}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
