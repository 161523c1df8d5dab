"""The doctor: findings from canned facts, exit codes."""

import dataclasses

import torch
from commands import exit_code, parametrize, table
from test_bench import FIELDS as BENCH_FIELDS
from torch.torch_version import TorchVersion

from runtime.build import read_run
from scripts import doctor

CPU = torch.device("cpu")
FIELDS = [*BENCH_FIELDS, *"--data_dir none --val_lengths 24 48 --val_tokens 48".split()]


def config(*fields):
    return read_run(["quickstart", *FIELDS, *fields])


def states(check, device, *fields):
    return [finding.state for finding in check(config(*fields), torch.device(device))]


@table("major, ptxas, expected", """
    9 | 13.3  | ok
    9 | 13.10 | ok
    9 | 13.2  | missing
    9 |       |
    8 | 12.8  | ok
    7 |       | slow
""")
def test_a_gpu_needs_bfloat16_and_hopper_a_new_ptxas(major, ptxas, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (int(major), 0))
    monkeypatch.setattr(doctor, "choose_ptxas", lambda device: ptxas and (TorchVersion(ptxas), "bin/ptxas"))
    assert states(doctor.check_gpus, "cuda", "--device", "auto") == expected.split()


@table("wanted, expected", """
    cpu  |
    auto | missing
    cuda | broken
""")
def test_a_gpu_is_missing(wanted, expected):
    assert states(doctor.check_gpus, "cpu", "--device", wanted) == expected.split()


def test_data_is_missing_or_broken(tmp_path):
    assert states(doctor.check_data, "cpu") == ["missing"]
    assert states(doctor.check_data, "cpu", "--data_dir", str(tmp_path)) == ["broken"]


def test_the_kernels_of_this_machine_are_right(monkeypatch):
    found = states(doctor.check_kernels, "cpu", "--method", "swan")  # its layers differ
    assert {*found} == {"ok"} and len(found) >= 6
    monkeypatch.setattr(doctor, "check_variant", lambda *_: "refused: wrong")  # test_bench.py plants a real fault
    assert {*states(doctor.check_kernels, "cpu")} == {"broken"}


def test_a_step_is_timed_and_the_hours_follow_from_it(monkeypatch):
    monkeypatch.setattr(doctor.Trainer, "time_step", lambda self: 0.5)
    small = config("--steps", "7200", "--cooldown_steps", "0")
    step, run = doctor.check_step(small, CPU)
    assert step.state == run.state == "ok" and "96 tokens/s" in step.message  # 48 tokens in half a second
    assert doctor.describe_run(dataclasses.replace(small, val_tokens=24, val_lengths=(24,)), 96.0) == "2.0 hours"


def test_a_step_that_takes_too_long_is_not_made():
    (found,) = doctor.check_step(config("--model_dim", "65536"), CPU)
    assert found.state == "slow" and found.check == "run"


@parametrize("error, code", [(None, 0), (RuntimeError("no kernel image"), 1)])
def test_the_exit_code_depends_on_broken_parts(error, code, monkeypatch, capsys):
    def check_kernels(*_):
        if error:
            raise error
        yield doctor.Finding("kernels", "fine")

    monkeypatch.setattr(doctor, "check_kernels", check_kernels)
    assert exit_code(doctor.main, ["quickstart", *FIELDS]) == code
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("broken" if code else "ok") and "kernels" in line for line in lines)
    assert any("run:" in line for line in lines)  # the later checks are made all the same
