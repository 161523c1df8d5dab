# ruff: noqa: F811 (fixtures)
"""Runs whose attention method changes on the way: the weights go on, resuming is bit for bit, and whatever reads a
checkpoint runs it as the method of its step."""

import math
import re
import shutil

import numpy as np
import pytest
import torch
from test_train import (  # noqa: F401
    arguments,
    assert_close_run,
    assert_same_run,
    data,
    error_of,
    here,
    one_thread,
    read_json,
    rewound,
    steps_and_validations,
    train_here,
    train_on,
    validation_tokens,
    without_times,
)

from configs.command_line import read_config
from configs.config import with_changes
from configs.presets import preset
from model.decoding import greedy_decode
from runtime.build import build_model, layer_methods
from runtime.device import compile_problem
from scripts import evaluate
from scripts.evaluate import load_run

OFTEN = dict(save_every=4, keep=9, val_every=4, muon_lr=0.1)  # a rate at which the methods soon differ
SWITCH = dict(method="rope", switch_method_at=0.4)  # then "nope", from step 8 of 20 on


@pytest.fixture(scope="module")
def switched(data, tmp_path_factory):
    """A run of two methods, uninterrupted. Not to be written to."""
    return train_here(data, tmp_path_factory.mktemp("switched"), **SWITCH, **OFTEN)


def test_a_second_method_takes_over_the_weights(data, switched, tmp_path):
    """Until then it is the run of the first; then its losses are the second's, its learning rates as they would be."""
    first = train_here(data, tmp_path, method="rope", **OFTEN)
    (steps, validations), (same_steps, same_validations) = map(steps_and_validations, (switched, first))
    assert [without_times(r) for r in steps[:8]] == [without_times(r) for r in same_steps[:8]]
    assert [without_times(r) for r in validations[:2]] == [without_times(r) for r in same_validations[:2]]
    assert [r["lr"] for r in steps] == [r["lr"] for r in same_steps]
    config = read_config(arguments(data, switched.parent, method="nope"))
    model = build_model(config, torch.float32)
    model.load_state_dict(torch.load(switched / "checkpoints" / "step_000008.pt")["model"])
    train = np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in sorted(data.glob("*_train_*.bin"))])
    tokens = torch.from_numpy(train.astype(np.int64))[8 * 128 : 9 * 128 + 1]
    loss = model(tokens[:-1].view(8, 16), tokens[1:].view(8, 16)).item()
    assert steps[8]["train_loss"] == pytest.approx(loss, abs=1e-6)
    assert abs(same_steps[8]["train_loss"] - loss) > 1e-5
    tokens = torch.from_numpy(validation_tokens(data).astype(np.int64))[:257]
    loss = model(tokens[:-1].view(4, 64), tokens[1:].view(4, 64)).item()
    assert validations[2]["val_loss"]["64"] == pytest.approx(loss, abs=1e-6)  # that of step 8
    log = (switched / "log.txt").read_text()
    assert "from step 8 on, nope takes the place of rope" in log and re.search(r"step 8/20  nope; attention by ", log)


@pytest.mark.parametrize("step", [4, 8, 12])
def test_it_resumes_bit_for_bit_before_at_and_after_the_switch(data, switched, tmp_path, step):
    folder = shutil.copytree(switched, tmp_path / "run")
    (folder / "summary.json").unlink()
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    assert_same_run(train_here(data, tmp_path, **SWITCH, **OFTEN, resume="auto"), switched)


def test_its_checkpoints_run_as_the_method_of_their_step(data, switched, tmp_path, capsys):
    losses = read_json(switched / "summary.json")["val_loss"]
    for step, method in {4: "rope", 8: "nope", 20: "nope"}.items():
        folder = shutil.copytree(switched, tmp_path / str(step))
        for path in (folder / "checkpoints").iterdir():
            if path.stem != f"step_{step:06d}":
                path.unlink()
        _, model = load_run(folder, torch.device("cpu"))
        assert {block.attention.method.name for block in model.blocks} == {method}
        tokens = torch.from_numpy(validation_tokens(data)[:40].astype(np.int64)).unsqueeze(0)
        chosen = greedy_decode(model, tokens, 2)[0]
        assert chosen.tolist()[0] == model(tokens)[0, -1].argmax().item()
        longer = torch.cat([tokens, chosen[None, :1]], dim=1)
        assert chosen.tolist()[1] == model(longer)[0, -1].argmax().item()
    here(evaluate.main, tmp_path / "20")
    assert read_json(tmp_path / "20" / "evaluation.json")["val_loss"] == losses


def test_learning_rates_begin_anew_with_the_switch(data, switched, tmp_path):
    """Up over 3 of the 12 steps that are left, and down as a cosine; before it they are what they were."""
    folder = train_here(data, tmp_path, **SWITCH, **OFTEN, switch_warmup_steps=3)
    (steps, _), (same_steps, _) = map(steps_and_validations, (folder, switched))
    assert [r["lr"] for r in steps[:8]] == [r["lr"] for r in same_steps[:8]]
    for name, peak in steps[0]["lr"].items():
        factors = [min(1, (n + 1) / 3) * (1 + math.cos(math.pi * n / 12)) / 2 for n in range(12)]
        assert [r["lr"][name] / peak for r in steps[8:]] == pytest.approx(factors, abs=1e-9)
    assert "anew from the switch on, 3 of warm-up" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("fields, says", [
    (dict(SWITCH, switch_method_to="logn_rope"), "weights of rope cannot go on as logn_rope: the two do not learn the"),
    (dict(SWITCH, switch_method_to="nop"), "did you mean nope"),
    (dict(switch_method_to="rope"), "switch_method_to rope needs switch_method_at"),
    (dict(SWITCH, method="nope"), "switch_method_to nope is the method before it"),
    (dict(SWITCH, switch_method_at=0.01), "is none of the steps between the first and the last of 20"),
    (dict(SWITCH, switch_method_at=0.99), "is none of the steps between the first and the last of 20"),
    (dict(SWITCH, switch_warmup_steps=13), "switch_warmup_steps 13 are more than the 12 steps after the switch"),
    (dict(switch_warmup_steps=2), "switch_warmup_steps 2 needs switch_method_at"),
    (dict(SWITCH, validate_as="yarn"), "validate_as is for runs of one method"),
])  # fmt: skip
def test_methods_that_cannot_follow_are_one_line_and_no_run_folder(data, tmp_path, capsys, fields, says):
    assert says in error_of(capsys, *arguments(data, tmp_path / "runs", **fields))
    assert not (tmp_path / "runs").exists()


def test_parameters_stay_the_same_objects():
    fields = dict(method="p_rope+scale_invariant+forget", switch_method_to="scale_invariant+forget")
    fields |= dict(switch_method_at=0.5)
    config = with_changes(preset("mini"), fields | dict(method_options={"learn_tau": True, "base": 64.0}))
    model = build_model(config, torch.float32)
    before = dict(model.named_parameters())
    model.replace_methods(layer_methods(config, config.steps))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert any("score_change" in name for name in after) and any("key_bias" in name for name in after)
    assert all(block.attention.method.rotation is None for block in model.blocks)


@pytest.mark.slow
def test_two_processes_switch_too(data, switched, tmp_path):
    train_on(2, data, tmp_path, **SWITCH, **OFTEN)
    assert_close_run(tmp_path / "run", switched)


@pytest.mark.slow
@pytest.mark.skipif(compile_problem(torch.device("cpu")) is not None, reason="torch.compile does not work")
def test_a_switch_resumes_bit_for_bit_when_compiled(data, tmp_path):
    fields = SWITCH | dict(compile="model", num_layers=1, val_lengths=(16,), switch_method_at=0.75)  # from step 15 on
    whole = train_here(data, tmp_path / "whole", **fields)
    rewound(whole, tmp_path)  # to step 15, which then compiles the second method alone
    assert_same_run(train_here(data, tmp_path, resume="auto", **fields), whole)
