"""The doctor: findings from canned facts, a planted fault in a kernel, exit codes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from configs.command_line import read_config
from model.attention import blocks
from model.methods import make_method
from scripts import doctor

CPU = torch.device("cpu")
FIELDS = (
    "--vocab_size 300 --num_layers 1 --num_heads 2 --model_dim 32 --train_length 24 --batch_tokens 96 "
    "--micro_batch_tokens 48 --compile off --device cpu --data_dir none --length_schedule --val_copy_gaps "
    "--val_lengths 24 48 --val_tokens 48"
).split()


def config(*fields):
    return read_config(["quickstart", *FIELDS, *fields])


def doctor_command(*arguments):
    """Return the exit code of the command."""
    with pytest.raises(SystemExit) as stop:
        doctor.main([*arguments])
    return stop.value.code


@pytest.mark.parametrize("capability, codes, state", [
    ((9, 0), "sm_80 sm_90a", "ok"),
    ((8, 9), "sm_80", "ok"),
    ((8, 0), "sm_86", "broken"),
    ((9, 0), "sm_80", "broken"),
    ((9, 0), "sm_80 compute_80", "ok"),
    ((10, 3), "sm_100", "ok"),
    ((10, 0), "sm_120 compute_120", "broken"),
    ((7, 5), "sm_75", "slow"),
])  # fmt: skip
def test_a_gpu_needs_code_and_bfloat16(capability, codes, state):
    gpu = SimpleNamespace(name="a GPU", major=capability[0], minor=capability[1], total_memory=80e9)
    assert doctor.judge_gpu(gpu, codes.split()).state == state


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch):
    def count_gpus():
        raise ValueError("/dev/nvidia0 is a GPU, but torch cannot use it: update the driver")

    monkeypatch.setattr(doctor, "count_gpus", count_gpus)
    (found,) = doctor.check_gpus(config("--device", "auto"), CPU, None)
    assert found.state == "broken" and found.advice == "update the driver"


def test_space_and_data(monkeypatch, tmp_path):
    assert [found.state for found in doctor.check_data(config(), CPU, None)] == ["missing"] * 2
    broken = doctor.check_data(config("--data_dir", str(tmp_path)), CPU, None)
    assert [found.state for found in broken] == ["broken"] * 2
    for free, state in ((10**12, "ok"), (1000, "broken")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert [found.state for found in doctor.check_space(config(), CPU, None)] == [state]


def wrong_run(q, k, v, **more):
    output = blocks.run(q, k, v, **more)
    return 1.01 * output - 0.01 * output.detach()  # its gradient alone is wrong


@pytest.mark.parametrize("run, state", [(blocks.run, "ok"), (wrong_run, "broken")])
def test_a_kernel_with_a_planted_fault_is_broken(run, state):
    backend = SimpleNamespace(unsupported=blocks.unsupported, prepare=blocks.prepare, run=run)
    method = make_method("alibi", num_heads=2, head_dim=16, train_length=512)
    assert doctor.judge_backend("blocks", backend, method, CPU, torch.float32).state == state


def test_a_step_is_timed_and_the_hours_follow_from_it(monkeypatch):
    monkeypatch.setattr(doctor.Trainer, "time_step", lambda self: 0.5)
    small = config("--steps", "7200", "--cooldown_steps", "0")
    step, run = doctor.check_step(small, CPU, None)
    assert step.state == run.state == "ok" and "96 tokens/s" in step.message  # 48 tokens in half a second
    assert doctor.describe_run(dataclasses.replace(small, val_tokens=24, val_lengths=(24,)), 96.0, 3.0) == (
        "2.0 hours, cost 6.00"  # 7200 steps of 96 tokens
    )


def test_a_step_that_takes_too_long_is_not_made():
    (found,) = doctor.check_step(config("--model_dim", "65536"), CPU, 1.0)
    assert found.state == "slow" and found.check == "run"


@pytest.mark.parametrize("error, code", [(None, 0), (RuntimeError("no kernel image"), 1)])
def test_the_exit_code_says_whether_something_is_broken(error, code, monkeypatch, capsys):
    def check_kernels(*_):
        if error:
            raise error
        yield doctor.Finding("kernels", "fine")

    monkeypatch.setattr(doctor, "check_kernels", check_kernels)
    assert doctor_command("quickstart", *FIELDS) == code
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("broken" if code else "ok") and "kernels" in line for line in lines)
    assert any("run:" in line for line in lines)  # the later checks are made all the same


def test_the_kernels_of_this_machine_are_right():
    found = list(doctor.check_kernels(config(), CPU, None))
    assert {finding.state for finding in found} == {"ok"} and len(found) >= 6


@pytest.mark.parametrize("arguments, field", [
    (["gpt_162m"], "gpt_162m"), (["mini", "--price", "-1"], "--price"), (["mini", "--stpes", "3"], "--stpes"),
    (["mini", "--method", "rop"], "rop"),
])  # fmt: skip
def test_a_mistake_is_exit_code_2_and_names_the_field(arguments, field, capsys):
    assert doctor_command(*arguments) == 2
    message = capsys.readouterr().err
    assert field in message and message.count("\n") == 1
