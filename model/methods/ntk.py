"""RoPE+NTK: dynamic NTK interpolation (bloc97 2023). Beyond the training length the base becomes base * s^(d/(d-2)),
s = L_inf / L_tr (paper, appendix "RoPE hyperparameters"). So the frequency of the slowest pair is divided by s."""

from errors import require
from model.methods.rope import BASE, LengthScaledRoPE


class NTK(LengthScaledRoPE):
    def __init__(self, shape, base: float = BASE, stretch: float | None = None):
        super().__init__(shape, base, stretch)
        require(shape.head_dim > 2, "NTK divides by head_dim - 2. Use wider heads.")

    def frequencies(self, target_length):
        d = self.head_dim
        return self.geometric(self.base * self.length_ratio(target_length) ** (d / (d - 2))), 1.0
