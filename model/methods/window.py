"""Sliding windows: a query sees itself and the window - 1 keys before it (Beltagy et al. 2020, arXiv 2004.05150).

The local layers of RNoPE-SWA (Yang et al. 2025, arXiv 2501.18795) and SWAN (window 512) have them.
"""

from errors import require
from model.methods.base import Window

WINDOW = 512


class SlidingWindow(Window):
    def __init__(self, num_heads, head_dim, train_length, window: int = WINDOW):
        """window: tokens, the query's own included."""
        super().__init__()
        require(1 <= window < 2**31, f"window must be at least 1 and below 2^31, got {window}")
        self.window = window

    @classmethod
    def scaled(cls, scale, options):
        return {"window": max(1, round(WINDOW * scale))}
