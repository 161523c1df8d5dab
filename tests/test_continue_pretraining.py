# ruff: noqa: E402 (imports after importorskip)
"""Continual pretraining of a tiny Llama of the real class, with grouped queries: the whole command."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-extras.txt")
pytest.importorskip("torchao", reason="pip install -r requirements-extras.txt")

import numpy as np
import torch
import torch.nn.functional as F
from tiny_llama import VOCAB, save_model, save_tokenizer, texts
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from data.shards import open_split, read_manifest
from data.text import load_tokenizer, prepare
from model.loss import mean_loss
from runtime.checkpoint import load_checkpoint
from runtime.metrics import read_metrics
from runtime.processes import World
from scripts.bench.memory import StorageCount, loss_workspace
from scripts.continue_pretraining import __main__ as command
from scripts.continue_pretraining.memory import count_memory
from scripts.continue_pretraining.model import AdamW8bit, WithLoss, build, train_step
from scripts.continue_pretraining.settings import NOT_TRAINED, PAPER, Settings
from scripts.huggingface.attention import convert
from scripts.huggingface.converted import load_converted
from scripts.huggingface.load import read_config
from scripts.reproduce.__main__ import main as reproduce

ROOT = Path(__file__).parents[1]
LENGTHS = ("64", "256", "1024")
HERE = World.alone(torch.device("cpu"))
STEPS = 4
FIELDS = "--train_length 64 --batch_tokens 256 --micro_batch_tokens 128 --save_every 2 --keep 2 "
FIELDS += f"--val_lengths {' '.join(LENGTHS)} --val_tokens 1024 --compile off --device cpu --lr 0.001"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with model/, data/ and its text/."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder / "model")
    (folder / "text").mkdir()
    for number, text in enumerate(texts(60)):
        (folder / "text" / f"{number}.txt").write_text(text)
    prepare([folder / "text"], folder / "data", str(folder / "model"), val_fraction=0.3)
    return folder


def words(place, runs, *more, model=None, steps=STEPS):
    steps = [] if steps is None else ["--steps", str(steps)]
    return [str(model or place / "model"), "--data", str(place / "data"), "--runs_dir", str(runs), *FIELDS.split(),
            *steps, *map(str, more)]  # fmt: skip


@pytest.fixture
def call(capfd):
    """Calls the command; returns its exit code and what it printed."""

    def call(argv):
        code = 0
        try:
            command.main(argv)
        except SystemExit as end:
            code = end.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    """The folder of runs with one of LogN + p-RoPE, in bfloat16. Not to be written to."""
    runs = tmp_path_factory.mktemp("undisturbed")
    command.main(words(place, runs, "--method", "logn_p_rope", "--name", "run"))
    return runs


def refusal(result):
    """The one line of an error of the user."""
    code, _, said = result
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in said, said
    return lines[0]


def settings(place, **changes):
    shape = dict(train_length=64, batch_tokens=256, micro_batch_tokens=128, lr=1e-3, dtype="float32", device="cpu")
    return Settings(str(place / "model"), data=str(place / "data"), **shape | changes)


def reference_model(place):
    return transformers.LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.float64)


def reference_losses(model, inputs, targets):
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="none").view(inputs.shape)


def validation_tokens(place, length):
    tokens = open_split(place / "data", "val", VOCAB).read(0, 1025).astype(np.int64)
    return torch.from_numpy(tokens[:-1]).view(-1, length), torch.from_numpy(tokens[1:]).view(-1, length)


# ---- what is computed ------------------------------------------------------------------------------------------------


def test_losses_before_and_after(place, undisturbed):
    run = undisturbed / "run"
    records = read_metrics(run / "metrics.jsonl")
    before, after = (r for r in records if "val_loss" in r)
    summary = json.loads((run / "summary.json").read_text())
    assert (before["step"], after["step"]) == (0, STEPS)
    assert summary["val_loss_before"] == before["val_loss"] and summary["val_loss"] == after["val_loss"]
    assert tuple(before["val_loss"]) == tuple(after["val_loss"]) == LENGTHS
    assert all(after["val_loss"][n] < before["val_loss"][n] - 0.1 for n in LENGTHS)
    assert [r["step"] for r in records if "train_loss" in r] == [1, 2, 3, 4]
    assert len(before["scores_std"]) == 2 and all(0 < std < 9 for std in before["scores_std"])
    assert {"config.json", "data.json", "log.txt", "lock", "checkpoints"} <= {path.name for path in run.iterdir()}
    learned = [[*r["method_parameters"].values()] for r in (before, after)]
    moved = np.abs(np.subtract(*learned))  # s of LogN, (layers, heads), in float32: each step moves it by lr or less
    assert moved.shape == (2, 4) and (moved > 1e-5).all() and (moved < 1.1e-3 * STEPS).all()


def test_rope_is_the_model_itself_and_not_trained(place, tmp_path, call):
    code, said, _ = call(words(place, tmp_path, "--method", "rope", "--dtype", "float32", steps=None))
    summary = json.loads((tmp_path / "model-rope" / "summary.json").read_text())
    assert code == 0 and summary["steps"] == 0 and summary["val_loss"] == summary["val_loss_before"]
    assert not [*(tmp_path / "model-rope" / "checkpoints").iterdir()]
    model = reference_model(place)
    for length in (64, 256):
        with torch.no_grad():
            expected = reference_losses(model, *validation_tokens(place, length)).mean().item()
        assert summary["val_loss"][str(length)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rescale", ["no", "layer"])
def test_saved_model_is_the_trained_one(rescale, place, tmp_path, call):
    argv = words(place, tmp_path, "--method", "logn_p_rope", "--dtype", "float32", "--save_model", steps=2)
    assert call([*argv, "--name", "run", "--rescale", rescale])[0] == 0
    assert_saved(place, tmp_path / "run")
    assert load_tokenizer(str(tmp_path / "run" / "model")).vocab_size == VOCAB


def assert_saved(place, run):
    """The model in the folder of a run in float32 has the loss at the run's end."""
    loss = json.loads((run / "summary.json").read_text())["val_loss"]["256"]
    with torch.no_grad():
        theirs = reference_losses(load_converted(run / "model"), *validation_tokens(place, 256)).mean().item()
    assert theirs == pytest.approx(loss, abs=1e-5)


def test_gradients_of_a_step_are_those_of_the_whole_logits(place):
    model = build(settings(place, method="rope"), HERE)
    batches = [tuple(part[i : i + 2] for part in validation_tokens(place, 64)) for i in (0, 2)]
    loss, norm = train_step(model, batches, HERE)
    plain = reference_model(place)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches))
    expected = reference_losses(plain, inputs, targets).mean()
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert norm == pytest.approx(torch.cat([g.flatten() for g in gradients.values()]).norm().item(), rel=1e-5)
    for name, p in model.model.named_parameters():
        assert_close(p.grad.double(), gradients[name], rtol=1e-4, atol=1e-6)


def test_head_in_bfloat16_is_as_precise_as_its_dtype():
    x, head = torch.randn(50, 16), torch.randn(33, 16)
    targets = torch.arange(50) % 33
    x16, head16 = x.bfloat16().requires_grad_(), head.bfloat16().requires_grad_()
    mean_loss(x16, head16, targets).backward()
    x64, head64 = (t.detach().double().requires_grad_() for t in (x16, head16))
    F.cross_entropy(x64 @ head64.T, targets).backward()
    for ours, plain in ((x16, x64), (head16, head64)):
        assert_close(ours.grad.double(), plain.grad, rtol=0, atol=0.02 * plain.grad.abs().max().item())


def optimizer_of(dtype, lr, shape, seed=0, decay=0.0):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    return module.weight, AdamW8bit(module, Settings("", lr=lr, weight_decay=decay, seed=seed), HERE, compiled=False)


@pytest.mark.parametrize("shape, tolerance", [((30, 7), 1e-6), ((64, 128), 2e-3)])  # whole moments, and of 8 bits
def test_update_is_that_of_adamw(shape, tolerance):
    weight, optimizer = optimizer_of(torch.float32, 1e-2, shape, decay=0.1)
    plain = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    adamw = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1)
    for step in range(5):
        plain.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).double()
        weight.grad = plain.grad.float()
        adamw.step()
        optimizer.step(step)
    assert weight.grad is None
    assert_close(weight.double(), plain, rtol=0, atol=tolerance)


def test_updates_below_a_last_place_of_bfloat16_count_on_average():
    weight, optimizer = optimizer_of(torch.bfloat16, 2e-5, (64, 1024))
    nearest = weight.detach().clone()
    for step in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step(step)
        nearest -= 2e-5
    assert (nearest == 1).all()  # rounded to the nearest, all of it is lost: below 1, a last place is 2^-8
    moved = (1 - weight.double().mean()).item()
    # Each of 65,536 weights moves by 2^-8 in a share 2e-5 x 2^8 of the steps: the mean's deviation is 4.9e-6.
    assert moved == pytest.approx(20 * 2e-5, abs=2.5e-5)


# ---- resuming --------------------------------------------------------------------------------------------------------


def stop_after(monkeypatch, steps):
    """Let SIGTERM arrive in this process within that step."""
    made = []

    def step(*arguments):
        made.append(1)
        if len(made) == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*arguments)

    monkeypatch.setattr(command, "train_step", step)


def comparable(run):
    timings = ("tokens_per_second", "seconds", "val_seconds", "peak_memory_mib")
    return [{k: v for k, v in r.items() if k not in timings} for r in read_metrics(run / "metrics.jsonl")]


def tensors_in(folder):
    """What a checkpoint's folder holds, by name."""
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    _load_state_dict(state, storage_reader=torch.distributed.checkpoint.FileSystemReader(folder),
                     planner=_EmptyStateDictLoadPlanner(), no_dist=True)  # fmt: skip
    return state


@pytest.mark.parametrize("after", [1, 3])
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(after, place, undisturbed, tmp_path, call, monkeypatch):
    argv = words(place, tmp_path, "--method", "logn_p_rope", "--name", "run", "--resume", "auto")
    with monkeypatch.context() as context:
        stop_after(context, after)
        code, said, _ = call(argv)
    run, whole = tmp_path / "run", undisturbed / "run"
    assert code == 75 and f"SIGTERM: stopped after step {after}" in said
    assert (run / "interrupted").read_text() == "SIGTERM\n" and not (run / "summary.json").exists()
    code, said, _ = call(argv)
    assert code == 0 and f"resumed at step {after}" in said
    assert comparable(run) == comparable(whole)
    newest = [f"step_{STEPS:06d}", f"step_{STEPS:06d}.pt"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-2:] == newest
    ours, theirs = (tensors_in(folder / "checkpoints" / newest[0]) for folder in (run, whole))
    assert ours.keys() == theirs.keys() and len(ours) > 60
    for name, tensor in ours.items():
        assert torch.equal(as_plain(tensor), as_plain(theirs[name])), name
    code, said, _ = call(argv)
    assert code == 0 and "is finished" in said


def as_plain(tensor):
    return tensor.codes.float() * tensor.scale.repeat_interleave(tensor.block_size).view(tensor.shape) \
        if hasattr(tensor, "codes") else tensor


@pytest.mark.slow
def test_two_processes_with_sharded_weights_equal_one_and_their_checkpoints_are_read_by_one(place, tmp_path, call):
    argv = words(place, tmp_path, "--method", "logn_p_rope", "--dtype", "float32", "--save_model", "--name")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m",
                           "scripts.continue_pretraining", *argv, "two"], cwd=ROOT, text=True, capture_output=True,
                          env=os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert call([*argv, "one"])[0] == 0
    two, one = (comparable(tmp_path / name) for name in ("two", "one"))
    assert_close_records(two, one)
    assert_saved(place, tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "both")
    (tmp_path / "both" / "summary.json").unlink()
    (tmp_path / "both" / "checkpoints" / f"step_{STEPS:06d}.pt").unlink()
    code, said, error = call([*argv, "both", "--resume", "auto"])
    assert code == 0 and "resumed at step 2" in said, error
    assert_close_records(comparable(tmp_path / "both"), two)


def assert_close_records(ours, theirs):
    """Float32, but sums in another order, and blocks of 8 bits that begin elsewhere: 1e-4 nats after four steps."""
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    for a, b in zip(ours, theirs):
        if "val_loss" in a:
            assert a["val_loss"] == pytest.approx(b["val_loss"], abs=1e-4)
        else:
            assert a["train_loss"] == pytest.approx(b["train_loss"], abs=1e-4)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


# ---- damage and malice -----------------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(undisturbed, tmp_path):
    """A copy of the run that has to go on from its checkpoint; the checkpoint's folder."""
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}"


def test_damaged_checkpoint_is_named_and_the_one_before_it_serves(place, unfinished, undisturbed, tmp_path, call):
    argv = words(place, tmp_path, "--method", "logn_p_rope", "--name", "run", "--resume", "auto")
    (file,) = unfinished.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = refusal(call(argv))
    assert f"{unfinished} is damaged ({file.name}): delete {unfinished}.pt" in said
    unfinished.with_suffix(".pt").unlink()
    assert call(argv)[0] == 0 and comparable(tmp_path / "run") == comparable(undisturbed / "run")


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", [".metadata", "*.distcp"])
def test_malicious_checkpoint_runs_no_code(where, place, unfinished, tmp_path, call):
    """Its digests are right: whoever wrote it wrote these too."""
    mark = tmp_path / "harm"
    (file,) = unfinished.glob(where)
    harm = pickle.dumps(Malice(mark))
    if where == ".metadata":
        file.write_bytes(harm)
    else:
        content = bytearray(file.read_bytes())
        for part in pickle.loads((unfinished / ".metadata").read_bytes()).storage_data.values():
            content[part.offset : part.offset + len(harm)] = harm  # where torch.load begins to read
        file.write_bytes(content)
    state = load_checkpoint(unfinished.with_suffix(".pt"))
    torch.save(state | dict(files=command.checkpoint.digests(unfinished)), unfinished.with_suffix(".pt"))
    said = refusal(call(words(place, tmp_path, "--method", "logn_p_rope", "--name", "run", "--resume", "auto")))
    assert str(unfinished) in said and not mark.exists()
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(Malice(mark)))
    assert mark.exists()  # it would have


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_processes_that_would_have_unequal_shares_are_refused():
    settings = Settings(model="model", data="data")
    assert command.sequences_at_once(settings, 8) == 2  # 16 sequences of 4096, at most 8192 tokens at once
    for processes in (3, 32):
        with pytest.raises(ValueError, match=f"16 sequences of a step cannot be shared evenly by {processes} "):
            command.sequences_at_once(settings, processes)


def test_tokenizer_of_another_model_is_refused(place, tmp_path, call):
    shutil.copytree(place / "model", tmp_path / "other")
    save_tokenizer(tmp_path / "other", vocab_size=290)
    said = refusal(call(words(place, tmp_path / "runs", model=tmp_path / "other")))
    assert "was made with another tokenizer" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "changes, words_of_error",
    [
        (dict(vocab_size=128_256), "has a vocabulary of 128256, and tokens of shards are 16 bits"),
        (dict(model_type="gemma2", final_logit_softcapping=30.0), "caps its logits"),
        (dict(model_type="mistral"), "of the family mistral, which is not supported"),
        (dict(hidden_size=2**15, intermediate_size=2**17, num_attention_heads=64, num_hidden_layers=99), "GiB free"),
    ],
)
def test_model_that_cannot_be_trained_is_refused_by_its_configuration(changes, words_of_error, place, tmp_path, call):
    """Nothing of its weights is there to be read."""
    shutil.copytree(place / "model", tmp_path / "other", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((place / "model" / "config.json").read_text()) | changes
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    said = refusal(call(words(place, tmp_path / "runs", model=tmp_path / "other")))
    assert words_of_error in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "more, words_of_error",
    [
        (["--method", "ropes"], "there is no method ropes"),
        (["--method", "rope", "--method_options", "tau", "3"], "no method of rope has an option tau"),
        (["--method", "all", "--name", "x"], "--name is for one run"),
        (["--methods", "rope"], "unknown field --methods; did you mean"),
        (["--val_tokens", "1000"], "validation length 64 does not divide val_tokens 1000"),
        (["--batch_tokens", "100"], "train_length 64 does not divide batch_tokens 100"),
        (["--val_tokens", str(2**20)], "val_tokens 1048576 needs"),
        (["--model", "x"], "the model is the first argument"),
        (["--data", "nowhere"], "nowhere: no such data folder"),
    ],
)
def test_wrong_usage_is_one_line(more, words_of_error, place, tmp_path, call):
    assert words_of_error in refusal(call(words(place, tmp_path / "runs", *more)))
    assert not (tmp_path / "runs").exists()


def test_folder_of_another_run_is_refused(place, unfinished, tmp_path, call):
    argv = words(place, tmp_path, "--method", "logn_p_rope", "--name", "run")
    assert "exists: choose another --name" in refusal(call(argv))
    assert "(lr 0.001 -> 0.01)" in refusal(call([*argv, "--resume", "auto", "--lr", "0.01"]))


def test_help_lists_the_fields(call):
    code, said, _ = call(["--help"])
    assert code == 0 and "--val_tokens INT" in said and "--model" not in said


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counted_memory_is_what_tensors_have(dtype, place):
    own = settings(place, method="nope", dtype=dtype, steps=1)
    model = build(own, HERE)
    train_step(model, [tuple(part[:2] for part in validation_tokens(place, 64))], HERE)
    parameters = [*model.parameters()]
    counted = count_memory(read_config(own.model), own)
    assert counted["weights"] == sum(p.nbytes for p in parameters)
    assert counted["gradients"] == sum(p.grad.nbytes for p in parameters)
    states = [x for x in AdamW8bit(model, own, HERE, compiled=False).state().values() if x.dim()]
    parts = [part for x in states for part in ((x.codes, x.scale, x.qmap) if hasattr(x, "codes") else (x,))]
    assert counted["optimizer state"] == sum(part.nbytes for part in parts)


def test_counted_activations_are_at_least_those_of_a_step(monkeypatch):
    """Real steps on fake tensors, which have no values for transformers to look for packed sequences in."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    sizes = dict(vocab_size=2000, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
                 num_key_value_heads=4, max_position_embeddings=1024)  # fmt: skip
    ops = torch.ops.scale_invariant
    workspace = dict.fromkeys((ops.loss_and_gradients.default, ops.token_losses.default), loss_workspace)
    own = Settings("", steps=1, train_length=1024, micro_batch_tokens=4096, batch_tokens=4096, val_lengths=(8192,),
                   val_tokens=8192, dtype="float32")  # fmt: skip
    with FakeTensorMode(), StorageCount(workspace) as memory:
        model = WithLoss(convert(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), "rope"))
        model.model.activation_checkpointing_enable()
        tokens = torch.zeros(4, 1024, dtype=torch.int64)
        model.train()(tokens, tokens).backward()
        held = memory.live
        memory.start()
        model(tokens, tokens).backward()
        training = memory.peak - held
        memory.start()
        long = torch.zeros(1, 8192, dtype=torch.int64)
        with torch.no_grad():
            model.eval()(long, long, per_token=True)
        validation = memory.peak - held
    counted = count_memory(model.model.config, own)
    parts = [counted["activations of training"], counted["activations of validation, beyond those"]]
    assert training <= parts[0] <= 1.5 * training
    assert validation <= sum(parts) <= 1.5 * max(training, validation)


def test_llama_2_7b_fits_one_gpu_of_80_gb(tmp_path, call):
    """The published sizes, on the meta device."""
    sizes = dict(vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32,
                 num_attention_heads=32, max_position_embeddings=4096)  # fmt: skip
    transformers.LlamaConfig(**sizes).save_pretrained(tmp_path)
    code, said, _ = call([str(tmp_path), "--dry_run"])
    assert code == 0 and "6,738,415,616 parameters in bfloat16" in said
    config = read_config(tmp_path)
    one = count_memory(config, Settings(str(tmp_path)))
    assert one["weights"] == one["gradients"] == 2 * 6_738_415_616
    assert sum(one.values()) < 60e9
    assert sum(count_memory(config, Settings(str(tmp_path)), processes=8).values()) < 24e9


# ---- text in a model's own tokens ------------------------------------------------------------------------------------


def test_shards_have_the_models_tokens_and_each_document_begins_with_its_first(place):
    manifest = read_manifest(place / "data")
    assert manifest["vocab_size"] == len(transformers.AutoTokenizer.from_pretrained(place / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "model")
    stream = open_split(place / "data", "val", VOCAB)
    documents = "".join(tokenizer.decode([*map(int, part)]) for part in documents_of(stream))
    assert all(text.strip() in documents for text in (p.read_text() for p in val_files(place, documents)))
    ours = load_tokenizer(place / "data")
    assert ours.eot == tokenizer.bos_token_id == 1 and ours.encode("<s>") != [1]  # what is written is plain text
    assert ours.encode("ab cd") == tokenizer.encode("ab cd", add_special_tokens=False)


def documents_of(stream):
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == 1)
    assert starts[0] == 0 and (np.diff(starts) > 1).all()
    return [part[1:] for part in np.split(tokens, starts[1:])]


def val_files(place, documents):
    files = [path for path in (place / "text").iterdir() if path.read_text()[:40].strip() in documents]
    assert 5 < len(files) < 40
    return files


def test_model_without_a_first_token_is_refused(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no bos_token"):
        load_tokenizer(str(tmp_path / "model"))


# ---- all ten ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ten_methods_of_the_papers_table(place, tmp_path, call, monkeypatch):
    runs = tmp_path / "continued"
    argv = words(place, runs, "--method", "all", "--rescale", "head", "--resume", "auto", steps=2)
    code, said, error = call(argv)
    assert code == 0, error
    for method in PAPER:
        summary = json.loads((runs / f"model-{method}" / "summary.json").read_text())
        assert summary["steps"] == 2 and summary["rescale"] == "head"
        for losses in (summary["val_loss_before"], summary["val_loss"]):
            assert tuple(losses) == LENGTHS and np.isfinite([*losses.values()]).all()
        assert summary["scores_std_before"] == pytest.approx([1, 1], rel=0.02)
        assert all(summary["val_loss"][n] < summary["val_loss_before"][n] for n in LENGTHS)
    code, said, _ = call(argv)
    assert code == 0 and said.count("is finished") == 10
    assert set(NOT_TRAINED) < set(PAPER) and len(PAPER) == 10
    out = ["table_llama", "--runs-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["reproduce", *out])
    with pytest.raises(SystemExit) as end:
        reproduce()
    page = (tmp_path / "out" / "table_llama.md").read_text()
    assert end.value.code == 1 and "Missing" in page  # each was rescaled, and two were trained: none is the paper's
    assert page.count(", scores rescaled by head") == 10 and "models used" not in page
