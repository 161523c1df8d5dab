"""Trains, checks and ranks attention methods on the tracks of results/records/README.md.

    python -m scripts.record run TRACK --method M [--method_options NAME VALUE ...] [--scalar_lr X]
    python -m scripts.record run TRACK --file root.py [--method p_rope+root]       a new mechanism, from your file
    python -m scripts.record make FOLDER --method M        an entry of these runs, results/records/TRACK/DATE_NAME
    python -m scripts.record check FOLDER [--rerun SEED]   recomputes an entry from its runs, or trains a seed again
    python -m scripts.record table                         writes the board

`run` and `make` train missing seeds. Runs of a file are in RUNS_DIR/FILE-HASH/. `check` executes method.py.
"""

import argparse
import datetime
import hashlib
import runpy
import statistics
import sys
from pathlib import Path

from configs.command_line import read_fields
from configs.runs import Run
from data.shards import open_split
from errors import UserError, did_you_mean, exit_on_user_error, require
from files import replace_text, to_json
from model.methods.names import canonical_name
from scripts.keep import make_line, write_lines
from scripts.record import tracks
from scripts.reproduce.drawing import Line, Panel, draw_panels
from scripts.shared.arguments import Parser
from scripts.shared.looks import LOOK, series_name
from scripts.shared.runs import StoredRun, data_fingerprint, read_run, read_runs
from scripts.shared.tables import markdown_table
from scripts.sweep.__main__ import STARTING, find_states, print_plan
from scripts.sweep.local import ROOT, train

MACHINE = ("data_dir", "device", "compile", "attention_backend", "micro_batch_tokens")
HEADS = ["method", "date", "score", "loss 16x", "copy 4x", "loss 1x", "parameters", "FLOPs", "seconds", "p", "notes"]
NUMBERS = ("score", "loss_16x", "copy_4x", "loss_1x", "parameters", "flops")
MARK = "<!-- The board. `python -m scripts.record table` writes all lines below. -->\n"
# Colour, line and marker of a seed's score, and of the mean score by kind of record.
MARKS = {"a seed": ("0.5", "", "|")}
MARKS |= {"record": ("#D55E00", "", "*"), "gate passed": ("k", "", "o"), "gate not passed": ("k", "", "x")}


@exit_on_user_error()
def main():
    argv = sys.argv[1:]
    if argv[:1] == ["train"]:  # FILE NAME PRESET [--field value ...]: one run, started by train_seeds
        tracks.register(Path(argv[1]), argv[2])
        sys.argv = ["train_gpt.py", *argv[3:]]
        return runpy.run_path(str(ROOT / "train_gpt.py"), run_name="__main__")

    # The other commands.
    parser = Parser("python -m scripts.record", __doc__)
    add = parser.add_argument
    add("command", choices=COMMANDS)
    add("target", nargs="?", type=Path, default=Path(), help="TRACK or FOLDER")
    add("--file", type=Path, help="Python file with one subclass of Mechanism, named as the mechanism")
    add("--seeds", nargs="+", type=int, default=tracks.SEEDS)
    add("--jobs", type=int, help="runs at a time (default: one a GPU; without GPUs, one a core)")
    add("--runs-dir", type=Path, default=Path("runs"), help="folder of the run folders (default: runs)")
    add("--rerun", type=int, choices=tracks.SEEDS, help="seed to train again")
    args, fields = parser.parse_known_args(argv)
    args.fields = read_fields(fields, fields=(*tracks.CHOSEN, *MACHINE))
    track = (args.target if args.command == "run" else args.target.parent).name
    known = args.command == "table" or track in tracks.TRACKS
    require(known, f"unknown track {track!r}. {did_you_mean(track, tracks.TRACKS)}")
    COMMANDS[args.command](args, track)


def train_seeds(args: argparse.Namespace, track: str, seeds: list[int], mechanism: str = "") -> list[StoredRun]:
    """Return the finished runs of a method, after training the missing ones. Raise ValueError if one does not finish.

    mechanism: name of the class in args.file (default: the file's name).
    """
    # 1. The folder of the runs, and the mechanism of the file.
    runs_dir, program = args.runs_dir, []
    if args.file:
        mechanism, text = mechanism or args.file.stem, args.file.read_text()
        runs_dir /= f"{mechanism}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"  # a changed file is another method
        file = runs_dir / "method.py"
        program = ["-m", "scripts.record", "train", str(file), mechanism]
    runs_dir.mkdir(parents=True, exist_ok=True)
    if args.file:
        replace_text(file, text)
        tracks.register(file, mechanism)

    # 2. The runs, and a check of their costs and data.
    method = canonical_name(args.fields.get("method") or mechanism)
    require(mechanism in method, f"--method {method} does not use the file. Use --method {method}+{mechanism}.")
    settings = tracks.TRACKS[track]
    changes = settings.changes | args.fields | {"method": method}
    runs = [Run(settings.preset, changes | {"seed": seed}) for seed in seeds]
    config = runs[0].config
    print(f"{method} {config.method_options}: {tracks.measure_method(config)}; limits over RoPE's: {tracks.LIMITS}")
    open_split(config.data_dir, "train", config.vocab_size)  # raises UserError without data
    texts = {stored.text for stored in read_runs(tracks.RESULTS / settings.preset / "runs.jsonl")}
    if texts and data_fingerprint(config) not in texts:
        print(f"{config.data_dir} is not the board's text. Train --method rope, too: only your own runs compare.")

    # 3. Training.
    options = argparse.Namespace(runs_dir=runs_dir, sweep=f"record-{track}")
    train([run for run, state, _ in find_states(runs, options) if state in STARTING], args.jobs, program=program)
    plan = find_states(runs, options)
    print_plan(plan)
    require(all(state == "finished" for _, state, _ in plan), "Some runs are not finished. Repeat the command.")
    return [read_run(run.path) for run, *_ in plan]


def score_of(stored: StoredRun) -> dict[str, float]:
    return tracks.read_score(stored.summary, stored.config.train_length)


def run(args: argparse.Namespace, track: str):
    """Train the missing seeds, and print the scores and the board with this method."""
    stored_runs = train_seeds(args, track, args.seeds)
    for stored in stored_runs:
        print(f"{stored.path.name}: " + ", ".join(f"{key} {value:.3f}" for key, value in score_of(stored).items()))
    own = tracks.make_records(tracks.TRACKS[track], stored_runs, date=str(datetime.date.today()))[:1]
    require(own, f"The board needs the seeds {tracks.SEEDS}. Train them all.")
    print(record_table(tracks.standing(track, own, read_runs(args.runs_dir))))  # adds p to the record
    for pair in own[0].items():
        print(*pair, sep=": ")


def make(args: argparse.Namespace, track: str):
    """Write an entry from its runs, after training the missing ones. FOLDER/README.md has its prediction already."""
    folder, file = args.target, args.target / "record.json"
    tracks.check_prediction(folder)
    stored_runs = train_seeds(args, track, tracks.SEEDS)
    if args.file:
        replace_text(folder / "method.py", args.file.read_text())
    write_lines(folder / "runs.jsonl", map(make_line, stored_runs))
    replace_text(file, to_json({"mechanism": args.file and args.file.stem}))
    try:
        record = tracks.read_entry(folder)
        print(record_table(tracks.standing(track, [record])))  # adds p to the record
    except BaseException:
        file.unlink()  # an entry that is not whole must not stand in the way of the board
        raise
    replace_text(file, to_json(record, indent=2) + "\n")


def check(args: argparse.Namespace, track: str):
    """Refuse an entry whose numbers do not follow from its runs. Perhaps train a seed again."""
    folder = args.target
    try:
        entry = tracks.read_entry(folder)
    except (UserError, OSError):
        raise
    except Exception as error:  # of the code in method.py
        raise UserError(f"{folder} lacks a value, or its method fails ({error!r}). Make it again.") from error
    records, stored = tracks.standing(track, [entry]), tracks.read_entry_file(folder)
    wrong = [f"{key} {stored.get(key)!s:.60}, not {entry[key]!s:.60}" for key in entry if stored.get(key) != entry[key]]
    require(not wrong, f"{folder}/record.json has {'; '.join(wrong)}. Make the entry again.")
    if entry["mechanism"]:
        args.file = folder / "method.py"
        tracks.register(args.file, entry["mechanism"])  # another entry may have a mechanism of the same name
    if args.rerun is not None:
        train_again(args, track, entry)
    print(record_table(records))


def train_again(args: argparse.Namespace, track: str, entry: dict):
    """Train a seed of the entry again. Raise ValueError if its loss at 1x or its score differs by too much."""
    args.fields |= {field: entry[field] for field in tracks.CHOSEN}
    args.runs_dir /= f"rerun-{args.target.name}"
    (again,) = train_seeds(args, track, [args.rerun], entry["mechanism"])
    require(again.text in entry["text"].split(), f"{again.path} was trained on another text than {args.target}.")
    kept, new = entry["scores"][str(args.rerun)], score_of(again)
    print("rerun minus entry: " + ", ".join(f"{key} {new[key] - kept[key]:+.5f}" for key in kept))
    spread = statistics.stdev(score["score"] for score in entry["scores"].values())
    for key, most in {"loss_1x": tracks.GATE, "score": spread}.items():
        require(
            abs(new[key] - kept[key]) <= most,
            f"{args.target}: seed {args.rerun} has {key} {kept[key]:.4f}, not {new[key]:.4f}. "
            "Report runs that others can repeat.",
        )


def table(args: argparse.Namespace, track: str):
    """Write tables and figure below the rules in results/records/README.md."""
    page = tracks.RESULTS / "records/README.md"
    text, grid = f"{page.read_text().partition(MARK)[0]}{MARK}\n![Scores: means and seeds](board.png)\n", []
    for name in tracks.TRACKS:
        records = tracks.standing(name)
        text += f"\n### Track {name}\n\n{record_table(records) if records else 'Open: no runs yet.'}\n"
        if records:
            grid.append([Panel(f"track {name}", board_lines(records))])
    draw_panels(page.with_name("board"), grid, x="score, nats a token (lower is better)", y="", height=5)
    replace_text(page, text)


def board_lines(records: list[dict]) -> list[Line]:
    """Return the marks of the board: a row for each record, the lowest score on top."""
    lines = []
    for record in sorted(records, key=lambda record: record["score"], reverse=True):
        kind = "record" if record["wins"] else "gate passed" if record["passes"] else "gate not passed"
        seeds = [score["score"] for score in record["scores"].values()]
        for label, scores in {"a seed": seeds, kind: [record["score"]]}.items():
            look = dict(zip(LOOK, MARKS[label])) | {"label": label, "markersize": 6}
            lines.append(Line(look, scores, [series_name(record["name"])] * len(scores)))
    return lines


def record_table(records: list[dict]) -> str:
    """Return a table with the lowest score first, and the records that p compares with."""
    rows, rivals = [HEADS], {record["against"] for record in records if record["against"]}
    for record in sorted(records, key=lambda record: record["score"]):
        numbers = [f"{record[key]:.3f}" for key in NUMBERS]
        p = f"{record['p']:.2g}" if record["against"] else ""
        notes = {"record": record["wins"], "knows n": record["knows_n"], "gate not passed": not record["passes"]}
        shown = ", ".join(note for note, holds in notes.items() if holds)
        rows.append([series_name(record["name"]), record["date"], *numbers, str(record["seconds"]), p, shown])
    return f"{markdown_table(rows)}\n\np: against {'; '.join(sorted(map(series_name, rivals)))}."


COMMANDS = {"run": run, "make": make, "check": check, "table": table}

if __name__ == "__main__":
    main()
