"""The records of length generalisation: tampered entries, the score and p, the board, and a method from a file."""

import collections
import json
import re
import shutil
import statistics
from dataclasses import replace

import pytest
from commands import ROOT, fails, parametrize, read_json, read_lines, refuses, shared, slow, succeeds, update_json
from pytest import approx
from scipy import stats
from test_train import FIELDS, make_data
from tiny_run import sweeps_in_this_process

from configs.command_line import read_fields
from configs.presets import preset
from configs.runs import Run
from model.methods import MECHANISMS
from scripts import keep
from scripts.record import __main__ as record
from scripts.record import tracks
from scripts.shared.looks import series_label
from scripts.shared.runs import final_losses, read_runs

KEPT, OURS = ROOT / "results/taught/runs.jsonl", "scale_invariant_p_rope"
PAGE = ROOT / "results/records/README.md"
EXAMPLE = re.search(r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def our_runs():
    return [stored for stored in read_runs(KEPT) if series_label(stored.config) == OURS]


def make_folder(folder):
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("The prediction.")
    return folder


@shared
def made(shared_path):
    """Return a results folder with the kept runs of track laptop, and an entry that is made of five of them."""
    results = shared_path / "results"
    shutil.copytree(KEPT.parent, results / "taught")
    runs = our_runs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracks, "RESULTS", results)
        patch.setattr(record, "train_seeds", lambda *_: runs)
        succeeds(record.main, "make", make_folder(results / "records/laptop/2026-12-01_ours"))
    return results


@pytest.fixture
def entry(made, tmp_path, monkeypatch):
    """Return the folder of a copied entry."""
    monkeypatch.setattr(tracks, "RESULTS", shutil.copytree(made, tmp_path / "results"))
    return tmp_path / "results/records/laptop/2026-12-01_ours"


def test_an_entry_holds_the_means_of_its_lines(entry):
    made = read_json(entry / "record.json")
    lines = read_lines(entry / "runs.jsonl")
    copy = statistics.fmean(line["copy_loss"]["random"]["1024"][1] for line in lines)
    assert made["score"] == approx(copy + statistics.fmean(line["val_loss"]["4096"] for line in lines))
    assert made["loss_1x"] == approx(statistics.fmean(line["val_loss"]["256"] for line in lines))
    baselines = [record for record in tracks.standing("laptop") if not record["date"] and record["passes"]]
    best = min((record["score"], record["name"]) for record in baselines if not record["knows_n"])[1]
    assert (made["against"], made["wins"], made["passes"]) == (best, False, True) and made["p"] > 0.5
    assert (made["parameters"], made["flops"], made["knows_n"], made["date"]) == (1.0, 1.0, False, "2026-12-01")
    succeeds(record.main, "check", entry)


def change(*paths, value, seeds=(2,)):
    """Return a function that sets the values at some paths, such as "changes/batch_tokens", in the lines of seeds."""

    def tamper(lines):
        for line, path in ((line, path.split("/")) for line in lines if line["seed"] in seeds for path in paths):
            for key in path[:-1]:
                line = line[0 if isinstance(line, list) else key]
            line[path[-1]] = value

    return tamper


TAMPERED = {  # part of the message: change of the lines
    "val_loss 4096": change("val_loss/4096", value=1.5),
    "loss_16x": change("val_loss/4096", "curve/0/val_loss/4096", value=1.5),
    "copy_loss 1024": change("copy_loss/random/1024", value=[6.3, 1.0]),
    "seeds [0, 2, 3, 4]": lambda lines: lines.pop(1),
    "has no curve": lambda lines: lines[0].pop("curve"),
    "batch_tokens 4096, not 2048": change("changes/batch_tokens", value=4096),
    "dtype bfloat16": change("changes/dtype", value="bfloat16"),
    "one text": change("data/train", value="0123"),
    "the text 0123": change("data/train", value="0123", seeds=tracks.SEEDS),
    "RoPE's parameters": change("method", value="p_rope+gate", seeds=tracks.SEEDS),
    "steps 1500 and 2000": change("steps", value=1500),
    "steps 2000 and 1500": change("curve/0/step", value=1500),
}


@parametrize("named", TAMPERED)
def test_a_tampered_line_is_refused(entry, named, capsys):
    lines = read_lines(entry / "runs.jsonl")
    TAMPERED[named](lines)
    (entry / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fails(capsys, named, record.main, "check", entry)


@parametrize("named", ["score", "p", "bytes", "README.md", "root", "YYYY"])
def test_a_tampered_folder_is_refused(entry, named, capsys):
    if named in ("score", "p"):
        update_json(entry / "record.json", **{named: 0.001})
    if named == "bytes":
        (entry / "weights.pt").write_bytes(bytes(300_000))
    if named == "README.md":
        (entry / "README.md").unlink()
    if named == "root":  # a mechanism that the runs do not have
        (entry / "method.py").write_text(EXAMPLE)
        update_json(entry / "record.json", mechanism=named)
    if named == "YYYY":
        entry = entry.rename(entry.with_name("2026-13-01_ours"))
    fails(capsys, named, record.main, "check", entry)


def make_record(name, scores, loss_1x=2.0, knows_n=False, date="", **costs):
    by_seed = {str(seed): {"score": score} for seed, score in enumerate(scores)}
    row = dict(name=name, text="a b c", method=name, method_options={}, parameters=1.0, flops=1.0, scores=by_seed)
    return row | dict(date=date, loss_1x=loss_1x, knows_n=knows_n, score=sum(scores) / 5) | costs


def test_a_sixth_seed_changes_no_record():
    runs = our_runs()
    sixth = replace(runs[0], config=replace(runs[0].config, seed=5))
    records = tracks.make_records(tracks.TRACKS["laptop"], runs)
    assert len(records) == 1 and tracks.make_records(tracks.TRACKS["laptop"], [sixth, *runs]) == records


def test_p_and_records_by_plain_numbers():
    base = [9.0, 9.1, 9.2, 9.3, 9.4]
    better = [score - gain for score, gain in zip(base, (1, 2, 3, 4, 5))]  # t = 3 / sqrt(2.5 / 5), 4 degrees of freedom
    t, s = 3 / 0.5**0.5, 1 + 9 / 0.5 / 4
    cumulated = 0.5 + 3 / 8 * t / s**0.5 * (1 - t**2 / s / 12)  # Student's distribution with 4 degrees of freedom
    rows = [
        make_record("rope", base),
        make_record("yarn", [5.0] * 5, knows_n=True),
        make_record("gate", better, loss_1x=2.011, date="2026-12-01"),
        make_record("large", better, parameters=1.03, date="2026-12-01"),
        make_record("good", better, loss_1x=2.009, date="2026-12-02"),
        make_record("noisy", [score - 3 for score in (0, 5, 9, 9, 9)], date="2026-12-03"),
        make_record("same", better, date="2026-12-04"),
    ]
    records = tracks.judge({row["name"]: row for row in rows})
    assert {row["name"]: (row["passes"], row["against"], row["wins"]) for row in records} == {
        "yarn": (True, None, True), "rope": (True, None, True), "gate": (False, "rope", False),
        "large": (False, "rope", False), "good": (True, "rope", True), "noisy": (True, "good", False),
        "same": (True, "good", False),
    }  # fmt: skip
    ps = {row["name"]: row["p"] for row in records}
    assert ps["good"] == ps["gate"] == approx(1 - cumulated, rel=1e-5) and ps["same"] == 1
    with refuses("RoPE"):
        tracks.judge({"yarn": records[0]})


@slow
def test_the_committed_board_follows_from_the_committed_runs(tmp_path, monkeypatch):
    shutil.copytree(PAGE.parent, tmp_path / "records")
    for kept in ROOT.glob("results/*/runs.jsonl"):
        shutil.copytree(kept.parent, tmp_path / kept.parent.name)
    rules = PAGE.read_text().partition(record.MARK)[0]
    (tmp_path / "records/README.md").write_text(rules)
    monkeypatch.setattr(tracks, "RESULTS", tmp_path)
    succeeds(record.main, "table")
    assert (tmp_path / "records/README.md").read_bytes() == PAGE.read_bytes() and rules.count("\n") <= 60


def test_the_page_argues_for_the_score_with_the_kept_runs():
    """The numbers on the page: rank correlations with the curves, ALiBi's scores, spreads."""
    found = collections.defaultdict(list)
    for stored, method in [(s, m) for s in read_runs(KEPT) for m in (None, *s.config.validate_as)]:
        losses, score = final_losses(stored.summary, method), tracks.read_score(stored.summary, 256, method)
        gains = (stored.summary["copy_gain_as"][method] if method else stored.summary["copy_gain"])["random"]
        copies = [copies[0] - gains[gap] for gap, copies in stored.summary["copy_loss"]["random"].items()]
        row = score | {"curves": statistics.fmean(losses.values()) + statistics.fmean(copies)}
        row["64x"] = losses.get(16_384)  # exploratory runs may lack it
        found[series_label(stored.config, method)].append(row | {"gain": losses[4096] - gains["1024"]})
    names = ["rope", "rope_ntk", "yarn", "logn_p_rope", OURS, "alibi", *(f"alibi slope_scale={s}" for s in (4, 16))]
    keys = "curves score loss_16x 64x gain loss_1x copy_4x".split()
    means = {key: [statistics.fmean(row[key] for row in found[name]) for name in names] for key in keys}
    assert min(means["64x"]) == means["64x"][6] and sorted(means["gain"])[1] == means["gain"][7]
    numbers = [f"{stats.spearmanr(means['curves'], means[key]).statistic:.2f}" for key in keys[1:4]]
    numbers += [f"{means['score'][7]:.3f}", f"{means['loss_1x'][7] - means['loss_1x'][0]:.3f}"]
    numbers += [f"{max(means[key]) - min(means[key]):.1f}" for key in ("copy_4x", "loss_16x")]
    spreads = [statistics.stdev(row["score"] for row in rows) for rows in found.values() if len(rows) > 4]
    numbers += [f"{max(spreads):.2f}"]
    assert re.findall(r"\d+\.\d+", PAGE.read_text().partition("## Why this score")[2])[:8] == numbers


def test_methods_that_know_the_length_are_told_from_others():
    for method, knows_n in dict(rope=False, logn_p_rope=False, rope_ntk=True, yarn=True).items():
        assert tracks.measure_method(replace(preset("taught"), method=method))["knows_n"] == knows_n


FUTURE = """
from model.methods.base import Replacement

class Future(Replacement):
    def __init__(self, shape):
        super().__init__()

    def attend(self, q, k, v, rotated_q, rotated_k, features, plan):
        return v.mean(dim=2, keepdim=True).expand_as(q)
"""
NEXT = FUTURE.replace("v.mean(dim=2, keepdim=True).expand_as(q)", "v.roll(-1, dims=2)")  # leaks one token


@parametrize("text, method, named", [
    (FUTURE, "future", "later tokens"), (NEXT, "future,rope,rope", "later tokens"),
    ("import torch", "future", "0 subclasses"), (FUTURE, "p_rope", "future"),
])
def test_a_file_that_breaks_a_rule_is_not_trained(tmp_path, text, method, named, capsys):
    (tmp_path / "future.py").write_text(text)
    command = ["run", "laptop", "--file", tmp_path / "future.py", "--method", method, "--runs-dir", tmp_path / "runs"]
    fails(capsys, named, record.main, *command)
    assert not [*(tmp_path / "runs").glob("*/taught-*")]
    MECHANISMS.pop("future", None)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Make track laptop tiny, with five kept runs of RoPE. Return the arguments of all commands."""
    more = "--val_lengths 16 256 --val_tokens 512 --val_copy_gaps 64 --steps 2 --cooldown_steps 1"
    fields = read_fields(f"{FIELDS} {more}".split())
    del fields["name"]
    monkeypatch.setitem(tracks.TRACKS, "laptop", Run("quickstart", fields))
    monkeypatch.setattr(tracks, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tracks, "GATE", 1e-6)  # two steps change the losses little
    arguments = ["--runs-dir", tmp_path / "runs", "--data_dir", make_data(tmp_path / "text")]
    with sweeps_in_this_process():
        succeeds(record.main, "run", "laptop", "--method", "rope", *arguments)
    kept = tmp_path / "results/quickstart/runs.jsonl"
    succeeds(keep.main, *(tmp_path / "runs").glob("quick*"), "--to", kept)
    return arguments


@slow
def test_a_mechanism_from_a_file_becomes_an_entry(tiny, tmp_path, capsys):
    """The README's example, in a folder outside the repository; the first seed in a new process."""
    file = tmp_path / "elsewhere/root.py"
    file.parent.mkdir()
    file.write_text(EXAMPLE)
    method = ["--file", file, "--method", "root+p_rope", "--method_options", "slope", "2", *tiny]
    fails(capsys, "seeds", record.main, "run", "laptop", "--seeds", 0, *method)
    (first,) = tmp_path.glob("runs/root-*/*/summary.json")
    trained = first.stat().st_mtime_ns
    folder = make_folder(tmp_path / "results/records/laptop/2026-12-01_root")
    with sweeps_in_this_process():
        succeeds(record.main, "run", "laptop", *method)
        assert "\nagainst: rope\n" in capsys.readouterr().out and first.stat().st_mtime_ns == trained
        succeeds(record.main, "make", folder, *method)
        made = read_json(folder / "record.json")
        assert (made["method"], made["mechanism"], made["method_options"]) == ("p_rope+root", "root", {"slope": 2})
        assert (folder / "method.py").read_text() == file.read_text() and len(made["scores"]) == 5
        succeeds(record.main, "check", folder, "--rerun", 1, *tiny)
        (folder / "method.py").write_text(file.read_text().replace("self.slope *", "-9 *"))
        fails(capsys, "seed 1", record.main, "check", folder, "--rerun", 1, *tiny)
    MECHANISMS.pop("root")
