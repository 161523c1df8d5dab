"""PaTH attention (Yang et al. 2025, arXiv 2505.16381): each token reflects the keys before it, so that a key reaches a
query through what lies between them,

    S_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(d),   H_t = I - beta_t w_t w_t^T,   beta_t = 2 sigmoid(u . x_t + b),

followed by the causal softmax. w_t comes from x, the input of the layer: a projection of rank 32, a convolution over
the last three tokens for each entry, SiLU, and the norm 1. PaTH-FoX adds the forgetting gates of forgetting.py.

Plain PyTorch, in blocks of N tokens and float32. In a block, the coefficients u_t of w_t that are taken from a vector
on its way solve a triangular system (the UT transform of the paper: no product of matrices is formed),

    u_t = beta_t w_t . (k_j - sum over s = j + 1..t - 1 of w_s u_s),

and keys of earlier blocks, kept as they are at the block's first token, all take the same step to its end: they are
also all that decoding keeps. Training keeps them for every block, T / (2 N) times the keys, and nothing else of T x T.

What departs from the paper is QK-norm, which q and k have in this repository, and how it starts: u and b at zero
(theirs: u from N(0, 0.02)), the weights of w uniform within one over the root of their inputs, as the model's other
matrices (theirs: N(0, 0.02)); the norm of w takes most of that out. u and w are trained with Adam, as all of a method.
In the authors' code a gate f of PaTH-FoX counts as f^(1/sqrt(d)), here it counts whole, as in FoX (results/authors.md).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from errors import require
from model.methods.base import Replacement, upcast
from model.methods.forgetting import Forgetting

BLOCK = 64  # tokens
TAPS = 3  # tokens that the convolution sees
EPS = 1e-6  # the least square of a norm, as in the authors' code


class PaTH(Replacement):
    needs_input = True

    def __init__(self, num_heads, head_dim, train_length, rank: int = 32):
        """rank: of the projection of x that gives w."""
        super().__init__()
        require(rank >= 1, f"rank must be at least 1, got {rank}")
        self.head_dim = head_dim
        self.down = nn.Parameter(torch.zeros(1, rank, num_heads * head_dim))  # the same for all heads
        self.up = nn.Parameter(torch.zeros(num_heads, head_dim, rank))
        self.convolution = nn.Parameter(torch.zeros(num_heads, head_dim, TAPS))
        self.beta = nn.Parameter(torch.zeros(num_heads, num_heads * head_dim))
        self.bias_of_beta = nn.Parameter(torch.zeros(num_heads))

    def reset_parameters(self):
        for weight in (self.down, self.up, self.convolution):
            weight.uniform_(-(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def of_tokens(self, x):
        """Return w before its convolution, and the logit of beta / 2: (B, H, T, D + 1)."""
        down, up, beta = (weight.flatten(0, -2).to(x.dtype) for weight in (self.down, self.up, self.beta))
        w = upcast(F.linear(F.linear(x, down), up)).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        logit = upcast(F.linear(x, beta)) + self.bias_of_beta  # (B, T, H)
        return torch.cat((w, logit.unsqueeze(-1)), dim=-1).transpose(1, 2)

    def reflections(self, of_tokens):
        """Return w (B, H, T, D), of norm 1, and beta (B, H, T, 1), where nothing comes before the first token."""
        w, logit = of_tokens[..., : self.head_dim], of_tokens[..., self.head_dim : self.head_dim + 1]
        padded, T = F.pad(w, (0, 0, TAPS - 1, 0)), w.shape[2]
        taps = self.convolution.unsqueeze(1).unbind(-1)  # TAPS of (H, 1, D)
        w = F.silu(sum(padded[:, :, i : i + T] * tap for i, tap in enumerate(taps)))
        return w * (w.square().sum(dim=-1, keepdim=True) + EPS).rsqrt(), 2 * logit.sigmoid()

    def key_bias(self, of_tokens):
        """Return what is added to the logits of each key, (B, H, T), or None."""
        return None

    @torch.compiler.disable  # for the blocks of three layers of 256 tokens Inductor takes more than 4 minutes
    def attend(self, q, k, v, rotated_q, rotated_k, q_offset, causal_attention, of_tokens):
        rotated_q = F.pad(rotated_q, (0, 0, q_offset, 0))  # blocks begin at the first key
        w, beta = self.reflections(of_tokens)
        bias, keys, outputs = self.key_bias(of_tokens), upcast(k[:, :, :0]), []
        for start in range(0, k.shape[2], BLOCK):
            here, seen = slice(start, start + BLOCK), slice(0, start + BLOCK)
            own = rotated_q[:, :, here], rotated_k[:, :, here], w[:, :, here], beta[:, :, here]
            all_seen = keys, v[:, :, seen], None if bias is None else bias[:, :, seen]
            if torch.is_grad_enabled():  # all weights of all blocks would not fit: they are computed once more
                output, keys = checkpoint(attend_block, *own, *all_seen, use_reentrant=False)
            else:
                output, keys = attend_block(*own, *all_seen)
            outputs.append(output)
        return torch.cat(outputs, dim=2)[:, :, q_offset:]

    def start_decoding(self, k, v, rotated_k, of_tokens):
        blocks = (x.split(BLOCK, dim=2) for x in (upcast(rotated_k), *self.reflections(of_tokens)))
        keys = upcast(k[:, :, :0])
        for k, w, beta in zip(*blocks):
            keys = carry(keys, k, w, *solve(k, w, beta))
        return keys, v, of_tokens[:, :, 1 - TAPS :], self.key_bias(of_tokens)

    def decode(self, state, q, k, v, rotated_q, rotated_k, causal_attention, of_tokens):
        keys, values, recent, bias = state
        recent, values = torch.cat((recent, of_tokens), dim=2), torch.cat((values, v), dim=2)
        w, beta = (x[:, :, -1:] for x in self.reflections(recent))
        if bias is not None:  # a sum over the tokens
            bias = torch.cat((bias, bias[:, :, -1:] + self.key_bias(of_tokens)), dim=2)
        output, keys = attend_block(rotated_q, rotated_k, w, beta, keys, values, bias)
        return output, (keys, values, recent[:, :, 1 - TAPS :], bias)


class PaTHFoX(PaTH):
    def __init__(self, num_heads, head_dim, train_length, rank: int = 32, forget_bias: float = 0.0):
        """forget_bias: see Forgetting."""
        super().__init__(num_heads, head_dim, train_length, rank)
        self.forgetting = Forgetting(num_heads, head_dim, train_length, forget_bias)

    def of_tokens(self, x):
        return torch.cat((super().of_tokens(x), self.forgetting.of_tokens(x).unsqueeze(-1)), dim=-1)

    def key_bias(self, of_tokens):
        return self.forgetting.bias(of_tokens[..., -1])


def solve(k, w, beta):
    """Return what the reflections of one block take from keys, as coefficients of its w.

    k, w (B, H, N, D), beta (B, H, N, 1). First (B, H, N, N): row t of column j holds u_t of key j, which is of the same
    block and sees the reflections after its own. Second (B, H, N, D): the row t of which the product with a vector that
    sees all of the block's reflections is its u_t.
    """
    scaled = beta * w
    taken = torch.cat(((scaled @ k.mT).tril(-1), scaled), dim=-1)  # if the others had taken nothing
    solved = torch.linalg.solve_triangular((scaled @ w.mT).tril(-1), taken, upper=False, unitriangular=True)
    return solved.split((k.shape[2], k.shape[3]), dim=-1)


def carry(keys, k, w, taken, pull):
    """Return the keys as they are at the end of a block, (B, H, M + N, D): those before it, keys (B, H, M, D), which
    are as at its start, and its own k. taken, pull: see solve."""
    return torch.cat((keys - keys @ (pull.mT @ w), k - taken.mT @ w), dim=2)


def attend_block(q, k, w, beta, keys, v, bias):
    """Return the output (B, H, N, D) of one block, and the keys as they are at its end.

    q, k, w (B, H, N, D) and beta (B, H, N, 1) are the block's; keys (B, H, M, D): those before it, as they are at its
    start; v (B, H, M + N, D); bias (B, H, M + N) or None.
    """
    (N, D), M = q.shape[2:], keys.shape[2]
    q, k = upcast(q) * D**-0.5, upcast(k)
    taken, pull = solve(k, w, beta)
    passed = (q @ w.mT).tril()  # a query meets the reflections of its own token and of those before it
    logits = torch.cat(((q - passed @ pull) @ keys.mT, q @ k.mT - passed @ taken), dim=-1)  # (B, H, N, M + N)
    if bias is not None:
        logits = logits + bias.unsqueeze(2)
    hidden = torch.ones(N, M + N, dtype=torch.bool, device=q.device).triu(M + 1)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return weights.to(v.dtype) @ v, carry(keys, k, w, taken, pull)
