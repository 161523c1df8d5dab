"""What a step was made of whose loss or gradients are not finite, small enough to mail."""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from configs.config import Config
from data.loader import TrainLoader
from model.gpt import GPT
from runtime.checkpoint import BackgroundSaver, latest_checkpoint
from runtime.processes import World, gather
from runtime.run_folder import RunFolder


def explain_step(
    step: int,
    problem: str,
    *,
    config: Config,
    world: World,
    model: GPT,
    load_from: Callable[..., TrainLoader],
    saver: BackgroundSaver,
    data: dict[str, Any],
    folder: RunFolder | None,
) -> str:
    """Repeat a step that was not finite, on the weights that it left as they were, and return a line about it.

    The main process keeps what it finds in the run folder, as nonfinite_000123.json. All processes must call it.
    load_from: makes the loader that begins with a step. saver: what it is saving is waited for, so that the line names
    it. data: that of data.json.
    """
    length = config.length_at(step - 1)
    own, first_token = world.own_tokens(length), (step - 1) * config.batch_tokens
    plan = model.plan(length, backend=config.attention_backend)

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        return model(inputs[:, own], targets[:, own], plan=plan, per_token=True)

    with load_from(start_step=step - 1) as again:
        shard, token = again.stream.where(first_token)
        ranks = gather(world, examine(losses, next(again), model.named_parameters()))
    if folder is None:
        return problem
    with suppress(OSError):  # then it is an older checkpoint that can be resumed from
        saver.finish()
    saved, dump = latest_checkpoint(folder.checkpoints), f"nonfinite_{step:06d}.json"
    where = dict(first_token=first_token, tokens=config.batch_tokens, shard=shard, token_in_shard=token)
    where |= dict(checkpoint=saved and str(saved), data=data["train"])
    folder.write_json(dump, where | dict(found=problem, ranks=ranks, config=config.to_dict()))
    return (
        f"{problem}; nothing was updated. Its {config.batch_tokens} tokens begin with token {token} of {shard}; the "
        f"last checkpoint is {saved or 'not made yet'}; more is in {folder.path / dump}. "
        "--on_nonfinite skip would go on"
    )


def examine(
    losses: Callable[[Tensor, Tensor], Tensor],
    micro_batches: Iterable[tuple[Tensor, Tensor]],
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> dict[str, Any]:
    """Repeat a step up to its gradients, which are dropped. losses(inputs, targets) is the loss of each token, (B, T).

    Return {"sequence_losses": [of each sequence], "parameters": {name: [largest weight, weights that are not finite,
    largest gradient, gradients that are not finite]}}; what is not finite, as a word.
    """
    parameters, sequence_losses = dict(parameters), []
    for inputs, targets in micro_batches:
        per_token = losses(inputs, targets)
        per_token.mean().backward()
        sequence_losses += [as_json_number(x) for x in per_token.detach().mean(dim=1).tolist()]
    table = {}
    for name, p in parameters.items():
        table[name] = [*summarise(p.detach()), *([None, None] if p.grad is None else summarise(p.grad))]
        p.grad = None
    return dict(sequence_losses=sequence_losses, parameters=table)


def summarise(x: Tensor) -> list[float | str | int]:
    """Return the largest absolute value and how many values are not finite."""
    return [as_json_number(x.abs().max().item()), x.numel() - int(x.isfinite().sum())]


def as_json_number(x: float) -> float | str:
    return float(f"{x:.6g}") if math.isfinite(x) else str(x)
