"""Compile FlexAttention for a GPU that is not there: trace, lower with Inductor, compile with Triton, count.

python -m tests.flex_code > results/speed/flex_code.md      the table of instructions a logit, about 3 minutes
"""

import contextlib
import dataclasses
import importlib.util
import re
import sys
import tempfile
import types
from collections.abc import Callable
from unittest import mock

import torch
import triton
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import graph as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_heuristics
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention  # noqa: F401  loads the module that is patched below
from torch.utils import _triton
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

from model.attention import attend, make_plan
from model.gpt import GPT
from model.methods import make_method
from tests.machine_code import compile_kernel, count, innermost_loops

Graphs = list[tuple[str, fx.GraphModule]]
META, CUDA = torch.device("meta"), torch.device("cuda", 0)
SHARED_LIMIT = {90: 232_448, 80: 166_912}  # bytes of shared memory that a block may use, by compute capability
GPU = dict(
    type="cuda", index=0, name="", gcnArchName="", multi_processor_count=132, warp_size=32, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    L2_cache_size=50 << 20, shared_memory_per_block=49152,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Code:
    """The machine code of an attention kernel."""

    shared: int  # bytes of a block
    has_calls: bool
    instructions: list[float]  # of one thread for one logit, in the loops over whole tiles: forward, or dq and dk/dv
    spills: list[float]  # the same for loads and stores of spilled registers, in the worst loop of each kind


# ---- tracing ---------------------------------------------------------------------------------------------------------


def trace(function: Callable[..., Tensor], *arguments) -> Graphs:
    """Return all graphs of a function and its backward pass, as Inductor gets them: forward and backward by turns.

    Tensors are on the meta device: nothing is computed, and no branch for CPUs is taken.
    """
    graphs = []

    def keep(name):
        def compiler(graph, inputs):
            graphs.append((name, graph))
            outputs = [
                node.meta["val"] if isinstance(node, fx.Node) else node for node in graph.graph.output_node().args[0]
            ]

            def run(given):
                given.clear()
                return [on_device(x, META) for x in outputs]

            run._boxed_call = True
            return run

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"),
        decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    torch._dynamo.reset()
    flex_module = sys.modules["torch.nn.attention.flex_attention"]
    with mock.patch.object(flex_module, "_validate_device", lambda *tensors: None):  # it knows no meta tensors
        torch.compile(function, backend=backend, dynamic=False)(*arguments).sum().backward()
    return graphs


def trace_attention(method, length: int, head_dim: int, dtype: torch.dtype) -> Graphs:
    """Return the graphs of attention by a method, with q, k, v (2, H, T, D) laid out as the model has them."""
    method = method.to(META)
    vectors = torch.empty(2, length, 3, method.num_heads, head_dim, device=META, dtype=dtype).transpose(1, 3).unbind(2)
    x = torch.empty(2, length, method.num_heads * head_dim, device=META, dtype=dtype) if method.needs_input else None
    plan = make_plan(method, length, length, device=META, dtype=dtype, backend="flex")
    inputs = [vector.requires_grad_() for vector in vectors]
    return trace(lambda q, k, v: attend(method, q, k, v, x=x, plan=plan), *inputs)


# ---- lowering and compiling ------------------------------------------------------------------------------------------


def on_device(x, device: torch.device):
    """Return an empty tensor like x on this device; x itself if it is no tensor."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) if isinstance(x, Tensor) else x


def move_to_gpu(graph: fx.GraphModule) -> list[Tensor]:
    """Rewrite a graph and its subgraphs for CUDA, and return its fake inputs there."""

    def moved_device(x):
        return CUDA if isinstance(x, torch.device) else x

    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.args = fx.node.map_aggregate(node.args, moved_device)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved_device)
            if "val" in node.meta:
                node.meta["val"] = tree_map(lambda x: on_device(x, CUDA), node.meta["val"])
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


@contextlib.contextmanager
def absent_gpu(arch: int):
    """Make torch and Triton believe in a GPU of this compute capability, as far as writing code for it goes."""
    major, minor = divmod(arch, 10)
    properties = types.SimpleNamespace(
        **GPU, major=major, minor=minor, cc=arch, shared_memory_per_block_optin=SHARED_LIMIT[arch]
    )
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    here = dict(get_device_properties=lambda device=None: properties, current_device=lambda: 0)
    interface = here | dict(
        get_compute_capability=lambda device=None: arch, synchronize=lambda device=None: None, is_available=lambda: True
    )
    cuda = here | dict(
        is_available=lambda: True, device_count=lambda: 1, _lazy_init=lambda: None,
        get_device_capability=lambda device=None: (major, minor),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.multiple(CudaInterface, **{k: staticmethod(f) for k, f in interface.items()}))
        worker = dict(get_device_properties=staticmethod(here["get_device_properties"]))
        stack.enter_context(mock.patch.multiple(CudaInterface.Worker, **worker))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"))
        triton.runtime.driver.set_active(driver)
        _triton.has_triton.cache_clear()  # it has said no
        yield


class Written(Exception):
    """The code is written. Nobody loads it."""


def lower(name: str, graph: fx.GraphModule) -> str:
    """Return the code that Inductor writes for a graph of `trace`."""
    codes = []

    def write(lowering):
        code, _ = lowering.codegen()
        codes.append(getattr(code, "value", code))
        raise Written

    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad(), V.set_fake_mode(fake):
        inputs = move_to_gpu(graph)
        lowering = inductor.GraphLowering(graph, example_inputs=inputs, is_backward=name == "backward")
        write_only = mock.patch.object(inductor.GraphLowering, "_compile_to_module", write)
        with (
            V.set_graph_handler(lowering),
            V.set_debug_handler(DebugContext()),
            write_only,
            contextlib.suppress(Written),
        ):
            lowering.run(*inputs)
            lowering.compile_to_module()
    return codes[0]


def attention_kernel(code: str) -> tuple[object, dict, dict, int]:
    """Return the one attention kernel in Inductor's code: a function under triton.jit, triton_meta, options, logits.

    Logits: those that one thread computes in one iteration.
    """
    (source,) = re.findall(r"async_compile\.triton\('triton_tem_\w+', '''(.*?)'''", code, flags=re.DOTALL)
    tiles = {name: int(size) for name, size in re.findall(r"(BLOCK_[MN]\d?) : tl.constexpr = (\d+)", source)}
    sizes = {tiles[name] * tiles[name.replace("M", "N")] for name in tiles if "M" in name}
    assert len(sizes) == 1, tiles  # dq and dk/dv have tiles of the same area
    found = []

    def template(num_stages, num_warps, triton_meta, **rest):
        options = dict(num_warps=num_warps, num_stages=num_stages)
        return lambda kernel: found.append((kernel, triton_meta, options, sizes.pop() // (32 * num_warps)))

    # Triton reads the source of a kernel from its file.
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        spec = importlib.util.spec_from_file_location("kernel", file.name)
        with mock.patch.object(triton_heuristics, "template", template):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return found[0]


def compile_attention(graphs: Graphs, arch: int) -> list[Code]:
    """Return the attention kernels of one forward and one backward graph."""
    codes = []
    for name, graph in graphs:
        with absent_gpu(arch):
            code = lower(name, graph)
        kernel, meta, options, logits = attention_kernel(code)
        (attributes,) = meta["configs"]
        compiled = compile_kernel(kernel, meta["signature"], meta["constants"], attributes, options, arch)
        codes.append(read_code(*compiled, logits))
    return codes


def read_code(binary, listing: str, logits: int) -> Code:
    """Return the counts of a kernel. logits: computed by one thread in one iteration of a loop."""
    kinds = {}  # loops by their matrix products: 2 in the forward pass, 3 for dq, 4 for dk/dv
    for loop in innermost_loops(listing, "MMA"):
        kinds.setdefault(count(loop, "HGMMA", "HMMA"), []).append(loop)
    loops = [kinds[products] for products in sorted(kinds)]
    return Code(
        shared=binary.metadata.shared,
        has_calls="CALL" in re.findall(r"\w+", listing),
        instructions=[min(map(len, kind)) / logits for kind in loops],  # loops over cut tiles have a mask, too
        spills=[max(count(loop, "LDL", "STL") for loop in kind) / logits for kind in loops],
    )


def compile_case(arch, dtype, head_dim, length, name, options, passes=("forward", "backward")) -> list[Code]:
    """Return the attention kernels of the method `name`."""
    method = make_method(name, num_heads=2, head_dim=head_dim, train_length=64, **options)
    graphs = trace_attention(method, length, head_dim, getattr(torch, dtype))
    return compile_attention([graph for graph in graphs if graph[0] in passes], arch)


def trace_model(method: str, options: dict) -> Graphs:
    """Return the graphs of the loss of a model of two layers."""
    model = GPT(
        vocab_size=512, num_layers=2, num_heads=2, model_dim=128, train_length=256, method=method,
        method_options=options, dtype=torch.bfloat16,
    ).to(META)  # fmt: skip
    tokens = torch.empty(2, 256, dtype=torch.int64, device=META)
    plan = model.plan(256, backend="flex")
    return trace(lambda tokens: model(tokens, tokens, plan=plan), tokens)


def attention_calls(graph: fx.GraphModule) -> int:
    """Return how many times a graph calls FlexAttention, forward or backward."""
    return sum("flex_attention" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
