"""Trains large Hugging Face models in little memory: loss in chunks, AdamW with bfloat16 weights and moments."""

import torch
from torch import Tensor, nn

from model.loss import LOGIT_BYTES, mean_loss, token_losses
from scripts.hf.load import DTYPES, meta_model
from scripts.hf.settings import Settings


class WithLoss(nn.Module):
    """A causal language model with its cross-entropy. Only a chunk of the logits exists at a time."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, plan: None = None, per_token: bool = False) -> Tensor:
        """Return the mean loss in nats of targets (B, T) given inputs (B, T); or the losses (B, T), without gradients.

        plan: ignored, because validation passes our GPT one.
        """
        x = self.model.model(inputs, use_cache=False).last_hidden_state  # (B, T, C)
        x, head = x.flatten(0, 1), self.model.lm_head.weight  # (B T, C), (V, C)
        if per_token:
            return token_losses(x, head, targets.flatten()).view(targets.shape)
        return mean_loss(x, head, targets.flatten())


class AdamW(torch.optim.Optimizer):
    """AdamW that computes in float32 and rounds bfloat16 weights and moments stochastically.

    A bfloat16 weight of 1 cannot hold a change of 2e-5: its precision is 4e-3. Stochastic rounding is right on average.
    Nothing changes in a step where found_inf, which optim.sharded sets, is 1.
    """

    found_inf: Tensor | None = None

    def __init__(self, params, lr: float = 2e-5, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        for p in (p for group in self.param_groups for p in group["params"]):  # a lack of memory shows at the start
            step = torch.zeros((), device=p.device)
            self.state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    @torch.no_grad()
    def step(self):
        if self.found_inf is not None and self.found_inf:
            return
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[p], p.grad.float()
                state["step"] += 1
                mean = state["exp_avg"].float().lerp(gradient, 1 - beta1)
                square = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - beta2)
                scale = (square / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                update = mean / (1 - beta1 ** state["step"]) / scale + group["weight_decay"] * p
                copy_rounded(state["exp_avg"], mean)
                copy_rounded(state["exp_avg_sq"], square)
                copy_rounded(p, p - lr * update)


def copy_rounded(x: Tensor, new: Tensor):
    """Copy float32 values into x, rounded up or down at random, in proportion, if x is bfloat16."""
    if x.dtype == torch.bfloat16:  # the upper half of the bits of a float32
        bits = new.contiguous().view(torch.int32)
        new = (bits + torch.randint_like(bits, 2**16)).bitwise_and(-(2**16)).view(torch.float32)
    x.copy_(new)


def count_memory(config, settings: Settings, processes: int) -> dict[str, int]:
    """Return the bytes that each process needs, by kind.

    Activations are an upper estimate: training keeps the input of every layer, and a token takes 16 vectors of the
    model's width and 6 of the MLP's while a layer is differentiated. In validation it takes 9 and 3.
    """
    size, C, M = DTYPES[settings.dtype].itemsize, config.hidden_size, config.intermediate_size
    weights = size * sum(p.numel() for p in meta_model(config).parameters())
    head = 2 * config.vocab_size * C * size + LOGIT_BYTES  # its gradient, twice, and a chunk of logits
    validation = max(settings.micro_batch_tokens, *settings.val_lengths) * size * (9 * C + 3 * M) + head
    if settings.steps == 0:
        return {"weights": weights, "activations": validation}
    tokens = max(settings.micro_batch_tokens, settings.train_length)
    training = tokens * size * ((config.num_hidden_layers + 16) * C + 6 * M) + head
    copies = weights // processes if processes > 1 else 0  # the rows that a process updates
    return {
        "weights": weights + copies,
        "gradients": weights + copies,
        "moments": 2 * weights // processes,
        "activations": max(validation, training),
    }
