"""The report: its numbers are those of the run folders, nothing in them can break it, and it draws in a browser."""

import dataclasses
import fcntl
import html.parser
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs.presets import quickstart
from configs.validation import validation_plan
from files import to_json
from scripts.report.groups import group_runs
from scripts.report.page import make_page
from scripts.report.reading import POINTS, average_in_bins, describe_run, find_runs, mean
from scripts.shared.looks import LINES, OTHERS, plot_style

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EVIL = "</script><script>document.title='evil'</script>\"'<img src=x onerror=alert(1)>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def write_run(path: Path, stop: int | None = None, lengths=(16, 48), **changes) -> list[dict]:
    """A run folder as train_gpt.py leaves it, its losses random, after `stop` steps (default: finished)."""
    fields = dict(steps=11, cooldown_steps=3, val_lengths=lengths, val_tokens=96, val_every=4) | changes
    config = dataclasses.replace(quickstart(), **fields)
    rng = np.random.default_rng([config.seed, len(path.name)])
    path.mkdir(parents=True)
    (path / "config.json").write_text(to_json(config.to_dict()))
    records = []
    for step in range((config.steps if stop is None else stop) + 1):
        tokens = step * config.batch_tokens
        if step:
            train = dict(train_loss=rng.normal(5), grad_norm=rng.uniform(1, 2), tokens_per_second=int(1e4 + step))
            records.append(dict(step=step, tokens=tokens, **train))
        passes = validation_plan(config, step)
        if passes:
            position = {str(n): list(rng.normal(5, size=math.ceil(math.log2(n)) + 1)) for n in passes}
            scores = dict(scores_mean=list(rng.normal(size=3)), scores_std=list(rng.uniform(1, 2, size=3)))
            val_tokens = {str(n): tokens for n, tokens in passes.items()}
            if config.val_profile == "paper":  # as it was written before there were profiles
                val_tokens = config.val_tokens
            losses = dict(val_loss={str(n): rng.normal(5) for n in passes}, val_tokens=val_tokens)
            records.append(dict(step=step, tokens=tokens, **losses, val_loss_by_position=position, **scores))
    (path / "metrics.jsonl").write_text("".join(to_json(record) + "\n" for record in records))
    if stop is None:
        summary = dict(steps=config.steps, tokens=tokens, tokens_per_second=10_007, parameters=12_345, **losses)
        (path / "summary.json").write_text(to_json(summary))
    return records


def lines(text: str, title: str) -> dict[str, np.ndarray]:
    """The points in pixels of each line of the chart with this title, by the runs that it is of."""
    chart = text[text.index(f"<figcaption>{title}") :].split("</figure>")[0]
    paths = re.findall(r'<g data-runs="([\d ]+)">\s*<title>[^<]*</title>\s*<path d="([^"]*)"', chart)
    return {runs: np.array(re.findall(r"([\d.]+) ([\d.]+)", path), float) for runs, path in paths}


def assert_is_drawn(values: list[float], pixels: list[float]):
    """The pixels, of which y points down, are the values on one axis."""
    slope, offset = np.polyfit(values, pixels, 1)
    assert slope < 0 and np.allclose(slope * np.array(values) + offset, pixels, atol=0.2)


class Page(html.parser.HTMLParser):
    """The cells of the table of runs, and the number of times that each tag opens."""

    def __init__(self, text: str):
        super().__init__()
        self.rows, self.tags, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "table":
            self.inside = ("id", "runs") in attributes
        if self.inside and tag == "tr":
            self.rows.append([])
        if self.inside and tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self.inside = False

    def handle_data(self, data):
        if self.inside and self.rows and self.rows[-1]:
            self.rows[-1][-1] += f" {data.strip()}"

    def table(self) -> list[dict]:
        head, *rows = [[cell.strip() for cell in row] for row in self.rows]
        return [dict(zip(head, row)) for row in rows]


def command(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "scripts.report", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_numbers_in_the_page_are_those_of_the_files(tmp_path):
    records = write_run(tmp_path / "a", seed=5)
    text = make_page("t", [run := describe_run(tmp_path / "a")])
    train = [r for r in records if "train_loss" in r]
    validations = [r for r in records if "val_loss" in r]
    assert run["train"]["tokens"] == [r["tokens"] for r in train]
    assert run["train"]["loss"] == [r["train_loss"] for r in train]
    assert run["train"]["grad_norm"] == [r["grad_norm"] for r in train]
    assert_is_drawn(run["train"]["loss"][1:], lines(text, "Training loss")["0"][:, 1])  # without the first tenth
    assert_is_drawn(np.log(run["train"]["grad_norm"][1:]), lines(text, "Gradient norm")["0"][:, 1])
    for length in ("16", "48"):
        losses = [r["val_loss"][length] for r in validations]
        tokens = [r["tokens"] for r in validations]
        assert run["validation"][length] == dict(tokens=tokens, loss=losses, part=[None] * len(losses))
        assert_is_drawn(losses[1:], lines(text, f"Validation loss at {length} tokens")["0"][:, 1])
    for key in ("step", "val_loss", "val_loss_by_position", "scores_mean", "scores_std"):
        assert run["final"][key] == validations[-1][key]
    last = validations[-1]
    for title, values in (
        ("loss against length", [*last["val_loss"].values()]),
        ("loss by position", last["val_loss_by_position"]["48"]),
        ("mean of the attention scores", last["scores_mean"]),
        ("standard deviation of the attention scores", last["scores_std"]),
    ):
        assert_is_drawn(values, lines(text, f"Last validation: {title}")["0"][:, 1])


FAST = dict(val_profile="fast", val_every=1, train_length=16)


def test_losses_on_a_part_of_the_tokens_are_told_from_the_others_in_the_curves(tmp_path):
    records = write_run(tmp_path / "a", **FAST)
    text = make_page("t", [run := describe_run(tmp_path / "a")])
    of_48 = [r for r in records if "48" in r.get("val_loss", ())]
    assert [r["step"] for r in of_48] == [0, 4, 8, 11]
    assert run["validation"]["48"] == dict(
        tokens=[r["tokens"] for r in of_48], loss=[r["val_loss"]["48"] for r in of_48], part=[1, 1, 1, None]
    )
    assert run["validation"]["16"]["part"] == [None] * 12
    charts = [text.split(f"<figcaption>Validation loss at {n} tokens")[1].split("</figure>")[0] for n in (16, 48)]
    assert [len(re.findall("<use [^>]*fill: #ffffff", chart)) for chart in charts] == [0, 2]  # all but the first tenth


def test_the_table_has_no_losses_on_a_part_of_the_tokens(tmp_path):
    loss = write_run(tmp_path / "a", stop=8, **FAST)[-1]["val_loss"]
    run = describe_run(tmp_path / "a")
    assert loss.keys() == {"16", "48"} and run["final"]["val_loss"] == {"16": loss["16"]}
    assert run["final"]["val_loss_by_position"].keys() == {"16"}
    [row] = Page(make_page("t", [run])).table()
    assert row["loss at 16"].startswith(f"{loss['16']:.4f}") and "loss at 48" not in row


def test_profiles_are_groups_of_their_own(tmp_path):
    write_run(tmp_path / "a", train_length=16)
    write_run(tmp_path / "b", **FAST)
    groups = group_runs(
        [run | dict(fields=run["config"].to_dict()) for run in map(describe_run, (tmp_path / "a", tmp_path / "b"))]
    )
    assert [g["label"].split(", ")[-1] for g in groups] == ["val_profile paper", "val_profile fast"]


def test_the_table_shows_the_runs(tmp_path):
    loss = write_run(tmp_path / "a", seed=3, method="alibi")[-1]["val_loss"]
    (tmp_path / "a" / "needle").mkdir()
    (tmp_path / "a" / "needle" / "summary.json").write_text(json.dumps(dict(greedy={"16": 0.625})))
    write_run(tmp_path / "b", stop=6, method="rope")
    finished, interrupted = Page(make_page("t", [describe_run(tmp_path / name) for name in "ab"])).table()
    shown = dict(run="a", method="ALiBi", state="finished", seed="3", steps="11 / 11", tokens="22,528")
    shown |= {"parameters": "12,345", "tokens/s": "10,007", "needle at 16": "62.5%", "train length": "256"}
    shown |= {f"loss at {n}": f"{loss[n]:.4f}" for n in ("16", "48")}
    shown |= {"rise": f"{loss['48'] - loss['16']:+.4f}"}
    assert {key: finished[key] for key in shown} == shown
    assert (interrupted["state"], interrupted["steps"]) == ("interrupted", "6 / 11")
    assert interrupted["loss at 16"].endswith("*") and interrupted["tokens/s"] == "10,004"
    assert interrupted["parameters"] == ""


def test_long_curves_are_thinned_to_means_over_equal_bins():
    rng = np.random.default_rng(1)
    losses = rng.normal(size=4578)
    records = [dict(step=i + 1, tokens=10 * (i + 1), loss=float(loss)) for i, loss in enumerate(losses)]
    records[30]["loss"] = None
    thinned = average_in_bins(records, 4578, dict(loss=lambda r: r["loss"]))
    assert len(thinned["loss"]) == len(thinned["tokens"]) == math.ceil(4578 / 46) == POINTS
    assert thinned["loss"][0] == pytest.approx(np.delete(losses[:46], 30).mean(), rel=1e-5)  # without the None
    assert thinned["loss"][2] == pytest.approx(losses[92:138].mean(), rel=1e-5)
    assert thinned["tokens"][1] == 10 * np.mean(range(47, 93))
    stopped = average_in_bins(records[:2000], 4578, dict(loss=lambda r: r["loss"]))
    assert stopped["tokens"][:43] == thinned["tokens"][:43]  # bins are those of the whole run


def test_mean_leaves_out_what_is_not_finite():
    assert mean([None, None]) is None
    assert mean([0.1234567891, None]) == 0.1234567891
    assert mean([1.0, None, 4.0]) == 2.5


def test_sixty_long_runs_make_a_page_of_less_than_five_megabytes(tmp_path):
    write_run(tmp_path / "a", steps=1200)
    long = describe_run(tmp_path / "a")
    assert len(make_page("t", [dict(long, path=str(i), problems=[]) for i in range(60)])) < 2.5e6


def test_an_evaluation_on_the_same_tokens_adds_its_lengths(tmp_path):
    last = write_run(tmp_path / "a")[-1]
    evaluation = dict(
        step="step_000011", val_tokens=96, val_loss={"48": 1.0, "96": 2.5}, val_loss_by_position={"96": [3.0]}
    )
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps(evaluation))
    final = describe_run(tmp_path / "a")["final"]
    assert final["val_loss"] == last["val_loss"] | {"96": 2.5}  # the run's own first
    assert final["val_loss_by_position"]["96"] == [3.0]


@pytest.mark.parametrize("other", [dict(val_tokens=192), dict(step="step_000004")])
def test_an_evaluation_of_other_tokens_or_weights_is_named_and_not_mixed_in(tmp_path, other):
    last = write_run(tmp_path / "a")[-1]
    evaluation = dict(step="step_000011", val_tokens=96, val_loss={"96": 2.5}, val_loss_by_position={}) | other
    (tmp_path / "a" / "evaluation.json").write_text(json.dumps(evaluation))
    run = describe_run(tmp_path / "a")
    assert run["final"]["val_loss"] == last["val_loss"]
    assert "evaluation.json is not shown" in run["problems"][0]


def test_losses_of_the_same_weights_as_other_methods_have_a_table_of_their_own(tmp_path):
    write_run(tmp_path / "a", seed=1)
    assert "The same weights as other methods" not in make_page("t", [describe_run(tmp_path / "a")])
    write_run(tmp_path / "rope", method="rope", validate_as=("yarn",))
    metrics = tmp_path / "rope" / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines()
    last = json.loads(last) | dict(val_loss_as=dict(yarn={"16": 1.5, "48": 2.25}, rope_ntk={"16": 1.5, "48": 3.0}))
    metrics.write_text("\n".join([*lines, json.dumps(last)]) + "\n")
    text = make_page("t", [describe_run(tmp_path / name) for name in ("a", "rope")])
    section = text[text.index('id="as-head"') :].split("</section>")[0]
    assert re.findall(r'<th scope="col">(.*?)</th>', section) == ["run", "run as", "loss at 16", "loss at 48"]
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in section.split("<tr>")[2:]]
    assert cells == [["YaRN", "1.5000", "2.2500"], ["RoPE+NTK", "1.5000", "3.0000"]]


def test_losses_on_other_text_have_a_table_of_their_own(tmp_path):
    last = write_run(tmp_path / "a", seed=1)[-1]
    write_run(tmp_path / "b", seed=2)
    write_run(tmp_path / "c", seed=3)
    assert "Losses on other text" not in make_page("t", [describe_run(tmp_path / "a")])
    books = dict(step="step_000011", data="data/books", val_tokens={"16": 96, "48": 96})
    early = books | dict(step="step_000004", val_tokens={"48": 48}, val_loss={"48": 3.5})
    evaluations = dict(
        a=dict(other_texts=dict(
            f00d=books | dict(val_loss={"16": 1.25, "48": 2.5}),
            beef=books | dict(data="/elsewhere/books", val_loss={"16": 7.0, "48": 8.0}),
        )),
        b=dict(step="step_000011", val_tokens=96, val_loss={"96": 2.0}, val_loss_by_position={},
               other_texts=dict(f00d=early)),
    )  # fmt: skip
    for name, evaluation in evaluations.items():
        (tmp_path / name / "evaluation.json").write_text(json.dumps(evaluation))
    runs = [describe_run(tmp_path / name) for name in "abc"]
    text = make_page("t", runs)
    assert runs[0]["final"]["val_loss"] == last["val_loss"] and runs[1]["final"]["val_loss"]["96"] == 2.0
    section = text[text.index('id="texts-head"') :].split("</section>")[0]
    heads = re.findall(r'<th scope="col">(.*?)</th>', section)
    assert heads == ["run"] + [
        f"books ({fingerprint})<br>{tokens} tokens<br>loss at {length}"
        for fingerprint, tokens, length in [("beef", 96, 16), ("beef", 96, 48), ("f00d", 48, 48), ("f00d", 96, 16)]
    ] + ["books (f00d)<br>96 tokens<br>loss at 48"]
    cells = [re.findall(r"<td.*?>(.*?)</td>", row) for row in section.split("<tr>")[2:]]
    assert cells == [
        ["7.0000", "8.0000", "", "1.2500", "2.5000"],
        ["", "", '3.5000<abbr title="at step 4">*</abbr>', "", ""],
    ]  # and none of c


def test_groups_are_of_the_same_data_whatever_its_folder(tmp_path):
    same = dict(method="rope")
    for name, text, folder in (("a", "1234", "x"), ("b", "1234", "moved/x"), ("c", "5678", "x"), ("d", "1234", "x")):
        write_run(tmp_path / name, seed=ord(name), data_dir=folder, stop=7 if name == "d" else None, **same)
        validation = "other" if name == "d" else "val"
        (tmp_path / name / "data.json").write_text(json.dumps(dict(train=text, validation=validation)))
    write_run(tmp_path / "e", data_dir="x", **same)  # of before data.json: its summary says it
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    (tmp_path / "e" / "summary.json").write_text(json.dumps(summary | dict(data="1234")))
    runs = [describe_run(path) for path in sorted(tmp_path.iterdir())]
    groups = group_runs([dict(run, fields=dict(data=run["data"])) for run in runs])
    assert {g["label"]: [run["path"][-1] for run in g["runs"]] for g in groups} == {
        "RoPE, data 1234": ["a", "b", "d", "e"],
        "RoPE, data 5678": ["c"],
    }
    assert [run["path"][-1] for run in runs if "validated on another text" in "".join(run["problems"])] == ["d"]
    assert "RoPE, data 5678" in make_page("t", runs)


# ---- groups and configs ----------------------------------------------------------------------------------------------


def test_groups_are_the_same_config_up_to_the_seed_and_labelled_by_what_differs(tmp_path):
    write_run(tmp_path / "a", method="rope", seed=1)
    write_run(tmp_path / "b", method="rope", seed=2, name="other", keep=7)
    write_run(tmp_path / "c", method="rope", train_length=128)
    write_run(tmp_path / "d", method="scale_invariant_p_rope")
    write_run(tmp_path / "e", method="scale_invariant_p_rope", method_options={"tau": 3.0})
    write_run(tmp_path / "f", method="alibi")
    make_page("t", runs := [describe_run(path) for path in sorted(tmp_path.iterdir())])
    groups = group_runs(runs)
    assert [(g["label"], [run["path"][-1] for run in g["runs"]]) for g in groups] == [
        ("RoPE, train_length 128", ["c"]),
        ("RoPE, train_length 256", ["a", "b"]),
        ("ALiBi", ["f"]),
        ("Scale-invariant p-RoPE", ["d"]),
        ("Scale-invariant p-RoPE, tau 3.0", ["e"]),
    ]
    assert [run["group"] for run in runs] == [1, 1, 0, 3, 4, 2]


def groups_of(folder: Path) -> dict[str, list[str]]:
    make_page("t", runs := [describe_run(path) for path in sorted(folder.iterdir())])
    return {g["label"]: [run["name"] for run in g["runs"]] for g in group_runs(runs)}


def test_two_runs_of_one_seed_are_not_two_seeds(tmp_path):
    for name, seed, dtype in (("a", 0, "float32"), ("b", 1, "float32"), ("c", 0, "bfloat16")):
        write_run(tmp_path / name, method="rope", seed=seed, dtype=dtype)
    write_run(tmp_path / "d", method="alibi", seed=0, dtype="float32")
    write_run(tmp_path / "e", method="alibi", seed=1, dtype="bfloat16")  # another seed: no reason to part them
    assert groups_of(tmp_path) == {
        "RoPE, dtype float32": ["a", "b"],
        "RoPE, dtype bfloat16": ["c"],
        "ALiBi": ["d", "e"],
    }


def test_a_second_run_of_the_same_seed_and_config_is_shown_apart_and_named(tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        write_run(tmp_path / name, method="rope", seed=seed, keep=len(name))
    assert groups_of(tmp_path) == {"RoPE, a": ["a", "b"], "RoPE, c": ["c"]}
    make_page("t", runs := [describe_run(path) for path in sorted(tmp_path.iterdir())])
    again = "another run of the seed and configuration of a: shown apart"
    assert [run["problems"] for run in runs] == [[], [], [again]]


def test_configs_show_only_the_fields_that_differ(tmp_path):
    write_run(tmp_path / "a", seed=1)
    write_run(tmp_path / "b", seed=2, muon_lr=0.04)
    text = make_page("t", [describe_run(tmp_path / name) for name in "ab"])
    differ, common = text[text.index('id="configs-head"') :].split("<details>")[:2]
    assert re.findall(r'<th scope="col">(.*?)</th>', differ) == ["run", "seed", "muon_lr"]
    assert re.findall(r"<td>(.*?)</td>", differ) == ["1", "0.02", "2", "0.04"]
    assert "<th>adam_betas</th><td>0.9, 0.95</td>" in common and "muon_lr" not in common.split("<section")[0]


# ---- damage ----------------------------------------------------------------------------------------------------------


def problems(path: Path) -> str:
    run = describe_run(path)
    assert path.name in make_page("t", [run])
    return "\n".join(run["problems"])


def test_a_half_written_and_a_damaged_line_are_named_and_the_others_shown(tmp_path):
    records = write_run(tmp_path / "a", stop=7)
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    lines[2] = lines[2][:20]
    lines.append('{"step": 8, "tok')
    (tmp_path / "a" / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\xff\xfe")
    found = problems(tmp_path / "a")
    assert f"line 3 of {len(lines)} of metrics.jsonl is damaged" in found
    assert f"line {len(lines)} of {len(lines)} of metrics.jsonl is half-written" in found
    assert "interrupted at step 7 of 11" in found
    kept = [r for r in records[:2] + records[3:] if "train_loss" in r]
    assert describe_run(tmp_path / "a")["train"]["tokens"] == [r["tokens"] for r in kept]


def test_a_damaged_config_is_named_and_the_losses_still_shown(tmp_path):
    loss = write_run(tmp_path / "a")[-1]["val_loss"]
    (tmp_path / "a" / "config.json").write_text('{"method": "ro')
    assert "config.json is damaged" in problems(tmp_path / "a")
    [row] = Page(make_page("t", [describe_run(tmp_path / "a")])).table()
    assert (row["method"], row["loss at 48"]) == ("unknown", f"{loss['48']:.4f}")


@pytest.mark.parametrize("name", ["summary.json", "data.json", "evaluation.json", "needle/summary.json"])
def test_damaged_results_are_named(tmp_path, name):
    write_run(tmp_path / "a")
    (tmp_path / "a" / "needle").mkdir()
    (tmp_path / "a" / name).write_text('{"greedy": {"16"')
    assert f"{name} is damaged" in problems(tmp_path / "a")


@pytest.mark.parametrize(
    "line", ["5", "{}", '{"step": 1, "train_loss": 2.0}', '{"step": 1, "tokens": 1, "val_loss": 3}']
)
def test_lines_that_no_run_writes_are_named(tmp_path, line):
    write_run(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_text(line + "\n")
    assert "not what a run writes" in problems(tmp_path / "a")


DAMAGE = {  # file, what is replaced (a regular expression), by what, and what the problem must say
    "text": ("summary.json", r'"parameters": \d+', '"parameters": "zz"', "parameters is 'zz', not a whole number"),
    "fraction": ("summary.json", r'"steps": \d+', '"steps": 1.5', "steps is 1.5, not a whole number"),
    "huge": ("summary.json", r'("val_loss": {"16": )[^,]*', r"\g<1>1e308", "val_loss.16 is 1e+308, not a number"),
    "nan": ("summary.json", r'("val_loss": {"16": )[^,]*', r"\g<1>NaN", "val_loss.16 is nan, not a number"),
    "list": ("summary.json", r'("val_loss": {"16": )[^,]*', r"\g<1>[4.0]", "val_loss.16 is [4.0], not a number"),
    "length": ("summary.json", r'"16"', '"0"', "val_loss is no object by length"),
    "lacks": ("summary.json", r'"val_tokens"', '"vt"', "it has no val_tokens"),
    "loss": ("metrics.jsonl", r'("train_loss": )[^,]*', r'\g<1>"5.0"', "train_loss is '5.0', not a number"),
    "norm": ("metrics.jsonl", r'("grad_norm": )[^,]*', r"\g<1>-Infinity", "grad_norm is -inf, not a number"),
    "validation": ("metrics.jsonl", r'("val_loss": {"16": )[^,]*', r"\g<1>1e39", "16 is 1e+39, not a number"),
    "position": ("metrics.jsonl", r'("val_loss_by_position": {"16": )\[', r"\g<1>[{},", "16 is {}, not a number"),
    "step": ("metrics.jsonl", r'"step": 3', '"step": true', "line 4 of metrics.jsonl is not what a run writes: step"),
}


@pytest.mark.parametrize("name, pattern, by, says", DAMAGE.values(), ids=DAMAGE)
def test_a_run_with_a_damaged_number_is_named_and_left_out_the_others_shown(tmp_path, name, pattern, by, says):
    loss = write_run(tmp_path / "a", method="rope", seed=1)[-1]["val_loss"]
    write_run(tmp_path / "b", method="rope", seed=2)
    path = tmp_path / "b" / name
    path.write_text(re.sub(pattern, by, path.read_text()))
    runs = [describe_run(tmp_path / run) for run in "ab"]
    text = make_page("t", runs)
    assert runs[0]["problems"] == [] and says in "\n".join(runs[1]["problems"])
    a, b = Page(text).table()
    assert [a[f"loss at {n}"] for n in ("16", "48")] == [f"{loss[n]:.4f}" for n in ("16", "48")]
    assert (b["run"], b["loss at 16"], b["parameters"], b["tokens/s"]) == ("b", "", "", "")
    assert runs[0]["final"] and runs[1]["final"] == {} and "<b>b</b>: " in text
    assert [*lines(text, "Last validation: loss against length")] == ["0"]


@pytest.mark.parametrize(
    "name, found",
    [
        ("evaluation.json", dict(step="zz", val_tokens=96, val_loss={"96": 2.5})),
        ("evaluation.json", dict(step="step_000011", val_tokens=96, val_loss={"96": "2.5"})),
        ("evaluation.json", dict(other_texts=dict(f00d=dict(step="step_000011", data=[], val_tokens=1, val_loss={})))),
        ("needle/summary.json", dict(greedy={"16": "all"})),
        ("needle/summary.json", [1]),
    ],
)
def test_damaged_numbers_beside_the_runs_own_are_named_and_not_shown(tmp_path, name, found):
    last = write_run(tmp_path / "a")[-1]
    (tmp_path / "a" / "needle").mkdir()
    (tmp_path / "a" / name).write_text(json.dumps(found))
    run = describe_run(tmp_path / "a")
    assert len(run["problems"]) == 1 and run["problems"][0].startswith(f"{name} is damaged (")
    assert run["final"]["val_loss"] == last["val_loss"] and f"{last['val_loss']['16']:.4f}" in make_page("t", [run])


def test_what_else_is_odd_in_a_folder_stops_no_page(tmp_path):
    write_run(tmp_path / "a", stop=0)
    (tmp_path / "a" / "config.json").write_text("{")
    (tmp_path / "a" / "lock").mkdir()
    (tmp_path / "a" / "data.json").write_text('{"train": ["x"]}')
    (tmp_path / "a.failures.txt").write_bytes(b"\xff\xfe\n")
    (tmp_path / "a" / "summary.json").write_text("[" * 100_000)
    assert "data.json is damaged (train is ['x'], not a text)" in problems(tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    assert "failed at step 0 of ?" in problems(tmp_path / "a")


def test_a_run_without_metrics_and_one_whose_last_validation_is_lost(tmp_path):
    write_run(tmp_path / "new", stop=0)
    (tmp_path / "new" / "metrics.jsonl").unlink()
    assert problems(tmp_path / "new") == "no metrics yet\ninterrupted at step 0 of 11"
    loss = write_run(tmp_path / "done")[-1]["val_loss"]
    path = tmp_path / "done" / "metrics.jsonl"
    path.write_text(path.read_text().rsplit("\n", 2)[0])
    assert "lacks the last validation" in problems(tmp_path / "done")
    assert describe_run(tmp_path / "done")["final"]["val_loss"] == loss


def test_losses_that_are_not_finite_are_named(tmp_path):
    write_run(tmp_path / "a")
    path = tmp_path / "a" / "metrics.jsonl"
    path.write_text(re.sub(r'("step": (?:7|8),.*?"train_loss": )[^,]*', r"\1null", path.read_text()))
    assert problems(tmp_path / "a") == "training loss not finite in 2 steps, first in step 7"


def test_failed_runs_and_folders_that_are_no_runs_are_named(tmp_path):
    write_run(tmp_path / "a", stop=5)
    (tmp_path / "a.failures.txt").write_text("first\nout of memory\n")
    (tmp_path / "refused.failures.txt").write_text("no such data\n")
    (tmp_path / "stray").mkdir()
    runs, strays = find_runs(tmp_path)
    assert runs == [tmp_path / "a"]
    assert strays == [("stray", "not a run folder: it has no config.json"), ("refused", "never began: no such data")]
    assert problems(tmp_path / "a") == "failed at step 5 of 11\nout of memory"
    assert all(f"<b>{name}</b>: {text}" in make_page("t", [describe_run(runs[0])], strays) for name, text in strays)


def test_a_run_whose_folder_a_process_holds_is_running(tmp_path):
    write_run(tmp_path / "a", stop=5)
    with open(tmp_path / "a" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert problems(tmp_path / "a") == "running at step 5 of 11"
    assert problems(tmp_path / "a") == "interrupted at step 5 of 11"


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    write_run(tmp_path / "x" / "a")
    write_run(tmp_path / "y" / "a")
    rows = Page(make_page("t", [describe_run(tmp_path / "x" / "a"), describe_run(tmp_path / "y" / "a")])).table()
    assert [row["run"] for row in rows] == [str(tmp_path / "x" / "a"), str(tmp_path / "y" / "a")]


# ---- the page --------------------------------------------------------------------------------------------------------


def evil_page(tmp_path: Path) -> str:
    evil = tmp_path / EVIL.replace("/", "\u2215")  # the one character that a folder's name cannot have
    write_run(evil, method_options={EVIL: EVIL}, data_dir=EVIL)
    (evil.with_name(f"{evil.name}.failures.txt")).write_text(EVIL)
    write_run(tmp_path / "b", stop=3)
    return make_page(EVIL + "{{js}}", [describe_run(evil), describe_run(tmp_path / "b")], [(EVIL, EVIL)])


def test_no_name_or_option_can_leave_its_place(tmp_path):
    text = evil_page(tmp_path)
    tags = Page(text).tags
    assert (tags.count("script"), tags.count("img")) == (1, 0)
    assert Page(text).table()[0]["run"] == EVIL.replace("/", "\u2215")
    assert f" {html.escape(EVIL)}" in text.split('<ul class="legend">')[1].split("</ul>")[0]
    assert "{{js}}</title>" in text


def test_the_page_asks_for_nothing(tmp_path):
    write_run(tmp_path / "a")
    text = make_page("t", [describe_run(tmp_path / "a")])
    assert "default-src 'none'" in text
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # never fetched
    assert set(re.findall(r"https?://[^\s\"'`]+", text)) == names and "@import" not in text
    assert not re.search(r"<(link|script|img|image|use)[^>]*(src|href)=[\"'](?!data:|#)", text)


def test_the_last_validation_is_drawn_of_the_finished_runs_and_as_the_mean_of_seeds(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", method="rope", seed=seed)
    write_run(tmp_path / "b", method="alibi")
    write_run(tmp_path / "c", method="nope", stop=3)
    runs = [describe_run(path) for path in sorted(tmp_path.iterdir())]
    text = make_page("t", runs)
    drawn = lines(text, "Last validation: loss against length")
    assert [*drawn] == ["0", "1", "0 1", "2"]  # not the unfinished one
    losses = [[run["final"]["val_loss"][n] for n in ("16", "48")] for run in runs[:3]]
    values = [*losses[:2], np.mean(losses[:2], axis=0), losses[2]]
    assert_is_drawn(np.concatenate(values), np.concatenate([*drawn.values()])[:, 1])
    legend = text.split('<ul class="legend">')[1].split("</ul>")[0]
    assert re.findall(r'<li data-runs="([\d ]+)">.*?</svg>\s*(.*?)</li>', legend, re.S) == [
        ("0 1", "RoPE"), ("3", "NoPE"), ("2", "ALiBi")
    ]  # fmt: skip


def test_before_any_run_is_finished_those_that_came_furthest_are_drawn(tmp_path):
    for seed, stop in enumerate((3, 8, 8)):
        write_run(tmp_path / f"a{seed}", method="rope", seed=seed, stop=stop)
    text = make_page("t", [describe_run(path) for path in sorted(tmp_path.iterdir())])
    assert [*lines(text, "Last validation of unfinished runs: loss against length")] == ["1", "2", "1 2"]


def test_a_page_of_runs_without_any_validation(tmp_path):
    write_run(tmp_path / "a", stop=0)
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    assert "Nothing to draw yet." in make_page("t", [describe_run(tmp_path / "a")])


def test_methods_that_are_not_listed_have_colours_and_lines_of_their_own(tmp_path):
    names = ["kerple_p_rope", "my_method", "another", "rope"]
    for name in names:
        write_run(tmp_path / name, method=name)

    def shown(order):
        make_page("t", runs := [describe_run(tmp_path / name) for name in order])
        return {g["label"]: (g["color"], g["dash"], g["marker"]) for g in group_runs(runs)}

    looks = shown(names)
    assert len({colour for colour, _, _ in looks.values()}) == len(looks) == 4
    assert shown(names[::-1]) == looks
    for name in ("kerple_p_rope", "another"):  # the same in the figures
        assert plot_style(name, names)["color"] == plot_style(f"{name} slope=2", names)["color"] == looks[name][0]
    assert len({*OTHERS}) == len(OTHERS) and not {*OTHERS} & {*LINES.values()}
    forms = ["rope", *(f"rope base={base}" for base in range(6))]  # of one colour, told apart by lines and markers
    styles = [plot_style(form, forms) for form in forms]
    assert styles == [plot_style(form, {*forms[::-1]}) for form in forms]
    for key in ("linestyle", "marker"):
        assert len({style[key] for style in styles}) == 7, key


SEEN = dict(  # by the colour-blind, in linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)
    normal=np.eye(3),
    protanopia=[[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    deuteranopia=[[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    tritanopia=[[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_colours_of_methods_that_are_not_listed_are_told_apart_by_the_colour_blind(seen):
    """CIELAB distances; 2 are just seen side by side, those of Okabe and Ito's palette begin at 16."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

    def lab(colour):
        rgb = np.frombuffer(bytes.fromhex(colour[1:]), "u1") / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        x, y, z = np.cbrt(to_xyz @ np.clip(seen @ linear, 0, 1) / [0.9505, 1, 1.089])
        return np.array([116 * y, 500 * (x - y), 200 * (y - z)])

    colours = sorted({colour for colour, _, _ in OTHERS})
    apart = [np.linalg.norm(lab(a) - lab(b)) for a, b in itertools.combinations(colours, 2)]
    assert len(colours) == 5 and min(apart) > 20


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_runs_of_the_folder_and_refuses_what_is_no_run(tmp_path):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", stop=2, seed=1)
    out = tmp_path / "new" / "report.html"
    done = command("--runs-dir", tmp_path / "runs", "--out", out, "--title", "R&D")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: 2 runs, problems: 1,")
    assert [row["run"] for row in Page(out.read_text()).table()] == ["a", "b"]
    assert "<title>R&amp;D</title>" in out.read_text()
    before = out.read_bytes()
    refused = command(tmp_path / "runs" / "a", "--out", out)
    why = f"{out} was made from 2 runs, and now there are 1: --force writes over it"
    assert (refused.returncode, refused.stderr, out.read_bytes()) == (2, f"error: {why}\n", before)
    assert command(tmp_path / "runs" / "a", "--out", out, "--force").stdout.startswith(f"{out}: 1 runs,")
    refused = command(tmp_path / "runs" / "a", tmp_path / "runs", "--out", tmp_path / "no.html")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    hint = f"(for all runs in it: --runs-dir {tmp_path / 'runs'})"
    assert refused.stderr == f"error: {tmp_path / 'runs'} is not a run folder: it has no config.json {hint}\n"
    refused = command(tmp_path / "runs" / "a", "--out", tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == f"error: --out {tmp_path} is a folder: name the page in it, {tmp_path / 'report.html'}\n"
    assert not (tmp_path / "no.html").exists()


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_runs_is_refused(tmp_path, make):
    if make:
        (tmp_path / "runs" / "stray").mkdir(parents=True)
    with pytest.raises(ValueError, match="runs"):
        find_runs(tmp_path / "runs")


# ---- in a browser ----------------------------------------------------------------------------------------------------


def in_chromium(text: str, tmp_path: Path) -> tuple[str, str]:
    """The page's HTML after its scripts ran, and the browser's log."""
    (tmp_path / "page.html").write_text(text)
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
    flags += "--disable-component-update --disable-quic --enable-logging=stderr --dump-dom --virtual-time-budget=4000"
    done = subprocess.run(
        [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout, done.stderr


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_scripts_run_whatever_the_runs_are_called(tmp_path):
    dom, log = in_chromium(evil_page(tmp_path), tmp_path)
    assert '<html lang="en" class="js">' in dom  # the last but one line of page.js
    assert "CONSOLE" not in log, log  # errors, and requests that the page's policy refused
    assert Page(dom).tags.count("img") == 0 and 'class="hidden"' not in dom
    assert dom.count('<input type="checkbox" checked="" aria-label="show ') == 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_table_filters_hides_and_sorts(tmp_path):
    for seed, name in enumerate(("first", "second", "third")):
        write_run(tmp_path / "runs" / name, seed=seed, method="rope")
    text = make_page("t", [describe_run(path) for path in sorted((tmp_path / "runs").iterdir())])
    acts = """
        const filter = document.querySelector("input[type=search]"), boxes = document.querySelectorAll("th input");
        filter.value = "IR rope";
        filter.dispatchEvent(new Event("input"));
        boxes[2].click();
        for (let i = 0; i < 2; i++) document.querySelectorAll("#runs thead th")[3].click();
    """
    dom, log = in_chromium(text.replace("</body>", f"<script type=module>{acts}</script></body>"), tmp_path)
    assert "CONSOLE" not in log, log
    assert [row["run"] for row in Page(dom).table()] == ["third", "second", "first"]
    hidden = {runs: "hidden" in css for runs, css in re.findall(r'<g data-runs="([\d ]+)" class="(\w*)"', dom)}
    assert hidden == {"1": True, "2": True}  # the filter hides one, the box the other; not the mean of all


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_scripts_run_for_runs_without_numbers(tmp_path):
    write_run(tmp_path / "a", stop=0)
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    dom, log = in_chromium(make_page("t", [describe_run(tmp_path / "a")]), tmp_path)
    assert "Nothing to draw yet." in dom and '<html lang="en" class="js">' in dom
    assert "CONSOLE" not in log, log
