"""Tables and figures from runs with known contents: numbers, files, and the names of missing runs."""

import collections
import dataclasses
import json
import math
import re

import matplotlib.image
import numpy as np
from commands import ROOT, exit_code, fixture, rows_of, slow, table, update_json, write_files
from pytest import approx, raises

from configs.sweeps import SCALES, SI
from results import reach
from scripts.reproduce import __main__ as command
from scripts.reproduce import figures, needles
from scripts.reproduce.study import Study
from scripts.reproduce.tables import paper_targets
from scripts.shared.looks import series_label, series_name
from scripts.shared.runs import final_losses, read_runs
from scripts.shared.sweeps import all_sweeps, studies, sweep

pytestmark = slow

HEADER = "python 3.12.1, torch {}, numpy 2.3.0\ndevice: an abacus\ncommit: 0123abc\nstarted: 2026-11-28T09:30:00\n"
# The log of a run that was resumed with another torch.
LOG = HEADER.format("2.13.0") + "==== a.py ====\nimport torch now\n" + HEADER.format("2.14.0+cu130")


def write_run(
    runs_dir, run, losses, *, steps=(0, 200, 400, 640), val_tokens=49_152, data="abc", needle=None,
    part=None, others={}, fall=0.1, **summary,
):
    """A finished run whose validation loss falls by `fall` a record to the given losses {length: nats}.

    others: losses of its weights as other methods, {method: losses}. part: validation tokens, before the end, at all
    lengths but the first (the fast profile).
    """
    # 1. The validations.
    records = ['{"step": 1, "tokens": 1, "train_loss": 5.0}']
    for i, step in enumerate(steps):
        def rise(values):
            return {str(n): x + fall * (len(steps) - 1 - i) for n, x in values.items()}
        counts = dict.fromkeys(map(str, losses), val_tokens)
        if part and step < steps[-1]:
            counts |= dict.fromkeys([*counts][1:], part)
        found = dict(val_loss=rise(losses), val_tokens=counts)
        found["val_loss_as"] = {method: rise(values) for method, values in others.items()}
        records.append(json.dumps(dict(step=step, tokens=step) | found))

    # 2. The files.
    last = dict(name=run.name, data=data, steps=steps[-1], tokens=1000, seconds=8.0, parameters=9)
    contents = dict(config=vars(run.config), summary=last | found | summary, data=dict(train=data, validation="v"))
    if needle:
        contents["needle/summary"] = needle
    files = {f"{name}.json": json.dumps(content) for name, content in contents.items()}
    return write_files(runs_dir / run.name, files | {"log.txt": LOG, "metrics.jsonl": "\n".join(records) + "\n"})


def write_study(runs_dir, item, scale="mini", **options):
    """Write all runs of a study. Return their losses by (series, seed, length); all differ."""
    random, values = np.random.default_rng(0), {}
    for number, run in enumerate(sweep(item, scale)):
        methods = [run.config.method, *run.config.validate_as]
        drawn = {m: {n: 4 + 0.01 * number + random.random() for n in run.config.val_lengths} for m in methods}
        losses, others = drawn[methods[0]], {method: drawn[method] for method in methods[1:]}
        steps = [s * run.config.steps // 4 for s in range(5)]
        write_run(runs_dir, run, losses, steps=steps, others=others, **options)
        shown = {series_label(run.config): losses} | others
        for name, found in shown.items():
            values |= {(name, run.config.seed, n): x for n, x in found.items()}
    return values


@fixture
def call(tmp_path, capsys):
    """Runs the command on tmp_path's runs: its exit status and its output."""

    def call(text, *fields):
        argv = [*text.split(), *fields, "--runs-dir", tmp_path / "runs", "--out", tmp_path / "out"]
        return exit_code(command.main, argv), capsys.readouterr()

    return call


@fixture
def drawn(monkeypatch):
    """Return the panels of each figure by its name. They are not drawn."""
    grids = {}
    for module in (figures, needles, reach, *studies()):
        keep_panels = lambda path, grid, **_: grids.update({path.name: grid})  # noqa: E731
        monkeypatch.setattr(module, "draw_panels", keep_panels, raising=False)
    return grids


def is_figure(path):
    """A PNG of the page's width with something drawn on it."""
    pixels = matplotlib.image.imread(path.with_suffix(".png"))
    return pixels.shape[1] == 1350 and pixels.shape[0] > 300 and pixels[..., :3].std() > 0.05


def cells_of(text):
    """Return the table rows of a text by their first cell."""
    return {first: cells for first, *cells in rows_of(text)}


def table_of(text):
    """Return the cells of a text's first table by first cell and head, without bold."""
    (_, *head), *body = rows_of(text[text.index("\n| ") :].split("\n\n")[0])
    found = {}
    for first, *cells in body:
        found |= {(first, name): cell.strip("*") for name, cell in zip(head, cells)}
    return found


def assert_cells(output, expected):
    """Assert cells of a page's first table, one a line: row | column | cell."""
    found = table_of(output.out)
    for line in expected.strip().splitlines():
        name, head, cell = map(str.strip, line.split("|"))
        assert found[name, head] == cell


def assert_missing(output, named):
    """Assert that lines of a page name missing runs: {run: reason}."""
    for run, reason in named.items():
        assert re.search(rf"^- missing(?=.*`mini-{run}`).*{reason}", output.out, re.MULTILINE), run


def used(output):
    """Return the numbers of runs that a page used and wanted."""
    (line,) = [line for line in output.out.splitlines() if line.startswith("- runs used")]
    return [int(number) for number in re.findall(r"\d+", line)[:2]]


def same(run, value=4.0):
    return {n: value for n in run.config.val_lengths}


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_paper_targets_are_whole():
    counts = dict(table_losses=30, table_needle=30, table_infini=12, table_llama=30)
    assert {name: len(paper_targets(name)) for name in counts} == counts
    losses = paper_targets("table_losses")
    assert losses["p_rope", 65_536] == dict(mean=5.735, stderr=0.085, seeds=3, note="", remark="")
    columns = collections.defaultdict(dict)
    for (_, length), target in losses.items():
        columns[length][target["mean"]] = "bold" in target["note"]
    for column in columns.values():  # the paper's bold is the lowest of its column
        assert [mean for mean, bold in column.items() if bold] == [min(column)]


def test_without_runs_nothing_is_written_and_the_sweep_is_named(tmp_path, call):
    options = "table_infini --scale mini --steps 6 --cooldown_steps 2"
    code, output = call(options)
    assert code == 1 and used(output) == [0, 12] and not (tmp_path / "out").exists()
    assert f"scripts.sweep {options} --runs-dir {tmp_path / 'runs'}" in output.out


def test_runs_of_an_item_read_equally_many_tokens():
    """A fingerprint covers the tokens that a run reads, so it is equal for runs on the same text."""
    for item in all_sweeps():
        assert len({run.config.steps * run.config.batch_tokens for run in sweep(item, "mini")}) == 1


@table("file, field, value", """
    summary | data       | other
    data    | validation | other
    summary | val_tokens | 1024
""")
def test_runs_on_another_text_are_named_and_left_out(tmp_path, call, file, field, value):
    for run in sweep("table_losses", "mini", methods=["rope"]):
        folder = write_run(tmp_path / "runs", run, same(run))
    update_json(folder / f"{file}.json", **{field: int(value) if value.isdigit() else value})
    code, output = call("table_losses --scale mini --methods rope")
    assert code == 1 and "`mini-rope-s2`" in output.out and used(output) == [2, 3]


def test_a_few_runs_on_another_text_do_not_hide_kept_runs(tmp_path):
    kept = read_runs(ROOT / "results/mini/runs.jsonl")
    mine = [stored for stored in kept if stored.config.method == "alibi"]
    mine = [dataclasses.replace(stored, summary=stored.summary | {"data": "mine"}) for stored in mine]
    assert len(Study("table_losses", "mini", tmp_path, [*mine, *kept]).finished) == 27


def test_missing_lengths_come_from_the_evaluation_or_are_named(tmp_path, call):
    runs = sweep("table_losses", "mini", methods=["rope"])
    folders = [write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.5, 4096: 5.0}) for run in runs]
    right = '{"step": "step_000640", "val_tokens": 49152, "val_loss": {"16384": 6.0, "256": 9.0}}'
    of_other_tokens = right.replace("49152", "1024")
    files = ("evaluation", right), ("evaluation", of_other_tokens), ("evaluation_fedc", right)
    for folder, (name, content) in zip(folders, files):
        write_files(folder, {f"{name}.json": content})
    code, output = call("table_losses --scale mini --methods rope")
    assert_cells(output, """
        RoPE | 256 (1x)    | 4.000 \u00b1 0.000
        RoPE | 16384 (64x) | 6.000 \u00b1 n/a
        RoPE | seeds       | 1-3
    """)
    lacking = [f"python -m scripts.evaluate {folder} --lengths 16384" in output.out for folder in folders]
    assert code == 1 and lacking == [False, True, True]


def test_unfinished_other_diverged_and_damaged_runs_are_named(tmp_path, call):
    runs = sweep("table_losses", "mini", seeds=[0], methods="rope p_rope nope yarn alibi".split())
    rope, p_rope, nope, alibi, _ = (write_run(tmp_path / "runs", run, same(run)) for run in runs)
    (rope / "summary.json").unlink()
    update_json(p_rope / "config.json", muon_lr=0.5)
    (nope / "summary.json").write_text((nope / "summary.json").read_text().replace("4.0", "null"))
    (alibi / "config.json").write_text("[")
    code, output = call("table_losses --scale mini --seeds 0 --methods", *(run.config.method for run in runs))
    assert code == 1 and used(output) == [1, 5]
    named = {"rope-s0": "interrupted", "p_rope-s0": "muon_lr", "nope-s0": "summary.json", "alibi-s0": "config"}
    assert_missing(output, named)


def test_two_runs_of_one_series_and_seed_are_no_mean():
    study = Study("table_losses", "mini", ROOT, read_runs(ROOT / "results/mini/runs.jsonl"))
    study.finished += study.finished[:1]
    with raises(ValueError, match=study.finished[0][0].config.method):
        study.by_seed(final_losses)


def test_all_seeds_that_there_are_count_unless_some_are_asked_for(tmp_path, call):
    for run in sweep("table_losses", "mini", seeds=[0, 7, 9], methods=["nope"]):
        write_run(tmp_path / "runs", run, same(run, 4.0 + run.config.seed))
    for options, seeds, mean in ("--seeds 0 9", "2", "8.500"), ("", "3", "9.333"):
        _, output = call(f"table_losses --scale mini --methods nope {options}")
        found = table_of(output.out)
        assert found["NoPE", "seeds"] == seeds and found["NoPE", "256 (1x)"].startswith(mean)


# ---- needles ---------------------------------------------------------------------------------------------------------


def needle_summary(run, greedy, **settings):
    """What fine-tuning with the settings of scale mini leaves behind, but for `settings`."""
    shares = dict(greedy=greedy, teacher_forcing=greedy | {"256": 0.95})
    as_others = {method: dict(shares, greedy=dict.fromkeys(greedy, 0.25)) for method in run.config.validate_as}
    return dataclasses.asdict(run.needle) | dict(pretrained="step_000640") | shares | {"as": as_others} | settings


def test_needle_table(tmp_path, call):
    for run in sweep("table_needle", "mini", methods=["alibi", "rope"]):
        share = 0.9 - 0.1 * run.config.seed
        summary = needle_summary(run, {"256": share, "1024": share / 2, "4096": 0.0})
        match run.name:
            case "mini-rope-s0":
                summary["greedy"]["16384"] = 0.1  # needle --lengths
            case "mini-rope-s1":
                del summary["greedy"]["4096"]
            case "mini-alibi-s1":
                summary["steps"] = 300
            case "mini-alibi-s2":
                summary = None
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=summary)
    code, output = call("table_needle --scale mini --methods alibi rope")
    assert_cells(output, """
        RoPE  | 256 (1x) greedy          | 0.800 \u00b1 0.100
        RoPE  | 256 (1x) teacher forcing | 0.950 \u00b1 0.000
        RoPE  | 16384 (64x) greedy       | 0.100 \u00b1 n/a
        RoPE  | paper 4k (1x)            | 0.962 \u00b1 0.003
        ALiBi | 1024 (4x) greedy         | 0.450 \u00b1 n/a
        ALiBi | 16384 (64x) greedy       |
        ALiBi | seeds                    | 1
    """)
    assert_missing(output, {"alibi-s2": "not fine-tuned", "alibi-s1": "steps 300", "rope-s1": "interrupted"})
    assert code == 1 and f"{SCALES['mini'].needle}" in output.out
    (tmp_path / "out" / "tables.md").unlink()
    _, output = call("table_needle --scale mini --methods yarn")
    assert_cells(output, "YaRN\u2020 | 256 (1x) greedy | 0.250 \u00b1 0.000")


def test_needles_by_distance_are_counted_over_seeds(tmp_path, call):
    runs = sweep("table_needle", "mini", methods=["rope"])
    counts = {"256": {"128": [2, 5], "32": [1, 1]}, "1024": {"512": [1, 9]}}
    first, shares = {"256": {"64": [3, 4], "128": [0, 5]}}, {"256": 0.8, "1024": 0.4, "4096": 0.0}
    for run, known in zip(runs, [first, counts, {}]):
        write_run(tmp_path / "runs", run, {256: 4.0}, needle=needle_summary(run, shares, by_distance=known))
    _, output = call("needle_distances --scale mini --methods rope")
    assert is_figure(tmp_path / "out" / "figures" / "needle_distances")
    *_, near, far = rows_of(output.out)
    assert near == ["RoPE", "256", "1/1", "3/4", "2/10", ""]
    assert far == ["RoPE", "1024", "", "", "", "1/9"]


# ---- curves ----------------------------------------------------------------------------------------------------------


def curves_of(panel):
    """Return the lines of a panel: {label: {step: (mean, standard error)}}. "_": points on a part of the tokens."""
    found = {}
    for line in panel.lines:
        points = zip(line.xs, line.means, line.errors or [None] * len(line.xs))
        found.setdefault(line.look["label"], {}).update({step: point for step, *point in points})
    return found


def test_curves_are_means_over_seeds(tmp_path, call, drawn):
    values = write_study(tmp_path / "runs", "figure_train_4k", part=16_384)
    code, output = call("figure_train_4k --scale mini")
    ((*panels,), zoomed) = drawn["figure_train_4k"]
    assert code == 0 and len(zoomed) == 3 and "Open circles" in output.out
    for length, panel in zip((256, 1024, 4096), panels):
        curves = curves_of(panel)
        part = curves.pop("_", {})
        assert [*part] == ([] if length == 256 else [0, 160, 320, 480])
        for series in {series for series, _, _ in values} - ({"nope"} if length > 256 else set()):
            loss = np.array([values[series, seed, length] for seed in range(3)])
            curve = curves.pop(series_name(series))
            assert [*curve] == [0, 160, 320, 480, 640]
            for step, (mean, stderr) in curve.items():
                assert mean == approx(loss.mean() + 0.1 * (4 - step / 160))
                assert stderr == approx(loss.std(ddof=1) / math.sqrt(3))
        assert not curves  # NoPE is in the left panel alone


def test_a_mean_is_over_losses_on_the_same_tokens(tmp_path, call, drawn):
    for seed, part in enumerate((None, 16_384)):
        (run,) = sweep("figure_train_4k", "mini", seeds=[seed], methods=["rope"])
        write_run(tmp_path / "runs", run, {256: 4.0, 1024: 4.1, 4096: 4.2, 16_384: 4.3}, part=part)
    call("figure_train_4k --scale mini --seeds 0 1 --methods rope")
    steps = [[*curves_of(panel)["RoPE"]] for panel in drawn["figure_train_4k"][0]]
    assert steps == [[0, 200, 400, 640], [640], [640]]


def test_a_loss_that_is_not_a_number_is_a_gap_and_a_damaged_record_is_named(tmp_path, call):
    runs = sweep("figure_train_4k", "mini", seeds=[0], methods=["rope", "alibi"])
    folders = {run.config.method: write_run(tmp_path / "runs", run, same(run)) for run in runs}
    metrics = folders["alibi"] / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"256": 4.1,', '"256": null,'))
    options = "figure_train_4k --scale mini --seeds 0 --methods rope alibi"
    assert call(options)[0] == 0 and is_figure(tmp_path / "out" / "figures" / "figure_train_4k")
    metrics.write_text(metrics.read_text().replace('"step": 0', '"step": '))
    code, output = call(options)
    assert code == 2 and f"{metrics}, line 2" in output.err


# ---- theory and trained models ---------------------------------------------------------------------------------------


def test_table_llama_has_the_papers_numbers_and_our_rows(tmp_path, call):
    common = dict(model="meta-llama/Llama-2-7b-hf", train_length=4096, tokens=50_003_968)
    common |= dict(method="scale_invariant_p_rope", method_options={}, steps=95, validation="v")
    runs = dict(
        rope=dict(loss=1.9, method="rope", steps=0),
        ours=dict(loss=2.2),
        again=dict(loss=2.4),  # another seed
        form=dict(loss=2.1, method_options={"form": "barbero"}),
        text=dict(loss=2.2, validation="other"),
        trial=dict(loss=6.0, steps=10),
        rate=dict(loss=3.0, peak_lr=1e-5),
        other=dict(loss=6.0, model="other", steps=900),
        trained=dict(loss=1.8, method="rope"),
    )
    for name, run in runs.items():
        losses = {"4096": run["loss"], "16384": 7.0, "65536": 8.5}
        common |= dict(val_loss=losses, val_tokens=dict.fromkeys(losses, 1000))
        summary = json.dumps(common | run)
        write_files(tmp_path / "runs" / "continued", {f"{name}/summary.json": summary})
    code, output = call("table_llama")
    assert_cells(output, """
        RoPE                                  | 4096 (1x)       | 1.900 \u00b1 n/a
        RoPE                                  | paper 16k (4x)  | 7.036
        Scale-invariant p-RoPE                | 4096 (1x)       | 2.300 \u00b1 0.100
        Scale-invariant p-RoPE, fastest pairs | 4096 (1x)       | 2.100 \u00b1 n/a
        Scale-invariant p-RoPE, steps 10      | 4096 (1x)       | 6.000 \u00b1 n/a
        Scale-invariant p-RoPE, lr 1e-05      | 4096 (1x)       | 3.000 \u00b1 n/a
        RoPE, steps 95                        | 4096 (1x)       | 1.800 \u00b1 n/a
        YaRN                                  | 4096 (1x)       |
        YaRN                                  | paper 64k (16x) | 8.763
    """)
    assert code == 1 and re.search("- missing.*`text`", output.out)


def test_sizes_shows_leads_within_seeds_on_one_text(tmp_path, call):
    for run in sweep("sizes", "far", seeds=[0]):
        width = run.config.model_dim
        lead = width / 640 if run.config.method == SI else 0.0
        losses = {512: 3.0, 2048: 3.0, 8192: 3.0 - lead}
        write_run(tmp_path / "runs", run, losses, steps=(0, 3072), parameters=1000 * width)
    code, output = call("sizes --seeds 0")
    assert code == 0
    assert [row[1:4] for row in rows_of(output.out)[1:]] == [["-0.100", "-0.300", "-0.400"]] * 2


def test_longer_shows_leads_within_seeds_at_each_validation(tmp_path, call):
    for run in sweep("longer", "far", seeds=[0]):
        slope = 0.2 if run.config.method == SI else 0.1  # nats more at each earlier validation
        losses = {512: 3.0, 2048: 3.0, 8192: 3.0 - slope}
        write_run(tmp_path / "runs", run, losses, steps=(0, 6144, 12_288), fall=slope)
    code, output = call("longer --seeds 0")
    assert code == 0
    head, *rows = rows_of(output.out)[-3:]
    assert head[0] == "M tokens" and rows == [["12.6", "+0.000", "+0.000"], ["25.2", "-0.100", "-0.100"]]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_section_takes_its_place_among_the_others(tmp_path, call):
    for run in sweep("table_losses", "mini", methods=["alibi"], seeds=[0]):
        write_run(tmp_path / "runs", run, same(run))
    page = "# Tables\n\n## of_a_command_that_is_gone\n\nkept\n\n## figure_sublog\n\n0.5\n"
    write_files(tmp_path / "out", {"tables.md": page})
    assert call("table_losses --scale mini --methods alibi --seeds 0")[0] == 0
    sections = command.read_sections(tmp_path / "out" / "tables.md")
    assert [*sections] == ["table_losses", "figure_sublog", "of_a_command_that_is_gone"]
    assert sections["of_a_command_that_is_gone"].endswith("\nkept\n")
