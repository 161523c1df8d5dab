"""The records of length generalisation: tampered entries, the score and p, the board, and a method from a file."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from commands import ROOT, exit_code, one_error
from test_train import FIELDS, make_data
from tiny_run import sweeps_in_this_process

from configs.presets import preset
from configs.runs import Run
from model.methods import MECHANISMS
from scripts import keep
from scripts.record import __main__ as record
from scripts.record import tracks
from scripts.shared.runs import read_runs

KEPT = ROOT / "results/taught/runs.jsonl"
OURS = "scale_invariant_p_rope"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a results folder with the kept runs of track laptop, and an entry that is made of five of them."""
    results = tmp_path_factory.mktemp("made") / "results"
    (results / "taught").mkdir(parents=True)
    shutil.copy(KEPT, results / "taught")
    runs = [stored for stored in read_runs(KEPT) if (stored.config.method, stored.config.method_options) == (OURS, {})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracks, "RESULTS", results)
        patch.setattr(record, "train_seeds", lambda *_: runs)
        assert exit_code(record.main, ["make", results / "records/laptop/2026-12-01_ours"]) == 0
    return results


@pytest.fixture
def entry(made, tmp_path, monkeypatch):
    """Return the folder of a copied entry."""
    monkeypatch.setattr(tracks, "RESULTS", shutil.copytree(made, tmp_path / "results"))
    return tmp_path / "results/records/laptop/2026-12-01_ours"


def test_an_entry_holds_the_means_of_its_lines(entry):
    made = json.loads((entry / "record.json").read_text())
    lines = [json.loads(line) for line in (entry / "runs.jsonl").read_text().splitlines()]
    far = [line["val_loss"]["4096"] for line in lines]
    copy = [line["copy_loss"]["random"]["1024"][1] for line in lines]
    assert made["score"] == pytest.approx(sum(far) / 5 + sum(copy) / 5)
    assert made["loss_1x"] == pytest.approx(sum(line["val_loss"]["256"] for line in lines) / 5)
    assert (made["against"], made["p"], made["wins"], made["passes"]) == (OURS, 1.0, False, True)
    assert (made["parameters"], made["flops"], made["knows_n"], made["date"]) == (1.0, 1.0, False, "2026-12-01")
    assert exit_code(record.main, ["check", entry]) == 0


def in_line(*path, value):
    def tamper(lines, seeds=(2,)):
        for line in (line for line in lines if line["seed"] in seeds):
            for key in path[:-1]:
                line = line[key]
            line[path[-1]] = value

    return tamper


def both_losses(lines):
    in_line("val_loss", "4096", value=1.5)(lines)
    in_line("curve", 0, "val_loss", "4096", value=1.5)(lines)


TAMPERED = {
    "val_loss 4096": in_line("val_loss", "4096", value=1.5),
    "copy_loss 1024": in_line("copy_loss", "random", "1024", value=[6.3, 1.0]),
    "loss_16x": both_losses,
    "seeds": lambda lines: lines.pop(1),
    "batch_tokens 4096, not 2048": in_line("changes", "batch_tokens", value=4096),
    "muon_lr 0.03, not 0.02": in_line("changes", "muon_lr", value=0.03),
    "dtype bfloat16": in_line("changes", "dtype", value="bfloat16"),
    "one text": in_line("data", "train", value="0123"),
    "the text 0123": lambda lines: in_line("data", "train", value="0123")(lines, seeds=range(5)),
    "RoPE's parameters": lambda lines: in_line("method", value="p_rope+gate")(lines, seeds=range(5)),
    "steps 1500": in_line("steps", value=1500),
    "steps 2000 and 1500": in_line("curve", 0, "step", value=1500),
}


@pytest.mark.parametrize("named", TAMPERED)
def test_a_tampered_line_is_refused(entry, named, capsys):
    lines = [json.loads(line) for line in (entry / "runs.jsonl").read_text().splitlines()]
    TAMPERED[named](lines)
    (entry / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert exit_code(record.main, ["check", entry]) == 2
    assert named in one_error(capsys)


@pytest.mark.parametrize("named", ["score", "p", "wins", "bytes", "README.md"])
def test_a_tampered_folder_is_refused(entry, named, capsys):
    made = json.loads((entry / "record.json").read_text())
    (entry / "record.json").write_text(json.dumps(made | ({named: 0.001} if named in made else {})))
    if named == "bytes":
        (entry / "weights.pt").write_bytes(bytes(300_000))
    if named == "README.md":
        (entry / "README.md").unlink()
    assert exit_code(record.main, ["check", entry]) == 2
    assert named in one_error(capsys)


def make_record(name, scores, loss_1x=2.0, knows_n=False, date="", **costs):
    by_seed = {str(seed): {"score": score} for seed, score in enumerate(scores)}
    row = dict(name=name, method=name, method_options={}, date=date, loss_1x=loss_1x, knows_n=knows_n, scores=by_seed)
    return row | dict(score=sum(scores) / 5, parameters=1.0, flops=1.0) | costs


def test_p_and_records_by_plain_numbers():
    base = [9.0, 9.1, 9.2, 9.3, 9.4]
    better = [score - gain for score, gain in zip(base, (1, 2, 3, 4, 5))]  # t = 3 / sqrt(2.5 / 5), 4 degrees of freedom
    t = 3 / (2.5 / 5) ** 0.5
    s = 1 + t**2 / 4
    cumulated = 0.5 + 3 / 8 * t / s**0.5 * (1 - t**2 / s / 12)  # Student's distribution with 4 degrees of freedom
    records = tracks.judge([
        make_record("rope", base),
        make_record("yarn", [5.0] * 5, knows_n=True),
        make_record("gate", better, loss_1x=2.011, date="2026-12-01"),
        make_record("large", better, parameters=1.03, date="2026-12-01"),
        make_record("good", better, loss_1x=2.009, date="2026-12-02"),
        make_record("noisy", [score - 3 for score in (0, 5, 9, 9, 9)], date="2026-12-03"),
        make_record("same", better, date="2026-12-04"),
    ])  # fmt: skip
    found = {row["name"]: (row["passes"], row["against"], row["wins"]) for row in records}
    assert found == {
        "yarn": (True, None, True), "rope": (True, None, True), "gate": (False, "rope", False),
        "large": (False, "rope", False), "good": (True, "rope", True), "noisy": (True, "good", False),
        "same": (True, "good", False),
    }  # fmt: skip
    ps = {row["name"]: row["p"] for row in records}
    assert ps["good"] == ps["gate"] == pytest.approx(1 - cumulated, rel=1e-5) and ps["same"] == 1
    with pytest.raises(ValueError, match="RoPE"):
        tracks.judge(records[:1])


@pytest.mark.slow
def test_the_committed_board_follows_from_the_committed_runs(tmp_path, monkeypatch):
    page = ROOT / "results/records/README.md"
    shutil.copytree(ROOT / "results/records", tmp_path / "records")
    for kept in ROOT.glob("results/*/runs.jsonl"):
        shutil.copytree(kept.parent, tmp_path / kept.parent.name)
    (tmp_path / "records/README.md").write_text(page.read_text().partition(record.MARK)[0])
    monkeypatch.setattr(tracks, "RESULTS", tmp_path)
    assert exit_code(record.main, ["table"]) == 0
    assert (tmp_path / "records/README.md").read_bytes() == page.read_bytes()
    assert (tmp_path / "records/board.png").stat().st_size > 1000
    assert page.read_text().partition(record.MARK)[0].count("\n") <= 60


def test_the_class_of_a_method_and_its_costs_are_measured():
    for method, knows_n in [("rope", False), ("logn_p_rope", False), ("rope_ntk", True), ("yarn", True)]:
        assert tracks.measure_method(replace(preset("taught"), method=method))["knows_n"] == knows_n
    config = replace(preset("taught"), method="pope", train_length=64, length_schedule=())
    d, layers, vocabulary = 128, 3, 1024
    pairs = 65 / 2  # keys a query; PoPE's q and k are twice as wide, and it learns 128 phases a layer
    rope = 2 * (12 * d * d * layers + d * vocabulary) + 4 * d * pairs * layers
    ratio = (rope + 2 * d * pairs * layers + 2 * 128 * layers) / rope
    assert tracks.measure_method(config)["flops"] == pytest.approx(ratio, abs=1e-4)


FUTURE = """
from model.methods.base import Replacement

class Future(Replacement):
    def __init__(self, num_heads, head_dim, train_length):
        super().__init__()

    def attend(self, q, k, v, rotated_q, rotated_k, q_offset, causal_attention, of_tokens=None):
        return v.mean(dim=2, keepdim=True).expand_as(q)
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Make track laptop tiny, with five kept runs of RoPE. Return the arguments of all commands."""
    fields = FIELDS | dict(val_lengths=(16, 256), val_tokens=512, val_copy_gaps=(64,), steps=2, cooldown_steps=1)
    changes = {name: value for name, value in fields.items() if value != getattr(preset("quickstart"), name)}
    monkeypatch.setitem(tracks.TRACKS, "laptop", Run("quickstart", {k: v for k, v in changes.items() if k != "name"}))
    monkeypatch.setattr(tracks, "RESULTS", tmp_path / "results")
    arguments = ["--runs-dir", tmp_path / "runs", "--data_dir", make_data(tmp_path / "text")]
    with sweeps_in_this_process():
        assert exit_code(record.main, ["run", "laptop", "--method", "rope", *arguments]) == 0
    kept = tmp_path / "results/quickstart/runs.jsonl"
    assert exit_code(keep.main, [*(tmp_path / "runs").glob("quick*"), "--to", kept]) == 0
    return arguments


@pytest.mark.parametrize("text, named", [(FUTURE, "later tokens"), ("import torch", "0 subclasses")])
def test_a_file_that_breaks_a_rule_is_not_trained(tmp_path, text, named, capsys):
    (tmp_path / "future.py").write_text(text)
    command = ["run", "laptop", "--file", tmp_path / "future.py", "--runs-dir", tmp_path / "runs"]
    assert exit_code(record.main, command) == 2 and named in one_error(capsys)
    assert list((tmp_path / "runs").glob("*/taught-*")) == []
    MECHANISMS.pop("future", None)


@pytest.mark.slow
def test_a_mechanism_from_a_file_becomes_an_entry(tiny, tmp_path, monkeypatch, capsys):
    """The README's example, in a folder outside the repository; the first seed in a new process."""
    monkeypatch.setattr(tracks, "GATE", 1e-6)  # two steps change the losses little
    file = tmp_path / "elsewhere/root.py"
    file.parent.mkdir()
    file.write_text(re.search(r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    method = ["--file", file, "--method", "root+p_rope", "--method_options", "slope", "2", *tiny]
    try:
        assert exit_code(record.main, ["run", "laptop", "--seeds", 0, *method]) == 2 and "seeds" in one_error(capsys)
        (runs,) = (tmp_path / "runs").glob("root-*")
        (first,) = runs.glob("*/summary.json")
        trained = first.stat().st_mtime_ns
        folder = tmp_path / "results/records/laptop/2026-12-01_root"
        with sweeps_in_this_process():
            assert exit_code(record.main, ["run", "laptop", *method]) == 0
            assert "p = " in capsys.readouterr().out and first.stat().st_mtime_ns == trained
            assert exit_code(record.main, ["make", folder, *method]) == 0
            made = json.loads((folder / "record.json").read_text())
            assert (made["method"], made["mechanism"], made["method_options"]) == ("p_rope+root", "root", {"slope": 2})
            assert (folder / "method.py").read_text() == file.read_text() and len(made["scores"]) == 5
            other = make_data(tmp_path / "other", seed=1)
            capsys.readouterr()
            assert exit_code(record.main, ["check", folder, "--text", other, "--runs-dir", runs]) == 0
            assert len(re.findall("(?m)^.*root-.*-s[0-4] on .*'score': 8", capsys.readouterr().out)) == 5
            assert exit_code(record.main, ["check", folder, "--rerun", 1, *tiny]) == 0
            kept = (folder / "method.py").read_text()
            (folder / "method.py").write_text(kept.replace("self.slope *", "-9 *"))
            assert exit_code(record.main, ["check", folder, "--rerun", 1, *tiny]) == 2
            assert "seed 1" in one_error(capsys)
    finally:
        MECHANISMS.pop("root", None)
