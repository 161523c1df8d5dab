"""Sliding windows: a query sees itself and the window - 1 keys before it (Beltagy et al. 2020, arXiv 2004.05150).

The local layers of RNoPE-SWA (Yang et al. 2025, arXiv 2501.18795) and SWAN (window 512) have sliding windows.
"""

from model.methods.base import Window


class SlidingWindow(Window):
    lengths = ("window",)

    def __init__(self, shape, window: float = 512.0):
        """window: number of tokens, including the query's token. It is rounded."""
        super().__init__()
        self.window = max(1, round(window))
