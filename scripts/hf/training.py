"""Saves memory in training Hugging Face models: loss in chunks, AdamW with bfloat16 weights and moments."""

import torch
from torch import Tensor, nn

from model.attention.plan import Plan
from model.loss import mean_loss, token_losses


class WithLoss(nn.Module):
    """A causal language model with its cross-entropy. Only a chunk of the logits exists at a time.

    It has the interface of our GPT that runtime/ uses. Its layers plan their attention themselves.
    """

    blocks = ()
    compile_note = "off"

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.dtype = model, model.dtype

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight  # (V, C)

    def plan(self, length: int, **options) -> Plan:
        return Plan(())

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        plan: Plan | None = None,
        per_token: bool = False,
        last: int = 1,
    ) -> Tensor:
        """Return the mean loss in nats of targets (B, T) given inputs (B, T). per_token: (B, T), without gradients.

        Without targets: return the float32 logits of the last positions, (B, last, vocabulary).
        """
        trains = targets is not None and not per_token
        self.model.train(trains)  # activation checkpointing works only in this mode
        x = self.model.model(inputs, use_cache=False).last_hidden_state  # (B, T, C)
        if targets is None:
            return nn.functional.linear(x[:, -last:], self.head).float()
        x = x.flatten(0, 1)  # (B T, C)
        if per_token:
            return token_losses(x, self.head, targets.flatten()).view(targets.shape)
        return mean_loss(x, self.head, targets.flatten())


class AdamW(torch.optim.AdamW):
    """AdamW that computes in float32 and rounds bfloat16 weights and moments stochastically.

    Near 1, bfloat16 numbers are 4e-3 apart, so rounding to nearest would lose an update of 2e-5. Stochastic rounding is
    right on average. If found_inf is 1, which optim.sharded sets, a step changes nothing.
    It updates a part of a parameter at once, because the float32 values take 30 bytes an element: 2^26 elements of a
    GPU's memory, 2^16 of a CPU's caches.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self):
        if self.found_inf is not None and self.found_inf:
            return
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), device=p.device)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1

                # AdamW in float32, a part of the parameter at a time.
                tensors = p, state["exp_avg"], state["exp_avg_sq"], p.grad.contiguous()
                part = 2**16 if p.device.type == "cpu" else 2**26
                for weights, first, second, gradient in zip(*(x.view(-1).split(part) for x in tensors)):
                    mean = first.float().lerp(gradient.float(), 1 - beta1)
                    square = second.float().lerp(gradient.float().square(), 1 - beta2)
                    scale = (square / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                    update = mean / (1 - beta1 ** state["step"]) / scale + group["weight_decay"] * weights
                    copy_rounded(first, mean)
                    copy_rounded(second, square)
                    copy_rounded(weights, weights - lr * update)


def copy_rounded(x: Tensor, new: Tensor):
    """Copy float32 values into x. If x is bfloat16, round up or down at random, so that the mean is exact."""
    if x.dtype == torch.bfloat16:  # a bfloat16 is the upper 16 bits of a float32
        bits = new.contiguous().view(torch.int32)
        new = (bits + torch.randint_like(bits, 2**16)).bitwise_and(-(2**16)).view(torch.float32)
    x.copy_(new)
