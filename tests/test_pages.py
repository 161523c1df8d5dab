"""The pages of results/: each number with a name is the number of the kept runs, and the texts are short."""

import re
import statistics

import pytest
from commands import ROOT, parametrize, read_lines, rows_of, shared, slow

from errors import UserError
from results import pages
from scripts.quickstart import METHODS
from scripts.shared.looks import series_label
from scripts.shared.runs import read_runs

SI = "scale_invariant_p_rope"
PAPERS_TEN = "rope p_rope nope rope_ntk yarn logn_rope logn_p_rope logn_ntk".split() + ["alibi slope_scale=1", SI]
LIMITS = {"README.md": 600} | dict.fromkeys(
    "alibi.md tau.md needle.md gaussian.md newer_methods.md other_claims.md quickstart.md".split(), 400
)


def quickstart_lines(seed):
    """Return the kept lines of the methods of the command, by method."""
    chosen = [(method, options, seed) for method, options in METHODS.values()]
    lines = read_lines(ROOT / "results/quickstart.jsonl")
    return {line["method"]: line for line in lines if (line["method"], line["method_options"], line["seed"]) in chosen}


@shared
def page():
    return pages.Page(pages.all_numbers())


@slow
def test_each_number_on_a_page_is_the_number_of_the_kept_runs(page):
    for path in sorted([ROOT / "README.md", *(ROOT / "results").rglob("*.md")]):
        text = path.read_text()
        assert page.fill(text) == text, path.name
        # Markdown takes a line that begins with a comment as HTML, and would show the rest of the line as it is.
        assert not re.search(r"^[ >]*([-*] )?<!--[^|\n]+-->.", text, re.MULTILINE), path.name


PAGE = """
<!--| | loss {1} {0}:.3f; stderr loss {1} {0}:.2f | loss a 8 y:.1f |-->
| method | loss | y |
| x <!--x; a 8--> | 9 ± 1 | <!--p:p-->5 |
| y <!--y; a 8--> | 9 | none |
| SI <!--SI; a 8--> | none | **-7** |

From 1 to <!--loss a 8 x - loss a 8 y:+.2f-->+1,234.5, <!--seeds loss a 8 x:d-->, and <!--p:p-->< 0.001.
"""
FILLED = """
<!--| | loss {1} {0}:.3f; stderr loss {1} {0}:.2f | loss a 8 y:.1f |-->
| method | loss | y |
| x <!--x; a 8--> | 4.333 ± 2.40 | <!--p:p-->0.012 |
| y <!--y; a 8--> | 1.000 | none |
| SI <!--SI; a 8--> | none | **1.0** |

From 1 to <!--loss a 8 x - loss a 8 y:+.2f-->+1.00, <!--seeds loss a 8 x:d-->3, and <!--p:p-->0.012.
"""


def test_numbers_are_filled_in_place():
    losses = {"loss a 8 x": {0: 1.0, 1: 3.0, 2: 9.0}, "loss a 8 y": {0: 0.5, 1: 1.5}}
    page = pages.Page(losses | {"p": {0: 0.0123}})
    assert page.fill(PAGE) == page.fill(FILLED) == FILLED
    assert page.show("stderr loss a 8 x - loss a 8 y", ".2f") == "0.50"
    assert pages.Page({"p": {0: 1e-4}}).show("p", "p") == "< 0.001"
    for wrong in ("<!--loss a 8 z:.3f-->", PAGE.replace("none", "9 9 9")):
        with pytest.raises(UserError):
            page.fill(wrong)


def test_names_lead_to_the_lines_of_the_runs(page):
    ours = [line for line in read_lines(ROOT / "results/taught/runs.jsonl")
            if (line["method"], line["method_options"]) == (SI, {})]
    needles = [line["needle"]["greedy"]["1024"] for line in read_lines(ROOT / "results/mini/runs.jsonl")
               if (line["preset"], line["method"], line["method_options"]) == ("mini", SI, {})]
    assert len(ours) == 5 and len(needles) == 3
    for name, values in {
        "loss taught 4096 SI": [line["val_loss"]["4096"] for line in ours],
        "copy taught 512 SI": [line["copy_gain"]["random"]["512"] for line in ours],
        "needle mini 1024 SI": needles,
    }.items():
        assert page.value(name) == pytest.approx(statistics.fmean(values))


def test_counts_of_needles_on_the_pages_are_the_counts_of_the_runs():
    def found(series, length, least, most, seeds=slice(None)):
        """Return (needles found, all needles) at distances from least to most, summed over the seeds."""
        kept = [run for run in read_runs(ROOT / "results/mini/runs.jsonl") if run.needle and run.config.num_layers == 3]
        counts = [run.needle["by_distance"][length] for run in kept if series_label(run.config) == series]
        cells = [cell for by_distance in counts[seeds] for at, cell in by_distance.items() if least <= int(at) < most]
        return tuple(map(sum, zip(*cells)))

    m_alone, alibi = f"{SI} tau=0.625 terms=m", "alibi slope_scale=1"
    assert found(SI, "1024", 128, 1024) == (157, 825) and found(m_alone, "1024", 128, 1024) == (0, 825)
    assert found(SI, "1024", 128, 1024, seeds=slice(2, 3)) == (127, 275)
    for series, near, far in (alibi, 70, 0), (SI, 13, 73):
        assert found(series, "4096", 0, 1024) == (near, 246)
        assert found(series, "4096", 1024, 4096) == (far, 654)


def test_the_front_page_has_no_number_of_its_own():
    text = pages.NAMED_NUMBER.sub("", (ROOT / "results/README.md").read_text())
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|p-RoPE|SmolLM2", "", text)
    sizes, constants = {"162M", "304M", "7B"}, {"256", "512", "1,024", "4,096", "32", "2.5", "10", "4", "16"}
    assert {*re.findall(r"\d[\w.,]*\w|\d", text)} <= sizes | constants | {"1x", "2x", "4x", "16x"}


def test_sentences_about_the_order_follow_from_the_runs(page):
    def kept(name):
        """Return the mean loss of the kept runs of PLACE LENGTH SERIES."""
        return page.value(f"loss {name}")

    for place in ("mini", "prose"):
        for length in (256, 1024, 4096):
            assert min(PAPERS_TEN, key=lambda series: kept(f"{place} {length} {series}")) == SI
    primary = [SI, "rope", "logn_p_rope", "alibi", "alibi slope_scale=4"]
    for length in (512, 2048, 8192):
        assert min(primary, key=lambda series: kept(f"far {length} {series}")) == SI
    assert kept(f"far 512 {SI}") > kept(f"far 2048 {SI}") > kept(f"far 8192 {SI}")
    for seed in range(3):
        found = quickstart_lines(seed)
        assert max(found, key=lambda name: found[name]["copy_gain"]["random"]["2048"]) == SI
        for length in ("1024", "4096"):
            losses = {name: line["val_loss"][length] for name, line in found.items()}
            assert (min(losses, key=losses.get), max(losses, key=losses.get)) == (SI, "rope")
    taus = {10.0: SI} | {tau: f"{SI} tau={tau:g}" for tau in (0.0390625, 0.15625, 0.625, 2.5, 40.0)}
    for place, length in {"mini": 256, "mini_1024": 1024, "mini_4096": 4096}.items():
        for factor in (1, 4, 16):
            if length * factor <= 16_384:
                best = min(taus, key=lambda tau: kept(f"{place} {length * factor} {taus[tau]}"))
                assert best in (2.5, 10.0), (place, factor)


@parametrize("name", LIMITS)
def test_pages_are_short(name):
    words = re.sub("<!--.*?-->", "", (ROOT / "results" / name).read_text()).split()
    assert sum(bool(re.search(r"\w", word)) for word in words) <= LIMITS[name]


def test_the_readme_shows_the_kept_quickstart():
    lines = quickstart_lines(0)
    rows = rows_of((ROOT / "README.md").read_text())
    for name, (method, _) in METHODS.items():
        losses, gains = lines[method]["val_loss"], lines[method]["copy_gain"]["random"]
        shown = [f"{losses[n]:.3f}" for n in ("256", "1024", "4096")]
        shown += [f"{gains[n]:.1f}" for n in ("128", "512", "1024", "2048")]
        assert [cells for first, *cells in rows if first == name] == [shown]
