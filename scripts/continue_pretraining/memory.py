"""How much memory a continual pretraining needs, counted before anything is loaded."""

from torch import nn

from errors import require
from model.loss import LOGIT_BYTES
from runtime.processes import World
from scripts.continue_pretraining.settings import Settings
from scripts.huggingface.load import DTYPES, free_memory, meta_model
from scripts.shared.tables import markdown_table

BLOCK, UNQUANTISED = 256, 4096  # of torchao: values with one scale, and how many a tensor must have for 8 bits


def count_memory(config, settings: Settings, processes: int = 1) -> dict[str, float]:
    """Return bytes by kind of the fullest of so many processes.

    Weights, gradients and optimizer state are exact for one process (for several, but for tensors too small to divide).
    Activations are an upper estimate, from counting real steps on fake tensors: while a layer is computed again and
    differentiated, 16 vectors a token of the model's width and 6 of its MLP's; in validation 9 and 3.
    """
    model, size = meta_model(config), DTYPES[settings.dtype].itemsize
    layer, C, V = layer_parameters(model), config.hidden_size, config.vocab_size
    total = sum(p.numel() for p in model.parameters())
    at_once = 0 if processes == 1 else 2 * layer + total - config.num_hidden_layers * layer
    tokens = max(settings.micro_batch_tokens, settings.train_length)
    longest = max(settings.micro_batch_tokens, *settings.val_lengths)
    validation = max(longest * size * (9 * C + 3 * config.intermediate_size), loss_bytes(longest, C, V, size))
    if settings.steps == 0:
        return {"weights": total * size, "activations of validation": validation}
    kept = config.num_hidden_layers * tokens * C * size
    one = tokens * size * (16 * C + 6 * config.intermediate_size)
    training = kept + V * C * size + max(one, loss_bytes(tokens, C, V, size))
    return {
        "weights": total * size / processes,
        "gradients": total * size / processes,
        "optimizer state": sum(state_bytes(p.numel(), size) for p in model.parameters()) / processes,
        "weights gathered at once": at_once * size,
        "activations of training": training,
        "activations of validation, beyond those": max(0, validation - training),
    }


def layer_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.model.layers[0].parameters())


def state_bytes(numel: int, size: int) -> float:
    """Return the bytes of AdamW's two moments of a parameter: see AdamW8bit."""
    if numel < UNQUANTISED or numel % BLOCK:
        return 2 * numel * size
    table = 256 * 4  # of the values that 8 bits stand for, which each tensor has
    return 2 * (numel + numel // BLOCK * 4 + table)


def loss_bytes(tokens: int, C: int, V: int, size: int) -> int:
    """Return the bytes that the loss of so many tokens takes: their vectors and its gradient, a chunk of logits, and
    the head's gradient of it."""
    return (2 * tokens + V) * C * size + min(LOGIT_BYTES, tokens * V * size)


def checkpoint_bytes(config, settings: Settings) -> int:
    """Return the size of a checkpoint, of all processes together."""
    parts = count_memory(config, settings)
    return round(parts["weights"] + parts["optimizer state"]) if settings.steps else 0


def check_memory(config, settings: Settings, world: World):
    """Raise ValueError if what is needed is more than the device has free."""
    needed, free = sum(count_memory(config, settings, world.world_size).values()), free_memory(world.device)
    if world.device.type == "cpu":
        needed *= world.world_size
    mend = "more GPUs (torchrun), a smaller model, shorter --val_lengths or smaller --micro_batch_tokens"
    has = f"{world.device} has {free / 2**30:.1f} GiB free"
    require(needed <= free, f"{settings.model} needs about {needed / 2**30:.1f} GiB, and {has}: take {mend}")


def describe_memory(config, settings: Settings, processes: int) -> str:
    """Return the page of --dry_run."""
    parts = count_memory(config, settings, processes)
    parts |= {"together": sum(parts.values())}
    rows = [["in memory", "bytes", "GiB"]]
    rows += [[kind, f"{number:,.0f}", f"{number / 2**30:.2f}"] for kind, number in parts.items()]
    total = sum(p.numel() for p in meta_model(config).parameters())
    words = f"{settings.model}: {total:,} parameters in {settings.dtype}, on each of {processes} devices;\n"
    words += f"{settings.steps} steps of {settings.batch_tokens:,} tokens, at most {settings.micro_batch_tokens:,} at "
    words += f"once; validation at {', '.join(map(str, settings.val_lengths))}"
    disk = f"a checkpoint has {checkpoint_bytes(config, settings) / 1e9:.1f} GB" if settings.steps else "no checkpoints"
    return f"{words}\n\n{markdown_table(rows)}\n\nOn the disk, {disk}."
