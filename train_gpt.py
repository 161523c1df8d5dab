"""Pretrains a GPT with one of the attention methods in model/methods.

    python train_gpt.py PRESET [--field value ...]                                        one device
    torchrun --standalone --nproc_per_node=8 train_gpt.py PRESET [--field value ...]      several devices

PRESET is a function in configs/presets.py. `python train_gpt.py PRESET --help` lists all fields. The run writes all its
files to runs/NAME/ (runtime/run_folder.py). `--resume auto` continues a run from its newest checkpoint.
"""

import sys

import torch

from errors import exit_on_user_error
from measure.flops import training_flops_per_token
from measure.validation import Validation
from model.gpt import GPT
from optim.schedule import lr_factor
from runtime.build import (
    build_loader,
    build_optimizers,
    compile_model,
    open_text,
    plan_attention,
    read_run,
)
from runtime.device import compute_dtype
from runtime.processes import start_processes
from runtime.run import Run


def main():
    # ---- setup: a user's mistake ends the command here. A mistake that a checkpoint reveals ends run.restore() ----
    with exit_on_user_error():
        config = read_run(sys.argv[1:], __doc__)
        world = start_processes(config.device, config.timeout)  # rank, number of ranks (1 without torchrun), device
        text = open_text(config, world)
        torch.manual_seed(config.seed)
        model = GPT(config, compute_dtype(config, world.device)).to(world.device)
        compiled = compile_model(model, config, world)  # shares the weights; `model` itself with --compile off
        optimizers = build_optimizers(config, model, world)
        # A plan holds what does not depend on weights: rotary tables, block masks, and a_t and m_t unless learned.
        plans = plan_attention(config, model, world, text)
        validation = Validation(config, model, text.validation, world)
        run = Run(config, world, model, optimizers, plans, text, training_flops_per_token(config))

    # ---- training: `run` keeps the folder, log and checkpoints, and turns signals and failures into one line ----
    with run:
        first_step = run.restore()  # 0, or the step of the newest checkpoint
        loader = build_loader(config, world, text.train, run.progress)
        for step in range(first_step, config.steps + 1):  # the last round only saves and validates
            run.save_if_due(step)  # leaves the loop after a signal to stop
            if validation.is_due(step):
                run.validate(step, validation.measure)
            if step == config.steps:
                break

            # ---- one training step ----
            length = config.length_at(step)
            loss = torch.zeros((), device=world.device)
            for inputs, targets in next(loader):  # this rank's micro-batches, both (B, length)
                parts = config.batch_tokens / inputs.numel()  # micro-batches of this size in a step, on all ranks
                micro_loss = compiled(inputs, targets, plan=plans[length]) / parts
                micro_loss.backward()
                loss += micro_loss.detach()
            loss, grad_norm = optimizers.reduce(loss)  # sums loss and gradients over all ranks
            finite = torch.isfinite(loss + grad_norm)  # stays on the device, so the host does not wait for it
            optimizers.step(lr_factor(config, step), finite)  # clears the gradients; updates nothing if not finite
            run.log_step(step + 1, loss, grad_norm)
        loader.close()


if __name__ == "__main__":
    main()
