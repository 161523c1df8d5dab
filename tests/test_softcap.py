"""Soft caps of the scores, as in Gemma-2: the backend blocks against the formula, and what cannot do it."""

import pytest
import torch
from test_methods import assert_near, assert_refused, gradients, random_qkv

from model.attention import attend, make_plan
from model.attention.reference import plain_attention
from model.methods import make_method


@pytest.mark.parametrize("name", "p_rope logn_rope alibi scale_invariant_p_rope p_rope+window p_rope+sink".split())
@pytest.mark.parametrize("queries, keys", [(1, 1), (131, 131), (129, 300), (1, 77)])
def test_capped_scores_in_blocks_are_the_formula(name, queries, keys):
    method = make_method(name, num_heads=3, head_dim=12, train_length=64, **dict(window=50) if "window" in name else {})
    q, k, v = random_qkv(3, 12, keys, batch=1)
    plan = make_plan(method, queries, keys, q_offset=keys - queries, dtype=torch.float64, softcap=1.5)
    assert plan.backend == "blocks"
    output = attend(method, q[:, :, keys - queries:], k, v, plan=plan)
    exact = plain_attention(method, q, k, v, softcap=1.5)[:, :, keys - queries:]
    assert (exact - plain_attention(method, q, k, v)[:, :, keys - queries:]).abs().max() > 0.01 or keys == 1
    assert_near(output, exact, 1e-6)
    for gradient, truth in zip(gradients(output, [q, k, v]), gradients(exact, [q, k, v]), strict=True):
        assert_near(gradient, truth, 1e-6)


def test_what_cannot_cap_scores_says_so():
    shape = dict(num_heads=2, head_dim=8, train_length=8)
    with assert_refused("cpu does not cap scores", "blocks"):
        make_plan(make_method("rope", **shape), 8, 8, backend="cpu", softcap=3.0)
    with assert_refused("infini_rope has no scores to cap"):
        make_plan(make_method("infini_rope", **shape), 8, 8, softcap=3.0)
