# ruff: noqa: E402 (imports after importorskip)
"""Reading models of Hugging Face's, from folders and from a stand-in for the hub: what is refused, and how."""

import json
import pickle
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")

import torch
from huggingface_hub import constants
from test_huggingface import VOCAB, logits, make_model
from test_methods import assert_refused
from tokenizers import Tokenizer, models, pre_tokenizers

from scripts.huggingface.converted import load_converted
from scripts.huggingface.load import (
    check_memory,
    import_transformers,
    load_model,
    read_config,
    read_tokenizer,
)


@pytest.fixture
def folder(tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_folder_is_loaded(folder):
    model = load_model(folder, dtype=torch.bfloat16, attention_dropout=0.25)
    assert model.dtype == torch.bfloat16 and model.config.attention_dropout == 0.25
    for ours, theirs in zip(model.state_dict().values(), make_model().state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


@pytest.mark.parametrize("fields, words", [
    (dict(model_type="gpt2"), "family gpt2, which is not supported: llama and gemma2 are"),
    (dict(model_type=None), "family None"),
    (dict(hidden_size="x"), "configuration.*hidden_size.*expected int"),
    (dict(num_attention_heads=5), "configuration.*multiple"),
    (dict(hidden_size=64), "weights of .* cannot be read"),
    (dict(num_hidden_layers=3), "lacks 9 of its weights, among them model.layers.2"),
    (dict(quantization_config=dict(quant_method="gptq", bits=4)), "is quantised"),
    (dict(rope_parameters=dict(rope_type="other")), "configuration.*other"),
    (dict(hidden_size=2**14, intermediate_size=2**16, num_hidden_layers=99), "GiB, and cpu has .* GiB free"),
], ids=str)
def test_bad_configurations(folder, fields, words):
    change_config(folder, **fields)
    with assert_refused(words):
        load_model(folder)


def test_bad_folders(folder, tmp_path):
    with assert_refused("not a model's folder", "config.json"):
        load_model(tmp_path)
    with assert_refused("neither a folder here nor a name on the hub"):
        load_model(tmp_path / "nowhere")
    with assert_refused("no field hiden_size"):
        load_model(folder, hiden_size=3)
    with assert_refused("the tokenizer of .* cannot be read"):
        read_tokenizer(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with assert_refused("the weights of .* cannot be read"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with assert_refused("the configuration of .* cannot be read"):
        read_config(folder)


def save_tokenizer(folder):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    save_tokenizer(tmp_path)
    assert len(read_tokenizer(tmp_path, VOCAB)) == VOCAB
    with assert_refused("has 99 ids, its model 98"):
        read_tokenizer(tmp_path, 98)


def test_the_example_of_the_page_runs(folder, tmp_path, monkeypatch, capsys):
    save_tokenizer(folder)
    page = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    for theirs, here in (("meta-llama/Llama-2-7b-hf", str(folder)), ('device="cuda"', 'device="cpu"')):
        assert code.count(theirs) == 1
        code = code.replace(theirs, here)
    exec(code, {})
    deviations, loss = (line for line in capsys.readouterr().out.splitlines())
    assert deviations.startswith("tensor(") and "nan" not in deviations + loss
    assert load_converted(tmp_path / "llama-scale-invariant").config.attention_method["options"] == dict(tau=10.0)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_that_a_folder_brings_is_run(folder, tmp_path):
    sprung = tmp_path / "sprung"
    code = f"open({str(sprung)!r}, 'w')\nclass Any: pass\nAny = type('Any', (), {{}})\n"
    for name in ("modeling_trap.py", "configuration_trap.py", "tokenization_trap.py"):
        (folder / name).write_text(code)
    auto = dict(AutoConfig="configuration_trap.Any", AutoModelForCausalLM="modeling_trap.Any")
    auto |= dict(AutoTokenizer=["tokenization_trap.Any", None])
    change_config(folder, auto_map=auto, _attn_implementation="someone/trap", attn_implementation="someone/trap")
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(auto_map=auto, tokenizer_class="Any")))
    assert logits(load_model(folder)).isfinite().all()
    with assert_refused("tokenizer of"):
        read_tokenizer(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": Trap(sprung)}))
    with assert_refused("weights of .* cannot be read"):
        load_model(folder)
    index = dict(metadata={}, weight_map={"lm_head.weight": "pytorch_model.bin"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with assert_refused("weights that are not in safetensors", "pytorch_model.bin"):
        load_model(folder)
    assert not sprung.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())["lm_head.weight"].close()
    assert sprung.exists()  # the trap is one


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with assert_refused("needs transformers", "pip install -r requirements-extras.txt"):
        import_transformers()


def test_memory_is_checked_before_anything_is_loaded(capsys):
    check_memory("a model", 2.0**30, "cpu")
    assert re.fullmatch(r"the weights of a model need 1.0 GiB, and cpu has [0-9.]+ GiB free\n", capsys.readouterr().err)
    with assert_refused("the weights of a model need 931322.6 GiB, and cpu has [0-9.]+ GiB free", "take a larger"):
        check_memory("a model", 1e15, "cpu")


class Answers(BaseHTTPRequestHandler):
    """A hub that has one model, which is gated, and no other."""

    def do_HEAD(self):
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("read", [load_model, read_tokenizer])
def test_models_that_the_hub_does_not_give(hub, read, monkeypatch):
    with assert_refused("someone/gated is gated: ask", "at https://huggingface.co/someone/gated", "hf auth login"):
        read("someone/gated")
    with assert_refused("the hub has no model someone/else, or it is private"):
        read("someone/else")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with assert_refused("someone/else is no folder here", "the hub cannot be reached"):
        read("someone/else")
