"""PoPE: polar coordinate position embedding (Gopalakrishnan et al. 2025, arXiv 2509.10534). The entries of q and k
give magnitudes, and positions alone give phases. So content and position are separate, unlike in RoPE:

    S_ij = sum over c of softplus(q_ic) softplus(k_jc) cos((j - i) theta_c + delta_c) / sqrt(d),
    theta_c = base^(-c/d),   c = 0..d-1

S is a product of vectors (mu cos, mu sin), which are twice as wide. Each head learns delta, a phase of the keys. Ours
starts at 0, so the rest of the model starts with the same weights for every method. The paper keeps delta within
[-2 pi, 0]. Ours is unlimited, because phases are periodic. QK-norm comes before the softplus, as before all rotations
here, so S is at most (1 + ln 2)^2 sqrt(d). After the softplus, QK-norm would remove the mean magnitude.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model.methods.base import Rotation
from model.methods.rope import BASE


class PoPE(Rotation):
    widening = 2
    lengths = ("base",)  # the slowest wavelength is about 2 pi times the base

    def __init__(self, shape, base: float = BASE):
        super().__init__()
        self.head_dim = shape.head_dim
        self.base = base
        self.delta = nn.Parameter(torch.zeros(shape.num_heads, shape.head_dim))

    def frequencies(self, target_length):
        theta = self.base ** -(torch.arange(self.head_dim, dtype=torch.float64) / self.head_dim)  # (D,)
        return theta, 2**0.25  # of q and k, since backends divide S by sqrt(2 D), not by sqrt(D)

    def rotate(self, x, cos, sin):  # x (B, H, T, D); cos, sin (T, D)
        magnitude = F.softplus(x)
        return torch.cat((magnitude * cos, magnitude * sin), dim=-1)  # (B, H, T, 2 D)

    def rotate_keys(self, x, cos, sin):
        delta = self.delta.to(x.dtype).unsqueeze(1)  # (H, 1, D)
        cos_of_sum = cos * delta.cos() - sin * delta.sin()
        sin_of_sum = sin * delta.cos() + cos * delta.sin()
        return self.rotate(x, cos_of_sum, sin_of_sum)
