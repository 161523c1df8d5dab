"""Training steps that ours is measured against (scripts/bench/step.py), written from what is known of them.

    record8    modded-nanogpt's record #8 (Keller Jordan et al., 2024-11-03), the paper's base: our model, with separate
               q, k and v projections, PyTorch's own choice of attention kernel, cross-entropy of float32 logits, and
               Muon that orthogonalises one matrix after another
    nanogpt    GPT-2's block as in nanoGPT (Karpathy): LayerNorm, GELU, learned positions, tied embedding, AdamW

The parts of record8 can also be put into our step one by one, to see what each is worth.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.gpt import GPT, Attention, linear, norm
from optim.sharded import Group, Optimizers

# ---- record 8 --------------------------------------------------------------------------------------------------------


class SeparateProjections(Attention):
    """The same attention with q, k and v as a matrix and a matrix product each."""

    def __init__(self, merged: Attention):
        nn.Module.__init__(self)
        self.num_heads, self.proj, self.method = merged.num_heads, merged.proj, merged.method
        self.q, self.k, self.v = (nn.Parameter(matrix.detach().clone()) for matrix in merged.qkv)

    def queries_keys_values(self, x: Tensor) -> list[Tensor]:  # three of (B, H, T, D)
        B, T, C = x.shape

        def heads(matrix: Tensor) -> Tensor:
            return linear(x, matrix).view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)

        return [norm(heads(self.q)), norm(heads(self.k)), heads(self.v)]


def separate_projections(model: GPT):
    """Replace each layer's merged projection by three."""
    for block in model.blocks:
        block.attention = SeparateProjections(block.attention)


def plain_loss(model: GPT):
    """Return the model with F.cross_entropy of all its float32 logits."""

    def loss(tokens: Tensor, targets: Tensor, *, plan) -> Tensor:
        return F.cross_entropy(model(tokens, plan=plan).flatten(0, 1), targets.flatten())

    return loss


def with_default_sdpa(call):
    """Return `call` with FlashAttention-2 first on CUDA, as PyTorch had it when the record was set."""
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]

    @functools.wraps(call)
    def run(*args, **kwargs):
        with sdpa_kernel(order, set_priority=True):
            return call(*args, **kwargs)

    return run


def orthogonalise(x: Tensor) -> Tensor:
    """Orthogonalise by Newton-Schulz as the record does, 6 m^2 n FLOP an iteration. x: (m, n), m <= n, in its final
    dtype."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        product = gram @ x
        x = 3.4445 * x - 4.7750 * product + 2.0315 * gram @ product
    return x


class MatrixMuon(torch.optim.Optimizer):
    """Muon, one matrix after another; the update is that of optim/muon.py."""

    def __init__(self, params, dtype: torch.dtype, lr: float = 0.02, momentum: float = 0.95, compile: bool = False):
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self.dtype = dtype
        self.orthogonalise = torch.compile(orthogonalise, dynamic=False) if compile else orthogonalise

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(p.grad)
                directions = p.grad.add(buffer, alpha=group["momentum"]).to(self.dtype)
                rows, cols = p.shape[-2:]
                for matrix, x in zip(p.view(-1, rows, cols), directions.view(-1, rows, cols)):
                    x = self.orthogonalise(x.mT).mT if rows > cols else self.orthogonalise(x)
                    matrix.add_(x, alpha=-group["lr"] * max(1, rows / cols) ** 0.5)


# ---- nanoGPT ---------------------------------------------------------------------------------------------------------


class NanoBlock(nn.Module):
    def __init__(self, model_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(model_dim, bias=False) for _ in range(2))
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.proj = nn.Linear(model_dim, model_dim, bias=False)
        self.up = nn.Linear(model_dim, 4 * model_dim, bias=False)
        self.down = nn.Linear(4 * model_dim, model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class NanoGPT(nn.Module):
    """Without biases and dropout. The computation in `dtype` is by autocast, where it is not float32."""

    def __init__(self, vocab_size: int, num_layers: int, num_heads: int, model_dim: int, length: int, dtype):
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding(vocab_size, model_dim)  # the head's matrix too
        self.positions = nn.Embedding(length, model_dim)
        self.blocks = nn.ModuleList(NanoBlock(model_dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(model_dim, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * num_layers) ** 0.5 if into_residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor, *, plan=None) -> Tensor:
        """Return the mean cross-entropy in nats. tokens, targets: (B, T); the plan of our models is not used."""
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: NanoGPT) -> Optimizers:
    """Return nanoGPT's optimizer for GPT-2: weight decay on matrices only. The gradient is not clipped, but the step
    takes its norm, which is what clipping costs."""

    def make(decay: float) -> functools.partial:
        return functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = dict(matrices=Group(matrices, make(0.1), 6e-4), vectors=Group(vectors, make(0.0), 6e-4))
    return Optimizers(groups)
