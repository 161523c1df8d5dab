"""Whole runs of train_gpt.py: their files, bit-exact resume, one process against several, users' mistakes."""

import gc
import itertools
import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from commands import ROOT, fails, names, parametrize, python, read_json, slow, succeeds, table, unchanged
from pytest import approx
from test_optim import reference_muon
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import train_gpt
from configs.command_line import read_config
from data.loader import TrainLoader
from data.shard_writer import ShardWriter
from data.shards import open_split
from model.gpt import GPT
from model.scores import attention_by_layer
from optim.muon import Muon
from runtime.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from runtime.metrics import read_metrics
from runtime.run import Run

FIELDS = "--name run --vocab_size 64 --num_layers 2 --num_heads 2 --model_dim 32 --train_length 16 --batch_tokens 128 "
FIELDS += "--micro_batch_tokens 64 --steps 20 --cooldown_steps 6 --val_lengths 16 64 --val_tokens 256 "
FIELDS += "--length_schedule --val_copy_gaps --val_every 5 --save_every 5 --compile off --device cpu --dtype float32 "
TIMES = {"seconds", "val_seconds", "tokens_per_second", "peak_memory_mib"}


# ---- data and ways to run --------------------------------------------------------------------------------------------


def make_data(folder, seed=0):
    """Write text of a Markov chain, 3 successors a token. Training shards have 640, 640 and 620 tokens.

    With 128 tokens a step, the first shard ends with step 5, and the stream in the middle of step 15.
    """
    rng = np.random.default_rng(seed)
    successors = rng.permuted(np.tile(np.arange(64), (64, 1)), axis=1)[:, :3]
    tokens = [0]
    for choice in rng.choice(3, size=2699, p=[0.8, 0.15, 0.05]):
        tokens.append(successors[tokens[-1], choice])
    return write_shards(folder, tokens[:1900], tokens[1900:], shard_tokens=640)


def write_shards(folder, train=(), val=(), tokenizer="none", vocab_size=64, **options):
    """Write shards of these tokens. Return their folder."""
    with ShardWriter(folder, "chain", tokenizer=tokenizer, vocab_size=vocab_size, **options) as writer:
        writer.write("train", train)
        writer.write("val", val)
        writer.close()
    return folder


def validation_tokens(data):
    stream = open_split(data, "val", 64)
    return stream.read(0, len(stream))


def arguments(data, runs, more=""):
    """Return the command line of a small run. A field in `more` replaces the same field before it."""
    return f"quickstart {FIELDS} --data_dir {data} --runs_dir {runs} {more}".split()


def train(data, runs, more="", start=(), **variables):
    """Train in a new process, or with TWO_RANKS as `start`, in two."""
    python(*start, "train_gpt.py", *arguments(data, runs, more), **variables)
    return runs / "run"


def train_here(data, runs, more=""):
    succeeds(train_gpt.main, *arguments(data, runs, more))
    return runs / "run"


def rewound(folder, runs):
    """Copy a finished run to `runs`, without its last checkpoint, as if it had been killed. Return the copy."""
    copy = shutil.copytree(folder, runs / "run")
    (copy / "summary.json").unlink()
    newest(copy).unlink()
    return copy


def newest(folder):
    return latest_checkpoint(folder / "checkpoints")


def newest_state(folder):
    return load_checkpoint(newest(folder))


# ---- reading a run ---------------------------------------------------------------------------------------------------


def steps_and_validations(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [r for r in records if "train_loss" in r], [r for r in records if "val_loss" in r]


def numbers(folder):
    """Return the records and the summary of a run, without times."""
    records = [*read_metrics(folder / "metrics.jsonl"), read_json(folder / "summary.json")]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


assert_same_numbers = partial(assert_close, rtol=0, atol=0)  # through dicts and lists


def assert_same_run(folder, reference):
    """Assert the same weights, optimizer state, records and summary, but for times."""
    for part in ("model", "optimizers"):
        assert_same_numbers(newest_state(folder)[part], newest_state(reference)[part])
    assert newest(folder).name == newest(reference).name
    assert numbers(folder) == numbers(reference)


def assert_close_run(folder, reference, tolerance=1e-4):
    """Assert the same losses of training and validation, up to the tolerance in nats."""
    tolerances = dict(step=0, train_loss=tolerance, val_loss=tolerance, max_logit=0.01)  # a maximum is not as smooth
    ours, expected = (read_metrics(f / "metrics.jsonl") for f in (folder, reference))
    for record, other in zip(ours, expected, strict=True):
        for key, allowed in tolerances.items():
            assert record.get(key) == approx(other.get(key), abs=allowed)


@torch.no_grad()
def plain_losses(model, rows):
    """Return the losses of tokens (sequences, length + 1) but the first, one sequence at a time, by the logits."""
    losses = []
    for row in torch.as_tensor(rows.astype(np.int64)):
        logits = model(row[None, :-1])[0].double()  # (length, V)
        losses.append(cross_entropy(logits, row[1:], reduction="none"))
    return torch.stack(losses)


def trained_model(folder, data, method="scale_invariant_p_rope"):
    """Return the model of the last checkpoint, with the weights that a method has."""
    model = GPT(read_config(arguments(data, folder, f"--method {method}")), torch.float32)
    model.load_state_dict(newest_state(folder)["model"], strict=False)
    return model


def sequences(text, length):
    """Return the sequences of a text with one more token each, (sequences, length + 1)."""
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length]


def validation_losses(folder, data, length, num_tokens):
    """Return the losses of the last checkpoint on the first tokens of the validation text, (sequences, length)."""
    return plain_losses(trained_model(folder, data), sequences(validation_tokens(data), length)[: num_tokens // length])


# ---- files and records of a run --------------------------------------------------------------------------------------


def test_files_of_a_run(finished, data):
    assert names(finished) == "checkpoints config.json data.json lock log.txt metrics.jsonl summary.json".split()
    assert names(finished / "checkpoints") == ["step_000015.pt", "step_000020.pt"]
    config = read_config(arguments(data, finished.parent))
    stored = read_json(finished / "config.json")
    assert stored.pop("hash") and stored == json.loads(json.dumps(vars(config)))
    log = (finished / "log.txt").read_text()
    for source in "train_gpt.py model/gpt.py model/methods/scale_invariant.py optim/muon.py".split():
        assert (ROOT / source).read_text() in log
    assert f"\nval_loss/64: {read_json(finished / 'summary.json')['val_loss']['64']}\n" in log
    parts = "progress config model optimizers fingerprint tokenizer".split()
    assert [*newest_state(finished)] == parts


def test_record_of_every_step_and_validation(finished):
    steps, validations = steps_and_validations(finished)
    assert steps[0]["train_loss"] == approx(math.log(64), abs=1e-5)  # the head starts at zero
    keys = {"step", "tokens", "train_loss", "grad_norm", "lr"} | TIMES - {"val_seconds"}
    peaks = dict(matrices=0.02, embedding=0.3, head=0.002)
    for step, record in zip(range(1, 21), steps, strict=True):
        assert record.keys() == keys and record["step"] == step and record["tokens"] == 128 * step
        assert 0 < record["grad_norm"] < 100 and record["tokens_per_second"] > 0
        factor = min(1, (21 - step) / 6)
        assert record["lr"] == approx({name: peak * factor for name, peak in peaks.items()})

    keys = "step tokens val_tokens val_loss val_loss_by_position max_logit attention_entropy method_parameters"
    for step, record in zip((0, 5, 10, 15, 20), validations, strict=True):
        assert {*keys.split(), "val_seconds"} <= record.keys() and ("val_loss_by_block" in record) == (step == 20)
        assert record["step"] == step and record["tokens"] == 128 * step
        assert record["val_tokens"] == {"16": 256, "64": 256}


def test_summary_and_data(data, finished):
    summary, kept = (read_json(finished / name) for name in ("summary.json", "data.json"))
    assert summary["val_loss"] == steps_and_validations(finished)[1][-1]["val_loss"]
    assert summary["val_tokens"] == {"16": 256, "64": 256} and summary["steps"] == 20
    assert summary["parameters"] == 2 * 64 * 32 + 2 * 12 * 32**2  # embedding and head, two blocks
    assert kept["tokens"] == summary["tokens"] == 2560
    assert kept["distinct_tokens"] == summary["distinct_tokens"] == 1900
    assert kept["train"] == summary["data"] == open_split(data, "train", 64).fingerprint()
    assert kept["validation"] == open_split(data, "val", 64).fingerprint(256) and kept["tokenizer"] == "none"


def test_the_weights_of_one_training_are_validated_as_others(data, tmp_path):
    """Every validation has them. The last losses equal a run that was trained as the other method."""
    folder = train_here(data, tmp_path / "one", "--method rope --validate_as rope_ntk yarn")
    _, validations = steps_and_validations(folder)
    assert len(validations) == 5 and all([*r["val_loss_as"]] == ["rope_ntk", "yarn"] for r in validations)
    summary = read_json(folder / "summary.json")
    assert summary["val_loss_as"] == validations[-1]["val_loss_as"]
    for other, losses in summary["val_loss_as"].items():
        alone = read_json(train_here(data, tmp_path / other, f"--method {other}") / "summary.json")
        assert losses == approx(alone["val_loss"], rel=1e-6)
        assert losses["16"] == summary["val_loss"]["16"] and losses["64"] != summary["val_loss"]["64"]


@parametrize("length", [16, 64])
def test_validation_equals_a_plain_loop(finished, data, length):
    """Losses by position are means over 1, 1, 2, 4, 8, ... positions."""
    losses = validation_losses(finished, data, length, 256)  # (256 / length, length)
    octaves = losses.split([1, 1, 2, 4, 8, 16, 32][: length.bit_length()], dim=1)
    expected = dict(
        val_loss=losses.mean().item(),
        val_loss_by_position=[part.mean().item() for part in octaves],
        val_loss_by_block=losses.view(4, -1).mean(dim=1).tolist(),  # 256 tokens are 4 blocks of 64
    )
    validation = steps_and_validations(finished)[1][-1]
    for key, value in expected.items():  # lists have five decimals
        assert validation[key][str(length)] == approx(value, abs=1e-5 if key == "val_loss" else 2e-5), key


def test_steps_are_plain_adam_and_muon_with_the_constants_of_the_fields(data, tmp_path):
    """From the weights of --seed, on batches in the order of --data_seed, with one gradient of the whole batch."""
    more = "--method logn_rope --seed 5 --data_seed 2 --muon_momentum 0.5 --adam_betas 0.6 0.7 --adam_eps 1e-3 "
    more += "--steps 3 --cooldown_steps 2 --val_every 0"
    folder = train_here(data, tmp_path, more)
    torch.manual_seed(5)
    model = GPT(read_config(arguments(data, tmp_path, more)), torch.float32)
    matrices, groups = [], [
        dict(params=[model.embedding.weight], peak=0.3),
        dict(params=[model.head], peak=0.002),
        dict(params=[], peak=0.002),
    ]
    for name, p in model.blocks.named_parameters():
        (groups[2]["params"] if ".method." in name else matrices).append(p)
    adam = torch.optim.Adam(groups, betas=(0.6, 0.7), eps=1e-3)
    buffers, text = [torch.zeros_like(p) for p in matrices], open_split(data, "train", 64)
    steps, _ = steps_and_validations(folder)
    batches = np.random.default_rng(2).permutation(3)  # 2, 0, 1
    for batch, factor, record in zip(batches, (1, 1, 0.5), steps, strict=True):
        rows = torch.from_numpy(sequences(text.read(128 * batch, 129, 64), 16).astype("int64"))
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item()
        assert record["train_loss"] == approx(loss.item(), abs=1e-5)
        assert record["grad_norm"] == approx(norm, rel=1e-4)
        for group in adam.param_groups:
            group["lr"] = factor * group["peak"]
        adam.step()
        for p, buffer in zip(matrices, buffers):
            reference_muon(p, p.grad, buffer, lr=0.02 * factor, momentum=0.5)
        model.zero_grad()
    assert_close(newest_state(folder)["model"], {**model.state_dict()}, rtol=0, atol=1e-5)


def test_parameters_of_a_method_are_recorded(data, tmp_path):
    folder = train_here(data, tmp_path, "--method logn_rope --steps 3 --cooldown_steps 0 --val_every 0 --save_every 0")
    steps, (validation,) = steps_and_validations(folder)
    weights = newest_state(folder)["model"]
    scales = {name: weight.tolist() for name, weight in weights.items() if ".method." in name}
    assert validation["method_parameters"] == scales
    assert [len(values) for values in scales.values()] == [2, 2]  # one number a head, in two layers
    assert steps[-1]["lr"]["scalars"] == 0.002


def test_largest_logits_are_of_the_validation_text(data, finished):
    """They are of 2,048 tokens, more than the text has. test_logits.py compares the function with dense logits."""
    tokens, model = np.resize(validation_tokens(data), (128, 16)), trained_model(finished, data)
    found = attention_by_layer(model, torch.from_numpy(tokens).long(), model.plan(16))
    _, validations = steps_and_validations(finished)
    assert validations[-1]["max_logit"] == approx(found["max_logit"], rel=1e-4)


# ---- resuming --------------------------------------------------------------------------------------------------------


SCHEDULE = "--length_schedule 4 7 8 9 --micro_batch_tokens 32 --save_every 10 "  # 16 tokens from step 16 on


def assert_resumes(data, runs, whole, more=""):
    """Assert that a run resumed from an older checkpoint ends as the whole run."""
    folder = rewound(whole, runs)
    before = newest_state(folder)["progress"]["seconds"]
    train_here(data, runs, f"{more} --resume auto")
    assert_same_run(folder, whole)
    assert read_json(folder / "summary.json")["seconds"] > before > 0


@parametrize("more", ["", SCHEDULE, "--val_profile fast --val_every 2"])
def test_resumes_bit_for_bit_and_random_numbers_go_on(data, tmp_path, monkeypatch, more):
    """Our methods draw no random numbers in a step, but a user's method may."""
    drawn, log_step = [], Run.log_step

    def draw_and_log(*args):
        drawn.append(torch.rand(()).item())
        log_step(*args)
        assert gc.get_freeze_count() > 0  # no collection in a step

    monkeypatch.setattr(Run, "log_step", draw_and_log)
    assert_resumes(data, tmp_path / "resumed", train_here(data, tmp_path / "whole", more), more)
    again = len(drawn) - 20
    assert 0 < again < 20 and drawn[20:] == drawn[20 - again : 20] and gc.get_freeze_count() == 0


@slow
def test_resumes_bit_for_bit_when_compiled(data, tmp_path):
    """The resumed run compiles its graphs anew. It does not take them from the cache of the first run."""
    small = "--compile on --num_layers 1 --val_lengths 16"
    anew = dict(TORCHINDUCTOR_FX_GRAPH_CACHE="0", TORCHINDUCTOR_AUTOGRAD_CACHE="0")
    whole = train(data, tmp_path / "whole", small)
    rewound(whole, tmp_path)
    assert_same_run(train(data, tmp_path, f"{small} --resume auto", **anew), whole)


@parametrize("owner, name, call, saved", [
    (TrainLoader, "__next__", 8, 7),  # between two updates
    (Muon, "step", 8, 5),  # Adam's parameters are updated already
])
def test_an_error_between_updates_leaves_the_last_whole_step(owner, name, call, saved, data, finished, tmp_path):
    function, calls = getattr(owner, name), itertools.count(1)

    def fail_at_last(*args, **options):
        assert next(calls) < call, "planted"
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="planted"):
        patch.setattr(owner, name, fail_at_last)
        train_here(data, tmp_path)
    assert newest_state(tmp_path / "run")["progress"]["step"] == saved
    assert_same_run(train_here(data, tmp_path, "--resume auto"), finished)


def test_a_run_is_extended_unless_its_learning_rate_has_cooled_down(data, copied, tmp_path, capsys):
    short = train_here(data, tmp_path / "short", "--cooldown_steps 0 --val_every 0")
    longer = "--steps 30 --val_every 0"
    train_here(data, tmp_path / "short", f"{longer} --resume auto")
    assert_same_run(short, train_here(data, tmp_path / "long", longer))
    other = train_here(data, tmp_path / "other", "--cooldown_steps 0 --val_every 0 --data_seed 1")  # more steps reorder
    for folder, seed in ((copied, 0), (other, 1)):
        argv = arguments(data, folder.parent, f"{longer} --data_seed {seed} --resume auto")
        with unchanged(folder):
            fails(capsys, f"--init_from {folder}", train_gpt.main, *argv)


def test_finished_run_is_not_repeated(data, copied, capsys):
    with unchanged(copied):
        train_here(data, copied.parent, "--resume auto")
    shutil.rmtree(copied / "checkpoints")
    train_here(data, copied.parent, "--resume auto")
    fails(capsys, "steps 20", train_gpt.main, *arguments(data, copied.parent, "--resume auto --steps 30"))


# ---- micro-batches, and shorter sequences first ----------------------------------------------------------------------


def test_losses_do_not_depend_on_the_micro_batch(data, finished, tmp_path):
    """Three micro-batches, the last one smaller."""
    assert_close_run(train_here(data, tmp_path, "--micro_batch_tokens 48"), finished)


def test_a_length_schedule_trains_on_the_same_tokens(data, finished, tmp_path):
    folder = train_here(data, tmp_path, SCHEDULE)
    first, second = (steps_and_validations(f)[0] for f in (folder, finished))
    assert [r["tokens"] for r in first] == [r["tokens"] for r in second]
    assert first[0]["train_loss"] == approx(second[0]["train_loss"], rel=1e-5)  # layers add 0 at first
    assert first[5]["grad_norm"] != approx(second[5]["grad_norm"], rel=1e-5)  # less context


# ---- mistakes of a user ----------------------------------------------------------------------------------------------


@table("more, named", """
    --data_dir nowhere                     | nowhere
    --vocab_size 32                        | vocab_size
    --method scale_invarient_rope          | scale_invariant_rope
    --method rope --method_options bass 2  | base
    --muon_rl 0.1                          | --muon_lr
    --train_length 24                      | train_length
    --val_lengths 16 48                    | 48
    --val_tokens 1024                      | 768
    --val_copy_gaps 1000000                | 1000000
    --init_from nowhere                    | --init_from
    --attention_backend flex --val_every 0 | attention_backend
""")
def test_wrong_field_is_one_line_and_no_run_folder(data, tmp_path, capsys, more, named):
    """The validation text has 768 tokens."""
    fails(capsys, named, train_gpt.main, *arguments(data, tmp_path, more))
    assert not (tmp_path / "run").exists()


@table("more, named", """
                                                   | --resume auto
    --resume auto --muon_lr 0.03 --seed 1 --keep 3 | seed 0
    --resume auto --muon_lr 0.03 --seed 1 --keep 3 | muon_lr 0.02
    --resume auto --data_dir {other}               | other
""")
def test_a_folder_of_another_run_is_refused_and_left_alone(data, copied, tmp_path, capsys, more, named):
    """Another number of kept checkpoints is no difference, because it changes nothing that is computed."""
    other = make_data(tmp_path / "other", seed=1)
    with unchanged(copied):
        error = fails(capsys, named, train_gpt.main, *arguments(data, copied.parent, more.format(other=other)))
    assert "keep" not in error


# ---- weights of another run ------------------------------------------------------------------------------------------


@parametrize("method", ["scale_invariant_p_rope", "nope", "logn_p_rope"])
def test_a_run_from_another_one_begins_with_its_weights_on_the_tokens_after_it(data, finished, tmp_path, method):
    folder, more = continued(finished, 20, data, tmp_path, method)
    stream = open_split(data, "train", 64)
    used = read_json(folder / "data.json")["train"]
    assert used == stream.fingerprint((20 + 6) * 128) != stream.fingerprint(6 * 128)
    assert_resumes(data, tmp_path / "resumed", folder, more)


def continued(source, steps, data, runs, method="scale_invariant_p_rope"):
    """Train from a run, and assert that this begins after the tokens of these steps. Return folder and fields."""
    more = f"--init_from {source} --method {method} --steps 6 --cooldown_steps 0 --val_every 0 --save_every 3"
    folder = train_here(data, runs, more)
    text = open_split(data, "train", 64).read(steps * 128, 129, 64)
    expected = plain_losses(trained_model(source, data, method), sequences(text, 16)).mean().item()
    assert steps_and_validations(folder)[0][0]["train_loss"] == approx(expected, abs=1e-4) and expected < 3.5
    return folder, more


def test_a_run_continues_after_all_that_its_sources_may_have_read(data, finished, tmp_path):
    """An unfinished run has read some batches of all its tokens, if --data_seed changed their order."""
    second, _ = continued(finished, 20, data, tmp_path / "second")
    continued(second, 26, data, tmp_path / "third")
    reordered = rewound(train_here(data, tmp_path / "whole", "--data_seed 1"), tmp_path / "stopped")
    continued(reordered, 20, data, tmp_path / "after")


def test_training_within_documents_takes_their_first_token_from_the_validation_text(data, finished, tmp_path):
    """The training text may begin with a copy row."""
    more = f"--init_from {finished} --document_mask train --steps 1 --cooldown_steps 0 --val_every 0"
    record = steps_and_validations(train_here(data, tmp_path, more))[0][0]
    train, validation = (open_split(data, split, 64) for split in ("train", "val"))
    assert train.document_token != validation.document_token
    rows = torch.from_numpy(sequences(train.read(20 * 128, 129, 64), 16).astype("int64"))
    model = trained_model(finished, data)
    plan = model.plan(16, document_token=validation.document_token)
    expected = model(rows[:, :-1], rows[:, 1:], plan=plan).item()
    assert record["train_loss"] == approx(expected, abs=1e-5)


@slow
def test_a_run_may_start_from_a_method_whose_parameters_have_the_same_names(data, tmp_path):
    short = "--steps 1 --cooldown_steps 0"
    first = train_here(data, tmp_path / "wall", f"--method wall {short}")
    folder = train_here(data, tmp_path, f"--method grape_ap --init_from {first} {short}")
    assert (folder / "summary.json").exists()


def test_scale_invariant_attention_is_calibrated_for_a_trained_model_and_saved(data, finished, tmp_path):
    more = f"--init_from {finished} --method_options learn_moments True --steps 0 --cooldown_steps 0"
    folder = train_here(data, tmp_path, more)
    state, source = (dict(newest_state(run)["model"]) for run in (folder, finished))
    moments = [state.pop(name) for name in [*state] if name.endswith(("mean", "log_deviation"))]
    assert names(folder / "checkpoints") == ["step_000000.pt"]
    assert len(moments) == 4 and all(x.all() for x in moments)
    assert_same_numbers(state, source)
    assert len(steps_and_validations(folder)[1]) == 1 and (folder / "summary.json").exists()


def test_weights_of_another_shape_or_tokenizer_are_refused(data, copied, tmp_path, capsys):
    save_checkpoint(copied / "checkpoints", 21, newest_state(copied) | {"tokenizer": "another"})
    for more, named in (("--num_layers 3", "num_layers"), ("", "tokenizer")):
        argv = arguments(data, tmp_path / "new", f"--init_from {copied} {more}")
        assert "step_000021.pt" in fails(capsys, named, train_gpt.main, *argv)
        assert not (tmp_path / "new/run").exists()


@parametrize("part, name", [(None, "progress"), ("model", "embedding.weight")])
def test_checkpoints_of_other_commands_are_refused(data, copied, tmp_path, capsys, part, name):
    state = newest_state(copied)
    del (state[part] if part else state)[name]
    save_checkpoint(copied / "checkpoints", 21, state)
    fails(capsys, "step_000021.pt", train_gpt.main, *arguments(data, tmp_path / "new", f"--init_from {copied}"))


def test_a_run_whose_last_update_spoils_the_weights_does_not_finish(data, tmp_path, capsys):
    more = "--steps 1 --cooldown_steps 0 --head_lr 1e38 --val_lengths 16"
    fails(capsys, "step", train_gpt.main, *arguments(data, tmp_path, more))
    assert not (tmp_path / "run/summary.json").exists()
