"""What a run says: on the console, in log.txt and metrics.jsonl, in wandb and in the progress bar."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from configs.config import Config, config_hash
from data.loader import sequences_of
from data.shards import data_command
from errors import exit_on_user_error
from model.attention import Plan, sdpa
from model.gpt import GPT, Plans
from runtime.copy_gain import format_gains
from runtime.device import AsyncScalars, device_name, peak_memory
from runtime.flops import training_flops_per_token, validation_share
from runtime.metrics import Metrics, finish_wandb, start_wandb
from runtime.processes import World, fail_together
from runtime.progress import Progress
from runtime.run_folder import RunFolder
from runtime.validation import format_losses

ROOT = Path(__file__).parents[1]
SECONDS_A_LINE = 10  # of training, between lines of log.txt
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # with our own estimate of the time left


class RunLog:
    """What the main process writes about a run; the others keep count with it and write nothing.

    A step's loss and gradient norm are read when the device is already busy with the next step, so that it never waits
    for the host: `step_started` takes them, and the next call of it, or of `flush`, writes them.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        folder: RunFolder | None,
        progress: Progress,
        *,
        peak: tuple[float, str] | None,
        explain: Callable[[int, str], str],
    ):
        """Begin, or go on from `progress`. folder: None on all processes but the main one. peak: the FLOP/s that MFU is
        a share of, and where that number comes from. explain: what to say of a step that was not finite (its number,
        what was seen); all processes call it.

        Raise ValueError when wandb refuses to start; a folder made for this run is then removed, so that the corrected
        command finds none in its way.
        """
        self.config, self.world, self.folder, self.progress = config, world, folder, progress
        self.peak, self.explain = peak, explain
        self.flops_per_token = training_flops_per_token(config)
        self._pending: tuple[int, dict[str, float], AsyncScalars] | None = None
        self._step_seconds: list[float] = []
        self._last_line, self._clock = -math.inf, time.monotonic()
        if folder is not None:
            self.metrics = Metrics(folder.metrics)
            self.metrics.truncate(progress.step, progress.validated)
            names = dict(project=config.wandb_project, name=config.name, group=config.group or None)
            names |= dict(tags=[config.method, *config.tags], config=config.to_dict())
            try:
                self.metrics.wandb = start_wandb(config.wandb, folder=folder.path, run_id=progress.wandb_id, **names)
            except ValueError:
                folder.discard()
                raise
            if self.metrics.wandb:
                progress.wandb_id = self.metrics.wandb.id
        hidden = None if world.is_main else True
        self._bar = tqdm(total=config.steps, initial=progress.step, bar_format=BAR, disable=hidden)

    def print(self, text: str):
        """Write a line (or more) on the console and in log.txt."""
        if self.folder is not None:
            tqdm.write(text)
            sys.stdout.flush()  # a sweep keeps these lines in a file: the last ones of a run that is killed too
            self.folder.log(text)

    def restart_clock(self):
        """Let the next step's time begin now, after work that is no training."""
        self._clock = time.monotonic()

    def begin(self, data: dict, distinct_tokens: int, model: GPT, plan: Plans, micro_batch: int, compile_note: str):
        """Write what is about to run, and the code that runs it. data: of data.json."""
        config, world, folder = self.config, self.world, self.folder
        if folder is not None:
            folder.write_json("config.json", config.to_dict())
            folder.write_json("data.json", data)
            sources = [ROOT / "train_gpt.py", *sorted(ROOT.glob("model/**/*.py")), *sorted(ROOT.glob("optim/*.py"))]
            folder.log_header(sources, world.device)
        path, devices = Path(config.runs_dir) / config.name, f"{world.world_size} x {device_name(world.device)}"
        self.print(f"{path}: {config.method} {config.method_options or ''} on {devices}")
        own = sequences_of(config.batch_tokens, config.train_length, world.data_rank, world.data_size)
        self.print(
            f"{num_parameters(model):,} parameters; {config.steps} steps ({describe_schedule(config)}) of "
            f"{config.batch_tokens:,} tokens, {len(own) // micro_batch} x {micro_batch} sequences of "
            f"{config.train_length} a process; {self.flops_per_token / 1e6:,.1f} MFLOP a token"
        )
        if config.length_schedule:
            pairs = zip(config.length_schedule[::2], config.length_schedule[1::2])
            first = ", then ".join(f"{steps} steps of {length}-token sequences" for length, steps in pairs)
            self.print(f"length schedule: {first}, then {config.train_length}-token sequences")
        epochs, there = data["tokens"] / distinct_tokens, f"{distinct_tokens:,} distinct ones in {config.data_dir}"
        self.print(f"{data['tokens']:,} tokens of {there}: {epochs:.2f} epochs")
        if epochs > 1:
            more = f"more comes with `{data_command(config.data_dir, data['tokens'])}`"
            self.print(f"warning: the text is shorter than the run and is read {epochs:.2f} times: {more}")
        dtype = str(model.dtype).removeprefix("torch.")
        self.print(f"{dtype}; compile {compile_note}; {describe_backends(plan, model)}")
        for start, method in list(config.method_starts.items())[1:]:
            self.print(f"from step {start} on, {method} takes the place of {config.method}, with the same weights")
        if self.peak:
            self.print(f"MFU of {self.peak[0]:.3g} FLOP/s ({self.peak[1]})")
        share = f"validation profile {config.val_profile}: {validation_share(config):.1%} of the FLOPs of training"
        self.print(share + (f"; resumed at step {self.progress.step}" if self.progress.step else ""))

    def method_started(self, step: int, plan: Plans, model: GPT):
        """Write that another attention method computes from this step on, whose time begins now."""
        self.restart_clock()
        self.print(f"step {step}/{self.config.steps}  {self.config.method_at(step)}; {describe_backends(plan, model)}")

    # ---- steps -------------------------------------------------------------------------------------------------------

    def step_started(self, step: int, learning_rates: dict[str, float], numbers: torch.Tensor):
        """Take the loss and gradient norm, (2,) on the device, of the step under way; write those of the one before."""
        arriving = AsyncScalars(numbers)
        self.flush()
        self._pending = step, learning_rates, arriving

    def flush(self):
        """Write the numbers of the last step, if that has not been done. Where they are not finite, count it as skipped
        or (on_nonfinite "stop") explain it and end the run."""
        if self._pending is None:
            return
        (step, learning_rates, arriving), self._pending = self._pending, None
        (loss, grad_norm), now = arriving.wait()
        elapsed, self._clock = now - self._clock, now
        config, progress = self.config, self.progress
        if not math.isfinite(loss + grad_norm):
            problem = f"step {step}: loss {loss}, gradient norm {grad_norm}"
            if config.on_nonfinite == "stop":
                self._end_run(self.explain(step, problem))
            progress.skipped += 1
            self.print(f"{problem}; skipped, {progress.skipped} so far")
        progress.seconds += elapsed
        self._step_seconds.append(elapsed)
        rate = config.batch_tokens / elapsed
        mfu = rate * self.flops_per_token / (self.peak[0] * self.world.world_size) if self.peak else None
        if self.folder is not None:
            record = dict(step=step, tokens=step * config.batch_tokens, train_loss=loss, grad_norm=grad_norm)
            record |= dict(lr=learning_rates, tokens_per_second=round(rate))
            record |= dict(mfu=round(mfu, 4)) if self.peak else {}
            record |= dict(skipped=progress.skipped) if progress.skipped else {}
            record |= dict(seconds=round(progress.seconds, 3), peak_memory_mib=peak_memory(self.world.device) >> 20)
            self.metrics.write(record)
        line = f"loss {loss:.4f}  {rate:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if self.peak else "")
        line += time_left(self._step_seconds, config.steps - step)
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update()
        if time.monotonic() - self._last_line > SECONDS_A_LINE:
            self._last_line = time.monotonic()
            self.print(f"step {step}/{config.steps}  {line}")

    def _end_run(self, reason: str):
        """End all processes with this line and exit code 2."""
        with exit_on_user_error(), fail_together(self.world):
            raise ValueError(reason)

    # ---- validations, and the end ------------------------------------------------------------------------------------

    def validated(self, record: dict, seconds: float):
        """Write the record of a validation that took so long."""
        if self.folder is not None:
            self.metrics.write(record)
        at = f"step {record['step']}/{self.config.steps}"
        self.print(f"{at}  validation loss {format_losses(record['val_loss'])}  ({seconds:.1f} s)")
        for name, theirs in record.get("val_loss_as", {}).items():
            self.print(f"{at}  the same weights as {name}: {format_losses(theirs)}")
        if "copy_gain" in record:
            self.print(f"{at}  copy gain {format_gains(record['copy_gain'])}")

    def finish(self, data: dict, model: GPT):
        """Write summary.json, which makes the run a finished one; or end it, where its weights are not finite."""
        config, progress = self.config, self.progress
        losses, guessing = progress.validation["val_loss"], math.log(config.vocab_size)
        if not all(map(math.isfinite, losses.values())):
            problem = "the last update made weights that are not finite: lower the learning rates"
            self._end_run(f"step {progress.step}: validation loss {losses}; {problem}")
        if min(losses.values()) >= guessing - 1e-4:
            self.print(
                "warning: the run learned nothing or diverged: its validation loss is not below that of guessing, "
                f"ln(vocab_size) = {guessing:.4f}; lower the learning rates"
            )
        seconds = statistics.median(self._step_seconds) if self._step_seconds else None  # none, if resumed at the end
        summary = dict(
            name=config.name,
            method=config.method,
            train_length=config.train_length,
            val_loss=losses,
            val_loss_as=progress.validation.get("val_loss_as", {}),
            val_tokens=progress.validation["val_tokens"],
            val_profile=config.val_profile,
            steps=config.steps,
            tokens=data["tokens"],
            seconds=round(progress.seconds, 3),
            tokens_per_second=round(config.batch_tokens / seconds) if seconds else None,
            parameters=num_parameters(model),
            config_hash=config_hash(config),
            data=data["train"],
            distinct_tokens=data["distinct_tokens"],
        )
        summary |= {key: value for key, value in progress.validation.items() if key.startswith("copy_")}
        if self.folder is not None:
            self.folder.write_json("summary.json", summary)

    def close(self):
        """End the mirror, and let another process use the folder."""
        self._bar.close()
        if self.folder is not None:
            if self.metrics.wandb:
                finish_wandb(self.metrics.wandb, log=self.print)
            self.folder.close()


def describe_backends(plans: Plans, model: GPT) -> str:
    ways = {}
    for block, plan in zip(model.blocks, plans):
        replacement = block.attention.method.replacement
        plain = replacement is not None and not replacement.uses_softmax
        ways["plain PyTorch" if plain else describe_attention(plan, model.head.device, model.dtype)] = None
    return f"attention by {', and by '.join(ways)}"


def describe_attention(plan: Plan, device: torch.device, dtype: torch.dtype) -> str:
    """Return the backend, with the kernel that PyTorch chooses for it, and why it was chosen."""
    kernel = ""
    if plan.backend == "sdpa":
        kernel = f" {sdpa.chosen_kernel(device, dtype, plan.head_dim, plan.key_length)}"
    return f"{plan.backend}{kernel} ({plan.why})"


def num_parameters(model: GPT) -> int:
    return sum(p.numel() for p in model.parameters())


def describe_schedule(config: Config) -> str:
    anew = f", anew from the switch on, {config.switch_warmup_steps} of warm-up, then cosine"
    return describe_first_schedule(config) + (anew if config.switch_warmup_steps else "")


def describe_first_schedule(config: Config) -> str:
    if config.schedule == "cosine":
        return "cosine"
    warmup = f"the first {config.warmup_steps} of warm-up, " if config.warmup_steps else ""
    return f"{warmup}the last {config.cooldown_steps} of cooldown"


def time_left(step_seconds: list[float], steps: int) -> str:
    """Return the time that so many steps will take, each as long as the last 20 took, for a line of the log; "" until
    five were timed after the first, which is slower."""
    recent = step_seconds[1:][-20:]
    return f"  {statistics.median(recent) * steps / 60:.1f} min left" if len(recent) >= 5 else ""
