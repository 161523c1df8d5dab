"""Exported models: equal to ours in logits, gradients and generation, with every method; what they carry; refusals."""

import ast
import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_decoding import CASES, full_logits, make_model
from test_gpt import random_tokens
from test_methods import assert_near, assert_refused

pytest.importorskip("transformers", reason="exporting needs pip install -r requirements-extras.txt")

from huggingface_hub.errors import StrictDataclassError
from tiny_run import train_tiny_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from configs.command_line import read_config
from configs.config import config_hash
from data.text import load_tokenizer, prepare
from scripts.evaluate import load_run
from scripts.export import __main__ as command
from scripts.export.card import training_words
from scripts.export.modeling_method_gpt import MethodGPTConfig, MethodGPTForCausalLM
from scripts.export.modules import ROOT, export_modules
from scripts.shared.runs import read_run, stored_config

every_case = pytest.mark.parametrize("name, options", CASES, ids=[f"{name}-{options}" for name, options in CASES])
# Of each kind: scaled by the length, a bias of keys, a memory, its own softmax, wide keys, layers that differ.
KINDS = [(name, {}) for name in ("logn_ntk", "fox_p_rope", "fire", "scale_invariant_pope", "swan", "nape")]
KINDS += [("infini_rope", dict(segment_length=7)), ("fox,rope_window", dict(window=9))]
each_kind = pytest.mark.parametrize("name, options", KINDS, ids=[name for name, _ in KINDS])


def make_pair(name, options=None, **settings):
    """Our model, trained at 16 tokens, and the same one as transformers has it."""
    gpt = make_model(name, options)
    shape = dict(vocab_size=97, num_layers=2, num_heads=6, model_dim=96, train_length=16)
    model = MethodGPTForCausalLM(MethodGPTConfig(**shape, method=name, method_options=options, **settings)).eval()
    model.gpt.load_state_dict(gpt.state_dict())
    return gpt, model


def generate(model, tokens, new=8, **options):
    return model.generate(tokens, max_new_tokens=new, **(dict(do_sample=False) | options))


# ---- the model -------------------------------------------------------------------------------------------------------


@every_case
@torch.no_grad()
def test_logits_and_cached_ones_are_ours(name, options):
    gpt, model = make_pair(name, options)
    tokens, _ = random_tokens(30, batch=2)
    expected = full_logits(gpt, tokens, 30)
    assert_near(model(tokens, use_cache=False).logits, expected, 1e-5)
    cache, logits = None, []
    for piece in tokens.split([19, 5, 1, 1, 1, 3], dim=1):
        out = model(piece, past_key_values=cache, target_length=30)
        cache = out.past_key_values
        logits.append(out.logits)
    assert_near(torch.cat(logits, dim=1), expected, 1e-5)


@each_kind
def test_generation_is_the_same_with_a_cache_and_without(name, options):
    gpt, model = make_pair(name, options)
    tokens, _ = random_tokens(21, batch=2)
    with_cache = generate(model, tokens)
    assert torch.equal(with_cache, generate(model, tokens, use_cache=False))
    best = full_logits(gpt, with_cache[:, :-1], 28)[:, 20:].argmax(dim=-1)  # the last token is chosen, not seen
    assert torch.equal(with_cache[:, 21:], best)


@each_kind
def test_rows_of_a_batch_are_what_they_are_alone_at_any_padding(name, options):
    _, model = make_pair(name, options)
    tokens, _ = random_tokens(21, batch=4)
    lengths = (21, 5, 1, 5)
    left = torch.tensor([[0] * (21 - n) + [1] * n for n in lengths])
    together = generate(model, tokens, attention_mask=left)
    with torch.no_grad():
        logits = model(tokens, attention_mask=left.flip(1)).logits  # padded on the right
        for row, n in enumerate(lengths):
            alone = generate(model, tokens[row : row + 1, 21 - n :])
            assert torch.equal(together[row, 21 - n :], alone[0])
            assert_near(logits[row, :n], model(tokens[row : row + 1, :n]).logits[0], 1e-5)


@each_kind
def test_beams_samples_and_drafts_are_those_without_a_cache(name, options):
    _, model = make_pair(name, options)
    tokens, _ = random_tokens(12, batch=2)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for how in (dict(num_beams=3), dict(do_sample=True, num_return_sequences=2, top_k=20)):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            found.append(generate(model, tokens, attention_mask=mask, use_cache=use_cache, **how))
        assert torch.equal(*found), how
    repeated = tokens[:1].repeat(1, 3)
    drafted = generate(model, repeated, prompt_lookup_num_tokens=4, target_length=60)
    assert torch.equal(drafted, generate(model, repeated, target_length=60))


@torch.no_grad()
def test_a_cache_keeps_no_more_plans_than_there_are_texts():
    _, model = make_pair("logn_ntk,fox")
    tokens, _ = random_tokens(20, batch=3)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for target, kept in ((None, 0), (20, 1 + 2 * 2)):  # of the pass, and of two paddings and two methods
        cache = model(tokens[:, :10], attention_mask=mask[:, :10], target_length=target).past_key_values
        for n in range(10, 20):
            model(tokens[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache, target_length=target)
        assert len(cache.__dict__.get("plans", {})) == kept


def test_generation_scales_to_the_length_that_is_asked_for():
    gpt, model = make_pair("rope_ntk")
    tokens, _ = random_tokens(21, batch=20)
    near, far = (generate(model, tokens, 1, target_length=n)[:, -1] for n in (21, 500))
    assert not torch.equal(near, far) and torch.equal(far, full_logits(gpt, tokens, 500)[:, -1].argmax(dim=-1))
    assert torch.equal(near, generate(model, tokens, None, max_length=22)[:, -1])
    assert generate(model, tokens, None).shape[1] == 21 + 20  # transformers' own default


@each_kind
def test_loss_and_gradients_are_ours(name, options):
    gpt, model = make_pair(name, options)
    tokens, _ = random_tokens(20, batch=2)
    ours, theirs = gpt(tokens[:, :-1], tokens[:, 1:]), model(tokens, labels=tokens).loss
    if name not in ("rope_ntk", "logn_ntk"):  # these scale to 20 tokens here, to 19 there
        assert_near(theirs, ours, 1e-6)
        ours.backward()
    theirs.backward()
    for p, q in zip(gpt.parameters(), model.parameters(), strict=True):
        assert q.grad is not None and q.grad.isfinite().all()
        if p.grad is not None:
            assert_near(q.grad, p.grad, 2e-5)


def test_what_a_method_learns_stays_exact_in_bfloat16(tmp_path):
    _, model = make_pair("fox_p_rope")
    model.save_pretrained(tmp_path)
    half = MethodGPTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, p in half.named_parameters():
        assert p.dtype == (torch.float32 if ".method." in name else torch.bfloat16), name
    tokens, _ = random_tokens(20, batch=2)
    with torch.no_grad():
        exact, rounded = (m(tokens).logits for m in (model, half))
        cache = half(tokens[:, :19]).past_key_values
        step = half(tokens[:, 19:], past_key_values=cache).logits
    assert rounded.dtype == torch.float32 and 0 < (exact - rounded).abs().max() < 0.05 * exact.std()
    assert (step[:, 0] - exact[:, -1]).abs().max() < 0.05 * exact.std()


def test_bad_input_to_a_model_is_one_line():
    _, model = make_pair("rope")
    tokens, _ = random_tokens(6, batch=2)
    hole = torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6])
    with assert_refused("padding inside", "left"):
        model(tokens, attention_mask=hole)
    with assert_refused("without text"):
        model(tokens, attention_mask=torch.zeros_like(tokens))
    with assert_refused("attention_mask", "(2, 6)"):
        model(tokens, attention_mask=hole[:, :5])
    with assert_refused("StaticCache", "cache_implementation"):
        generate(model, tokens, cache_implementation="static", disable_compile=True)
    with assert_refused("target_length 5", "6 tokens"):
        model(tokens, target_length=5)
    with assert_refused("unknown attention method"):
        MethodGPTForCausalLM(MethodGPTConfig(method="__import__('os')"))
    with assert_refused("unknown option 'tua'"):
        MethodGPTForCausalLM(MethodGPTConfig(method_options=dict(tua=3.0)))
    with pytest.raises(StrictDataclassError, match="num_layers"):
        MethodGPTConfig(num_layers="2")


# ---- the modules that go along ---------------------------------------------------------------------------------------


def test_every_module_imports_and_is_found_by_transformers(tmp_path, monkeypatch):
    package = tmp_path / "carried"
    package.mkdir()
    (package / "__init__.py").touch()
    modules = export_modules(command.CODE)
    for name, text in modules.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    ours = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    for name in sorted(modules):
        importlib.import_module(f"carried.{name.removesuffix('.py')}")
        tree = ast.walk(ast.parse(modules[name]))
        absolute = {node.module.split(".")[0] for node in tree if isinstance(node, ast.ImportFrom) and not node.level}
        assert not absolute & ours and "triton" not in get_imports(package / name), name
    first = package / "modeling_method_gpt.py"
    assert {Path(path).name for path in get_relative_import_files(first)} == modules.keys() - {first.name}
    assert {"gpt.py", "methods_infini.py", "kernels_flash.py", "backends_flex.py"} <= modules.keys()
    assert sys.modules["carried.methods"].METHODS.keys() == importlib.import_module("model.methods").METHODS.keys()


# ---- the command -----------------------------------------------------------------------------------------------------

FIELDS = "--vocab_size 384 --num_layers 2 --num_heads 2 --model_dim 32 --batch_tokens 480 --train_length 240 --steps 4 "
FIELDS += "--cooldown_steps 2 --val_lengths 240 480 --val_tokens 960 --val_every 0 --compile off --device cpu --seed 3 "
FIELDS += "--dtype float32 --method infini_p_rope,fox,logn_p_rope --method_options segment_length 60"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny_run(tmp_path_factory.mktemp("export"), FIELDS)


@pytest.fixture(scope="module")
def exported(run):
    command.main([str(run), "--to", "hf"])
    return run / "hf"


def fails(capsys, main, *words):
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert end.value.code == 2
    return line


def test_a_folder_has_weights_tokenizer_code_and_card(run, exported):
    assert {path.suffix for path in exported.iterdir()} == {".json", ".py", ".safetensors", ".md", ""}
    assert (exported / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert [path for path in run.iterdir() if path.name.startswith(".")] == []
    config, card = json.loads((exported / "config.json").read_text()), (exported / "README.md").read_text()
    assert config["max_position_embeddings"] == 480 and config["method_options"] == {"segment_length": 60}
    summary, data = (json.loads((run / name).read_text()) for name in ("summary.json", "data.json"))
    shown = [f"{summary['val_loss'][n]:.3f}" for n in ("240", "480")] + [data["train"], data["tokenizer"][:12]]
    shown += ["`infini_p_rope,fox,logn_p_rope`", "Anson, Ben and Wang, Xi and Aitchison, Laurence", "Step 4 of 4"]
    assert all(words in card for words in shown) and str(run.parent) not in card
    own = read_config(training_words(stored_config(run)))
    assert config_hash(own) == config_hash(stored_config(run))
    ours, theirs = load_tokenizer(run.parent / "data"), AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    text = "abc hgf  a\nbcd"
    assert theirs(text)["input_ids"] == ours.encode(text) and theirs.padding_side == "left"
    assert theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == ours.eot


LOAD = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(map(importlib.util.find_spec, ("model", "errors", "scripts")))
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokens = torch.arange(600).view(2, 300) % 384
with torch.no_grad():
    logits = model(tokens).logits
how = dict(attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, eos_token_id=None)
new = model.generate(tokens, **how)
assert torch.equal(new, model.generate(tokens, **how, use_cache=False))
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["abc abc", "a"], return_tensors="pt", padding=True)
assert len(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=5))) == 2
torch.save((logits, new), out)
"""


@pytest.mark.slow
def test_it_loads_and_generates_where_the_repository_is_not(run, exported, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= dict(HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    words = [sys.executable, "-c", LOAD, str(exported), str(tmp_path / "out")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    logits, new = torch.load(tmp_path / "out")
    tokens = torch.arange(600).view(2, 300) % 384
    _, gpt = load_run(run, torch.device("cpu"))
    assert_near(logits, full_logits(gpt, tokens, 300), 1e-5)
    assert torch.equal(new[:, 300:], full_logits(gpt, new[:, :-1], 319)[:, 299:].argmax(dim=-1))


def test_a_run_that_switches_is_exported_as_what_it_has_become(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("hf"))
    config = json.loads((copy / "config.json").read_text())
    switch = dict(switch_method_at=0.5, switch_method_to="infini_rope,fox_p_rope,logn_rope")
    (copy / "config.json").write_text(json.dumps(config | switch))
    command.main([str(copy)])
    model, tokens = MethodGPTForCausalLM.from_pretrained(copy / "hf"), torch.arange(300).view(1, 300)
    assert model.config.method == switch["switch_method_to"] and model.config.method_options == {"segment_length": 60}
    with torch.no_grad():
        assert_near(model(tokens).logits, full_logits(load_run(copy, torch.device("cpu"))[1], tokens, 300), 1e-5)


def test_gpt2s_tokenizer_is_told_from_others(run, tmp_path):
    ids = {f"w{n}": n for n in range(50256)} | {"<|endoftext|>": 50256}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "right")
    ours = str(run.parent / "data" / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=ours).save_pretrained(tmp_path / "wrong")
    stored = read_run(run)
    trained = dataclasses.replace(stored, config=dataclasses.replace(stored.config, vocab_size=50304))
    trained = dataclasses.replace(trained, data=stored.data | {"tokenizer": "gpt2"})
    assert command.load_tokenizer(trained, str(tmp_path / "right")).eos_token_id == 50256
    with assert_refused("is not GPT-2's tokenizer"):
        command.load_tokenizer(trained, str(tmp_path / "wrong"))
    with assert_refused("50257", "384"):
        command.load_tokenizer(dataclasses.replace(trained, config=stored.config), str(tmp_path / "right"))


def test_what_cannot_be_exported_is_one_line(run, exported, tmp_path, capsys, monkeypatch):
    export = command.main
    assert f"{exported} exists" in fails(capsys, export, run)
    assert "not a run folder" in fails(capsys, export, tmp_path)
    other = tmp_path / "other"
    prepare([run.parent / "1.txt", run.parent / "2.txt"], other, "bpe:300", val_fraction=0.5)
    said = fails(capsys, export, run, "--out", tmp_path / "x", "--tokenizer", other)
    assert "does not hold the tokenizer" in said and "--tokenizer" in said
    assert "does not hold" in fails(capsys, export, run, "--out", tmp_path / "x", "--tokenizer", tmp_path / "none")
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("checkpoints", "hf"))
    assert "no checkpoint" in fails(capsys, export, bare)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install -r requirements-extras.txt" in fails(capsys, export, run, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_malicious_config_runs_nothing(run, tmp_path, capsys):
    copy, trap = tmp_path / "copy", tmp_path / "trap"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("hf"))
    (copy / "evil.py").write_text(f"open({str(trap)!r}, 'w')")
    config = json.loads((copy / "config.json").read_text())
    evil = {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil", "_name_or_path": str(copy)}
    (copy / "config.json").write_text(json.dumps(config | evil))
    command.main([str(copy)])
    written = json.loads((copy / "hf" / "config.json").read_text())
    assert written["auto_map"] == command.CLASSES and written["model_type"] == "method_gpt"
    assert not (copy / "hf" / "evil.py").exists()
    for method in (f"__import__('os').system('touch {trap}')", "../evil", "rope,evil.Evil"):
        (copy / "config.json").write_text(json.dumps(config | dict(method=method, method_options={})))
        assert "unknown attention method" in fails(capsys, command.main, copy, "--out", tmp_path / "out")
        changed = json.loads((copy / "hf" / "config.json").read_text()) | dict(method=method)
        (copy / "hf" / "config.json").write_text(json.dumps(changed))
        with assert_refused("unknown attention method"):
            MethodGPTForCausalLM.from_pretrained(copy / "hf")
    assert not trap.exists()
