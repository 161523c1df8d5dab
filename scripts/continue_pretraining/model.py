"""The model that is trained: loaded, converted, divided over the GPUs, with its loss and its optimizer."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from data.loader import validation_batches
from data.shards import TokenStream
from errors import require
from model.loss import mean_loss, token_losses
from runtime.processes import World
from scripts.continue_pretraining.settings import Settings
from scripts.huggingface.attention import convert
from scripts.huggingface.load import DTYPES, load_model

Named = dict[str, Tensor]


class WithLoss(nn.Module):
    """A causal language model and its cross-entropy, of which no more than a chunk of the logits is ever there."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, per_token: bool = False) -> Tensor:
        """Return the mean loss in nats, or that of each token, (B, T), without gradients; inputs, targets (B, T)."""
        x = self.model.model(inputs, use_cache=False).last_hidden_state  # (B, T, C)
        x, head = x.flatten(0, 1), self.model.lm_head.weight  # (B T, C), (V, C)
        if per_token:
            return token_losses(x, head, targets.flatten()).view(targets.shape)
        return mean_loss(x, head, targets.flatten())


def check_config(config, settings: Settings):
    """Raise ValueError for a model that cannot be trained here, before anything is loaded."""
    name, size = settings.model, config.vocab_size
    words = f"{name} has a vocabulary of {size}, and tokens of shards are 16 bits"
    require(size <= 2**16, f"{words}: models of at most {2**16} tokens can be trained, such as Llama 2")
    capped = getattr(config, "final_logit_softcapping", None)
    require(not capped, f"{name} caps its logits, which our chunked loss does not: take one of the family llama")


def build(settings: Settings, world: World) -> WithLoss:
    """Return the converted model with its weights, on the device, each of its layers checkpointed.

    ValueError for a model that is not there, too large, or of another family, and for a method that it cannot have.
    """
    model = load_model(settings.model, dtype=DTYPES[settings.dtype], device=world.device, attention_dropout=0.0)
    convert(model, settings.method, train_length=settings.train_length, **settings.method_options)
    model.activation_checkpointing_enable()
    return WithLoss(model)


def own_parameters(model: WithLoss) -> list[nn.Parameter]:
    """Return what the attention methods learn: few numbers, in float32, of which every process has all."""
    return [p for name, p in model.named_parameters() if ".self_attn.method." in name]


def shard(model: WithLoss, world: World):
    """Divide all weights but the methods' own over the processes, layer by layer (FSDP2), if there are several.

    A layer's weights are gathered while it computes; embedding, last norm and head for the whole step. Gradients are
    added up in float32.
    """
    if world.world_size == 1:
        return
    own = own_parameters(model)
    how = dict(ignored_params=set(own), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for layer in model.model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)


def local(x: Tensor) -> Tensor:
    """Return this process's part of a tensor that FSDP2 has divided; any other as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


class AdamW8bit:
    """AdamW with moments of 8 bits (torchao's), in blocks of 256 with a scale each; small tensors keep theirs whole.

    bfloat16 weights are rounded at random, so that steps too small for them still count on average. The state is made
    at once: what does not fit is found before training. Each process updates its own part of each parameter.
    """

    def __init__(self, model: nn.Module, settings: Settings, world: World, compiled: bool):
        try:
            from torchao.optim import AdamW8bit as Optimizer
        except ImportError as error:
            install = "pip install -r requirements-extras.txt"
            raise ValueError(f"this needs torchao, which cannot be imported ({error}): {install}") from error
        self.parameters, self.world, self.seed = dict(model.named_parameters()), world, settings.seed
        self.stance = "default" if compiled else "force_eager"  # torchao compiles its update by itself
        self.locals = {name: nn.Parameter(local(p.detach())) for name, p in self.parameters.items()}
        how = dict(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)
        self.optimizer = Optimizer(self.locals.values(), **how, bf16_stochastic_round=True)
        rate = self.optimizer.param_groups[0]["lr"]
        rate.zero_()
        for part in self.locals.values():
            part.grad = torch.zeros_like(part)
        self._update(0)
        rate.fill_(settings.lr)
        for state in self.optimizer.state.values():
            state["step"].zero_()

    def step(self, number: int):
        """Update all parameters by their gradients, which are then given up. number: of the step, which with the seed
        and the process decides how weights are rounded, so that a resumed run rounds as it would have."""
        for name, p in self.parameters.items():
            self.locals[name].grad, p.grad = None if p.grad is None else local(p.grad), None
        self._update(number)

    def _update(self, number: int):
        torch.manual_seed((self.seed * 2**24 + number) * self.world.world_size + self.world.rank)
        with torch.compiler.set_stance(self.stance):
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Named:
        """Return the state, by names, divided as the parameters are; to be saved, or loaded into in place."""
        states = {name: self.optimizer.state[part] for name, part in self.locals.items()}
        return {f"{name}.{key}": self._divided(x, name) for name, of in states.items() for key, x in of.items()}

    def _divided(self, x: Tensor, name: str) -> Tensor:
        p = self.parameters[name]
        if not isinstance(p, DTensor) or x.dim() == 0:
            return x
        where = dict(shape=p.shape, stride=p.stride(), run_check=False)
        return DTensor.from_local(x, p.device_mesh, p.placements, **where)


def train_step(model: WithLoss, micro_batches: list, world: World) -> tuple[float, float]:
    """Make the gradients of a step. Return its loss and their norm, over all processes."""
    model.train()
    loss = torch.zeros((), device=world.device)
    for inputs, targets in micro_batches:
        part = model(inputs, targets) / len(micro_batches)
        part.backward()
        loss += part.detach() / world.world_size
    own = [p.grad for p in own_parameters(model) if p.grad is not None]
    world.sum(own)  # FSDP2 sees to the others
    squared = torch.zeros((), device=world.device)
    for gradient in own:
        gradient /= world.world_size
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        share = 1 if isinstance(gradient, DTensor) else 1 / world.world_size  # of what every process has
        squared += share * torch.linalg.vector_norm(local(gradient), dtype=torch.float32) ** 2
    world.sum([loss, squared])
    return loss.item(), squared.sqrt().item()


@torch.no_grad()
def mean_by_position(
    model: WithLoss, text: TokenStream, length: int, settings: Settings, world: World, stopping: Callable[[], bool]
) -> Tensor | None:
    """Return the validation loss in nats at each position, (length,) float64, a mean over the sequences; None if
    stopping(), which all processes ask before each batch, says so."""
    model.eval()
    micro_batch = max(1, settings.micro_batch_tokens // length)
    vocab_size = model.model.config.vocab_size
    where = dict(rank=world.rank, world_size=world.world_size, device=world.device, vocab_size=vocab_size)
    how = dict(length=length, val_tokens=settings.val_tokens, micro_batch_size=micro_batch)
    sequences = settings.val_tokens // length
    batches = validation_batches(text, **how, **where)
    total = torch.zeros(length, dtype=torch.float64, device=world.device)
    # Every process runs the model equally often, as FSDP2 gathers weights in it: on any tokens if it has no more.
    spare = torch.zeros(1, length, dtype=torch.int64, device=world.device)
    most = -(-sequences // world.world_size // micro_batch)
    for inputs, targets in itertools.islice(itertools.chain(batches, itertools.repeat((spare, None))), most):
        if stopping():
            return None
        losses = model(inputs, spare if targets is None else targets, per_token=True)
        if targets is not None:
            total += losses.double().sum(dim=0)
    world.sum([total])
    return total.cpu() / sequences
