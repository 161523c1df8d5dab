"""flex_flash: its tables as FlexAttention computes with them on a CPU, held to float64, and all that it must refuse.

What it launches needs a Hopper or Blackwell GPU and the package flash-attn-4: nothing here runs that.
"""

import sys

import pytest
import torch
from test_methods import assert_near, assert_refused, cast, make, random_qkv
from torch.nn.attention import flex_attention as torch_flex

from model.attention import choose_backend, make_plan
from model.backends import BACKENDS, flex_flash
from model.backends.base import Call
from model.backends.triton import check_kernel
from model.methods.base import Method, ScoreChange
from model.reference import plain_attention

pytestmark = pytest.mark.slow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class ByHead(ScoreChange):
    """a = 1 + h/2 and m = -sqrt(t)/(h + 1)."""

    def coefficients(self, distance, head):
        return 1 + head / 2, -distance.sqrt() / (head + 1)


class ForAllHeads(ScoreChange):
    """a = 1 + 1/(1 + t) and m = -sqrt(t): not 1 - a^2."""

    def coefficients(self, distance, head):
        return 1 + 1 / (1 + distance), -distance.sqrt()


OWN = dict(by_head=ByHead, for_all_heads=ForAllHeads)


def make_case(name):
    """The method, of 3 heads of 16: a name of the table of methods, or of OWN."""
    return Method(name, 3, 16, 64, [OWN[name]()]) if name in OWN else make(name, 3, 16)


@pytest.fixture
def flex_with_gradients(monkeypatch):
    """FlexAttention's own formula, which has gradients on a CPU, though torch refuses to give them there."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    with torch._dynamo.config.patch(recompile_limit=1000):
        yield torch.compile(torch_flex.flex_attention, backend="eager", dynamic=False, fullgraph=True)


def call_for(method, queries, keys, **options):
    return Call(method.num_heads, method.head_dim, queries, keys, keys - queries, **options)


# ---- values and gradients --------------------------------------------------------------------------------------------

TABLES = {  # their shapes, for 3 heads and 40 keys
    "nope": [], "scale_invariant_nope": [(40,)], "alibi": [(3, 40)], "by_head": [(3, 40), (3, 40)],
    "for_all_heads": [(40,), (40,)],
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("queries, keys", [(1, 1), (129, 129), (1, 300), (130, 257)])
def test_output_and_gradients_are_the_plain_form_s(name, queries, keys, flex_with_gradients):
    method = make_case(name)
    exact = random_qkv(3, 16, keys)
    inputs = cast(exact, torch.float32)
    prepared = flex_flash.prepare(method.score_change, call_for(method, queries, keys))
    assert prepared["kernel_options"] == {"BACKEND": "FLASH"}
    q, k, v = inputs
    output = flex_with_gradients(q[:, :, keys - queries:], k, v, **prepared)
    expected = plain_attention(method, *exact)[:, :, keys - queries:]
    assert_near(output, expected, 1e-5)
    dout = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    gradients = torch.autograd.grad(output, inputs, dout.float())
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, exact, dout), strict=True):
        assert_near(mine, theirs, 2e-5)


@pytest.mark.parametrize("name, shapes", TABLES.items())
def test_a_logit_reads_no_more_tables_than_its_formula_needs(name, shapes):
    """None for a number, one where m = 1 - a^2, a row a head only where heads differ. They start where their memory
    does: torch's compiler takes no others."""
    method = make_case(name)
    score_mod = flex_flash.make_score_mod(method.score_change, call_for(method, 40, 40))
    captured = [cell.cell_contents for cell in score_mod.__closure__] if score_mod else []
    tables = [x for x in captured if isinstance(x, torch.Tensor)]
    assert [tuple(x.shape) for x in tables] == shapes
    assert all(x.dtype == torch.float32 and x.is_contiguous() and x.storage_offset() == 0 for x in tables)


# ---- where it runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package flash_attn with these parts, where Python finds it first."""
    def write(*parts):
        for folder in (tmp_path / "flash_attn", *(tmp_path / "flash_attn" / part for part in parts)):
            folder.mkdir()
            (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    forget = [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    for name in forget:
        monkeypatch.delitem(sys.modules, name)
    yield write
    sys.modules.pop("flash_attn", None)


@pytest.fixture
def gpu(monkeypatch):
    """Says that there is a GPU of this compute capability."""
    def say(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    return say


def problem(name="alibi", device=CUDA, dtype=torch.bfloat16, head_dim=64, **options):
    return flex_flash.find_problem(make(name, head_dim=head_dim, **options), device, dtype)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (11, 0)])
def test_it_takes_what_flash_attention_4_takes(capability, package, gpu):
    package("cute")
    gpu(*capability)
    for name in ("nope", "alibi", "scale_invariant_p_rope", "logn_p_rope"):
        for head_dim in (16, 64, 72, 128):
            assert problem(name, head_dim=head_dim) is None


@pytest.mark.parametrize("options, word", [
    (dict(device=CPU), "not on cpu"), (dict(dtype=torch.float32), "float32"), (dict(head_dim=8), "not 8"),
    (dict(head_dim=100), "not 100"), (dict(head_dim=136), "not 136"), (dict(name="infini_rope"), "infini_rope"),
    (dict(name="scale_invariant_p_rope", learn_tau=True), "scale_invariant_p_rope learns"),
])
def test_it_says_what_it_cannot_run(options, word, package):
    package("cute")
    assert word in problem(**options)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_other_gpus_are_refused(capability, package, gpu):
    package("cute")
    gpu(*capability)
    assert "Hopper or Blackwell" in problem()


def test_an_older_flash_attention_is_not_the_package(package):
    package("layers")
    assert "flash-attn-4 is not installed" in problem()


def test_without_the_package_it_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(sys, "path", [])  # nothing more can be found
    monkeypatch.setattr(flex_flash.flex, "find_spec", lambda name: True)  # of Triton
    assert "flash-attn-4 is not installed" in problem()
    with assert_refused("flex_flash", "flash-attn-4", "auto"):
        make_plan(make("alibi", head_dim=64), 5, 5, device=CUDA, dtype=torch.bfloat16, backend="flex_flash")


def test_auto_takes_it_after_our_kernel_and_leaves_it_when_its_check_fails(package, monkeypatch):
    package("cute")
    method = make("alibi", head_dim=64)
    for backend, after in [(None, "triton"), ("triton", "flex_flash"), ("flex_flash", "flex")]:
        if backend:
            monkeypatch.setattr(BACKENDS[backend], "check_on_this_machine", lambda *_, b=backend: f"{b} is broken")
        chosen, why = choose_backend(method, CUDA, dtype=torch.bfloat16)
        assert chosen == after and (backend is None or f"{backend} is broken" in why)


def test_its_check_before_first_use_is_real():
    """On a CPU it must fail: there FlexAttention has no gradients."""
    reason = check_kernel(make("alibi"), CPU, torch.float32, 130, flex_flash.prepare, flex_flash.run)
    assert "failed its check with ValueError: FlexAttention has no backward pass on a CPU" in reason


@pytest.mark.parametrize("capability, block", [((9, 0), 128), ((10, 0), 256), ((11, 0), 256)])
def test_the_blocks_of_the_mask_are_those_of_the_gpu_s_tiles(capability, block, gpu, monkeypatch):
    gpu(*capability)
    assert flex_flash.query_block(CUDA) == block
    monkeypatch.setattr(flex_flash, "query_block", lambda device: block)  # for tensors on a CPU
    mask = flex_flash.prepare(None, Call(1, 64, 600, 700, 100))["block_mask"]
    assert mask.BLOCK_SIZE == (block, 128)
    visible = torch.ones(600, 700, dtype=torch.bool).tril(100)
    expected = [[int(part.any()) for part in rows.split(128, dim=1)] for rows in visible.split(block)]
    assert mask.to_dense()[0, 0].tolist() == expected
