"""The studies beyond the paper: their numbers against plain ones, and their pages."""

import json
import math
import re
import statistics

import numpy as np
import pytest
import torch
from test_gpt import make_random_gpt, random_tokens
from test_reproduce import call, is_figure, rows, write_models, write_run, write_study  # noqa: F401 (call is a fixture)

from configs.command_line import read_config
from configs.runs import grid
from configs.sweeps import BEST, RIVALS, sweep
from model.methods import canonical_name
from runtime.build import build_model
from runtime.validation import means_by_octave
from scripts.reproduce import far_tokens
from scripts.reproduce.comparisons import compare, describe_variances, difference_cell, differences, holm
from scripts.shared.looks import series_label, series_name
from scripts.shared.runs import read_runs
from scripts.shared.tables import mean_and_stderr
from scripts.sweep.plan import check_run

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
    theirs = 4.01 + sd * random.permutation([-1, 0, 1])
    return {(REFERENCE, 256): ours.tolist(), ("rope", 256): theirs.tolist(), ("nope", 64): [4.2, 4.3], **dict(others)}


def test_differences_where_the_methods_vary_alike_are_those_of_student():
    one, borrowed = [4.03], [3.0, 4.0, 5.0]
    losses = samples(0.012, (("alibi", 256), one), (("yarn", 256), borrowed))
    ours, theirs = losses[REFERENCE, 256], losses["rope", 256]
    variance = (4 * statistics.variance(ours) + 2 * statistics.variance(theirs)) / 6  # of what was trained repeatedly
    found = {row["series"]: row for row in differences(losses, REFERENCE, [256], borrowers={"yarn"})}
    assert [*found] == ["rope", "alibi", "yarn"]
    assert (found["rope"]["seeds"], found["rope"]["reference_seeds"]) == (3, 5)
    for series, values in ("rope", theirs), ("alibi", one), ("yarn", borrowed):
        stderr = math.sqrt(variance / len(values) + variance / 5)
        difference = statistics.fmean(values) - statistics.fmean(ours)
        assert [found[series]["difference"], found[series]["stderr"]] == pytest.approx([difference, stderr])
        assert found[series]["p"] == pytest.approx(two_sided(difference / stderr, 6), rel=1e-4)
    assert [row["p_holm"] for row in found.values()] == holm([row["p"] for row in found.values()])
    assert "(length: p of Bartlett's test, degrees of freedom: 256: p = " in describe_variances(losses, [256], {"yarn"})


def test_differences_where_the_methods_vary_otherwise_are_those_of_welch():
    losses = samples(0.3)
    ours, theirs = losses[REFERENCE, 256], losses["rope", 256]
    (row,) = differences(losses, REFERENCE, [256])
    parts = [statistics.variance(x) / len(x) for x in (theirs, ours)]
    stderr, difference = math.sqrt(sum(parts)), statistics.fmean(theirs) - statistics.fmean(ours)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 4)
    assert [row["difference"], row["stderr"]] == pytest.approx([difference, stderr])
    assert row["p"] == row["p_holm"] == pytest.approx(two_sided(difference / stderr, freedom), rel=1e-4)
    assert describe_variances(losses, [256], ()).startswith("At 256 it is each method's own (Welch's test)")
    alone = differences(samples(0.3, (("alibi", 256), [4.03])), REFERENCE, [256])[-1]
    assert alone["stderr"] is alone["p"] is alone["p_holm"] is None  # a seed says nothing of the method's own variance


@pytest.mark.filterwarnings("ignore:Precision loss")
@pytest.mark.parametrize("odd", [[4.0, 4.0, 4.0], [4.0, math.nan, 4.1]])
def test_losses_that_are_equal_or_not_finite_leave_the_other_methods_their_tests(odd):
    rows = differences(samples(0.012, (("alibi", 256), odd)), REFERENCE, [256])
    assert rows[0]["p"] > 0.01 and rows[0]["stderr"] > 0


def test_the_page_tells_differences_and_the_order(tmp_path):
    losses = {REFERENCE: [4.0, 4.01], "rope": [4.5, 4.51], "alibi": [4.1, 4.11], "nope": [5.0]}
    losses = {(series, 256): values for series, values in losses.items()}
    paper = {(REFERENCE, 4096): 3.0, ("rope", 4096): 3.1, ("alibi", 4096): 3.2, ("nope", 4096): 4.0}
    page = "\n".join(compare(tmp_path / "table", losses, REFERENCE, [256], 256, paper))
    cells = {line.split("|")[1].strip(): line.split("|")[2:] for line in page.splitlines() if line.startswith("|")}
    assert cells["RoPE"][1].strip() == "**+0.500 \u00b1 0.007** (p < 0.001)"
    assert cells["NoPE"][1].strip() == "**+0.995 \u00b1 0.009** (p < 0.001)" and cells["NoPE"][0].strip() == "1, 2"
    assert [cell.strip() for cell in cells["256 (1x)"][:2]] == ["+0.80", "4"]  # of ranks 1 3 2 4 and 1 2 3 4
    assert len(rows(tmp_path / "table_differences.csv")) == 3
    one = {key: values[:1] for key, values in losses.items()}
    assert compare(tmp_path / "table", one, REFERENCE, [256], 256, paper)[0] == "## Order"
    assert compare(tmp_path / "table", {}, REFERENCE, [256], 256, paper) == []


def test_tau_by_length(tmp_path, call):  # noqa: F811
    write_study(tmp_path / "runs", "tau_by_length")
    losses = {run.path.name: run.summary["val_loss"]["256"] for run in read_runs(tmp_path / "runs")}
    metrics = tmp_path / "runs" / f"mini_1024-{REFERENCE}-learn_tauTrue-s0" / "metrics.jsonl"
    last = json.loads(metrics.read_text().splitlines()[-1])
    learned = {f"blocks.{i}.attention.method.score_change.log_tau": [math.log(i + 1), math.log(0.25)] for i in range(3)}
    metrics.write_text(metrics.read_text() + json.dumps(last | dict(method_parameters=learned)) + "\n")
    code, said = call("tau_by_length", "--scale", "mini")
    section = said.out.split("## What heads learned")[1].split("## How")[0]
    cells = [cell.strip() for cell in section.strip().splitlines()[-1].split("|")[1:-1]]
    name = "Scale-invariant p-RoPE, \u03c4 learned by each head"
    assert cells == [name, "1024", "0", "1.00, 0.25", "2.00, 0.25", "3.00, 0.25"]
    assert [row["head"] for row in rows(tmp_path / "out" / "tau_by_length_learned.csv")] == ["1", "2"] * 3
    assert code == 0 and is_figure(tmp_path / "out" / "tau_by_length")
    data = rows(tmp_path / "out" / "tau_by_length.csv")
    found = {(r["train_length"], float(r["tau"]), r["ratio"]): float(r["mean"]) for r in data}
    taus = [0.0390625, 0.15625, 0.625, 2.5, 10, 40, math.inf]
    at_1x = {tau: found["256", tau, "1.0"] for tau in taus}
    assert [at_1x[10], at_1x[0.625]] == [losses[f"mini-{REFERENCE}{tau}-s0"] for tau in ("-tau10.0", "")]
    assert len(found) == 7 * (4 + 3 + 2)  # of 256, 1024, 4096 up to 16,384
    lines = [line for line in said.out.splitlines() if line.startswith("| 256 ")]
    best = min(taus, key=at_1x.get)
    (bold,) = [line for line in lines if line.split("|")[5].strip().startswith("**")]
    assert bold.split("|")[2].strip() == ("learned" if best == math.inf else f"{best:.3g}")


def test_heads_of_their_own(tmp_path, call):  # noqa: F811
    runs = sweep("scale_invariant_by_head", "mini", seeds=[0, 1])
    taus = []
    for run in (run for run in runs if run.config.method != "alibi"):
        change = build_model(run.config, torch.float32).blocks[0].attention.method.score_change
        m = change.coefficients(torch.tensor([[1e6]], dtype=torch.float64), torch.arange(2)[:, None])[1].flatten()
        taus.append((1e6 / torch.expm1(-m / 2)).tolist() if len(m) == 2 else [(1e6 / torch.expm1(-m / 2)).item()] * 2)
    expected = [(0.625, 0.625)] * 3 + [(2.5, 2.5)] * 2 + [(10, 10)] * 2
    expected += [(0.625, 0.625 * ratio) for ratio in (16, 64, 256)] + [(0.625, 0.625)] * 2
    assert torch.tensor(taus[::2]) == pytest.approx(torch.tensor(expected))
    write_study(tmp_path / "runs", "scale_invariant_by_head")
    code, said = call("scale_invariant_by_head", "--scale", "mini")
    assert code == 0 and "| Scale-invariant p-RoPE, tau_ratio 256 " in said.out and "## Differences" in said.out
    assert "## Order" not in said.out  # the paper has no such rows
    needle = sweep("needle_by_head", "mini", seeds=[0, 1])
    assert [run.config for run in needle] == [run.config for run in runs] and all(run.needle for run in needle)


def test_rivals_are_methods_and_three_seeds_each():
    runs = sweep("table_rivals", "mini")
    assert {run.config.method for run in runs} == {*BEST, *RIVALS} and len(runs) == 3 * len({*BEST, *RIVALS})
    assert RIVALS == [canonical_name(name) for name in RIVALS]
    assert not {*RIVALS} & {run.config.method for run in sweep("all", "mini")}
    paper = {run.identity for run in sweep("table_losses", "mini")}
    assert {run.identity for run in runs if run.config.method in BEST} <= paper
    for scale in ("mini", "paper"):
        for run in sweep("table_rivals", scale, seeds=[0]):
            check_run(run)
    run = grid("mini", method=["rope+window,nope"])[0]  # a pattern's name is a folder's, too
    assert run.name == "mini-rope+window.nope-s0" == read_config(["mini", "--method", "rope+window,nope"]).name


def test_table_rivals_names_the_best_and_its_margins(tmp_path, call):  # noqa: F811
    chosen = ["fox", "alibi", "rope", REFERENCE]
    losses, rates = {}, {}
    for number, run in enumerate(sweep("table_rivals", "mini", methods=chosen)):
        series, seed = series_label(run.config), run.config.seed
        # fox is best at 1x, ours at 4x, and where RoPE is dropped at 16x and 64x
        gains = {("fox", 256), (REFERENCE, 1024), *(("rope then=nope@0.875", n) for n in (4096, 16_384))}
        others = ["alibi", "fox", REFERENCE, "rope then=nope@0.875"]
        above = 1 if series not in others else 0.1 * others.index(series)
        for length in run.config.val_lengths:
            loss = 4 + above - ((series, length) in gains) + 0.01 * seed + 1e-4 * length / 256
            loss += 0.003 * ((seed + len(series)) % 3)
            losses.setdefault((series, length), []).append(loss)
        found = {length: losses[series, length][-1] for length in run.config.val_lengths}
        path = write_run(tmp_path / "runs", run, found) / "summary.json"
        summary = json.loads(path.read_text()) | dict(tokens_per_second=1000 + number)
        path.write_text(json.dumps(summary | dict(parameters=5000 + (series == "fox"))))
        rates.setdefault(series, []).append(1000 + number)
    code, said = call("table_rivals", "--scale", "mini", "--methods", *chosen)
    assert code == 0 and "RoPE, after 0.875 of the steps NoPE" in said.out and "RoPE+NTK" not in said.out
    best = said.out[said.out.index("## The best at each length") : said.out.index("## Differences")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in best.splitlines() if line.startswith("| ")]
    named = {256: "fox", 1024: REFERENCE, 4096: "rope then=nope@0.875", 16_384: "rope then=nope@0.875"}
    for row, (length, series) in zip(cells[1:], named.items(), strict=True):
        assert row[:3] == [f"{length} ({length // 256}x)", series_name(series), "3"]
        for cell, reference in zip(row[4:], (REFERENCE, "alibi"), strict=True):
            found = {(r["series"], r["length"]): r for r in differences(losses, reference, [*named])}
            assert len(found) == 7 * 4  # series beside the reference, lengths
            assert cell == ("" if series == reference else difference_cell(found[series, length]))
    table = {r["series"]: r for r in rows(tmp_path / "out" / "table_rivals_costs.csv")}
    assert len(table) == 8 and (table["fox"]["parameters"], table["rope"]["parameters"]) == ("5001", "5000")
    for series, values in rates.items():
        row, (mean, stderr) = table[series], mean_and_stderr(values)
        assert [float(row["tokens_per_second"]), float(row["stderr"])] == pytest.approx([mean, stderr])
    assert f"{statistics.fmean(rates['fox']):,.0f} \u00b1 " in said.out[said.out.index("## What they cost") :]
    assert "## By position" not in said.out  # these runs left none
    assert "fewer layers" not in said.out
    _, said = call("table_rivals", "--scale", "mini", "--methods", "llama4", "fox", "--force")
    assert "from the first: Llama 4: `rope+window`, `rope+window`, `rope+window`." in said.out
    _, said = call("table_rivals", "--scale", "mini", "--methods", *chosen, "--seeds", "0", "--force")
    assert "## The best at each length" in said.out and "p =" not in said.out and "p <" not in said.out  # of one seed


def test_table_rivals_shows_losses_by_position(tmp_path, call):  # noqa: F811
    mean, positions = {}, torch.arange(16_384)
    for run in sweep("table_rivals", "mini", methods=["fox"], seeds=[0, 1]):
        losses = torch.rand(16_384, generator=torch.Generator().manual_seed(run.config.seed)).double()
        path = write_run(tmp_path / "runs", run, dict.fromkeys(run.config.val_lengths, 4.0))
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        records[0]["val_loss_by_position"] = {"16384": [9.0] * 15}  # before the end
        records[-1]["val_loss_by_position"] = {"16384": means_by_octave(losses), "256": [1.0]}
        (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        for first, last in ((0, 255), (256, 1023), (1024, 4095), (4096, 16_383)):
            inside = losses[(positions >= first) & (positions <= last)]
            mean.setdefault((first, last), []).append(inside.mean().item())
    code, said = call("table_rivals", "--scale", "mini", "--methods", "fox", "--seeds", "0", "1")
    found = {(int(r["first"]), int(r["last"])): r for r in rows(tmp_path / "out" / "table_rivals_positions.csv")}
    assert found.keys() == mean.keys()
    for place, values in mean.items():
        expected = [*mean_and_stderr(values), 2]
        assert [float(found[place][key]) for key in ("mean", "stderr", "seeds")] == pytest.approx(expected, abs=2e-5)
    page = re.sub(" +", " ", said.out)
    assert code == 0 and "| method | 0-255 | 256-1023 | 1024-4095 | 4096-16383 |" in page
    assert f"| FoX | {mean_and_stderr(mean[0, 255])[0]:.3f}" in page


def test_losses_at_the_end_are_those_of_the_model_on_each_text(monkeypatch):
    monkeypatch.setattr(far_tokens, "SCORED", 20)
    monkeypatch.setattr(far_tokens, "KEPT", (10, 64))
    model, windows = make_random_gpt("scale_invariant_p_rope"), random_tokens(130, 3)[0]
    losses = far_tokens.end_losses(model, windows)
    assert {*losses} == {("whole", 130), *((change, n) for change in ("cut", "swapped") for n in (10, 64))}

    def plain(text):  # (T,): by the logits of the text alone
        logits = model(text[None, :-1])[0]
        return torch.nn.functional.cross_entropy(logits[-20:], text[-20:])

    with torch.inference_mode():
        for w in range(3):
            assert losses["whole", 130][w] == pytest.approx(plain(windows[w]).item(), abs=1e-5)
            for n in (10, 64):
                kept = windows[w, 130 - 20 - n :]
                swapped = torch.cat([windows[w - 1, : 130 - 20 - n], kept])
                assert losses["cut", n][w] == pytest.approx(plain(kept).item(), abs=1e-5)
                assert losses["swapped", n][w] == pytest.approx(plain(swapped).item(), abs=1e-5)


def test_far_tokens_has_a_row_a_method_and_change(tmp_path, call):  # noqa: F811
    fields = write_models(tmp_path, "far_tokens", num_layers=1, val_tokens=15 * 4096)
    code, said = call("far_tokens", "--scale", "mini", *fields, "--methods", "alibi", "p_rope")
    assert code == 0 and is_figure(tmp_path / "out" / "far_tokens"), said
    data = rows(tmp_path / "out" / "far_tokens.csv")
    assert {(r["series"], r["change"], r["kept"]) for r in data} == {
        (series, change, str(kept)) for series in ("p_rope", "alibi", "alibi slope_scale=1")
        for change in ("cut", "swapped") for kept in (64, 256, 1024)
    }  # fmt: skip
