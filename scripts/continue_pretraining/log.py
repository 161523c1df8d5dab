"""What a continual pretraining says: on the console, in log.txt and metrics.jsonl, and in wandb."""

import math
import time
from pathlib import Path

from errors import exit_on_user_error
from runtime.device import device_name, peak_memory
from runtime.metrics import Metrics, read_metrics, start_wandb
from runtime.processes import World, fail_together
from runtime.progress import Progress
from runtime.run_folder import RunFolder
from runtime.run_log import SECONDS_A_LINE, time_left
from runtime.validation import format_losses
from scripts.continue_pretraining.model import WithLoss
from scripts.continue_pretraining.settings import Settings

ROOT = Path(__file__).parents[2]


class Log:
    """What the main process writes about a run; the others keep count with it and write nothing."""

    def __init__(self, settings: Settings, world: World, folder: RunFolder | None, progress: Progress):
        """Begin, or go on from `progress`. Raise ValueError when wandb refuses to start."""
        self.settings, self.world, self.folder, self.progress = settings, world, folder, progress
        self._seconds: list[float] = []  # of each step
        self._last_line = -math.inf
        if folder is not None:
            self.metrics = Metrics(folder.metrics)
            self.metrics.truncate(progress.step, progress.validated)
            names = dict(project=settings.wandb_project, name=settings.name, group="continued")
            names |= dict(tags=[settings.method], config=settings.to_dict())
            try:
                self.metrics.wandb = start_wandb(settings.wandb, folder=folder.path, run_id=progress.wandb_id, **names)
            except ValueError:
                folder.discard()
                raise
            if self.metrics.wandb:
                progress.wandb_id = self.metrics.wandb.id

    def print(self, text: str):
        """Write a line (or more) on the console and in log.txt."""
        if self.folder is not None:
            print(text, flush=True)
            self.folder.log(text)

    def begin(self, data: dict, model: WithLoss, compile_note: str, scores: dict):
        """Write what is about to run, and the code that runs it. data: of data.json; scores: of the model as it is."""
        settings, world = self.settings, self.world
        if self.folder is not None:
            self.folder.write_json("config.json", settings.to_dict())
            self.folder.write_json("data.json", data)
            places = ("scripts/continue_pretraining/*.py", "scripts/huggingface/*.py", "model/**/*.py")
            self.folder.log_header([path for place in places for path in sorted(ROOT.glob(place))], world.device)
        devices = f"{world.world_size} x {device_name(world.device)}"
        self.print(f"{settings.path}: {settings.model}, {settings.method} {settings.method_options or ''} on {devices}")
        self.print(
            f"{num_parameters(model):,} parameters in {settings.dtype}; {settings.steps} steps of "
            f"{settings.batch_tokens:,} tokens at {settings.train_length}; the update: compile {compile_note}"
        )
        if data["tokens"] > data["distinct_tokens"]:
            self.print(f"warning: there are {data['distinct_tokens']:,} tokens in {settings.data}, read more than once")
        if scores:
            low, high = min(scores["scores_std"]), max(scores["scores_std"])
            words = "after --rescale" if settings.rescale != "no" else "the models do not normalise q and k"
            self.print(f"deviation of the scores, by layer: {low:.2f} to {high:.2f} ({words})")
        if self.progress.step:
            self.print(f"resumed at step {self.progress.step}")

    def step(self, loss: float, grad_norm: float, seconds: float):
        """Write the numbers of a step that took so long."""
        settings, progress = self.settings, self.progress
        progress.seconds += seconds
        self._seconds.append(seconds)
        step, rate = progress.step, settings.batch_tokens / seconds
        if self.folder is not None:
            record = dict(step=step, tokens=step * settings.batch_tokens, train_loss=loss, grad_norm=grad_norm)
            record |= dict(lr=settings.lr, tokens_per_second=round(rate), seconds=round(progress.seconds, 3))
            self.metrics.write(record | dict(peak_memory_mib=peak_memory(self.world.device) >> 20))
        if time.monotonic() - self._last_line > SECONDS_A_LINE:
            self._last_line = time.monotonic()
            left = time_left(self._seconds, settings.steps - step)
            self.print(f"step {step}/{settings.steps}  loss {loss:.4f}  {rate:,.0f} tokens/s{left}")

    def validated(self, record: dict, seconds: float):
        """Write the record of a validation that took so long."""
        if self.folder is not None:
            self.metrics.write(record)
        losses = format_losses(record["val_loss"])
        self.print(f"step {record['step']}/{self.settings.steps}  validation loss {losses}  ({seconds:.1f} s)")

    def finish(self, data: dict, model: WithLoss):
        """Write summary.json, which makes the run a finished one; or end it, where its losses are not finite."""
        settings, progress = self.settings, self.progress
        losses = progress.validation["val_loss"]
        with exit_on_user_error(), fail_together(self.world):
            if not all(map(math.isfinite, losses.values())):
                raise ValueError(f"step {progress.step}: validation loss {losses}: lower --lr")
        if self.folder is None:
            return
        before = next(r for r in read_metrics(self.folder.metrics) if "val_loss" in r and r["step"] == 0)
        keys = ("name", "model", "method", "method_options", "rescale", "train_length", "lr", "dtype", "steps")
        summary = {key: getattr(settings, key) for key in keys}
        summary |= dict(
            val_loss=losses, val_loss_before=before["val_loss"], val_tokens=progress.validation["val_tokens"]
        )
        summary |= dict(scores_std_before=before.get("scores_std"), tokens=data["tokens"], data=data["train"])
        summary |= dict(validation=data["validation"], distinct_tokens=data["distinct_tokens"])
        rate = round(settings.steps * settings.batch_tokens / progress.seconds) if progress.seconds else None
        summary |= dict(seconds=round(progress.seconds, 3), tokens_per_second=rate, parameters=num_parameters(model))
        self.folder.write_json("summary.json", summary)

    def close(self):
        """End the mirror, and let another process use the folder."""
        if self.folder is not None:
            if self.metrics.wandb:
                self.metrics.wandb.finish()
            self.folder.close()


def num_parameters(model: WithLoss) -> int:
    return sum(p.numel() for p in model.parameters())
