"""metrics.jsonl, which is the truth, and its mirror in wandb, off unless asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Sequence

from files import append, refuse_link, replace_file, to_json

if TYPE_CHECKING:
    import wandb


class Metrics:
    """Writes metrics.jsonl: one JSON object a line, each with the key "step"; NaN and infinities become null."""

    def __init__(self, path: Path, wandb: wandb.Run | None = None) -> None:
        self.path = path
        self.wandb = wandb

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, and mirror it with nested keys joined: {"val_loss": {4096: 3.1}} as "val_loss/4096"."""
        append(self.path, to_json(record) + "\n")
        if self.wandb is not None:
            self.wandb.log(flatten(record))

    def truncate(self, step: int, validated: int) -> None:
        """Drop what a run resumed at `step` will write again: records of later steps, and of validations ("val_loss")
        later than `validated`, the last that the checkpoint knows of (-1: none)."""
        records = read_metrics(self.path) if self.path.exists() else []
        kept = [r for r in records if r["step"] <= (validated if "val_loss" in r else step)]
        text = "".join(to_json(record) + "\n" for record in kept)
        replace_file(self.path, lambda file: file.write(text.encode()))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without a last line that a kill left half-written.

    Raises ValueError naming the line when another one is damaged, or any is something else than a record of a step.
    """
    lines = Path(path).read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: repair it or delete it") from None
            break
        if type(record) is not dict or type(record.get("step")) is not int:
            raise ValueError(f"{path}, line {number} is no record of a step: repair it or delete it")
        records.append(record)
    return records


def flatten(record: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as one level, the keys joined by "/"."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def start_wandb(
    mode: str,
    *,
    project: str,
    name: str,
    group: str | None = None,
    tags: Sequence[str] = (),
    config: dict[str, Any],
    folder: Path,
    run_id: str | None = None,
    log: Callable[[str], None] = print,
) -> wandb.Run | None:
    """Start the mirror, or return None when `mode` is "off"; "offline" and "online" as in wandb. Never a prompt.

    WANDB_MODE in the environment overrides "online", and so does the lack of an API key, with one line to `log`.
    wandb's files go into `folder`/wandb. The id of the returned run, kept in the checkpoint and passed as `run_id`,
    continues the same run. Charts are drawn over the metric "tokens", so every record should carry it.
    Raises ValueError when wandb refuses to start, OSError when a symbolic link stands where it would write.
    """
    if mode == "online":
        mode = os.environ.get("WANDB_MODE", mode)
    if mode in ("off", "disabled"):
        return None
    refuse_link(folder / "wandb" / "cache")  # wandb makes all else there anew
    # Even an offline run reports to wandb's makers unless told not to (seen in wandb 0.31).
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))  # its logs, or else in HOME or /tmp
    import wandb

    try:
        if mode == "online" and not wandb.login(prompt=False):
            mode = "offline"
            log(f"wandb: no API key, so offline; later: wandb login && wandb sync {folder}/wandb/offline-run-*")
        run = wandb.init(
            mode=mode,
            project=project,
            name=name,
            group=group,
            tags=tags,
            config=config,
            dir=folder,
            id=run_id,
            resume="allow",
        )
    except wandb.Error as error:
        raise ValueError(f"wandb did not start: {error} (offline or off needs no connection)") from error
    run.define_metric("*", step_metric="tokens")
    return run
