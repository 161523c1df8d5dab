"""List the kernels that torch.compile launches on a GPU in a training step, and the bytes they move, without a GPU.

    python -m scripts.bench.step_code gpt_162m_4k
    python -m scripts.bench.step_code gpt_304m_4k --tokens 65536 --epilogues

The model is traced on fake tensors, forward and backward; the graphs are moved to an H200 that is not there, and
TorchInductor writes their code, which nobody runs. The first table is of one layer: what a model of three launches more
than one of two. The second is all else (what also does a part of the first or last layer is there).

Bytes are those that a kernel has to move, each whole tensor once, by Inductor's own account. Loads and stores of an
entry, in the code, show what it moves again, and what it stores for itself from one loop to the next. Attention and
loss are operators of ours, of which inputs and outputs count. Of Inductor's own products (--epilogues) its account is
too rough to be added up: see which kernels there are. This reaches into Inductor, that of torch 2.13, and a count is no
time.
"""

import argparse
import contextlib
import dataclasses
import functools
import re
import types
from collections import Counter
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateCaller
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _triton
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

from configs.config import Config
from configs.presets import preset
from errors import exit_on_user_error
from model.attention.triton import flash
from runtime.build import build_model
from scripts.shared.tables import markdown_table

CUDA = torch.device("cuda", 0)
H200 = dict(
    type="cuda", index=0, name="NVIDIA H200", major=9, minor=0, cc=90, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, gcnArchName="",
    total_memory=141 << 30, L2_cache_size=50 << 20, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
)  # fmt: skip
MEMORY = re.compile(r"'kernel_name': '(\w+)'.*'num_load': (\d+), 'num_store': (\d+)")
LAUNCH = re.compile(r"\s*(?:\w+ = )?(?:(triton_\w+)\.run|extern_kernels\.(\w+)|torch\.ops\.(\S+)\.default)\(")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch: name, bytes, and, of a kernel that Inductor writes, the loads and stores of each entry in its code."""

    where: str  # forward, backward
    name: str
    read: int
    written: int
    loads: str = ""
    stores: str = ""


class Written(Exception):
    """The code is there; nobody is to load it."""


# ---- tracing ---------------------------------------------------------------------------------------------------------


def trace(config: Config) -> dict[str, torch.fx.GraphModule]:
    """Return the graphs of a micro-batch of the config, "forward" and "backward", as Inductor is given them."""
    graphs = {}

    def keep(where: str, graph: torch.fx.GraphModule, inputs):
        graphs[where] = graph
        return graph.forward

    def partition(joint, inputs, **options):
        joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    compilers = dict(fw_compiler=functools.partial(keep, "forward"), bw_compiler=functools.partial(keep, "backward"))
    backend = aot_autograd(**compilers, decompositions=select_decomp_table(), partition_fn=partition)
    length = config.train_length
    with mock.patch.object(flash, "INTERPRETED", True):  # else the Triton backend refuses a machine without a GPU
        plan = build_model(config, torch.bfloat16).plan(length, backend="triton")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build_model(config, torch.bfloat16)
            tokens = torch.zeros(max(1, config.micro_batch_tokens // length), length, dtype=torch.int64)
            torch._dynamo.reset()
            torch.compile(model, dynamic=False, backend=backend)(tokens, tokens, plan=plan).backward()
    return graphs


def move_to_gpu(graph: torch.fx.GraphModule) -> list[Tensor]:
    """Rewrite the graph for CUDA, and return its fake inputs there."""

    def moved(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) if isinstance(x, Tensor) else x

    def moved_device(x):
        return CUDA if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved_device)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved_device)
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
    graph.recompile()
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


@contextlib.contextmanager
def gpu_that_is_not_there():
    """Make torch and Triton believe in an H200 as far as writing code for it goes."""
    properties = types.SimpleNamespace(**H200)
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    here = dict(get_device_properties=lambda device=None: properties, current_device=lambda: 0)
    interface = here | dict(get_compute_capability=lambda device=None: 90, synchronize=lambda device=None: None)
    cuda = here | dict(is_available=lambda: True, device_count=lambda: 1, _lazy_init=lambda: None)
    cuda |= dict(get_device_capability=lambda device=None: (9, 0))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.multiple(CudaInterface, is_available=staticmethod(lambda: True)))
        stack.enter_context(mock.patch.multiple(CudaInterface, **{k: staticmethod(f) for k, f in interface.items()}))
        worker = dict(get_device_properties=staticmethod(here["get_device_properties"]))
        stack.enter_context(mock.patch.multiple(CudaInterface.Worker, **worker))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"))
        triton.runtime.driver.set_active(driver)
        _triton.has_triton.cache_clear()  # it has said no
        yield


@contextlib.contextmanager
def triton_products():
    """Let Inductor find its own matrix products faster than cuBLAS's, without timing them (which needs the GPU)."""

    def benchmark(self, choices, *_, **__):
        return {choice: 1.0 if isinstance(choice, TritonTemplateCaller) else 2.0 for choice in choices}

    settings = dict(max_autotune_gemm=True, max_autotune_gemm_backends="TRITON", benchmark_epilogue_fusion=False)
    with inductor_config.patch({"test_configs.max_mm_configs": 1, **settings}):
        with mock.patch.object(AlgorithmSelectorCache, "benchmark", benchmark):
            yield


# ---- counting --------------------------------------------------------------------------------------------------------


def kernels_of(where: str, graph: torch.fx.GraphModule) -> list[Kernel]:
    """Return the launches of Inductor's code for a graph of `trace`, in their order."""
    lowered = []

    def write(self):
        code, _ = self.codegen()
        lowered.append((self.scheduler.nodes, getattr(code, "value", code)))
        raise Written

    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad(), V.set_fake_mode(fake):
        inputs = move_to_gpu(graph)
        post_grad_passes(graph, is_inference=False)
        lowering = inductor.GraphLowering(graph, example_inputs=inputs, is_backward=where == "backward")
        write_only = mock.patch.object(inductor.GraphLowering, "_compile_to_module", write)
        handlers = V.set_graph_handler(lowering), V.set_debug_handler(DebugContext())
        with handlers[0], handlers[1], write_only, contextlib.suppress(Written):
            lowering.run(*inputs)
            lowering.compile_to_module()
    nodes, code = lowered[0]
    lines = code[code.index("def call(") :].splitlines()
    names = [next(filter(None, found.groups())) for found in map(LAUNCH.match, lines) if found]
    with V.set_graph_handler(lowering):
        sizes = [(node.get_read_buffer_sizes(), node.get_write_buffer_sizes()) for node in nodes if launches(node)]
    memory = {name: counts for name, *counts in MEMORY.findall(code)}
    kernels = zip(names, sizes, strict=True)
    return [Kernel(where, re.sub(r"_\d+$", "", name), *size, *memory.get(name, ())) for name, size in kernels]


def launches(node) -> bool:
    """Tell whether a node of Inductor's scheduler is a launch, and not one output of an operator with several."""
    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(node.node, MultiOutput)


def saved_bytes(forward: torch.fx.GraphModule) -> int:
    """Return the bytes that the forward pass makes and keeps for the backward pass, before move_to_gpu."""
    (outputs,) = forward.graph.output_node().args
    made = (x.meta["val"] for x in outputs[1:] if isinstance(x, torch.fx.Node) and x.op != "placeholder")
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in made}.values())


def count_step(config: Config) -> tuple[list[Kernel], int]:
    """Return the launches of a micro-batch, forward and backward, and the bytes kept in between."""
    graphs = trace(config)
    saved = saved_bytes(graphs["forward"])
    with gpu_that_is_not_there():
        return [kernel for where, graph in graphs.items() for kernel in kernels_of(where, graph)], saved


# ---- the command -----------------------------------------------------------------------------------------------------


def table(kernels: list[Kernel]) -> str:
    rows = [["", "kernel", "MB read", "MB written", "loads", "stores"]]
    rows += [[k.where, k.name, f"{k.read / 1e6:.1f}", f"{k.written / 1e6:.1f}", k.loads, k.stores] for k in kernels]
    return markdown_table(rows)


def in_words(kernels: list[Kernel]) -> str:
    read, written = sum(kernel.read for kernel in kernels), sum(kernel.written for kernel in kernels)
    return f"{len(kernels)} launches, {read / 1e6:.0f} MB read, {written / 1e6:.0f} MB written"


def main():
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.step_code", description=__doc__.split("\n")[0])
    parser.add_argument("preset", metavar="PRESET", help="of configs/presets.py")
    parser.add_argument("--tokens", type=int, help="tokens computed at once (default: the preset's micro_batch_tokens)")
    text = "as if Inductor's own matrix products, with what follows in them, were faster than cuBLAS's on this GPU"
    parser.add_argument("--epilogues", action="store_true", help=text + " (TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1)")
    args = parser.parse_args()
    with exit_on_user_error(), triton_products() if args.epilogues else contextlib.nullcontext():
        changes = {} if args.tokens is None else dict(micro_batch_tokens=args.tokens)
        config = dataclasses.replace(preset(args.preset), **changes)
        (two, kept_by_two), (three, kept_by_three) = (
            count_step(dataclasses.replace(config, num_layers=layers)) for layers in (2, 3)
        )
    more = [*(Counter(three) - Counter(two)).elements()]
    rest = [*(Counter(two) - Counter(more) - Counter(more)).elements()]
    print(f"{args.preset}, {config.micro_batch_tokens} tokens, bfloat16; torch {torch.__version__}; one layer\n")
    print(table(more))
    print(f"\n{in_words(more)}, {(kept_by_three - kept_by_two) / 1e6:.0f} MB kept for the backward pass\n\nall else\n")
    print(table(rest))
    print(f"\n{in_words(rest)}")


if __name__ == "__main__":
    main()
