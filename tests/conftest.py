"""Before the first test file imports Triton, as Triton's decorators ask for this then."""

import os

import torch

if not torch.cuda.is_available():  # its kernels run tile by tile in numpy: the same code, without a GPU
    os.environ.setdefault("TRITON_INTERPRET", "1")
