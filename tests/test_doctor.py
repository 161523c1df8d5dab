"""scripts/doctor: each part runs for real here, in small; what needs a GPU is judged from answers written down; and a
part that crashes, hangs or fails costs nothing but itself."""

import dataclasses
import json
import math
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from doctor_parts import GOOD

from configs.command_line import read_config
from model.attention import BACKENDS
from scripts.bench.variants import Case, on_backend, random_inputs
from scripts.doctor import __main__ as doctor
from scripts.doctor import kernels, machine, speed, training
from scripts.doctor.findings import Finding, Settings, markdown, one_line
from scripts.doctor.process import run_part

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
FIELDS = dict(
    vocab_size=300, num_layers=1, num_heads=2, model_dim=32, train_length=24, batch_tokens=96, micro_batch_tokens=48,
    val_tokens=48, val_lengths="24 48", compile="off", device="cpu", dtype="float32", data_dir="none/such",
)  # fmt: skip


def settings(folder="", **fields):
    words = [word for name, value in (FIELDS | fields).items() for word in f"--{name} {value}".split()]
    arguments = ("quickstart", *words)
    return Settings(arguments, read_config(list(arguments)), price=2.0, folder=str(folder))


def states(findings):
    return {found.check: found.state for found in findings}


# ---- the machine -----------------------------------------------------------------------------------------------------

H200 = dict(name="NVIDIA H200", capability=(9, 0), memory=150_000_000_000)
SMI = {"name": "NVIDIA H200", "driver_version": "570.86.15", "memory.total": "143771", "memory.used": "540"}
CODES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
FACTS = dict(
    wanted="auto", torch="2.13.0+cu130", cuda="13.0", codes=CODES, files=["/dev/nvidia0"], visible=None, failure="",
    gpus=[H200], smi=[SMI], nccl="2.29.3", triton=True, processor="a processor", threads=16, cores=16, load=0.5,
    compilers=dict(CC="/usr/bin/gcc", CXX="/usr/bin/g++"), headers=True, memory=128e9, memory_free=120e9,
    disk="runs", disk_free=60e9, disk_needed=5e9, data_dir="data/fineweb10B", data=True, flops=2e18,
)  # fmt: skip
NO_GPU = dict(gpus=[], codes=[], smi=[], files=[], failure="Found no NVIDIA driver on your system")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)"


@pytest.mark.parametrize("changes, state, words", [
    ({}, "OK", "NVIDIA H200 (150.0 GB), driver 570.86.15, torch 2.13.0+cu130 for CUDA 13.0"),
    (NO_GPU | dict(flops=1e15), "OK", "none; a processor, 16 threads"),
    (NO_GPU, "slow", "none"),
    (NO_GPU | dict(files=["/dev/nvidia0"], smi=[SMI], failure=TOO_OLD), "broken", f"({TOO_OLD}), driver 570.86.15"),
    (NO_GPU | dict(files=["/dev/nvidia0"], cuda=None, torch="2.13.0+cpu"), "slow", "2.13.0+cpu is a build for CPUs"),
    (NO_GPU | dict(files=["/dev/nvidia0"], failure=TOO_OLD, wanted="cpu", flops=1e15), "OK", "none"),
    (NO_GPU | dict(files=["/dev/nvidia0"], failure=TOO_OLD, visible="", flops=1e15), "OK", "none"),
])  # fmt: skip
def test_the_gpu_is_there_or_what_is_to_be_done(changes, state, words):
    found = machine.find_gpu(FACTS | changes)
    assert (found.state, words in found.said) == (state, True), found
    assert (found.advice != "") == (state != "OK")
    if state == "broken":
        assert found.advice.startswith("update the driver") and "--device cpu" in found.advice


@pytest.mark.parametrize("changes, expected", [
    ({}, {"GPU code": "OK"}),
    (dict(gpus=[H200, H200], smi=[SMI, SMI | {"memory.used": "70000"}]), {"GPU code": "OK", "GPU memory": "slow"}),
    (dict(smi=[SMI | {"memory.used": "[N/A]"}]), {"GPU code": "OK"}),
    (dict(gpus=[H200 | dict(name="Tesla T4", capability=(7, 5))]), {"GPU code": "slow"}),
    (dict(gpus=[H200 | dict(name="Tesla V100", capability=(7, 0))]), {"GPU code": "broken"}),
    (dict(triton=False), {"GPU code": "OK", "Triton": "slow"}),
])  # fmt: skip
def test_what_a_gpu_can_do(changes, expected):
    assert states(machine.find_on_gpus(FACTS | changes)) == expected


@pytest.mark.parametrize("codes, capability, runs", [
    (["sm_80"], (8, 9), True), (["sm_86"], (8, 0), False), (["sm_80"], (9, 0), False), (["sm_90a"], (9, 0), True),
    (["sm_80", "compute_80"], (9, 0), True), (["sm_100"], (10, 3), True), (["sm_120", "compute_120"], (10, 0), False),
])  # fmt: skip
def test_code_for_a_gpu(codes, capability, runs):
    assert machine.has_code(codes, *capability) == runs


def test_room_data_compilers_and_nccl():
    assert states(machine.find_room(FACTS)) == dict(disk="OK", memory="OK")
    assert states(machine.find_room(FACTS | dict(disk_free=4e9, memory_free=4e9))) == dict(disk="broken", memory="slow")
    assert [machine.find_load(FACTS | dict(load=load)).state for load in (0.0, 4.0, 6.0)] == ["OK", "OK", "slow"]
    assert [machine.find_data(FACTS | dict(data=there)).state for there in (True, False)] == ["OK", "not run"]
    assert machine.find_compilers(FACTS).state == "OK"
    for lacking in (dict(headers=False), dict(compilers=dict(CC=None, CXX="/usr/bin/g++"))):
        found = machine.find_compilers(FACTS | lacking)
        assert found.state == "slow" and "not found" in found.said and "python3-dev" in found.advice
    assert machine.find_compile(CPU, None).state == "OK"
    assert "no compiler" in machine.find_compile(CPU, "InductorError: no compiler").said
    problems = [(1, None), (1, "DistBackendError: no"), (8, "DistBackendError: no")]
    assert [machine.find_nccl(gpus, why, "2.29").state for gpus, why in problems] == ["OK", "slow", "broken"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_a_gpu_nccl_is_a_problem_and_no_crash():
    assert machine.nccl_problem() and not torch.distributed.is_initialized()


def test_compilers_are_found_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert machine.compiler("CC") is None
    (tmp_path / "clang").touch(0o755)
    assert machine.compiler("CC") == str(tmp_path / "clang")
    (tmp_path / "mine").touch(0o755)
    monkeypatch.setenv("CC", "mine")
    assert machine.compiler("CC") == str(tmp_path / "mine")


def test_nvidia_smi_is_read_or_does_without(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.nvidia_smi() == []
    line = "NVIDIA H200, 570.86.15, 143771, 540"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{line}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert machine.nvidia_smi() == [SMI]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert machine.nvidia_smi() == []


def test_the_facts_of_this_machine_are_complete():
    facts = machine.gather(settings().config)
    assert facts.keys() == FACTS.keys() and facts["disk_free"] > 0 and facts["disk_needed"] > 0
    assert {found.check for found in machine.find_room(facts)} == {"disk", "memory"}
    (about,) = machine.about(settings())
    assert about.keys() == {"device", "versions", "commit"}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_of_this_machine_are_right(dtype):
    found = states(kernels.kernels(settings(dtype=dtype, train_length=96, val_lengths=96, val_tokens=96)))
    assert found.pop("cpu", "not run") == "not run"  # where it cannot run
    assert {"cross-entropy of 300", "blocks, 96 tokens", "blocks, 59 tokens"} <= found.keys()
    assert set(found.values()) == {"OK"}


@pytest.mark.parametrize("backend", ["triton", "cpu", "blocks"])
@pytest.mark.parametrize("length", [24, 72])
def test_a_backend_is_held_to_float64(backend, length, monkeypatch):
    """72 tokens as if all the logits did not fit: the last queries alone."""
    case = Case(1, 2, length, 16, torch.float32, CPU)
    if reason := BACKENDS[backend].unsupported(case.method("plain"), CPU, torch.float32):
        pytest.skip(reason)
    monkeypatch.setitem(kernels.GATE_LENGTH, "cpu", 50)
    found = kernels.check_backend(backend, case)
    assert (found.check, found.state) == (f"{backend}, {length} tokens", "OK"), found
    assert found.numbers.keys() == {"plain", "si", "alibi", *(["si, learned"] if backend == "triton" else [])}


@pytest.mark.parametrize("length", [40, 150])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_a_wrong_output_or_gradient_is_broken(length, where, monkeypatch):
    case = Case(1, 2, length, 16, torch.float32, CPU)
    monkeypatch.setitem(kernels.GATE_LENGTH, "cpu", 100)
    right = on_backend(case, "si", "blocks")

    def wrong(q, k, v):
        factors = [1.001 if where == position else 1 for position in range(4)]
        vectors = [x + (factor - 1) * (x - x.detach()) for x, factor in zip((q, k, v), factors[1:])]  # its gradient
        return factors[0] * right(*vectors)

    results = {name: kernels.check_attention(case, "si", attend, random_inputs(case), "triton")
               for name, attend in dict(right=right, wrong=wrong).items()}  # fmt: skip
    assert [result["passed"] for result in results.values()] == [True, False]
    found = kernels.judge("si", torch.float32, results, [])
    assert found.state == "broken" and found.said.startswith("wrong numbers: wrong;") and found.advice


def test_a_backend_that_fails_is_broken_and_numbers_that_are_none_too():
    found = kernels.check_backend("flex", Case(1, 2, 130, 16, torch.float32, CPU))  # no backward pass on a CPU
    assert found.state == "broken" and "si fails with ValueError: FlexAttention has no backward" in found.said
    result = kernels.compare_errors([torch.full((3,), math.nan)], *[[torch.ones(3).double()]] * 2)
    assert kernels.judge("it", torch.float32, dict(it=result), []).state == "broken"


def test_the_kernel_of_pytorchs_attention_is_named():
    assert "PyTorch's own" in kernels.find_sdpa(kernels.chosen_kernel(CPU, torch.float32, 16, 40)).said
    slow = dict(MATH="slow", EFFICIENT_ATTENTION="slow", FLASH_ATTENTION="OK", CUDNN_ATTENTION="OK")
    assert {chosen: kernels.find_sdpa(chosen).state for chosen in slow} == slow


# ---- training --------------------------------------------------------------------------------------------------------


def test_methods_take_ten_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "METHODS", ["rope", "alibi", "infini_p_rope"])
    found = states(training.methods(settings(tmp_path)))
    assert list(found) == ["scale_invariant_p_rope", "rope", "alibi", "infini_p_rope"]
    assert set(found.values()) <= {"OK", "slow"}


CHECKED = dict(first="it", gradients=0.0, losses=0.0, passed=True, loss=[7.0, 6.0, 5.0])


@pytest.mark.parametrize("how, checked, problems, state, words", [
    (("triton", ""), dict(it=CHECKED, blocks=CHECKED), {}, "OK", "triton, loss 7.000 to 5.000 in 3 steps"),
    (("sdpa", ""), dict(it=CHECKED), {}, "OK", "sdpa"),
    (("blocks", "triton cannot run: X"), dict(it=CHECKED), {}, "slow", "blocks"),
    (("triton", ""), dict(it=CHECKED | dict(loss=[7.0, math.nan])), {}, "broken", "it does not fall"),
    (("triton", ""), dict(it=CHECKED | dict(loss=[7.0, 7.0])), {}, "broken", "it does not fall"),
    (("triton", ""), dict(it=CHECKED, blocks=CHECKED | dict(passed=False)), {}, "broken", "they differ"),
    (None, {}, dict(it="not run: CUDA out of memory"), "broken", "out of memory"),
])  # fmt: skip
def test_ten_steps_are_judged(how, checked, problems, state, words):
    found = training.judge_method("it", how, checked, problems, 0.02)
    assert (found.state, words in found.said) == (state, True), found
    assert (found.advice != "") == (state != "OK")


@pytest.mark.parametrize("most, tokens", [(8, 24), (48, 48), (72, 48), (96, 96)])
def test_a_step_of_one_micro_batch_is_whole_sequences(most, tokens):
    assert training.one_micro_batch(settings(micro_batch_tokens=most).config).batch_tokens == tokens


def test_a_run_that_fails_is_broken_with_its_last_line(tmp_path):
    (found,) = training.resume(settings(tmp_path, method_options="tua 3"))
    assert found.state == "broken" and "unknown option 'tua'" in found.said


@pytest.mark.parametrize("saved_at, whole, resumed, limit, state", [
    (12, [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], 0.0, "OK"),
    (12, [3.0, 2.0, 1.0], [3.0, 2.0, 1.0 + 1e-9], 0.0, "broken"),
    (12, [3.0, 2.0, 1.0], [3.0, 2.0, 1.01], 0.02, "OK"),
    (12, [3.0, 2.0, 1.0], [3.0, 1.0], 0.02, "broken"),
    (12, [3.0, 2.0, math.nan], [3.0, 2.0, math.nan], 0.02, "broken"),
    (None, [3.0], [3.0], 0.0, "not run"),
])  # fmt: skip
def test_a_resumed_run_is_judged(saved_at, whole, resumed, limit, state):
    assert training.judge_resume(saved_at, whole, resumed, limit).state == state


# ---- speed and memory ------------------------------------------------------------------------------------------------


def test_a_step_is_timed_and_whole_runs_follow_from_it(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "COMPARING", 0.1)
    found = {one.check: one for one in speed.step(settings(tmp_path))}
    names = [f"run of {name}" for name in ("quickstart", *speed.PAPER)]
    assert list(found) == ["step of scale_invariant_p_rope", *names, "beside p_rope"]
    numbers = found["step of scale_invariant_p_rope"].numbers
    run = found["run of quickstart"].numbers
    assert run["tokens_per_second"] == pytest.approx(96 / numbers["seconds"]["step"])
    assert run["hours"][0] > 480 * numbers["seconds"]["step"] / 3600  # and validation
    assert f"{2 * run['hours'][0]:,.2f}" in found["run of quickstart"].said  # the cost
    (ratio, low, high) = found["beside p_rope"].numbers["ratio"]
    assert low <= ratio <= high


def test_a_step_that_cannot_be_built_is_broken(tmp_path):
    (found,) = speed.step(settings(tmp_path, method="alibi", method_options="slope_scale -1"))
    assert found.state == "broken" and "slope_scale" in found.said


NUMBERS = dict(seconds=dict(step=0.5), flops_per_token=1e9, share=0.46, of_what="MFU", peak_bytes=2**34)
NUMBERS |= dict(compile="model", backend="triton")


@pytest.mark.parametrize("changes, state", [
    ({}, "OK"), (dict(share=0.2), "slow"), (dict(share=0.2, flops_per_token=6e6), "OK"),
    (dict(share=0.2, of_what="of a large matrix product's rate", peak_bytes=None), "OK"),
])  # fmt: skip
def test_a_step_is_judged(changes, state):
    found = speed.judge_step("gpt_162m_4k", "alibi", 1000, NUMBERS | changes)
    assert found.state == state and "2,000 tokens/s" in found.said
    assert ("16.0 GiB" in found.said) == ("peak_bytes" not in changes)
    assert ("scripts.bench step gpt_162m_4k alibi" in found.advice) == (state == "slow")
    ratios = [(1.05, 1.04, 1.06), (1.4, 0.9, 1.9), (1.3, 1.2, 1.4)]
    assert [speed.judge_ratio("p_rope", "it", ratio, "mini").state for ratio in ratios] == ["OK", "OK", "slow"]


@pytest.mark.parametrize("rate, state, words", [(2e5, "OK", "hours"), (1e8, "OK", "minutes"), (1e3, "slow", "hours")])
def test_hours_and_cost(rate, state, words):
    config = read_config(["gpt_162m_4k"])
    found = speed.hours("gpt_162m_4k", config, rate, "measured", 3.0)
    training_hours = config.steps * config.batch_tokens / rate / 3600
    assert found.state == state and words in found.said and "measured" in found.said
    assert found.numbers["hours"][0] == pytest.approx(1.4 * training_hours, rel=0.01)  # validation: see docs/train.md
    assert "at 3 an hour" in found.said
    assert "an hour" not in speed.hours("gpt_162m_4k", config, rate, "measured", None).said


def test_the_run_of_a_model_is_timed_by_its_parts(tmp_path):
    """What `runs` does for each of the paper's models on a GPU, for a small one here."""
    _, config, _ = speed.with_data([], settings().config, tmp_path)
    found = speed.run_of(config, "quickstart", CPU, 2.0)
    assert found.state == "OK" and "s a step of 96 tokens, measured" in found.said
    wrong = dataclasses.replace(config, method="alibi", method_options=dict(slope_scale=-1.0))
    problem = speed.run_of(wrong, "it", CPU, None)
    assert problem.state == "broken" and problem.advice
    assert states(speed.runs(settings())) == {"paper's models": "not run"}


def test_memory_is_counted_at_each_length():
    found = list(speed.memory(settings()))
    assert [(one.numbers["length"], one.state) for one in found] == [(24, "OK"), (48, "OK")]
    assert all("counted for a GPU: training 0.0" in one.said for one in found)


@pytest.mark.parametrize("measured, room, state", [
    ([30e9, 4e9], 150e9, "OK"), ([34e9, 4e9], 150e9, "slow"), ([30e9, 9e9], 150e9, "slow"), (None, 20e9, "broken"),
    (None, None, "OK"),
])  # fmt: skip
def test_memory_is_judged(measured, room, state):
    found = speed.judge_memory(4096, 32768, [30e9, 4e9], measured, room)
    assert found.state == state and (found.advice != "") == (state in ("slow", "broken"))


# ---- processes -------------------------------------------------------------------------------------------------------



def part(function, tmp_path, seconds):
    log = tmp_path / "part.log"
    found = list(run_part("part", [f"doctor_parts:{function}"], settings(), seconds, log))
    assert list(tmp_path.iterdir()) == [log]  # its files are gone
    return found, log.read_text()


@pytest.mark.parametrize("function, words, logged", [
    ("crashes", "it ended with killed by SIGSEGV", "about to crash"),
    ("raises", "RuntimeError: of its own", "Traceback"),
    ("exits", "it ended with exit code 3", ""),
])  # fmt: skip
def test_what_a_part_found_is_there_when_it_fails(function, words, logged, tmp_path):
    (first, failure), log = part(function, tmp_path, seconds=300)
    assert first == GOOD
    assert failure.state == "broken" and words in failure.said and failure.advice and logged in log


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path):
    (*found, late), _ = part("hangs", tmp_path, seconds=1.5)
    assert (late.check, late.state) == ("time", "slow") and "--only part --minutes" in late.advice
    for child in found:  # none, on a machine so busy that it did not begin in so short a time
        deadline = time.monotonic() + 60
        while is_alive(child.said):  # a signal takes a moment
            assert time.monotonic() < deadline
            time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"  # a zombie is dead
    except FileNotFoundError:
        return False


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_kills_and_resumes_a_run_and_writes_that_down(tmp_path):
    words = [*settings().arguments, "--only", "resume", "--out", str(tmp_path), "--minutes", "8"]
    done = subprocess.run([sys.executable, "-m", "scripts.doctor", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK       resume: train_gpt.py: 24 steps and a validation" in done.stdout and ", 0 broken." in done.stdout
    record = json.loads((tmp_path / "doctor.json").read_text())
    _, killed = record["parts"]["resume"]["findings"]
    if killed["state"] != "not run":  # a machine so busy that the run ended before it could be killed
        assert killed["state"] == "OK" and "killed after step 12, resumed, 24 of 24 steps" in killed["said"]
    assert record["about"].keys() == {"device", "versions", "commit"}
    page = (tmp_path / "doctor.md").read_text()
    assert f"| resume | kill and resume | {killed['state']} |" in page
    assert "    python -m scripts.doctor quickstart" in page
    assert {path.name for path in tmp_path.iterdir()} == {"doctor.json", "doctor.md", "resume.log"}


def test_the_parts_share_the_time_and_a_broken_one_is_the_exit_code(tmp_path, monkeypatch, capsys):
    limits = {}

    def fake(name, functions, settings, seconds, log):  # what the processes do is tested above
        limits[name] = seconds
        yield dict(device="a device")
        yield Finding("it", "broken" if name == "step" else "OK", f"a|b of {name}", "mend it" if name == "step" else "")

    monkeypatch.setattr(doctor, "run_part", fake)
    monkeypatch.setattr(sys, "argv", ["doctor", "--minutes", "7", "--out", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            doctor.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 1 and list(limits) == list(doctor.PARTS)
    assert max(limits.values()) <= 420 and limits["runs"] > 400  # what the others left
    assert "6 OK, 0 slow, 1 broken." in capsys.readouterr().out
    assert "| step | it | broken | a/b of step | mend it |" in (tmp_path / "doctor.md").read_text()


@pytest.mark.parametrize("words, line", [
    (["gpt_162m"], "unknown preset 'gpt_162m'"), (["--minutes", "0"], "--minutes must be positive"),
    (["mini", "--price", "-1"], "--price not negative"), (["mini", "--stpes", "3"], "did you mean --steps"),
    (["--dtype", "float16"], "--dtype takes auto"), (["--price", "3", "mini"], "'mini' is the value of"),
])  # fmt: skip
def test_a_mistake_is_one_line(words, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", *words])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            runpy.run_module("scripts.doctor", run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and line in said and said.startswith("error: ") and said.count("\n") == 1


def test_the_command_itself_needs_no_torch():
    code = "import sys, scripts.doctor.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_table_keeps_its_columns_and_a_line_its_length():
    assert markdown([["a", "b"], ["1|2", "3"]]) == "| a | b |\n|---|---|\n| 1/2 | 3 |"
    assert one_line("a\n b", 20) == "a b" and len(one_line("x" * 300)) == 200
