"""Compiles our Triton kernels without a GPU. test_triton.py runs it without the interpreter.

For each case, an expression `arch, dtype, head_dim, method, options`, and for the cross-entropy, it prints a line a
kernel: the case and kernel, atomic instructions, bytes of shared memory, and bytes of stack (spilled registers).
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.attention.triton import cross_entropy, flash
from model.attention.triton.distance import make_coefficients
from model.methods import make_method

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64"}


def record(module, name):
    """Replace a kernel of a module; its mock then knows how it would have been launched."""
    return mock.patch.object(module, name, mock.MagicMock(kernel=getattr(module, name)))


def compile_kernel(recorder, arch):
    """Return atomic instructions, shared memory and stack of the launch that the mock has seen."""
    call, kernel = recorder.__getitem__.return_value.call_args, recorder.kernel
    options = {name: call.kwargs.pop(name) for name in ("num_warps", "num_stages") if name in call.kwargs}
    signature, constants, attributes = {}, {}, {}
    for i, (name, x) in enumerate(zip(kernel.arg_names, call.args)):
        is_tensor, is_float = isinstance(x, torch.Tensor), isinstance(x, float)
        signature[name] = TYPES[x.dtype] if is_tensor else "fp32" if is_float else "i32"
        if not (is_tensor or is_float) and x == 1:  # triton.jit specialises on 1, and on multiples of 16
            signature[name], constants[name] = "constexpr", 1
        if is_tensor or not is_float and x % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in call.kwargs}
    source = ASTSource(kernel, signature, constants | call.kwargs, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    atomics = len(re.findall(r"\b(?:atom|red)\.", binary.asm["ptx"]))
    return atomics, binary.metadata.shared, int(re.search(r"STACK:(\d+)", usage)[1])


for case in sys.argv[1:]:
    arch, dtype, head_dim, name, options = eval(case, vars(torch))
    method = make_method(name, num_heads=2, head_dim=head_dim, train_length=64, **options)
    c = make_coefficients(method.score_change, 2, head_dim, 300, 0, dtype, "cpu", 1.1 * head_dim)
    q, k, v, do = torch.zeros(4, 1, 2, 300, head_dim, dtype=dtype)
    key_bias = None if method.key_bias is None else torch.zeros(1, 2, 300)
    window = 0 if method.window is None else method.window.window
    functions = c.table, c.polynomials, c.tangent, list(c.degrees), c.far, c.line, window, 0
    choose, capability = flash.choose_tiles, divmod(arch, 10)
    roles = ("forward", "query_gradient", "key_gradient", "delta")
    with mock.patch.object(flash, "choose_tiles", lambda dtype, d, _, bounded: choose(dtype, d, capability, bounded)):
        recorders = {role: record(flash, f"{role}_kernel") for role in roles}
        mocks = {role: recorder.start() for role, recorder in recorders.items()}
        o, lse = flash.forward_op(q, k, v, c.parameter, key_bias, None, *functions, c.bounded and key_bias is None)
        flash.backward_op(do, q, k, v, o, lse, key_bias, None, *functions)
        mock.patch.stopall()
    for role in roles[:3]:
        print(case, role, *compile_kernel(mocks[role], arch))

for arch in (80, 90):
    for V in (50304, 50257):
        logits, targets, losses = torch.zeros(1, V, dtype=torch.bfloat16), torch.zeros(1, dtype=int), torch.zeros(1)
        with record(cross_entropy, "cross_entropy_kernel") as recorder:
            cross_entropy.cross_entropy_(logits, targets, losses, True)
        print(arch, "cross_entropy", V, *compile_kernel(recorder, arch))
