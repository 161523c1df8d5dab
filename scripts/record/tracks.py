"""The tracks, and the records of methods on a track.

A record is a dictionary with the numbers of a method, as in the record.json of an entry or a row of the board.
"""

import collections
import dataclasses
import datetime
import importlib.util
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor

from configs.config import Config, config_hash, describe_differences
from configs.runs import Run
from errors import UserError, require
from files import parse_object, read_bytes
from measure.flops import forward_flops_per_token
from model.gpt import GPT
from model.methods import MECHANISMS, METHODS
from model.methods.base import KINDS
from model.methods.names import all_mechanisms
from runtime.log import num_parameters
from scripts.shared.looks import series_label
from scripts.shared.runs import StoredRun, final_losses, read_runs

# A track is a preset with changes. results/PRESET/runs.jsonl holds the runs of its baselines.
ON_GPU = {"dtype": "bfloat16", "val_copy_gaps": (2048, 8192, 16_384)}
TRACKS = {
    "laptop": Run("taught", {"dtype": "float32"}),
    "natural": Run("far", {"dtype": "float32"}),
    "one-gpu": Run("gpt_162m_4k", ON_GPU | {"batch_tokens": 131_072, "steps": 3815}),
    "paper": Run("gpt_162m_4k", ON_GPU),
}
RESULTS = Path("results")
SEEDS = [0, 1, 2, 3, 4]
CHOSEN = ("method", "method_options", "scalar_lr")  # the fields that an entry may choose
GATE = 0.010  # nats a token: largest excess over RoPE's loss at the training length
LIMITS = {"parameters": 1.02, "flops": 1.25}  # over RoPE's
SIGNIFICANT = 0.01  # level of the test against the present record
MOST_BYTES = 300_000


def register(file: Path, name: str):
    """Add the mechanism in a Python file to MECHANISMS. Raise ValueError for a name in use, or not one mechanism."""
    module_name = f"mechanism_{name}"
    in_use = name in METHODS or name in MECHANISMS and MECHANISMS[name].__module__ != module_name
    free = name.isidentifier() and not in_use
    require(free, f"{file}: {name!r} is in use, or is not a name. Give the file another name.")
    spec = importlib.util.spec_from_file_location(module_name, file)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # torch.compile imports it by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{file} does not run ({error!r}). Correct it.") from error

    own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module_name]
    found = [x for x in own if issubclass(x, (*KINDS.values(),))]
    require(len(found) == 1, f"{file} has {len(found)} subclasses of a kind of model/methods/base.py. Define one.")
    MECHANISMS[name] = found[0]


# ---- the numbers of a run and of a method ----------------------------------------------------------------------------


def differences(track: Run, stored: StoredRun) -> str:
    """Return the fields of a stored run that differ from the track's, with both values."""
    on_cpu = all(device.startswith("CPU") for device in stored.logged("device"))
    dtype = {"auto": "float32" if on_cpu else "bfloat16"}.get(stored.config.dtype, stored.config.dtype)
    chosen = {field: getattr(stored.config, field) for field in (*CHOSEN, "seed")}
    wanted = dataclasses.replace(track.config, **chosen)
    return describe_differences(wanted, dataclasses.replace(stored.config, dtype=dtype), ("dtype", "val_tokens"))


def copy_losses(summary: dict | None) -> dict[str, list[float]]:
    """Return the losses of the first and the second copy of random spans, by gap."""
    return (summary or {}).get("copy_loss", {}).get("random", {})


def read_score(summary: dict, train_length: int, method: str | None = None) -> dict[str, float]:
    """Return the score and its parts in nats a token, lengths in training lengths. method: as in final_losses."""
    losses, far, gap = final_losses(summary, method), 16 * train_length, str(4 * train_length)
    try:
        first, second = summary.get("copy_loss_as", {}).get(method, summary["copy_loss"])["random"][gap]
        if method and "copy_loss_as" not in summary:  # an old line: the trained method's loss replaces the first copy's
            second = first - summary["copy_gain_as"][method]["random"][gap]
        score = losses[far] + second
        return {"loss_1x": losses[train_length], "loss_16x": losses[far], "copy_4x": second, "score": score}
    except (KeyError, TypeError) as error:
        measure = f"python -m scripts.evaluate RUN --lengths {train_length} {far} --copy {gap}"
        raise UserError(f"{summary['name']} lacks copy gain or a loss. Measure them with `{measure}`.") from error


@torch.no_grad()
def measure_method(config: Config) -> dict:
    """Return parameters and FLOPs a token at 1x, over RoPE's, and whether a token's loss depends on the text's length.

    Raise ValueError if this loss depends on later tokens or on other sequences.
    """
    # 1. The costs.
    rope, T = dataclasses.replace(config, method="rope", method_options={}), config.train_length
    parameters, of_rope = (num_parameters(GPT(each, torch.float32)) for each in (config, rope))
    flops = forward_flops_per_token(config, T) / forward_flops_per_token(rope, T)

    # 2. A small random model, and the losses of its tokens. Output projections start at 0, which would hide attention.
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config, vocab_size=256), torch.float32)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))

    def token_losses(x: Tensor) -> Tensor:  # (B, n) -> (B, T - 1)
        return model(x, x.roll(-1, dims=1), per_token=True)[:, : T - 1]

    # 3. Neither another sequence nor a later token may change a loss.
    rows = torch.randint(256, (2, 2 * T))
    rows[1, :T] = rows[0, :T]
    row = rows[:1]
    alone, short = token_losses(row), token_losses(row[:, :T])
    causal = torch.allclose(token_losses(rows), alone.expand(2, -1), atol=1e-3)
    for place in (1, T // 4, T // 2 - 1, T - 2):
        changed = row ^ (torch.arange(2 * T) == place).long()
        losses = model(changed, row.roll(-1, dims=1), per_token=True)
        causal &= torch.allclose(losses[:, :place], alone[:, :place], atol=1e-3)
    require(causal, f"{config.method} sees later tokens or other sequences. Use only earlier tokens of the sequence.")
    knows_n = not torch.allclose(alone, short, atol=1e-3)
    return {"parameters": round(parameters / of_rope, 4), "flops": round(flops, 4), "knows_n": knows_n}


# ---- records ---------------------------------------------------------------------------------------------------------


def make_records(track: Run, stored_runs: Iterable[StoredRun], **further) -> list[dict]:
    """Return the records of the methods with runs of all seeds on one text. further: keys to add or to replace."""
    groups = collections.defaultdict(dict)  # method and text -> seed -> stored run
    for stored in stored_runs:
        config = stored.config
        if not config or str(4 * config.train_length) not in copy_losses(stored.summary) or differences(track, stored):
            continue
        text = f"{stored.text} {stored.data.get('validation')} {stored.data.get('tokenizer')}"
        identity = config_hash(dataclasses.replace(config, seed=0))
        for method in (None, *config.validate_as):
            groups[method, identity, text][config.seed] = stored
    complete = {key: runs for key, runs in groups.items() if {*SEEDS} <= runs.keys()}
    return [make_record(method, text, runs) | further for (method, _, text), runs in complete.items()]


def make_record(method: str | None, text: str, runs: dict[int, StoredRun]) -> dict:
    """Return the record of a method: means over SEEDS. method: as in final_losses. runs: by seed."""
    config = dataclasses.replace(runs[0].config, method=method or runs[0].config.method)
    scores = {str(seed): read_score(runs[seed].summary, config.train_length, method) for seed in SEEDS}
    rate = "" if config.scalar_lr == Config.scalar_lr else f" scalar_lr={config.scalar_lr:g}"
    record = {"name": series_label(config) + rate, "date": "", "text": text, "scores": scores}
    record |= {field: getattr(config, field) for field in CHOSEN}
    record |= measure_method(config)
    record |= {key: statistics.fmean(score[key] for score in scores.values()) for key in scores["0"]}
    record["seconds"] = round(statistics.fmean(runs[seed].summary["seconds"] for seed in SEEDS))
    return record


def read_entry(folder: Path) -> dict:
    """Return the record of an entry, computed from its lines. Raise ValueError for the first broken rule."""
    # 1. The files.
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    require(size <= MOST_BYTES, f"{folder} has {size} bytes. Keep it at {MOST_BYTES} or less.")
    check_prediction(folder)
    mechanism = read_entry_file(folder)["mechanism"]
    if mechanism:
        register(folder / "method.py", mechanism)

    # 2. The runs.
    track, stored_runs = TRACKS[folder.parent.name], read_runs(folder / "runs.jsonl")
    for stored in stored_runs:
        require(not stored.problems, "; ".join(stored.problems))
        different = differences(track, stored) or describe_choice(stored)
        require(not different, f"{stored.path} has {different}. Use the settings and the last validation of the track.")
    seeds = sorted(stored.config.seed for stored in stored_runs)
    require(seeds == SEEDS, f"{folder} has the seeds {seeds}. Report one run of each seed of {SEEDS}.")

    # 3. The record.
    records = make_records(track, stored_runs, name=folder.name, date=folder.name[:10], mechanism=mechanism)
    require(records, f"{folder}: the runs differ in method or text. Use one method and one text.")
    used = not mechanism or MECHANISMS[mechanism] in all_mechanisms(records[0]["method"])
    require(used, f"{folder}: the method does not use {mechanism}. Name it, such as --method p_rope+{mechanism}.")
    for cost, most in LIMITS.items():
        require(records[0][cost] <= most, f"{folder} has {records[0][cost]} times RoPE's {cost}. Use at most {most}.")
    return records[0]


def read_entry_file(folder: Path) -> dict:
    """Return the content of an entry's record.json."""
    path = folder / "record.json"
    return parse_object(read_bytes(path), str(path), mechanism=str | None)


def check_prediction(folder: Path):
    """Raise ValueError for an entry without a date in its name or without a prediction."""
    try:
        datetime.date.fromisoformat(folder.name[:10])
    except ValueError as error:
        raise UserError(f"{folder}: the name does not begin with a date. Rename it to YYYY-MM-DD_NAME.") from error
    require((folder / "README.md").exists(), f"{folder} has no README.md. Write a prediction before the runs.")


def describe_choice(stored: StoredRun) -> str:
    """Return the numbers of a line that are not from the validation after the last step, or an empty text."""
    line, last, steps = stored.line, stored.line["curve"][-1], stored.config.steps
    wrong = []
    if not line["steps"] == last["step"] == steps or line["tokens"] != steps * stored.config.batch_tokens:
        wrong.append(f"steps {line['steps']} and {last['step']}")
    wrong += [f"val_loss {n}" for n, loss in last["val_loss"].items() if loss != line["val_loss"].get(n)]
    gains = line["copy_gain"]["random"] | last["copy_gain"]["random"]
    for gap, (first, second) in line["copy_loss"]["random"].items():
        if not math.isclose(first - second, gains[gap], abs_tol=1e-9):
            wrong.append(f"copy_loss {gap}")
    return ", ".join(wrong)


# ---- the board -------------------------------------------------------------------------------------------------------


def standing(track_name: str, more: Iterable[dict] = (), local_runs: Iterable[StoredRun] = ()) -> list[dict]:
    """Return the judged records of a track on one text: its baselines, its entries, and `more`, which replaces equal
    names. The text is the text of `more`, or else of the baselines. local_runs: more runs of the board's methods."""
    track = TRACKS[track_name]
    entries = sorted(path.parent for path in (RESULTS / "records" / track_name).glob("*/record.json"))
    kept = make_records(track, read_runs(RESULTS / track.preset / "runs.jsonl"))
    if "rope" not in [record["name"] for record in kept]:
        kept = []  # without RoPE there is no gate, so the track is open
    kept += [read_entry(folder) for folder in entries]
    names = {"rope", *(record["name"] for record in kept)}
    local = [record for record in make_records(track, local_runs) if record["name"] in names]
    texts = [record["text"] for record in [*more, *kept]][:1]
    return judge({record["name"]: record for record in [*local, *kept, *more] if record["text"] in texts})


def judge(by_name: dict[str, dict]) -> list[dict]:
    """Return the records by date, with four keys added: passes, against (name of the record until then), p and wins.

    Methods that do not know the length of the text are compared with the best record of such methods. Baselines come
    first, the best before the others. Raise ValueError if RoPE is missing.
    """
    records = sorted(by_name.values(), key=lambda record: (record["date"], record["score"]))
    rope = [record for record in records if record["method"] == "rope" and not record["method_options"]]
    text = records[0]["text"] if records else ""
    require(
        rope or not records,
        f"There are no five runs of RoPE on the text {text}. `run` compares with yours, of --method rope. `make` needs "
        "the board's text (results/records/README.md).",
    )

    winners = []
    for record in records:
        cheap = all(record[cost] <= most for cost, most in LIMITS.items())
        rivals = [other for other in winners if record["knows_n"] or not other["knows_n"]]
        rival = min(rivals, key=lambda other: other["score"], default=None)
        record["passes"] = cheap and record["loss_1x"] <= rope[0]["loss_1x"] + GATE
        record["against"] = rival and rival["name"]
        record["p"] = rival and paired_p(record["scores"], rival["scores"])
        record["wins"] = record["passes"] and (not rival or record["p"] < SIGNIFICANT)
        winners += [record] * record["wins"]
    return records


def paired_p(scores: dict[str, dict], rival: dict[str, dict]) -> float:
    """Return p of the one-sided paired t-test over seeds. It is small if these scores are lower than the rival's."""
    gains = [scores[seed]["score"] - rival[seed]["score"] for seed in scores]
    if len({*gains}) == 1:  # equal differences have no t-test
        return float(gains[0] >= 0)
    p = stats.ttest_1samp(gains, 0, alternative="less").pvalue
    return float(f"{p:.6g}")  # rounded, so that every machine prints the same digits
