"""The quickstart: trains the same small model with several attention methods, on text that every machine with Python
has, and shows which of them holds up at 16 times its training length.

    bash scripts/quickstart.sh                 sets up, then runs this
    python -m scripts.quickstart               runs it again: what is finished is not repeated
    python -m scripts.quickstart --text FOLDER                     on your own text, the .txt files of a folder
    python -m scripts.quickstart --text pg19                       on books, which it downloads

The text is the source of Python's standard library; nothing is downloaded. A document is a whole package, because what
a model can use far away is what the files of a package have in common. The tokenizer is trained on the training
documents only. Every method gets the same tokens, steps and learning rates, and one rule for what is a length in tokens
(see configs/presets.py); ALiBi's official slopes and tau = 10, which are meant for 4096 tokens, are shown too.
"""

import argparse
import csv
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from configs.command_line import read_config, read_fields
from configs.config import Config
from configs.presets import mini, quickstart
from configs.sweeps import Run
from data import pg19
from data.shards import read_manifest, verify
from data.text import find_files, prepare
from errors import exit_on_user_error, require
from scripts.shared.looks import LINES, import_matplotlib
from scripts.shared.runs import data_fingerprint, describe_differences, read_run, sidecar
from scripts.shared.tables import loss_table, markdown_table
from scripts.sweep.local import train

ROOT = Path(__file__).parent.parent
# label: arguments of train_gpt.py. In this order, two at a time, no two runs compile the same graph at once: the first
# and the later rotary methods differ in their tables only, and find it in the compiler's cache.
RUNS = {
    "RoPE": ["--method", "rope"],
    "scale-invariant p-RoPE": ["--method", "scale_invariant_p_rope"],
    "ALiBi": ["--method", "alibi"],
    "LogN + p-RoPE": ["--method", "logn_p_rope"],
    "ALiBi, official slopes": ["--method", "alibi", "--method_options", "slope_scale", "1"],
    "scale-invariant p-RoPE, tau 10": ["--method", "scale_invariant_p_rope", "--method_options", "tau", "10"],
}
SHOWN = {  # in the order of the table: the name in results/mini
    "RoPE": "rope",
    "LogN + p-RoPE": "logn_p_rope",
    "ALiBi": "alibi",
    "ALiBi, official slopes": "alibi slope_scale=1",
    "scale-invariant p-RoPE": "scale_invariant_p_rope",
    "scale-invariant p-RoPE, tau 10": "scale_invariant_p_rope tau=10",
}
# Fields that change what the table shows although not the mathematics: if given, they must be those of a finished run.
SEEN = {"dtype", "val_lengths", "val_tokens"}
NOT_TEXT = ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"]
NOT_TEXT += ["encodings", "entities.py"]  # tables of characters


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--runs-dir", default="runs", help="where the run folders go (default: runs)")
    parser.add_argument("--text", default="python", help="python (the default), pg19, or a folder of .txt files")
    parser.add_argument("--data-dir", type=Path, help="where the shards go (default: data/quickstart, or with a name)")
    args, train_arguments = parser.parse_known_args()  # the rest is for train_gpt.py
    began = time.monotonic()
    os.chdir(ROOT)
    title = "quickstart" if args.text == "python" else f"quickstart-{slug(Path(args.text).name)}"
    data_dir = args.data_dir or Path(quickstart().data_dir).with_name(title)
    out = Path(args.runs_dir)
    folders = {label: out / f"{title}-{slug(label)}" for label in RUNS}
    out.mkdir(parents=True, exist_ok=True)
    common = ["--runs_dir", args.runs_dir, "--data_dir", str(data_dir), *train_arguments]
    with exit_on_user_error():
        make_data(data_dir, args.text)
        train_all({folder: [*RUNS[label], *common] for label, folder in folders.items()})

    results = [json.loads((folders[label] / "summary.json").read_text()) | {"name": label} for label in SHOWN]
    table = loss_table(results)
    (out / f"{title}.md").write_text(table + "\n")
    draw(results, out / f"{title}.png")
    print(f"\nValidation loss, in nats a token, at the training length and beyond:\n\n{table}\n")
    if more := mini_table():
        times = mini().steps * mini().batch_tokens / quickstart().steps / quickstart().batch_tokens
        print(f"That is one seed, trained for a minute. With {times:.1f} times the tokens, means over seeds, on the")
        print(f"source of Python's standard library (results/mini/table_losses.md):\n\n{more}\n")
    print(f"The table is in {out}/{title}.md, its figure in {out}/{title}.png.", end=" ")
    print(f"Done in {(time.monotonic() - began) / 60:.1f} minutes.")
    print(f"The same from the checkpoints: {sys.executable} -m scripts.evaluate {out}/{title}-*/")


def mini_table() -> str:
    """Return the same rows of the study at scale `mini`, as far as its table is there: Markdown, or "" without any."""
    path = ROOT / "results" / "mini" / "table_losses.csv"
    found = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    cells = {(row["method"], int(row["length"])): row for row in found if row["mean"]}
    lengths = sorted({length for _, length in cells})
    rows = [
        [label, cells[name, lengths[0]]["seeds"], *(f"{float(cells[name, n]['mean']):.3f}" for n in lengths)]
        for label, name in SHOWN.items()
        if all((name, n) in cells for n in lengths)
    ]
    return markdown_table([["run", "seeds", *map(str, lengths)], *rows]) if rows else ""


def slug(words: str) -> str:
    """Return the words as a part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "text"


def train_all(arguments: dict[Path, list[str]]):
    """Train what is not finished, as sweeps do. Raise ValueError for a finished run that is another than this."""
    runs = []
    for folder, words in arguments.items():
        words = ["--name", folder.name, "--resume", "auto", *words]
        config, fields = read_config(["quickstart", *words]), read_fields(words)
        if (folder / "summary.json").exists():
            check_finished(folder, config, SEEN & fields.keys())
        else:
            runs.append(Run("quickstart", fields))
    train(runs, retries=0)
    for run in runs:
        if not (run.path / "summary.json").exists():
            sys.exit(f"error: {run.path.name} failed:\n{sidecar(run.path, '.log').read_text()}")


def check_finished(path: Path, config: Config, seen: set[str]):
    """Raise ValueError, in one line, unless the finished run in this folder is the one that is asked for."""
    stored = read_run(path)
    require(not stored.problems, "; ".join(stored.problems))
    mend = "delete it, or name another --runs-dir"
    other = describe_differences(config, stored.config, seen)
    require(not other, f"{path} is a finished run of another configuration ({other}): {mend}")
    data, here = stored.summary.get("data"), data_fingerprint(config)
    require(data in (None, here), f"{path} was trained on other text than {config.data_dir} holds now: {mend}")


def make_data(folder: Path, text: str):
    """Make the shards of a text, or check those that are there. Raise ValueError or OSError for what cannot be had."""
    name = dict(python="packages", pg19="pg19").get(text, "text")
    if manifest := read_manifest(folder):
        other = f"{folder} holds other text than --text {text} makes: delete it, or name another --data-dir"
        require(all(file.startswith(f"{name}_") for file in manifest["files"]), other)
        if bad := [f"{name} ({problem})" for name, problem in verify(folder) if problem]:
            raise ValueError(f"{folder}: {', '.join(bad)}: delete the folder and run this again")
        return
    with tempfile.TemporaryDirectory() as temporary:
        if text == "python":
            print("making shards from the source of Python's standard library", flush=True)
            source = write_packages(Path(sysconfig.get_path("stdlib")), Path(temporary))
        elif text == "pg19":
            source = folder.with_name("pg19")
            pg19.download(source)
        else:
            source = Path(text)
            require(source.is_dir(), f"--text {text}: no such folder; it is python, pg19 or a folder of .txt files")
        prepare([source], folder, f"bpe:{quickstart().vocab_size}", suffixes=[".txt"], val_fraction=0.1, name=name)


def write_packages(library: Path, out: Path) -> Path:
    """Write each package, and each module outside of one, to a file of its own in `out`; return that."""
    for path in find_files([library], [".py"], NOT_TEXT):
        with open(out / f"{path.relative_to(library).parts[0]}.txt", "a") as file:
            file.write(path.read_text(errors="replace").strip() + "\n\n\n")
    return out


def draw(results: list[dict], path: Path):
    """Draw the losses against the validation length. results: as loss_table takes them."""
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for result in results:
        colour, *_ = LINES[SHOWN[result["name"]].split(" ")[0]]
        dashes = ":" if "," in result["name"] else "-"
        lengths = [int(length) for length in result["val_loss"]]
        style = dict(marker="o", color=colour, linestyle=dashes, label=result["name"])
        axes.plot(lengths, result["val_loss"].values(), **style)
    train_length = results[0]["train_length"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n}\n({n // train_length}x)" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"validation length in tokens (trained at {train_length})")
    axes.set_ylabel("validation loss (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
