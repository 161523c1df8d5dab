"""The rivals' mechanisms against formulas written from their papers, in float64 and one row at a time.

Values and gradients are compared on every backend that runs here. Then come gates, and models whose layers differ.
"""

import itertools
import math

import pytest
import torch
from attention_cases import attend, make_plan
from test_gpt import make_gpt, make_random_gpt, random_tokens
from test_methods import assert_near, assert_refused, assert_same_function, cast, gradients, random, random_qkv

from model.attention.choose import BACKENDS
from model.attention.reference import attention_logits, plain_attention
from model.methods.base import Shape
from model.methods.make import make_layers, make_method
from model.methods.names import layer_pattern

SHAPES = [(2, 3, 16, 1), (2, 2, 16, 37)]  # batch, heads, head dimension, tokens
SHAPES += [pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 4, 32, 130), (1, 2, 8, 300))]
NAMES = ["fox", "p_rope+forget", "scale_invariant+forget", "p_rope+scale_invariant+forget", "rope+window",
         "p_rope+window", "p_rope+sink", "p_rope+scale_invariant+sink", "kerple_log", "kerple_power", "bam",
         "bam_ssmax", "p_rope+bam+sink", "scale_invariant_nope", "nape", "log_beyond", "log_steps", "log_offset",
         "factor", "log_root", "pope", "pope+scale_invariant", "fire", "stick_breaking"]  # fmt: skip
OPTIONS = {"rope+window": dict(window=29), "p_rope+window": dict(window=1),
           "log_steps": dict(floor=10.0), "log_offset": dict(offset=30.0),
           "scale_invariant_nope": dict(skip_first=True), "fire": dict(c=0.3, threshold=11.0)}  # fmt: skip
# Factors of the parameters; larger ones leave too little of bfloat16 to compare.
SPREAD = {"nape": 0.02, "nape_entmax": 0.02, "bam_ssmax": 0.1}


def make(name, num_heads, head_dim, position_scale=1.0, **options):
    """Return a method with random parameters."""
    method = make_method(name, Shape(num_heads, head_dim, 64, position_scale), **options)
    for seed, parameter in enumerate(method.parameters()):
        parameter.data = SPREAD.get(name, 0.3) * random(*parameter.shape, seed=seed).float()
    return method


# ---- the formulas, row by row ----------------------------------------------------------------------------------------


def forgetting(method, logits, x):
    """Lin et al. 2025, equation 3: D_ij, the sum of log f_l over j < l <= i, is added to the logits."""
    weight, bias = method.key_bias.weight.double(), method.key_bias.bias_of_gate.double()
    log_f = torch.log(1 / (1 + torch.exp(-(torch.einsum("btc,hc->bht", x, weight) + bias[:, None]))))
    rows = []
    for i in range(logits.shape[2]):
        decay = [log_f[:, :, j + 1 : i + 1].sum(-1) for j in range(i + 1)]
        decay += [torch.full_like(decay[0], -math.inf)] * (logits.shape[3] - i - 1)
        rows.append(logits[:, :, i] + torch.stack(decay, dim=-1))
    return torch.stack(rows, dim=2)


def by_rows(row, q, k):
    """Return the logits (B, H, T, T). row(i, t, S): of the keys 0 to i, with distances t and S = q.k / sqrt(D)."""
    rows = []
    for i in range(q.shape[2]):
        S = (q[:, :, i, None] * k[:, :, : i + 1]).sum(-1) / q.shape[-1] ** 0.5  # (B, H, i + 1)
        logits = row(i, (i - torch.arange(i + 1)).double(), S)
        rows.append(torch.nn.functional.pad(logits, (0, q.shape[2] - 1 - i), value=-math.inf))
    return torch.stack(rows, dim=2)


def kerple(penalty):
    """Chi et al. 2022, equations 5 and 6: q.k / sqrt(d) minus a penalty of a, p and the distance."""
    def logits(method, q, k, x):
        change = method.score_change
        p = change.log_p.exp() if hasattr(change, "log_p") else 2 / (1 + torch.exp(-change.logit_p))
        a, p = change.log_a.exp()[:, None], p[:, None]
        return by_rows(lambda i, t, S: S - penalty(a, p, t), q, k)
    return logits


def bam(method, q, k, x):
    """Bianchessi et al. 2025, released code: e^alpha (t + 1e-5)^beta is subtracted; SSMax multiplies S by s log n."""
    alpha, beta = (p[:, None] for p in (method.score_change.alpha, method.score_change.beta))
    s = None if method.query_scale is None else method.query_scale.scale[:, None]

    def row(i, t, S):
        return (1 if s is None else s * math.log(i + 1)) * S - alpha.exp() * (t + 1e-5) ** beta
    return by_rows(row, q, k)


def scale_invariant_but_the_first_key(method, q, k, x):
    """Anson et al. 2025 with tau 10, a = 1 and m = 0 for the first key."""
    def row(i, t, S):
        a_squared = 1 + 2 * torch.log(1 + t / 10)
        a_squared[0] = 1
        return a_squared**0.5 * S + 1 - a_squared
    return by_rows(row, q, k)


def nape(method, q, k, x):
    """Vasylenko et al. 2025: each query scales its row; the first half of the heads have ALiBi."""
    w_b, w_g = method.query_scale.beta.double(), method.query_scale.gamma.double()
    H = q.shape[1]
    slope = torch.tensor([2.0 ** (-8 * (h + 1) / (H // 2)) if h < H // 2 else 0 for h in range(H)]).double()[:, None]

    def row(i, t, S):
        beta = torch.log(1 + torch.exp(torch.einsum("bc,hc->bh", x[:, i], w_b)))
        gamma = 2 * torch.tanh(torch.einsum("bc,hc->bh", x[:, i], w_g))
        factor = 1 + beta * math.log(max(i + 1, 2)) ** gamma
        return factor[..., None] * S - slope * t
    return by_rows(row, q, k)


def temperature(factor):
    """Logits without position encoding, row i times factor(i)."""
    return lambda method, q, k, x: by_rows(lambda i, t, S: factor(i) * S, q, k)


def pope(method, q, k, x):
    """Gopalakrishnan et al. 2025, equation 6: magnitudes by softplus, a frequency for each entry, the keys' phase."""
    D, delta = q.shape[-1], method.rotation.delta[:, None]  # (H, 1, D)
    magnitude_q, magnitude_k = (torch.log(1 + torch.exp(vector)) for vector in (q, k))
    theta = 10000.0 ** (-torch.arange(D, dtype=torch.float64) / D)

    def row(i, t, S):
        angles = delta - t[:, None] * theta  # (H, i + 1, D)
        scores = (magnitude_q[:, :, i, None] * magnitude_k[:, :, : i + 1] * torch.cos(angles)).sum(-1) / D**0.5
        if method.score_change is None:
            return scores
        a_squared = 1 + 2 * torch.log(1 + t / 10)
        return a_squared**0.5 * scores + 1 - a_squared
    return by_rows(row, q, k)


OWN_LOGITS = {
    "pope": pope,
    "pope+scale_invariant": pope,
    "log_beyond": temperature(lambda i: 1 if i < 64 else math.log(i + 1) / math.log(64)),  # 64: the training length
    "log_steps": temperature(lambda i: 1 + 0.1 * math.log(1 + (i + 1) // 10)),
    "log_offset": temperature(lambda i: math.log(i + 30) / math.log(30)),
    "factor": temperature(lambda i: 2),
    "log_root": temperature(lambda i: math.sqrt(1 + 2 * math.log(i + 1))),
    "n_power": lambda method, q, k, x: temperature(lambda i: (i + 1) ** (2 / (q.shape[-1] - 1)))(method, q, k, x),
    "nape": nape,
    "scale_invariant_nope": scale_invariant_but_the_first_key,
    "bam": bam,
    "bam_ssmax": bam,
    "kerple_log": kerple(lambda a, p, t: p * torch.log(1 + a * t)),
    "kerple_power": kerple(lambda a, p, t: a * t**p),
}


def broken_stick(method, q, k, v):
    """Tan et al. 2024, equation 2: keys from the nearest on; the query's own value takes the rest of the stick."""
    rows = []
    for i in range(q.shape[2]):
        nearest_k, nearest_v = k[:, :, :i].flip(2), v[:, :, :i].flip(2)
        beta = 1 / (1 + torch.exp(-(q[:, :, i, None] * nearest_k).sum(-1) / q.shape[-1] ** 0.5))  # (B, H, i)
        left = torch.cat((torch.ones_like(q[:, :, 0, :1]), 1 - beta), dim=-1).cumprod(dim=-1)  # before each, at last
        shares = torch.cat((beta, torch.ones_like(left[..., :1])), dim=-1) * left
        rows.append((shares[..., None] * torch.cat((nearest_v, v[:, :, i, None]), dim=2)).sum(2))
    return torch.stack(rows, dim=2)


def with_learned_bias(method, q, k, v):
    """Li et al. 2023, equation 4 and section 3, one pair of a query and a key after the other; positions from 0."""
    weight = {name: p.double() for name, p in method.replacement.named_parameters()}
    c, threshold = 0.3 * weight["log_c"].exp(), 11.0 * weight["log_threshold"].exp()
    rows = []
    for i in range(q.shape[2]):
        bias = []
        for j in range(i + 1):
            share = torch.log(c * (i - j) + 1) / torch.log(c * max(torch.tensor([float(i)]).double(), threshold) + 1)
            bias.append((weight["output"] * torch.clamp(share * weight["slope"] + weight["offset"], min=0)).sum(-1))
        logits = (q[:, :, i, None] * k[:, :, : i + 1]).sum(-1) / q.shape[-1] ** 0.5 + torch.stack(bias, dim=-1)
        rows.append((logits.softmax(dim=-1)[..., None] * v[:, :, : i + 1]).sum(2))
    return torch.stack(rows, dim=2)


OUTPUTS = {"fire": with_learned_bias, "stick_breaking": broken_stick}


def literal(name, method, q, k, v, x):
    """Return the output of softmax attention, or of its replacement. Mechanisms change plain logits one by one."""
    if name in OUTPUTS:
        return OUTPUTS[name](method, q, k, v)
    base = [mechanism for mechanism in (method.rotation, method.query_scale, method.score_change) if mechanism]
    if name in OWN_LOGITS:
        logits = OWN_LOGITS[name](method, q, k, x)
    else:
        logits = attention_logits(type(method)(name, method.shape, base), q, k, x=x)
    if method.key_bias is not None:
        logits = forgetting(method, logits, x)
    outputs = []
    for i in range(q.shape[2]):
        first = 0 if method.window is None else max(0, i - method.window.window + 1)
        row = logits[:, :, i, first : i + 1]
        largest = row.amax(-1, keepdim=True)
        weights = (row - largest).exp()
        total = weights.sum(-1, keepdim=True)
        if method.sink is not None:
            total = total + (method.sink.logit.double()[:, None] - largest).exp()
        outputs.append(torch.einsum("bhj,bhjd->bhd", weights / total, v[:, :, first : i + 1]))
    return torch.stack(outputs, dim=2)


def check_rounded(method, exact, expected, truth, dtype, tolerance, biases=0.0, backend="auto"):
    """Compare values, gradients and the last queries alone, with inputs rounded to dtype. biases: more tolerance."""
    inputs = cast(exact, dtype)
    output = attend(method, *inputs[:3], x=inputs[3], backend=backend)
    assert output.dtype == dtype
    assert_near(output, expected, tolerance + biases)
    for gradient, true in zip(gradients(output, [*inputs, *method.parameters()]), truth, strict=True):
        assert_near(gradient, true, tolerance + biases)
    if not method.needs_input:
        half = expected.shape[2] // 2
        last = attend(method, inputs[0][:, :, half:], *inputs[1:3], backend=backend)
        assert_near(last, expected[:, :, half:], tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch, num_heads, head_dim, length", SHAPES)
def test_every_backend_computes_the_formula_of_the_paper(name, batch, num_heads, head_dim, length):
    """The dense float64 form is tested first, then the backends against it, with inputs rounded to their dtype."""
    method = make(name, num_heads, head_dim, **OPTIONS.get(name, {}))
    exact = [*random_qkv(num_heads, head_dim, length, batch), random(batch, length, num_heads * head_dim, seed=9)]
    exact = [x.detach().bfloat16().double().requires_grad_() for x in exact]
    parameters = list(method.double().parameters())
    expected = literal(name, method, *exact)
    truth = gradients(expected, exact + parameters)
    if method.replacement is None:
        plain = plain_attention(method, *exact[:3], x=exact[3])
        tolerance = 1e-6 if name.startswith(("pope", "bam_ssmax")) else 1e-12  # float32: cos and sin, and log n
        assert_near(plain, expected, tolerance)
        for gradient, true in zip(gradients(plain, exact + parameters), truth, strict=True):
            assert_near(gradient, true, 10 * tolerance)

    method, biases = method.float(), 0.0  # float32 rounds large biases of keys by more than it rounds logits
    if method.key_bias is not None:
        biases = 2**-22 * method.key_bias.bias(method.key_bias.token_features(exact[3])).abs().max().item()
    if "bam" in name:  # the same at t = 0, where the gradient of beta is a sum of small numbers times m log(eps)
        at_zero = method.score_change.coefficients(torch.zeros(1), torch.arange(num_heads))[1]
        biases = 2**-22 * 11.5 * at_zero.abs().max().item()
    tried = set()
    for dtype, tolerance in [(torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]:
        for backend in BACKENDS:
            if backend == "flex" or BACKENDS[backend].unsupported(method, torch.device("cpu"), dtype) is not None:
                continue  # flex has no gradients on a CPU
            check_rounded(method, exact, expected, truth, dtype, tolerance, biases, backend)
            tried.add(backend)
    assert "blocks" in tried


def test_without_the_layer_s_input_methods_that_need_it_are_refused():
    for name in ("fox", "nape"):
        with assert_refused(name, r"\bx\b"):
            attend(make(name, 2, 16), *random_qkv(2, 16, 5))


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_starts_evenly_over_its_authors_range(name):
    change = make_method(name, Shape(4, 8, 64)).score_change
    _, penalty = change.coefficients(torch.tensor([0.0, 1.0, 7.0]).double(), torch.arange(4)[:, None])
    p = torch.tensor([0.25, 0.75, 1.25, 1.75]).double()[:, None]
    t = torch.tensor([0.0, 1.0, 7.0]).double()
    assert_near(penalty, -p * torch.log(1 + t / 2) if name == "kerple_log" else -(t**p) / 2, 1e-6)
    sixteenth = make_method(name, Shape(4, 8, 64, position_scale=1 / 16)).score_change
    assert_near(sixteenth.coefficients(t / 16, torch.arange(4)[:, None])[1], penalty, 1e-12)


def test_bam_starts_without_preference_and_survives_negative_powers():
    """With beta = -3, the formula is -10^15 at t = 0, where the first query sees its own key alone."""
    exact = random_qkv(4, 8, 70)
    method = make_method("bam", Shape(4, 8, 64))
    plain = attend(make_method("nope", Shape(4, 8, 64)), *exact)
    assert_near(attend(method, *exact), plain.detach(), 1e-6)
    beta = torch.tensor([-3.0, -1.0, 0.5, 3.0])
    method.score_change.beta.data = beta
    expected = literal("bam", method.double(), *exact, None)
    truth = gradients(expected, exact + [method.score_change.beta])
    assert truth[-1].isfinite().all() and truth[-1].count_nonzero() == 4
    for dtype, backend in [(torch.float32, "cpu"), (torch.float32, "blocks"), (torch.bfloat16, "blocks")]:
        inputs, method = cast(exact, dtype), method.float()
        output = attend(method, *inputs, backend=backend)
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        assert_near(output, expected, tolerance)
        for gradient, true in zip(gradients(output, inputs + [method.score_change.beta]), truth, strict=True):
            assert_near(gradient, true, tolerance)


def test_n_power_has_the_exponent_of_the_head_dimension():
    """Its large factors leave too little of bfloat16 to compare."""
    for head_dim, length in [(2, 5), (16, 37), (8, 300)]:
        exact = random_qkv(2, head_dim, length)
        expected = literal("n_power", make("n_power", 2, head_dim), *exact, None)
        output = attend(make("n_power", 2, head_dim), *cast(exact, torch.float32))
        assert_near(output, expected, 1e-5)


@pytest.mark.parametrize("num_heads, slopes", [(1, [8]), (4, [4, 8, 0, 0]), (5, [4, 8, 2, 0, 0])])
def test_half_of_napes_heads_have_the_slopes_of_alibi(num_heads, slopes):
    t = torch.tensor([0.0, 1.0, 70.0]).double()
    change = make("nape", num_heads, 8).score_change
    slopes = [[2.0**-exponent if exponent else 0] for exponent in slopes]
    assert_near(change.coefficients(t, torch.arange(num_heads)[:, None])[1], -torch.tensor(slopes) * t, 1e-12)


def test_stick_breaking_survives_large_logits():
    """Logits are so large that float32 rounds every beta to 0 or 1."""
    exact = random_qkv(2, 8, 130, batch=1)
    inputs = cast([100 * exact[0].detach(), *exact[1:]], torch.float32)
    output = attend(make("stick_breaking", 2, 8), *inputs)
    assert_near(output, broken_stick(None, 100 * exact[0], *exact[1:]), 1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients(output, inputs))


@torch.no_grad()
def test_fire_scales_with_the_lengths_and_starts_at_random():
    paper, small = (make("fire", 2, 8, position_scale=scale).replacement for scale in (1, 1 / 16))
    assert (paper.c, paper.threshold) == (0.1, 512) and (small.c, small.threshold) == (1.6, 32)
    for method in (paper, small):
        method.reset_parameters()
    assert small.output.unique().numel() == small.output.numel() and not torch.equal(paper.output, small.output)


# ---- layers that differ, and gates -----------------------------------------------------------------------------------


def test_a_pattern_repeats_over_the_layers():
    shape = Shape(2, 8, 64)
    layers = make_layers("rope+window,nope", shape, 3, {})
    assert [layer.name for layer in layers] == ["rope+window", "nope", "rope+window"]
    windows = [m.window and m.window.window for m in make_layers("rnope_swa", shape, 5, dict(window=9))]
    assert windows == [None, 9, 9, 9, None] and len(layer_pattern("rnope_swa")) == 4
    scaled = make_layers("rnope_swa", Shape(2, 8, 64, 1 / 16), 2, {})[1]
    assert scaled.window.window == 32 and scaled.rotation.base == 625


def test_a_model_of_layers_that_differ_equals_its_layers():
    """The loss is the same when the layers run one by one, each with its method and plan."""
    options = dict(window=7, tau=2.0)
    shape = dict(num_layers=5, num_heads=2, model_dim=32, train_length=16)
    model = make_random_gpt("scale_invariant_nope,rope+window", method_options=options, **shape)
    tokens, targets = random_tokens(40)
    x = model.embed(tokens)
    for block, name in zip(model.blocks, ["scale_invariant_nope", "rope+window"] * 3):
        value = options["tau"] if name == "scale_invariant_nope" else options["window"]
        key = "tau" if name == "scale_invariant_nope" else "window"
        method = make_method(name, Shape(2, 16, 16), **{key: value})
        block.attention.method = method
        x = block(x, make_plan(method, 40, 40))
    logits = torch.nn.functional.rms_norm(x, (32,)) @ model.head.T
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert_near(model(tokens, targets), expected.detach(), 1e-5)


def test_swan_and_llama_4_have_one_global_layer_in_four():
    shape = Shape(2, 8, 64, position_scale=1 / 16)
    for name, first in (("swan", 0), ("llama4", 3)):
        layers = make_layers(name, shape, 8, {})
        windows = [layer.window and layer.window.window for layer in layers]
        assert windows == [None if i % 4 == first else 32 for i in range(8)]
        assert [layer.query_scale is None for layer in layers] == [window == 32 for window in windows]
    assert layers[3].query_scale.floor == 512


@pytest.mark.slow
def test_layers_of_all_kinds_compile_to_one_graph():
    """Inductor would take a minute. Its inputs, the graphs forward and backward, run as they are."""
    method = "nape,kerple_log,pope+scale_invariant,stick_breaking,log_beyond,wall,bam+xsa,softplus,grape_ap,nape_entmax"
    model = make_random_gpt(method, num_layers=10, num_heads=2, model_dim=16, train_length=16)
    plan, (tokens, targets) = model.plan(40), random_tokens(40)
    results = []
    for run in (model, torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")):
        loss = run(tokens, targets, plan=plan)
        results.append([loss.detach(), *torch.autograd.grad(loss, model.parameters())])
    for eager, compiled in zip(*results, strict=True):
        assert_near(compiled, eager, 1e-5)


def test_a_gate_multiplies_the_heads_outputs():
    """Qiu et al. 2025, equation 5: Y' = Y * sigmoid(X W), before the output projection."""
    gated, plain = (make_gpt(name, num_layers=1, num_heads=2, model_dim=32) for name in ("p_rope+gate", "p_rope"))
    weight = gated.blocks[0].attention.method.output_gate.weight
    weight.data = random(32, 32, seed=1).float()
    for model in (gated, plain):
        model.blocks[0].attention.qkv.data = random(3, 32, 32, seed=2).float()
        model.blocks[0].attention.proj.data = torch.eye(32)
    x = random(2, 9, 32, seed=3).float()
    y, expected = (m.blocks[0].attention(x, m.plan(9).for_layer(0)) for m in (gated, plain))
    assert_near(y, (expected.double() / (1 + torch.exp(-x.double() @ weight.double().T))).detach(), 1e-5)
    y.sum().backward()
    assert weight.grad.abs().min() > 0


@pytest.mark.parametrize("options", [{}, dict(learn_share=True)], ids=str)
def test_xsa_removes_the_part_along_the_own_value(options):
    """Zhai 2026: z_i = y_i - (y_i . v_i / v_i . v_i) v_i in each head; modded-nanogpt #82: tanh(a) of this part."""
    shape = dict(num_layers=1, num_heads=2, model_dim=32, dtype=torch.float64)
    model, plain = make_gpt("p_rope+xsa", method_options=options, **shape), make_gpt("p_rope", **shape)
    share = model.blocks[0].attention.method.output_gate.share
    if share is not None:
        assert (share == 0).all()
        share.data = torch.tensor([-0.7, 2.0])
    for m in (model, plain):
        m.blocks[0].attention.qkv.data = random(3, 32, 32, seed=2).float()
        m.blocks[0].attention.proj.data = torch.eye(32)
    x = random(2, 9, 32, seed=3).requires_grad_()
    y, before = (m.blocks[0].attention(x, m.plan(9).for_layer(0)) for m in (model, plain))
    v = x @ plain.blocks[0].attention.qkv[2].double().T
    expected = torch.empty_like(before)
    for b, i, h in itertools.product(range(2), range(9), range(2)):
        own, output = (tensor[b, i, 16 * h : 16 * h + 16] for tensor in (v, before))
        part = (output * own).sum() / (own * own).sum() * own
        expected[b, i, 16 * h : 16 * h + 16] = output - (part if share is None else torch.tanh(share[h]) * part)
    ours, exact = ([x, m.blocks[0].attention.qkv, *([] if share is None else [share])] for m in (model, plain))
    assert_same_function(y, ours, expected, exact, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_xsa_leaves_an_output_whose_value_is_zero(dtype):
    gate = make("xsa", 2, 8).output_gate
    y, v = (random(2, 2, 5, 8, seed=seed).to(dtype).requires_grad_() for seed in (1, 2))
    hidden = torch.ones(5, 1, dtype=dtype).index_fill(0, torch.tensor(3), 0)
    z = gate.change(y, hidden * v, None)
    assert torch.equal(z[:, :, 3], y[:, :, 3]) and not torch.equal(z, y)
    assert z.dtype == dtype and all(gradient.isfinite().all() for gradient in gradients(z, [y, v]))
