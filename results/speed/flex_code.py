"""Count the instructions of FlexAttention's kernels for an H100 that is not there: the table of flex_code.md.

python -m results.speed.flex_code
"""

import math
from pathlib import Path

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from model.attention import flex
from model.methods.base import Method, ScoreChange, Shape
from model.methods.make import make_method
from results.gpu.attention import FlexAsWritten, Paper
from results.speed.gpu_code import compile_attention
from runtime.run_folder import git_commit
from scripts.shared.tables import markdown_table


class WithDefaultOptions(FlexAsWritten):
    def prepare(self, plan, score_change):
        return super().prepare(plan, score_change) | dict(kernel_options={})


class Approximate(ScoreChange):
    """Scale-invariant attention by the GPU's approximate logarithm and root."""

    def change(self, score, distance, head):
        a = approximate("sqrt", 1 + 2 * math.log(2) * approximate("lg2", 1 + 0.1 * distance))
        return a * (score - a)


def approximate(name, x):
    from torch._higher_order_ops import inline_asm_elementwise  # from torch 2.13 on

    asm = f"{name}.approx.ftz.f32 $0, $1;"
    return inline_asm_elementwise(x, asm_str=asm, constraints="=f,f", dtype=torch.float32)


SHAPE = Shape(num_heads=2, head_dim=128, train_length=64)
OURS = make_method("scale_invariant_nope", SHAPE)
ROWS = {  # method, how FlexAttention gets it
    "plain": (make_method("nope", SHAPE), flex.Flex()),
    "ALiBi": (make_method("alibi", SHAPE), flex.Flex()),
    "scale-invariant, as the paper writes it": (Method("paper", SHAPE, [Paper(SHAPE)]), WithDefaultOptions()),
    "scale-invariant, x rsqrt(x) for the root": (OURS, FlexAsWritten()),
    "scale-invariant, lg2.approx and sqrt.approx": (Method("approximate", SHAPE, [Approximate()]), FlexAsWritten()),
    "scale-invariant, one table (`flex`)": (OURS, flex.Flex()),
    "scale-invariant, learned tau": (make_method("scale_invariant_nope", SHAPE, learn_tau=True), flex.Flex()),
}


def main():
    rows, baseline = [["scores", "forward", "dq", "dk, dv", "shared KiB", "spills", "calls", "estimated time"]], None
    for label, (method, backend) in ROWS.items():
        kernels = compile_attention(90, ("forward", "backward"), method, 1024, torch.bfloat16, backend)
        numbers = [number for kernel in kernels for number in kernel.instructions]
        # Clocks of an SM for a logit: 9 products of 2 D operations, 4096 a clock, and 128 instructions a clock.
        clocks = 9 * 2 * 128 / 4096 + sum(numbers) / 128
        baseline = baseline or clocks
        shared = " / ".join(f"{kernel.shared / 1024:.0f}" for kernel in kernels)
        spills = max(number for kernel in kernels for number in kernel.spills)
        calls = "yes" if any(kernel.has_calls for kernel in kernels) else "no"
        instructions = (f"{number:.1f}" for number in numbers)
        rows.append([label, *instructions, shared, f"{spills:.1f}", calls, f"{clocks / baseline:.2f}"])
    versions = f"torch {torch.__version__}, triton {triton.__version__}, ptxas {get_ptxas(90).version}"
    print(f"{versions}, commit {git_commit(Path())}\n\n{markdown_table(rows)}")


if __name__ == "__main__":
    main()
