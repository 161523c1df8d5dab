"""Says what this machine is and what to expect of it: what works, what is slow, what is broken, and what to do.

    python -m scripts.doctor                                     the quickstart, a minute or two
    python -m scripts.doctor gpt_162m_4k --price 3.5             at most 8 minutes on one GPU, with what its hours cost
    python -m scripts.doctor gpt_162m_4k --only kernels resume   some of its parts
    python -m scripts.doctor gpt_162m_4k --dtype float32         any field of train_gpt.py

The parts, the most important first:

    machine   driver, torch, Triton, compilers, NCCL, memory, disk, data
    kernels   attention and cross-entropy against float64, forward and backward, in the preset's sizes and dtype
    methods   ten steps of each attention method, in our kernels and in plain PyTorch
    resume    a run that is killed and resumed, beside one that is not
    step      a training step as in a run: time, tokens/s, MFU, memory; whole runs at this rate; beside plain attention
    memory    peak memory at each validation length, counted and (on a GPU) measured
    runs      a step of each of the paper's models, timed (on a GPU)

Each is a process of its own, which has its share of the time that is left: one that crashes or hangs costs nothing but
itself. What is found is printed and written as it comes, to doctor.md and doctor.json in --out, with what each process
said (NAME.log). Attach them to a bug report. Exit code: 1 when something is broken, 2 for a mistake in the command.
"""

import argparse
import dataclasses
import shlex
import signal
import sys
import time
from pathlib import Path

from configs.command_line import read_config
from errors import exit_on_user_error, require
from files import replace_text, to_json
from scripts.doctor.findings import Settings, markdown
from scripts.doctor.process import run_part

ABOUT = "scripts.doctor.machine:about"
PARTS = {  # by name: where it is, and its share of the time
    "machine": ("scripts.doctor.machine:machine", 40),
    "kernels": ("scripts.doctor.kernels:kernels", 80),
    "methods": ("scripts.doctor.training:methods", 100),
    "resume": ("scripts.doctor.training:resume", 70),
    "step": ("scripts.doctor.speed:step", 80),
    "memory": ("scripts.doctor.speed:memory", 50),
    "runs": ("scripts.doctor.speed:runs", 60),
}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m scripts.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("preset", help="one of configs/presets.py (quickstart); fields of train_gpt.py may follow")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=8, help="at most, for all parts together (8)")
    parser.add_argument("--price", type=float, help="of an hour of one GPU, in any currency")
    parser.add_argument("--out", type=Path, default=Path("doctor"), metavar="FOLDER", help="(doctor)")
    words = sys.argv[1:]
    args, fields = parser.parse_known_args(words if words and words[0][0] != "-" else ["quickstart", *words])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no part outlives this
    with exit_on_user_error():
        is_positive = args.minutes > 0 and (args.price is None or args.price >= 0)
        require(is_positive, "--minutes must be positive and --price not negative")
        arguments = (args.preset, *fields)
        settings = Settings(arguments, read_config(list(arguments)), args.price)
        args.out.mkdir(parents=True, exist_ok=True)
        record = dict(command=shlex.join(["python", "-m", "scripts.doctor", *sys.argv[1:]]), about={}, parts={})
        names = [name for name in PARTS if not args.only or name in args.only]
        examine(names, settings, 60 * args.minutes, args.out, record)
    findings = [found for part in record["parts"].values() for found in part["findings"]]
    print(f"\n{summary(findings)}\nAll of it: {args.out / 'doctor.md'}, {args.out / 'doctor.json'}")
    sys.exit(int(any(found["state"] == "broken" for found in findings)))


def examine(names: list[str], settings: Settings, seconds: float, out: Path, record: dict):
    """Run these parts and print and write what they find, one finding after another, into `record`."""
    end = time.monotonic() + seconds
    for position, name in enumerate(names):
        function, share = PARTS[name]
        limit = (end - time.monotonic()) * share / sum(PARTS[other][1] for other in names[position:])
        began = time.monotonic()
        part = record["parts"][name] = dict(seconds=0.0, limit=round(limit, 1), findings=[])
        for found in run_part(name, [ABOUT, function], settings, limit, out / f"{name}.log"):
            part["seconds"] = round(time.monotonic() - began, 1)
            if isinstance(found, dict):
                record["about"] = found
                continue
            part["findings"].append(dataclasses.asdict(found))
            print(f"{found.state:8} {name}: {found.check}: {found.said}", flush=True)
            if found.advice:
                print(f"{'':9}-> {found.advice}", flush=True)
            write(out, record)
        part["seconds"] = round(time.monotonic() - began, 1)
        write(out, record)


# ---- what is written -------------------------------------------------------------------------------------------------


def write(out: Path, record: dict):
    replace_text(out / "doctor.json", to_json(record, indent=1) + "\n")
    replace_text(out / "doctor.md", page(record))


def page(record: dict) -> str:
    rows = [["part", "check", "", "found", "what to do"]]
    for name, part in record["parts"].items():
        for found in part["findings"]:
            rows.append([name, found["check"], found["state"], found["said"], found["advice"]])
    about = "; ".join(f"{key} {value}" for key, value in record["about"].items())
    seconds = ", ".join(f"{name} {part['seconds']:.0f}" for name, part in record["parts"].items())
    findings = [found for part in record["parts"].values() for found in part["findings"]]
    return (
        f"# What this machine is and what to expect of it\n\n    {record['command']}\n\n{about}.\n\n"
        f"{summary(findings)} Seconds: {seconds}.\n\n{markdown(rows)}\n"
    )


def summary(findings: list[dict]) -> str:
    counts = {state: sum(found["state"] == state for found in findings) for state in ("OK", "slow", "broken")}
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + "."


if __name__ == "__main__":
    main()
