"""The paper's methods against the float64 formulas of reference.py: values, gradients, names, options, refusals."""

import dataclasses
import math

import pytest
import reference
import torch
from attention_cases import assert_near, attend, make_plan, parse, random
from commands import refuses
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
every_case = pytest.mark.parametrize("case", [*NAMES, *map(str.strip, OPTIONS.split("|"))])

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


def make_learned(name, num_heads, head_dim, options):
    """Return the method with a random parameter, and the same parameter in float64, or None."""
    method = make(name, num_heads, head_dim, **options)
    learned = None
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3, generator=torch.Generator().manual_seed(num_heads))
        learned = parameter.detach().double().requires_grad_()
    return method, learned


def random_qkv(num_heads, head_dim, length, batch=2):
    return [random(batch, num_heads, length, head_dim, seed=length + i).requires_grad_() for i in range(3)]


def cast(tensors, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


def gradients(output, inputs):
    """Return the gradients of a randomly weighted sum of the output."""
    weight = random(*output.shape, seed=0).to(output.dtype)
    return torch.autograd.grad((output * weight).sum(), inputs, materialize_grads=True, retain_graph=True)


def assert_same_function(output, inputs, expected, exact_inputs, tolerance):
    """Values, and the gradients of the inputs, which may include the method's parameter (None without one)."""
    assert_near(output, expected, tolerance)
    exact = gradients(expected, [x for x in exact_inputs if x is not None])
    for gradient, truth in zip(gradients(output, inputs), exact, strict=True):
        assert_near(gradient, truth, tolerance)


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, num_heads, head_dim, length, target_length", SHAPES)
@every_case
def test_output_and_logits_are_the_reference(case, batch, num_heads, head_dim, length, target_length):
    name, options = parse(case)
    method, learned = make_learned(name, num_heads, head_dim, options)
    lengths = dict(train_length=TRAIN_LENGTH, target_length=target_length)
    exact = random_qkv(num_heads, head_dim, length, batch)
    expected = reference.attend(name, *exact, **lengths, learned=learned, **options)
    tolerances = {torch.float32: 1e-5, torch.float64: 2e-6}  # the tables of cos, sin, a and m are float32
    for dtype, tolerance in list(tolerances.items())[: 2 if length == 130 else 1]:
        inputs = cast(exact, dtype)
        output = attend(method, *inputs, target_length=target_length)
        assert output.dtype == dtype
        parameters = [*method.parameters()]
        assert_same_function(output, [*inputs, *parameters], expected, [*exact, learned], tolerance)
        last = attend(method, inputs[0][:, :, -37:], *inputs[1:], target_length=target_length)
        assert_near(last, expected[:, :, -37:], tolerance)
        if not name.startswith("infini"):
            logits = attention_logits(method, *inputs[:2], target_length=target_length)
            truth = reference.attention_logits(name, *exact[:2], **lengths, learned=learned, **options)
            assert_close(logits.isneginf(), torch.ones(length, length).triu(1).bool().expand_as(logits))
            exact_inputs = [*exact[:2], learned]
            assert_same_function(logits.tril(), [*inputs[:2], *parameters], truth.tril(), exact_inputs, tolerance)


def test_reference_attention_is_a_loop_over_tokens():
    """The reference against the formulas in plain Python, for the paper's method: one head, five tokens, D = 8."""
    q, k, v = (x.detach()[0, 0] for x in random_qkv(1, 8, 5, batch=1))
    theta = [1.0, 1 / 1024, 0.0, 0.0]
    for i in range(5):
        weights = []
        for t in range(i + 1):
            score = sum((complex(q[i, c], q[i, c + 4]) * complex(k[i - t, c], -k[i - t, c + 4])
                         * complex(math.cos(t * theta[c]), -math.sin(t * theta[c]))).real for c in range(4))
            a = math.sqrt(1 + 2 * math.log(1 + t / 10))
            weights.append(math.exp(a * score / math.sqrt(8) + 1 - a * a))
        expected = sum(w * v[i - t] for t, w in enumerate(weights)) / sum(weights)
        output = reference.attend("scale_invariant_p_rope", *(x[None, None] for x in (q, k, v)), train_length=4)
        assert_close(output[0, 0, i], expected, rtol=0, atol=1e-12)


# ---- scale-invariant attention ---------------------------------------------------------------------------------------

TABLE = {0: (1, 0), 1: (1.0912, -0.1906), 10: (1.5448, -1.3863), 100: (2.4074, -4.7958), 1000: (3.1985, -9.2302),
         4095: (3.6104, -12.0348), 16383: (3.9754, -14.8040), 65535: (4.3100, -17.5758)}  # t: a_t, m_t at tau = 10


def test_a_and_m_are_the_table_65535_tokens_back():
    """Value channel c is 1 at one key alone, so output c is the key's attention weight."""
    distances = torch.tensor(list(TABLE))
    q, k = torch.zeros(2, 1, 1, 16), torch.zeros(2, 1, 65536, 16)
    q[1, ..., 0], k[1, ..., 0] = 4, 4  # S = 4 everywhere in the second of the batch, 0 in the first
    v = torch.zeros(65536, 16)
    v[65535 - distances, torch.arange(8)] = 1
    output = attend(make("scale_invariant_nope", num_heads=1), q, k, v.expand(2, 1, -1, -1))
    m, four_a_plus_m = (output[:, 0, 0, :8] / output[:, 0, 0, :1]).log() + torch.tensor([[0.0], [4.0]])
    a = (four_a_plus_m - m) / 4
    assert_close(torch.stack([a, m], dim=-1), torch.tensor(list(TABLE.values())), rtol=0, atol=7e-5)


# ---- names and combinations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", """p_rope+scale_invariant+gate gate+scale_invariant+p_rope scale_invariant_p_rope+gate
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


@pytest.mark.parametrize("name, other", [("rope", "rope_ntk"), ("rope", "yarn"), ("yarn", "rope"), ("rope_ntk", "yarn"),
                                         ("logn_rope", "logn_ntk")])
@pytest.mark.parametrize("length, same", [(TRAIN_LENGTH, True), (TRAIN_LENGTH // 2, True), (3 * TRAIN_LENGTH, False)])
def test_an_alternative_is_the_other_method_with_these_weights(name, other, length, same):
    """As in a validation: the parameters of one method, the plan of the other."""
    ours, learned = make_learned(name, 2, 16, dict(base=500.0))
    alternative = make_alternative(name, other, ours.shape, dict(base=500.0))
    assert alternative.name == other
    q, k, v = random_qkv(2, 16, length)
    expected = reference.attend(other, q, k, v, train_length=TRAIN_LENGTH, base=500.0, learned=learned)
    inputs = cast([q, k, v], torch.float32)
    output = attention.attend(ours, *inputs, plan=make_plan(alternative, length, length))
    assert_near(output, expected, 1e-5)
    assert torch.equal(output, attend(ours, *inputs)) == same


def test_a_plan_moves_an_alternative_to_the_device_of_the_model():
    config = dataclasses.replace(preset("quickstart"), method="rope+kerple_log", validate_as=("yarn+kerple_log",))
    (alternative,) = alternative_methods(config).values()
    with torch.device("meta"):
        GPT(config).plan(16, method=alternative)
    assert {parameter.device.type for parameter in alternative.parameters()} == {"meta"}


@pytest.mark.parametrize("name, other", [
    ("rope", "p_rope"), ("rope", "logn_rope"), ("alibi", "nope"), ("scale_invariant_rope", "scale_invariant_p_rope"),
    ("infini_rope", "rope"), ("nope", "rope"), ("p_rope", "rope_ntk"),
])
def test_methods_that_train_differently_are_no_alternatives(name, other):
    with refuses(name, other):
        make_alternative(name, other, Shape(2, 16, TRAIN_LENGTH), dict(base=1e4) if name == "p_rope" else {})


# ---- ALiBi and LogN --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_heads, slopes, exponents", [
    (6, "official", [2, 4, 6, 8, 1, 3]), (8, "official", range(1, 9)),
    (12, "official", [*range(1, 9), 0.5, 1.5, 2.5, 3.5]),
    (6, "geometric", [8 * h / 6 for h in range(1, 7)]), (8, "geometric", range(1, 9)),
])
def test_alibi_slopes(num_heads, slopes, exponents):
    zeros = torch.zeros(1, num_heads, 9, 16)
    bias = attention_logits(make("alibi", num_heads, slopes=slopes), zeros, zeros)[0, :, -1].flip(-1)  # (H, t)
    assert_close(bias, -torch.tensor([[2.0**-x] for x in exponents]) * torch.arange(9), rtol=0, atol=1e-6)


@torch.no_grad()
def test_moments_solve_the_conditions_of_the_paper_for_gaussian_scores():
    change = make("scale_invariant_nope", learn_moments=True, tau=3.0).score_change
    head, t = torch.arange(6)[:, None], torch.arange(1000.0, dtype=torch.float64)
    constant = make("scale_invariant_nope", tau=3.0).score_change.coefficients(t, head)
    assert_close(change.coefficients(t, head), tuple(x.expand(6, 1000) for x in constant))
    for parameter in (change.mean, change.log_deviation):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    mean, variance = change.mean.double()[:, None], (2 * change.log_deviation.double()[:, None]).exp()
    a, m = change.coefficients(t, head)
    # The Gaussian L = a S + m has E[exp(L)] = exp(E[L] + Var[L] / 2). E[exp(L) L] is E[L] + Var[L] times this.
    attention = a * mean + m + a**2 * variance / 2 + torch.log(t / 3 + 1)
    sparsity = a * mean + m + a**2 * variance
    assert_close(attention, (mean + variance / 2).expand_as(attention))
    assert_close(sparsity, (mean + variance).expand_as(sparsity))
    assert_close(change.coefficients(t, head)[0][:, 0], torch.ones(6, dtype=torch.float64))


@torch.no_grad()
def test_logn_starts_with_a_mean_multiplier_of_one_and_tau_where_it_is_set():
    (scale,) = make("logn_rope", head_dim=128, train_length=4096).parameters()
    assert_close(scale, torch.full((6,), 0.1366), rtol=0, atol=5e-5)
    (log_tau,) = make("scale_invariant_nope", tau=math.exp(3), learn_tau=True).parameters()
    assert_close(log_tau, torch.full((6,), 3.0))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, word", {
    "rope+p_rope": "rotation", "logn+p_rope+logn": "query scale", "alibi+scale_invariant": "score change",
    "infini+pope": "pope.infini", "fire+sink": "sink.fire", "fox+sink": "sink", "rnope_swa+gate": "rnope_swa",
    "rnope_swa": "make_layers", "rope+windw": "window", "scale_invariant_prope": "scale_invariant_p_rope",
}.items())
def test_parts_that_exclude_each_other_or_do_not_exist_are_refused_by_name(name, word):
    with refuses(word):
        make(name)


@pytest.mark.parametrize("name, option, named", [
    ("scale_invariant_rope", dict(tua=1.0), "tau"), ("infini_p_rope", dict(segment_length=1.5), "1.5"),
    ("p_rope", dict(form="wrong"), "wrong"), ("alibi", dict(slopes="wrong"), "wrong"),
    ("logn_rope", dict(context="wrong"), "wrong"),
    *(("scale_invariant_p_rope", dict(tau=tau), str(tau)) for tau in (0.0, -1.0, math.inf, math.nan)),
    ("scale_invariant_p_rope", dict(tau_ratio=-2.0), "-2"), ("rope+window", dict(window=0), "0"),
    ("fire", dict(threshold=-3), "-3"), ("log_offset", dict(offset=0.5), "0.5"), ("n_power", dict(head_dim=1), "1"),
])
def test_wrong_options_are_refused(name, option, named):
    with refuses(*option, named):
        make(name, 12, **option)


@pytest.mark.parametrize("function", [attend, attention_logits])
@pytest.mark.parametrize("num_heads, head_dim", [(8, 16), (1, 16), (6, 32)])
@pytest.mark.parametrize("name", ["nope", "infini_rope"])
def test_other_heads_than_the_method_s_are_refused(name, num_heads, head_dim, function):
    q, k, v = random_qkv(num_heads, head_dim, 5)
    with refuses(f"{num_heads}, 5, {head_dim}"):
        function(make(name), q, k, *([v] if function is attend else []))
