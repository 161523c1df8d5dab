"""Reports the progress of a run on the console, in log.txt and metrics.jsonl, and in wandb."""

import dataclasses
import datetime
import math
import platform
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

from configs.config import Config, file_hash
from data.shards import TOKENIZER_FILE, copy_tokenizer
from files import replace_text
from model.attention.plan import Plan
from model.gpt import GPT
from runtime.build import config_of
from runtime.checkpoint import Progress
from runtime.device import device_name, peak_flops, peak_memory
from runtime.metrics import Metrics, finish_mirror, start_mirror
from runtime.processes import World
from runtime.run_folder import RunFolder, git_commit

ROOT = Path(__file__).parents[1]
SECONDS_A_LINE = 10  # of training, between lines of log.txt


class Pending(NamedTuple):
    """A step whose numbers are not written yet."""

    step: int
    learning_rates: dict[str, float]
    numbers: torch.Tensor  # loss and gradient norm, (2,), on the way to the host
    arrival: torch.cuda.Event | None  # of the numbers, None on a CPU
    called: float  # time of the call


@dataclasses.dataclass(eq=False)
class RunLog:
    """Writes the log and the metrics of a run on rank 0. The other ranks only count seconds and skipped steps.

    The device must not wait for the host. So `step` starts to copy a step's numbers to the host, and the next call of
    `step` or `flush` writes them. A new log drops the records of steps that will be repeated, and starts the mirror.
    """

    config: Config
    world: World
    folder: RunFolder | None
    progress: Progress  # the log updates it
    dtype: torch.dtype
    flops_per_token: int

    def __post_init__(self):
        self.peak = peak_flops(self.world.device, self.dtype)  # FLOP/s
        self._pending = None  # or a Pending
        self._step_seconds = []
        self._trained_lengths = set()  # by this process
        self._last_line = -math.inf
        self._clock = time.monotonic()
        if self.folder is not None:
            self._open_metrics()

    def _open_metrics(self):
        config, folder = self.config, self.folder
        self.metrics = Metrics(folder.metrics)
        self.metrics.truncate(self.progress.step)
        identity = folder.path / "wandb_id"  # written before the first checkpoint, so a killed run keeps its id
        self.metrics.mirror = start_mirror(
            config.wandb,
            folder=folder.path,
            say=self.print,
            run_id=identity.read_text() if identity.exists() else None,
            project=config.wandb_project,
            name=config.name,
            group=config.group or None,
            config=dict(vars(config)),
            tags=[config.method[:64]],  # wandb refuses longer ones
        )
        if run_id := getattr(self.metrics.mirror, "id", None):
            replace_text(identity, run_id)

    def print(self, text: str):
        """Write one or more lines to the console and to log.txt."""
        if self.folder is not None:
            print(text, flush=True)  # without flush, a killed run of a sweep would lose its last lines of NAME.log
            self.folder.log(text)

    def restart_clock(self):
        """Start timing the next step now, so that validations and checkpoints do not count as training."""
        self._clock = time.monotonic()

    def describe(self, data: dict, text_tokens: int, model: GPT, plan: Plan):
        """Write configuration, versions and source code to the folder, and a summary to the console.

        data: the content of data.json. text_tokens: of the whole training text. plan: for the training length.
        """
        config, folder = self.config, self.folder
        if folder is None:
            return

        # 1. To the folder alone.
        device = device_name(self.world.device)
        fields = vars(config)
        folder.write_json("config.json", fields | {"hash": file_hash(config_of(fields), fields)})
        folder.write_json("data.json", data)
        if data["tokenizer"] != "gpt2":  # so that the run can write text without its data
            copy_tokenizer(Path(config.data_dir) / TOKENIZER_FILE, folder.path)
        folder.log(f"python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}")
        folder.log(f"device: {device}")
        folder.log(f"commit: {git_commit(ROOT) or 'unknown'}")
        folder.log(f"started: {datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')}")
        for source in [ROOT / "train_gpt.py", *sorted(ROOT.glob("model/**/*.py")), *sorted(ROOT.glob("optim/*.py"))]:
            folder.log(f"==== {source} ====\n{source.read_text(encoding='utf-8')}")
        folder.log("=" * 100)

        # 2. The run: model, sequences, data.
        options = "".join(f", {option} {value}" for option, value in config.method_options.items())
        lengths = ", ".join(map(str, config.train_lengths))
        epochs = data["tokens"] / text_tokens
        self.print(f"run folder: {folder.path}")
        self.print(f"devices: {self.world.world_size} x {device}")
        self.print(f"model: {num_parameters(model):,} parameters, attention method {config.method}{options}")
        self.print(f"training: {config.steps} steps of {config.batch_tokens:,} tokens, in sequences of {lengths}")
        # A run with --init_from begins after that run's tokens, and may read the first ones again.
        start = f"from its token {self.progress.first_token % text_tokens:,} of {text_tokens:,} on"
        self.print(f"data: {data['tokens']:,} tokens, {epochs:.2f} epochs of {config.data_dir}, {start}")

        # 3. The code that computes it.
        for backend in dict.fromkeys(f"attention by {layer.backend.name}: {layer.why}" for layer in plan.layers):
            self.print(backend)
        self.print(f"computation in {str(model.dtype).removeprefix('torch.')}, torch.compile {model.compile_note}")
        if model.compile_note == "on":
            self.print("The first step of each length compiles the model, which takes a minute or more.")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, step: int, learning_rates: dict[str, float], numbers: torch.Tensor) -> str | None:
        """Start to copy this step's loss and gradient norm, (2,) on the device, and write the previous step's.

        Return the problem of the previous step, as flush does.
        """
        on_host = numbers.to("cpu", non_blocking=True)  # from CUDA into pinned memory
        arrival = None
        if numbers.is_cuda:
            arrival = torch.cuda.Event()
            arrival.record()
        called = time.monotonic()
        problem = self.flush()
        self._pending = Pending(step, learning_rates, on_host, arrival, called)
        return problem

    def flush(self) -> str | None:
        """Write the numbers of the last step, unless they are written.

        Return the problem if they are not finite and on_nonfinite is "stop". With "skip", count the skipped step.
        """
        # 1. Wait for the numbers.
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        now = pending.called
        if pending.arrival is not None:
            pending.arrival.synchronize()
            now = time.monotonic()
        seconds = now - self._clock
        self._clock = now

        # 2. Find out whether the step was skipped.
        loss, grad_norm = pending.numbers.tolist()
        if not math.isfinite(loss + grad_norm):
            problem = f"step {pending.step} has loss {loss} and gradient norm {grad_norm}"
            if self.config.on_nonfinite == "stop":
                return problem
            self.progress.skipped += 1
            self.print(f"{problem}. The step is skipped, {self.progress.skipped} so far.")

        # 3. Count its time, but not as training if it compiled the model, as the first step of a length does.
        length = self.config.length_at(pending.step - 1)
        if length in self._trained_lengths:
            self.progress.seconds += seconds
        self._trained_lengths.add(length)
        self._step_seconds.append(seconds)

        # 4. Write.
        if self.folder is not None:
            self.metrics.write(self._record(pending, loss, grad_norm, seconds))
        if time.monotonic() - self._last_line > SECONDS_A_LINE:
            self._last_line = time.monotonic()
            self._print_step(pending.step, loss, seconds)
        return None

    def _record(self, pending: Pending, loss: float, grad_norm: float, seconds: float) -> dict:
        """Return the record of a step for metrics.jsonl."""
        rate = self.config.batch_tokens / seconds
        record = {
            "step": pending.step,
            "tokens": pending.step * self.config.batch_tokens,
            "train_loss": loss,
            "grad_norm": grad_norm,
            "lr": pending.learning_rates,
            "tokens_per_second": round(rate),
            "seconds": round(self.progress.seconds, 3),
            "peak_memory_mib": peak_memory(self.world.device) >> 20,
        }
        if self.peak:
            record["mfu"] = round(rate * self.flops_per_token / (self.peak * self.world.world_size), 4)
        if self.progress.skipped:
            record["skipped"] = self.progress.skipped
        return record

    def _print_step(self, step: int, loss: float, seconds: float):
        """Print a line with loss, speed and the time that is left."""
        line = f"step {step}/{self.config.steps}  training loss {loss:.4f}"
        line += f"  {self.config.batch_tokens / seconds:,.0f} tokens/s"
        if len(self._step_seconds) > 2:
            minutes = (self.config.steps - step) * statistics.median(self._step_seconds) / 60
            line += f"  {minutes:.1f} min left"
        self.print(line)

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
        losses = ", ".join(f"{loss:.4f} at length {length}" for length, loss in record["val_loss"].items())
        seconds = record["val_seconds"]
        self.print(f"step {record['step']}/{self.config.steps}  validation loss {losses}  ({seconds:.1f} s)")
        for length, loss in record.get("val_loss_own", {}).items():
            share = record["val_tokens_own"][length] / record["val_tokens"][length]
            context = f"more than {self.config.train_length} tokens of their own document before them"
            self.print(f"at length {length}, {share:.1%} of the tokens have {context}: loss {loss:.4f}")

    def close(self):
        """Finish the wandb or trackio run."""
        if self.folder is not None and self.metrics.mirror:
            finish_mirror(self.metrics.mirror, log=self.print)


def num_parameters(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())
