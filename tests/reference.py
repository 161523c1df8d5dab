"""The attention methods in float64, written from the papers alone. Tests compare model/ with them.

The code is slow and literal on purpose, and imports nothing from the project. q (B, H, Tq, D) and k, v (B, H, Tk, D)
come before rotation. Query i sees the keys j <= i, and t = i - j. `learned` is a method's one parameter, (H,): LogN's
s, Infini's beta or a learned log(tau). model.methods.make_method takes the same names and options.
"""

import math

import torch

# ---- rotary frequencies: radians a token, (D/2,) ---------------------------------------------------------------------


def rope_frequencies(head_dim, base=10000.0):
    """theta_k = base^(-2k/D) (Su et al. 2021, section 3.2.2)."""
    k = torch.arange(head_dim // 2, dtype=torch.float64)
    return base ** (-2 * k / head_dim)


def half_truncate_frequencies(head_dim, base=1024.0, share=0.5):
    """share D/2 frequencies from 1 down to 1/base, in equal ratios; the other pairs stay (modded-nanogpt #17)."""
    turning, k = round(share * head_dim / 2), torch.arange(head_dim // 2, dtype=torch.float64)
    return torch.where(k < turning, base ** (-k / max(turning - 1, 1)), 0)


def barbero_frequencies(head_dim, base=10000.0, share=0.5):
    """RoPE whose first share D/2 pairs turn; the others stay (Barbero et al. 2025)."""
    theta = rope_frequencies(head_dim, base)
    theta[math.floor(share * head_dim / 2):] = 0
    return theta


def ntk_frequencies(head_dim, s, base=10000.0):
    """RoPE with the base multiplied by s^(D/(D-2)) (paper, "RoPE hyperparameters")."""
    return rope_frequencies(head_dim, base * s ** (head_dim / (head_dim - 2)))


def yarn_frequencies(head_dim, s, train_length, base=10000.0):
    """NTK by parts (Peng et al. 2023): pairs with many turns in training keep theta, pairs with few get theta / s."""
    def pair_of(turns):  # the k, not an integer, whose pair makes that many turns in train_length tokens
        return head_dim * math.log(train_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low = max(math.floor(pair_of(32)), 0)
    high = min(math.ceil(pair_of(1)), head_dim - 1)
    k = torch.arange(head_dim // 2, dtype=torch.float64)
    ramp = ((k - low) / (high - low)).clamp(0, 1)
    theta = rope_frequencies(head_dim, base)
    return theta / s * ramp + theta * (1 - ramp)


def rotation(name, head_dim, train_length, target_length, *, base=None, form="half_truncate", share=0.5, stretch=None):
    """Return a method's frequencies, and the gain on its cos and sin (YaRN's temperature: 0.1 ln s + 1)."""
    s = (stretch or target_length / train_length) if target_length > train_length else 1.0
    if name.endswith("p_rope") and form == "half_truncate":
        return half_truncate_frequencies(head_dim, base or 1024.0, share), 1.0
    base = base or 10000.0
    if name == "yarn":
        return yarn_frequencies(head_dim, s, train_length, base), 0.1 * math.log(s) + 1
    if name.endswith("p_rope"):
        return barbero_frequencies(head_dim, base, share), 1.0
    if name.endswith("ntk"):
        return ntk_frequencies(head_dim, s, base), 1.0
    if name.endswith("rope"):
        return rope_frequencies(head_dim, base), 1.0
    return torch.zeros(head_dim // 2, dtype=torch.float64), 1.0


def rotate(x, positions, frequencies, gain=1.0):
    """Turn each pair x_k + i x_(k+D/2) by -position * theta_k, and multiply it by the gain."""
    pairs = torch.complex(*x.chunk(2, dim=-1))  # (B, H, T, D/2)
    pairs = pairs * gain * torch.exp(-1j * positions[:, None] * frequencies)
    return torch.cat([pairs.real, pairs.imag], dim=-1)  # (B, H, T, D)


# ---- changes of the scores -------------------------------------------------------------------------------------------


def alibi_slopes(num_heads, slopes="official"):
    """Press et al. 2022, section 3; for other H than powers of two, interleaved. "geometric": always 2^(-8h/H)."""
    def geometric(n):
        return [2.0 ** (-8 * h / n) for h in range(1, n + 1)]

    power = num_heads if slopes == "geometric" else 2 ** math.floor(math.log2(num_heads))
    interleaved = geometric(power) + geometric(2 * power)[::2]
    return torch.tensor(interleaved[:num_heads], dtype=torch.float64)


def scale_invariant(t, tau=10.0):
    """a_t and m_t (paper, Eq. "solution"). The boundary a_0 = 1, m_0 = 0 gives alpha = beta = e^(1/2)."""
    alpha = beta = math.exp(0.5)
    a_squared = 2 * (torch.log(t / tau + 1) - math.log(alpha) + beta / alpha)
    return a_squared.sqrt(), -a_squared + beta / alpha


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_logits(name, q, k, *, train_length, target_length=None, q_offset=0, learned=None, tau=10.0,
                     tau_ratio=1.0, learn_tau=False, learn_gain=False, terms="both", slopes="official",
                     slope_scale=1.0, context="row", **rotary):
    """L_ij = a_t S_ij + m_t, minus infinity for keys after the query: (B, H, Tq, Tk)."""
    num_heads, head_dim = q.shape[1], q.shape[3]
    i = torch.arange(q_offset, q_offset + q.shape[2], dtype=torch.float64)
    j = torch.arange(k.shape[2], dtype=torch.float64)
    target_length = target_length or len(j)
    turn = rotation(name, head_dim, train_length, target_length, **rotary)

    logits = rotate(q, i, *turn) @ rotate(k, j, *turn).mT / math.sqrt(head_dim)
    t = (i[:, None] - j).clamp(min=0)  # (Tq, Tk)
    if name.startswith("logn"):
        n = i + 1 if context == "row" else torch.full_like(i, target_length)
        logits = learned[:, None, None] * torch.log(n)[:, None] * logits
    if name.startswith("scale_invariant"):
        taus = torch.exp(learned) if learn_tau else tau * tau_ratio ** torch.arange(num_heads, dtype=torch.float64)
        a, m = scale_invariant(t, taus[:, None, None])
        if learn_gain:
            a = a * learned[:, None, None]
        logits = (logits if terms == "m" else a * logits) + (0 if terms == "a" else m)
    if name == "alibi":
        logits = logits - slope_scale * alibi_slopes(num_heads, slopes)[:, None, None] * t
    return logits.masked_fill(j > i[:, None], -math.inf)


def attend(name, q, k, v, **options):
    """softmax(L) v, or Infini-attention: (B, H, Tq, D)."""
    if name.startswith("infini"):
        return infini(name, q, k, v, **options)
    return attention_logits(name, q, k, **options).softmax(dim=-1) @ v


def infini(name, q, k, v, *, learned, segment_length=None, train_length, target_length=None, **rotary):
    """Munkhdalai et al. 2024: causal softmax inside a segment, a linear-attention memory of the earlier segments.

    The memory sees q and k before rotation. sigma = ELU + 1. The first segment has no memory and no gate.
    """
    def sigma(x):
        return torch.nn.functional.elu(x) + 1

    def recall(x):
        return (sigma(x) @ memory) / (sigma(x) @ normaliser)

    gate = torch.sigmoid(learned)[:, None, None]
    memory = normaliser = 0  # (B, H, D, D), (B, H, D, 1)
    outputs = []
    segments = [x.split(segment_length or max(1, train_length // 4), dim=2) for x in (q, k, v)]
    for q_s, k_s, v_s in zip(*segments):
        # RoPE depends on i - j alone, so positions may start again in every segment.
        local = attend(name.removeprefix("infini_"), q_s, k_s, v_s, train_length=train_length, **rotary)
        outputs.append(gate * recall(q_s) + (1 - gate) * local if outputs else local)
        memory = memory + sigma(k_s).mT @ v_s
        normaliser = normaliser + sigma(k_s).sum(dim=2)[..., None]
    return torch.cat(outputs, dim=2)
