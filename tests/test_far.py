"""The study `far`: time to copy, pairs of runs that copy, and the error from the text, against plain numbers."""

import json

import numpy as np
import pytest
from test_beyond import assert_primary_comparisons
from test_reproduce import call, cells_of, is_figure, write_run  # noqa: F401

from configs.sweeps import SI
from results.taught.study import FAST
from scripts.shared.looks import series_label
from scripts.shared.runs import time_to_copy
from scripts.shared.sweeps import sweep
from scripts.shared.tables import mean_and_stderr

pytestmark = pytest.mark.slow

# M tokens, of seed 0; the others do not copy
BEGINS = {SI: 1.5, "logn_p_rope": 0.8, "alibi slope_scale=4": 2.2, FAST: 1.1}
BLOCKS = 16


def begins(series, seed):
    return BEGINS[series] + seed**2 / len(series) if series in BEGINS else None


@pytest.mark.parametrize("curve, expected", [
    ([(0, 0), (1, 0.5), (2, 2.5), (3, 0.1)], 1.25),
    ([(0, -0.2), (1, 0.9)], None),
    ([(0, 3.0), (1, 4.0)], 0),
    ([(0, 0), (1, 1.0), (2, 1.5)], 1),
    ([], None),
])
def test_time_to_copy_is_where_the_curve_first_passes_one_nat(curve, expected):
    assert time_to_copy(curve) == expected


def write_far(runs_dir, seeds):
    """Runs with straight copy gains that pass 1 nat where copying begins. Return losses by (series, seed)."""
    random, values = np.random.default_rng(), {}
    for run in sweep("far", "far", seeds=seeds):
        series, seed = series_label(run.config), run.config.seed
        count = BLOCKS * (4 if seed == 1 else 1)  # runs with shorter validation lengths have more blocks
        worse = series in ("alibi", "alibi slope_scale=16")  # than the other slopes of ALiBi
        blocks = (3 + worse + random.random((4, count))).round(5)
        losses = dict(zip(run.config.val_lengths, blocks.mean(axis=1).tolist()))
        begin, end = begins(series, seed), run.config.steps * run.config.batch_tokens / 1e6
        slope = 1 / begin if begin else 0.01
        gains = {str(gap): slope * end for gap in run.config.val_copy_gaps}
        octaves = {str(n): random.random(n.bit_length()).round(5).tolist() for n in losses}
        by_block = {str(n): found.tolist() for n, found in zip(run.config.val_lengths, blocks)}
        far_gain = dict(far=random.random(), near=0.1, none=0.0)
        summary = dict(copy_gain={"random": gains, "text": gains}, far_gain=far_gain, val_loss_by_block=by_block)
        summary["val_loss_by_position"] = octaves
        if run.config.validate_as:
            for key in ("copy_gain", "far_gain"):
                summary[f"{key}_as"] = dict.fromkeys(run.config.validate_as, summary[key])
        others = dict.fromkeys(run.config.validate_as, losses)
        steps = (0, run.config.steps)
        folder = write_run(runs_dir, run, losses, steps=steps, val_tokens=524_288, others=others, **summary)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for record in records:
            if "val_loss" in record:
                record["copy_gain"] = {"random": {"64": slope * record["step"] * run.config.batch_tokens / 1e6}}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        blocks = dict(zip(run.config.val_lengths, blocks))
        values[series, seed] = losses | far_gain | {"blocks": blocks, "octaves": octaves}
    return values


def test_far_compares_runs_that_copy(tmp_path, call):  # noqa: F811
    values = write_far(tmp_path / "runs", range(3))
    code, output = call("far")
    assert code == 0 and all(is_figure(tmp_path / "out" / "figures" / name) for name in ("far", "far_time"))
    copies = cells_of(next(part for part in output.out.split("\n\n") if "seeds that copy" in part))
    assert copies["RoPE"][:2] == ["0 of 3", "not"] and copies["LogN+p-RoPE"][:2] == ["3 of 3", "1.0 (0.8 to 1.2)"]
    mean, stderr = mean_and_stderr([values[SI, seed]["far"] for seed in range(3)])
    assert copies["Scale-invariant p-RoPE"][2] == f"{mean:.3f} ± {stderr:.3f}"

    late = cells_of(next(part for part in output.out.split("\n\n") if "from position 256 on" in part))
    for column, length in enumerate((512, 2048, 8192), start=1):
        # Octave k > 0 has the positions 2^(k-1) .. 2^k - 1, so a position has octave bit_length().
        positions = [values[SI, seed]["octaves"][str(length)] for seed in range(3)]
        means = [np.mean([octaves[i.bit_length()] for i in range(256, length)]) for octaves in positions]
        mean, stderr = mean_and_stderr(means)
        assert late["Scale-invariant p-RoPE"][column].strip("*") == f"{mean:.3f} ± {stderr:.3f}"

    budget, expected = 3072 * 2048 / 1e6, []
    rivals = ("rope", "logn_p_rope", "alibi slope_scale=4")
    for rival in rivals:
        times = [begins(SI, seed) - (begins(rival, seed) or budget) for seed in range(3)]
        expected.append((rival, "time to copy, M tokens", times))
    labels = {512: "loss, 512 tokens (1x)", 8192: "loss, 8192 tokens (16x)", "far": "far gain, class far"}
    for key, label in labels.items():
        for rival in rivals[1:]:  # RoPE does not copy
            differences = [values[SI, seed][key] - values[rival, seed][key] for seed in range(3)]
            expected.append((rival, label, differences))
    assert_primary_comparisons(output.out, expected, left_out=3)  # loss and far gain against RoPE
    expected = [(rival, labels[key], [values[FAST, seed][key] - values[rival, seed][key] for seed in range(3)])
                for key in (8192, "far") for rival in (SI, *rivals[1:])]  # fmt: skip
    assert_primary_comparisons(output.out, expected, left_out=2, title="Fast at far")  # BAM does not copy

    section = output.out.split("### Primary comparisons")[1]
    cells = cells_of(section.split("blocks of the validation text")[1])["LogN+p-RoPE"]
    pairs = [[values[series, seed]["blocks"][8192].reshape(BLOCKS, -1).mean(axis=1) for series in (SI, "logn_p_rope")]
             for seed in range(3)]  # fmt: skip
    difference = np.mean([ours - logn for ours, logn in pairs], axis=0)
    mean, error = map(float, cells[1].split(" ± "))
    assert mean == pytest.approx(difference.mean(), abs=6e-4)
    assert error == pytest.approx(difference.std() / BLOCKS**0.5, rel=0.1)


def test_far_of_one_seed_compares_nothing(tmp_path, call):  # noqa: F811
    write_far(tmp_path / "runs", [0])
    code, output = call("far")
    assert code == 1 and "### Primary comparisons" not in output.out and is_figure(tmp_path / "out/figures/far_time")
