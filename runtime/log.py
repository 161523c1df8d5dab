"""Reports the progress of a run on the console, in log.txt and metrics.jsonl, and in wandb."""

import datetime
import itertools
import math
import platform
import statistics
import time
from pathlib import Path

import numpy
import torch

from configs.config import Config
from data.shards import read_manifest
from measure.flops import training_flops_per_token
from model.gpt import GPT, Plans
from runtime.checkpoint import Progress
from runtime.device import device_name, peak_flops, peak_memory
from runtime.metrics import Metrics, finish_mirror, start_mirror
from runtime.processes import World
from runtime.run_folder import RunFolder, git_commit

ROOT = Path(__file__).parents[1]
SECONDS_A_LINE = 10  # of training, between lines of log.txt


class RunLog:
    """Writes the log and the metrics of a run on rank 0. The other ranks only count seconds and skipped steps.

    The device must not wait for the host. So `step` starts to copy a step's numbers to the host, and the next call of
    `step` or `flush` writes them.
    """

    def __init__(self, config: Config, world: World, folder: RunFolder | None, progress: Progress, dtype: torch.dtype):
        """Drop the records of steps that will be repeated, and start the mirror. The log updates `progress`."""
        self.config, self.world, self.folder, self.progress = config, world, folder, progress
        self.peak = peak_flops(world.device, dtype)  # FLOP/s
        self.flops_per_token = training_flops_per_token(config)
        self._pending = None  # step, learning rates, numbers (still being copied), copy's event, time of the call
        self._step_seconds: list[float] = []
        self._compiled: set[int] = set()  # sequence lengths that this process has trained on
        self._last_line, self._clock = -math.inf, time.monotonic()
        if folder is None:
            return
        self.metrics = Metrics(folder.metrics)
        self.metrics.truncate(progress.step)
        self.metrics.mirror = start_mirror(
            config.wandb, folder=folder.path, run_id=progress.wandb_id, project=config.wandb_project, name=config.name,
            group=config.group or None, config=dict(vars(config)),
            tags=[tag[:64] for tag in (config.method, *config.tags)],  # wandb refuses longer ones
        )  # fmt: skip
        progress.wandb_id = getattr(self.metrics.mirror, "id", None) or progress.wandb_id

    def print(self, text: str):
        """Write one or more lines to the console and to log.txt."""
        if self.folder is not None:
            print(text, flush=True)  # without flush, a killed run of a sweep would lose its last lines of NAME.log
            self.folder.log(text)

    def restart_clock(self):
        """Start timing the next step now, so that validations and checkpoints do not count as training."""
        self._clock = time.monotonic()

    def describe(self, data: dict, text_tokens: int, model: GPT, plans: Plans, compile_note: str):
        """Write configuration, versions and source code to the folder, and a summary to the console. data: data.json"""
        config, world, folder = self.config, self.world, self.folder
        if folder is None:
            return
        folder.write_json("config.json", vars(config))
        folder.write_json("data.json", data)
        sources = [ROOT / "train_gpt.py", *sorted(ROOT.glob("model/**/*.py")), *sorted(ROOT.glob("optim/*.py"))]
        device = device_name(world.device)
        folder.log(f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}")
        folder.log(f"device: {device}\ncommit: {git_commit(ROOT) or 'unknown'}")
        folder.log(f"started: {datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')}")
        for source in sources:
            folder.log(f"==== {source} ====\n{source.read_text(encoding='utf-8')}")
        folder.log("=" * 100)
        options = "".join(f", {option} {value}" for option, value in config.method_options.items())
        self.print(f"run folder: {folder.path}\ndevices: {world.world_size} x {device}")
        self.print(f"model: {num_parameters(model):,} parameters, attention method {config.method}{options}")
        lengths = ", ".join(map(str, config.train_lengths))
        self.print(f"training: {config.steps} steps of {config.batch_tokens:,} tokens, in sequences of {lengths}")
        self.print(f"data: {data['tokens']:,} tokens, {data['tokens'] / text_tokens:.2f} epochs of {config.data_dir}")
        manifest, stretches = read_manifest(config.data_dir) or {}, config.length_schedule
        rows = manifest.get("copy_rows", {}).get("row_lengths", [])
        ends = itertools.accumulate(steps * config.batch_tokens for steps in stretches[1::2])
        sequences = [*map(list, zip(stretches[::2], ends)), [config.train_length, None]]
        if rows and rows != sequences:
            self.print(f"The copy rows fit other sequences: {rows} (tokens, end in the text), not {sequences}.")
        for backend in dict.fromkeys(f"attention by {plan.backend}: {plan.why}" for plan in plans):
            self.print(backend)
        self.print(f"computation in {str(model.dtype).removeprefix('torch.')}, torch.compile {compile_note}")
        if compile_note == "on":
            self.print("The first step of each length compiles the model, which takes a minute or more.")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, step: int, learning_rates: dict[str, float], numbers: torch.Tensor) -> str | None:
        """Start to copy this step's loss and gradient norm, (2,) on the device, and write the previous step's.

        Return the problem of the previous step, as flush does.
        """
        on_host = numbers.to("cpu", non_blocking=True)  # from CUDA into pinned memory
        arrival = torch.cuda.Event() if numbers.is_cuda else None
        if arrival is not None:
            arrival.record()
        now = time.monotonic()
        problem = self.flush()
        self._pending = step, learning_rates, on_host, arrival, now
        return problem

    def flush(self) -> str | None:
        """Write the numbers of the last step, unless they are written.

        Return the problem if they are not finite and on_nonfinite is "stop". With "skip", count the skipped step.
        """
        if self._pending is None:
            return None
        (step, learning_rates, numbers, arrival, now), self._pending = self._pending, None
        if arrival is not None:
            arrival.synchronize()
            now = time.monotonic()
        loss, grad_norm = numbers.tolist()
        elapsed, self._clock = now - self._clock, now
        config, progress = self.config, self.progress
        if not math.isfinite(loss + grad_norm):
            problem = f"step {step} has loss {loss} and gradient norm {grad_norm}"
            if config.on_nonfinite == "stop":
                return problem
            progress.skipped += 1
            self.print(f"{problem}. The step is skipped, {progress.skipped} so far.")
        length = config.length_at(step - 1)
        if length in self._compiled:  # the first step of a length compiles the model
            progress.seconds += elapsed
        self._compiled.add(length)
        self._step_seconds.append(elapsed)
        rate = config.batch_tokens / elapsed
        record = {"step": step, "tokens": step * config.batch_tokens, "train_loss": loss, "grad_norm": grad_norm}
        record |= {"lr": learning_rates, "tokens_per_second": round(rate), "seconds": round(progress.seconds, 3)}
        record["peak_memory_mib"] = peak_memory(self.world.device) >> 20
        if self.peak:
            record["mfu"] = round(rate * self.flops_per_token / (self.peak * self.world.world_size), 4)
        if progress.skipped:
            record["skipped"] = progress.skipped
        if self.folder is not None:
            self.metrics.write(record)
        if time.monotonic() - self._last_line > SECONDS_A_LINE:
            self._last_line = time.monotonic()
            speed = f"{rate:,.0f} tokens/s"
            if len(self._step_seconds) > 2:
                minutes = (config.steps - step) * statistics.median(self._step_seconds) / 60
                speed += f"  {minutes:.1f} min left"
            self.print(f"step {step}/{config.steps}  training loss {loss:.4f}  {speed}")
        return None

    @property
    def tokens_per_second(self) -> int | None:
        """Return the median rate over the steps since this process started, or None before its first step."""
        if not self._step_seconds:
            return None
        return round(self.config.batch_tokens / statistics.median(self._step_seconds))

    # ---- validations, and the end ------------------------------------------------------------------------------------

    def validation(self, record: dict):
        """Write the record of a validation."""
        if self.folder is not None:
            self.metrics.write(record)
        at, seconds = f"step {record['step']}/{self.config.steps}", record["val_seconds"]
        losses = ", ".join(f"{loss:.4f} at length {length}" for length, loss in record["val_loss"].items())
        self.print(f"{at}  validation loss {losses}  ({seconds:.1f} s)")

    def close(self):
        """Finish the wandb or trackio run."""
        if self.folder is not None and self.metrics.mirror:
            finish_mirror(self.metrics.mirror, log=self.print)


def num_parameters(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())
