"""Statistics, and our studies: the registered tests, and tables against plain numbers of the kept runs."""

import itertools
import math
import re
import statistics

import numpy as np
from commands import ROOT, parametrize, read_lines, rows_of, slow
from pytest import approx
from scipy.stats import t as student
from test_reproduce import cells_of, table_of

from configs.config import config_hash
from configs.sweeps import SI
from model.methods.names import canonical_name
from results.far.study import time_to_copy
from results.growth.study import slope
from results.mini.study import RIVALS
from results.pages import open_study
from results.paired import PairedTests
from scripts.reproduce.__main__ import read_sections
from scripts.reproduce.comparisons import difference_cell, differences, holm
from scripts.reproduce.study import Study
from scripts.reproduce.tables import paper_targets
from scripts.shared.looks import series_label, series_name
from scripts.shared.runs import StoredRun, read_runs
from scripts.shared.sweeps import studies, sweep
from scripts.shared.tables import format_mean, mean_and_stderr

pytestmark = slow

QUARTER = "form=barbero share=0.25"
FAST, XSA, ALIBI = f"{SI} {QUARTER}", f"p_rope+scale_invariant+xsa {QUARTER}", "alibi slope_scale=4"
FAST_MOMENTS, BOTH = f"{SI} form=barbero learn_moments=True share=0.25", f"{SI} base=64 learn_moments=True"

# ---- statistics ------------------------------------------------------------------------------------------------------


def test_holm_s_correction():
    assert holm([0.01, 0.04, 0.03, 0.005]) == approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def two_sided(t, freedom):
    """Return the probability of a Student's t at least as far from 0. Pages round it to six digits."""
    return approx(2 * student.sf(abs(t), freedom), rel=1e-5)


def test_differences_follow_welch_and_need_two_seeds():
    random = np.random.default_rng()
    counts = {SI: 5, "rope": 3, "alibi": 1, "yarn": 2}
    losses = {(series, 256): random.random(count).tolist() for series, count in counts.items()}
    losses["nope", 64] = [4.2, 4.3]
    rope, alibi, yarn = rows = differences(losses, SI, [256])
    assert [row["series"] for row in rows] == ["rope", "alibi", "yarn"]
    assert (rope["seeds"], rope["reference_seeds"]) == (3, 5)
    for row in (rope, yarn):
        values, ours = losses[row["series"], 256], losses[SI, 256]
        parts = [statistics.variance(x) / len(x) for x in (values, ours)]
        stderr, difference = math.sqrt(sum(parts)), statistics.fmean(values) - statistics.fmean(ours)
        squares = parts[0] ** 2 / (len(values) - 1) + parts[1] ** 2 / 4
        freedom = sum(parts) ** 2 / squares
        assert [row["difference"], row["stderr"]] == approx([difference, stderr])
        assert row["p"] == two_sided(difference / stderr, freedom)
    assert [rope["p_holm"], yarn["p_holm"]] == holm([rope["p"], yarn["p"]])
    assert alibi["stderr"] is alibi["p"] is alibi["p_holm"] is None


def assert_paired(paired, expected):
    """Compare PairedTests with paired t-tests of {(measure, rival): [difference of each seed]}, and the section."""
    rows = paired.rows()
    assert [(row["measure"], row["rival"]) for row in rows] == [key for key in expected if len(expected[key]) > 1]
    for row in rows:
        values = expected[row["measure"], row["rival"]]
        mean, stderr = mean_and_stderr(values)
        assert [row["difference"], row["stderr"], row["seeds"]] == approx([mean, stderr, len(values)])
        assert row["p"] == two_sided(mean / stderr, len(values) - 1)
    missing = [1.0] * (len(expected) - len(rows))  # too few seeds, but they count in the correction
    assert [row["p_holm"] for row in rows] == holm([row["p"] for row in rows] + missing)[: len(rows)]
    cells = [[series_name(row["rival"]), row["measure"], str(row["seeds"]), difference_cell(row)] for row in rows]
    assert rows_of("\n".join(paired.section()))[1:] == cells


def test_paired_tests_leave_out_known_seeds_and_count_tests_without_runs():
    losses = {"a": {0: 9.0, 1: 1.0, 2: 2.5, 3: 3.0}}
    losses |= {"b": {0: 8.0, 1: 1.5, 2: 2.0, 3: 5.0}, "c": {1: 7.0}}
    losses |= {"d": {0: 9.0, 1: 1.0}}
    expected = {("loss", "b"): [-0.5, 0.5, -2.0], ("loss", "c"): [-6.0]}
    assert_paired(PairedTests("T", "a", ["b", "c"], {"loss": losses}, "nats", [0]), expected)
    (row,) = PairedTests("T", "a", ["d"], {"loss": losses}, "nats").rows()
    assert (row["difference"], row["p"]) == (0, 1)  # equal differences have no t-test
    assert PairedTests("T", "a", ["b"], {"loss": {}}, "nats").section() == []


# ---- the registered tests --------------------------------------------------------------------------------------------

REACH = "loss, 4096 tokens (16x); copy gain, 1024 tokens (4x)"
FAR = "loss, 8192 tokens (16x); far gain, class far"
ROTATION = "loss with the fast rotation; change from the published to the fast rotation"
NAMES = "Scale-invariant p-RoPE, fastest pairs, share 0.25", "LogN+p-RoPE", "RoPE"
MASKED = "; ".join(f"{kind} of {name}" for kind in ("loss at 8192", "far gain") for name in NAMES)
# Item, title, series, rivals, measures, seeds that were known.
REGISTERED = f"""
taught | Primary comparisons | {SI} | rope; logn_p_rope; {ALIBI} | {REACH} |
taught | Fitted rotation | {SI} base=64 | rope base=625; logn_p_rope base=64; {ALIBI} | {REACH} |
taught | Learned moments | {SI} learn_moments=True | {SI}; logn_p_rope; {ALIBI}; yarn \
| loss, 4096 tokens (16x); copy gain, 512 tokens (2x) | 0
taught | Both | {BOTH} | {SI} base=64; rope base=625; logn_p_rope base=64; {ALIBI}; yarn; yarn base=625 | {REACH} |
taught | Fast rotation | {FAST} | rope; logn_p_rope; {ALIBI}; yarn | {REACH} | 0
taught | Fast and moments | {FAST_MOMENTS} | {BOTH}; logn_p_rope base=64; {ALIBI}; yarn | {REACH} | 0 1
taught | Xsa | {XSA} | {FAST} | {REACH} | 0
taught | All pairs | {FAST} | logn_rope | loss, 4096 tokens (16x) | 0
far | Primary comparisons | {SI} | rope; logn_p_rope; {ALIBI} \
| time to copy, M tokens; loss, 512 tokens (1x); {FAR} | 3 4 5 6
far | Fast at far | {FAST} | {SI}; logn_p_rope; {ALIBI}; bam_ssmax | {FAR} | 3 4 5 6
far | Xsa at far | {XSA} | {FAST} | {FAR} | 3 4 5 6
far | All pairs | {FAST} | logn_rope | loss, 8192 tokens (16x) | 3 4 5 6
taught_halves | Halves | {FAST} | {FAST} terms=m; {FAST} terms=a | {REACH} |
taught_rotation | Tests | {SI} | logn_p_rope; p_rope | {ROTATION} | 0
far_rotation | Tests | {SI} | logn_p_rope; p_rope | {ROTATION} | 3 4 5 6
far_again | Again | {SI} {QUARTER} | logn_p_rope {QUARTER} | loss, 8192 tokens (16x) | 0 1 2
far_again | Recall | {SI} {QUARTER} | logn_p_rope {QUARTER} | values recalled, 8192 tokens | 0 1 2
documents | The mask | masked | unmasked | {MASKED} |
documents | The methods with the mask | {SI} {QUARTER} | logn_p_rope; rope | loss, 8192 tokens; far gain, class far |
"""
RECALLED = {row["name"]: row["spread"]["8192"] for row in read_lines(ROOT / "results/far/recall.jsonl")}
STUDIES = {item: module for module in studies() for item in module.TESTS}


def kept_summaries(place):
    """Return the lines of the kept runs, also as other methods: {(series, seed): line}."""
    found = {}
    for run in read_runs(ROOT / f"results/{place}/runs.jsonl"):
        if run.line["preset"] != place or run.config.data_seed:
            continue
        found[series_label(run.config), run.config.seed] = run.line
        for method in run.config.validate_as:
            fields = ("val_loss", "copy_gain", "far_gain")
            other = {field: run.line.get(f"{field}_as", {}).get(method, {}) for field in fields}
            found[series_label(run.config, method), run.config.seed] = run.line | other
    return found


def first_above_one(points):
    """Return where straight lines through the points first reach 1."""
    for (x, low), (end, high) in zip(points, points[1:]):
        if high > 1:
            return x if low >= 1 else float(np.interp(1, [low, high], [x, end]))


@parametrize("curve, expected", [
    ([(0, 0), (1, 0.5), (2, 2.5), (3, 0.1)], 1.25),
    ([(0, -0.2), (1, 0.9)], None),
    ([(0, 3.0), (1, 4.0)], 0),
    ([(0, 0), (1, 1.0), (2, 1.5)], 1),
    ([], None),
])
def test_time_to_copy_is_where_the_curve_first_passes_one_nat(curve, expected):
    assert time_to_copy(curve) == first_above_one(curve) == expected


def copy_time(line):
    """Return the M training tokens until a run of `far` copies over 64 tokens, None if it does not copy."""
    points = [point for point in line["curve"] if "copy_gain" in point]
    return first_above_one([(point["step"] * 2048 / 1e6, point["copy_gain"]["random"]["64"]) for point in points])


def plain_value(measure, line):
    """Return the number of a measure in a line of a kept run, None if there is none or it does not count."""
    if line is None:
        return None
    number = re.search(r"\d+", measure)
    if measure.startswith("values"):
        return RECALLED.get(line["name"])
    if measure.startswith("time"):
        return copy_time(line) or 3072 * 2048 / 1e6
    if measure.startswith("copy"):
        return line["copy_gain"]["random"].get(number[0])
    if line["preset"] == "far" and copy_time(line) is None:
        return None
    return line.get("far_gain", {}).get("far") if measure.startswith("far") else line["val_loss"].get(number[0])


@parametrize("item", STUDIES)
def test_registered_tests_stay_and_follow_from_the_kept_runs(item):
    scale = STUDIES[item].SCALE
    study = open_study(item, scale, scale)
    found = STUDIES[item].TESTS[item](study)
    registered = []
    for paired in found:
        lists = "; ".join(paired.rivals), "; ".join(paired.measures), " ".join(map(str, paired.left_out))
        registered.append(" | ".join([item, paired.title, paired.ours, *lists]).strip())
    assert registered == [line for line in REGISTERED.splitlines() if line.startswith(f"{item} |")]
    if item.endswith(("rotation", "documents")):
        return  # see below
    lines = kept_summaries(scale)
    for paired in found:
        expected = {}
        for measure, rival in itertools.product(paired.measures, paired.rivals):
            pairs = []
            for seed in {run.config.seed for run in study.runs} - {*paired.left_out}:
                pairs.append([plain_value(measure, lines.get((series, seed))) for series in (paired.ours, rival)])
            expected[measure, rival] = [ours - others for ours, others in pairs if None not in (ours, others)]
        assert_paired(paired, expected)


@parametrize("scale, seeds", [("taught", [1, 2, 3]), ("far", [0, 1, 2])])
def test_rotation_tests_the_rules_and_their_interaction_with_the_rotation(scale, seeds):
    random, losses, runs = np.random.default_rng(), {}, []
    for run in sweep(f"{scale}_rotation", scale, seeds=[0, 1, 2, 3]):
        loss = losses[series_label(run.config), run.config.seed] = 3 + random.random()
        summary = dict(val_loss=dict.fromkeys(run.config.val_lengths, loss), val_tokens=1, data="text")
        runs.append(StoredRun(ROOT / run.name, run.config, summary))
    study = Study(f"{scale}_rotation", scale, ROOT, runs, seeds=[0, 1, 2, 3])
    (paired,) = STUDIES[study.item].TESTS[study.item](study)
    fast, change = {}, {}
    for rule in (SI, "logn_p_rope", "p_rope"):
        fast[rule] = np.array([losses[f"{rule} {QUARTER}", seed] for seed in seeds])
        change[rule] = fast[rule] - [losses[rule, seed] for seed in seeds]
    expected = {}
    for measure, values in zip(ROTATION.split("; "), (fast, change)):
        for rival in ("logn_p_rope", "p_rope"):
            expected[measure, rival] = (values[SI] - values[rival]).tolist()
    assert len(study.finished) == 48 and len({series for series, _ in losses}) == 12
    assert_paired(paired, expected)


def test_documents_compare_runs_with_the_mask_and_without_it():
    random, runs, losses, gains = np.random.default_rng(), [], {}, {}
    for run in sweep("documents", "far", seeds=[0, 1, 2]):
        key = run.config.document_mask, series_label(run.config), run.config.seed
        losses[key], gains[key] = random.random(2)
        summary = dict(val_loss={"512": 1.0, "8192": losses[key]}, far_gain={"far": gains[key]}, val_tokens=1)
        runs.append(StoredRun(ROOT / run.name, run.config, summary | {"data": "text"}))
    study = Study("documents", "far", ROOT, runs, seeds=[0, 1, 2])
    of_mask, of_methods = STUDIES["documents"].TESTS["documents"](study)

    def difference(values, ours, theirs):
        return [values[*ours, seed] - values[*theirs, seed] for seed in range(3)]

    expected, rows = {}, zip(MASKED.split("; "), itertools.product((losses, gains), (FAST, "logn_p_rope", "rope")))
    for measure, (values, series) in rows:
        expected[measure, "unmasked"] = difference(values, ("train", series), ("off", series))
    assert len(study.finished) == 18 and len(expected) == 6
    assert_paired(of_mask, expected)
    expected = {}
    for measure, values in (("loss, 8192 tokens", losses), ("far gain, class far", gains)):
        for rival in ("logn_p_rope", "rope"):
            expected[measure, rival] = difference(values, ("train", FAST), ("train", rival))
    assert_paired(of_methods, expected)


# ---- the tables ------------------------------------------------------------------------------------------------------


def committed(place, item, after="## "):
    """Return the cells of the table rows of a committed section that follow some words, by first cell."""
    text = read_sections(ROOT / f"results/{place}/tables.md")[item].split(after, 1)[1]
    return cells_of(text[text.index("\n| ") :].split("\n\n")[0])


def mean_of(values):
    return format_mean(*mean_and_stderr(values))


def test_the_tables_of_far_are_means_of_the_kept_runs():
    lines = kept_summaries("far")
    copies, late = committed("far", "far"), committed("far", "far", after="8192 (16x) loss from")
    errors = committed("far", "far", after="blocks of the validation text")
    for series in (SI, "rope", "logn_p_rope", ALIBI, FAST):
        found = [line for (name, _), line in lines.items() if name == series]
        times = [time for time in map(copy_time, found) if time is not None]
        spread = f" ({min(times):.1f} to {max(times):.1f})"
        expected = [f"{len(times)} of {len(found)}", f"{statistics.fmean(times):.1f}{spread}"]
        assert copies[series_name(series)][:2] == expected
        for column, kind in enumerate(("far", "near", "none"), start=2):
            assert copies[series_name(series)][column] == mean_of([line["far_gain"][kind] for line in found])
        gains = []
        for line in found:
            counts = line["far_tokens"]
            total = sum(gain * counts[kind] for kind, gain in line["far_gain"].items())
            gains.append(total / sum(counts.values()))
        assert copies[series_name(series)][5] == mean_of(gains)
        for length in (512, 2048, 8192):
            # Octave k > 0 has the positions 2^(k-1) .. 2^k - 1, so a position has octave bit_length().
            octaves = [line.get("val_loss_by_position", {}).get(str(length), ()) for line in found]
            octaves = [values for values in octaves if len(values) > 9]
            means = [np.mean([values[i.bit_length()] for i in range(256, length)]) for values in octaves]
            column = 1 + [512, 2048, 8192].index(length)
            assert late[series_name(series)][column].strip("*") == mean_of(means)
    differences = []
    for seed in range(5):
        blocks = (lines[series, seed]["val_loss_by_block"]["8192"] for series in (SI, "logn_p_rope"))
        ours, logn = (np.reshape(losses, (16, -1)).mean(axis=1) for losses in blocks)
        differences.append(ours - logn)
    difference = np.mean(differences, axis=0)
    mean, error = map(float, errors["LogN+p-RoPE"][1].split(" ± "))
    assert mean == approx(difference.mean(), abs=6e-4)
    assert error == approx(difference.std() / 16**0.5, rel=0.1)


@parametrize("place, item, number, field", [
    ("taught", "taught", 1, "val_loss"), ("taught", "taught", 2, "copy_gain"), ("mini", "table_losses", 1, "val_loss"),
])
def test_tables_are_means_of_the_kept_runs_beside_the_papers_numbers(place, item, number, field):
    lines, trained_at = kept_summaries(place), {"4k": 4096, "16k": 16_384, "64k": 65_536}
    text = read_sections(ROOT / f"results/{place}/tables.md")[item]
    table = table_of("\n| method" + text.split("\n\n| method")[number])
    names = {series_name(series) + "\u2020" * (series == "yarn"): series for series in (SI, "rope", "yarn", "alibi")}
    for (name, head), cell in table.items():
        if name not in names or head == "seeds":
            continue
        series, first, *others = names[name], *head.split(" ")
        if first == "paper":
            target = paper_targets(item).get((series, trained_at[others[0]]))
            assert cell.split(" ")[0] == (f"{target['mean']:.3f}" if target else "")
        else:
            found = [line[field] for (label, _), line in lines.items() if label == series]
            found = [values.get("random", values) for values in found]
            assert cell == mean_of([values[first] for values in found if first in values])
    assert len({name for name, _ in table} & names.keys()) == 4


def test_tau_by_length_shows_the_kept_runs():
    lines = [run.line for run in read_runs(ROOT / "results/mini/runs.jsonl")]
    text = read_sections(ROOT / "results/mini/tables.md")["tau_by_length"]
    at_1x = {row[1]: row[4] for row in rows_of(text) if row[0] == "256"}
    assert [*at_1x] == "0.0391 0.156 0.625 2.5 10 40 learned".split()
    for tau, options in {"10": {}, "0.625": {"tau": 0.625}, "40": {"tau": 40.0}}.items():
        found = [line["val_loss"]["256"] for line in lines
                 if (line["preset"], line["method"], line["method_options"]) == ("mini", SI, options)]  # fmt: skip
        assert at_1x[tau].strip("*") == mean_of(found)
    (bold,) = [tau for tau, cell in at_1x.items() if cell.startswith("**")]
    assert bold == min(at_1x, key=lambda tau: float(at_1x[tau].strip("*")[:5]))

    learned = cells_of(text.split("### What heads learned")[1])  # of the row with the longest training length
    (line,) = [line for line in lines if line["preset"] == "mini_4096" and "learn_tau" in line["method_options"]]
    layers = [line["method_parameters"][f"blocks.{i}.attention.method.score_change.log_tau"] for i in range(3)]
    shown = [", ".join(f"{math.exp(value):.2f}" for value in layer) for layer in layers]
    assert learned[series_name(f"{SI} learn_tau=True tau=0.625")] == ["4096", str(line["seed"]), *shown]


def test_rivals_are_methods_that_the_paper_s_sweeps_lack():
    assert RIVALS == [canonical_name(name) for name in RIVALS]
    assert not {*RIVALS} & {run.config.method for run in sweep("all", "mini")}
    others = [config_hash(run.config) for run in sweep("table_rivals", "mini") if run.config.method not in RIVALS]
    assert {*others} <= {config_hash(run.config) for run in sweep("table_losses", "mini")}


def test_the_slope_of_the_lead_is_that_of_a_line_with_student_s_interval():
    parameters = np.array([1.0, 1.0, 2.0, 4.0]) * 1e6
    leads = np.array([0.1, 0.3, 0.4, 0.9])
    x = np.log2(parameters)
    fitted, start = np.polyfit(x, leads, 1)
    variance = sum((leads - start - fitted * x) ** 2) / 2
    error = math.sqrt(variance / sum((x - x.mean()) ** 2))
    half = student.ppf(0.975, 2) * error
    found = re.findall(r"[+-][\d.]+", slope([*zip(parameters, range(4), leads)]))
    expected = [fitted, fitted - half, fitted + half]
    assert [*map(float, found)] == approx(expected, abs=5.1e-4)
