"""FlexAttention: its block mask, compiled or an error, alone in its graph on a CPU, and where FlashAttention-4 runs.

tests/test_attention.py holds its values and gradients to the formula, without Inductor.
"""

import itertools

import pytest
import torch
from attention_cases import CPU, CUDA, assert_near, attend, make_case, make_inputs, make_plan, random
from commands import parametrize, refuses, slow, table
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from model.attention import attend as attention
from model.attention import flex, flex_compiled
from model.attention.check import check_backend
from model.attention.flex_compiled import causal_block_mask, mask_options
from model.attention.plan import LayerPlan
from model.attention.reference import plain_attention
from model.gpt import norm
from model.methods.base import Shape
from model.methods.scale_invariant import ScaleInvariant

NOTHING, PART, ALL = range(3)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


# ---- the causal block mask -------------------------------------------------------------------------------------------


def visible_part(dense, query_block):
    """Return NOTHING, PART or ALL for each block of a mask, query_block x 128. Hidden keys pad the last blocks."""
    padded = torch.nn.functional.pad(dense, (0, -dense.shape[1] % 128))
    rows = [row.split(128, dim=1) for row in padded.split(query_block)]
    return torch.tensor([[*map(state_of, row)] for row in rows])


def state_of(block):
    return block.any() + block.all().int()


def lists_of_blocks(mask, kind):
    """Return the lists of a BlockMask, `kv`, `full_kv`, `q` or `full_q`: of each row of blocks, the columns."""
    counts, indices = (getattr(mask, f"{kind}_{part}") for part in ("num_blocks", "indices"))
    rows = zip(counts.flatten(), indices.flatten(0, -2), strict=True)
    return [row[:count].long() for count, row in rows]


@parametrize("queries", [1, 100, 128, 129, 640])
@parametrize("q_offset, unseen_keys", [(0, 0), (127, 0), (250, 50)])
@parametrize("window", [None, 1, 2, 128, 129, 200, 256, 600, 10**9])
@parametrize("query_block", [128, 256])
def test_the_block_mask_is_the_causal_mask(queries, q_offset, unseen_keys, window, query_block):
    keys = q_offset + queries + unseen_keys
    mask = causal_block_mask(queries, keys, q_offset, "cpu", query_block, window)
    distance = torch.arange(queries)[:, None] + q_offset - torch.arange(keys)
    dense = (distance >= 0) & (distance < (window or keys))
    assert mask.seq_lengths == (queries, keys) and mask.BLOCK_SIZE == (query_block, 128)
    assert_close(mask.mask_mod(0, 0, torch.arange(queries)[:, None], torch.arange(keys)), dense)
    expected = visible_part(dense, query_block)
    found = torch.zeros_like(expected)
    for kind, state in (("kv", PART), ("full_kv", ALL)):
        for row, columns in zip(found, lists_of_blocks(mask, kind), strict=True):
            row[columns] += state  # a block in both lists would add up to 3
    assert_close(found, expected)


TRAINING = [(length, length, 0, None) for length in (128, 300, 1000, 1024)]  # queries, keys, q_offset, window
OTHER = [
    (1024, 1024, 0, 400), (300, 300, 0, 1),
    (640, 640, 0, 10**9), (100, 100, 0, None),
    (300, 427, 127, None), (1, 300, 299, None),
]


def queries_see_their_first_tile(mask, queries):
    """Return whether each query sees a key of its first tile, of 16. The kernel reads cut blocks before whole ones."""
    lists, seen = lists_of_blocks(mask, "kv"), []
    for row in torch.arange(queries):
        cut = lists[row // 128]
        tile = 128 * cut[:1, None] + torch.arange(16)
        seen.append(not len(cut) or mask.mask_mod(0, 0, row, tile).any())
    return all(seen)


@parametrize("shape", TRAINING + OTHER)
def test_the_kernel_options_are_true_of_the_mask(shape):
    queries, keys, q_offset, window = shape
    options = mask_options(LayerPlan(None, 1, 16, queries, keys, window=window))
    mask = causal_block_mask(queries, keys, q_offset, "cpu", window=window)
    lists = sum((lists_of_blocks(mask, kind) for kind in ("kv", "full_kv", "q", "full_q")), [])
    contiguous = all((columns.diff() == 1).all() for columns in lists)
    safe = queries >= 128 and queries_see_their_first_tile(mask, queries)  # fewer queries run in another kernel
    assert options["BLOCKS_ARE_CONTIGUOUS"] <= contiguous and options["ROWS_GUARANTEED_SAFE"] <= safe
    assert all(options.values()) == (shape in TRAINING)
    assert not (contiguous or safe) or window != 400
    assert not safe or q_offset != 127


def tables_of(score_mod):
    """Return the tensors that a score_mod reads."""
    captured = [cell.cell_contents for cell in score_mod.__closure__] if score_mod else []
    return [x for x in captured if isinstance(x, torch.Tensor)]


@parametrize("name", ["scale_invariant", "nope", "alibi", "learned", "by_head", "for_all_heads"])
def test_scale_invariant_attention_alone_has_a_table(name):
    prepared = make_plan(make_case(name), 256, 256, backend="flex").prepared
    tables, options = tables_of(prepared["score_mod"]), prepared["kernel_options"]
    assert (len(tables), options.get("num_stages")) == ((1, 2) if name == "scale_invariant" else (0, None))


def test_tiles_join_the_options_of_many_queries():
    backend = flex.Flex()
    def options(queries=256):
        plan = LayerPlan(backend, 3, 16, queries, queries)
        return backend.prepare(plan, ScaleInvariant(Shape(3, 16, 64)))["kernel_options"]
    before, few = options(), options(queries=100)
    backend.tiles = dict(fwd_BLOCK_M=64, fwd_num_stages=3, bwd_num_warps=4)
    assert options() == before | backend.tiles and options(queries=100) == few


# ---- compiled, or an error -------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_with_formula(method, queries=129):
    q, k, v, x = make_inputs(method, 129)
    output = attend(method, q[:, :, -queries:], k, v, x, backend="flex")
    assert_near(output, plain_attention(method, q, k, v, x)[:, :, -queries:], 1e-5)


@parametrize("name, queries", [("scale_invariant", 129), pytest.param("alibi", 1, marks=slow)])
def test_compiled_it_is_the_formula(name, queries):
    compare_with_formula(make_case(name), queries)


@torch.no_grad()
def test_many_lengths_are_compiled(monkeypatch):
    compiled = torch.compile(flex_compiled.inductor_flex._torchdynamo_orig_callable, backend="eager", dynamic=False)
    monkeypatch.setattr(flex_compiled, "inductor_flex", compiled)
    method = make_case("scale_invariant")
    for length in range(128, 164):
        q, k, v, _ = make_inputs(method, length)
        assert attend(method, q, k, v, backend="flex").shape == q.shape


def test_learned_numbers_that_change_compile_nothing_again():
    method, graphs = make_case("key_bias"), set()
    for scale in (0.1, 0.2):
        for parameter in method.parameters():
            parameter.data.fill_(scale)
        compare_with_formula(method)
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1


@parametrize("which", range(3))
def test_gradients_on_a_cpu_are_refused(which):
    method = make_case("rope")
    inputs = [x.requires_grad_(i == which) for i, x in enumerate(make_inputs(method, 130))]
    with refuses("CPU"):
        attend(method, *inputs, backend="flex")
    assert "UserError" in check_backend(flex.Flex(), make_case("alibi"), CPU, torch.float32, [130]).problem


@parametrize("switch", [
    lambda: torch.compiler.set_stance("force_eager"), lambda: torch._dynamo.config.patch(disable=True),
], ids=["force_eager", "disable"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_uncompiled_it_is_an_error(switch):
    """It is an error even after an eager run, because torch warns only once a process."""
    flex_attention(*3 * [random(1, 1, 2, 16, seed=0)])
    method = make_case("rope")
    with torch.no_grad(), switch(), pytest.raises((RuntimeError, UserWarning), match="compile"):
        attend(method, *make_inputs(method, 130), backend="flex")


# ---- inside a larger compiled graph ----------------------------------------------------------------------------------


@slow
def test_inside_a_compiled_graph_it_is_the_formula():
    """Attention, projection of q, k and v, and QK-norm are compiled together."""
    x, weight = (random(size, 96, seed=size).float() / 6 for size in (130, 96))
    method = make_case("nope", 2)
    plan = make_plan(method, 130, 130, backend="flex")

    def project(x):
        qkv = (x @ weight).view(1, 130, 3, 2, 16)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        return norm(q), norm(k), v

    output = torch.compile(lambda x: attention.attend(method, *project(x), plan=plan), dynamic=False)(x)
    assert_near(output, plain_attention(method, *project(x)), 1e-5)


# ---- FlashAttention-4 ------------------------------------------------------------------------------------------------


@table("name, shapes", """
    nope            |
    scale_invariant | 256
    alibi           | 3x256 3x256
    for_all_heads   | 256 256
""")
def test_a_logit_reads_no_more_tables_than_its_formula_needs(name, shapes):
    """The shapes are for 3 heads and 40 keys: one where m = 1 - a^2, a row a head only where heads differ."""
    tables = tables_of(flex.make_table_score_mod(make_case(name).score_change, LayerPlan(None, 3, 16, 40, 40)))
    assert ["x".join(map(str, x.shape)) for x in tables] == shapes.split()
    assert all(x.dtype == torch.float32 and x.is_contiguous() and x.storage_offset() == 0 for x in tables)


@parametrize("queries", [1, 100, 129, 300, 1000, 1024])
@parametrize("q_offset", [0, 29, 300, 65_280])
@parametrize("case", [
    "scale_invariant", "scale_invariant tau=0.3", "scale_invariant tau_ratio=3.0",
    "by_head", "alibi", "for_all_heads",  # these have two tables, the others one
])
def test_tables_are_the_formula_up_to_tiles_that_reach_past_the_last_query_and_key(case, queries, q_offset):
    """PyTorch raises IndexError for an index past the end. A kernel would read another tensor's memory."""
    change = make_case(case).score_change
    keys, start = q_offset + queries, (queries - 1) // 256 * 256
    score_mod = flex.make_table_score_mod(change, LayerPlan(None, 3, 16, queries, keys))
    head = torch.arange(3).view(-1, 1, 1)
    query = torch.arange(start, start + 256).view(-1, 1)  # the last tile
    key = torch.arange(0, keys + 128, 7 + keys // 1000)  # near and far
    score = 11 * random(3, 256, len(key), seed=0).float()
    a, m = change.coefficients((query + q_offset - key).clamp(min=0).double(), head)
    error = (score_mod(score, 0, head, query, key) - (a * score + m)).abs()
    terms = a * score.abs() + m.abs().clamp(min=a * a) + 1
    assert (error <= 2**-22 * terms).all()  # a few roundings to float32


@pytest.fixture
def flash_problem(monkeypatch):
    """Return why flex_flash cannot run on a GPU of this compute capability, with its package or without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def problem(
        name="alibi", capability=(9, 0), device=CUDA, dtype=torch.bfloat16, head_dim=64, package="flash_attn.cute"
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(flex, "find_spec", lambda found: found in ("triton", package) or None)
        return flex.FlexFlash().unsupported(make_case(name, head_dim=head_dim), device, dtype)

    return problem


@parametrize("major, query_block", [(9, 128), (10, 256), (11, 256)])
def test_flash_takes_the_shapes_of_flash_attention_4(major, query_block, flash_problem):
    for name, head_dim in itertools.product(("nope", "alibi", "window"), (16, 72, 128)):
        assert flash_problem(name, (major, 0), head_dim=head_dim) is None
    assert flex.flash_query_block(CUDA) == query_block


@parametrize("option, value, word", [
    ("device", CPU, "cpu"), ("dtype", torch.float32, "float32"), ("package", None, "flash-attn-4"),
    *(("head_dim", value, str(value)) for value in (8, 100, 136)),
    ("name", "key_bias", "key"), *(("name", value, value) for value in ("infini", "learned", "sink")),
    *(("capability", value, "Hopper") for value in ((8, 0), (8, 9), (12, 0))),
])
def test_flash_names_the_reason_that_it_cannot_run(option, value, word, flash_problem):
    assert word in flash_problem(**{option: value})
