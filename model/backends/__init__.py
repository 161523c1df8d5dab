"""The ways to compute causal attention over L = a_t S + m_t, by name. To add one: a file here, and a line in BACKENDS.

    backend      computes                               used for
    sdpa         torch's fused causal attention         methods that leave the logits alone (LogN is in q), on CUDA
    triton       our kernel, model/kernels/flash.py     methods that change the logits, on CUDA
    flex_flash   FlexAttention by FlashAttention-4      the same, where the kernel cannot run, on Hopper and Blackwell
    flex         FlexAttention, compiled                the same, where neither can run; no gradients on a CPU
    cpu          our kernel, model/kernels/cpu.py       everything on a CPU, in float32 and bfloat16
    blocks       blocks of queries, plain PyTorch       everything, where none of these can run

Each file has three functions:

    find_problem(method, device, dtype)       why it cannot run this method there, or None
    prepare(score_change, call, earlier)      a_t and m_t in its own form, for a call of this shape (base.py)
    run(q, k, v, *, q_offset=0, prepared)     the output (B, H, Tq, D) of q (B, H, Tq, D) and k, v (B, H, Tk, D)

Where find_problem lets methods with them pass, `run` also takes key_bias (B, H, Tk), which is added to the logits, and
sink (H,), a logit of each row that has no value, and `prepare` finds the window, in tokens, in the call.

`prepare` is called once a length. Where a_t and m_t are learned, that is without a score change, and then again with it
in every layer and pass: it is differentiable in what is learned, and keeps of what was prepared earlier what serves all
layers. `run` without anything prepared is plain causal attention at any lengths. Query i is at position q_offset + i,
key j at position j.

What is compiled where it runs has a fourth, `check_on_this_machine(method, device, dtype)`, which runs it once before
`auto` takes it and returns how it fails or how wrong it is, or None.
"""

from model.backends import blocks, cpu, flex, flex_flash, sdpa, triton

BACKENDS = {"sdpa": sdpa, "triton": triton, "flex_flash": flex_flash, "flex": flex, "cpu": cpu, "blocks": blocks}
# By device, the fastest first; blocks after them. flex_flash may be faster than triton on a GPU: neither was timed on
# one yet. It stays behind until `python -m scripts.bench attention` says so there.
AUTOMATIC = {"cuda": ("sdpa", "triton", "flex_flash", "flex"), "cpu": ("cpu",)}
