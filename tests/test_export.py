"""Exported models: logits, gradients and generation equal ours for every method; the folder's files."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from attention_cases import CPU, parse
from commands import exit_code, fails, full_disk, parametrize, read_json, refuses, shared, slow, succeeds, write_files
from test_decoding import CASES, full_logits, make_model
from test_gpt import random_tokens
from test_methods import assert_near
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers", reason="exporting needs pip install -r requirements-extras.txt")

from huggingface_hub.errors import StrictDataclassError
from tiny_llama import run_elsewhere, save_tokenizer
from tiny_run import train_tiny_run
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from data.tokenizer import load_tokenizer
from model.decoding import greedy_decode
from scripts import export as command
from scripts.hf.modeling_method_gpt import MethodGPTConfig, MethodGPTForCausalLM
from scripts.hf.modules import ROOT
from scripts.shared.runs import load_run

# One method of each kind: scaling by length, key bias, memory, another softmax, wide keys, layers that differ.
KINDS = """logn_ntk | p_rope+forget | fire | pope+scale_invariant | swan | nape | infini_rope segment_length=7
    | fox,rope+window window=9 | p_rope+scale_invariant+xsa skip_first=True learn_share=True""".split("|")


def make_pair(name, options=None):
    """Return our model, trained at 16 tokens, and the same one as transformers has it."""
    gpt = make_model(name, options)
    shape = dict(vocab_size=97, num_layers=2, num_heads=6, model_dim=96, train_length=16)
    model = MethodGPTForCausalLM(MethodGPTConfig(**shape, method=name, method_options=options)).eval()
    model.gpt.load_state_dict(gpt.state_dict())
    return gpt, model


def generate(model, tokens, new=8, do_sample=False, **options):
    return model.generate(tokens, max_new_tokens=new, do_sample=do_sample, **options)


def likeliest(gpt, tokens, length=None):
    return full_logits(gpt, tokens, target_length=length).argmax(dim=-1)


@parametrize("name, options", CASES, ids=str)
@torch.no_grad()
def test_logits_and_cached_ones_are_ours(name, options):
    gpt, model = make_pair(name, options)
    tokens, _ = random_tokens(30)
    expected = full_logits(gpt, tokens)
    whole = model(tokens, use_cache=False, labels=tokens)
    assert_near(whole.logits, expected, 1e-5)
    assert_near(whole.loss, cross_entropy(expected[:, :-1].mT, tokens[:, 1:]), 1e-5)
    cache, logits = None, []
    for piece in tokens.split([19, 5, 1, 1, 1, 3], dim=1):
        out = model(piece, past_key_values=cache, target_length=30)
        cache = out.past_key_values
        logits.append(out.logits)
    assert_near(torch.cat(logits, dim=1), expected, 1e-5)


@parametrize("case", KINDS)
def test_generation_is_the_same_with_a_cache_and_without(case):
    gpt, model = make_pair(*parse(case))
    tokens, _ = random_tokens(21)
    for options in ({}, dict(num_beams=3), dict(do_sample=True, num_return_sequences=2, top_k=20)):
        torch.manual_seed(0)
        cached = generate(model, tokens, **options)
        torch.manual_seed(0)
        assert torch.equal(cached, generate(model, tokens, use_cache=False, **options)), options
    best = generate(model, tokens)
    assert torch.equal(best[:, 21:], likeliest(gpt, best[:, :-1])[:, 20:])
    repeated = dict(tokens=tokens[:1, :12].repeat(1, 3), target_length=60)
    assert torch.equal(generate(model, **repeated), generate(model, **repeated, prompt_lookup_num_tokens=4))


def test_generation_stops_at_a_string_and_unknown_arguments_are_refused(exported):
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    tokens = tokenizer("abc def", return_tensors="pt").input_ids
    whole = generate(model, tokens)[0, tokens.shape[1] :].tolist()
    stopped = generate(model, tokens, stop_strings=[tokenizer.decode(whole[2])], tokenizer=tokenizer)
    new = stopped[0, tokens.shape[1] :].tolist()
    assert new == whole[: len(new)] and len(new) <= 3


# Arguments of generate, which work as in GPT-2.
ARGUMENTS = """
{} | max_length: 15, max_new_tokens: null | min_length: 16 | min_new_tokens: 4 | max_time: 100.0 | num_beams: 3
num_beams: 2, early_stopping: true | num_beams: 2, length_penalty: 2.0 | num_beams: 3, do_sample: true
cache_implementation: dynamic | prefill_chunk_size: 5 | prompt_lookup_num_tokens: 3 | disable_compile: true
temperature: 0.5, do_sample: true | top_k: 5, do_sample: true
top_p: 0.5, do_sample: true | min_p: 0.1, do_sample: true | top_h: 0.5, do_sample: true
typical_p: 0.5, do_sample: true | epsilon_cutoff: 0.01, do_sample: true
eta_cutoff: 0.01, do_sample: true | do_sample: true, num_return_sequences: 2 | repetition_penalty: 1.5
encoder_repetition_penalty: 1.5 | no_repeat_ngram_size: 2 | bad_words_ids: [[3], [4, 5]] | renormalize_logits: true
forced_bos_token_id: 3 | forced_eos_token_id: 3 | remove_invalid_values: true | suppress_tokens: [3, 4]
begin_suppress_tokens: [3] | sequence_bias: [[[3], 10.0]] | guidance_scale: 1.5 | eos_token_id: [3, 4]
eos_token_id: 2, exponential_decay_length_penalty: [2, 1.1] | synced_gpus: false | use_cache: false
return_dict_in_generate: true, output_scores: true | return_dict_in_generate: true, output_logits: true
return_dict_in_generate: true, output_hidden_states: true
"""


@parametrize("argument", [part.strip() for part in ARGUMENTS.replace("\n", "|").strip("|").split("|")])
def test_arguments_of_generate_work_as_in_gpt2(argument):
    options = yaml.safe_load(argument if argument == "{}" else f"{{{argument}}}")
    _, model = make_pair("scale_invariant_p_rope")
    shape = dict(vocab_size=97, n_layer=2, n_head=6, n_embd=96, bos_token_id=1, eos_token_id=2)
    gpt2, (tokens, _) = GPT2LMHeadModel(GPT2Config(**shape)).eval(), random_tokens(12, batch=1)
    found = [one.generate(tokens, **dict(max_new_tokens=6, pad_token_id=0) | options) for one in (model, gpt2)]
    ours, theirs = (getattr(one, "sequences", one) for one in found)
    assert torch.equal(ours[:, :12], theirs[:, :12]) and ours.dtype == theirs.dtype
    assert len(ours) == len(theirs) and 12 < ours.shape[1] <= 18
    if "hidden_states" in argument:
        ours, theirs = (one.hidden_states for one in found)
        assert [[x.shape for x in step] for step in ours] == [[x.shape for x in step] for step in theirs]


@parametrize("argument", ["output_attentions: true, return_dict_in_generate: true", "cache_implementation: static"])
def test_arguments_without_a_meaning_here_are_refused(argument):
    _, model = make_pair("rope")
    with refuses("(attention|Cache)"):
        model.generate(random_tokens(12)[0], max_new_tokens=3, **yaml.safe_load(f"{{{argument}}}"))


@torch.no_grad()
def test_a_model_takes_embeddings_gives_its_states_and_changes_its_vocabulary():
    _, model = make_pair("fox")
    tokens, _ = random_tokens(12)
    rows = model.get_input_embeddings()(tokens)
    whole = model(tokens, output_hidden_states=True)
    assert torch.equal(model(inputs_embeds=rows).logits, whole.logits)
    assert torch.equal(generate(model, None, inputs_embeds=rows), generate(model, tokens)[:, 12:])
    first, *_, last = whole.hidden_states
    assert len(whole.hidden_states) == 3 and torch.equal(model.gpt.embed(tokens), first)
    assert_near(last @ model.get_output_embeddings().weight.T, whole.logits, 1e-6)
    for size in (120, 97):
        model.resize_token_embeddings(size)
        logits = model(tokens).logits
        assert logits.shape[2] == model.config.vocab_size == size and torch.equal(logits[..., :97], whole.logits)
    for wrong in (dict(inputs_embeds=rows), dict(attention_maks=tokens), dict(position_ids=tokens)):
        with refuses():
            model(tokens, **wrong)


def test_generation_scales_to_the_length_that_is_asked_for():
    gpt, model = make_pair("rope_ntk")
    tokens, _ = random_tokens(21, batch=20)
    near, far = (generate(model, tokens, 1, target_length=n) for n in (21, 500))
    assert not torch.equal(near, far)
    assert torch.equal(far[:, -1], likeliest(gpt, tokens, 500)[:, -1])
    assert torch.equal(near, generate(model, tokens, None, max_length=22))


def test_learned_parameters_of_a_method_stay_exact_in_bfloat16(tmp_path):
    _, model = make_pair("p_rope+forget")
    model.save_pretrained(tmp_path)
    half = MethodGPTForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, p in half.named_parameters():
        assert p.dtype == (torch.float32 if ".method." in name else torch.bfloat16), name
    tokens, _ = random_tokens(20)
    with torch.no_grad():
        exact, rounded = model(tokens).logits, half(tokens).logits
    assert rounded.dtype == torch.float32 and 0 < (exact - rounded).abs().max() < 0.05 * exact.std()


def test_bad_input_to_a_model():
    _, model = make_pair("rope")
    tokens, _ = random_tokens(6)
    with refuses("attention_mask"):
        model(tokens, attention_mask=tokens.tril(3))
    assert torch.equal(model(tokens, target_length=5).logits, model(tokens).logits)  # a draft may pass the target
    with refuses("__import__"):
        MethodGPTForCausalLM(MethodGPTConfig(method="__import__('os')"))
    with pytest.raises(StrictDataclassError, match="num_layers"):
        MethodGPTConfig(num_layers="2")


# ---- the folder of an export ----

FIELDS = "--num_layers 2 --val_lengths 240 480 --dtype float32 --method infini_p_rope,fox,logn_p_rope "
FIELDS += "--method_options segment_length 60"


@shared
def run(shared_path):
    save_tokenizer(shared_path / "llama")  # documents begin with <s>
    return train_tiny_run(shared_path, FIELDS, tokenizer=shared_path / "llama")


@shared
def exported(run):
    succeeds(command.main, run)
    return run / "hf"


def test_a_folder_has_weights_tokenizer_code_and_card(run, exported):
    assert {path.suffix for path in exported.iterdir()} == {".json", ".py", ".safetensors", ".md", ""}
    assert (exported / "LICENSE").read_text() == (ROOT / "LICENSE").read_text() and not [*run.glob(".*")]
    config, card = read_json(exported / "config.json"), (exported / "README.md").read_text()
    assert config["max_position_embeddings"] == 480 and config["method_options"] == {"segment_length": 60}
    first, second = read_json(run / "summary.json")["val_loss"].values()
    data = read_json(run / "data.json")
    shown = f"{first:.3f}", f"{second:.3f}", data["train"], data["tokenizer"][:12], "infini_p_rope,fox,logn_p_rope"
    assert all(text in card for text in shown) and str(run.parent) not in card
    ours, loaded = load_tokenizer(run.parent / "data"), AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    text = "abc hgf  a\nbcd"
    assert loaded(text)["input_ids"] == ours.encode(text)
    assert loaded.eos_token_id == loaded.bos_token_id == loaded.pad_token_id == ours.eot


LOAD = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(map(importlib.util.find_spec, ("model", "errors", "scripts")))
folder, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokens = torch.arange(600).view(2, 300) % 384
with torch.no_grad():
    logits = model(tokens).logits
options = dict(attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, eos_token_id=None)
new = model.generate(tokens, **options)
assert torch.equal(new, model.generate(tokens, **options, use_cache=False))
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["abc abc", "abc abc"], return_tensors="pt", padding=True)
assert len(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=5))) == 2
torch.save((tokens, logits, new), out)
"""


@slow
def test_it_loads_and_generates_where_the_repository_is_not(run, exported, tmp_path):
    run_elsewhere(tmp_path, LOAD, exported, "out")
    tokens, logits, new = torch.load(tmp_path / "out")
    _, gpt = load_run(run, CPU)
    assert_near(logits, full_logits(gpt, tokens), 1e-5)
    assert torch.equal(new[:, 300:], likeliest(gpt, new[:, :-1])[:, 299:])


def test_runs_that_cannot_be_exported_are_refused(run, exported, tmp_path, capsys, monkeypatch):
    bare = shutil.copytree(run, tmp_path / "bare", ignore=shutil.ignore_patterns("checkpoints", "hf"))
    for folder, named in ((run, exported), (tmp_path, tmp_path), (bare, "checkpoint")):
        fails(capsys, named, command.main, folder)
    write_files(bare, {"data.json": '{"tokenizer": "1234"}'})
    (bare / "checkpoints").symlink_to(run / "checkpoints")
    fails(capsys, "tokenizer.json", command.main, bare)
    monkeypatch.setitem(sys.modules, "transformers", None)
    fails(capsys, "requirements-extras.txt", command.main, bare)
    assert not (bare / "hf").exists()


@parametrize("most", [20, 5000])  # bytes of a file: the configuration, or the weights, which Rust writes
def test_a_full_disk_is_one_line_and_leaves_no_folder(most, run, tmp_path, capsys):
    with full_disk(most):
        assert exit_code(command.main, [run, "--out", tmp_path / "new"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # transformers draws a bar before it
    assert error.startswith("error: ") and str(tmp_path / "new") in error
    assert [*tmp_path.iterdir()] == []


# ---- the evaluation harness ----

QUESTIONS = ["abc def", "hg", "aaa bbb ccc ddd" * 30, "f e d c"]  # the third is longer than the training's texts
CHOICES = [" ab", " hgfe"]
TASKS = """
- task: choice
  dataset_path: json
  dataset_kwargs: {data_files: {test: DOCS}}
  test_split: test
  doc_to_text: "{{question}}"
  output_type: multiple_choice
  doc_to_choice: "{{choices}}"
  doc_to_target: 0
  target_delimiter: ""
  metric_list: [{metric: acc}]
- task: words
  dataset_path: json
  dataset_kwargs: {data_files: {test: DOCS}}
  test_split: test
  doc_to_text: "{{question}}"
  output_type: generate_until
  doc_to_target: "{{answer}}"
  metric_list: [{metric: exact_match}]
  generation_kwargs: {until: [zzz], max_gen_toks: 8, do_sample: false}
"""


@slow
@torch.no_grad()
def test_scores_of_the_evaluation_harness_equal_our_model(run, exported, tmp_path, monkeypatch):
    """EleutherAI's harness runs two tasks of this machine on an exported model."""
    for name, value in dict(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1").items():
        monkeypatch.setenv(name, value)
    lm_eval = pytest.importorskip("lm_eval", reason="the harness needs pip install -r requirements-extras.txt")
    tokenizer = load_tokenizer(run.parent / "data")
    _, gpt = load_run(run, CPU)

    # 1. Our model's log probabilities of the choices, and its answers. A wrong answer replaces the first answer.
    log_p, docs = [], []
    for question in QUESTIONS:
        before = tokenizer.encode(question)
        for choice in CHOICES:
            tokens = torch.tensor([before + tokenizer.encode(choice)])
            losses = gpt(tokens[:, :-1], tokens[:, 1:], per_token=True)
            log_p.append(-losses[0, len(before) - 1 :].sum().item())
        answer = tokenizer.decode(greedy_decode(gpt, torch.tensor([before]), 8)[0].tolist())
        docs.append(json.dumps(dict(question=question, choices=CHOICES, answer=answer if docs else "another")))

    # 2. Two tasks of the harness.
    path = write_files(tmp_path, {"docs.jsonl": "\n".join(docs)}) / "docs.jsonl"
    tasks = yaml.safe_load(TASKS.replace("DOCS", str(path)))
    arguments = f"pretrained={exported},trust_remote_code=True"
    found = lm_eval.simple_evaluate("hf", model_args=arguments, tasks=tasks, batch_size=1, device="cpu")
    samples = sorted(found["samples"]["choice"], key=lambda sample: sample["doc_id"])
    responses = [response[0] for sample in samples for response in sample["filtered_resps"]]
    assert responses == pytest.approx(log_p, abs=1e-4)
    assert found["results"]["words"]["exact_match,none"] == 0.75

    # 3. RULER's needles, two prompts of 600 tokens in place of 500.
    samples = pytest.importorskip("lm_eval.tasks.ruler.prepare_niah", reason="RULER needs wonderwords")
    make = samples.generate_samples
    fewer = {"num_samples": 2}
    monkeypatch.setattr(samples, "generate_samples", lambda *args, **options: make(*args, **options | fewer))
    found = lm_eval.simple_evaluate(
        "hf",
        model_args=arguments,
        tasks=["niah_single_1"],
        batch_size=1,
        device="cpu",
        metadata={"max_seq_lengths": [600], "pretrained": str(exported)},
        gen_kwargs="max_gen_toks=8",
    )
    assert found["results"]["niah_single_1"]["600,none"] == 0
    for sample in found["samples"]["niah_single_1"]:
        prompt = tokenizer.encode(sample["arguments"][0][0])
        answer = tokenizer.decode(greedy_decode(gpt, torch.tensor([prompt]), 8)[0].tolist())
        assert sample["resps"][0][0].strip() == answer.replace("<unk>", "").strip()
