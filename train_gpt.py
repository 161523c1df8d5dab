"""Pretrains a GPT with one of the attention methods in model/methods.

    python train_gpt.py PRESET [--field value ...]                                        one device
    torchrun --standalone --nproc_per_node=8 train_gpt.py PRESET [--field value ...]      several devices

PRESET is a function in configs/presets.py. `python train_gpt.py PRESET --help` lists all fields. The run writes all its
files to runs/NAME/ (runtime/run_folder.py). `--resume auto` continues a run from its newest checkpoint.
"""

import sys

import torch

from configs.command_line import read_config
from data.loader import TrainLoader
from errors import exit_on_user_error
from measure.validation import Validation
from model import methods
from optim.schedule import lr_factor
from runtime.build import build_model, build_optimizers, compile_model, open_text, plan_attention
from runtime.device import choose_compile, compute_dtype
from runtime.processes import start_processes
from runtime.run import Run


def main():
    # ---- setup: a user's mistake ends the command here, unless run.restore() finds it in a checkpoint ----
    with exit_on_user_error():
        config = read_config(sys.argv[1:], __doc__, methods)
        world = start_processes(config.device, config.timeout)  # rank, number of ranks (1 without torchrun), device
        train_text, val_text = open_text(config, world)
        compiled, compile_note = choose_compile(config.compile, world.device)
        torch.manual_seed(config.seed)
        model = build_model(config, compute_dtype(config, world.device)).to(world.device)
        optimizers = build_optimizers(config, model, compiled, world)
        # A plan needs no weights: rotary tables, block masks, and a_t and m_t unless they are learned.
        plans = plan_attention(config, model, world)
        validation = Validation(config, model, val_text, world)
        run = Run(config, world, model, optimizers, plans, train_text, val_text, compile_note)

    # ---- training: `run` keeps the folder, log and checkpoints, and turns signals and failures into one line ----
    with run:
        first_step = run.restore()  # 0 for a new run; the step of the newest checkpoint; steps + 1 if finished
        training_model = compile_model(model) if compiled else model
        loader = TrainLoader(
            train_text,
            batch_tokens=config.batch_tokens,
            length=config.length_at,  # a function of the step
            micro_batch_tokens=config.micro_batch_tokens,
            vocab_size=config.vocab_size,
            rank=world.rank,
            world_size=world.world_size,
            first_token=run.progress.first_token,
            start_step=first_step,
            device=world.device,
        )
        for step in range(first_step, config.steps + 1):  # the last round only saves and validates
            if run.save_or_stop(step):
                break  # a signal asked the run to stop
            if run.validate_or_stop(step, validation) or step == config.steps:
                break

            # ---- one training step ----
            micro_batches = next(loader)  # this rank's share of the step's tokens
            length = config.length_at(step)
            sequences = config.batch_tokens // length  # of the step, on all ranks together
            loss = torch.zeros((), device=world.device)
            for inputs, targets in micro_batches:  # both (B, length); a micro-batch counts B / sequences
                micro_loss = training_model(inputs, targets, plan=plans[length]) / (sequences / len(inputs))
                micro_loss.backward()
                loss += micro_loss.detach()
            sums = torch.stack([loss, optimizers.reduce_gradients()])  # loss, part of the squared gradient norm
            world.sum(sums)
            loss, grad_norm = sums[0], sums[1].sqrt()
            factor = lr_factor(
                step,
                steps=config.steps,
                schedule=config.schedule,
                warmup_steps=config.warmup_steps,
                cooldown_steps=config.cooldown_steps,
            )
            finite = torch.isfinite(loss + grad_norm)  # stays on the device, so the host does not wait for it
            optimizers.step(factor, finite)  # changes nothing if loss or gradients are not finite
            run.log_step(step + 1, optimizers.learning_rates(factor), loss, grad_norm)
        loader.close()


if __name__ == "__main__":
    main()
