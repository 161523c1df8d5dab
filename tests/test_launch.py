"""The variables of a launcher are one set: it is possible and complete, or each command ends in one line."""

import numpy
import pytest
import torch
from commands import fails
from tiny_run import train_tiny_run

from measure.losses import Losses
from runtime.processes import Launch, World, read_launch
from scripts import evaluate, generate
from scripts.sweep import __main__ as sweep
from train_gpt import main as train

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")
WHOLE = dict(RANK="1", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="node1", MASTER_PORT="29500")
WRONG = {  # what the message names: the environment
    "{'RANK': '1'}": dict(RANK="1"),
    "{'RANK': '8', 'LOCAL_RANK': '0'}": dict(RANK="8", LOCAL_RANK="0"),
    "{'WORLD_SIZE': '2'}": dict(WORLD_SIZE="2"),
    "{'LOCAL_WORLD_SIZE': '2'}": dict(LOCAL_WORLD_SIZE="2"),
    "'WORLD_SIZE': '-1'": WHOLE | dict(WORLD_SIZE="-1"),
    "'WORLD_SIZE': '0'": WHOLE | dict(WORLD_SIZE="0"),
    "'LOCAL_WORLD_SIZE': '0'": WHOLE | dict(LOCAL_WORLD_SIZE="0"),
    "'RANK': ''": WHOLE | dict(RANK=""),
    "'RANK': 'x'": WHOLE | dict(RANK="x"),
    "'LOCAL_RANK': '²'": WHOLE | dict(LOCAL_RANK="²"),
    "'RANK': '2'": WHOLE | dict(RANK="2"),
    "'RANK': '-1'": WHOLE | dict(RANK="-1"),
    "'LOCAL_RANK': '2'": WHOLE | dict(LOCAL_RANK="2"),
    "srun started 4 tasks": dict(SLURM_STEP_NUM_TASKS="4"),
}


@pytest.fixture
def environment(monkeypatch):
    """Return a function that leaves these variables of a launcher in the environment, and no others."""

    def leave(variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    leave({})
    return leave


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, Launch(0, 0, 1)),
        (dict(SLURM_STEP_NUM_TASKS="1"), Launch(0, 0, 1)),
        (WHOLE, Launch(1, 0, 2)),
        (WHOLE | dict(SLURM_STEP_NUM_TASKS="2"), Launch(1, 0, 2)),
        (dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"), Launch(0, 0, 1)),
    ],
)
def test_a_possible_set_is_read(variables, launch, environment):
    environment(variables)
    assert read_launch() == launch


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train_tiny_run(tmp_path_factory.mktemp("launch"))


@pytest.mark.parametrize("named", WRONG)
def test_any_other_set_ends_each_command_in_one_line(named, run, environment, capsys):
    files = sorted(run.parent.rglob("*"))
    environment(WRONG[named])
    fails(capsys, named, evaluate.main, run)
    fails(capsys, named, generate.main, run, "abc")
    fails(capsys, named, sweep.main, "taught", "--runs-dir", run.parent)
    fails(capsys, named, train, "quickstart", "--name", "lost", "--runs_dir", run.parent)
    assert sorted(run.parent.rglob("*")) == files


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_several_processes_need_a_meeting_place(missing, run, environment, capsys):
    environment(WHOLE | {missing: ""})
    fails(capsys, missing, evaluate.main, run)


def test_a_sweep_is_not_started_by_torchrun(environment, run, capsys):
    environment(WHOLE)
    fails(capsys, "torchrun", sweep.main, "taught", "--runs-dir", run.parent)


def test_the_loss_of_a_sequence_that_no_rank_computes_is_nan():
    class Lonely(World):
        def sum(self, tensor):
            """Add nothing: the other rank does not exist."""

    model = torch.nn.Module()
    model.forward = lambda x, y, plan, per_token: x.float()
    tokens = numpy.arange(12).reshape(3, 4)
    measure = Losses(model, {4: None}, micro_batch_tokens=4, world=Lonely(1, 2, torch.device("cpu")))
    losses = measure(tokens, tokens)
    assert losses[1].tolist() == [4, 5, 6, 7]
    assert losses[[0, 2]].isnan().all()
