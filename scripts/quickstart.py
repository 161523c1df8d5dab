"""The quickstart: trains the same small model with several attention methods, on text that every machine with Python
has, and shows which of them holds up at 16 times its training length.

    bash scripts/quickstart.sh                 sets up, then runs this
    python -m scripts.quickstart               runs it again: what is finished is not repeated

The text is the source of Python's standard library, one document a file; nothing is downloaded. The tokenizer is
trained on the training documents only. Every method gets the same tokens, steps and learning rates, and one rule for
the constants tied to the training length (see configs/presets.py); RoPE with the paper's base 10,000 is shown too.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

from configs.command_line import read_config, user_errors
from configs.presets import quickstart
from data.shards import verify
from data.text import prepare
from scripts.runs import beside
from scripts.sweep import Job, train
from scripts.tables import loss_table

ROOT = Path(__file__).parent.parent
# label: arguments of train_gpt.py. In this order, two at a time, no two runs compile the same graph at once: the first
# and the later rotary methods differ in their tables only, and find it in the compiler's cache.
RUNS = {
    "RoPE": ["--method", "rope"],
    "scale-invariant p-RoPE": ["--method", "scale_invariant_p_rope"],
    "ALiBi": ["--method", "alibi"],
    "RoPE, base 10000": ["--method", "rope", "--rotary_base_length", "0"],
    "LogN + p-RoPE": ["--method", "logn_p_rope"],
    "p-RoPE": ["--method", "p_rope"],
}
SHOWN = ["RoPE", "RoPE, base 10000", "p-RoPE", "LogN + p-RoPE", "ALiBi", "scale-invariant p-RoPE"]
NOT_TEXT = ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"]
# Okabe and Ito's palette, which colour-blind readers can tell apart; ours is black, as in the paper.
COLOURS = ["#E69F00", "#999999", "#56B4E9", "#CC79A7", "#009E73", "#000000"]


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.quickstart", description=__doc__.split("\n")[0])
    parser.add_argument("--runs-dir", default="runs", help="where the run folders go (default: runs)")
    parser.add_argument("--data-dir", default=quickstart().data_dir, help="where the shards go")
    args, train_arguments = parser.parse_known_args()  # the rest is for train_gpt.py
    began = time.monotonic()
    os.chdir(ROOT)
    out = Path(args.runs_dir)
    folders = {
        label: out / ("quickstart-" + label.lower().replace(" + ", "-").replace(", ", "-").replace(" ", "-"))
        for label in RUNS
    }
    out.mkdir(parents=True, exist_ok=True)
    common = ["--runs_dir", args.runs_dir, "--data_dir", args.data_dir, *train_arguments]
    with user_errors():
        make_data(Path(args.data_dir))
        train_all({folder: [*RUNS[label], *common] for label, folder in folders.items()})

    results = [json.loads((folders[label] / "summary.json").read_text()) | {"name": label} for label in SHOWN]
    table = loss_table(results)
    (out / "quickstart.md").write_text(table + "\n")
    draw(results, out / "quickstart.png")
    print(f"\nValidation loss, in nats a token, at the training length and beyond:\n\n{table}\n")
    print(f"The table is in {out}/quickstart.md, its figure in {out}/quickstart.png.", end=" ")
    print(f"Done in {(time.monotonic() - began) / 60:.1f} minutes.")
    print(f"The same from the checkpoints: {sys.executable} -m scripts.evaluate {out}/quickstart-*/")


def train_all(arguments: dict[Path, list[str]]):
    """Trains what is not finished, with the sweeps' runner."""
    jobs = []
    for folder, words in arguments.items():
        if not (folder / "summary.json").exists():
            words = ["quickstart", "--name", folder.name, "--resume", "auto", *words]
            jobs.append(Job(folder, read_config(words), words))
    train(jobs, retries=0)
    for job in jobs:
        if not (job.path / "summary.json").exists():
            sys.exit(f"error: {job.path.name} failed:\n{beside(job.path, '.log').read_text()}")


def make_data(folder: Path):
    if (folder / "manifest.json").exists():
        if bad := [f"{name} ({problem})" for name, problem in verify(folder) if problem]:
            raise ValueError(f"{folder}: {', '.join(bad)}: delete the folder and run this again")
        return
    print("making shards from the source of Python's standard library", flush=True)
    prepare(
        [Path(sysconfig.get_path("stdlib"))],
        folder,
        f"bpe:{quickstart().vocab_size}",
        suffixes=[".py"],
        val_fraction=0.08,
        name="python",
        exclude=NOT_TEXT,
    )


def draw(results: list[dict], path: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for result, colour in zip(results, COLOURS):
        lengths = [int(length) for length in result["val_loss"]]
        axes.plot(lengths, result["val_loss"].values(), marker="o", color=colour, label=result["name"])
    train_length = results[0]["train_length"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n}\n({n // train_length}x)" for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"validation length in tokens (trained at {train_length})")
    axes.set_ylabel("validation loss (nats a token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
