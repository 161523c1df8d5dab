"""The kinds of mechanism that an attention method is made of.

A method turns q, k (after QK-norm) into the logits of a causal softmax. t = i - j >= 0 is the distance from query i
back to key j, h the head and d the head dimension (paper, section 3):

    q, k <- rotated by their positions                  Rotation      (RoPE, p-RoPE, NTK, YaRN, PoPE)
    q_i  <- c_h(i) q_i                                  QueryScale    (LogN)
    L    =  a_h(t) S + m_h(t),   S = q.k / sqrt(d)      ScoreChange   (scale-invariant, ALiBi)
    L    <- L + b_h(j)                                  KeyBias       (forgetting attention)
    only keys at t < w                                  Window
    one more logit in the softmax, without a value      Sink
    y    <- g(y, v_i), y the output of query i          OutputGate    (gated attention, XSA)

A method has at most one mechanism of each kind. c, b and g may depend on x, the layer's input. A Replacement
(Infini-attention, FIRE, stick-breaking) computes the output itself instead of a softmax over L. It may depend on x.
"""

import dataclasses
import inspect

import torch
from torch import Tensor, nn

from errors import UserError, require
from model.query_blocks import in_query_blocks
from model.tensors import upcast


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a method must know of its model."""

    num_heads: int
    head_dim: int
    train_length: int  # tokens; NTK, YaRN and LogN's initial scale depend on it
    position_scale: float = 1.0  # multiplies default options that are lengths in tokens; published values have 1

    @classmethod
    def of(cls, config) -> "Shape":
        """Return the shape of a model's configuration (see GPT). Raise ValueError if its heads do not fit."""
        if config.model_dim % config.num_heads:
            problem = f"model_dim {config.model_dim} is not a multiple of num_heads {config.num_heads}"
            raise UserError(f"{problem}. Change either.")
        head_dim = config.model_dim // config.num_heads
        return cls(config.num_heads, head_dim, config.train_length, config.position_scale)

    @property
    def model_dim(self) -> int:
        return self.num_heads * self.head_dim


class Mechanism(nn.Module):
    """A part of a method. Its constructor takes a Shape, and then its options."""

    needs_input = False  # True if it needs x, the layer's input
    # Options that are positive, and scale with position_scale: lengths in tokens, and 1 / lengths.
    lengths: tuple[str, ...] = ()
    inverse_lengths: tuple[str, ...] = ()
    calibrated: tuple[str, ...] = ()  # names of the parameters that `calibrate` sets

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """Return the options by name: the constructor's parameters after `shape`."""
        shape, *options = inspect.signature(cls, eval_str=True).parameters.values()
        require(shape.name == "shape", f"{cls.__name__}.__init__ must begin with (self, shape).")
        return {option.name: option for option in options}

    @classmethod
    def scaled_defaults(cls, scale: float, given: dict) -> dict:
        """Return the defaults of the options that are lengths, with all lengths multiplied by `scale`.

        given: the options that the user gave. A default may depend on them.
        """
        lengths = {name: cls.options()[name].default * scale for name in cls.lengths}
        return lengths | {name: cls.options()[name].default / scale for name in cls.inverse_lengths}

    def calibrate(self, scores: Tensor):
        """Set the calibrated parameters from scores (H, pairs) of a trained model in this layer (model/scores.py)."""

    def reset_parameters(self):
        """Draw random parameters in place. The constructor sets all others.

        GPT calls this last, so the rest of the model starts with the same weights for every method.
        """


class Rotation(Mechanism):
    """Rotates pairs (x_k, x_{k + d/2}) of q and k by position * frequency_k."""

    widening = 1  # width of rotated q and k over the head dimension

    def frequencies(self, target_length: int) -> tuple[Tensor, float]:
        """Return angular frequencies (D/2,), float64, radians per token, and the factor that multiplies cos and sin."""
        raise NotImplementedError

    def tables(self, length: int, target_length: int, device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of positions 0..length-1: two float32 tensors (length, D/2).

        The angles are float64, so the tables are exact up to float32 rounding at any position. bfloat16 positions are
        exact only up to 256, and float32 angles are wrong by 1e-3 radians at 65,535.
        """
        frequencies, amplitude = self.frequencies(target_length)
        positions = torch.arange(length, dtype=torch.float64, device=device)
        angles = torch.outer(positions, frequencies.to(device))  # (T, D/2)
        return tuple((amplitude * f(angles)).to(device, torch.float32) for f in (torch.cos, torch.sin))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x (B, H, T, D); cos, sin (T, D/2)
        # torch.compile makes two kernels of a rotation by halves. This form and QK-norm are one kernel in each pass.
        pairs = x.unflatten(-1, (2, -1))  # (B, H, T, 2, D/2)
        sines = torch.stack((sin, -sin), dim=-2)  # (T, 2, D/2)
        return (pairs * cos.unsqueeze(-2) + pairs.flip(-2) * sines).flatten(-2)

    def rotate_keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated keys. Override it if keys and queries are rotated differently."""
        return self.rotate(x, cos, sin)


class QueryScale(Mechanism):
    """Multiplies the query at position i by a number, which may depend on head, i and the layer's input at i."""

    def table(self, positions: Tensor, target_length: int) -> Tensor:
        """Return the part that all layers share: (T,), at least float32, from positions (T,) int64."""
        raise NotImplementedError

    def multiplier(self, table: Tensor, x: Tensor | None) -> Tensor:
        """Return this layer's multipliers, ([B,] 1 or H, T), from the table ([B,] T) and the layer's input x (B, T, C).

        The table has a batch where attention stays within documents. The result is differentiable in x and in the
        parameters.
        """
        return table.unsqueeze(-2)


class ScoreChange(Mechanism):
    """Changes the score S to a_h(t) S + m_h(t)."""

    skip_first = False  # True if the logit of the first token's key stays S

    @property
    def is_learned(self) -> bool:
        return len(dict(self.named_parameters())) > 0  # torch 2.11 cannot trace bool() of a dictionary

    def coefficients(self, distance: Tensor, head: Tensor) -> tuple[Tensor | float, Tensor]:
        """Return a and m at distances t >= 0 and heads, two tensors that broadcast together (a may be a number).

        m is finite: -1e30 hides a key.

        Backends with tables pass float64 tensors that broadcast, such as distance (T,) and head (H, 1). FlexAttention
        passes float32 and int32 scalars, so use only elementwise torch operations and indexing. Every parameter must
        have shape (H,). Without parameters, all layers share one result per length.
        """
        raise NotImplementedError

    def change(self, score: Tensor, distance: Tensor, head: Tensor) -> Tensor:
        """Return a S + m."""
        a, m = self.coefficients(distance, head)
        return a * score + m


class KeyBias(Mechanism):
    """Adds one number per key to the logits, computed from the layer's input in two steps."""

    needs_input = True
    # True if b(j) is the whole bias. Forgetting attention leaves out c(i), which cancels in a softmax, but not beside a
    # sink.
    fits_sinks = True

    def token_features(self, x: Tensor) -> Tensor:
        """Return (B, H, T) numbers, each computed from one token of the layer's input x (B, T, C)."""
        raise NotImplementedError

    def bias(self, token_features: Tensor) -> Tensor:
        """Return the biases of the keys, (B, H, T), at least float32, from the numbers of all tokens."""
        raise NotImplementedError


class Window(Mechanism):
    """Hides keys at a distance of `window` tokens or more. `window` is at least 1."""

    window: int


class Sink(Mechanism):
    """Adds one logit without a value to the softmax of each query: the parameter `logit`, (H,)."""

    logit: nn.Parameter


class OutputGate(Mechanism):
    """Changes the heads' outputs."""

    def change(self, y: Tensor, v: Tensor, x: Tensor | None) -> Tensor:
        """Return the new outputs, (B, H, T, D), from the outputs y and the values v of the same tokens.

        y and v are (B, H, T, D). x (B, T, C): the layer's input.
        """
        raise NotImplementedError


class Replacement(Mechanism):
    """Replaces softmax attention."""

    def token_features(self, x: Tensor | None) -> Tensor | None:
        """Return features (B, H, T, ...), each of one token of x (B, T, C). None: attend needs no features."""
        return None

    def attend(self, q, k, v, rotated_q, rotated_k, features: Tensor | None, plan) -> Tensor:
        """Return the output (B, H, Tq, D) of the queries, which are the last Tq of the Tk tokens of k and v.

        q and k have no position encoding, rotated_q and rotated_k have it. features: token_features of all Tk tokens.
        plan.causal_attention(q, k, v) is plain softmax attention.
        """
        raise NotImplementedError


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Return S = q.k / sqrt(d), (B, H, Tq, Tk), computed in float32 or float64."""
    return upcast(q) @ upcast(k).mT * q.shape[-1] ** -0.5


class AttentionWeights(Replacement):
    """Replaces the softmax by other attention weights, in plain PyTorch and in blocks of queries.

    The backward pass recomputes the weights, because the Tq x Tk weights would not fit in memory.
    """

    def weights(self, q: Tensor, k: Tensor, visible: Tensor, token_features: Tensor | None) -> Tensor:
        """Return the attention weights (B, H, Tq, Tk), which are 0 where visible (Tq, Tk) is False.

        They are float32, or float64 for float64 q, as `upcast` makes them.

        q (B, H, Tq, D), with position encoding, has the last Tq of the Tk tokens of k and token_features.
        """
        raise NotImplementedError

    def attend(self, q, k, v, rotated_q, rotated_k, features, plan):
        earlier = k.shape[2] - q.shape[2]  # keys before the first query

        def attend_block(queries, start, stop):
            end = earlier + stop
            visible = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).tril(earlier + start)
            seen_features = None if features is None else features[:, :, :end]
            weights = self.weights(queries, rotated_k[:, :, :end], visible, seen_features)
            return weights.to(v.dtype) @ v[:, :, :end]

        return in_query_blocks(attend_block, rotated_q, recompute=True)


KINDS = {  # by attribute of Method, in the order of a method's name
    "rotation": Rotation,
    "query_scale": QueryScale,
    "score_change": ScoreChange,
    "key_bias": KeyBias,
    "window": Window,
    "sink": Sink,
    "replacement": Replacement,
    "output_gate": OutputGate,
}


class Method(nn.Module):
    """The mechanisms and parameters of one layer, with one attribute for each kind of KINDS.

    Raise ValueError for mechanisms that exclude each other.
    """

    def __init__(self, name: str, shape: Shape, mechanisms: list[Mechanism]):
        super().__init__()
        self.name = name
        self.shape = shape
        self.num_heads = shape.num_heads
        self.head_dim = shape.head_dim
        for kind, base in KINDS.items():
            of_kind = [mechanism for mechanism in mechanisms if isinstance(mechanism, base)]
            classes = " and ".join(type(mechanism).__name__ for mechanism in of_kind)
            require(len(of_kind) < 2, f"{name}: {classes} are both of kind {kind.replace('_', ' ')}. Leave one out.")
            setattr(self, kind, of_kind[0] if of_kind else None)
        self.vector_dim = shape.head_dim  # of rotated q and k
        if self.rotation is not None:
            self.vector_dim *= self.rotation.widening
        self.needs_input = any(mechanism.needs_input for mechanism in mechanisms)
        changed = any((self.score_change, self.key_bias, self.window, self.sink)) or self.vector_dim > self.head_dim
        if self.sink is not None and self.key_bias is not None and not self.key_bias.fits_sinks:
            raise UserError(f"{name} has a sink, and a key bias that is incomplete beside a sink. Leave one out.")
        if self.replacement is not None and changed:
            raise UserError(f"{name} has a part that replaces softmax attention and a part that changes it. Drop one.")

    def mechanisms(self) -> list[Mechanism]:
        return [module for module in self.modules() if isinstance(module, Mechanism)]

    @property
    def skip_first(self) -> bool:
        return self.score_change is not None and self.score_change.skip_first

    def token_features(self, x: Tensor | None) -> Tensor | None:
        """Return the features (B, H, T, ...) of the tokens of x (B, T, C) for a key bias or a replacement, or None."""
        mechanism = self.key_bias or self.replacement
        return None if mechanism is None else mechanism.token_features(x)

    def check_inputs(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None):
        """Raise ValueError unless q is (B, H, Tq, D), k and v are (B, H, Tk, D), and x is there if it is needed."""
        heads, width = self.num_heads, self.head_dim
        of_q = (q.shape[0], heads, q.shape[2], width)
        of_k = (q.shape[0], heads, k.shape[2], width)
        if q.shape != of_q or k.shape != of_k or v.shape != of_k:
            shapes = f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
            raise UserError(f"{shapes}. {self.name} needs (batch, {heads}, length, {width}).")
        if self.needs_input and x is None:
            raise UserError(f"{self.name} needs x, the input of the layer. Pass it.")

    def check_documents(self):
        """Raise ValueError if the method cannot stay within documents."""
        if self.replacement is not None or self.skip_first:
            reason = "has an exception for the first key" if self.skip_first else "replaces softmax attention"
            raise UserError(f"document_mask does not work with {self.name}, which {reason}. Use another method.")

    def reset_parameters(self):
        for mechanism in self.mechanisms():
            mechanism.reset_parameters()

    def calibrate(self, scores: Tensor):
        """Set all calibrated parameters from the layer's scores (H, pairs), without gradients."""
        for mechanism in self.mechanisms():
            mechanism.calibrate(scores)
