"""The variables of a launcher are one set: it is possible and complete, or each command ends in one line."""

import numpy
import torch
from commands import fails, fixture, table, unchanged

from measure.losses import Losses
from runtime.processes import Launch, World, read_launch
from scripts import evaluate, generate
from scripts.sweep import __main__ as sweep
from train_gpt import main as train

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_STEP_NUM_TASKS".split()
TWO = "RANK=1 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR=node1 MASTER_PORT=29500"


@fixture
def environment(monkeypatch):
    """Return a function that sets the launcher's variables which a text names, and removes the other ones."""

    def leave(text):
        variables = dict(word.split("=") for word in text.replace("TWO", TWO).split())
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    leave("")
    return leave


@table("variables, launch", """
                                     | 0 0 1
    SLURM_STEP_NUM_TASKS=1           | 0 0 1
    TWO                              | 1 0 2
    TWO SLURM_STEP_NUM_TASKS=2       | 1 0 2
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 | 0 0 1
""")
def test_a_possible_set_is_read(variables, launch, environment):
    environment(variables)
    assert read_launch() == Launch(*map(int, launch.split()))


@table("variables, named", """
    RANK=1                 | {'RANK': '1'}
    RANK=8 LOCAL_RANK=0    | {'RANK': '8', 'LOCAL_RANK': '0'}
    WORLD_SIZE=2           | {'WORLD_SIZE': '2'}
    LOCAL_WORLD_SIZE=2     | {'LOCAL_WORLD_SIZE': '2'}
    TWO WORLD_SIZE=-1      | 'WORLD_SIZE': '-1'
    TWO WORLD_SIZE=0       | 'WORLD_SIZE': '0'
    TWO LOCAL_WORLD_SIZE=0 | 'LOCAL_WORLD_SIZE': '0'
    TWO RANK=              | 'RANK': ''
    TWO RANK=x             | 'RANK': 'x'
    TWO LOCAL_RANK=\u00b2       | 'LOCAL_RANK': '\u00b2'
    TWO RANK=2             | 'RANK': '2'
    TWO LOCAL_RANK=2       | 'LOCAL_RANK': '2'
    SLURM_STEP_NUM_TASKS=4 | srun started 4 tasks
""")
def test_any_other_set_ends_each_command_in_one_line(variables, named, tiny_run, environment, capsys):
    environment(variables)
    with unchanged(tiny_run.parent):
        fails(capsys, named, evaluate.main, tiny_run)
        fails(capsys, named, generate.main, tiny_run, "abc")
        fails(capsys, named, sweep.main, "taught", "--runs-dir", tiny_run.parent)
        fails(capsys, named, train, "quickstart", "--name", "lost", "--runs_dir", tiny_run.parent)


@table("variables, named", """
    TWO MASTER_ADDR= | MASTER_ADDR
    TWO MASTER_PORT= | MASTER_PORT
""")
def test_several_processes_need_a_meeting_place_and_start_no_sweep(variables, named, tiny_run, environment, capsys):
    environment(variables)
    fails(capsys, named, evaluate.main, tiny_run)
    fails(capsys, "torchrun", sweep.main, "taught", "--runs-dir", tiny_run.parent)


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
