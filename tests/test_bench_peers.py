"""bench step --peers and --processes: other people's scripts get our shape and tokens, and their times are read right.

nanoGPT's own script is not here: a stand-in takes the same options and prints the same lines. Of modded-nanogpt, which
needs CUDA, only the reading of its lines is tested.
"""

import json
import re

import numpy as np
import pytest
import torch

from configs.config import Config
from scripts.bench import __main__ as bench
from scripts.bench.peers import (
    Script,
    compare_scripts,
    copy_code,
    modded_nanogpt_steps,
    nanogpt_steps,
    peer_script,
    run_script,
)
from scripts.bench.protocol import Report, paired_ratio

SHAPE = dict(vocab_size=300, num_layers=1, num_heads=2, model_dim=32, train_length=32, batch_tokens=256)
FIELDS = SHAPE | dict(micro_batch_tokens=64, compile="off", device="cpu")
STAND_IN = """
import pickle, sys, numpy, torch
options = dict(word[2:].split("=") for word in sys.argv[1:])
tokens = numpy.fromfile(f"data/{options['dataset']}/train.bin", numpy.uint16)
vocab_size = pickle.load(open(f"data/{options['dataset']}/meta.pkl", "rb"))["vocab_size"]
torch.save(dict(options=options, tokens=tokens, vocab_size=vocab_size, threads=torch.get_num_threads()), SEEN)
print("step 0: train loss 5.7, val loss 5.7")
for i in range(int(options["max_iters"]) + 1):
    print(f"iter {i}: loss {5 - i / 100:.4f}, time {900.0 if i < 10 else 20.0 + i:.2f}ms, mfu -100.00%")
"""


def checkout(folder, seen, script=STAND_IN):
    folder.mkdir()
    (folder / "train.py").write_text(script.replace("SEEN", repr(str(seen))))
    (folder / "model.py").write_text("")
    (folder / "configurator.py").write_text("")
    return folder


def command(monkeypatch, folder, *arguments):
    fields = [
        word for name, value in (FIELDS | dict(data_dir=folder / "none")).items() for word in (f"--{name}", value)
    ]
    monkeypatch.setattr("sys.argv", ["bench", "step", "quickstart", *map(str, [*arguments, *fields])])
    with pytest.raises(SystemExit) as stop:
        bench.main()
    return stop.value.code


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def printing(what, text, tokens=1000):
    code = f"print({text!r})"
    return Script(what, lambda folder: ["-c", code], lambda folder, output: nanogpt_steps(output), tokens=tokens)


def lines(milliseconds):
    return "\n".join(
        f"iter {i}: loss 3.25, time {ms:.2f}ms, mfu 1.00%" for i, ms in enumerate([500] * 10 + milliseconds)
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_nanogpt_s_lines_are_read():
    seconds, losses = nanogpt_steps(
        "compiling\nstep 0: train loss 1, val loss 2\n" + lines([10, 30]) + "\niter 12: loss nan, time 5.00ms"
    )
    assert seconds == [0.5] * 10 + [0.01, 0.03, 0.005] and losses[:12] == [3.25] * 12 and np.isnan(losses[12])


def test_modded_nanogpt_s_steps_are_the_differences_of_its_sums():
    said = """step:0/1490 val_loss:10.8 train_time:0ms step_avg:0.02ms
step:1/1490 train_time:80ms step_avg:80.00ms
step:2/1490 train_time:140ms step_avg:70.00ms
step:3/1490 train_time:190ms step_avg:63.33ms"""
    assert modded_nanogpt_steps(said)[0] == pytest.approx([0.08, 0.06, 0.05], abs=1e-4)


def test_the_first_steps_do_not_count_and_a_failure_is_one_line():
    assert run_script(printing("a", lines([10, 30])))["seconds"] == [0.01, 0.03]
    with pytest.raises(ValueError, match="a reported 10 steps, of which 10 do not count"):
        run_script(printing("a", lines([])))
    with pytest.raises(ValueError, match="a failed with exit code 1: ZeroDivisionError"):
        run_script(Script("a", lambda folder: ["-c", "1 / 0"], lambda *_: ([], [])))


def test_ratios_are_of_tokens_per_second_in_the_same_round(capsys):
    scripts = {"ours": printing("a", lines([10, 10, 10])), "theirs": printing("b", lines([40, 40, 40]), tokens=2000)}
    scripts["elsewhere"] = printing("c", lines([7]), tokens=None)
    report = Report(None, "peers", torch.device("cpu"))
    compare_scripts(scripts, 2, report)
    rows = {cells(line)[0]: cells(line)[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    assert rows["ours"] == ["10.00", "10.00", "10.00", "100,000", "1.000 (1.000 to 1.000)", "3.2500"]
    assert rows["theirs"] == ["40.00", "40.00", "40.00", "50,000", "2.000 (2.000 to 2.000)", "3.2500"]
    assert rows["elsewhere"][3:5] == ["own shape", ""]
    assert {name: len(runs) for name, runs in report.record["results"].items()} == dict.fromkeys(
        [*scripts, "ours again"], 2
    )


# ---- checkouts -------------------------------------------------------------------------------------------------------


def test_unknown_checkouts_and_modded_nanogpt_on_a_cpu_are_refused(tmp_path):
    config, cpu = Config(**FIELDS | dict(val_lengths=(32,), val_tokens=32)), torch.device("cpu")
    with pytest.raises(ValueError, match="is no checkout of nanoGPT"):
        peer_script(tmp_path, config, 20, cpu, tmp_path, "float32")
    for name in ("train_gpt.py", "triton_kernels.py"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="needs CUDA"):
        peer_script(tmp_path, config, 20, cpu, tmp_path, "float32")
    with pytest.raises(ValueError, match="no training shards"):
        peer_script(tmp_path, config, 20, torch.device("cuda"), tmp_path, "bfloat16")


def test_a_copy_leaves_the_checkout_alone(tmp_path):
    original = checkout(tmp_path / "theirs", tmp_path / "seen")
    (original / "data").mkdir()
    copy = copy_code(original, tmp_path)
    (copy / "train.py").write_text("")
    assert (original / "train.py").read_text() and sorted(p.name for p in copy.iterdir()) == [
        "configurator.py", "model.py", "train.py"
    ]  # fmt: skip


@pytest.mark.slow
def test_peers_get_our_shape_tokens_and_threads(monkeypatch, tmp_path, capsys):
    theirs, seen = checkout(tmp_path / "nano", tmp_path / "seen.pt"), tmp_path / "seen.pt"
    arguments = ["--peers", theirs, "--rounds", 1, "--steps", 16, "--out", tmp_path / "out"]
    assert command(monkeypatch, tmp_path, *arguments) == 0
    said = capsys.readouterr().out
    seen = torch.load(seen, weights_only=False)
    expected = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=2, gradient_accumulation_steps=4)
    expected |= dict(max_iters=15, dropout=0.0, bias=False, compile=False, dtype="float32", device="cpu")
    assert {key: seen["options"][key] for key in expected} == {key: str(value) for key, value in expected.items()}
    assert seen["vocab_size"] == 300 and seen["threads"] == torch.get_num_threads()
    assert (
        len(seen["tokens"]) == 8 * 256 + 1
        and 10 < np.bincount(seen["tokens"])[0] / np.bincount(seen["tokens"])[20] < 45
    )
    record = json.loads((tmp_path / "out" / "cpu_step_peers.json").read_text())
    nano = record["results"]["nano, float32"]
    assert [r["seconds"] for r in nano] == [pytest.approx([(20 + i) / 1e3 for i in range(10, 16)])]
    ours = record["results"]["ours"][0]
    assert len(ours["seconds"]) == 6 and len(ours["losses"]) == 16 and ours["losses"][-1] < ours["losses"][0]
    assert record["results"]["ours again"][0]["losses"] == ours["losses"]
    def median(name):
        return [np.median(r["seconds"]) for r in record["results"][name]]
    ratio = paired_ratio(median("nano, float32"), median("ours"))[0]
    assert re.search(rf"\| nano, float32 .*\| {ratio:.3f} \(", said)


@pytest.mark.slow
def test_processes_train_alike(monkeypatch, tmp_path, capsys):
    arguments = ["--processes", 1, 2, "--rounds", 1, "--steps", 14, "--out", tmp_path / "out"]
    assert command(monkeypatch, tmp_path, *arguments) == 0
    assert "processes: 2, threads of each: 1: losses the same" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "cpu_step_processes.json").read_text())
    assert record["largest_loss_difference"][0] < 1e-3
