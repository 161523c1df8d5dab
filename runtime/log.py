"""What a run reports: on the console, in log.txt and metrics.jsonl, in wandb and in the progress bar."""

import math
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from configs.config import Config
from data.loader import sequences_of
from model.attention import sdpa
from model.gpt import GPT, Plans
from runtime.device import AsyncScalars, device_name, peak_flops, peak_memory
from runtime.flops import training_flops_per_token, validation_share
from runtime.metrics import Metrics, finish_wandb, start_wandb
from runtime.processes import World
from runtime.run_folder import RunFolder
from runtime.validation import format_losses

ROOT = Path(__file__).parents[1]
SECONDS_A_LINE = 10  # of training, between lines of log.txt
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # with our own estimate of the time left


class RunLog:
    """What the main process writes about a run. The other ranks keep count and write nothing.

    A step's loss and gradient norm are read only when the device is busy with the next step, so that the device never
    waits for the host: `step` takes them, and the next call of `step` or `flush` writes them.
    """

    def __init__(self, config: Config, world: World, folder: RunFolder | None, dtype: torch.dtype):
        self.config, self.world, self.folder = config, world, folder
        self.peak = peak_flops(world.device, dtype)
        self.flops_per_token = training_flops_per_token(config)
        self.metrics = Metrics(folder.metrics) if folder else None
        self.seconds, self.skipped = 0.0, 0  # training time; steps that were not finite and were skipped
        self._pending: tuple[int, dict[str, float], AsyncScalars] | None = None
        self._step_seconds: list[float] = []
        self._last_line, self._clock = -math.inf, time.monotonic()
        self._bar = tqdm(total=config.steps, bar_format=BAR, disable=None if world.is_main else True)

    def start(self, step: int, wandb_id: str | None) -> str | None:
        """Drop the records that will be written again, start the mirror, and return its id."""
        self._bar.update(step - self._bar.n)
        if self.folder is None:
            return wandb_id
        config = self.config
        self.metrics.truncate(step)
        self.metrics.wandb = start_wandb(
            config.wandb,
            folder=self.folder.path,
            run_id=wandb_id,
            project=config.wandb_project,
            name=config.name,
            group=config.group or None,
            tags=[config.method, *config.tags],
            config=config.to_dict(),
        )
        return getattr(self.metrics.wandb, "id", None) or wandb_id

    def print(self, text: str):
        """Write a line (or more) on the console and in log.txt."""
        if self.folder is not None:
            tqdm.write(text)
            sys.stdout.flush()  # a sweep redirects stdout to a file, which must keep the last lines of a killed run
            self.folder.log(text)

    def restart_clock(self):
        """Start the next step's time now: a validation or a checkpoint is no training."""
        self._clock = time.monotonic()

    def describe(self, data: dict, distinct_tokens: int, model: GPT, plans: Plans, compile_note: str):
        """Write what is about to run, and the code that runs it. data: of data.json."""
        config, world, folder = self.config, self.world, self.folder
        if folder is not None:
            folder.write_json("config.json", config.to_dict())
            folder.write_json("data.json", data)
            sources = [ROOT / "train_gpt.py", *sorted(ROOT.glob("model/**/*.py")), *sorted(ROOT.glob("optim/*.py"))]
            folder.log_header(sources, world.device)
        path, devices = Path(config.runs_dir) / config.name, f"{world.world_size} x {device_name(world.device)}"
        self.print(f"{path}: {config.method} {config.method_options or ''} on {devices}")
        sequences = len(sequences_of(config.batch_tokens, config.train_length, world.rank, world.world_size))
        self.print(
            f"{num_parameters(model):,} parameters; {config.steps} steps ({describe_schedule(config)}) of "
            f"{config.batch_tokens:,} tokens, {sequences} sequences of {config.train_length} a process; "
            f"{self.flops_per_token / 1e6:,.1f} MFLOP a token"
        )
        if config.length_schedule:
            pairs = zip(config.length_schedule[::2], config.length_schedule[1::2])
            first = ", then ".join(f"{steps} steps of {length}-token sequences" for length, steps in pairs)
            self.print(f"length schedule: {first}, then {config.train_length}-token sequences")
        epochs = data["tokens"] / distinct_tokens
        self.print(
            f"{data['tokens']:,} tokens, {distinct_tokens:,} distinct ones in {config.data_dir}: {epochs:.2f} epochs"
        )
        if epochs > 1:
            self.print(f"warning: the text is shorter than the run and is read {epochs:.2f} times (docs/data.md)")
        dtype = str(model.dtype).removeprefix("torch.")
        backends = f"; {describe_backends(plans, model)}" if plans else ""  # other models plan attention themselves
        self.print(f"{dtype}; compile {compile_note}{backends}")
        if self.peak:
            self.print(f"MFU of {self.peak[0]:.3g} FLOP/s ({self.peak[1]})")
        share = f"{validation_share(config):.1%} of the FLOPs of training"
        self.print(f"validation profile {config.val_profile}: {share}")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step(self, step: int, learning_rates: dict[str, float], numbers: torch.Tensor) -> str | None:
        """Take loss and gradient norm, (2,) on the device, of the step under way; write those of the step before.

        Return what flush returns.
        """
        arriving = AsyncScalars(numbers)
        problem = self.flush()
        self._pending = step, learning_rates, arriving
        return problem

    def flush(self) -> str | None:
        """Write the numbers of the last step, if that has not been done.

        Return what is wrong with them if they are not finite and the run is to stop; count a skipped step otherwise.
        """
        if self._pending is None:
            return None
        (step, learning_rates, arriving), self._pending = self._pending, None
        (loss, grad_norm), now = arriving.wait()
        elapsed, self._clock = now - self._clock, now
        config = self.config
        if not math.isfinite(loss + grad_norm):
            problem = f"step {step}: loss {loss}, gradient norm {grad_norm}"
            if config.on_nonfinite == "stop":
                return problem
            self.skipped += 1
            self.print(f"{problem}; skipped, {self.skipped} so far")
        self.seconds += elapsed
        self._step_seconds.append(elapsed)
        rate = config.batch_tokens / elapsed
        mfu = rate * self.flops_per_token / (self.peak[0] * self.world.world_size) if self.peak else None
        if self.folder is not None:
            record = {"step": step, "tokens": step * config.batch_tokens, "train_loss": loss, "grad_norm": grad_norm}
            record |= {"lr": learning_rates, "tokens_per_second": round(rate)}
            record |= {"mfu": round(mfu, 4)} if self.peak else {}
            record |= {"skipped": self.skipped} if self.skipped else {}
            record |= {"seconds": round(self.seconds, 3), "peak_memory_mib": peak_memory(self.world.device) >> 20}
            self.metrics.write(record)
        line = f"loss {loss:.4f}  {rate:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if self.peak else "")
        line += time_left(self._step_seconds, config.steps - step)
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update()
        if time.monotonic() - self._last_line > SECONDS_A_LINE:
            self._last_line = time.monotonic()
            self.print(f"step {step}/{config.steps}  {line}")
        return None

    @property
    def tokens_per_second(self) -> int | None:
        """Return the median rate of this process's steps; None before the first."""
        if not self._step_seconds:
            return None
        return round(self.config.batch_tokens / statistics.median(self._step_seconds))

    # ---- validations, and the end ------------------------------------------------------------------------------------

    def validation(self, record: dict):
        """Write the record of a validation."""
        if self.folder is not None:
            self.metrics.write(record)
        at = f"step {record['step']}/{self.config.steps}"
        seconds = f"({record.get('val_seconds', 0):.1f} s)"
        self.print(f"{at}  validation loss {format_losses(record['val_loss'])}  {seconds}")
        for name, losses in record.get("val_loss_as", {}).items():
            self.print(f"{at}  the same weights as {name}: {format_losses(losses)}")
        for kind, gains in record.get("copy_gain", {}).items():
            gaps = ", ".join(f"{gain:.2f} at {gap}" for gap, gain in gains.items())
            self.print(f"{at}  copy gain, {kind} spans: {gaps}")

    def close(self):
        """End the mirror and the progress bar."""
        self._bar.close()
        if self.folder is not None and self.metrics.wandb:
            finish_wandb(self.metrics.wandb, log=self.print)


def describe_backends(plans: Plans, model: GPT) -> str:
    """Return how the layers' attention runs, each way once."""
    ways = {}
    for block, plan in zip(model.blocks, plans):
        replacement = block.attention.method.replacement
        plain = replacement is not None and not replacement.uses_softmax
        ways["plain PyTorch" if plain else describe_attention(plan, model.head.device, model.dtype)] = None
    return f"attention by {', and by '.join(ways)}"


def describe_attention(plan, device: torch.device, dtype: torch.dtype) -> str:
    """Return the backend, with the kernel that PyTorch chooses for it, and why it was chosen."""
    kernel = ""
    if plan.backend == "sdpa":
        kernel = f" {sdpa.chosen_kernel(device, dtype, plan.head_dim, plan.key_length)}"
    return f"{plan.backend}{kernel} ({plan.why})"


def num_parameters(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())


def describe_schedule(config: Config) -> str:
    if config.schedule == "cosine":
        return "cosine"
    warmup = f"the first {config.warmup_steps} of warm-up, " if config.warmup_steps else ""
    return f"{warmup}the last {config.cooldown_steps} of cooldown"


def time_left(step_seconds: list[float], steps: int) -> str:
    """Return the time that so many steps will take, for a line of the log, or "" before the sixth step.

    The estimate is the median of the last 20 steps. The first step is slower and does not count.
    """
    recent = step_seconds[1:][-20:]
    return f"  {statistics.median(recent) * steps / 60:.1f} min left" if len(recent) >= 5 else ""
