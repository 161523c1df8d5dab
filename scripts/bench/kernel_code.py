"""Show what the Triton kernels become on a GPU that need not be there: registers, memory, and instructions a logit.

    python -m scripts.kernel_code --arch 80 90
    python -m scripts.kernel_code --variants si --tiles key_gradient 64 64 4 2
    python -m scripts.kernel_code --variants loss

compiles them to machine code (triton brings the compiler and the disassembler) and counts, in each main loop (masked,
near, far, line and edge, see flash_kernels.py), the instructions a thread issues for each of its logits:
of all kinds, on the special-function unit (MUFU), loads from global and from shared memory, and spills. A count is no
time, but what a transform adds to it says what it costs where the instructions are the bottleneck. Of the cross-entropy
of the head (loss) it counts those of its two walks over a row, and what makes threads wait for each other.
"""

import argparse
import dataclasses
import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from errors import exit_on_user_error, require
from model.attention.triton import cross_entropy, flash, prepare
from model.attention.triton.distance import Coefficients
from scripts.bench.variants import Case, online, table_only
from scripts.shared.tables import markdown_table

ROLES = ("forward", "query_gradient", "key_gradient")  # the keys of choose_tiles
LENGTH, HEADS, WINDOW = 4096, 6, 512
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64"}
COUNTED = {  # by its column, the opcodes of which an instruction's first part is one
    "special": ("MUFU",),
    "global_loads": ("LDG", "LDGSTS"),
    "shared_loads": ("LDS", "LDSM"),
    "spills": ("LDL", "STL"),
}
WAITS = {"barriers": ("BAR",), "shuffles": ("SHFL",)}  # of the loss


def of_method(formula: str, window: int | None = None) -> Callable[[Case], Coefficients | None]:
    return lambda case: prepare(case.method(formula).score_change, dataclasses.replace(case.call, window=window))


VARIANTS = {  # what the kernels are told of a_t and m_t, and, but for those with a running maximum, of |q| and |k|
    "plain": of_method("plain"),
    "plain:online": functools.partial(online, formula="plain"),
    "si": of_method("si"),  # a table, further away cubics, then lines
    "si:online": functools.partial(online, formula="si"),
    "si:table": table_only,
    "alibi": of_method("alibi"),
    "plain:window": of_method("plain", WINDOW),
    "si:window": of_method("si", WINDOW),
    "plain:key_bias": of_method("plain"),
    "si:key_bias": of_method("si"),
}


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launch of a kernel of flash.py, that may be run or compiled."""

    kernel: object  # what triton.jit made
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict
    options: dict  # num_warps, num_stages

    @property
    def tiles(self) -> flash.Tiles:
        return flash.Tiles(self.constants["QUERIES"], self.constants["KEYS"], *self.options.values())

    def run(self):
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)


def kernel_launches(
    inputs: list[Tensor],
    coefficients: Coefficients | None,
    tiles: dict[str, flash.Tiles] | None = None,
    arch: int | None = None,
    key_bias: Tensor | None = None,
) -> dict[str, Launch]:
    """Return the launches that flash.py makes for q, k, v and the gradient of the output, by role, and "delta", which
    the gradients need. None is run.

    tiles: of some roles, instead of those that are chosen. arch: 90 stands for compute capability 9.0, and tiles are
    chosen for that, whatever GPU is here. key_bias (B, H, T): in bits, float32.
    """
    choose_tiles = flash.choose_tiles

    def choose(dtype, block_d, capability, bounded):
        capability = capability if arch is None else divmod(arch, 10)
        return choose_tiles(dtype, block_d, capability, bounded) | (tiles or {})

    recorders = {f"{role}_kernel": mock.MagicMock() for role in (*ROLES, "delta")}
    q, k, v, do = inputs
    c = coefficients or Coefficients(torch.empty(0, 1, 1, device=q.device))
    functions = c.table, c.polynomials, c.tangent, list(c.degrees), c.far, c.line, c.window or 0, 0
    with mock.patch.multiple(flash, choose_tiles=choose, **recorders):
        o, lse = flash.forward_op(q, k, v, c.parameter, key_bias, None, *functions, c.bounded and key_bias is None)
        flash.backward_op(do, q, k, v, o, lse, key_bias, None, *functions)
    launches = {}
    for name, recorder in recorders.items():  # of kernel[grid](*arguments, **constants, **options)
        (grid,), call = recorder.__getitem__.call_args.args, recorder.__getitem__.return_value.call_args
        options = dict(num_warps=call.kwargs.pop("num_warps", 4), num_stages=call.kwargs.pop("num_stages", 3))
        launches[name.removesuffix("_kernel")] = Launch(getattr(flash, name), grid, call.args, call.kwargs, options)
    return launches


# ---- compiling and counting ------------------------------------------------------------------------------------------


def kernel_code(
    variant: str, arch: int = 90, head_dim: int = 128, kernels: tuple[str, ...] = ROLES, tiles: dict | None = None
) -> list[dict]:
    """Compile one of VARIANTS for compute capability arch / 10 and describe the machine code, a dict a kernel.

    Keys: kernel, tiles, registers (of a thread), stack (bytes of a thread: spilled registers), shared (bytes) and
    loops, a dict each: name and, a logit, instructions and the kinds in COUNTED. Raise ValueError for what is unknown,
    and in Triton's interpreter, which does not compile.
    """
    require(variant in VARIANTS, f"unknown variant {variant!r}; valid: {', '.join(VARIANTS)}")
    is_covered = 1 <= head_dim <= flash.MAX_HEAD_DIM
    require(is_covered, f"the kernels cover head dimensions from 1 to {flash.MAX_HEAD_DIM}, not {head_dim}")
    check_compiler(arch)
    case = Case(1, HEADS, LENGTH, head_dim, torch.bfloat16, torch.device("cpu"))
    inputs = torch.zeros(4, 1, LENGTH, HEADS, head_dim, dtype=case.dtype).transpose(2, 3).unbind()
    key_bias = torch.zeros(1, HEADS, LENGTH) if variant.endswith(":key_bias") else None
    launches = kernel_launches(inputs, VARIANTS[variant](case), tiles, arch, key_bias)
    return [dict(kernel=kernel, **compile_launch(launches[kernel], arch)) for kernel in kernels]


def check_compiler(arch: int):
    require(arch >= 80, f"the kernels need compute capability 8.0 or newer: --arch 80, not {arch}")
    require(not flash.INTERPRETED, "TRITON_INTERPRET is set, and the interpreter compiles nothing: unset it")


def loss_code(arch: int = 90, dtype: torch.dtype = torch.bfloat16, vocab_size: int = 50_304) -> list[dict]:
    """Compile the cross-entropy with and without its gradient, and describe the machine code, a dict each.

    Keys: kernel, block (logits at a time), warps, registers, stack, and loops (the walks over a row), a dict each:
    name and, a logit, instructions and special; and WAITS, a turn of the loop. Raise ValueError as kernel_code does."""
    check_compiler(arch)
    rows = []
    for gradient in (True, False):
        recorder = mock.MagicMock()
        logits, targets, losses = torch.zeros(1, vocab_size, dtype=dtype), torch.zeros(1, dtype=int), torch.zeros(1)
        with mock.patch.object(cross_entropy, "cross_entropy_kernel", recorder):
            cross_entropy.cross_entropy_(logits, targets, losses, gradient)
        call = recorder.__getitem__.return_value.call_args
        options = dict(num_warps=call.kwargs.pop("num_warps"))
        launch = Launch(cross_entropy.cross_entropy_kernel, (1,), call.args, call.kwargs, options)
        _, usage, code = machine_code(launch, arch)
        block, warps = launch.constants["BLOCK"], options["num_warps"]
        loops = []
        walks = ("sum", "gradient")[: 1 + gradient]
        for name, opcodes in zip(walks, innermost_loops(code, "MUFU"), strict=True):
            counts = dict(instructions=len(opcodes), special=count(opcodes, COUNTED["special"]))
            counts = {kind: number * 32 * warps / block for kind, number in counts.items()}
            loops.append(dict(name=name, **counts, **{kind: count(opcodes, names) for kind, names in WAITS.items()}))
        what = "with its gradient" if gradient else "alone"
        rows.append(dict(kernel=f"loss {what}", block=block, warps=warps, **usage, loops=loops))
    return rows


def compile_launch(launch: Launch, arch: int) -> dict:
    """Return what kernel_code does about one kernel."""
    shared, usage, code = machine_code(launch, arch)
    c, tiles = launch.constants, launch.tiles
    also = dict(near=c["NEAR"], far=c["FAR"] or not c["NEAR"], line=c["LINE"], edge=c["WINDOW"] > 0)
    stretches = ["masked", *(name for name, is_there in also.items() if is_there)]
    loops = count_loops(code, logits=tiles.queries * tiles.keys / (32 * tiles.warps))
    if len(loops) != len(stretches):  # the compiler split or merged some
        stretches = [f"loop {i + 1}" for i in range(len(loops))]
    return dict(
        tiles=dataclasses.asdict(tiles),
        **usage,
        shared=shared,
        loops=[dict(name=name, **counts) for name, counts in zip(stretches, loops)],
    )


def machine_code(launch: Launch, arch: int) -> tuple[int, dict, str]:
    """Return bytes of shared memory, registers and stack (a dict), and nvdisasm's listing."""
    signature, constants, attributes = {}, {}, {}
    for i, (name, argument) in enumerate(zip(launch.kernel.arg_names, launch.arguments)):
        is_tensor, is_float = isinstance(argument, Tensor), isinstance(argument, float)
        signature[name] = TYPES[argument.dtype] if is_tensor else "fp32" if is_float else "i32"
        if not (is_tensor or is_float) and argument == 1:  # as triton.jit specialises: on 1, and on multiples of 16
            signature[name], constants[name] = "constexpr", 1
        if is_tensor or not is_float and argument % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in launch.constants}
    source = ASTSource(launch.kernel, signature, constants | launch.constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", nvidia_tool("cuobjdump", "-res-usage", file.name))
        code = nvidia_tool("nvdisasm", "-c", file.name)
    return binary.metadata.shared, dict(registers=int(usage[1]), stack=int(usage[2])), code


def nvidia_tool(name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def count_loops(code: str, logits: float) -> list[dict]:
    """Count instructions a logit in the innermost loops with matrix products, in the order of nvdisasm's listing.

    logits: of a thread in one turn of the loop."""
    counts = []
    for opcodes in innermost_loops(code, "MMA"):
        kinds = {name: count(opcodes, kind) / logits for name, kind in COUNTED.items()}
        counts.append(dict(instructions=len(opcodes) / logits, **kinds))
    return counts


def count(opcodes: list[str], kind: tuple[str, ...]) -> int:
    return sum(opcode in kind for opcode in opcodes)


def innermost_loops(code: str, needed: str) -> list[list[str]]:
    """Return the opcodes of each loop of nvdisasm's listing that has an opcode containing `needed`, and in which there
    is no other such loop."""
    opcodes, labels, loops = [], {}, []
    for line in code.splitlines():
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


# ---- the command -----------------------------------------------------------------------------------------------------


def table(variant_rows: dict[str, list[dict]]) -> str:
    counted = ["instructions", "special", "global", "shared", "spills"]
    rows = [["kernel", "tiles", "registers", "stack B", "shared KiB", "loop", *counted]]
    for variant, kernels in variant_rows.items():
        for k in kernels:
            memory = [str(k["registers"]), str(k["stack"]), f"{k['shared'] / 1024:.0f}"]
            cells = [f"{variant} {k['kernel']}", describe(flash.Tiles(**k["tiles"])), *memory]
            for loop in k["loops"]:
                rows.append([*cells, loop["name"], *(f"{loop[key]:.2f}" for key in ("instructions", *COUNTED))])
                cells = [""] * len(cells)
    return markdown_table(rows)


def loss_table(kernels: list[dict]) -> str:
    rows = [["kernel", "block", "warps", "registers", "stack B", "loop", "instructions", "special", *WAITS]]
    for k in kernels:
        cells = [str(k[key]) for key in ("kernel", "block", "warps", "registers", "stack")]
        for loop in k["loops"]:
            counts = [f"{loop[key]:.2f}" for key in ("instructions", "special")] + [str(loop[key]) for key in WAITS]
            rows.append([*cells, loop["name"], *counts])
            cells = [""] * len(cells)
    return markdown_table(rows)


def describe(tiles: flash.Tiles) -> str:
    return "{queries} x {keys}, {warps} warps, {stages} stages".format(**dataclasses.asdict(tiles))


def read_tiles(words: list[str]) -> flash.Tiles:
    queries, keys, warps, stages = (int(word) if word.isdecimal() else 0 for word in words)
    require(
        {queries, keys} <= {16, 32, 64, 128} and warps in (1, 2, 4, 8, 16) and stages > 0,
        "queries and keys of a tile are 16, 32, 64 or 128, warps a power of 2 up to 16, stages at least 1: "
        f"got {' '.join(words)}",
    )
    return flash.Tiles(queries, keys, warps, stages)


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.kernel_code", description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[90], help="compute capability, 90 for 9.0 (Hopper)")
    parser.add_argument("--head-dim", type=int, default=128)
    variants = [*VARIANTS, "loss"]
    parser.add_argument("--variants", nargs="+", default=variants, metavar="NAME", help=", ".join(variants))
    tile = ("KERNEL", "QUERIES", "KEYS", "WARPS", "STAGES")
    parser.add_argument("--tiles", nargs=5, metavar=tile, help="only this kernel, with these")
    args = parser.parse_args()
    with exit_on_user_error():
        kernels, tiles = ROLES, {}
        if args.tiles:
            kernel, *numbers = args.tiles
            require(kernel in ROLES, f"unknown kernel {kernel!r}; valid: {', '.join(ROLES)}")
            kernels, tiles = (kernel,), {kernel: read_tiles(numbers)}
        print(f"triton {triton.__version__}, bfloat16, head dimension {args.head_dim}; the last five columns: a logit")
        for arch in args.arch:
            print(f"\ncompute capability {arch / 10}\n")
            options = dict(arch=arch, head_dim=args.head_dim, kernels=kernels, tiles=tiles)
            if asked := [variant for variant in args.variants if variant != "loss"]:
                print(table({variant: kernel_code(variant, **options) for variant in asked}) + "\n", flush=True)
            if "loss" in args.variants:
                print("loss; the last two columns: a turn of the loop\n\n" + loss_table(loss_code(arch)), flush=True)
