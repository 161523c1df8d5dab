"""Attention methods of every kind of mechanism, inputs, and the comparison with the formula, for tests of backends."""

import pytest
import torch
from commands import parametrize
from torch.testing import assert_close

from configs.command_line import option_value
from model import methods
from model.attention import attend as attention
from model.attention.choose import BACKENDS, choose_backend
from model.attention.plan import document_starts, plan_layer
from model.attention.reference import plain_attention
from model.methods.base import KeyBias, Method, ScoreChange, Shape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
half_precision = parametrize("dtype", [torch.float32, torch.bfloat16])


class ByHead(ScoreChange):
    """a = 1 + h/2 and m = -sqrt(t) / (h + 1): functions that differ by head and are not smooth at t = 0."""

    def __init__(self, shape):
        super().__init__()

    def coefficients(self, distance, head):
        return 1 + head / 2, -distance.sqrt() / (head + 1)


class ForAllHeads(ByHead):
    """a = 1 + 1/(1 + t) and m = -sqrt(t): not 1 - a^2."""

    def coefficients(self, distance, head):
        return 1 + 1 / (1 + distance), -distance.sqrt()


class GivenBias(KeyBias):
    """Biases that are the first numbers of the layer's input."""

    def __init__(self, shape):
        super().__init__()
        self.num_heads = shape.num_heads

    def token_features(self, x):
        return x[..., : self.num_heads].transpose(1, 2)

    def bias(self, token_features):
        return token_features


OWN = {"by_head": ByHead, "for_all_heads": ForAllHeads, "given_bias": GivenBias}
MECHANISMS = {  # each with its options, as in `window window=37`
    "nope": "",
    "rope": "rope",
    "logn": "rope | logn",
    "alibi": "alibi",
    "scale_invariant": "rope | scale_invariant",
    "learned": "scale_invariant learn_tau=True",
    "learned_moments": "scale_invariant learn_moments=True",
    "learned_numbers": "kerple_log",  # two a head
    "skip_first": "rope | scale_invariant skip_first=True",
    "skip_first_window": "scale_invariant skip_first=True learn_tau=True terms=m | window window=37",
    "by_head": "by_head",
    "for_all_heads": "for_all_heads",
    "pope": "pope | scale_invariant",  # q and k are wider than v
    "key_bias": "forget",
    "window": "rope | window window=37",
    "sink": "sink",
    "scale_invariant_sink": "scale_invariant | sink",  # a sink sees constants that softmax ignores
    "all": "scale_invariant learn_tau=True | given_bias | window window=37 | sink",
}


def parse(case):
    """Return a name and its options, from `name option=value ...`."""
    name, *options = case.split()
    pairs = [option.split("=") for option in options]
    return name, {key: option_value(value) for key, value in pairs}


def random(*shape, seed):
    """Return normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_case(name, num_heads=3, head_dim=16):
    """Return a method of MECHANISMS, or of mechanisms written as there, with random parameters."""
    shape = Shape(num_heads, head_dim, train_length=64)
    parts = map(parse, filter(None, MECHANISMS.get(name, name).split("|")))
    kinds = OWN | methods.MECHANISMS
    method = Method(name, shape, [kinds[part](shape, **options) for part, options in parts])
    for seed, parameter in enumerate(method.parameters()):
        parameter.data = 0.1 + 0.3 * random(*parameter.shape, seed=seed).float()
    return method


LAYOUTS = dict(
    contiguous=lambda x: x,
    of_the_model=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    of_one_projection=lambda x: torch.stack([x.transpose(1, 2)] * 3, dim=2)
    .select(2, 1).transpose(1, 2),
    tokens_last=lambda x: x.mT.contiguous().mT,
    every_second_channel=lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    of_a_longer_one=lambda x: torch.nn.functional.pad(x, (3, 5, 2, 0))
    [..., 2:, 3:-5],
    expanded=lambda x: x[:1, :, :1].expand_as(x),
)


def random_qkv(num_heads, head_dim, length, batch=2):
    """Return q, k and v (B, H, T, D) in float64."""
    return [random(batch, num_heads, length, head_dim, seed=length + i).requires_grad_() for i in range(3)]


def make_inputs(method, length, batch=2, layout="of_the_model"):
    """Return q, k, v (B, H, T, D) in this layout and x (B, T, C), float32 leaves with gradients."""
    H, D = method.num_heads, method.head_dim
    vectors = [LAYOUTS[layout](y.float()) for y in random_qkv(H, D, length, batch)]
    return cast([*vectors, random(batch, length, H * D, seed=length)], torch.float32)


def random_documents(length, batch=2):
    """Return starts (B, T) of documents of 1 to 60 tokens, other ones in each sequence."""
    generator = torch.Generator().manual_seed(length)
    begins = torch.rand(batch, length, generator=generator) < 1 / 30
    return document_starts(begins.long(), 1)


def cast(tensors, dtype):
    """Return leaves with gradients, of this dtype."""
    return [x.detach().to(dtype).requires_grad_() for x in tensors]


def gradients(output, inputs):
    """Return the gradients of a randomly weighted sum of the output."""
    weight = random(*output.shape, seed=0).to(output.dtype)
    return torch.autograd.grad((output * weight).sum(), inputs, materialize_grads=True, retain_graph=True)


def are_finite(output, inputs):
    """Return whether the gradients are finite."""
    return all(gradient.isfinite().all() for gradient in gradients(output, inputs))


def assert_near(actual, expected, tolerance, least=1.0):
    """Assert a difference of at most the tolerance times the largest entry, or times `least` if that is smaller."""
    scale = max(least, expected[expected.isfinite()].abs().max().item())
    assert_close(actual.double().cpu(), expected.double().cpu(), rtol=0, atol=tolerance * scale)


def assert_same_function(output, inputs, expected, truths, tolerance):
    """Compare values, and the gradients of the inputs, which may include the method's parameters, with truths."""
    assert_near(output, expected, tolerance)
    for pair in zip(gradients(output, inputs), truths, strict=True):
        assert_near(*pair, tolerance)


def attend(method, q, k, v, x=None, *, target_length=None, backend="auto"):
    """Attention with a plan that is made for this call."""
    plan = make_plan(method, q.shape[2], k.shape[2], backend, target_length=target_length, dtype=q.dtype)
    return attention.attend(method, q, k, v, x, plan=plan)


def make_plan(method, query_length, key_length, backend="auto", device=CPU, dtype=torch.float32, **options):
    chosen, _ = choose_backend(method, device, dtype, backend)
    return plan_layer(method, chosen, query_length, key_length, device=device, **options)


def check(backend, method, length, *, queries=None, tolerance=2e-5, run=attention.attend, weigh_output=0.0, inputs=None,
          starts=None, **options):
    """Compare a backend with the formula in float64: the last `queries` outputs, and all gradients.

    weigh_output: share of the output in its gradient, which is random otherwise. So no sum over rows is near 0.
    starts (B, T): the first token of each token's document, for attention within documents.
    """
    # 1. The output, with x where the method looks at it.
    inputs = inputs or make_inputs(method, length, **options)
    q, *others = inputs = inputs[: 4 if method.needs_input else 3]
    exact, queries = cast(inputs, torch.float64), queries or length
    plan = make_plan(method, queries, length, backend)
    if starts is not None:
        plan = plan.within_documents(starts)
    output = run(method, q[:, :, -queries:], *others, plan=plan)
    expected = plain_attention(method, *exact, starts=starts)[:, :, -queries:]
    assert output.dtype == q.dtype
    assert_near(output, expected, tolerance / 2)

    # 2. The gradients.
    parameters = [*method.parameters()]
    weight = (random(*output.shape, seed=3) + weigh_output * expected.detach()).to(q.dtype)
    ours = torch.autograd.grad(output, inputs + parameters, weight)
    truths = torch.autograd.grad(expected, exact + parameters, weight.double())
    # A parameter's gradient is a sum over tokens. The terms may cancel, but their rounding errors add up like random
    # numbers. The largest gradient of an input stands for a term.
    term = max(truth.abs().max().item() for truth in truths[: len(exact)])
    sums = max(1.0, term * (q.shape[0] * length) ** 0.5)
    for number, pair in enumerate(zip(ours, truths, strict=True)):
        assert_near(*pair, tolerance, least=1.0 if number < len(exact) else sums)


def skip_unless_runs(backend, method):
    if BACKENDS[backend].unsupported(method, CPU, torch.float32) is not None:
        pytest.skip(f"{backend} cannot run here")
