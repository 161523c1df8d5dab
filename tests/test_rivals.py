"""The rivals' mechanisms against formulas written from their papers, in float64 and one row at a time.

Values and gradients are compared on every backend that runs here. Then come models whose layers differ.
"""

import math

import pytest
import reference
import torch
import torch.nn.functional as F
from attention_cases import (
    CPU,
    are_finite,
    assert_near,
    assert_same_function,
    attend,
    cast,
    gradients,
    half_precision,
    make_inputs,
    make_plan,
    parse,
    random,
    random_qkv,
)
from commands import parametrize, refuses, slow, table
from test_gpt import make_random_gpt, random_tokens
from torch import sigmoid

from model.attention.choose import BACKENDS
from model.attention.reference import attention_logits, plain_attention
from model.methods.base import Method, Shape
from model.methods.make import make_layers, make_method
from model.methods.names import layer_pattern

LARGE = [(1, 4, 32, 130), (1, 2, 8, 300)]  # batch, heads, head dimension, tokens
SHAPES = [(2, 3, 16, 1), (2, 3, 16, 37)]
SHAPES += [pytest.param(*shape, marks=slow) for shape in LARGE]
CASES = """fox | p_rope+forget | scale_invariant+forget | p_rope+scale_invariant+forget | rope+window window=29
    | p_rope+window window=1 | p_rope+sink | p_rope+scale_invariant+sink | kerple_log | kerple_power | bam | bam_ssmax
    | p_rope+bam+sink | scale_invariant_nope skip_first=True | nape | log_beyond | log_steps floor=10.0
    | log_offset offset=30.0 | factor | log_root | n_power | pope | pope+scale_invariant | p_rope+gate | xsa
    | p_rope+xsa learn_share=True | fire c=0.3 threshold=11.0 | stick_breaking""".split("|")
# Factors of the parameters; larger ones leave too little of bfloat16 to compare.
SPREAD = {"nape": 0.02, "nape_entmax": 0.02, "bam_ssmax": 0.1}


def make(name, num_heads=2, head_dim=8, **options):
    """Return a method with random parameters."""
    method = make_method(name, Shape(num_heads, head_dim, 64), **options)
    for seed, parameter in enumerate(method.parameters()):
        parameter.data = SPREAD.get(name, 0.3) * random(*parameter.shape, seed=seed).float()
    return method


# ---- the formulas, row by row ----------------------------------------------------------------------------------------


def by_rows(formula, method, q, k, v, x=None):
    """Return the outputs. A formula makes weights(i, t, S): of the keys 0 to i, with distances t, S = q.k / sqrt(D)."""
    rows, weights = [], formula(method, q, k, x)
    for i in range(q.shape[2]):
        products = q[:, :, i, None] * k[:, :, : i + 1]
        S = products.sum(-1) / q.shape[-1] ** 0.5  # (B, H, i + 1)
        row = weights(i, (i - torch.arange(i + 1)).double(), S)
        rows.append((row[..., None] * v[:, :, : i + 1]).sum(2))
    return torch.stack(rows, dim=2)


def paper(t, S):
    """Anson et al. 2025 with tau 10."""
    a, m = reference.scale_invariant(t)
    return a * S + m


def kerple_log(method, q, k, x):
    """Chi et al. 2022, equation 6."""
    a, p = method.score_change.log_a.exp()[:, None], method.score_change.log_p.exp()[:, None]
    return lambda i, t, S: S - p * torch.log(1 + a * t)


def kerple_power(method, q, k, x):
    """Chi et al. 2022, equation 5."""
    a, p = method.score_change.log_a.exp()[:, None], 2 * sigmoid(method.score_change.logit_p)[:, None]
    return lambda i, t, S: S - a * t**p


def bam(method, q, k, x):
    """Bianchessi et al. 2025, released code: e^alpha (t + 1e-5)^beta is subtracted; SSMax multiplies S by s log n."""
    alpha, beta = method.score_change.alpha[:, None], method.score_change.beta[:, None]

    def row(i, t, S):
        if method.query_scale:
            S = method.query_scale.scale[:, None] * math.log(i + 1) * S
        return S - alpha.exp() * (t + 1e-5) ** beta
    return row


def scale_invariant(method, q, k, x):
    """The first key keeps a = 1 and m = 0."""
    return lambda i, t, S: torch.where(t == i, S, paper(t, S))


def nape(method, q, k, x):
    """Vasylenko et al. 2025: each query scales its row; the first half of the heads have ALiBi."""
    H, half = q.shape[1], (q.shape[1] + 1) // 2
    slope = F.pad(reference.alibi_slopes(half), (0, H - half))[:, None]

    def row(i, t, S):
        beta = F.softplus(x[:, i] @ method.query_scale.beta.double().T)
        gamma = 2 * torch.tanh(x[:, i] @ method.query_scale.gamma.double().T)
        factor = 1 + beta * math.log(max(i + 1, 2)) ** gamma
        return factor[..., None] * S - slope * t
    return row


def pope(method, q, k, x):
    """Gopalakrishnan et al. 2025, equation 6: magnitudes by softplus, a frequency for each entry, the keys' phase."""
    D, delta = q.shape[-1], method.rotation.delta[:, None]  # (H, 1, D)
    magnitude_q, magnitude_k = F.softplus(q), F.softplus(k)
    theta = 10000.0 ** (-torch.arange(D, dtype=torch.float64) / D)

    def row(i, t, S):
        products = magnitude_q[:, :, i, None] * magnitude_k[:, :, : i + 1]
        scores = (products * torch.cos(delta - t[:, None] * theta)).sum(-1) / D**0.5
        return paper(t, scores) if method.score_change else scores
    return row


def temperature(factor):
    """Logits without position encoding, row i times factor(i, D)."""
    return lambda method, q, k, x: lambda i, t, S: factor(i, q.shape[-1]) * S


LOGITS = {  # of a row: functions of i, t and S
    "pope": pope,
    "pope+scale_invariant": pope,
    "log_beyond": temperature(lambda i, D: 1 if i < 64 else math.log(i + 1) / math.log(64)),  # 64: the training length
    "log_steps": temperature(lambda i, D: 1 + 0.1 * math.log(1 + (i + 1) // 10)),
    "log_offset": temperature(lambda i, D: math.log(i + 30) / math.log(30)),
    "factor": temperature(lambda i, D: 2),
    "log_root": temperature(lambda i, D: math.sqrt(1 + 2 * math.log(i + 1))),
    "n_power": temperature(lambda i, D: (i + 1) ** (2 / (D - 1))),
    "nape": nape,
    "scale_invariant_nope": scale_invariant,
    "bam": bam,
    "bam_ssmax": bam,
    "kerple_log": kerple_log,
    "kerple_power": kerple_power,
}


def of_rotation_and_scores(method, q, k, x):
    """Logits of the mechanisms that test_methods.py holds to the paper."""
    mechanisms = filter(None, (method.rotation, method.score_change))
    dense = attention_logits(Method(method.name, method.shape, [*mechanisms]), q, k)
    return lambda i, t, S: dense[:, :, i, : i + 1]


def forgetting(method, x):
    """Lin et al. 2025, equation 3: D_ij, the sum of log f_l over j < l <= i, (B, H, T, T)."""
    gate = x @ method.key_bias.weight.double().T + method.key_bias.bias_of_gate.double()
    sums = torch.log(sigmoid(gate)).transpose(1, 2).cumsum(-1)
    return sums[..., None] - sums[:, :, None]


def softmax_attention(method, q, k, x):
    """Return the weights of softmax attention. Mechanisms change plain logits one by one."""
    row = LOGITS.get(method.name, of_rotation_and_scores)(method, q, k, x)
    D = forgetting(method, x) if method.key_bias else None

    def weights(i, t, S):
        logits = row(i, t, S)
        if method.key_bias:
            logits = logits + D[:, :, i, : i + 1]
        if method.window:
            logits = logits.masked_fill(t >= method.window.window, -math.inf)
        if method.sink:
            sink = method.sink.logit.double()[:, None].expand(*logits.shape[:2], 1)
            logits = torch.cat((logits, sink), dim=-1)
        return logits.softmax(dim=-1)[..., : i + 1]
    return weights


def broken_stick(method, q, k, x):
    """Tan et al. 2024, equation 2: keys from the nearest on; the query's own value takes the rest of the stick."""
    def weights(i, t, S):
        beta = F.pad(sigmoid(S[..., :i].flip(-1)), (0, 1), value=1.0)
        left = F.pad(1 - beta, (1, -1), value=1.0).cumprod(dim=-1)  # of the stick, before each
        shares = beta * left
        return torch.cat((shares[..., :i].flip(-1), shares[..., i:]), dim=-1)
    return weights


def with_learned_bias(method, q, k, x):
    """Li et al. 2023, equation 4 and section 3; positions from 0."""
    weight = {name: p.double() for name, p in method.replacement.named_parameters()}
    c, threshold = 0.3 * weight["log_c"].exp(), 11.0 * weight["log_threshold"].exp()

    def weights(i, t, S):
        share = torch.log(c * t + 1) / torch.log(c * threshold.clamp(min=i) + 1)
        hidden = torch.clamp(share[:, None] * weight["slope"] + weight["offset"], min=0)  # (i + 1, WIDTH)
        return (S + (hidden @ weight["output"].T).T).softmax(dim=-1)
    return weights


WEIGHTS = {"fire": with_learned_bias, "stick_breaking": broken_stick}


def gated(method, y, v, x):
    """Qiu et al. 2025, equation 5: y sigmoid(W x). Zhai 2026: y_i - (y_i . v_i / v_i . v_i) v_i, by modded-nanogpt #82
    with the share tanh(a) of this part."""
    gate = method.output_gate
    if gate is None:
        return y
    if "gate" in method.name:
        opened = sigmoid(x @ gate.weight.double().T)
        return y * opened.unflatten(-1, (y.shape[1], -1)).transpose(1, 2)
    along, length = ((z * v).sum(-1, keepdim=True) for z in (y, v))
    part = along / length * v
    return y - (1 if gate.share is None else torch.tanh(gate.share)[:, None, None]) * part


def check_formula(method, formula, length, batch, tolerances):
    """Compare values, gradients and the last queries alone with a formula, on all backends that run here.

    tolerances: by dtype, to which the inputs are rounded. The dense float64 form is tested first.
    """
    exact = cast(cast(make_inputs(method, length, batch), torch.bfloat16), torch.float64)
    leaves = [*exact, *method.double().parameters()]
    expected = by_rows(formula, method, *exact)
    if method.replacement is None:
        tolerance = 1e-6 if method.name.startswith(("pope", "bam_ssmax")) else 1e-12  # float32: cos and sin, and log n
        plain = plain_attention(method, *exact)
        assert_near(plain, expected, tolerance)
        assert_same_function(plain, leaves, expected, gradients(expected, leaves), 10 * tolerance)
    expected = gated(method, expected, *exact[2:])
    truths = gradients(expected, leaves)

    biases = 0.0  # float32 rounds large biases of keys by more than it rounds logits
    if method.key_bias:
        of_keys = method.key_bias.bias(method.key_bias.token_features(exact[3]))
        biases = 2**-22 * of_keys.abs().max().item()
    if "bam" in method.name:  # the same at t = 0, where the gradient of beta is a sum of small numbers times m log(eps)
        _, at_zero = method.score_change.coefficients(torch.zeros(1), torch.arange(method.num_heads))
        biases = 2**-22 * 11.5 * at_zero.abs().max().item()
    for dtype, tolerance in tolerances.items():
        method.to(torch.promote_types(dtype, torch.float32))
        runs = {name for name, backend in BACKENDS.items() if backend.unsupported(method, CPU, dtype) is None}
        assert "blocks" in runs
        for backend in runs - {"flex"}:  # which has no gradients on a CPU
            q, k, v, x = inputs = cast(exact, dtype)
            output = attend(method, *inputs, backend=backend)
            assert output.dtype == dtype
            ours = [*inputs, *method.parameters()]
            assert_same_function(output, ours, expected, truths, tolerance + biases)
            if not method.needs_input:
                half = length // 2
                last = attend(method, q[:, :, half:], k, v, backend=backend)
                assert_near(last, expected[:, :, half:], tolerance)


@parametrize("case", CASES)
@parametrize("batch, num_heads, head_dim, length", SHAPES)
def test_every_backend_computes_the_formula_of_the_paper(case, batch, num_heads, head_dim, length):
    name, options = parse(case)
    method = make(name, num_heads, head_dim, **options)
    tolerances = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.03}
    if name == "n_power":  # its large factors leave too little of bfloat16 to compare
        del tolerances[torch.bfloat16]
    check_formula(method, WEIGHTS.get(name, softmax_attention), length, batch, tolerances)


@parametrize("name", ["fox", "nape"])
def test_a_method_that_needs_the_layer_s_input_is_refused_without_it(name):
    with refuses(name, r"\bx\b"):
        attend(make(name), *random_qkv(2, 8, 5))


@parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_starts_evenly_over_its_authors_range(name):
    t, head = torch.tensor([0.0, 1.0, 7.0]).double(), torch.arange(4)[:, None]
    p = (2 * head + 1) / 4
    expected = -p * torch.log(1 + t / 2) if name == "kerple_log" else -(t**p) / 2
    for scale in (1, 1 / 16):
        change = make_method(name, Shape(4, 8, 64, scale)).score_change
        assert_near(change.coefficients(scale * t, head)[1], expected, 1e-6)


def test_bam_starts_without_preference_and_survives_negative_powers():
    """With beta = -3, the formula is -10^15 at t = 0, where the first query sees its own key alone."""
    method, exact = make_method("bam", Shape(4, 8, 64)), random_qkv(4, 8, 70)
    assert_near(attend(method, *exact), attend(make("nope", 4), *exact), 1e-6)
    beta = method.double().score_change.beta
    beta.data = torch.tensor([-3.0, -1.0, 0.5, 3.0]).double()
    expected = by_rows(softmax_attention, method, *exact)
    truths = gradients(expected, [*exact, beta])
    assert truths[-1].isfinite().all() and truths[-1].all()
    for dtype, backend in [(torch.float32, "cpu"), (torch.float32, "blocks"), (torch.bfloat16, "blocks")]:
        inputs, tolerance = cast(exact, dtype), 1e-5 if dtype == torch.float32 else 0.03
        output = attend(method.float(), *inputs, backend=backend)
        assert_same_function(output, [*inputs, beta], expected, truths, tolerance)


def test_stick_breaking_survives_large_logits():
    """Logits are so large that float32 rounds every beta to 0 or 1."""
    q, k, v = random_qkv(2, 8, 130, batch=1)
    inputs = cast([100 * q, k, v], torch.float32)
    output = attend(make("stick_breaking"), *inputs)
    assert_near(output, by_rows(broken_stick, None, 100 * q, k, v), 1e-5)
    assert are_finite(output, inputs)


@torch.no_grad()
def test_fire_starts_at_random():
    replacement = make("fire").replacement
    replacement.reset_parameters()
    assert replacement.output.unique().numel() == replacement.output.numel()


@half_precision
def test_xsa_leaves_an_output_whose_value_is_zero(dtype):
    y, v, _ = cast(random_qkv(2, 8, 5), dtype)
    v.data[:, :, 3] = 0
    z = make("xsa").output_gate.change(y, v, None)
    assert torch.equal(z[:, :, 3], y[:, :, 3]) and not torch.equal(z, y)
    assert z.dtype == dtype and are_finite(z, [y, v])


# ---- layers that differ ----------------------------------------------------------------------------------------------


@table("case, scale, windows", """
    rope+window,nope   | 1      | 512 0 512 0 512 0 512 0
    rnope_swa window=9 | 1      | 0 9 9 9 0 9 9 9
    swan               | 0.0625 | 0 32 32 32 0 32 32 32
    llama4             | 0.0625 | 32 32 32 0 32 32 32 0
""")
def test_a_pattern_repeats_over_the_layers(case, scale, windows):
    """0: a layer without a window."""
    name, options = parse(case)
    layers, pattern = make_layers(name, Shape(2, 8, 64, float(scale)), 8, options), [*layer_pattern(name)]
    found = [layer.window.window if layer.window else 0 for layer in layers]
    assert found == [*map(int, windows.split())]
    assert [layer.name for layer in layers] == pattern * (8 // len(pattern))
    if name in ("swan", "llama4"):
        assert [layer.query_scale is None for layer in layers] == [window == 32 for window in found]
        assert {layer.rotation.base for layer in layers if layer.rotation} == {625}
    if name == "llama4":
        assert layers[3].query_scale.floor == 512


def test_a_model_of_layers_that_differ_equals_its_layers():
    """The loss is the same when the layers run one by one, each with its method and plan."""
    shape = dict(num_layers=5, num_heads=2, model_dim=32, train_length=16)
    model = make_random_gpt("scale_invariant_nope,rope+window", method_options=dict(window=7, tau=2.0), **shape)
    tokens, targets = random_tokens(40)
    x = model.embed(tokens)
    for number, block in enumerate(model.blocks):
        name, options = [("scale_invariant_nope", dict(tau=2.0)), ("rope+window", dict(window=7))][number % 2]
        block.attention.method = make_method(name, Shape(2, 16, 16), **options)
        x = block(x, make_plan(block.attention.method, 40, 40))
    logits = F.rms_norm(x, (32,)) @ model.head.T
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert_near(model(tokens, targets), expected, 1e-5)


@slow
def test_layers_of_all_kinds_compile_to_one_graph():
    """Inductor would take a minute. Its inputs, the graphs forward and backward, run as they are."""
    method = "nape,kerple_log,pope+scale_invariant,stick_breaking,log_beyond,wall,bam+xsa,softplus,grape_ap,nape_entmax"
    model = make_random_gpt(method, num_layers=10, num_heads=2, model_dim=16, train_length=16)
    plan, (tokens, targets) = model.plan(40), random_tokens(40)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")):
        loss = run(tokens, targets, plan=plan)
        results.append([loss, *torch.autograd.grad(loss, model.parameters())])
    for pair in zip(*results, strict=True):
        assert_near(*pair, 1e-5)
