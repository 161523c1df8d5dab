"""Statistics and the studies beyond the paper: their numbers against plain ones."""

import json
import math
import statistics

import numpy as np
import pytest
from test_reproduce import call, cells_of, is_figure, same, write_run, write_study  # noqa: F401

from configs.config import config_hash
from configs.presets import preset
from measure.flops import training_flops_per_token
from model.methods.make import layer_methods
from model.methods.names import canonical_name
from results.mini.study import RIVALS
from scripts.reproduce.comparisons import describe_variances, difference_cell, differences, holm
from scripts.shared.looks import series_label, series_name
from scripts.shared.runs import read_runs
from scripts.shared.sweeps import sweep
from scripts.shared.tables import mean_and_stderr

pytestmark = pytest.mark.slow

REFERENCE = "scale_invariant_p_rope"


def test_holm_s_correction():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def two_sided(t, freedom):
    """Return the probability of a Student's t at least as far from 0, by integrating its density."""
    angle = np.linspace(np.arctan(abs(t) / math.sqrt(freedom)), np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)  # t = sqrt(freedom) tan(angle)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 2 * scale * np.trapezoid(density, angle)


def samples(sd, *others):
    """Return losses at 256 of the reference, of standard deviation 0.01, of RoPE with sd, and others."""
    random = np.random.default_rng()
    ours = random.permutation([4.0, 4.0, 4.01, 4.02, 4.02]) + 0.002 * random.random()
    rope_losses = 4.01 + sd * random.permutation([-1, 0, 1])
    trained = {(REFERENCE, 256): ours.tolist(), ("rope", 256): rope_losses.tolist(), ("nope", 64): [4.2, 4.3]}
    return trained | dict(others)


def test_differences_of_methods_with_equal_variance_follow_student():
    one, borrowed = [4.03], [3.0, 4.0, 5.0]
    losses = samples(0.012, (("alibi", 256), one), (("yarn", 256), borrowed))
    ours, rope_losses = losses[REFERENCE, 256], losses["rope", 256]
    variance = (4 * statistics.variance(ours) + 2 * statistics.variance(rope_losses)) / 6  # of 5 seeds and of 3
    found = {row["series"]: row for row in differences(losses, REFERENCE, [256], not_trained={"yarn"})}
    assert [*found] == ["rope", "alibi", "yarn"]
    assert (found["rope"]["seeds"], found["rope"]["reference_seeds"]) == (3, 5)
    for series, values in ("rope", rope_losses), ("alibi", one), ("yarn", borrowed):
        stderr = math.sqrt(variance / len(values) + variance / 5)
        difference = statistics.fmean(values) - statistics.fmean(ours)
        assert [found[series]["difference"], found[series]["stderr"]] == pytest.approx([difference, stderr])
        assert found[series]["p"] == pytest.approx(two_sided(difference / stderr, 6), rel=1e-4)
    assert [row["p_holm"] for row in found.values()] == holm([row["p"] for row in found.values()])
    assert "256: p = " in describe_variances(losses, [256], {"yarn"})


def test_differences_of_methods_with_unequal_variance_follow_welch():
    losses = samples(0.3)
    ours, rope_losses = losses[REFERENCE, 256], losses["rope", 256]
    (row,) = differences(losses, REFERENCE, [256])
    parts = [statistics.variance(x) / len(x) for x in (rope_losses, ours)]
    stderr, difference = math.sqrt(sum(parts)), statistics.fmean(rope_losses) - statistics.fmean(ours)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 4)
    assert [row["difference"], row["stderr"]] == pytest.approx([difference, stderr])
    assert row["p"] == row["p_holm"] == pytest.approx(two_sided(difference / stderr, freedom), rel=1e-4)
    assert describe_variances(losses, [256], ()).startswith("At 256 ")
    alone = differences(samples(0.3, (("alibi", 256), [4.03])), REFERENCE, [256])[-1]
    assert alone["stderr"] is alone["p"] is alone["p_holm"] is None  # a seed says nothing of the method's own variance


@pytest.mark.filterwarnings("ignore:Precision loss")
@pytest.mark.parametrize("odd", [[4.0, 4.0, 4.0], [4.0, math.nan, 4.1]])
def test_losses_that_are_equal_or_not_finite_leave_the_other_methods_their_tests(odd):
    rows = differences(samples(0.012, (("alibi", 256), odd)), REFERENCE, [256])
    assert rows[0]["p"] > 0.01 and rows[0]["stderr"] > 0


def test_tau_by_length(tmp_path, call):  # noqa: F811
    write_study(tmp_path / "runs", "tau_by_length")
    losses = {run.path.name: run.summary["val_loss"]["256"] for run in read_runs(tmp_path / "runs")}
    (learning,) = tmp_path.glob("runs/mini_1024-*learn_tauTrue*")
    metrics = learning / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    learned = {f"blocks.{i}.attention.method.score_change.log_tau": [math.log(i + 1), math.log(0.25)] for i in range(3)}
    metrics.write_text(metrics.read_text() + json.dumps(last | dict(method_parameters=learned)) + "\n")
    code, output = call("tau_by_length", "--scale", "mini")
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / "tau_by_length")
    page, section = output.out.split("### What heads learned")
    ((name, cells),) = [row for row in cells_of(section).items() if row[0] not in ("method", "")]
    assert name.startswith("Scale-invariant p-RoPE, \u03c4 learned by each head")
    assert cells == ["1024", "0", "1.00, 0.25", "2.00, 0.25", "3.00, 0.25"]
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert sum(bool(cell) for line in lines for cell in line[4:]) == 7 * (4 + 3 + 2)  # of 256, 1024, 4096 up to 16,384
    at_1x = {line[1]: line[4].strip("*").split(" ")[0] for line in lines if line[0] == "256"}
    assert [*at_1x] == ["0.0391", "0.156", "0.625", "2.5", "10", "40", "learned"]
    for tau, name in (("10", ""), ("0.625", "-tau0.625")):
        assert at_1x[tau] == f"{losses[f'mini-{REFERENCE}{name}-s0']:.3f}"
    (bold,) = [line for line in lines if line[0] == "256" and line[4].startswith("**")]
    assert bold[1] == min(at_1x, key=lambda tau: float(at_1x[tau]))


def test_heads_that_differ(tmp_path, call):  # noqa: F811
    write_study(tmp_path / "runs", "scale_invariant_by_head")
    code, output = call("scale_invariant_by_head", "--scale", "mini")
    assert code == 0 and "| minus Scale-invariant p-RoPE, \u03c4 = 0.625 " in output.out


def test_rivals_are_methods_that_the_paper_s_sweeps_lack():
    assert RIVALS == [canonical_name(name) for name in RIVALS]
    assert not {*RIVALS} & {run.config.method for run in sweep("all", "mini")}
    paper = {config_hash(run.config) for run in sweep("table_losses", "mini")}
    for run in [*sweep("table_rivals", "mini"), *sweep("table_rivals", "paper", seeds=[0])]:
        layer_methods(run.config)
        assert run.preset != "mini" or run.config.method in RIVALS or config_hash(run.config) in paper


def test_table_rivals_has_the_differences_to_ours(tmp_path, call):  # noqa: F811
    chosen = ["fox", "alibi", "llama4", REFERENCE]
    for run in sweep("table_rivals", "mini", methods=chosen):
        above = {"fox": 0.25, "alibi": 0.4}.get(run.config.method, 0.5)
        if run.config.method != "alibi" or run.config.seed == 0:
            write_run(tmp_path / "runs", run, same(run, 4 + above + 0.01 * run.config.seed))
    code, output = call("table_rivals", "--scale", "mini", "--methods", *chosen)
    assert code == 1 and "RoPE+NTK" not in output.out
    cells = cells_of(output.out.split("### Differences")[1])
    assert cells["FoX"] == ["3, 3", *["**-0.250 \u00b1 0.008** (p < 0.001)"] * 4]
    assert cells["ALiBi"] == ["1, 3", *["**-0.110 \u00b1 0.012** (p < 0.001)"] * 4]
    _, output = call("table_rivals", "--scale", "mini", "--seeds", "0", "--methods", *chosen)
    assert "### Differences" not in output.out


def write_taught(runs_dir, seeds):
    """Runs of the study: losses and copy gains with known differences to scale-invariant p-RoPE, by series."""
    above = {REFERENCE: 0.0, "rope": 0.5, "logn_p_rope": 0.1, "alibi": 0.9, "alibi slope_scale=4": 0.7}
    above |= {f"{REFERENCE} base=64": -0.1, "rope base=625": 0.4, "logn_p_rope base=64": 0.2}
    above |= {f"{REFERENCE} base=64 learn_moments=True": -0.3}
    for run in sweep("taught", "taught", seeds=seeds):
        series, seed = series_label(run.config), run.config.seed
        loss = 3.0 + above.get(series, 1.0) + 0.3 * seed + 0.01 * ((seed * len(series)) % 5)
        gains = {str(gap): 4.0 - loss + 3.0 - gap / 8192 for gap in run.config.val_copy_gaps}
        steps = (0, run.config.steps)
        write_run(runs_dir, run, same(run, loss), steps=steps, copy_gain={"random": gains, "text": gains})


def test_one_set_of_weights_with_two_bases_has_two_yarns():
    labels = {series_label(run.config, "yarn") for run in sweep("taught", "taught") if "yarn" in run.config.validate_as}
    assert labels == {"yarn", "yarn base=625"}


def test_taught_compares_runs_of_one_seed(tmp_path, call):  # noqa: F811
    write_taught(tmp_path / "runs", range(5))
    code, output = call("taught")
    assert code == 0 and is_figure(tmp_path / "out" / "figures" / "taught")
    first, second, costs = output.out.split("### Primary comparisons")[0].split("\n\n| ")[1:]
    assert cells_of(f"| {costs}")["RoPE"] == ["9", f"{training_flops_per_token(preset('taught')):,}", "125"]
    assert f"{4096} (16x) loss" in first and f"{2048} (8x) copy gain" in second
    assert cells_of(f"| {first}")["RoPE"][0] == "5"
    stored = {(series_label(run.config), run.config.seed): run.summary for run in read_runs(tmp_path / "runs")}
    alibi, learned = "alibi slope_scale=4", f"{REFERENCE} learn_moments=True"  # ALiBi's best slopes
    fitted = ["rope base=625", "logn_p_rope base=64", alibi]
    fast, both = f"{REFERENCE} form=barbero share=0.25", f"{REFERENCE} base=64 learn_moments=True"
    for title, ours, rivals, seeds, gap, left_out in (
        ("Primary comparisons", REFERENCE, ["rope", "logn_p_rope", alibi], range(5), "1024", 0),
        ("Fitted rotation", f"{REFERENCE} base=64", fitted, range(5), "1024", 0),
        ("Both", both, [f"{REFERENCE} base=64", *fitted], range(5), "1024", 4),
        ("Fast rotation", fast, ["rope", "logn_p_rope", alibi], range(1, 5), "1024", 2),
        ("Fast and moments", fast.replace(" s", " learn_moments=True s"), [both, *fitted[1:]], range(2, 5), "1024", 2),
        ("Learned moments", learned, [REFERENCE, "logn_p_rope", alibi], range(1, 5), "512", 2),  # YaRN has no losses
    ):
        expected = []
        for measure, tokens in (("loss", "4096"), ("copy gain", gap)):
            for rival in rivals:

                def value(series, seed):
                    summary = stored[series, seed]
                    return summary["val_loss"][tokens] if measure == "loss" else summary["copy_gain"]["random"][tokens]

                label = f"{measure}, {tokens} tokens ({int(tokens) // 256}x)"
                expected.append((rival, label, [value(ours, seed) - value(rival, seed) for seed in seeds]))
        assert_primary_comparisons(output.out, expected, left_out, title)


def assert_primary_comparisons(page, expected, left_out=0, title="Primary comparisons"):
    """Compare the section of a page with paired t-tests of (rival, measure, [difference of each seed]).

    left_out: tests that have too few seeds, but count in the correction.
    """
    lines = page.split(f"### {title}")[1].split("\n\n")[2].splitlines()[2:]
    rows = [dict(zip(("difference", "stderr"), mean_and_stderr(differences))) for *_, differences in expected]
    freedom = len(expected[0][2]) - 1
    p_values = holm([two_sided(row["difference"] / row["stderr"], freedom) for row in rows] + [1.0] * left_out)
    for line, (rival, measure, _), row, p in zip(lines, expected, rows, p_values[: len(rows)], strict=True):
        cells = [series_name(rival), measure, str(freedom + 1), difference_cell(row | dict(p_holm=p))]
        assert [cell.strip() for cell in line.split("|")[1:-1]] == cells


def test_taught_of_few_runs_compares_the_runs_that_exist(tmp_path, call):  # noqa: F811
    write_taught(tmp_path / "runs", [0])
    code, output = call("taught")
    assert code == 1 and "minus each rival" not in output.out and is_figure(tmp_path / "out/figures/taught")


@pytest.mark.parametrize("scale, length, seeds", [("taught", "4096", [1, 2, 3]), ("far", "8192", [0, 1, 2, 3])])
def test_rotation_tests_the_rules_and_their_interaction_with_the_rotation(tmp_path, call, scale, length, seeds):  # noqa: F811
    random, losses = np.random.default_rng(), {}
    for run in sweep(f"{scale}_rotation", scale, seeds=[0, 1, 2, 3]):
        loss = 3 + random.random()
        losses[series_label(run.config), run.config.seed] = loss
        gains = {"random": dict.fromkeys(map(str, run.config.val_copy_gaps), 1.0)}
        write_run(tmp_path / "runs", run, same(run, loss), steps=(0, run.config.steps), copy_gain=gains)
    code, output = call(f"{scale}_rotation", "--seeds", "0", "1", "2", "3")
    assert code == 0 and len({series for series, _ in losses}) == 12
    expected = []
    for measure in ("loss with the fast rotation", "change from the published to the fast rotation"):
        for rival in ("logn_p_rope", "p_rope"):
            found = []
            for seed in seeds:
                ours, other = (losses[f"{rule} form=barbero share=0.25", seed] for rule in (REFERENCE, rival))
                if measure.startswith("change"):
                    ours, other = ours - losses[REFERENCE, seed], other - losses[rival, seed]
                found.append(ours - other)
            expected.append((rival, measure, found))
    assert_primary_comparisons(output.out, expected, title="Tests")
