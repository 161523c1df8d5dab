"""Statistics of a model's logits against dense float64 ones, from the parameters and the formulas of reference.py."""

import itertools
import math

import numpy as np
import pytest
import reference
import torch
from test_gpt import HEADS, LAYERS, TRAIN_LENGTH, make_gpt, make_random_gpt, random_tokens, rms_norm
from test_methods import NAMES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.shard_writer import ShardWriter
from data.shards import open_split
from scripts.reproduce import logits
from scripts.reproduce.theory import attention_statistics

WITH_LOGITS = [name for name in NAMES if not name.startswith("infini")]
ROTATING = [name for name in NAMES if name.endswith(("rope", "ntk", "yarn"))]


def plain_layers(name, model, tokens):
    """q, k (B, H, T, D) after QK-norm and the method's parameter, of each layer, in float64."""
    p = {key: value.detach().double() for key, value in model.named_parameters()}
    options = dict(segment_length=20) if name.startswith("infini") else {}
    x = rms_norm(p["embedding.weight"][tokens])  # (B, T, C)
    for layer in range(LAYERS):
        mine = {key.removeprefix(f"blocks.{layer}."): value for key, value in p.items()}
        learned = next((value for key, value in mine.items() if key.startswith("attention.method")), None)
        q, k, v = (rms_norm(x) @ matrix.T for matrix in mine["attention.qkv"])
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        q, k = rms_norm(q), rms_norm(k)
        yield q, k, learned
        y = reference.attend(name, q, k, v, train_length=TRAIN_LENGTH, learned=learned, **options)
        x = x + y.transpose(1, 2).flatten(2) @ mine["attention.proj"].T
        x = x + (rms_norm(x) @ mine["mlp.up"].T).clamp(min=0) ** 2 @ mine["mlp.down"].T


def plain_scores(name, model, tokens, rotated):
    """S of all pairs t > 0 but those with key 0, of each layer: (layers, H, pairs) in numpy."""
    B, T = tokens.shape
    keep = np.tril(np.ones((T, T), bool), -1)
    keep[:, 0] = False
    scores = []
    for q, k, _ in plain_layers(name, model, tokens):
        if rotated:
            turn = reference.rotation(name, q.shape[-1], TRAIN_LENGTH, T)
            q, k = (reference.rotate(x, torch.arange(T, dtype=torch.float64), *turn) for x in (q, k))
        s = (q @ k.mT / math.sqrt(q.shape[-1])).transpose(0, 1).numpy()  # (H, B, T, T)
        scores.append(s[:, :, keep].reshape(HEADS, -1))
    return np.stack(scores)


# ---- attention_profile -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_profile_is_that_of_the_dense_attention(name):
    model, lengths = make_random_gpt(name), [1, TRAIN_LENGTH, 131]
    tokens, _ = random_tokens(140, batch=3)
    rows = logits.attention_profile(model, tokens, lengths)
    for length in lengths:
        samples = []
        for window in tokens[:, -length:].split(1):
            last = [
                reference.attention_logits(name, q, k, train_length=TRAIN_LENGTH, learned=learned)[0, :, -1].flip(-1)
                for q, k, learned in plain_layers(name, model, window)
            ]
            samples.append({key: x.mean().item() for key, x in attention_statistics(torch.stack(last)).items()})
        for quantity in samples[0]:
            values = [sample[quantity] for sample in samples]
            row = rows.pop(0)
            assert row.pop("mean") == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6)
            assert row.pop("stderr") == pytest.approx(np.std(values, ddof=1) / 3**0.5, rel=1e-3, abs=1e-6)
            assert row == dict(method=name, length=length, quantity=quantity, windows=3)
    assert not rows


def test_profile_has_each_range_that_the_context_covers():
    tokens, _ = random_tokens(100, batch=1)
    rows = logits.attention_profile(make_random_gpt(), tokens, [99, 100])
    assert [(row["length"], row["quantity"], row["stderr"]) for row in rows] == [
        (99, "entropy", None), (99, "attention_100", None),
        (100, "entropy", None), (100, "entropy_10_100", None), (100, "attention_100", None),
    ]  # fmt: skip


def test_profile_of_zero_scores_is_uniform():
    model = make_gpt("p_rope")
    for block in model.blocks:
        block.attention.qkv.data.zero_()
    tokens, _ = random_tokens(123)
    mean = {row["quantity"]: row["mean"] for row in logits.attention_profile(model, tokens, [123])}
    expected = dict(entropy=math.log(123), entropy_10_100=math.log(90), attention_100=100 / 123)
    assert mean == pytest.approx(expected, rel=1e-6)


def test_profile_takes_little_more_memory_than_one_row_of_logits():
    """No tensor of as many elements as a dense head of logits."""

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            self.size = max([self.size, *(x.numel() for x in tree_leaves(out) if torch.is_tensor(x))])
            return out

    length = 1_500
    tokens, _ = random_tokens(length, batch=2)
    with Largest() as largest:
        logits.attention_profile(make_random_gpt(), tokens, [length])
    assert largest.size <= HEADS * 128 * length < length**2


@pytest.mark.parametrize("name", ["infini_rope", "infini_p_rope"])
def test_profile_refuses_methods_without_logits(name):
    with pytest.raises(ValueError, match=f"{name} has no attention logits"):
        logits.attention_profile(make_gpt(name), random_tokens(30)[0], [30])


def test_profile_refuses_contexts_longer_than_the_windows():
    with pytest.raises(ValueError, match="31 tokens does not fit in windows of 30"):
        logits.attention_profile(make_gpt(), random_tokens(30)[0], [5, 31])


# ---- scores ----------------------------------------------------------------------------------------------------------


def statistics_of(model, tokens, **sampling) -> list[dict]:
    """The moments of layer_scores: one row a layer, form (rotated or not) and head, and "all" heads pooled."""
    return [
        dict(layer=layer, rotated=rotated, head=head, pairs=len(mine)) | logits.moments(mine)
        for layer, rotated, scores in logits.layer_scores(model, tokens, **sampling)
        for head, mine in [*enumerate(scores), ("all", scores.flatten())]
    ]


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_those_of_the_dense_scores(name):
    model, (tokens, _) = make_random_gpt(name), random_tokens(43, batch=2)
    forms = [False, True] if name in ROTATING else [False]
    rows = iter(statistics_of(model, tokens))
    dense = {rotated: plain_scores(name, model, tokens, rotated) for rotated in forms}
    for layer, rotated in itertools.product(range(LAYERS), forms):
        heads = dense[rotated][layer]
        for head, x in [*enumerate(heads), ("all", heads.ravel())]:
            row = next(rows)
            z = (x - x.mean()) / x.std()
            expected = dict(mean=x.mean(), std=x.std(), skewness=(z**3).mean(), excess_kurtosis=(z**4).mean() - 3)
            assert row["ks"] > 0
            assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert {key: row[key] for key in ("layer", "rotated", "head", "pairs")} == dict(
                layer=layer, rotated=rotated, head=head, pairs=len(x)
            )
    assert next(rows, None) is None


def test_rotation_changes_the_scores_but_logn_does_not():
    model, (tokens, _) = make_random_gpt("logn_rope"), random_tokens(50)
    plain = {rotated: s for layer, rotated, s in logits.layer_scores(model, tokens) if layer == 0}
    for block in model.blocks:
        block.attention.method.query_scale.scale.data *= 7
    scaled = {rotated: s for layer, rotated, s in logits.layer_scores(model, tokens) if layer == 0}
    assert (plain[True] - plain[False]).abs().max() > 0.5
    assert torch.equal(plain[False], scaled[False]) and torch.equal(plain[True], scaled[True])


def test_too_many_pairs_are_sampled_uniformly_without_key_0_and_the_diagonal():
    batch, length, draws = 2, 9, 100_000
    b, i, j = logits.score_pairs(batch, length, 30, seed=0)
    assert len(b) == 30
    pairs = torch.stack(logits.score_pairs(batch, length, 55, seed=0), dim=1)  # 2 * 28 pairs: one too many
    assert len(pairs) == 55
    everything = set(zip(*(x.tolist() for x in logits.score_pairs(batch, length, 56, seed=0))))
    assert everything == {(b, i, j) for b in range(2) for i in range(9) for j in range(1, i)}
    assert set(map(tuple, pairs.tolist())) <= everything
    b, i, j = logits.score_pairs(10 * batch, 100 * length, draws, seed=0)
    assert len(b) == draws and ((1 <= j) & (j < i) & (i < 900)).all()
    # of uniform pairs 1 <= j < i <= n: E[b] = 9.5, E[i] = 2 (n + 1) / 3, E[j] = (n + 1) / 3
    for x, mean in [(b, 9.5), (i, 600.0), (j, 300.0)]:
        assert abs(x.double().mean() - mean) < 4 * x.double().std() / draws**0.5


def test_sampled_statistics_are_near_those_of_all_pairs_and_repeat_with_the_seed():
    model, (tokens, _) = make_random_gpt(), random_tokens(150, batch=1)
    everything = statistics_of(model, tokens)
    sampled = statistics_of(model, tokens, max_pairs=4_000, seed=3)
    for row, exact in zip(sampled, everything):
        assert row["pairs"] == (4_000 * HEADS if row["head"] == "all" else 4_000)
        assert abs(row["mean"] - exact["mean"]) < 5 * exact["std"] / 4_000**0.5
        assert row["std"] == pytest.approx(exact["std"], rel=0.1)
    assert statistics_of(model, tokens, max_pairs=4_000, seed=3) == sampled
    assert statistics_of(model, tokens, max_pairs=4_000, seed=4) != sampled


def test_two_tokens_have_no_pair_to_look_at():
    with pytest.raises(ValueError, match="at least 3 tokens, got 2"):
        statistics_of(make_gpt(), random_tokens(2)[0])


# ---- quantiles -------------------------------------------------------------------------------------------------------


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gaussian_samples_lie_on_the_line():
    points = logits.qq_points(0.5 + 3 * gaussian(100_000))
    p, x, y = (np.array([point[key] for point in points]) for key in ("probability", "gaussian", "sample"))
    np.testing.assert_allclose(p, (np.arange(1, 201) - 0.5) / 200)
    density = np.exp(-(((x - 0.5) / 3) ** 2) / 2) / math.sqrt(2 * math.pi) / 3
    stderr = np.sqrt(p * (1 - p) / 100_000) / density  # of a sample quantile
    assert (np.abs(y - x) < 5 * stderr).all()


def test_quantiles_are_numpys_and_neither_side_is_standardised():
    x = 7 + gaussian(1_001).exp()
    points = logits.qq_points(x, n=13)
    probabilities = (np.arange(13) + 0.5) / 13
    np.testing.assert_allclose([p["sample"] for p in points], np.quantile(x.numpy(), probabilities))
    z = (torch.tensor([p["gaussian"] for p in points], dtype=torch.float64) - x.mean()) / x.std(correction=0)
    np.testing.assert_allclose(torch.special.ndtr(z), probabilities)


@pytest.mark.parametrize("sign", [1, -1])
def test_ks_is_the_largest_gap_between_the_distributions(sign):
    x = sign * torch.tensor([-2.0, 1.0, 1.0], dtype=torch.float64)  # std sqrt(2): 1/3 below, Phi(1/sqrt(2)) at 1
    assert logits.moments(x)["ks"] == pytest.approx(0.760250 - 1 / 3, abs=1e-6)


def test_ks_of_gaussian_samples_is_small_and_of_others_is_not():
    n = 10_000
    assert logits.moments(2 + gaussian(n))["ks"] < 1.1 / n**0.5  # Lilliefors: 1 in 1000 is larger than about 1.04
    assert logits.moments(gaussian(n).exp())["ks"] > 0.1


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stream(tmp_path):
    """A validation text of the tokens 0..999."""
    writer = ShardWriter(tmp_path, "text", tokenizer="none", vocab_size=1000)
    writer.write("val", np.arange(1000))
    writer.close()
    return open_split(tmp_path, "val", 1000)


def test_windows_lie_at_even_distances_over_the_text(stream):
    windows = logits.validation_windows(stream, 3, 200)
    assert windows.dtype == torch.int64
    assert torch.equal(windows, torch.tensor([[0], [333], [666]]) + torch.arange(200))


def test_windows_that_the_text_does_not_hold_are_refused(stream):
    assert logits.validation_windows(stream, 5, 200).shape == (5, 200)
    with pytest.raises(ValueError, match="6 windows of 200 tokens are more than the 1000 of the validation text"):
        logits.validation_windows(stream, 6, 200)
