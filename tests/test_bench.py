"""The benchmarks as commands, at tiny sizes: rows, files and refusals. What they measure is no business of a test."""

import ast
import functools
import json
import os
import runpy
import subprocess
import sys
from argparse import ArgumentParser
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scripts.bench import __main__ as bench
from scripts.bench import attention as bench_attention
from scripts.bench import kernel_code
from scripts.bench.protocol import gpu_range, paired_ratio, schedule
from scripts.bench.tiles import make_launch
from scripts.bench.variants import EXTENDED, VARIANTS, Case, Variant, dense, on_backend, random_inputs

SLOW_FIXTURES = ("attention",)

ROOT = Path(__file__).parents[1]
SIZES = "--device cpu --lengths 300 --tokens 300 --heads 4 --head-dim 16 --rounds 3".split()


def run_command(*arguments, **environment):
    real = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}  # kernels are to be compiled
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        env=real | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def run_attention(variants, *arguments):
    """The exit code of the benchmark with variants of our own."""
    parser = ArgumentParser()
    bench_attention.add_arguments(parser)
    return bench_attention.run(parser.parse_args([*SIZES, *arguments]), variants)


def cells(table_line):
    return [cell.strip() for cell in table_line.strip("|").split("|")]


# ---- the files -------------------------------------------------------------------------------------------------------


def imported_modules(file):
    """Everything that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_files_of_scripts_import_each_other():
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in ROOT.glob("scripts/**/*.py")}
    imports = {name: files.keys() & set(imported_modules(file)) for name, file in files.items()}
    assert imports["scripts.bench.__main__"] >= {"scripts.bench.attention", "scripts.bench.step"}
    assert len(list(TopologicalSorter(imports).static_order())) == len(files)  # or CycleError, which names the circle


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """The command with three variants, one of which cannot run here: what it says, and what it writes."""
    folder = tmp_path_factory.mktemp("speed")
    names = ["sdpa", "dense:si", "fa3"]
    done = run_command("scripts.bench", "attention", *SIZES, "--variants", *names, "--out", folder)
    assert done.returncode == 0, done.stderr
    page, record = ((folder / f"cpu_attention.{kind}").read_text() for kind in ("md", "json"))
    return done.stdout, page, json.loads(record)


def test_attention_prints_a_row_a_variant_and_the_baseline_again(attention):
    said, page, _ = attention
    assert said.split() == page.split()
    gate, times = (part.splitlines() for part in page.split("\n## ")[1:])
    assert [cells(line)[-1] for line in gate if line.startswith(("| sdpa", "| dense"))] == ["passed"] * 2
    rows = [cells(line)[0] for line in times if line.startswith("|")][2:]
    assert rows[:3] == ["sdpa", "dense:si", "sdpa again"]
    assert rows[3].startswith("fa3: not run: ") and "flash_attn_interface" in rows[3]


def test_attention_keeps_all_times_and_where_they_come_from(attention):
    record = attention[2]
    assert {"command", "device", "versions", "threads", "commit", "dtype", "heads", "head_dim"} <= record.keys()
    assert record["gate"]["results"]["dense:si"]["passed"]
    (length,) = record["lengths"]
    results = length["results"]
    assert length["length"] == 300 and length["batch"] == 1 and length["rounds"] == 3
    assert all(len(result["seconds"][key]) == 3 for result in results.values() for key in ("forward", "both"))
    assert all(seconds > 0 for result in results.values() for seconds in result["seconds"]["both"])
    seconds = {name: result["seconds"]["both"] for name, result in results.items()}
    assert results["dense:si"]["ratio"]["both"] == pytest.approx(paired_ratio(seconds["dense:si"], seconds["sdpa"]))
    assert results["sdpa"]["ratio"]["both"] == [1, 1, 1]


def test_attention_measures_the_peak_of_memory(attention):
    results = attention[2]["lengths"][0]["results"]
    logits = 4 * 4 * 300**2  # bytes, of which dense attention keeps two at least
    if results["sdpa"]["extra_bytes"] is None:
        pytest.skip("this system cannot measure the peak of memory")
    assert 2 * logits < results["dense:si"]["extra_bytes"] < 20 * logits
    assert results["sdpa"]["extra_bytes"] < 2 * logits


def wrong_gradient(q, k, v):
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return 1.001 * o - 0.001 * o.detach()


def out_of_memory(case, formula):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("formula, attend", [("si", VARIANTS["sdpa"].prepare), ("plain", lambda *_: wrong_gradient)])
def test_a_variant_with_wrong_numbers_gets_no_time_and_exit_code_1(formula, attend, tmp_path):
    variants = {"right": Variant("plain", dense, ""), "wrong": Variant(formula, attend, "")}
    assert run_attention(variants, "--variants", "right", "wrong", "--out", str(tmp_path)) == 1
    record = json.loads((tmp_path / "cpu_attention.json").read_text())
    assert record["gate"]["results"]["right"]["passed"] and not record["gate"]["results"]["wrong"]["passed"]
    assert list(record["lengths"][0]["results"]) == ["right", "right again"]
    assert record["lengths"][0]["problems"]["wrong"].startswith("refused")


@pytest.mark.slow
def test_the_gate_knows_biases_of_keys_windows_and_sinks(tmp_path):
    prepare = functools.partial(on_backend, backend="blocks")
    variants = {formula: Variant(formula, prepare, "") for formula in EXTENDED}
    variants |= {f"without {formula}": Variant(formula, VARIANTS["sdpa"].prepare, "") for formula in EXTENDED}
    assert run_attention(variants, "--variants", *variants, "--rounds", "1", "--out", str(tmp_path)) == 1
    results = json.loads((tmp_path / "cpu_attention.json").read_text())["gate"]["results"]
    assert {name: result["passed"] for name, result in results.items()} == {name: name in EXTENDED for name in variants}


def test_a_variant_that_cannot_run_says_why_and_stops_no_other(capsys):
    variants = {"none": Variant("plain", out_of_memory, ""), "dense": Variant("alibi", dense, "")}
    assert run_attention(variants, "--variants", "none", "dense") == 0
    page = capsys.readouterr().out
    assert page.count("| none: not run: CUDA out of memory") == 2
    assert "\n| dense again " in page


def test_without_time_nothing_runs(capsys):
    assert run_attention({"dense": Variant("si", dense, "")}, "--variants", "dense", "--minutes", "1e-9") == 0
    assert "| dense: not run: out of time" in capsys.readouterr().out


def test_paired_ratio_is_the_median_of_the_ratios_of_the_same_round():
    assert paired_ratio([2.0, 40.0, 6.0], [1.0, 20.0, 3.0]) == (2, 2, 2)
    # Of 3 rounds the median is the lowest ratio in 7 of the 27 equally likely draws, and the highest in 7.
    assert paired_ratio([9.0, 1.0, 4.0], [1.0, 1.0, 2.0]) == (2, 1, 9)
    middle, low, high = paired_ratio([1.0] * 99 + [50.0], [1.0] * 100)
    assert middle == low == high == 1


def test_schedule_fits_the_time():
    one_call = {"fast": 0.001, "slow": 0.1}
    rounds, calls = schedule(one_call, 7, 1.5)
    assert (rounds, calls) == (7, {"fast": 107, "slow": 1})
    assert schedule(one_call, 7, 0.0) == (3, {"fast": 1, "slow": 1})  # three rounds at least
    assert schedule(one_call, 7, 1e6) == (7, {"fast": 250, "slow": 2})  # and no endless ones


def test_gpu_range_compares_numbers():
    fields = "clocks.sm", "power.draw", "clocks_throttle_reasons.active"
    rows = ("990", "99.5", "0x4"), ("1980", "650.0", "0x0"), ("1005", "100.2", "0x0"), ("1005", "[N/A]", "0x0")
    states = [None, *(dict(zip(fields, row)) for row in rows[:3])]
    assert gpu_range(states) == "; SM clock 990 to 1980 MHz, 99.5 to 650.0 W, throttle reasons 0x0, 0x4"
    assert "99.5 to [N/A] W" in gpu_range([dict(zip(fields, row)) for row in rows])
    assert gpu_range([None]) == ""


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("attention --device cpu --lengths 0", "must be positive"),
        ("attention --device cpu --minutes 0", "must be positive"),
        ("attention --device cpu --variants sdpa blocks", "unknown variant 'blocks'; valid: sdpa:cudnn,"),
        ("attention --device cpu --out /dev/null/x", "/dev/null/x"),
        ("step no_such_preset p_rope", "no_such_preset"),
        ("step quickstart no_such_method --device cpu", "unknown variant 'no_such_method'"),
        ("step quickstart p_rope-head --device cpu", "unknown variant 'p_rope-head'"),
        ("step quickstart --rounds 0 --device cpu", "must be positive"),
        ("step quickstart --wide 1", "unknown field --wide"),
        ("step quickstart --length 100 --device cpu", "train_length 100 does not divide"),
        ("step quickstart --peers /dev/null --steps 10 --device cpu", "the first 10 of a process do not count"),
        ("step quickstart --peers /dev/null --device cpu", "/dev/null is no checkout of nanoGPT"),
        ("step quickstart --processes 4096 --device cpu", "more processes (4096) than sequences in a step"),
        ("project no_such_preset", "no_such_preset"),
        ("project quickstart --mfu 0", "must be positive"),
        ("project quickstart --results /no/such/file.json", "/no/such/file.json"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and words in said.err


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kernel_code_compiles_for_a_gpu_that_is_not_there(tmp_path):
    options = "--arch 90 --head-dim 64 --variants plain si si:online --tiles forward 128 64 8 2".split()
    done = run_command("scripts.kernel_code", *options, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [cells(line) for line in done.stdout.splitlines() if line.startswith("|")][2:]
    assert [row[5] for row in rows] == ["masked", "far", *["masked", "near", "far", "line"] * 2]
    assert [row[0] for row in rows if row[0]] == ["plain forward", "si forward", "si:online forward"]
    assert rows[0][1] == "128 x 64, 8 warps, 2 stages" and 0 < int(rows[0][2]) <= 255
    instructions, special, *_ = zip(*(map(float, row[6:]) for row in rows))
    assert all(1 <= x < 2 for x in special)  # the exponential of each logit, and little else
    plain, si, online = instructions[1], instructions[3:6], instructions[7:10]
    assert plain < min(si) and all(x < y for x, y in zip(si, online))
    assert si[2] < si[1]  # a line, a cubic


def test_kernel_code_needs_the_compiler_and_says_so():
    if not kernel_code.flash.INTERPRETED:
        pytest.skip("Triton compiles in this process")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        kernel_code.kernel_code("plain")
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        kernel_code.loss_code()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--arch 75", "compute capability 8.0"),
        ("--arch 75 --variants loss", "compute capability 8.0"),
        ("--head-dim 257", "from 1 to 256"),
        ("--head-dim 0", "from 1 to 256"),
        ("--variants cubic", "unknown variant 'cubic'; valid: plain"),
        ("--tiles backward 64 64 4 2", "unknown kernel 'backward'; valid: forward"),
        ("--tiles forward 48 64 4 2", "got 48 64 4 2"),
    ],
)
def test_kernel_code_refuses_in_one_line(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["kernel_code", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("scripts.kernel_code", run_name="__main__")
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and words in said.err


LISTING = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDS R2, [R3] ;
.L_x_1:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0040*/               @P0 MUFU.EX2 R5, R6 ;
        /*0050*/                   STL [R1], R5 ;
        /*0060*/              @!P1 BRA `(.L_x_1) ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0090*/               @P2 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
"""


def test_loops_are_the_innermost_ones_with_matrix_products():
    (loop,) = kernel_code.count_loops(LISTING, logits=2)
    assert loop == dict(instructions=2.5, special=0.5, global_loads=0.5, shared_loads=0, spills=0.5)


@pytest.mark.skipif(not kernel_code.flash.INTERPRETED, reason="a GPU is measured with bench attention --tune")
@pytest.mark.parametrize("role, argument, tensor", [("forward", 3, 0), ("query_gradient", 4, 1)])
def test_a_launch_with_other_tiles_computes_the_same(role, argument, tensor):
    case = Case(1, 2, 70, 16, torch.float32, torch.device("cpu"))
    launch = make_launch(case, "si", role, {role: kernel_code.flash.Tiles(32, 16, 4, 1)})
    assert (launch.constants["QUERIES"], launch.constants["KEYS"]) == (32, 16)
    launch.run()
    exact = bench_attention.output_and_gradients(dense(case, "si"), random_inputs(case), exact=True)
    (error,) = bench_attention.relative_errors([launch.arguments[argument]], [exact[tensor]])
    assert error < 1e-5


STEP = """
import dataclasses
from configs.presets import preset
from scripts.bench.step_code import count_step
shape = dict(num_layers=1, num_heads=2, model_dim=256, vocab_size=1024, micro_batch_tokens=8192)
kernels, saved = count_step(dataclasses.replace(preset("gpt_162m_4k"), **shape))
for k in kernels:
    print(k.where, k.name, k.read, k.written, k.loads, k.stores)
print(saved)
"""


@pytest.mark.slow
def test_norm_and_rotation_of_q_and_k_are_one_kernel_each_way(tmp_path):
    """By the code that Inductor writes for a GPU; and the MLP keeps one hidden tensor for the backward pass."""
    env = os.environ | dict(TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_COMPILE_THREADS="1")
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", STEP], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *kernels, saved = map(str.split, done.stdout.splitlines())
    tensor = 8192 * 256 * 2  # bytes of a q, of a k
    for where, others in (("forward", 2), ("backward", 0)):  # the norms' two float32 numbers a head are kept
        looped = [kernel for kernel in kernels if kernel[0] == where and kernel[1].startswith("triton_red")]
        assert len(looped) == 1 and "flip" in looped[0][1], kernels
        *_, written, loads, stores = looped[0]
        assert int(stores) == 2 + others and 2 * tensor <= int(written) < 2.1 * tensor
    hidden = 4 * tensor
    assert hidden < int(saved[0]) - 12 * tensor < 2 * hidden, saved
