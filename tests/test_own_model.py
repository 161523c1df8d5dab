"""The lines that docs/methods.md gives for other people's models compute the paper's formula, run to the letter."""

import re
import shutil

import pytest
import reference
import torch
from attention_cases import cast, gradients
from commands import ROOT, parametrize, python, slow
from torch.testing import assert_close

PAGE = (ROOT / "docs/methods.md").read_text()
SCORE_MOD, KERNEL, INTERFACE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@slow
def test_flex_attention_and_our_kernels(tmp_path):
    """The folder holds only the files that the page tells to copy. tests/reference.py gives the float64 values."""
    assert "`model/`" in PAGE and "`errors.py`" in PAGE
    shutil.copytree(ROOT / "model", tmp_path / "model")
    for path in (ROOT / "errors.py", ROOT / "tests/reference.py"):
        shutil.copy(path, tmp_path)
    script = f"""
import torch
import reference
torch.compiler.set_stance("force_eager")  # FlexAttention's numbers without a minute of compiling
H, T, D = 2, 256, 64
q, k, v = torch.randn(3, 1, H, T, D, generator=torch.Generator().manual_seed(0))
exact = reference.attend("scale_invariant_p_rope", q.double(), k.double(), v.double(), train_length=4096)
{KERNEL}
assert output.shape == (1, H, T, D) and (output - exact).abs().max() < 1e-5
tables = method.rotation.tables(T, T, "cpu")
q, k = (method.rotation.rotate(x, *tables) for x in (q, k))
{SCORE_MOD}
assert output.shape == (1, H, T, D) and (output - exact).abs().max() < 1e-5
"""
    python("-c", script, cwd=tmp_path, timeout=None)


def tiny(family, **options):
    """The configuration of a small model with two query heads a key head."""
    transformers = pytest.importorskip("transformers", reason="an extra: pip install -r requirements-extras.txt")
    sizes = dict(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, eos_token_id=None,
    )
    return getattr(transformers, f"{family}Config")(**sizes, **options)


def build(config):
    names = dict(config=config)
    torch.manual_seed(0)
    exec(INTERFACE, names)
    return names


def test_the_attention_interface_computes_the_formula():
    names = build(tiny("Llama"))
    attention = names["model"].model.layers[1].self_attn
    inputs = [torch.randn(2, heads, 33, 8, requires_grad=True) for heads in (4, 2, 2)]
    mask = torch.full((33, 33), torch.finfo(torch.float32).min).triu(1)
    output, _ = names["scale_invariant"](attention, *inputs, mask, scaling=attention.scaling)
    q, k, v = exact = cast(inputs, torch.float64)
    shared = [q, *(x[:, [0, 0, 1, 1]] for x in (k, v))]
    expected = reference.attend("scale_invariant_nope", *shared, train_length=4096).transpose(1, 2)
    assert_close(output.double(), expected, atol=1e-6, rtol=0)
    for ours, truth in zip(gradients(output, inputs), gradients(expected, exact)):
        assert_close(ours.double(), truth, atol=1e-5, rtol=0)


GEMMA = dict(sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=None)  # layers with a window and without


@parametrize("family, options", [("Llama", {}), ("Gemma2", GEMMA)])
def test_the_attention_interface_runs_whole_models(family, options):
    """A model trains. A cache or padding on the left changes nothing. The logits differ from plain attention's."""
    model = build(tiny(family, **options))["model"]
    tokens = torch.randint(1, 50, (2, 11))
    model(tokens, labels=tokens).loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        logits = model(tokens).logits
        plain, cached = (
            model.generate(tokens, use_cache=use_cache, max_new_tokens=8, do_sample=False)
            for use_cache in (False, True)
        )
        assert torch.equal(plain, cached)
        padded = torch.nn.functional.pad(tokens, (3, 0))
        mask = (padded > 0).long()
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        shown = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
        assert_close(shown, logits, atol=1e-4, rtol=0)
        model.set_attn_implementation("eager")
        assert (model(tokens).logits - logits).abs().max() > 0.1
