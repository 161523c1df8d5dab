"""Keeps what the tables and figures need of finished runs, small enough to commit.

    python -m scripts.keep runs results/mini/runs
    python -m scripts.reproduce table_losses --scale mini --runs-dir results/mini/runs

What is kept of a run is a run folder like any other, without checkpoints and the records of the training steps, about
10 kB. Runs that are not finished are left out.
"""

import argparse
import json
from pathlib import Path

from configs.config import Config
from errors import exit_on_user_error, require
from files import replace_text, to_json
from scripts.shared.run_files import FILES
from scripts.shared.runs import StoredRun, describe_differences, log_values, read_run, read_runs


def main():
    parser = argparse.ArgumentParser(
        prog="python -m scripts.keep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs_dir", type=Path, help="where the run folders are")
    parser.add_argument("destination", type=Path, help="where what is kept of them goes")
    args = parser.parse_args()
    with exit_on_user_error():
        finished = [stored for stored in read_runs(args.runs_dir) if stored.summary is not None]
        require(finished, f"{args.runs_dir} holds no finished run")
        for stored in finished:
            keep(stored, args.destination / stored.path.name)
    print(f"{len(finished)} finished runs of {args.runs_dir} are kept in {args.destination}")


def keep(stored: StoredRun, destination: Path):
    """Write what is kept of a finished run. Raise ValueError if it is damaged, or if the destination is a different
    run."""
    require(not stored.problems, "; ".join(stored.problems))
    if (destination / "config.json").exists():
        there = read_run(destination)
        differ = there.config and describe_differences(stored.config, there.config)
        same = not differ and there.summary == stored.summary
        require(same, f"{destination} is a different run ({differ or 'trained again'}): remove it first")
    validations = [record for record in stored.metrics() if "val_loss" in record]
    texts = {name: json.dumps(found, indent=2) for name in FILES if (found := stored.json(name)) is not None}
    config = stored.config.to_dict() | dict(runs_dir=Config.runs_dir)  # not where it was on one machine
    texts["config.json"] = json.dumps(config, indent=2)
    texts["metrics.jsonl"] = "\n".join(map(to_json, validations))
    texts["log.txt"] = "\n".join(
        f"{key}: {value}" for key in ("commit", "device") for value in log_values(stored.path, key)
    )
    for name, text in texts.items():
        path = destination / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, f"{text}\n")


if __name__ == "__main__":
    main()
