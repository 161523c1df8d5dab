"""Train one small model with four attention methods, and compare the methods beyond the training length.

    bash scripts/quickstart.sh                       installs, then runs this command
    python -m scripts.quickstart                     keeps finished runs
    python -m scripts.quickstart --seed 1 ...        sets any field of train_gpt.py in all runs

The default text is Python source code of this machine (data/python_source.py), so nothing is downloaded. All methods
get the same tokens, steps and learning rates. Each has the constants that were best in pilots on other text
(results/quickstart.md).
"""

import sys
import time
from pathlib import Path

from configs.config import Config, describe_differences
from configs.runs import Run
from data.python_source import prepare_taught
from data.shards import read_manifest
from errors import exit_on_user_error, require
from files import check_object, replace_text
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.shared.arguments import Parser, field_changes
from scripts.shared.looks import plot_styles
from scripts.shared.runs import copy_gains, data_fingerprint, final_losses, read_runs
from scripts.shared.states import run_state, sidecar
from scripts.shared.tables import markdown_table
from scripts.sweep.local import train

METHODS = {  # in the order of the table: method and options
    "RoPE": ("rope", {}),
    "LogN + p-RoPE": ("logn_p_rope", {}),
    "ALiBi": ("alibi", {"slope_scale": 4.0}),
    "scale-invariant, fast rotation (ours)": ("scale_invariant_p_rope", {"form": "barbero", "share": 0.25}),
}
# The table depends on these fields, but config_hash ignores them. Finished runs must agree in them.
TABLE_FIELDS = ("dtype", "val_lengths", "val_tokens", "val_copy_gaps")
CAPTION = """\
Loss: nats per token on held-out natural text, by sequence length. Copy gain: loss of 32 random tokens minus
the loss of their second copy, in nats per token. Columns: tokens between the copies. Training sequences have
{length} tokens. {share:.0%} of them are copy rows."""


@exit_on_user_error()
def main():
    # 1. The runs.
    parser = Parser("python -m scripts.quickstart", __doc__)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of all results (default: runs)")
    args, field_arguments = parser.parse_known_args()
    start_time, runs_dir = time.monotonic(), args.runs_dir
    fields = field_changes(field_arguments) | {"runs_dir": str(runs_dir), "resume": "auto"}
    own = fields.keys() & {"method", "method_options"}
    require(not own, f"the quickstart sets {', '.join(own)} itself. Set it in train_gpt.py quickstart.")
    runs = {
        name: Run("quickstart", fields | {"method": method, "method_options": options})
        for name, (method, options) in METHODS.items()
    }

    # 2. Data and training.
    config = runs["RoPE"].config
    share = make_data(Path(config.data_dir))
    summaries = train_all(runs, runs_dir)

    # 3. Table and figure.
    text = f"{CAPTION.format(length=config.train_length, share=share)}\n\n{result_table(summaries, config)}\n"
    replace_text(runs_dir / "quickstart.md", text)
    draw(summaries, config, runs_dir / "quickstart.png")
    print(f"\n{text}\nTable: {runs_dir}/quickstart.md. Figure: {runs_dir}/quickstart.png.", end=" ")
    print(f"Time: {(time.monotonic() - start_time) / 60:.1f} minutes.")


def make_data(folder: Path) -> float:
    """Make missing shards. Return the share of copy rows. Raise ValueError for a text without copy rows."""
    if not read_manifest(folder):
        print("making shards: finding documents, training a tokenizer, encoding", flush=True)
        prepare_taught(folder)
    copy_rows = read_manifest(folder).get("copy_rows")
    remedy = "Make the data with --copy-rows 0.5, or name another --data_dir."
    return check_object(copy_rows, f"{folder}: copy_rows", remedy, share=float)["share"]


def train_all(runs: dict, runs_dir: Path) -> dict:
    """Train the unfinished runs. Return all summaries. Raise ValueError if a finished run read another text."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    data, unfinished, summaries = data_fingerprint(runs["RoPE"].config), [], {}
    for run in runs.values():
        state, reason, _ = run_state(run, read_runs(runs_dir), runs_dir, data)
        require(state not in ("other", "running"), f"{run.name} is {state}: {reason}")
        if state != "finished":
            unfinished.append(run)
    train(unfinished, retries=0)
    for name, run in runs.items():
        state, _, stored = run_state(run, read_runs(runs_dir), runs_dir, data)
        if state != "finished":
            sys.exit(f"error: {run.name} failed. Read {sidecar(runs_dir / run.name, '.log')}.")
        differences = describe_differences(run.config, stored.config, TABLE_FIELDS)
        require(not differences, f"{stored.path} has other fields ({differences}). Name another --runs-dir.")
        summaries[name] = stored.summary
    return summaries


def result_table(summaries: dict, config: Config) -> str:
    """Return one row per method: loss at each length, copy gain of random spans at each gap except the shortest."""
    lengths, gaps = config.val_lengths, config.val_copy_gaps[1:]
    rows = [["method", *(f"loss at {n}" for n in lengths), *(f"copy gain at {gap}" for gap in gaps)]]
    for name, summary in summaries.items():
        losses, gains = final_losses(summary), copy_gains(summary)
        rows.append([name, *(f"{losses[n]:.3f}" for n in lengths), *(f"{gains[gap]:.1f}" for gap in gaps)])
    return markdown_table(rows)


def draw(summaries: dict, config: Config, path: Path):
    """Draw loss against length beside copy gain against the gap."""
    losses, gains = [], []
    for name, summary in summaries.items():
        method, _ = METHODS[name]
        look = plot_styles([method])[method] | {"label": name}
        by_length, by_gap = final_losses(summary), copy_gains(summary)
        losses.append(Line(look, config.val_lengths, [by_length[n] for n in config.val_lengths]))
        gains.append(Line(look, config.val_copy_gaps, [by_gap[gap] for gap in config.val_copy_gaps]))
    gain_axes = {"xlabel": "tokens between the two copies", "ylabel": "copy gain, random tokens (nats)"}
    text = Panel(f"natural text, trained at {config.train_length} tokens", losses)
    panels = [text, Panel("copies of random tokens", gains, gain_axes)]
    draw_panels(path.with_suffix(""), [panels], x="sequence length in tokens", y="nats a token", log=2)


if __name__ == "__main__":
    main()
