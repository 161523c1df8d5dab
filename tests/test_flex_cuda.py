"""FlexAttention's kernels, compiled for absent GPUs, for every kind of mechanism that changes the logits.

One other process compiles all cases, because flex_code.py replaces Triton's driver for good.
"""

import json

import pytest
from commands import python

pytest.importorskip("triton")

from model.methods import MECHANISMS  # noqa: E402
from model.methods.base import KeyBias, ScoreChange, Sink, Window  # noqa: E402
from model.methods.names import mechanism_names  # noqa: E402

pytestmark = pytest.mark.slow

CHANGES = (ScoreChange, KeyBias, Window, Sink)  # the kinds of mechanism that change FlexAttention's code
SHARED_LIMIT = {90: 232_448, 80: 166_912}  # bytes of shared memory that a block may use, by compute capability
MOST_SPILLS = 6  # instructions of one thread for one logit, of 20 to 80 of all kinds
LOOPS = dict(forward=1, backward=2)  # over tiles; the backward kernel computes dq in one, dk and dv in the other
BOTH, LEARNED, SHORT = ["forward", "backward"], {"learn_tau": True}, {"window": 130}
SCALE_INVARIANT = "scale_invariant_nope"
QUICK = [  # compute capability, dtype, head dimension, length, method, options, passes
    (90, "bfloat16", 128, 1024, "scale_invariant_p_rope", {}, BOTH),
    (90, "bfloat16", 64, 1024, "kerple_log", {}, ["backward"]),
]
GRID = [
    *((90, "bfloat16", 128, 1024, method, {}, BOTH)
      for method in "rope alibi nape kerple_log kerple_power bam fox logn_rope rope+sink".split()),
    *((90, "bfloat16", 128, 1024, SCALE_INVARIANT, options, BOTH)
      for options in (LEARNED, {"tau_ratio": 2.0}, {"terms": "a"}, {"terms": "m"}, {"learn_gain": True},
                      {"skip_first": True}, LEARNED | {"skip_first": True})),
    (90, "bfloat16", 128, 1024, "alibi", {"slopes": "geometric"}, BOTH),
    (90, "bfloat16", 128, 1024, "rope+window", SHORT, BOTH),
    (90, "bfloat16", 128, 1024, "scale_invariant+window", SHORT, BOTH),
    (90, "bfloat16", 128, 1024, "scale_invariant+forget+window+sink", LEARNED | SHORT, BOTH),
    (90, "bfloat16", 128, 1024, "scale_invariant+forget", {}, BOTH),
    (90, "bfloat16", 128, 1000, SCALE_INVARIANT, {}, BOTH),
    (90, "bfloat16", 128, 129, SCALE_INVARIANT, {}, BOTH),
    (90, "bfloat16", 128, 129, SCALE_INVARIANT, {"tau_ratio": 2.0}, BOTH),
    (90, "bfloat16", 64, 1024, SCALE_INVARIANT, {}, BOTH),
    (90, "bfloat16", 64, 1024, "pope", {}, BOTH),
    (90, "float16", 128, 1024, SCALE_INVARIANT, {}, BOTH),
    (80, "bfloat16", 128, 1024, SCALE_INVARIANT, {}, BOTH),
    (80, "bfloat16", 128, 1024, "kerple_log", {}, BOTH),
    (80, "float16", 64, 1024, "alibi", {}, BOTH),
]
QUICK_MODELS = [("scale_invariant_p_rope+sink", {})]
MODELS = [("fox", {}), ("scale_invariant+window", LEARNED | SHORT)]
TWO_TABLES = [  # as flex_flash reads them, and lengths that are no multiple of a tile
    (90, "bfloat16", 128, length, *method, BOTH)
    for length in (1000, 129)
    for method in (("alibi", {}), (SCALE_INVARIANT, {"terms": "a"}))
]

CODE = """
import dataclasses, itertools, json, sys
from unittest import mock
from triton.compiler.errors import CompilationError
from model.attention import flex
from model.methods.kerple import KerpleLog
from tests import flex_code

cases, two_tables, models = json.loads(sys.argv[1])
codes = [flex_code.compile_case(*case) for case in cases]
# The first call chooses tables and two stages of the pipeline, the second call two tables.
with mock.patch.object(flex, "m_follows_from_a", side_effect=itertools.cycle([True, False])):
    codes += [flex_code.compile_case(*case) for case in two_tables]
print(json.dumps([[dataclasses.asdict(code) for code in kernels] for kernels in codes]))
graphs = [flex_code.trace_model(*model) for model in models]
print(json.dumps([[(name, str(graph.graph).count("higher_order.flex_attention")) for name, graph in model]
    for model in graphs]))

coefficients = KerpleLog.coefficients
KerpleLog.coefficients = lambda change, distance, head: coefficients(change, distance, head + 0)
try:
    flex_code.compile_case(90, "bfloat16", 64, 1024, "kerple_log", {}, ["backward"])
    print("true")
except CompilationError:
    print("false")
"""


@pytest.fixture(scope="module")
def compiled(long):
    """Return the code of all cases, the calls of attention in models' graphs, and whether head + 0 compiles."""
    cases, two_tables, models = QUICK + GRID * long, TWO_TABLES[: None if long else 1], QUICK_MODELS + MODELS * long
    output = python("-c", CODE, json.dumps([cases, two_tables, models]), timeout=None).stdout
    codes, calls, head_plus_zero = map(json.loads, output.splitlines())
    return [*zip(cases + two_tables, codes, strict=True)], calls, head_plus_zero


def test_attention_kernels_compile_and_fit_their_gpus(compiled):
    for case, codes in compiled[0]:
        arch, *_, passes = case
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
    assert compiled[2] is False


def test_every_mechanism_that_changes_logits_is_compiled():
    names = {name for name, kind in MECHANISMS.items() if issubclass(kind, CHANGES)}
    assert names == {name for case in QUICK + GRID for name in mechanism_names(case[4]) if name in names}
