"""Trains one small model with four attention methods and shows which of them reads far beyond its training length.

    bash scripts/quickstart.sh                       sets up, then runs this
    python -m scripts.quickstart                     runs it again; finished runs are not repeated
    python -m scripts.quickstart --text FOLDER       on your own text: a document is a .txt file of the folder
    python -m scripts.quickstart --seed 1 ...        any field of train_gpt.py, for all runs

The text is the source of Python's standard library and of PyTorch (data/python_source.py); nothing is downloaded.
Every method gets the same tokens, steps and learning rates, and the constants of its paper. ALiBi's slopes are 16 times
the published ones, which it needs at so short a training length: of the factors 1, 4 and 16, this one had the lowest
loss at the training length in a trial with another seed (results/quickstart.md).
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from configs.command_line import read_config, read_fields
from configs.presets import quickstart
from configs.runs import Run
from data.python_source import prepare_documents, prepare_taught
from data.shards import read_manifest, verify
from errors import exit_on_user_error, require
from scripts.shared.looks import LINES, import_matplotlib
from scripts.shared.runs import data_fingerprint, describe_differences, read_run, sidecar
from scripts.shared.tables import markdown_table
from scripts.sweep.local import train

ROOT = Path(__file__).parent.parent
# Name: method, options, name of its line in figures. Two runs train at a time, in this order.
METHODS = {
    "RoPE": ("rope", [], "rope"),
    "scale-invariant p-RoPE": ("scale_invariant_p_rope", [], "scale_invariant_p_rope"),
    "LogN + p-RoPE": ("logn_p_rope", [], "logn_p_rope"),
    "ALiBi (slopes x 16)": ("alibi", ["--method_options", "slope_scale", "16"], "alibi"),
}
SHOWN = ("RoPE", "LogN + p-RoPE", "ALiBi (slopes x 16)", "scale-invariant p-RoPE")  # the order of the table
# Fields outside the mathematics that change what the table shows. If given, they must be those of a finished run.
SEEN = {"dtype", "val_lengths", "val_tokens", "val_copy_gaps"}


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--runs-dir", default="runs", help="where the run folders go (default: runs)")
    parser.add_argument("--text", type=Path, help="a folder of .txt files (default: Python source of this machine)")
    parser.add_argument("--data-dir", type=Path, help="where the shards go (default: data/taught, or with a name)")
    args, fields = parser.parse_known_args()  # the rest is for train_gpt.py
    began = time.monotonic()
    os.chdir(ROOT)
    title = f"quickstart-{slug(args.text.name)}" if args.text else "quickstart"
    data_dir = args.data_dir or Path(quickstart().data_dir)
    if args.text and not args.data_dir:
        data_dir = data_dir.with_name(f"taught-{slug(args.text.name)}")
    out = Path(args.runs_dir)
    out.mkdir(parents=True, exist_ok=True)
    arguments = {
        name: ["--name", f"{title}-{slug(name)}", "--resume", "auto", "--runs_dir", args.runs_dir]
        + ["--data_dir", str(data_dir), "--method", method, *options, *fields]
        for name, (method, options, _) in METHODS.items()
    }
    with exit_on_user_error():
        for words in arguments.values():
            read_config(["quickstart", *words])  # a wrong field is an error before the text is made
        make_data(data_dir, args.text)
        train_all(arguments)

    summaries = {name: json.loads((out / f"{title}-{slug(name)}" / "summary.json").read_text()) for name in SHOWN}
    table = result_table(summaries)
    share = read_manifest(data_dir)["copy_rows"]["share"]
    caption = (
        "Loss on held-out natural text, in nats a token, by sequence length; and copy gain: by how many nats a second\n"
        "copy of 32 random tokens is easier than the first, by the tokens between them. Trained on "
        f"{next(iter(summaries.values()))['train_length']}-token\nsequences, of which {share:.0%} are copy rows."
    )
    (out / f"{title}.md").write_text(f"{caption}\n\n{table}\n")
    draw(summaries, out / f"{title}.png")
    print(f"\n{caption}\n\n{table}\n")
    print(f"The table is in {out}/{title}.md, its figure in {out}/{title}.png.", end=" ")
    print(f"Done in {(time.monotonic() - began) / 60:.1f} minutes.")
    print(f"Losses at other lengths: {sys.executable} -m scripts.evaluate {out}/{title}-*/ --lengths 256 16384")


def slug(name: str) -> str:
    """Return the name as a part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "text"


def make_data(folder: Path, text: Path | None):
    """Make the shards, or check those that are there. Raise ValueError or OSError for a text that cannot be read."""
    if manifest := read_manifest(folder):
        require(
            manifest.get("copy_rows"), f"{folder} holds text without copy rows. Delete it, or name another --data-dir."
        )
        if damaged := [f"{name} ({problem})" for name, problem in verify(folder) if problem]:
            raise ValueError(f"{folder}: {', '.join(damaged)}. Delete the folder and run this again.")
        return
    print("making shards: finding documents, training a tokenizer, encoding", flush=True)
    if text is None:
        prepare_taught(folder)
    else:
        require(text.is_dir(), f"--text {text}: no such folder. Name a folder of .txt files.")
        prepare_documents(text, folder)


def train_all(arguments: dict[str, list[str]]):
    """Train what is not finished. Raise ValueError for a finished run of another configuration or text."""
    runs = []
    for words in arguments.values():
        config, fields = read_config(["quickstart", *words]), read_fields(words)
        run = Run("quickstart", fields)
        if (run.path / "summary.json").exists():
            check_finished(run.path, config, SEEN & fields.keys())
        else:
            runs.append(run)
    train(runs, retries=0)
    for run in runs:
        if not (run.path / "summary.json").exists():
            sys.exit(f"error: {run.path.name} failed:\n{sidecar(run.path, '.log').read_text()}")


def check_finished(path: Path, config, seen: set[str]):
    """Raise ValueError unless the finished run in this folder has this configuration and text."""
    stored = read_run(path)
    require(not stored.problems, "; ".join(stored.problems))
    advice = "Delete it, or name another --runs-dir."
    differences = describe_differences(config, stored.config, seen)
    require(not differences, f"{path} is a finished run of another configuration ({differences}). {advice}")
    trained_on, here = stored.summary.get("data"), data_fingerprint(config)
    require(trained_on == here, f"{path} was trained on other text than {config.data_dir} holds now. {advice}")


def result_table(summaries: dict[str, dict]) -> str:
    """Return one row a method: loss at each length, then copy gain of random spans at each gap but the shortest."""
    first = next(iter(summaries.values()))
    lengths, gaps = [*first["val_loss"]], [*first.get("copy_gain", {}).get("random", {})][1:]
    rows = [["method", *(f"loss at {n}" for n in lengths), *(f"copy gain at {gap}" for gap in gaps)]]
    for name, summary in summaries.items():
        losses = (f"{summary['val_loss'][n]:.3f}" for n in lengths)
        rows.append([name, *losses, *(f"{summary['copy_gain']['random'][gap]:.1f}" for gap in gaps)])
    return markdown_table(rows)


def draw(summaries: dict[str, dict], path: Path):
    """Draw loss against length beside copy gain against the gap."""
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    losses, gains = figure.subplots(1, 2)
    for name, summary in summaries.items():
        colour, *_ = LINES[METHODS[name][2]]
        style = {"marker": "o", "color": colour, "label": name}
        losses.plot([int(n) for n in summary["val_loss"]], summary["val_loss"].values(), **style)
        gain = summary.get("copy_gain", {}).get("random", {})
        gains.plot([int(gap) for gap in gain], gain.values(), **style)
    train_length = next(iter(summaries.values()))["train_length"]
    losses.set(xlabel="sequence length in tokens", ylabel="loss on natural text (nats a token)")
    gains.set(xlabel="tokens between the two copies", ylabel="copy gain, random tokens (nats)")
    gains.axhline(0, color="#cccccc", linewidth=1, zorder=0)
    for axes in (losses, gains):
        axes.set_xscale("log", base=2)
        ticks = sorted({int(x) for line in axes.lines for x in line.get_xdata() if x > 1})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.axvline(train_length, color="#999999", linestyle=":", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
    losses.legend(frameon=False)
    losses.set_title(f"dotted: the training length, {train_length} tokens", fontsize=9, loc="left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
