"""runtime/: kills, full disks, second processes and unreadable files."""

import math
import os
import random
import subprocess
import sys
from contextlib import closing
from unittest.mock import Mock, call

import pytest
import torch
from commands import CORRUPTION, names, parametrize, python, read_json, refuses, start, table, write_files
from test_data import flip

from configs.config import Config
from files import append, replace_file
from runtime.build import compile_model
from runtime.checkpoint import DamagedCheckpoint, latest_checkpoint, load_checkpoint, load_newest, save_checkpoint
from runtime.device import choose_ptxas, peak_flops
from runtime.metrics import Metrics, finish_mirror, read_metrics, start_mirror
from runtime.processes import World, start_processes
from runtime.run_folder import RunFolder, git_commit

CPU = torch.device("cpu")


# ---- processes


def test_without_a_gpu_cuda_is_refused_and_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert start_processes("auto") == start_processes("cpu") == World(0, 1, CPU)
    with refuses("--device cpu"):
        start_processes("cuda")


def test_ranks_that_cannot_all_compile_are_refused():
    class Mixed(World):
        def gather(self, value):
            return [value, "off, as it lacks a compiler", "on"]

    with refuses("rank 2"):
        compile_model(Mock(), Config(compile="off"), Mixed(0, 3, CPU))


@parametrize("setting", [{}, dict(PYTORCH_CUDA_ALLOC_CONF="x:y", TORCHINDUCTOR_COMPILE_THREADS="7")])
def test_a_rank_binds_its_gpu_and_keeps_the_settings_of_the_user(setting, monkeypatch):
    kept = os.environ.keys() - {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_COMPILE_THREADS"}
    torchrun = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node1 MASTER_PORT=29500"
    torchrun = dict(word.split("=") for word in f"{torchrun} TRITON_DEFAULT_FP_FUSION=1".split())
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in kept} | torchrun | setting)
    stand_ins, replaced = Mock(), """os.cpu_count torch.cuda.device_count torch.cuda.set_device
        torch._C._accelerator_setAllocatorSettings torch.distributed.rendezvous torch.distributed.init_process_group
        runtime.processes.prefer_fast_sdpa runtime.processes.choose_ptxas"""
    for path in replaced.split():
        monkeypatch.setattr(path, getattr(stand_ins, path.rpartition(".")[2]))
    stand_ins.cpu_count.return_value = 48
    stand_ins.device_count.return_value = 4
    stand_ins.rendezvous.return_value = iter([(None, 5, 8)])
    with torch._inductor.config.patch(compile_threads=5):
        world = start_processes("auto")
        assert torch._inductor.config.compile_threads == (5 if setting else 12)
    assert world == World(5, 8, torch.device("cuda", 1))
    assert stand_ins.init_process_group.call_args.kwargs["device_id"] == world.device
    stand_ins.set_device.assert_called_once_with(world.device)
    allocator = stand_ins._accelerator_setAllocatorSettings
    assert allocator.call_args_list == ([] if setting else [call("expandable_segments:True")])


# ---- run folder and files


def test_a_folder_is_made_once_and_taken_again_by_resume(tmp_path):
    runs = tmp_path / "runs"
    with closing(RunFolder(runs, "x", resume="auto")) as folder:
        folder.write_json("config.json", {"lr": 0.02})
        folder.log("step 1")
    assert names(folder.path) == ["checkpoints", "config.json", "lock", "log.txt"]
    assert read_json(folder.path / "config.json") == {"lr": 0.02}
    RunFolder(runs, "x").close()  # no step is lost
    Metrics(folder.metrics).write({"step": 1, "train_loss": 6.9})
    (runs / "not a run").mkdir()
    for name in ("x", "not a run"):
        with refuses("--resume auto"):
            RunFolder(runs, name)
    RunFolder(runs, "x", resume="auto").log("step 2")
    assert (folder.path / "log.txt").read_text() == "step 1\nstep 2\n"


HOLDER = """
import sys, time
from runtime.run_folder import RunFolder
folder = RunFolder(sys.argv[1], "x")
print("ready", flush=True)
time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    with start("-c", HOLDER, tmp_path) as holder:
        try:
            assert holder.stdout.readline() == "ready\n"
            with refuses(tmp_path / "x"):
                RunFolder(tmp_path, "x", resume="auto")
        finally:
            holder.kill()
    folder = RunFolder(tmp_path, "x", resume="auto")
    assert str(os.getpid()) in (folder.path / "lock").read_text()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_files(tmp_path, {"summary.json": "old"}) / "summary.json"

    def fill_disk(file):
        file.write(bytes(1000))
        raise OSError("no space left")

    with refuses("no space left", error=OSError):
        replace_file(path, fill_disk)
    assert names(tmp_path) == ["summary.json"] and path.read_text() == "old"


def test_a_link_is_replaced_and_never_followed(tmp_path):
    target = write_files(tmp_path, {"target": "precious"}) / "target"
    log, config, partial = (tmp_path / name for name in ("log.txt", "config.json", "config.json.partial"))
    for link in (log, config, partial):
        link.symlink_to(target)
    with refuses("log.txt", error=OSError):
        append(log, "a line")
    replace_file(config, lambda file: file.write(b"{}"))
    assert config.read_text() == "{}" and not config.is_symlink() and target.read_text() == "precious"


# ---- checkpoint


@parametrize("keep", [1, 3])
def test_only_the_newest_checkpoints_are_kept_and_the_latest_is_by_step(tmp_path, keep):
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step_2000000.pt.partial").write_text("half")  # of a killed run: the next save removes it
    steps = [10, 20, 999_999, 1_000_000]
    for step in steps:
        save_checkpoint(tmp_path, step, {"step": step}, keep=keep)
        assert load_checkpoint(latest_checkpoint(tmp_path))["step"] == step
    assert {*names(tmp_path)} == {f"step_{step:06d}.pt" for step in steps[-keep:]}


def test_the_new_checkpoint_is_on_the_disk_before_the_older_one_goes(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {}, keep=1)
    calls = Mock()
    for name in ("fsync", "replace", "unlink"):
        calls.attach_mock(Mock(wraps=getattr(os, name)), name)
        monkeypatch.setattr(os, name, getattr(calls, name))
    save_checkpoint(tmp_path, 2, {}, keep=1)
    assert [name for name, *_ in calls.mock_calls] == ["fsync", "replace", "fsync", "unlink"]


STATE = dict(model=torch.arange(50.0), config=dict(name="x", lr=0.1 + 0.2))
STATE["half"] = torch.arange(9)[::2].bfloat16()


@CORRUPTION
def test_a_flipped_bit_anywhere_in_a_checkpoint_is_found(faults, long, tmp_path):
    """Bits are in data, pickle, checksum, and the archive's headers, index and padding. A missing end is found too."""
    path = save_checkpoint(tmp_path, 3, STATE)
    content = path.read_bytes()

    def assert_found(damaged):
        path.write_bytes(damaged)
        with refuses(path.name, error=DamagedCheckpoint):
            load_checkpoint(path)

    bits = range(8 * len(content))
    for bit in bits if long else random.Random(4).sample(bits, 300):
        with faults("flipped bit in a checkpoint"):
            assert_found(flip(content, bit))
    for size in (0, 20, len(content) // 2, len(content) - 1):
        assert_found(content[:size])
    path.write_bytes(content)
    loaded = load_checkpoint(path)
    assert loaded["config"] == STATE["config"]
    assert torch.equal(loaded["model"], STATE["model"]) and torch.equal(loaded["half"], STATE["half"])


def test_the_newest_that_is_whole_is_taken(tmp_path):
    world = World(0, 1, CPU)
    assert load_newest(tmp_path, world) == (None, {}, [])
    first, second, third = (save_checkpoint(tmp_path, step, {}, keep=3) for step in (1, 2, 3))
    second.write_bytes(b"half")
    assert load_newest(tmp_path, world) == (third, {}, [])
    third.write_bytes(b"")
    assert load_newest(tmp_path, world) == (first, {}, [third, second])
    first.unlink()
    with refuses(third.name, error=DamagedCheckpoint):
        load_newest(tmp_path, world)


# ---- metrics and wandb


def test_resume_drops_records_after_the_checkpoint_and_the_repeated_validation(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.truncate(0)  # there is no file yet
    kept = [{"step": 5, "loss": 0.1 + 0.2}, {"step": 5, "val_loss": {}}, {"step": 10, "loss": None}]
    infinite = {"step": 10, "loss": math.inf}
    dropped = {"step": 10, "val_loss": {}}, {"step": 11, "loss": 0.4}
    for record in (*kept[:2], infinite, *dropped):
        metrics.write(record)
    with open(metrics.path, "a") as file:
        file.write('{"step": 12, "l')  # is left out, but only at the end of the file
    assert len(read_metrics(metrics.path)) == 5
    metrics.truncate(10)
    metrics.write({"step": 11})
    assert read_metrics(metrics.path) == [*kept, {"step": 11}]


@parametrize("line", [b'{"step": 2, "lo', b"\xff\xfe"])
def test_a_damaged_line_of_the_metrics_is_named(tmp_path, line):
    write_files(tmp_path, {"metrics.jsonl": b'{"step": 1}\n' + line + b'\n{"step": 3}\n'})
    with refuses("metrics.jsonl, line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


NOT_MIRRORED = """
import sys, os
from runtime.metrics import start_mirror
for mode, setting in (("off", "online"), ("online", "disabled")):
    os.environ["WANDB_MODE"] = setting
    assert start_mirror(mode, project="p", name="n", config={}, folder=sys.argv[1]) is None
assert "wandb" not in sys.modules
"""


def test_wandb_is_not_imported_unless_asked_for(tmp_path):
    assert python("-c", NOT_MIRRORED, tmp_path).stderr == "" and names(tmp_path) == []


MIRRORED = """
import json, os, sys
from pathlib import Path
from runtime.metrics import Metrics, start_mirror

folder, ids = Path(sys.argv[1]), [None]
for step in (1, 2):
    run = start_mirror("online", project="p", name="n", group="g", tags=["si"], config={"model": {"depth": 12}},
                      folder=folder, run_id=ids[-1])
    metrics = Metrics(folder / "metrics.jsonl", mirror=run)
    metrics.write({"step": step, "tokens": 1000 * step, "val_loss": {4096: 2.5 + step}})
    ids.append(run.id)
    run.finish()
(folder / "result.json").write_text(json.dumps([ids[1:], os.environ["WANDB_ERROR_REPORTING"]]))
"""


def test_online_without_a_key_records_offline_and_a_resumed_run_goes_on(tmp_path):
    output = python("-c", MIRRORED, tmp_path, HOME=str(tmp_path), WANDB_CACHE_DIR=str(tmp_path)).stdout
    (first, second), reports = read_json(tmp_path / "result.json")
    assert output.count("wandb has no API key") == 2 and first and first == second and reports == "false"
    recorded = b"".join(path.read_bytes() for path in tmp_path.glob(f"wandb/offline-run-*/run-{first}.wandb"))
    for text in b"val_loss/4096 3.5 4.5 tokens 2000 depth si".split():
        assert text in recorded, text


def test_records_arrive_at_trackio_by_step_without_the_reserved_key(tmp_path, monkeypatch):
    package = Mock()
    monkeypatch.setitem(sys.modules, "trackio", package)
    options = dict(project="p", name="n", config={"model_dim": 8})
    run = start_mirror("trackio", folder=tmp_path, tags=["rope"], **options)
    Metrics(tmp_path / "metrics.jsonl", run).write(dict(step=3, tokens=12, val_loss={"64": 2.5}))
    finish_mirror(run)
    assert options.items() <= package.init.call_args.kwargs.items()
    assert package.init().method_calls == [call.log({"tokens": 12, "val_loss/64": 2.5}, step=3), call.finish()]


# ---- device


@table("release, major, cuda, named, chosen", """
    13.99 | 9 | 13.0 |             | newest
    12.0  | 9 | 13.0 |             | triton's
    13.99 | 9 | 12.6 |             | triton's
    13.99 | 9 | 13.0 | /the/user/s | /the/user/s
    13.99 | 8 | 13.0 |             |
""")
def test_hopper_gets_the_newest_ptxas(release, major, cuda, named, chosen, tmp_path, monkeypatch):
    """A driver of CUDA 12 cannot load the code of the newest."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setenv("TRITON_PTXAS_PATH", named)  # monkeypatch restores it after choose_ptxas
    if not named:
        monkeypatch.delenv("TRITON_PTXAS_PATH")
    newest = tmp_path / "nvidia/cu13/bin/ptxas"
    write_files(tmp_path, {newest: f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n"})
    newest.chmod(0o755)
    paths = {"newest": str(newest), "triton's": compiler.get_ptxas(90).path}
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (int(major), 0))
    version, path = choose_ptxas(torch.device("cuda"))
    assert os.environ.get("TRITON_PTXAS_PATH", "") == paths.get(chosen, chosen)
    tool = compiler.get_ptxas(10 * int(major))
    assert (version, path) == (tool.version, tool.path)


@table("name, peak", """
    NVIDIA H100 80GB HBM3 | 989.4e12
    NVIDIA H100 PCIe      | 756.5e12
    Tesla T4              |
""")
def test_published_peaks_by_the_name_that_torch_gives(name, peak, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    gpu = torch.device("cuda")
    assert peak_flops(CPU, torch.bfloat16) is None and peak_flops(gpu, torch.float32) is None
    assert peak_flops(gpu, torch.bfloat16) == (pytest.approx(float(peak)) if peak else None)


def test_the_commit_is_dirty_with_changed_code_and_not_with_changed_results(tmp_path):
    script = "git init; git add .; git -c user.name=a -c user.email=a@b.c commit -m all; git rev-parse HEAD"
    results = tmp_path / "results"
    write_files(tmp_path, {"code.py": "1", "results/page.md": "1"})
    *_, commit = subprocess.check_output(["bash", "-ec", script], cwd=tmp_path, text=True).split()
    write_files(results, {"page.md": "2"})
    assert git_commit(tmp_path) == git_commit(results) == commit
    write_files(tmp_path, {"code.py": "2"})
    assert git_commit(tmp_path) == git_commit(results) == f"{commit}-dirty"
    assert git_commit(tmp_path.parent) is None
