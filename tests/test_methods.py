"""The paper's methods against the float64 formulas of reference.py: values, gradients, names, options, refusals."""

import dataclasses
import math

import reference
import torch
from attention_cases import (
    assert_near,
    assert_same_function,
    attend,
    cast,
    gradients,
    make_plan,
    parse,
    random,
    random_qkv,
)
from commands import parametrize, refuses, table
from pytest import approx
from torch.testing import assert_close

from configs.presets import preset
from model.attention import attend as attention
from model.attention.reference import attention_logits
from model.gpt import GPT
from model.methods import MECHANISMS, METHODS
from model.methods.base import ScoreChange, Shape
from model.methods.make import alternative_methods, make_alternative, make_method
from model.methods.names import canonical_name

TRAIN_LENGTH = 64

NAMES = """rope p_rope nope rope_ntk yarn logn_rope logn_p_rope logn_ntk alibi scale_invariant_p_rope
    scale_invariant_rope scale_invariant_nope infini_rope infini_p_rope""".split()

OPTIONS = """rope base=100 | p_rope base=64 | p_rope form=barbero base=500 share=0.75 | p_rope share=0.25
    | rope_ntk stretch=3 | yarn base=500 | yarn stretch=3 | logn_rope context=length | logn_ntk stretch=3 context=length
    | alibi slopes=geometric | alibi slope_scale=16 | scale_invariant_p_rope terms=a | scale_invariant_p_rope terms=m
    | scale_invariant_p_rope tau=0.01 form=barbero | scale_invariant_p_rope learn_tau=True tau_ratio=4
    | scale_invariant_rope tau=0.5 tau_ratio=4 | scale_invariant_nope tau_ratio=0.5 learn_gain=True
    | infini_rope segment_length=7 | infini_p_rope segment_length=37 form=barbero"""
every_case = parametrize("case", [*NAMES, *map(str.strip, OPTIONS.split("|"))])

SHAPES = [  # batch, num_heads, head_dim, length, target_length: below, at and beyond TRAIN_LENGTH
    (3, 6, 16, 1, None),
    (2, 8, 32, 2, 130),
    (2, 6, 32, 37, None),
    (2, 8, 16, 64, 64),
    (1, 6, 128, 130, None),
    (1, 8, 16, 256, 256),
    (1, 6, 32, 300, 1000),
]


def make(name, num_heads=6, head_dim=16, train_length=TRAIN_LENGTH, **options):
    return make_method(name, Shape(num_heads, head_dim, train_length), **options)


def make_learned(name, num_heads, head_dim, **options):
    """Return the method with a random parameter or none, its parameters, these in float64, and reference's options."""
    method = make(name, num_heads, head_dim, **options)
    parameters = [*method.parameters()]
    for parameter in parameters:
        torch.nn.init.normal_(parameter, 0.1, 0.3, generator=torch.Generator().manual_seed(num_heads))
    exact = cast(parameters, torch.float64)
    return method, parameters, exact, dict(options, train_length=TRAIN_LENGTH, learned=exact[0] if exact else None)


# ---- values and gradients --------------------------------------------------------------------------------------------


@parametrize("batch, num_heads, head_dim, length, target_length", SHAPES)
@every_case
def test_output_and_logits_are_the_reference(case, batch, num_heads, head_dim, length, target_length):
    name, options = parse(case)
    method, parameters, exact_parameters, known = make_learned(name, num_heads, head_dim, **options)
    known |= dict(target_length=target_length)
    exact = random_qkv(num_heads, head_dim, length, batch)
    expected = reference.attend(name, *exact, **known)
    truths = gradients(expected, exact + exact_parameters)
    tolerances = {torch.float32: 1e-5, torch.float64: 2e-6}  # the tables of cos, sin, a and m are float32
    for dtype, tolerance in list(tolerances.items())[: 2 if length == 130 else 1]:
        q, k, v = inputs = cast(exact, dtype)
        output = attend(method, q, k, v, target_length=target_length)
        assert output.dtype == dtype
        assert_same_function(output, inputs + parameters, expected, truths, tolerance)
        last = attend(method, q[:, :, -37:], k, v, target_length=target_length)
        assert_near(last, expected[:, :, -37:], tolerance)
        if not name.startswith("infini"):
            logits = attention_logits(method, q, k, target_length=target_length)
            truth = reference.attention_logits(name, *exact[:2], **known)
            assert torch.equal(logits.isneginf(), truth.isneginf())
            truth_gradients = gradients(truth.tril(), exact[:2] + exact_parameters)
            assert_same_function(logits.tril(), [q, k, *parameters], truth.tril(), truth_gradients, tolerance)


# ---- rotations: the papers' numbers, and far positions ---------------------------------------------------------------


def test_frequencies_have_the_published_numbers():
    """The paper has the bases 40,890 and 167,200 of NTK for 4 and 16 times the training length."""
    for s, base in {1: 10_000, 4: 40_890, 16: 167_200}.items():
        assert reference.ntk_frequencies(128, s)[63].item() ** (-64 / 63) == approx(base, rel=2e-4)
    k, p_rope = torch.arange(64).double(), reference.half_truncate_frequencies(128)
    assert_close(p_rope, torch.where(k < 32, 1024 ** (-k / 31), 0))
    barbero = reference.barbero_frequencies(128, share=0.75)
    assert_close(barbero, torch.where(k < 48, 10_000 ** (-k / 64), 0))


@parametrize("train_length, low, high", [(4096, 20, 46), (16_384, 30, 55)])
def test_yarn_keeps_the_pairs_up_to_low_and_slows_those_from_high_on_by_s(train_length, low, high):
    theta, gain = reference.rotation("yarn", 128, train_length, 4 * train_length)
    share_kept = (theta / reference.rope_frequencies(128) - 1 / 4) / (3 / 4)
    assert_close(share_kept, ((high - torch.arange(64).double()) / (high - low)).clamp(0, 1))
    assert gain == approx(1.1386, rel=1e-4)  # in both q and k


@torch.no_grad()
@parametrize("head_dim, train_length, target_length, keys", [
    (16, 4096, 65_536, 65_536),
    (128, 4096, 16_384, 3000),
    (16, 65_536, 262_144, 3000),  # yarn's ramp ends beyond the last pair, so this pair keeps a part of its frequency
])
@parametrize("case", """rope | p_rope | p_rope form=barbero share=0.75 | rope_ntk | rope_ntk stretch=4.0
    | yarn | scale_invariant_p_rope | scale_invariant_nope tau=3.0""".split("|"))
def test_the_last_position_is_as_exact_as_in_float64(case, head_dim, train_length, target_length, keys):
    """One query over all keys. Angles computed in float32 would be wrong by up to 65535 * 2^-24 radians."""
    name, options = parse(case)
    q, k, v = (x.float() for x in random_qkv(1, head_dim, keys, batch=1))
    q = 4 * q[:, :, -1:]
    exact = [x.double() for x in (q, k, v)]
    known = dict(options, train_length=train_length, target_length=target_length)
    expected = reference.attend(name, *exact, q_offset=keys - 1, **known)
    method = make(name, 1, head_dim, train_length, **options)
    assert_near(attend(method, q, k, v, target_length=target_length), expected, 2e-5)


# ---- names and combinations ------------------------------------------------------------------------------------------


@parametrize("names", """p_rope+scale_invariant+gate gate+scale_invariant+p_rope scale_invariant_p_rope+gate
    | scale_invariant_p_rope scale_invariant+p_rope | logn_ntk logn+ntk | fox nope+forget forget | nope | rope rope,rope
    | window nope+window | rope+window,nope window+rope,nope,rope+window,nope
    | rnope_swa nope,window+rope,rope+window,rope+window""".split("|"))
def test_a_method_has_one_name_whatever_the_order_of_its_parts(names):
    canonical, *_ = names.split()
    assert {canonical_name(name) for name in names.split()} == {canonical}


def test_a_published_name_is_canonical():
    for name, description in METHODS.items():
        assert canonical_name(name) == name == canonical_name(description or "nope")


class Own(ScoreChange):
    def __init__(self, shape, slope: float = 1.0, power: "float | None" = None, untyped=2.0):
        super().__init__()
        self.given = slope, power, untyped


def test_options_of_a_new_mechanism_have_the_types_of_its_constructor(monkeypatch):
    monkeypatch.setitem(MECHANISMS, "own", Own)
    assert make("own", slope=2, power=3, untyped="any").score_change.given == (2.0, 3.0, "any")
    assert type(make("own", slope=2).score_change.given[0]) is float
    for option in ("slope", "power"):
        with refuses(option, "float"):
            make("own", **{option: "wrong"})


@table("name, other", """
    rope      | rope_ntk
    rope      | yarn
    yarn      | rope
    rope_ntk  | yarn
    logn_rope | logn_ntk
""")
@parametrize("length", [TRAIN_LENGTH, TRAIN_LENGTH // 2, 3 * TRAIN_LENGTH])
def test_an_alternative_is_the_other_method_with_these_weights(name, other, length):
    """As in a validation: the parameters of one method, the plan of the other."""
    ours, _, _, known = make_learned(name, 2, 16, base=500.0)
    alternative = make_alternative(name, other, ours.shape, dict(base=500.0))
    assert alternative.name == other
    exact = random_qkv(2, 16, length)
    inputs = cast(exact, torch.float32)
    output = attention.attend(ours, *inputs, plan=make_plan(alternative, length, length))
    assert_near(output, reference.attend(other, *exact, **known), 1e-5)
    assert torch.equal(output, attend(ours, *inputs)) == (length <= TRAIN_LENGTH)


def test_a_plan_moves_an_alternative_to_the_device_of_the_model():
    config = dataclasses.replace(preset("quickstart"), method="rope+kerple_log", validate_as=("yarn+kerple_log",))
    (alternative,) = alternative_methods(config).values()
    with torch.device("meta"):
        GPT(config).plan(16, method=alternative)
    assert {parameter.device.type for parameter in alternative.parameters()} == {"meta"}


@table("case, other", """
    rope                 | p_rope
    rope                 | logn_rope
    alibi                | nope
    scale_invariant_rope | scale_invariant_p_rope
    infini_rope          | rope
    nope                 | rope
    p_rope base=10000.0  | rope_ntk
""")
def test_methods_that_train_differently_are_no_alternatives(case, other):
    name, options = parse(case)
    with refuses(name, other):
        make_alternative(name, other, Shape(2, 16, TRAIN_LENGTH), options)


# ---- learned numbers -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_moments_solve_the_conditions_of_the_paper_for_gaussian_scores():
    change, paper = (make("scale_invariant_nope", learn_moments=x, tau=3.0).score_change for x in (True, False))
    head, t = torch.arange(6)[:, None], torch.arange(1000).double()
    for moments, constant in zip(change.coefficients(t, head), paper.coefficients(t, head)):
        assert_near(moments, constant.expand(6, 1000), 1e-9)
    change.mean.copy_(random(6, seed=1))
    change.log_deviation.copy_(random(6, seed=2))
    mean, log_deviation = change.mean.double()[:, None], change.log_deviation.double()[:, None]
    variance = (2 * log_deviation).exp()
    a, m = change.coefficients(t, head)
    # The Gaussian L = a S + m has E[exp(L)] = exp(E[L] + Var[L] / 2). E[exp(L) L] is E[L] + Var[L] times this.
    log_attention = a * mean + m + a**2 * variance / 2 + torch.log(t / 3 + 1)
    sparsity = a * mean + m + a**2 * variance
    assert_near(log_attention, (mean + variance / 2).expand_as(a), 1e-9)
    assert_near(sparsity, (mean + variance).expand_as(a), 1e-9)
    assert_near(a[:, 0], torch.ones(6), 1e-9)


@torch.no_grad()
def test_logn_starts_with_a_mean_multiplier_of_one_and_tau_where_it_is_set():
    (scale,) = make("logn_rope", head_dim=128, train_length=4096).parameters()
    assert_close(scale, torch.full((6,), 0.1366), rtol=0, atol=5e-5)
    (log_tau,) = make("scale_invariant_nope", tau=math.exp(3), learn_tau=True).parameters()
    assert_close(log_tau, torch.full((6,), 3.0))


# ---- refusals --------------------------------------------------------------------------------------------------------


@table("case, words", """
    rope+p_rope           | rotation
    logn+p_rope+logn      | query scale
    alibi+scale_invariant | score change
    infini+pope           | pope.infini
    fire+sink             | sink.fire
    fox+sink              | sink
    rnope_swa+gate        | rnope_swa
    rnope_swa             | make_layers
    rope+windw            | window
    scale_invariant_prope | scale_invariant_p_rope
    scale_invariant_rope tua=tau          |
    infini_p_rope segment_length=1.5      |
    p_rope form=wrong                     |
    alibi slopes=wrong                    |
    logn_rope context=wrong               |
    scale_invariant_p_rope tau=0.0        |
    scale_invariant_p_rope tau=-1.0       |
    scale_invariant_p_rope tau=inf        |
    scale_invariant_p_rope tau=nan        |
    scale_invariant_p_rope tau_ratio=-2.0 |
    rope+window window=0                  |
    fire threshold=-3                     |
    log_offset offset=0.5                 |
    n_power head_dim=1                    |
""")
def test_wrong_parts_are_refused_by_name_and_wrong_options_by_name_and_value(case, words):
    name, options = parse(case)
    with refuses(words, *options, *options.values()):
        make(name, **{"num_heads": 12} | options)


@parametrize("function", [attend, attention_logits])
@parametrize("num_heads, head_dim", [(8, 16), (1, 16), (6, 32)])
@parametrize("name", ["nope", "infini_rope"])
def test_other_heads_than_the_method_s_are_refused(name, num_heads, head_dim, function):
    q, k, v = random_qkv(num_heads, head_dim, 5)
    with refuses(f"{num_heads}, 5, {head_dim}"):
        function(make(name), q, k, *([v] if function is attend else []))
