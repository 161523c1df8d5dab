"""The whole way, with real runs of a few steps.

A sweep, the needle task, an evaluation at four lengths, and every item of reproduce that these runs can feed.
test_sweep.py kills and resumes sweeps.
"""

import contextlib
import io
import re

import pytest
from commands import exit_code, read_json, shared, slow
from test_text import make_documents, write_lines
from test_train import steps_and_validations
from tiny_run import sweeps_in_this_process

from data.text import prepare
from scripts import evaluate
from scripts.reproduce import __main__ as reproduce
from scripts.reproduce import theory
from scripts.sweep import __main__ as sweep

COMPLETE = """table_losses table_needle figure_train_lengths figure_train_4k figure_train_16k figure_entropy
    figure_sublog figure_sublog_unscaled""".split()  # from 2 methods and 3 lengths
FIELDS = "--vocab_size 384 --num_layers 1 --num_heads 1 --model_dim 32 --steps 30 --cooldown_steps 8 --save_every 5"
FIELDS += " --val_every 10 --val_lengths 256 1024 4096 --val_tokens 8192 --compile off --device cpu"

pytestmark = slow


def run(main, *argv, code=0):
    """Call a command in this process and return its output."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        found = exit_code(main, argv)
    assert found == code, output.getvalue()[-4000:]
    return output.getvalue()


@shared
def chain(shared_path):
    """Return the folder with data/ and runs/, the runs of the table, and the output of each command by name."""
    folder = shared_path
    write_lines(folder / "tales.jsonl", make_documents(5000))
    prepare([folder], folder / "data", "bpe:384", val_fraction=0.2, name="words")

    common = ["--runs-dir", folder / "runs", *"--scale mini --methods p_rope scale_invariant_p_rope --seeds 0".split()]
    fields = ["--data_dir", folder / "data", *FIELDS.split()]
    task = "--needle steps=3 sequences=4 examples=3 curriculum=0".split()
    options = [*common, *task, "--out", folder / "out", *fields]
    with pytest.MonkeyPatch.context() as patch, sweeps_in_this_process():
        patch.setattr(theory, "DRAWS", 2)  # of computed figures
        output = {"table": run(sweep.main, "table_losses", *common, *fields)}
        runs = sorted(folder.glob("runs/mini-*-s*/"))
        output["lengths"] = run(sweep.main, "figure_train_lengths", *common, *fields)
        output["needle"] = run(sweep.main, "table_needle", *common, *task, *fields)
        output["evaluate"] = run(evaluate.main, *runs, "--lengths", 128, 512, 2048, 8192, "--device", "cpu")
        output["all"] = run(reproduce.main, "all", *options, code=1)  # without table_llama
    return folder, runs, output


def test_every_run_of_the_sweep_is_finished_and_evaluated(chain):
    folder, runs, output = chain
    assert f"{len(runs)} runs: {len(runs)} finished" in output["table"] and "8192 (32x)" in output["evaluate"]
    for path in runs:
        assert [*read_json(path / "evaluation.json")["val_loss"]] == ["128", "512", "2048", "8192"]
    for path in folder.glob("runs/*/"):
        assert [record["step"] for record in steps_and_validations(path)[0]] == [*range(1, 31)], path


def test_items_that_the_runs_can_feed_are_complete_and_the_others_name_the_missing_runs(chain):
    folder, _, output = chain
    lines = {line.split(":")[0]: line for line in output["all"].splitlines() if ": " in line}
    for item in COMPLETE:
        assert re.search(r"\bcomplete", lines[item]), output["all"][-3000:]
        assert f"## {item}\n" in (folder / "out/tables.md").read_text()
        assert item.startswith("table") or (folder / f"out/figures/{item}.png").stat().st_size > 10_000
    assert "incomplete" in lines["figure_tau"] and "scripts.sweep figure_tau" in lines["figure_tau"]
    assert {*reproduce.PAPER_ITEMS} > {*COMPLETE, "figure_tau"}


def test_the_tables_hold_the_losses_and_accuracies_of_the_runs(chain):
    folder, runs, output = chain
    (path,) = folder.glob("runs/mini-p_rope-*/")
    loss = read_json(path / "summary.json")["val_loss"]["256"]
    sections = reproduce.read_sections(folder / "out/tables.md")
    assert re.search(rf"\| p-RoPE.*{loss:.3f}", sections["table_losses"])
    assert output["needle"].count(": fine-tuning finished") == len(runs)
    assert "0.000" in sections["table_needle"]
