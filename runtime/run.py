"""Manages a run around its training steps: folder, lock, log, wandb, signals and checkpoints.

train_gpt.py makes four calls: `restore`, `save_if_due`, `validate` and `log_step`.
"""

import dataclasses
import gc
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from configs.config import Config, batch_order, describe_differences
from errors import UserError, require
from files import parse_object, read_bytes, replace_text
from model.attention.plan import Plan
from model.gpt import GPT
from model.scores import calibrate, calibrated_parameters
from optim.sharded import Optimizers
from runtime.build import Text, calibration_tokens, config_of, trains_alike
from runtime.checkpoint import Progress, latest_checkpoint, load_newest, load_weights, save_checkpoint
from runtime.device import rng_state, set_rng_state
from runtime.log import RunLog, num_parameters
from runtime.metrics import numbers
from runtime.processes import World, describe_failure
from runtime.replicas import require_same_parameters
from runtime.run_folder import make_folder
from runtime.signals import StopRequest, exit_code


class EndOfRun(Exception):
    """Ends the block of `with run:` without an error: the run is finished already, or a signal asks it to stop."""


@dataclasses.dataclass(eq=False)
class Run:
    """A context manager for the training loop. It leaves the run folder in order, however the loop ends.

    end of the loop                          what is left                      exit code
    last step                                summary.json                      0
    signal (signals.py)                      checkpoint of the present step    75: "try again"; 0 under torchrun
    user's mistake, full disk, no memory     one line, the last checkpoint     2
    lost rank                                one line, the last checkpoint     1
    other exception                          its traceback                     1

    An error between two updates also leaves a checkpoint of the last whole step, if the run has one process.
    All ranks make one. Raise ValueError as RunFolder does.
    """

    config: Config
    world: World
    model: GPT
    optimizers: Optimizers
    plans: dict[int, Plan]  # by training length, for the log
    text: Text
    flops_per_token: int  # of training, for the log

    def __post_init__(self):
        self.data = self.text.describe(self.config)
        self.progress = Progress()
        self.saved_step: int | None = None
        # Of progress.step: the number of updates, with which all parameters are whole, and the random generators.
        self.whole: int | None = None
        self.rng: dict = {}
        self.last_validation: dict | None = None
        self.stopped = False  # True at the end of a run that is not finished
        self.log: RunLog | None = None  # begins when the run is restored

        # The folder, and the signals that stop the run.
        config = self.config
        self.path = Path(config.runs_dir) / config.name
        self.stop = StopRequest()
        self.folder = make_folder(config.runs_dir, config.name, config.resume, self.world)  # None on other ranks than 0
        if self.folder is not None:
            self.stop.mark = self.folder.mark_interrupted

    def __enter__(self) -> "Run":
        self.stop.__enter__()
        return self

    # ---- the four calls ----------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Load the newest undamaged checkpoint, or the weights of --init_from, and start the log.

        Return the step to begin with. All ranks call this. Raise EndOfRun if the run is finished, and ValueError if the
        checkpoint or the finished run has another configuration, or the checkpoint other data.
        """
        # 1. Load.
        config = self.config
        extended = False
        checkpoint, state, damaged = load_newest(self.path / "checkpoints", self.world)
        if checkpoint is not None:
            extended = self._load(checkpoint, state)
        elif config.init_from:
            self._initialise_from(Path(config.init_from))
        if extended and self.folder is not None:
            (self.path / "summary.json").unlink(missing_ok=True)
        if not extended and (self.path / "summary.json").exists():
            if checkpoint is None:  # _load has compared nothing
                stored = parse_object(read_bytes(self.path / "config.json"), f"{self.path}/config.json")
                changes = describe_differences(config, config_of(stored, type(config)))
                require(not changes, f"{self.path} was trained with {changes}. Choose another --name.")
            if self.world.is_main:
                print(f"{self.path} is finished. Read its summary.json.")
            raise EndOfRun

        # 2. Start the log.
        self.log = RunLog(
            config,
            self.world,
            self.folder,
            self.progress,
            self.model.dtype,
            self.flops_per_token,
        )
        plans = self.plans[config.train_length]
        self.log.describe(self.data, len(self.text.train), self.model, plans)
        for path in damaged:
            if self.world.is_main:
                path.rename(path.with_name(path.name + ".damaged"))
            self.log.print(f"{path} is damaged, so the run continues from {checkpoint.name}.")
        if self.progress.step:
            self.log.print(f"resumed at step {self.progress.step}")

        # 3. Step 0 is saved only if its weights come from another run and are the last.
        if config.steps or not config.init_from:
            self.saved_step = self.progress.step
        return self.progress.step

    def save_if_due(self, step: int):
        """Save a checkpoint before this step if one is due: every save_every steps, and before the last validation.

        Raise EndOfRun as stop_if_asked does.
        """
        self.progress.step, self.whole, self.rng = step, self.optimizers.updates, rng_state()
        self.stop_if_asked()
        every = self.config.save_every
        if step == self.config.steps or every and step % every == 0:
            self._save()

    def stop_if_asked(self):
        """If any rank has received a signal to stop, save a checkpoint and raise EndOfRun.

        All ranks must call this equally often.
        """
        if self.stop.is_set(self.world):
            self._save()
            raise EndOfRun

    def validate(self, step: int, measure: Callable[[int, Callable[[], None]], dict]):
        """Validate before this step and log the record that measure(step, stop_if_asked) returns.

        After a signal to stop, the resumed run repeats the validation.
        """
        self._refuse(self.log.flush())
        record = measure(step, self.stop_if_asked)
        tokens = step * self.config.batch_tokens
        self.last_validation = {"step": step, "tokens": tokens} | record
        self.log.validation(self.last_validation)
        self.log.restart_clock()

    def log_step(self, step: int, loss: Tensor, grad_norm: Tensor):
        """Record loss and gradient norm (0-D, on the device) after this step, without waiting for them.

        If they are not finite and on_nonfinite is "stop", a later call ends the run.
        """
        if not self.stop.can_save:  # freeze the compiler's objects, else a collection takes 0.5 s more
            gc.collect()
            gc.freeze()
        self.stop.can_save = True
        numbers = torch.stack([loss, grad_norm])
        self._refuse(self.log.step(step, self.optimizers.learning_rates(), numbers))

    # ---- the end -----------------------------------------------------------------------------------------------------

    def __exit__(self, kind, error, trace):
        # 1. Finish, unless something has failed.
        if isinstance(error, EndOfRun):
            error = None
        try:
            if error is None and self.log is not None:  # without a log, the run was finished before
                self._finish()
        except Exception as failure:
            error = failure

        # 2. Leave the folder and the process in order.
        if error is not None:
            if self.world.world_size == 1 and self.whole == self.optimizers.updates:
                with suppress(Exception):  # such as a second one of a full disk
                    self._save()
            self._mark_failed(error)
        self._release()

        # 3. Leave with the exit code.
        if error is not None:
            leave(error)
        if self.world.world_size > 1:
            dist.destroy_process_group()
        if self.stopped:
            sys.exit(exit_code())
        return True

    def _finish(self):
        """Write summary.json, or, after a signal, log that the run stopped."""
        self._refuse(self.log.flush())
        validation = self.last_validation
        self.stopped = validation is None or validation["step"] < self.config.steps

        if self.stopped:  # before the last validation
            signal = self.stop.signal_name or "a signal on another rank"
            self.log.print(f"{signal}: stopped after step {self.progress.step}. Continue the run with --resume auto.")
            if self.folder is not None:
                self.folder.mark_interrupted(signal)
        else:
            if not all(map(math.isfinite, validation["val_loss"].values())):
                self._refuse("the validation loss after the last update is not finite")
            if self.folder is not None:
                summary = self._summary(validation)
                self.folder.write_json("summary.json", summary)
                for pair in numbers(summary).items():
                    self.log.print("{}: {}".format(*pair))
                self.log.print(f"finished: the results are in {self.path / 'summary.json'}")
        self.log.close()

    def _mark_failed(self, error: BaseException):
        """Record the error in the folder. If the run has not begun, remove its new folder instead."""
        mistake = isinstance(error, UserError) and not self.stop.can_save  # found by the first step
        if self.folder is not None and self.folder.is_new and (self.log is None or mistake):
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.log is not None:
            lost_rank, _ = describe_failure(error) or (None, "")
            if self.stop.signal_name is None and lost_rank != 1:
                with suppress(OSError):  # torchrun now stops the other ranks, and rank 0 then calls the run interrupted
                    replace_text(self.path / "failed", f"{error}\n")

    def _release(self):
        """Give back what the process holds for the run: the lock, the signal handlers, the frozen objects."""
        if self.folder is not None:
            self.folder.close()
        self.stop.__exit__()
        gc.unfreeze()  # for the next run of this process

    def _summary(self, validation: dict) -> dict:
        """Return the content of summary.json. validation: the record of the last validation."""
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

    def _refuse(self, problem: str | None):
        """Raise UserError if the last step has a problem. All ranks find the same problem."""
        if problem is None:
            return
        self.whole = None
        step = self.progress.step
        number = batch_order(self.config)[step - 1] if step else 0
        first_token = self.progress.first_token + number * self.config.batch_tokens
        shard, token = self.text.train.file_and_index(first_token)
        checkpoint = latest_checkpoint(self.path / "checkpoints") or "none"
        remedy = "Lower the learning rates, or use --on_nonfinite skip."
        if step <= 1:
            remedy = f"Check the method: python -m scripts.doctor quickstart --method {self.config.method}"
        place = f"The tokens of step {step} begin at token {token} of {shard}"
        raise UserError(f"{problem} (last checkpoint: {checkpoint}). {place}. {remedy}")

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self):
        """Save a checkpoint, unless the present step is saved. All ranks call this."""
        step = self.progress.step
        if step == self.saved_step:
            return

        # 1. On all ranks.
        self._refuse(self.log.flush())
        require_same_parameters(self.optimizers, self.world, step)
        self.progress.rng = self.world.gather(self.rng)
        optimizer_state = self.optimizers.state_dict()  # gathered from all ranks

        # 2. On rank 0.
        if self.folder is not None:
            state = {
                "progress": vars(self.progress),
                "config": vars(self.config),
                "model": self.model.state_dict(),
                "optimizers": optimizer_state,
                "fingerprint": self.data["train"],
                "tokenizer": self.data["tokenizer"],
            }
            save_checkpoint(self.folder.checkpoints, step, state, keep=self.config.keep)
        self.saved_step = step
        self.log.restart_clock()

    def _load(self, checkpoint: Path, state: dict) -> bool:
        """Continue from a checkpoint. Return True if this run extends it: same steps so far, more steps to come.

        Raise ValueError if its configuration or its data differ.
        """
        # 1. Compare.
        config, stored = self.config, config_of(state["config"], type(self.config))
        progress = Progress.stored(state["progress"])
        extended = stored.steps < config.steps and trains_alike(config, stored, progress.step)
        if not extended and (changes := describe_differences(config, stored)):
            problem = f"{checkpoint} was trained with {changes}, and other steps before step {progress.step}"
            remedy = f"Pass the old values, or train its weights under another --name by --init_from {self.path}"
            raise UserError(f"{problem}. {remedy}.")
        self._continue_from(progress)
        tokens = progress.first_token + stored.steps * config.batch_tokens
        if state["fingerprint"] != self.text.train.fingerprint(tokens):
            raise UserError(f"{checkpoint} was trained on other data than {config.data_dir}. Choose another --name.")

        # 2. Load.
        load_weights(self.model, state["model"], checkpoint)
        self.optimizers.load_parameters()
        self.optimizers.load_state_dict(state["optimizers"])
        if len(self.progress.rng) == self.world.world_size:
            set_rng_state(self.progress.rng[self.world.rank])
        return extended

    def _initialise_from(self, folder: Path):
        """Load the weights of another run, and continue its training text after its last token.

        The optimizer state starts anew. The attention method may differ. Its parameters, such as LogN's scales, are
        loaded if both methods have them. Calibrated parameters that the other run lacks are set from the scores
        (model/scores.py). Raise ValueError for a model of another shape.
        """
        # 1. Compare.
        checkpoint, state, damaged = load_newest(folder / "checkpoints", self.world)
        require(checkpoint, f"--init_from {folder} has no checkpoint. Name the folder of a trained run.")
        if damaged:
            raise UserError(f"{damaged[0]} is damaged. Delete it to use {checkpoint}.")
        require("progress" in state, f"{checkpoint} is not of a run of train_gpt.py. Name the folder of such a run.")
        for field in ("vocab_size", "num_layers", "num_heads", "model_dim"):
            value = state["config"][field]
            if getattr(self.config, field) != value:
                raise UserError(f"{checkpoint} has {field} {value}. Use --{field} {value}.")
        if state.get("tokenizer") not in (None, self.data["tokenizer"]):
            raise UserError(f"{checkpoint} was trained with another tokenizer than {self.config.data_dir} has.")

        # 2. Load the weights that both models have. Methods can share a parameter's name but not its shape.
        weights = state["model"]
        for name, parameter in self.model.state_dict().items():
            if ".method." in name and name in weights and weights[name].shape != parameter.shape:
                del weights[name]
        missing, _ = self.model.load_state_dict(weights, strict=False)
        lost = [name for name in missing if ".method." not in name]
        require(not lost, f"{checkpoint} lacks {lost[:1]}. Name the folder of a run of train_gpt.py.")

        # 3. Calibrate what is missing, on the tokens after the last one.
        source = Progress.stored(state["progress"])
        read = state["config"]["steps"] if state["config"].get("data_seed") else source.step  # in another order
        first_token = source.first_token + read * state["config"]["batch_tokens"]
        if calibrated_parameters(self.model) & set(missing):
            tokens = calibration_tokens(self.config, self.text.train, first_token)
            calibrate(self.model, tokens.to(self.world.device))
        self._continue_from(dataclasses.replace(self.progress, first_token=first_token))
        self.optimizers.load_parameters()

    def _continue_from(self, progress: Progress):
        """Set the progress, and the fingerprint of the training text up to the last token of this run."""
        self.progress = progress
        self.data["train"] = self.text.train.fingerprint(progress.first_token + self.data["tokens"])


def leave(error: BaseException) -> NoReturn:
    """Raise the error, or end the process with one line for errors whose traceback tells no more."""
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    if description := describe_failure(error):
        code, line = description
        print(f"error: {line}", file=sys.stderr, flush=True)
        os._exit(code)  # a normal exit would wait for lost ranks, and wandb would fail on the full disk again
    raise error
