"""Statistics of a model's logits against dense float64 ones, from the parameters and the formulas of reference.py."""

import itertools
from types import SimpleNamespace

import numpy as np
import reference
import scipy.stats
import torch
from attention_cases import parse
from commands import parametrize, refuses, rows_of, slow
from pytest import approx
from test_gpt import LAYERS, TRAIN_LENGTH, make_gpt, make_random_gpt, plain_layers, random_tokens, rms_norm
from test_methods import NAMES
from test_rivals import forgetting
from test_train import write_shards
from tiny_run import train_tiny_run

from data.shards import open_split
from measure.copy_gain import SPAN
from model.attention.reference import attention_logits
from model.methods.base import Method
from model.scores import attention_by_layer, calibrate, layer_scores, score_pairs
from results.far import heads
from scripts.reproduce import logits
from scripts.reproduce.theory import attention_statistics
from scripts.shared.runs import read_run

ROTATING = [name for name in NAMES if name.endswith(("rope", "ntk", "yarn"))]


def exact_layers(name, model, tokens):
    return plain_layers(name, {key: value.detach().double() for key, value in model.named_parameters()}, tokens)


def exact_logits(name, model, tokens):
    """Return the logits of each layer, (B, H, T, T)."""
    return [reference.attention_logits(name, q, k, train_length=TRAIN_LENGTH, learned=learned)
            for q, k, learned, _ in exact_layers(name, model, tokens)]


def of_pairs(s):
    """Return the scores (B, H, T, T) of all pairs t > 0 but those with key 0, (H, pairs)."""
    last = s.shape[-1] - 1
    i, j = torch.tril_indices(last, last, offset=-1) + 1
    return s.transpose(0, 1)[:, :, i, j].flatten(1)


def plain_scores(name, model, tokens, rotated):
    """S of pairs, of each layer: (layers, H, pairs)."""
    T, scores = tokens.shape[1], []
    for q, k, *_ in exact_layers(name, model, tokens):
        if rotated:
            turn = reference.rotation(name, q.shape[-1], TRAIN_LENGTH, T)
            q, k = (reference.rotate(x, torch.arange(T).double(), *turn) for x in (q, k))
        scores.append(of_pairs(q @ k.mT / q.shape[-1] ** 0.5))
    return torch.stack(scores)


@parametrize("name", ["p_rope", "logn_p_rope", "scale_invariant_p_rope"])  # figure_entropy's methods
def test_profile_equals_dense_attention(name):
    model, lengths = make_random_gpt(name), [1, TRAIN_LENGTH, 131]
    tokens, _ = random_tokens(140, batch=3)
    profile = logits.attention_profile(model, tokens, lengths)
    for length in lengths:
        for number, window in enumerate(tokens[:, -length:].split(1)):
            last = torch.cat(exact_logits(name, model, window))[:, :, -1].flip(-1)
            for quantity, expected in attention_statistics(last).items():
                found = profile[length, quantity]
                assert len(found) == 3
                assert found[number] == approx(expected.mean().item(), rel=1e-4, abs=1e-6)
    assert {length for length, quantity in profile if quantity == "entropy_10_100"} == {131}  # as far as contexts reach


@parametrize("name", ["rope", "logn_p_rope", "alibi", "scale_invariant_p_rope"])
def test_scores_of_heads_equal_sums_over_pairs(name):
    model = make_random_gpt(name)
    tokens, _ = random_tokens(2 * SPAN + heads.GAP, batch=3)
    i, n = torch.arange(1, tokens.shape[1]), torch.arange(SPAN - 1)
    pairs = (i, i - 1), (SPAN + heads.GAP + n, n + 1)  # to the previous token, and from the second copy to the first
    weights = torch.stack(exact_logits(name, model, tokens)).softmax(dim=-1)  # (layers, B, H, T, T)
    means = [weights[..., query, key].mean(dim=(1, 3)) for query, key in pairs]
    expected = [of_heads.max().item() for of_heads in means]
    assert heads.head_scores(model, tokens) == approx(expected, rel=1e-4)


@slow
def test_heads_form_at_the_first_checkpoint_above_the_threshold(tmp_path, monkeypatch):
    path = train_tiny_run(tmp_path, "--method rope --save_every 1 --keep 9 --val_lengths 240")
    stored = read_run(path)
    study = SimpleNamespace(runs=[stored], finished=[(stored, stored)], device=torch.device("cpu"))
    study.figure_markdown, study.figure_path = str, lambda: tmp_path / "heads"
    scores = iter([(0.1, 0.2), (0.4, 0.1), (0.2, 0.2), (0.5, 0.2)])  # of the checkpoints of steps 1, 2, 3 and 4
    monkeypatch.setattr(heads, "head_scores", lambda model, tokens: next(scores))
    monkeypatch.setattr(heads, "MILLION", 480)  # tokens a step
    assert rows_of(heads.far_heads(study))[-1] == ["RoPE", "2.0", "not"]


@parametrize("name", NAMES)
def test_scores_and_their_quantiles_equal_dense_scores(name):
    model, (tokens, _) = make_random_gpt(name), random_tokens(43, batch=2)
    forms = [False, True] if name in ROTATING else [False]
    dense = {rotated: plain_scores(name, model, tokens, rotated) for rotated in forms}
    found = {(layer, rotated): scores for layer, rotated, scores in layer_scores(model, tokens, 2**16)}
    assert [*found] == [*itertools.product(range(LAYERS), forms)]
    for (layer, rotated), scores in found.items():
        np.testing.assert_allclose(scores, dense[rotated][layer], rtol=1e-4, atol=1e-5)
    x, shares = dense[False][0, 0].numpy(), (np.arange(13) + 0.5) / 13
    points = logits.qq_points(x, 13)
    np.testing.assert_allclose(points["sample"], np.quantile(x, shares))
    np.testing.assert_allclose(scipy.stats.norm.cdf(points["gaussian"], x.mean(), x.std()), shares)


@torch.no_grad()
@parametrize("length", [1, 150])
@parametrize("case", """rope | p_rope | rope_ntk | yarn | logn_rope | logn_ntk | alibi | nope
    | scale_invariant_p_rope learn_tau=True | scale_invariant_p_rope+sink | scale_invariant_nope learn_moments=True
    | scale_invariant_nope learn_gain=True tau_ratio=0.5 | scale_invariant_rope skip_first=True tau=0.01
    | rope+window window=5 | nope+forget | scale_invariant_p_rope+forget+window window=29""".split("|"))
def test_largest_logits_and_entropies_equal_dense_ones(case, length):
    """One layer. A sink is no key, and forgetting never raises a logit."""
    name, options = parse(case)
    model, (tokens, _) = make_random_gpt(name, num_layers=1, method_options=options), random_tokens(length, batch=3)
    method, (q, k, *_) = model.blocks[0].attention.method, next(exact_layers("nope", model, tokens))
    if method.sink:
        method.sink.logit += 1000
    mechanisms = filter(None, (method.rotation, method.query_scale, method.score_change, method.window))
    logits = attention_logits(Method(name, method.shape, [*mechanisms]), q, k)
    if method.key_bias:
        logits += forgetting(method, rms_norm(rms_norm(model.embedding.weight.double()[tokens])))
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    for backend in ("auto", "blocks"):
        found = attention_by_layer(model, tokens, model.plan(length, backend=backend))
        assert found["max_logit"] == {"0": approx(logits.max().item(), rel=1e-4)}
        assert found["attention_entropy"] == {"0": approx(entropies.mean().item(), rel=1e-4, abs=1e-6)}


def test_layers_without_logits_have_no_largest_one():
    tokens, _ = random_tokens(43)
    for name, layers in [("fire", []), ("infini_rope", []), ("stick_breaking,rope", ["1", "3"])]:
        model = make_random_gpt(name, num_layers=4)
        found = attention_by_layer(model, tokens, model.plan(43))
        assert [*found["max_logit"]] == [*found["attention_entropy"]] == layers


def test_calibration_takes_the_moments_of_the_scores_that_the_calibrated_model_has():
    tokens, _ = random_tokens(43, batch=2)
    trained, model = make_random_gpt("rope"), make_gpt("scale_invariant_rope", method_options=dict(learn_moments=True))
    first = plain_scores("rope", trained, tokens, rotated=True)[0]  # (H, pairs)
    model.load_state_dict(trained.state_dict(), strict=False)
    calibrate(model, tokens)
    scores = [found for _, rotated, found in layer_scores(model, tokens, 2**16) if rotated]
    for block, found in zip(model.blocks, [first, *scores[1:]], strict=True):
        change = block.attention.method.score_change
        expected = torch.stack((found.mean(dim=1), found.std(dim=1)))
        moments = torch.stack((change.mean, change.log_deviation.exp())).double()
        torch.testing.assert_close(moments, expected, rtol=1e-4, atol=1e-5)


def test_too_many_pairs_are_sampled_uniformly_without_key_0_and_the_diagonal():
    everything = {(b, i, j) for b in range(2) for i in range(9) for j in range(1, i)}  # 2 * 28 pairs
    for most in (30, 55, 56):
        pairs = torch.stack(score_pairs(2, 9, most), dim=1).tolist()
        assert len(pairs) == most and {*map(tuple, pairs)} <= everything
    assert {*map(tuple, pairs)} == everything
    pairs = torch.stack(score_pairs(20, 900, 100_000)).double()
    # For uniform pairs 1 <= j < i <= n, the means are E[b] = 9.5, E[i] = 2 (n + 1) / 3 and E[j] = (n + 1) / 3.
    off = pairs.mean(dim=1) - torch.tensor([9.5, 600, 300])
    assert pairs.shape == (3, 100_000)
    assert (off.abs() < 4 * pairs.std(dim=1) / 100_000**0.5).all()


def test_windows_lie_at_even_distances_over_the_text(tmp_path):
    stream = open_split(write_shards(tmp_path, val=np.arange(1000), vocab_size=1000), "val", 1000)
    windows = logits.validation_windows(stream, 3, 200)
    assert torch.equal(windows, torch.tensor([[0], [333], [666]]) + torch.arange(200))
    with refuses("1000"):
        logits.validation_windows(stream, 6, 200)
