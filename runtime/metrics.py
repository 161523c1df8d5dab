"""Writes and reads metrics.jsonl, and mirrors it to wandb or trackio if the user wants."""

import os
from collections.abc import Callable
from pathlib import Path

from errors import UserError, require
from files import append, check_object, parse_object, read_bytes, replace_text, to_json

Number = float | None  # null stands for a number that is not finite
Pair = tuple[Number, Number]
# The types of the fields of all records: of metrics.jsonl, summary.json, evaluation.json, a line of runs.jsonl.
KINDS = {
    int: "seed steps tokens distinct_tokens parameters train_length examples riffle_documents",
    int | str: "step",
    str: "name preset model method haystack pretrained",
    str | None: "train validation tokenizer",
    float: "seconds",
    Number: "tokens_per_second train_loss grad_norm val_seconds",
    dict: "changes method_options as",
    list[str]: "commit device torch started",
    int | dict[int, int]: "val_tokens",
    dict[int, Number]: "val_loss val_loss_own val_tokens_own greedy teacher_forcing",
    dict[str, Number]: (
        "lr max_logit attention_entropy far_gain far_gain_error far_tokens riffle_gain riffle_gain_error"
    ),
    dict[str, list[Number]]: "method_parameters",
    dict[str, Pair]: "far_loss",
    dict[int, list[Number]]: "val_loss_by_position val_loss_by_block",
    dict[int, dict[int, tuple[int, int]]]: "by_distance",
    dict[str, dict[int, Number]]: "copy_gain copy_gain_error copy_accuracy",
    dict[str, dict[int, Pair]]: "copy_loss",
}
FIELDS = {name: kind for kind, names in KINDS.items() for name in names.split()}
FIELDS |= {f"{name}_as": dict[str, kind] for name, kind in FIELDS.items()}


def check_record(record, place: str, names: str = "", **fields) -> dict:
    """Return the record if its fields are of the types in FIELDS, and if it has the fields in `names`.

    fields: the types of further fields that it must have. Raise UserError naming the place and the field.
    """
    check_object(record, place, **fields)
    known = [name for name in (*names.split(), *record) if name in FIELDS and name not in fields]
    check_object(record, place, **{name: FIELDS[name] for name in known})
    for length, means in record.get("val_loss_by_position", {}).items():
        octaves = (int(length) - 1).bit_length() + 1
        require(len(means) == octaves, f"{place}: val_loss_by_position has {len(means)} numbers, not {octaves}.")
    tokens = record.get("val_tokens")
    measured = not isinstance(tokens, dict) or tokens.keys() == record.get("val_loss", {}).keys()
    require(measured, f"{place}: val_tokens and val_loss have other lengths.")
    return record


def read_record(path: Path, names: str = "") -> dict | None:
    """Return the record in a JSON file, checked by check_record, or None without a file."""
    if not path.exists():
        return None
    return check_record(parse_object(read_bytes(path), str(path)), str(path), names)


class Metrics:
    """Writes metrics.jsonl: one JSON object a line, with the key "step". NaN and infinities become null."""

    def __init__(self, path: Path, mirror=None):  # mirror: a run of wandb or trackio
        self.path, self.mirror = path, mirror

    def write(self, record: dict):
        """Append one record. The mirror gets its numbers: {"val_loss": {4096: 3.1}} as "val_loss/4096"."""
        append(self.path, to_json(record) + "\n")
        if self.mirror is not None:
            self.mirror.log(record)

    def truncate(self, step: int):
        """Drop the records that a run resumed at `step` writes again: later steps, and validations from `step` on."""
        records = read_metrics(self.path) if self.path.exists() else []
        kept = [r for r in records if r["step"] < step + ("val_loss" not in r)]
        replace_text(self.path, "".join(to_json(record) + "\n" for record in kept))


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a metrics.jsonl. A kill can leave the last line half-written, so a damaged one is left out.

    Raise ValueError naming the line if another line is damaged.
    """
    lines = read_bytes(path).splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        if line.endswith(b"\n"):
            place = f"{path}, line {number}"
            records.append(check_record(parse_object(line, place, "Repair or delete it."), place, step=int))
    return records


def numbers(record: dict, prefix: str = "") -> dict:
    """Return the numbers of a nested record, with keys joined by "/". Lists, which no dashboard draws, are left out."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{key}/")
        elif not isinstance(value, list):
            flat[f"{prefix}{key}"] = value
    return flat


def pictures(record: dict, image: Callable) -> dict:
    """Return the picture of a validation under "charts", made by `image` from an array. {} for other records.

    A picture needs no answer of a server. The tables of wandb do, so a lost network could end the run.
    """
    if "val_loss_by_position" not in record:
        return {}
    from runtime.charts import draw_validation  # here, because importing matplotlib takes a second

    return {"charts": image(draw_validation(record))}


def start_mirror(mode: str, *, folder: Path, run_id: str | None = None, say: Callable = print, **options):
    """Start a run of wandb or trackio and return it, or None when `mode` is "off". Never prompt.

    mode: "off", "offline" or "online" as in wandb, or "trackio", a local dashboard without an account. The environment
    variable WANDB_MODE overrides "online". Without an API key, "online" becomes "offline", and `say` gets a line about
    it. folder: wandb writes to `folder`/wandb. run_id: the run to continue. options: arguments of wandb.init. The
    metric "tokens" of each record is the horizontal axis of the charts. Raise ValueError if wandb does not start.
    """
    # 1. Choose the mode.
    if mode == "online":
        mode = os.environ.get("WANDB_MODE", mode)
    if mode in ("off", "disabled"):
        return None
    # Charts need matplotlib, which by default keeps its list of fonts in HOME.
    os.environ.setdefault("MPLCONFIGDIR", str(folder / "wandb" / "matplotlib"))
    if mode == "trackio":
        return TrackioRun(**options)

    # 2. Set what wandb reads from the environment.
    # By default, even an offline run sends error reports to the wandb company (seen in wandb 0.31).
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")  # seconds; without a limit, a lost network blocks the end
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))  # otherwise logs go to HOME or /tmp

    # 3. Start.
    import wandb

    try:
        if mode == "online" and not wandb.login(prompt=False):
            mode = "offline"
            command = f"wandb login && wandb sync {folder}/wandb/offline-run-*"
            say(f"wandb has no API key, so this run is offline. Upload it later with `{command}`.")
        settings = wandb.Settings(finish_timeout_raises=True)
        run = wandb.init(mode=mode, dir=folder, id=run_id, resume="allow", settings=settings, **options)
    except wandb.Error as error:
        raise UserError(f"wandb did not start ({error}). Use --wandb offline or --wandb off.") from error
    run.define_metric("*", step_metric="tokens")
    return WandbRun(run)


class WandbRun:
    """A run of wandb."""

    def __init__(self, run):
        self.run = run
        self.id, self.settings = run.id, run.settings
        self.finish = run.finish

    def log(self, record: dict):
        import wandb

        self.run.log(numbers(record) | pictures(record, wandb.Image))


class TrackioRun:
    """A local trackio run with wandb's interface. trackio reserves the key "step", and has no tags or run ids."""

    id = None

    def __init__(self, *, tags=(), **options):
        try:
            import trackio

            self.image = trackio.Image
        except ImportError as error:
            raise UserError("--wandb trackio needs a package. Install it with `pip install trackio`.") from error
        self.run = trackio.init(resume="allow", embed=False, **options)
        self.finish = self.run.finish

    def log(self, record: dict):
        others = {key: value for key, value in numbers(record).items() if key != "step"}
        self.run.log(others | pictures(record, self.image), step=record["step"])


def finish_mirror(run, log: Callable = print):
    """Finish the mirror's run. After WANDB_FINISH_TIMEOUT seconds, log the command that uploads the rest."""
    try:
        run.finish()
    except TimeoutError:
        command = f"wandb sync --no-skip-online {Path(run.settings.sync_dir)}"  # by default, sync skips online runs
        log(f"wandb did not get all records before the timeout. Upload them later with `{command}`.")
