"""Manages a run around its training steps: folder, lock, log, wandb, signals and checkpoints.

train_gpt.py makes four calls: `restore`, `save_or_stop`, `validate_or_stop` and `log_step`.
"""

import dataclasses
import gc
import math
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from configs.config import Config, describe_differences
from data.shards import TokenStream, tokenizer_of
from errors import UserError, require
from files import replace_text
from measure.validation import Validation
from model.gpt import GPT, Plans
from model.scores import calibrate
from optim.sharded import Optimizers
from runtime.build import calibration_tokens, config_of
from runtime.checkpoint import Progress, latest_checkpoint, load_checkpoint, load_newest, load_weights, save_checkpoint
from runtime.device import rng_state, set_rng_state
from runtime.log import RunLog, num_parameters
from runtime.processes import World, describe_failure
from runtime.replicas import require_same_parameters
from runtime.run_folder import make_folder
from runtime.signals import Stopped, StopRequest, exit_code


class Run:
    """A context manager for the training loop. It leaves the run folder in order, however the loop ends.

    End of training: summary.json is written. Signal: a checkpoint is saved, and the exit code means "try again"
    (signals.py). Full disk, lack of memory or a user's mistake: one line and exit code 2. Lost rank: one line and exit
    code 1. Other exceptions pass.
    """

    def __init__(
        self, config: Config, world: World, model: GPT, optimizers: Optimizers, plans: dict[int, Plans],
        train_text: TokenStream, val_text: TokenStream, compile_note: str,
    ):  # fmt: skip
        """plans: by training length. compile_note: "on", or "off" and why. All ranks call this.

        Raise ValueError as RunFolder does, and if only some ranks can compile.
        """
        notes = world.gather(compile_note)
        other = next((rank for rank, note in enumerate(notes) if (note == "on") != (notes[0] == "on")), 0)
        problem = f"torch.compile is {notes[0]} on rank 0, and {notes[other]} on rank {other}"
        require(other == 0, f"{problem}. Repair the machine where it is off, or use --compile off.")
        self.config, self.world, self.model, self.optimizers = config, world, model, optimizers
        self.plans, self.train_text, self.compile_note = plans, train_text, compile_note
        self.path, self.progress = Path(config.runs_dir) / config.name, Progress()
        run_tokens = config.steps * config.batch_tokens
        self.data = {
            "train": train_text.fingerprint(run_tokens),
            "validation": val_text.fingerprint(config.val_tokens),
            "tokenizer": tokenizer_of(config.data_dir),
            "tokens": run_tokens,
            "distinct_tokens": min(run_tokens, len(train_text)),
        }
        self.stop = StopRequest()
        self.folder = self.log = self.last_validation = None
        self.finished = self.stopped = False
        self.saved_step = 0
        if folder := make_folder(config.runs_dir, config.name, config.resume, world):
            self.folder, self.stop.mark = folder, folder.mark_interrupted

    def __enter__(self) -> "Run":
        self.stop.__enter__()
        return self

    # ---- the four calls ----------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Load the newest undamaged checkpoint, or the weights of --init_from, and start the log.

        Return the step to begin with, or steps + 1 if the run is finished. All ranks call this. Raise ValueError if
        the checkpoint has another configuration or other data.
        """
        config, world = self.config, self.world
        checkpoint, state, damaged = load_newest(self.path / "checkpoints", world)
        if checkpoint is not None:
            self._load(checkpoint, state)
        elif config.init_from:
            self._initialise_from(Path(config.init_from))
        self.finished = (self.path / "summary.json").exists()
        if self.finished:
            if world.is_main:
                print(f"{self.path} is finished. Read its summary.json.")
            return config.steps + 1
        self.log = RunLog(config, world, self.folder, self.progress, self.model.dtype)  # the run has begun
        self.log.describe(
            self.data, len(self.train_text), self.model, self.plans[config.train_length], self.compile_note
        )
        for path in damaged:
            if world.is_main:
                path.rename(path.with_name(path.name + ".damaged"))
            self.log.print(f"{path} is damaged, so the run continues from {checkpoint.name}.")
        if self.progress.step:
            self.log.print(f"resumed at step {self.progress.step}")
        self.saved_step = self.progress.step if config.steps or not config.init_from else -1  # -1: saves step 0
        return self.progress.step

    def save_or_stop(self, step: int) -> bool:
        """Save a checkpoint before this step if one is due. Return True if any rank has received a signal to stop.

        A checkpoint is due every save_every steps, before the last validation, and after a signal to stop.
        """
        self.progress.step = step
        self.stopped = self.stop.is_set(self.world)
        is_last, every = step == self.config.steps, self.config.save_every
        if step > self.saved_step and (is_last or self.stopped or every and step % every == 0):
            self._stop_if(self.log.flush())
            self._save()
            self.log.restart_clock()
        return self.stopped

    def log_step(self, step: int, learning_rates: dict[str, float], loss: torch.Tensor, grad_norm: torch.Tensor):
        """Record loss and gradient norm (0-D, on the device) of this step, without waiting for them.

        If they are not finite and on_nonfinite is "stop", a later call ends the run.
        """
        if not self.stop.can_save:  # freeze the compiler's objects, else a collection takes 0.5 s more
            gc.collect()
            gc.freeze()
        self.stop.can_save = True
        self._stop_if(self.log.step(step, learning_rates, torch.stack([loss, grad_norm])))

    def validate_or_stop(self, step: int, validation: Validation) -> bool:
        """Validate before this step if a validation is due.

        After a signal to stop, save a checkpoint and return True. The resumed run repeats the validation.
        """
        if not validation.is_due(step):
            return False
        self._stop_if(self.log.flush())
        try:
            record = validation.measure(step, self._raise_if_stopped)
        except Stopped:
            return self.save_or_stop(step)
        self.last_validation = {"step": step, "tokens": step * self.config.batch_tokens} | record
        self.log.validation(self.last_validation)
        self.log.restart_clock()
        return False

    def _raise_if_stopped(self):
        if self.stop.is_set(self.world):
            raise Stopped

    # ---- the end -----------------------------------------------------------------------------------------------------

    def __exit__(self, kind, error, trace):
        try:
            if error is None and not self.finished:
                self._finish()
        except Exception as failure:
            error = failure
        description = error and describe_failure(error)  # exit code and message, or None
        lost_rank = description and description[0] == 1
        if error is not None and self.log is not None and self.stop.signal_name is None and not lost_rank:
            with suppress(OSError):  # torchrun now stops the other ranks, and rank 0 then calls the run interrupted
                replace_text(self.path / "failed", f"{error}\n")
        if self.folder is not None:
            if error is not None and self.log is None and self.folder.is_new:  # restore failed, so the folder is empty
                shutil.rmtree(self.path, ignore_errors=True)
            self.folder.close()
        self.stop.__exit__(kind, error, trace)
        gc.unfreeze()  # for the next run of this process
        if isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(2) from error
        if error is not None:
            if description:
                code, line = description
                print(f"error: {line}", file=sys.stderr, flush=True)
                os._exit(code)  # a normal exit would wait for lost ranks, and wandb would fail on the full disk again
            raise error
        if self.world.world_size > 1:
            dist.destroy_process_group()
        if self.stopped:
            sys.exit(exit_code())

    def _finish(self):
        """Write summary.json, or, after a signal, log that the run stopped."""
        self._stop_if(self.log.flush())
        validation, config = self.last_validation, self.config
        self.stopped = self.stopped or validation is None or validation["step"] < config.steps
        if self.stopped:
            signal = self.stop.signal_name or "a signal on another rank"
            self.log.print(f"{signal}: stopped after step {self.progress.step}. Continue the run with --resume auto.")
            if self.folder is not None:
                self.folder.mark_interrupted(signal)
        else:
            if not all(map(math.isfinite, validation["val_loss"].values())):
                self._stop_if("the validation loss after the last update is not finite")
            if self.folder is not None:
                self.folder.write_json("summary.json", self._summary(validation))
                self.log.print(f"finished: the results are in {self.path / 'summary.json'}")
        self.log.close()

    def _summary(self, validation: dict) -> dict:
        config = self.config
        copied = [key for key in validation if key.startswith(("val_loss", "val_tokens", "copy_", "far_"))]
        return {
            "name": config.name,
            "method": config.method,
            "train_length": config.train_length,
            "val_loss_as": {},
            **{key: validation[key] for key in copied},
            "steps": config.steps,
            "tokens": self.data["tokens"],
            "seconds": round(self.progress.seconds, 3),
            "tokens_per_second": self.log.tokens_per_second,
            "parameters": num_parameters(self.model),
            "data": self.data["train"],
            "distinct_tokens": self.data["distinct_tokens"],
        }

    def _stop_if(self, problem: str | None):
        """Raise UserError if the last step has a problem. All ranks find the same problem."""
        if problem is None:
            return
        step, tokens = self.progress.step, self.config.batch_tokens
        shard, token = self.train_text.file_and_index(self.progress.first_token + (step - 1) * tokens)
        checkpoint = latest_checkpoint(self.path / "checkpoints") or "none"
        remedy = "Lower the learning rates, or use --on_nonfinite skip."
        if step <= 1:
            remedy = f"Check the method: python -m scripts.doctor quickstart --method {self.config.method}"
        place = f"The tokens of step {step} begin at token {token} of {shard}"
        raise UserError(f"{problem} (last checkpoint: {checkpoint}). {place}. {remedy}")

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self):
        """Save a checkpoint. All ranks call this."""
        require_same_parameters(self.optimizers, self.world, self.progress.step)
        self.progress.rng = self.world.gather(rng_state())
        state = {"optimizers": self.optimizers.state_dict()}  # gathered from all ranks
        if self.folder is not None:
            state |= {"progress": vars(self.progress), "config": vars(self.config)}
            state |= {"model": self.model.state_dict(), "fingerprint": self.data["train"]}
            state |= {"tokenizer": self.data["tokenizer"]}
            save_checkpoint(self.folder.checkpoints, self.progress.step, state, keep=self.config.keep)
        self.saved_step = self.progress.step

    def _load(self, checkpoint: Path, state: dict):
        """Continue from a checkpoint. Raise ValueError if its configuration or its data differ."""
        config = self.config
        changes = describe_differences(config, config_of(state["config"], type(config)))
        require(not changes, f"{checkpoint} was trained with {changes}. Pass the old values, or choose another --name.")
        self._continue_from(Progress(**state["progress"]))
        same_data = state["fingerprint"] == self.data["train"]
        require(same_data, f"{checkpoint} was trained on other data than {config.data_dir}. Choose another --name.")
        load_weights(self.model, state["model"], checkpoint)
        self.optimizers.load_parameters()
        self.optimizers.load_state_dict(state["optimizers"])
        if len(self.progress.rng) == self.world.world_size:
            set_rng_state(self.progress.rng[self.world.rank])

    def _initialise_from(self, folder: Path):
        """Load the weights of another run, and continue its training text after its last token.

        The optimizer state starts anew. The attention method may differ. Its parameters, such as LogN's scales, are
        loaded if both methods have them. Otherwise scale-invariant attention with learn_moments is calibrated
        (model/scores.py). Raise ValueError for a model of another shape.
        """
        checkpoint = latest_checkpoint(folder / "checkpoints")
        require(checkpoint, f"--init_from {folder} has no checkpoint. Name the folder of a trained run.")
        state = load_checkpoint(checkpoint)
        for field in ("vocab_size", "num_layers", "num_heads", "model_dim"):
            value = state["config"][field]
            require(getattr(self.config, field) == value, f"{checkpoint} has {field} {value}. Use --{field} {value}.")
        same = state.get("tokenizer") in (None, self.data["tokenizer"])
        require(same, f"{checkpoint} was trained with another tokenizer than {self.config.data_dir} has.")
        own, weights = self.model.state_dict(), state["model"]
        for name in [name for name in weights if ".method." in name]:  # methods can share a name but not its shape
            if name in own and weights[name].shape != own[name].shape:
                del weights[name]
        missing, _ = self.model.load_state_dict(weights, strict=False)
        source = Progress(**state["progress"])
        first_token = source.first_token + source.step * state["config"]["batch_tokens"]
        if any(name.endswith("score_change.mean") for name in missing):
            tokens = calibration_tokens(self.config, self.train_text, first_token)
            calibrate(self.model, tokens.to(self.world.device))
        self._continue_from(dataclasses.replace(self.progress, first_token=first_token))
        self.optimizers.load_parameters()

    def _continue_from(self, progress: Progress):
        """Set the progress, and the fingerprint of the training text up to the last token of this run."""
        self.progress = progress
        self.data["train"] = self.train_text.fingerprint(progress.first_token + self.data["tokens"])
