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

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: object  # a function under triton.jit
    arguments: tuple
    constants: dict
    options: dict  # num_warps, num_stages


def record_launches(module, kernels, call) -> list[Launch]:
    """Return the launches that call() makes of these kernels of a module, in their order. None of them runs."""
    recorders = {name: mock.MagicMock() for name in kernels}
    with mock.patch.multiple(module, **recorders):
        call()
    launches = []
    for name, recorder in recorders.items():
        for launch in recorder.__getitem__.return_value.call_args_list:  # kernel[grid](*arguments, **constants)
            constants, defaults = dict(launch.kwargs), dict(num_warps=4, num_stages=3)
            options = {option: constants.pop(option, value) for option, value in defaults.items()}
            launches.append(Launch(getattr(module, name), launch.args, constants, options))
    return launches


def flash_launches(flash, inputs, coefficients, arch: int, key_bias) -> dict[str, Launch]:
    """Return the launches of flash.py by role for q, k, v and the gradient of the output. arch: 90 for sm_90."""
    choose_tiles, c = flash.choose_tiles, coefficients
    functions = c.table, c.polynomials, c.tangent, list(c.degrees), c.far, c.line, c.window or 0, 0

    def choose(dtype, block_d, capability, bounded):
        return choose_tiles(dtype, block_d, divmod(arch, 10), bounded)

    def call():
        q, k, v, do = inputs
        o, lse = flash.forward_op(q, k, v, c.parameter, key_bias, None, *functions, c.bounded and key_bias is None)
        flash.backward_op(do, q, k, v, o, lse, key_bias, None, *functions)

    roles = ("forward", "query_gradient", "key_gradient", "delta")
    with mock.patch.object(flash, "choose_tiles", choose):
        return dict(zip(roles, record_launches(flash, [f"{role}_kernel" for role in roles], call), strict=True))


def compile_launch(launch: Launch, arch: int) -> tuple[str, str, int]:
    """Return the PTX, nvdisasm's listing of the machine code, and the bytes of stack of a thread."""
    signature, constants, attributes = {}, {}, {}
    for i, (name, argument) in enumerate(zip(launch.kernel.arg_names, launch.arguments)):
        is_tensor, is_float = isinstance(argument, torch.Tensor), isinstance(argument, float)
        signature[name] = TYPES[argument.dtype] if is_tensor else "fp32" if is_float else "i32"
        if not (is_tensor or is_float) and argument == 1:  # triton.jit specialises on 1 and on multiples of 16
            signature[name], constants[name] = "constexpr", 1
        if is_tensor or not is_float and argument % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in launch.constants}
    source = ASTSource(launch.kernel, signature, constants | launch.constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = re.search(r"STACK:(\d+)", nvidia_tool("cuobjdump", "-res-usage", file.name))
        listing = nvidia_tool("nvdisasm", "-c", file.name)
    return binary.asm["ptx"], listing, int(usage[1])


def nvidia_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def innermost_loops(listing: str, needed: str) -> list[list[str]]:
    """Return the opcodes of each innermost loop of those that have an opcode containing `needed`."""
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
