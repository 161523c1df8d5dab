"""Which runs the sweeps have: names, identities, seeds, arguments; sweeps of one's own; and wandb's sweep."""

import collections
from types import SimpleNamespace

import pytest
import yaml
from commands import ROOT, parametrize, refuses, slow, table

from configs.config import config_hash
from configs.runs import Run
from configs.sweeps import MAIN_METHODS, PAPER_SWEEPS, SCALES, TAU
from model.methods import scale_invariant
from model.methods.options import check_options
from runtime.build import read_run
from scripts.reproduce.tables import paper_targets
from scripts.shared import sweeps
from scripts.shared.sweeps import all_sweeps, sweep


@parametrize("scale", SCALES)
def test_arguments_of_every_run_give_its_config_back(scale):
    for run in sweep("all", scale, seeds=[1], changes=dict(group="a", val_lengths=(64, 256))):
        assert read_run(run.arguments) == run.config


def test_the_default_of_the_sweeps_is_the_method_s():
    assert TAU == scale_invariant.TAU


@slow
@table("scale, tuned, haystack, steps", """
    paper | 21 | c4     | 300
    small | 21 | c4     | 300
    mini  | 27 | shards | 6000
""")
def test_all_is_every_run_of_the_paper_once_with_its_fine_tuning(scale, tuned, haystack, steps):
    runs = sweep("all", scale, needle=dict(examples=7))
    hashes = {config_hash(run.config) for run in runs}
    assert len(runs) == len(hashes) == len({run.name for run in runs})
    assert hashes == {config_hash(run.config) for name in PAPER_SWEEPS for run in sweep(name, scale)}
    with_needle = [run for run in runs if run.needle]
    assert [run.name for run in with_needle] == [run.name for run in sweep("table_needle", scale)]
    assert len(with_needle) == int(tuned)
    (needle,) = {run.needle for run in with_needle}
    assert (needle.haystack, needle.steps, needle.examples) == (haystack, int(steps), 7)


@parametrize("scale", SCALES)
@parametrize("name", all_sweeps())
def test_seeds_that_are_given_are_used_everywhere(name, scale):
    seeds = collections.defaultdict(set)
    for run in sweep(name, scale, seeds=[4, 9]):
        check_options(run.config.method, run.config.method_options)
        seeds[run.preset, str(run.changes | dict(seed=None))].add(run.config.seed)
    assert seeds and all(given == {4, 9} for given in seeds.values())


@parametrize("scale", ["paper", "small", "mini"])
def test_three_seeds_where_the_paper_has_three(scale):
    """Appendix "Seeds": every method trained at 4k on the 162M model; the rest was run once."""
    three = "table_losses table_infini figure_train_4k figure_scale_invariant_variants".split()
    for name in (*three, "figure_304m", "figure_train_16k", "figure_tau"):
        assert {run.config.seed for run in sweep(name, scale)} == {*range(3 if name in three else 1)}
    seeds = {(run.preset, run.config.seed) for run in sweep("figure_train_lengths", scale)}
    short, middle, long = SCALES[scale].lengths
    assert seeds == {(short, 0), (short, 1), (short, 2), (middle, 0), (long, 0)}


def test_methods_that_train_identically_are_trained_once():
    runs = sweep("figure_train_16k", "paper")
    methods = [method for run in runs for method in (run.config.method, *run.config.validate_as)]
    assert sorted(methods) == sorted({method for method, _ in paper_targets("table_losses")})
    assert len(runs) == 7 and "validate_as" not in runs[0].name
    assert [r.config.method for r in sweep("figure_train_16k", "paper", methods=["yarn"])] == ["rope"]


def names(name, **changes):
    return [run.name for run in sweep(name, "mini", changes=changes)]


def test_a_name_has_the_changed_fields_or_their_hash():
    assert Run("mini", dict(method="rope", seed=3, muon_lr=0.1, dtype="float32")).name == "mini-rope-muon_lr0.1-s3"
    lr = dict(muon_lr=0.123456789, embedding_lr=0.123456789, head_lr=0.123456789, scalar_lr=0.123456789)
    long = names("figure_tau", **lr, adam_eps=1.23456789e-9)
    assert len(set(long)) == 6 and max(map(len, long)) < 80
    assert names("table_losses", steps=640) == names("table_losses")  # as in the preset


@pytest.fixture
def own(monkeypatch):
    """Return a function that makes a sweep of these presets and fields, and returns the names of its runs."""

    def own(cases, **changes):
        study = SimpleNamespace(SWEEPS={"own": lambda scale: [Run(*case) for case in cases]})
        monkeypatch.setattr(sweeps, "studies", lambda: [study])
        return names("own", **changes)

    return own


@parametrize("cases, named", [
    ([], "own"),
    ([("minj", {})], "minj"),
    ([("mini", dict(steps="6"))], "steps"),
    ([("mini", dict(muon_lr=0.03))], "--muon_lr"),
])
def test_mistakes_in_a_new_sweep_are_named(own, cases, named):
    """The last sets a field that the command line sets, too."""
    with refuses(named):
        own(cases, muon_lr=0.01)


def test_a_new_sweep_has_its_runs_once(own):
    cases = [("mini", dict(method=method, dtype=dtype)) for method in ("rope", "nope") for dtype in ("auto", "float32")]
    assert own(cases) == ["mini-rope-s0", "mini-nope-s0"]
    assert own([("mini", dict(method="gate+forget"))]) == ["mini-forget+gate-s0"]  # as train_gpt.py spells it


def test_a_field_that_scales_with_the_steps_of_a_sweep_can_be_set():
    default = sweep("far", "far")[0].config.cooldown_steps
    runs = sweep("longer", "far", seeds=[0], changes={"cooldown_steps": default})
    assert {run.config.cooldown_steps for run in runs} == {default}


def test_wandb_sweep_starts_the_runs_of_the_main_table():
    """wandb's agent replaces ${args} by the arguments."""
    file = yaml.safe_load((ROOT / "configs/wandb_sweep.yaml").read_text())
    methods, seeds = (file["parameters"][axis]["values"] for axis in ("method", "seed"))
    start, program, *words, last = file["command"][1:]
    assert (file["program"], start, program, last) == ("train_gpt.py", "python", "${program}", "${args}")
    configs = [read_run([*words, f"--method={m}", f"--seed={s}"]) for m in methods for s in seeds]
    assert [config_hash(c) for c in configs] == [config_hash(r.config) for r in sweep("table_losses", "paper")]
    assert methods == MAIN_METHODS and all(c.wandb == "online" for c in configs)
    assert file["method"] == "grid" and file["metric"]["goal"] == "minimize"
    assert file["metric"]["name"] in {f"val_loss/{length}" for length in configs[0].val_lengths}
