"""metrics.jsonl, which is the truth, and its mirror in wandb, off unless asked for."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import require
from files import append, refuse_link, replace_text, to_json


class Metrics:
    """Writes metrics.jsonl: one JSON object a line, each with the key "step"; NaN and infinities become null."""

    def __init__(self, path: Path, wandb=None):  # a wandb.Run
        self.path, self.wandb = path, wandb

    def write(self, record: dict[str, Any]):
        """Append one record, and mirror it with nested keys joined: {"val_loss": {4096: 3.1}} as "val_loss/4096"."""
        append(self.path, to_json(record) + "\n")
        if self.wandb is not None:
            self.wandb.log(flatten(record))

    def truncate(self, step: int, validated: int):
        """Drop what a run resumed at `step` will write again: records of later steps, and of validations ("val_loss")
        later than `validated`, the last that the checkpoint knows of (-1: none)."""
        records = read_metrics(self.path) if self.path.exists() else []
        kept = [r for r in records if r["step"] <= (validated if "val_loss" in r else step)]
        replace_text(self.path, "".join(to_json(record) + "\n" for record in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without a last line that a kill left half-written.

    Raise ValueError naming the line when another one is damaged, or any is something else than a record of a step.
    """
    lines = Path(path).read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            require(number == len(lines), f"{path}, line {number} is not JSON: repair it or delete it")
            break
        is_record = type(record) is dict and type(record.get("step")) is int
        require(is_record, f"{path}, line {number} is no record of a step: repair it or delete it")
        records.append(record)
    return records


def flatten(record: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as one level, the keys joined by "/"."""
    flat = {}
    for key, value in record.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def start_wandb(
    mode: str, *, folder: Path, run_id: str | None = None, log: Callable[[str], None] = print, **options: Any
) -> Any:
    """Start the mirror and return it, a wandb.Run, or None when `mode` is "off". Never prompt.

    mode: also "offline" and "online" as in wandb. WANDB_MODE in the environment overrides "online", and so does the
    lack of an API key, with one line to `log`. folder: wandb's files go into `folder`/wandb. run_id: the id of the run
    to continue, kept in the checkpoint. options: more arguments of wandb.init, such as project and name. Charts are
    drawn over the metric "tokens", so every record should carry it.

    Raise ValueError when wandb refuses to start, OSError when a symbolic link stands where it would write.
    """
    if mode == "online":
        mode = os.environ.get("WANDB_MODE", mode)
    if mode in ("off", "disabled"):
        return None
    refuse_link(folder / "wandb" / "cache")  # wandb makes all else there anew
    # Even an offline run reports to wandb's makers unless told not to (seen in wandb 0.31).
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")  # seconds at the end; else a lost network keeps it for ever
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))  # its logs, or else in HOME or /tmp
    import wandb

    try:
        if mode == "online" and not wandb.login(prompt=False):
            mode = "offline"
            log(f"wandb: no API key, so offline; later: wandb login && wandb sync {folder}/wandb/offline-run-*")
        settings = wandb.Settings(finish_timeout_raises=True)
        run = wandb.init(mode=mode, dir=folder, id=run_id, resume="allow", settings=settings, **options)
    except wandb.Error as error:
        raise ValueError(f"wandb did not start: {error} (offline or off needs no connection)") from error
    run.define_metric("*", step_metric="tokens")
    return run


def finish_wandb(run: Any, log: Callable[[str], None] = print):
    """End the mirror, a wandb.Run. What has not arrived when WANDB_FINISH_TIMEOUT, in seconds, is over stays on the
    disk, with one line to `log` that says how to bring it up."""
    folder = Path(run.settings.sync_dir)
    try:
        run.finish()
    except TimeoutError:
        later = f"wandb sync --no-skip-online {folder}"  # without the option it leaves out runs that were online
        log(f"wandb: not all of the record has arrived there, but it is complete here; later: {later}")
