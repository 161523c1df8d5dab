"""FlexAttention's kernels, compiled for absent GPUs, for every kind of mechanism that changes the logits.

One other process compiles all cases, because results/speed/gpu_code.py replaces Triton's driver for good.
"""

import json

import pytest
from attention_cases import parse
from commands import python, shared, slow

pytest.importorskip("triton")

from model.methods import MECHANISMS  # noqa: E402
from model.methods.base import KeyBias, ScoreChange, Sink, Window  # noqa: E402
from model.methods.names import mechanism_names  # noqa: E402

pytestmark = slow

CHANGES = (ScoreChange, KeyBias, Window, Sink)  # the kinds of mechanism that change FlexAttention's code
SHARED_LIMIT = {90: 232_448, 80: 166_912}  # bytes of shared memory that a block may use, by compute capability
MOST_SPILLS = 6  # instructions of one thread for one logit, of 20 to 80 of all kinds
LOOPS = dict(forward=1, backward=2)  # over tiles; the backward kernel computes dq in one, dk and dv in the other


def make_cases(text):
    """Return the arguments of gpu_code.compile_case for each case: a method, its options and these settings."""
    cases = []
    for name, options in map(parse, text.split("|")):
        defaults = dict(arch=90, dtype="bfloat16", head_dim=128, length=1024)
        defaults |= dict(passes="forward,backward", documents=False)
        *settings, passes, documents = (options.pop(key, default) for key, default in defaults.items())
        cases.append([*settings, name, options, passes.split(","), documents])
    return cases


QUICK = make_cases("""scale_invariant_p_rope | scale_invariant_p_rope length=1000 documents=True
    | kerple_log head_dim=64 passes=backward""")
GRID = make_cases("""rope | alibi | nape | kerple_log | kerple_power | bam | fox | logn_rope | rope+sink
    | alibi slopes=geometric | rope+window window=130 | scale_invariant+window window=130 | scale_invariant+forget
    | scale_invariant+forget+window+sink learn_tau=True window=130 | scale_invariant_nope learn_tau=True
    | scale_invariant_nope tau_ratio=2 | scale_invariant_nope terms=a | scale_invariant_nope terms=m
    | scale_invariant_nope learn_gain=True | scale_invariant_nope skip_first=True
    | scale_invariant_nope learn_tau=True skip_first=True
    | scale_invariant_nope length=1000 | scale_invariant_nope length=129 | scale_invariant_nope tau_ratio=2 length=129
    | scale_invariant_nope head_dim=64 | pope head_dim=64 | scale_invariant_nope dtype=float16
    | scale_invariant_nope arch=80 | kerple_log arch=80 | alibi arch=80 dtype=float16 head_dim=64""")
QUICK_MODELS = [parse("scale_invariant_p_rope+sink"), (*parse("logn_p_rope+alibi"), 7)]  # the second: documents
MODELS = [parse("fox"), parse("scale_invariant+window learn_tau=True window=130")]
# As flex_flash reads them, and lengths that are no multiple of a tile.
TWO_TABLES = make_cases("""alibi length=1000 | scale_invariant_nope terms=a length=1000
    | alibi length=129 | scale_invariant_nope terms=a length=129""")

FORWARD_TILES = dict(num_stages=4, num_warps=2, BLOCK_M=64, BLOCK_N=32)
BACKWARD_TILES = dict(num_stages=1, num_warps=4, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)

CODE = """
import dataclasses, itertools, json, re, sys
from unittest import mock
import torch
from triton.compiler.errors import CompilationError
from model.attention import flex
from model.methods.base import Shape
from model.methods.kerple import KerpleLog
from model.methods.make import make_method
from results.speed import gpu_code

cases, two_tables, models, tiles = json.loads(sys.argv[1])
codes = [gpu_code.compile_case(*case) for case in cases]
# The first call chooses tables and two stages of the pipeline, the second call two tables.
with mock.patch.object(flex, "m_follows_from_a", side_effect=itertools.cycle([True, False])):
    codes += [gpu_code.compile_case(*case) for case in two_tables]
print(json.dumps([[dataclasses.asdict(code) for code in kernels] for kernels in codes]))
graphs = [gpu_code.trace_model(*model) for model in models]
print(json.dumps([[(name, str(graph.graph).count("higher_order.flex_attention")) for name, graph in model]
    for model in graphs]))

method = make_method("scale_invariant_nope", Shape(2, 128, 64))
with mock.patch.object(flex.Flex, "tiles", tiles):
    graphs = gpu_code.trace_attention(method, 1024, torch.bfloat16)
size = re.compile(r"(BLOCK_[MN]\\d?|num_warps|num_stages)(?: : tl.constexpr)? ?= ?(\\d+)")
print(json.dumps([size.findall(gpu_code.lower(*graph, 90)) for graph in graphs]))

coefficients = KerpleLog.coefficients
KerpleLog.coefficients = lambda change, distance, head: coefficients(change, distance, head + 0)
try:
    gpu_code.compile_case(90, "bfloat16", 64, 1024, "kerple_log", {}, ["backward"])
    print("true")
except CompilationError:
    print("false")
"""


@shared
def compiled(long):
    """Return the code of all cases, the calls of attention in models' graphs, tiles, and whether head + 0 compiles."""
    cases, two_tables, models = QUICK + GRID * long, TWO_TABLES[: None if long else 1], QUICK_MODELS + MODELS * long
    tiles = {f"fwd_{name}": size for name, size in FORWARD_TILES.items()}
    tiles |= {f"bwd_{name}": size for name, size in BACKWARD_TILES.items()}
    output = python("-c", CODE, json.dumps([cases, two_tables, models, tiles]), timeout=None).stdout
    codes, *others = map(json.loads, output.splitlines())
    return [*zip(cases + two_tables, codes, strict=True)], *others


def test_attention_kernels_compile_and_fit_their_gpus(compiled):
    for case, codes in compiled[0]:
        arch, *_, passes, _ = case
        assert [len(code["instructions"]) for code in codes] == [LOOPS[name] for name in passes], case
        for code in codes:
            assert code["shared"] <= SHARED_LIMIT[arch], case
            assert not code["has_calls"], case  # of a subroutine for a logarithm or a root
            assert max(code["spills"]) < MOST_SPILLS, case


def test_a_model_is_one_graph_each_way_with_all_its_layers(compiled):
    for calls in compiled[1]:
        assert calls == [["forward", 2], ["backward", 2]]


def test_arithmetic_with_the_head_of_a_learned_parameter_does_not_compile(compiled):
    """flex.py once had such arithmetic. The test shows that a compilation finds it."""
    assert compiled[3] is False


def test_tiles_of_the_table_are_the_tiles_of_the_kernels(compiled):
    """For this method, the backend also sets num_stages of both passes."""
    for tiles, found in zip((FORWARD_TILES, BACKWARD_TILES), compiled[2], strict=True):
        assert {(name, str(size)) for name, size in tiles.items()} == {tuple(pair) for pair in found}


def test_every_mechanism_that_changes_logits_is_compiled():
    names = {name for name, kind in MECHANISMS.items() if issubclass(kind, CHANGES)}
    assert names == {name for case in QUICK + GRID for name in mechanism_names(case[4]) if name in names}
