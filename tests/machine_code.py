"""Compile Triton kernels for a GPU that is not there, and read their machine code."""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.attention.base import Plan
from model.attention.triton import flash, prepare

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: object  # a function under triton.jit
    arguments: tuple
    constants: dict
    options: dict  # num_warps, num_stages


def flash_launches(method, length: int, head_dim: int, dtype: torch.dtype) -> dict[str, Launch]:
    """Return the launches of flash.py, by the kernel's name, for a forward and a backward pass. None of them runs."""
    names, x = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"], torch.zeros(1, 2, length, head_dim)
    x = x.to(dtype)
    plan = Plan("triton", 2, head_dim, length, length, dtype=dtype, window=method.window and method.window.window)
    key_bias = method.key_bias and torch.zeros(1, 2, length)
    recorders = {name: mock.MagicMock() for name in names}
    with mock.patch.multiple(flash, **recorders):
        t = prepare(method.score_change, plan)
        forward = x, x, x, t.parameter, key_bias, None, t.functions, t.tangent, t.window, 0
        lse = flash.forward_op(*forward)[1]
        flash.backward_op(x, x, x, x, lse, lse, *forward[4:])
    launches = {}
    for name, recorder in recorders.items():  # kernel[grid](*arguments, **constants)
        (call,) = recorder.__getitem__.return_value.call_args_list
        constants = dict(call.kwargs)
        options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
        launches[name] = Launch(getattr(flash, name), call.args, constants, options)
    return launches


def compile_launch(launch: Launch, arch: int):
    """Return Triton's compiled kernel, and nvdisasm's listing of its machine code."""
    signature, constants, attributes = {}, {}, {}
    for i, (name, argument) in enumerate(zip(launch.kernel.arg_names, launch.arguments)):
        if argument is None or type(argument) is int and argument == 1:  # triton.jit makes constants of these
            signature[name], constants[name] = "constexpr", argument
        elif type(argument) is float:
            signature[name] = "fp32"
        else:
            is_tensor = isinstance(argument, torch.Tensor)
            signature[name] = TYPES[argument.dtype] if is_tensor else "i32"
            if (argument.data_ptr() if is_tensor else argument) % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in launch.constants}
    return compile_kernel(launch.kernel, signature, constants | launch.constants, attributes, launch.options, arch)


def compile_kernel(kernel, signature: dict, constants: dict, attributes: dict, options: dict, arch: int):
    """Return Triton's compiled kernel, and nvdisasm's listing of its machine code."""
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        listing = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return binary, listing


def innermost_loops(listing: str, needed: str) -> list[list[str]]:
    """Return the opcodes of each innermost loop that has an opcode containing `needed`."""
    opcodes, labels, loops = [], {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*(\w+)(.*?);", line):
            opcodes.append(instruction[1])
            target = re.search(r"`\(\.(L_x_\d+)\)", instruction[2])
            if instruction[1] == "BRA" and target and target[1] in labels:
                loops.append((labels[target[1]], len(opcodes)))
    loops = [(begin, end) for begin, end in loops if any(needed in opcode for opcode in opcodes[begin:end])]
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
    return [opcodes[begin:end] for begin, end in sorted(inner)]


def count(loop: list[str], *opcodes: str) -> int:
    return sum(opcode in opcodes for opcode in loop)
