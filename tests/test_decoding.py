"""Decoding with a cache against the full forward pass, for every method; greedy choice, stopping, refusals."""

import torch
from attention_cases import assert_near, attend, make_case, parse, random_qkv
from commands import parametrize, refuses, table
from test_gpt import make_random_gpt, random_tokens

from model.decoding import Decoder, greedy_decode
from model.methods import MECHANISMS, METHODS
from model.methods.names import canonical_name

STEPS = 23

NAMES = list(dict.fromkeys([*METHODS, *map(canonical_name, MECHANISMS)]))
CASES = [(name, {}) for name in NAMES] + [parse(case) for case in """rope+window window=7 | p_rope+window window=1
    | fox,rope+window window=9 | infini_p_rope,scale_invariant_nope segment_length=7 | rope_ntk stretch=3
    | logn_p_rope context=length | logn_ntk context=length | alibi slopes=geometric | scale_invariant_p_rope tau=0.1
    | scale_invariant_p_rope learn_tau=True | scale_invariant_p_rope tau_ratio=8 learn_gain=True
    | scale_invariant_p_rope skip_first=True learn_tau=True | scale_invariant_p_rope learn_moments=True
    | scale_invariant_p_rope+window skip_first=True window=9 | infini_rope segment_length=7
    | infini_p_rope segment_length=10 | infini_p_rope segment_length=1""".split("|")]  # 130 is a multiple of 10

every_case = parametrize("name, options", CASES, ids=str)


def make_model(name, options=None, **more):
    return make_random_gpt(name, train_length=16, method_options=options, **more)


@torch.no_grad()
def full_logits(model, tokens, **options):
    return model(tokens, plan=model.plan(tokens.shape[1], **options))  # (B, T, V)


def decoded_logits(model, tokens, prompt_length, **options):
    """Of the last prompt token and all tokens after it."""
    decoder = Decoder(model, tokens.shape[1], **options)
    logits = [decoder.prefill(tokens[:, :prompt_length])]
    logits += [decoder.step(token) for token in tokens[:, prompt_length:].unbind(1)]
    return torch.stack(logits, dim=1)


@every_case
@parametrize("prompt_length", [1, 7, 130])
def test_steps_give_the_logits_of_the_full_forward_pass(name, options, prompt_length):
    tokens, _ = random_tokens(prompt_length + STEPS, batch=3)
    tolerances = {torch.float32: 1e-5, torch.float64: 1.2e-7}
    for dtype, tolerance in [*tolerances.items()][: 2 if prompt_length == 7 else 1]:
        model = make_model(name, options, dtype=dtype)
        logits = decoded_logits(model, tokens, prompt_length)
        assert logits.dtype == torch.float32
        assert_near(logits, full_logits(model, tokens)[:, prompt_length - 1 :], tolerance)


@parametrize("name", NAMES)
def test_bfloat16_logits_are_near_float32(name):
    tokens, _ = random_tokens(100)
    expected = full_logits(make_model(name), tokens)[:, 69:]
    logits = decoded_logits(make_model(name, dtype=torch.bfloat16), tokens, 70)
    assert logits.dtype == torch.float32
    assert 0 < (logits - expected).std() < 0.05 * expected.std()


@parametrize("case", ["rope_ntk", "yarn", "logn_rope context=length"])
def test_the_target_position_scales_prompt_and_steps_alike(case):
    model = make_model(*parse(case))
    tokens, _ = random_tokens(12 + STEPS)
    far, near = (full_logits(model, tokens, target_length=target)[:, 11:] for target in (1000, None))
    assert ((far - near).abs().amax(dim=-1) > 1e-2).all()  # else the next line says nothing
    assert_near(decoded_logits(model, tokens, 12, target_length=1000), far, 1e-5)


@table("name, other", """
    rope      | rope_ntk
    rope      | yarn
    logn_rope | logn_ntk
""")
@torch.no_grad()
def test_a_model_decodes_as_a_method_that_trains_identically(name, other):
    models, (tokens, _) = [make_model(name), make_model(other)], random_tokens(40)  # models of the same weights
    method = models[1].blocks[0].attention.method
    decoders = [Decoder(model, 60, method=method) for model in models]
    assert torch.equal(*(decoder.prefill(tokens) for decoder in decoders))
    assert torch.equal(*(decoder.step(tokens[:, 0]) for decoder in decoders))
    assert torch.equal(greedy_decode(models[0], tokens, 5, method=method), greedy_decode(models[1], tokens, 5))


def test_scores_of_a_step_are_not_rounded_to_bfloat16():
    q, k, v = random_qkv(6, 16, 50)
    q, k = 5 * q[:, :, -1:].bfloat16(), k.bfloat16()
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v)
    assert_near(attend(make_case("nope", 6), q, k, v.float(), backend="blocks"), expected, 1e-5)


def test_a_new_prompt_starts_afresh():
    model = make_model("scale_invariant_p_rope")
    decoder = Decoder(model, 40)
    tokens, _ = random_tokens(40)
    decoder.prefill(tokens[:, :30])
    decoder.step(tokens[:, 30])
    decoder.prefill(tokens[:1, :5])
    expected = full_logits(model, tokens[:1, :6])
    assert_near(decoder.step(tokens[:1, 5]), expected[:, -1], 1e-5)


@parametrize("name", ["scale_invariant_p_rope", "logn_ntk", "rnope_swa", "infini_rope"])
def test_greedy_decoding_chooses_the_most_likely_token_each_time(name):
    model = make_model(name)
    tokens, _ = random_tokens(21, batch=3)
    expected = tokens
    for _ in range(12):
        best = full_logits(model, expected, target_length=32)[:, -1].argmax(dim=-1)  # it sees 21 + 12 - 1
        expected = torch.cat([expected, best.unsqueeze(1)], dim=1)
    assert torch.equal(greedy_decode(model, tokens, 12), expected[:, 21:])


def test_rows_stop_each_at_its_time_and_are_filled_up():
    model = make_model("scale_invariant_p_rope", vocab_size=7)
    tokens, _ = random_tokens(5, batch=4, vocab_size=7)
    free = greedy_decode(model, tokens, 30).tolist()
    seen = []
    for stop in range(8):  # 7 is never emitted
        lengths = [(row + [stop]).index(stop) + 1 for row in free]
        longest = min(max(lengths), 30)
        expected = [row[:length] + [stop] * (longest - length) for row, length in zip(free, lengths)]
        assert greedy_decode(model, tokens, 30, stop=stop).tolist() == expected
        seen.append((min(lengths), max(lengths)))
    assert any(first < last <= 30 for first, last in seen)  # rows that stop at different times,
    assert any(first < last == 31 for first, last in seen)  # rows that never stop beside one that does,
    assert seen[7] == (31, 31)  # and no stop at all


def test_lengths_that_do_not_fit_are_refused():
    tokens, _ = random_tokens(11)
    with refuses("0 queries"):
        greedy_decode(make_model("rope"), tokens[:, :0], 5)
    with refuses("target_length 12", "15"):
        greedy_decode(make_model("yarn"), tokens, 5, target_length=12)
    decoder = Decoder(make_model("rope"), 10)
    decoder.prefill(tokens[:, :10])
    with refuses("max_length 10"):
        decoder.step(tokens[:, 10])
