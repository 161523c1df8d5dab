"""metrics.jsonl, which is the truth, and its mirror in wandb or trackio, off unless asked for."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import UserError, require
from files import append, replace_text, to_json


class Metrics:
    """Writes metrics.jsonl: one JSON object a line, each with the key "step"; NaN and infinities become null."""

    def __init__(self, path: Path, mirror: Any = None):  # a run of wandb or trackio
        self.path, self.mirror = path, mirror

    def write(self, record: dict[str, Any]):
        """Append one record, and mirror it with nested keys joined: {"val_loss": {4096: 3.1}} as "val_loss/4096"."""
        append(self.path, to_json(record) + "\n")
        if self.mirror is not None:
            self.mirror.log(flatten(record))

    def truncate(self, step: int):
        """Drop the records that a run resumed at `step` will write again: later steps, and validations from it on."""
        records = read_metrics(self.path) if self.path.exists() else []
        kept = [r for r in records if r["step"] < step + ("val_loss" not in r)]
        replace_text(self.path, "".join(to_json(record) + "\n" for record in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without a last line that a kill left half-written.

    Raise ValueError naming the line when another line is damaged.
    """
    lines = Path(path).read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            require(number == len(lines), f"{path}, line {number} is not JSON. Repair it or delete it.")
    return records


def flatten(record: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as one level, the keys joined by "/"."""
    flat = {}
    for key, value in record.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def start_mirror(
    mode: str, *, folder: Path, run_id: str | None = None, log: Callable[[str], None] = print, **options: Any
) -> Any:
    """Start the mirror and return it, a run of wandb or trackio, or None when `mode` is "off". Never prompt.

    mode: also "offline" and "online" as in wandb, and "trackio" for a local dashboard without an account. WANDB_MODE in
    the environment overrides "online", and so does the lack of an API key, with one line to `log`. folder: wandb's
    files go into `folder`/wandb. run_id: the id of the run to continue. options: arguments of wandb.init. The charts'
    horizontal axis is the metric "tokens", so every record should carry it.

    Raise ValueError when the mirror does not start.
    """
    if mode == "trackio":
        return TrackioRun(**options)
    if mode == "online":
        mode = os.environ.get("WANDB_MODE", mode)
    if mode in ("off", "disabled"):
        return None
    # Even an offline run reports errors to wandb's makers unless told not to (seen in wandb 0.31).
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "300")  # in seconds; without it, a lost network blocks the end
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))  # else its logs go to HOME or /tmp
    import wandb

    try:
        if mode == "online" and not wandb.login(prompt=False):
            mode = "offline"
            log(f"wandb: no API key, so offline; later: wandb login && wandb sync {folder}/wandb/offline-run-*")
        settings = wandb.Settings(finish_timeout_raises=True)
        run = wandb.init(mode=mode, dir=folder, id=run_id, resume="allow", settings=settings, **options)
    except wandb.Error as error:
        raise UserError(f"wandb did not start: {error}. Use --wandb offline or off.") from error
    run.define_metric("*", step_metric="tokens")
    return run


class TrackioRun:
    """A local trackio run with wandb's interface. trackio reserves the key "step", and knows no tags and no run ids."""

    id = None

    def __init__(self, *, project: str, name: str, config: dict, group: str | None = None, tags: list[str] = ()):
        import trackio

        self.run = trackio.init(project=project, name=name, group=group, config=config, resume="allow", embed=False)
        self.finish = self.run.finish

    def log(self, record: dict[str, Any]):
        self.run.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])


def finish_mirror(run: Any, log: Callable[[str], None] = print):
    """End the mirror. After WANDB_FINISH_TIMEOUT seconds, say how to send the rest, which stays on the disk."""
    try:
        run.finish()
    except TimeoutError:
        command = f"wandb sync --no-skip-online {Path(run.settings.sync_dir)}"  # else it skips runs that were online
        log(f"wandb: a part of the record has not arrived. It is complete on this disk; later: {command}")
