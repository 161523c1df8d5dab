"""Compile FlexAttention for a GPU that is not there: trace, lower by Inductor, compile by Triton, count instructions.

Used by tests/test_flex_cuda.py, and by flex_code.py for a table.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _triton
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.attention import flex
from model.attention.attend import attend
from model.attention.choose import BACKENDS
from model.attention.plan import plan_layer
from model.gpt import GPT
from model.methods.base import Shape
from model.methods.make import make_method

META, CUDA = torch.device("meta"), torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Code:
    """The machine code of a kernel. Loops: forward; or dq, and then dk and dv."""

    shared: int  # bytes of shared memory of a block
    has_calls: bool  # of a subroutine
    instructions: list[float]  # of one thread for one logit, in each loop over whole tiles
    spills: list[float]  # loads and stores of spilled registers a logit, in the worst loop of each kind


# ---- tracing: on the meta device nothing is computed, and no code for CPUs is taken ----------------------------------


def trace(function, *arguments):
    """Return all graphs of a function and of its backward pass as Inductor gets them: [("forward", graph), ...]."""
    graphs = []

    def keep(name, graph, inputs):
        graphs.append((name, graph))
        (outputs,) = graph.graph.output_node().args

        def run(inputs):
            inputs.clear()
            return [empty_on(META, x.meta["val"]) if isinstance(x, fx.Node) else x for x in outputs]

        run._boxed_call = True
        return run

    backend = aot_autograd(
        fw_compiler=functools.partial(keep, "forward"),
        bw_compiler=functools.partial(keep, "backward"),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    with mock.patch.object(torch_flex, "_validate_device", lambda *qkv: None):  # it refuses the meta device
        torch.compile(function, backend=backend, dynamic=False)(*arguments).sum().backward()
    return graphs


def trace_attention(method, length, dtype, backend=BACKENDS["flex"], documents=False):
    """Return the graphs of attention by a method, with q, k, v (2, H, T, D) laid out as the model has them.

    documents: it stays within documents.
    """
    method, H, D = method.to(META), method.num_heads, method.head_dim
    qkv = torch.empty(2, length, 3, H, D, device=META, dtype=dtype)
    x = torch.empty(2, length, H * D, device=META, dtype=dtype) if method.needs_input else None
    plan = plan_layer(method, backend, length, length, device=META)
    if documents:
        plan = plan.within_documents(torch.empty(2, length, dtype=torch.int64, device=META))
    q, k, v = (y.detach().requires_grad_() for y in qkv.transpose(1, 3).unbind(2))
    return trace(lambda q, k, v: attend(method, q, k, v, x, plan=plan), q, k, v)


def trace_model(method, options, document_token=None):
    """Return the graphs of the loss of a model of two layers."""
    config = SimpleNamespace(
        vocab_size=512,
        num_layers=2,
        num_heads=2,
        model_dim=128,
        train_length=256,
        position_scale=1.0,
        method=method,
        method_options=options,
    )
    model = GPT(config, torch.bfloat16).to(META)
    tokens = torch.empty(2, 256, dtype=torch.int64, device=META)
    plan = model.plan(256, backend="flex", document_token=document_token)
    return trace(lambda tokens: model(tokens, tokens, plan=plan), tokens)


# ---- lowering and compiling ------------------------------------------------------------------------------------------


def empty_on(device, x):
    """Return an empty tensor like x on a device; x itself if it is no tensor."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


@contextlib.contextmanager
def absent_gpu(arch):
    """Make torch and Triton believe in a GPU of this compute capability, as far as writing code for it goes."""
    properties = SimpleNamespace(
        major=arch // 10,
        minor=arch % 10,
        name="",
        gcnArchName="",
        multi_processor_count=132,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
    )
    target = GPUTarget("cuda", arch, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))
    _triton.has_triton.cache_clear()  # without a GPU, it has said no
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_properties", properties),
            (torch.cuda, "current_device", 0),
            (CudaInterface, "is_available", True),
            (CudaInterface, "get_device_properties", properties),
            (CudaInterface.Worker, "get_device_properties", properties),
        ):
            stack.enter_context(mock.patch.object(owner, name, return_value=value))
        yield


def lower(name, graph, arch):
    """Return the code that Inductor writes for a graph of `trace`, which it moves to CUDA."""

    def moved(x):
        return CUDA if x == META else x

    with absent_gpu(arch), FakeTensorMode() as fake, torch.no_grad(), V.set_fake_mode(fake):
        for module in (module for module in graph.modules() if isinstance(module, fx.GraphModule)):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, moved)
                node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
                node.meta["val"] = tree_map(lambda x: empty_on(CUDA, x), node.meta.get("val"))
            module.recompile()
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        lowering = GraphLowering(graph, example_inputs=inputs, is_backward=name == "backward")
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            return lowering.codegen()[0].value


def compile_code(code, arch):
    """Compile the one attention kernel in Inductor's code."""
    (source,) = re.findall(r"async_compile\.triton\('triton_tem_\w+', '''(.*?)'''", code, flags=re.DOTALL)
    sizes = {name: int(size) for name, size in re.findall(r"BLOCK_([MN]\d?) : tl.constexpr = (\d+)", source)}
    areas = {size * sizes[name.replace("M", "N")] for name, size in sizes.items() if "M" in name}
    found = []

    def template(triton_meta, num_warps, num_stages, **rest):
        return lambda kernel: found.append((kernel, triton_meta, dict(num_warps=num_warps, num_stages=num_stages)))

    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # Triton reads a kernel's source from its file
        file.write(source)
        file.flush()
        spec = importlib.util.spec_from_file_location("kernel", file.name)
        with mock.patch.object(triton_heuristics, "template", template):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    ((kernel, meta, options),) = found
    compiled = compile_kernel(kernel, meta["signature"], meta["constants"], *meta["configs"], options, arch)
    (area,) = areas  # dq has tiles of other shapes than dk and dv, but of the same area
    return read_code(*compiled, area / (32 * options["num_warps"]))


def compile_kernel(kernel, signature, constants, attributes, options, arch):
    """Return Triton's compiled kernel, and nvdisasm's listing of its machine code."""
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        listing = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return binary, listing


def innermost_loops(listing, needed):
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
    loops = [range(*loop) for loop in loops if any(needed in opcode for opcode in opcodes[slice(*loop)])]
    inner = [a for a in loops if not any({*b} < {*a} for b in loops)]
    return [[opcodes[i] for i in loop] for loop in sorted(inner, key=min)]


def count(loop, *opcodes):
    return sum(opcode in opcodes for opcode in loop)


def read_code(binary, listing, logits):
    """Return the counts of a kernel. logits: computed by one thread in one iteration of a loop."""
    kinds = {}  # loops by their number of matrix products: dk and dv take one more than dq
    for loop in innermost_loops(listing, "MMA"):
        kinds.setdefault(count(loop, "HGMMA", "HMMA"), []).append(loop)
    loops = [kinds[products] for products in sorted(kinds)]
    return Code(
        shared=binary.metadata.shared,
        has_calls=bool(re.search(r"\bRET\b", listing)),  # a CALL can also be the end of a loop
        instructions=[min(map(len, kind)) / logits for kind in loops],  # loops over cut tiles have a mask, too
        spills=[max(count(loop, "LDL", "STL") for loop in kind) / logits for kind in loops],
    )


def compile_case(arch, dtype, head_dim, length, name, options, passes, documents=False):
    """Compile the attention kernels of the method `name`."""
    method = make_method(name, Shape(num_heads=2, head_dim=head_dim, train_length=64), **options)
    return compile_attention(arch, passes, method, length, getattr(torch, dtype), documents=documents)


def compile_attention(arch, passes, *arguments, **options):
    """Return the Code of each kernel of trace_attention."""
    with mock.patch.object(flex, "capability", lambda device: divmod(arch, 10)):
        graphs = trace_attention(*arguments, **options)
    return [compile_code(lower(*graph, arch), arch) for graph in graphs if graph[0] in passes]
