"""Mutates every file that the product reads. A command gives the right numbers, or one line and exit code 2.

    FUZZ=3000 SEED=1 python -m pytest -s tests/test_fuzz.py      this number of mutations, drawn with this seed
"""

import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
import traceback

import pytest
from commands import ROOT, exit_code, full_disk, parametrize, promise, shared, write_files
from tiny_run import arguments, train_tiny_run

from data import shards, text
from data.tokenizer import load_tokenizer
from scripts import evaluate, generate, keep
from scripts.record import __main__ as record
from scripts.record import tracks
from scripts.reproduce import __main__ as reproduce
from train_gpt import main as train

ENTRY = "results/records/laptop/2026-11-25_root"
READERS = {  # file: the commands that read it
    "data/manifest.json": "verify evaluate resume",
    "data/tokenizer.json": "verify generate",
    "data/letters_train_000001.bin": "verify resume",
    "data/letters_val_000000.bin": "verify evaluate",
    "run/config.json": "evaluate keep",
    "run/data.json": "evaluate keep generate",
    "run/summary.json": "evaluate keep",
    "run/evaluation.json": "evaluate keep",
    "run/needle/summary.json": "keep",
    "run/metrics.jsonl": "keep resume",
    "run/checkpoints/step_000004.pt": "evaluate generate resume",
    "kept.jsonl": "keep tables",
    f"{ENTRY}/record.json": "check",
    f"{ENTRY}/runs.jsonl": "check",
    f"{ENTRY}/method.py": "check",
    "results/taught/runs.jsonl": "check",
}
NUMBERS = [True, -1, 7, 1e300, math.nan]
VALUES = [*NUMBERS, None, "x", "1", [], [1], {}, {"x": 1}, [[{}]]]
STRAYS = "{0} (1){1}", "{0}{1}.tmp", ".{0}{1}.swp", "{0}~{1}", "{0}1e3{1}"
NEEDLE = {"haystack": "c4", "steps": 3, "examples": 5, "greedy": {"240": 0.5}, "by_distance": {"240": {"8": [1, 2]}}}
# Times differ between runs, and nothing tells how many values these lists have.
FREE = {*"seconds tokens_per_second val_loss_by_block method_parameters commit device torch started".split()}
USED = "runs used: 6 of"  # a table of fewer runs names the others
TABLE = re.compile(r"^\|.*", re.MULTILINE)
RIVALS = re.compile(r'"method": "(rope", "method_options": {}|p_rope.scale_invariant.xsa", .*"barbero)')


COMMANDS = {  # name: the command, its arguments for a folder, and the file of its numbers, if it does not print them
    "verify": (shards.main, "verify {0}/data", None),
    "evaluate": (evaluate.main, "{0}/run", "run/evaluation.json"),
    "generate": (generate.main, "{0}/run abc --max-new-tokens 2", None),
    "keep": (keep.main, "{0}/run --to {0}/kept.jsonl", "kept.jsonl"),
    "resume": (train, " ".join(arguments("{0}", "--resume auto --save_every 2")), "run/summary.json"),
    "tables": (reproduce.main, "table_losses --scale mini --runs-dir {0}/kept.jsonl --out {0}/out", None),
    "check": (record.main, f"check {{0}}/{ENTRY}", None),
}


def outcome(name, folder, commands=COMMANDS):
    """Return exit code, numbers and errors of a command. A traceback has no exit code."""
    out, err = io.StringIO(), io.StringIO()
    main, argv, file = commands[name]
    if name == "resume":
        (folder / "run/summary.json").unlink()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = exit_code(main, argv.format(folder).split())
        except Exception:
            traceback.print_exc()
            return None, None, err.getvalue()
    return code, parse((folder / file).read_bytes()) if file and code == 0 else out.getvalue(), err.getvalue()


@shared
def place(shared_path):
    """Return a function that makes the folder of all files anew, always at the same path."""
    template, folder = shared_path / "template", shared_path / "folder"
    template.mkdir()

    def make():
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(template, folder)

    # 1. A run at that path, with a checkpoint before the last, and lines and an entry of the results.
    train_tiny_run(template, "--save_every 2")
    config = (template / "run/config.json").read_text().replace(str(template), str(folder))
    kept, baselines = ((ROOT / f"results/{scale}/runs.jsonl").read_text() for scale in ("mini", "taught"))
    files = {f"{ENTRY}/{path.name}": path.read_text() for path in (ROOT / ENTRY).iterdir()}
    files |= {"run/config.json": config, "run/log.txt": "", "run/needle/summary.json": json.dumps(NEEDLE)}
    files["kept.jsonl"] = "".join(kept.splitlines(keepends=True)[:9])
    files["results/taught/runs.jsonl"] = "".join(filter(RIVALS.search, baselines.splitlines(keepends=True)))
    write_files(template, files)
    outcome("evaluate", make())
    shutil.copy(folder / "run/evaluation.json", template / "run")

    # 2. The costs of the baselines, which take most of the time, are measured once.
    measure, measured = tracks.measure_method, {}

    def measure_once(config):
        key = repr(config)
        if key not in measured or config.method == "root":  # which is the method of the mutated method.py
            measured[key] = measure(config)
        return measured[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        patch.setattr(os, "_exit", sys.exit)
        patch.setattr(tracks, "RESULTS", folder / "results")
        patch.setattr(tracks, "measure_method", measure_once)
        yield make


# ---- the mutations ---------------------------------------------------------------------------------------------------


def mutate(path, rng):
    """Change a file in one way. Return the way, and whether the file is as good as before."""
    old, is_json = path.read_bytes(), path.suffix.startswith(".json")
    place = rng.randrange(len(old))
    way = rng.choice(["flip", "cut", "page", "stray", "gone", *["value", "key"] * 3 * is_json])
    if way == "flip":
        flipped = old[place] ^ 1 << rng.randrange(8)
        path.write_bytes(old[:place] + bytes([flipped]) + old[place + 1 :])
    elif way == "cut":
        path.write_bytes(old[:place])
    elif way == "page":
        path.write_bytes((old[:place] + bytes(64) + old[place + 64 :])[: len(old)])
    elif way == "stray":
        stray = path.with_name(rng.choice(STRAYS).format(path.stem, path.suffix))
        if rng.random() < 0.3:
            stray.mkdir()
        else:
            stray.write_bytes(old[: rng.choice([place, len(old)])])
    elif way == "gone":
        path.unlink()
        if rng.random() < 0.5:
            path.mkdir()
        return way, path.suffix == ".pt" or path.name == "kept.jsonl"  # an older or a new file is used
    else:
        records = parse(old)
        holder, key = rng.choice([*nodes(records)])
        way = f"{way} {key}"
        if way.startswith("value"):
            holder[key] = rng.choice(VALUES)
        elif isinstance(holder, dict):
            del holder[key]
        path.write_text("".join(json.dumps(value) + "\n" for value in records))
    return way, is_json and same_shape(parse(path.read_bytes()), parse(old))


def nodes(value):
    """Yield the container and the key of each value in JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from nodes(item)


def parse(content):
    """Return JSON, or the list of its lines. None if it is damaged."""
    with contextlib.suppress(ValueError):
        return json.loads(b"[" + re.sub(rb"\n(?={)", b",", content) + b"]")


def same_shape(new, old):
    """Return whether JSON has the same keys and types, so it is another valid file. Lengths and gaps may differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [re.sub(r"\b\d+\b", "0", " ".join(value)) for value in (new, old)]
        return keys[0] == keys[1] and all(map(same_shape, new.values(), old.values()))
    if isinstance(old, list) and isinstance(new, list):
        return len(new) == len(old) and all(map(same_shape, new, old))
    return type(new) in (float, int, type(None)) if type(old) is float else type(new) is type(old)


def agrees(found, truth):
    """Return whether the numbers are true. Some may be missing."""
    if isinstance(found, dict) and isinstance(truth, dict):
        return all(agrees(found[key], truth[key]) for key in (found.keys() & truth.keys()) - FREE)
    if isinstance(found, list) and isinstance(truth, list):
        return len(found) == len(truth) and all(map(agrees, found, truth))
    if isinstance(found, str) and USED in truth:
        return USED not in found or TABLE.findall(found) == TABLE.findall(truth)
    return found == truth


def problem_of(file, way, valid, outcome, truth):
    """Return what is wrong with a command's outcome, or None."""
    code, numbers, errors = outcome
    if code == 2:
        names = file.split("/")[-1], "record.json"  # which disagrees with the kept runs
        named = valid or way == "gone" or any(name in errors for name in names)
        right = errors.startswith("error: ") and errors.count("\n") == 1 and ".py, line" not in errors
        return None if right and named else "not one line with the name"
    if code is None or code != truth[0]:
        return "traceback or another exit code"
    return None if valid or agrees(numbers, truth[1]) else "silent"


WRITERS = COMMANDS | {
    "text": (text.main, "{0}/log.txt --tokenizer bpe:300 --out {0}/new", None),
    "shards": (text.main, "{0}/log.txt --tokenizer gpt2 --out {0}/new", None),
}


@parametrize("name", "evaluate keep resume text shards".split())
def test_a_full_disk_is_one_line_that_names_the_file(name, place, monkeypatch):
    folder = place()
    (folder / "log.txt").write_text("abc de " * 50)
    monkeypatch.setattr(text, "load_tokenizer", lambda name: load_tokenizer(folder / "data"))
    with full_disk(20):
        code, _, errors = outcome(name, folder, WRITERS)
    (line,) = errors.splitlines()
    assert code == 2 and line.startswith(f"error: cannot write {folder}")


@promise(15, "a damaged file gives the right numbers, or one line that names it")
def test_a_mutation_of_any_file_gives_the_right_numbers_or_one_line(place, faults, long):
    rng = random.Random(int(os.environ.get("SEED", 0)))
    truth = {name: outcome(name, place()) for name in COMMANDS}
    assert [code for code, *_ in truth.values()] == [name == "tables" for name in COMMANDS]  # some runs are missing
    problems = []
    for _ in range(int(os.environ.get("FUZZ", 3000 if long else 100))):
        file = rng.choice([*READERS])
        name, folder = rng.choice(READERS[file].split()), place()
        way, valid = mutate(folder / file, rng)
        found = outcome(name, folder)
        with contextlib.suppress(AssertionError), faults(way.split()[0]):
            problem = problem_of(file, way, valid, found, truth[name])
            if problem:
                problems.append((problem, file, name, way, found[2][-400:]))
            assert not problem
    assert not problems, "\n".join(map(str, problems))
