"""The charts of a validation, as they arrive at a server in place of wandb's; the id of a run that is killed early."""

import pytest
import wandb
from commands import python, succeeds
from matplotlib import image
from tiny_run import arguments, train_tiny_run
from wandb_stand_in import StandIn

from runtime.charts import draw_validation, find_panels
from runtime.metrics import WandbRun, read_metrics
from train_gpt import main as train


def test_a_validation_has_numbers_and_a_picture(tmp_path):
    train_tiny_run(tmp_path)
    with StandIn() as server:  # in a process of its own, because wandb keeps the first address of a process
        fields = "--name mirrored --wandb online --val_copy_gaps 8 64"
        python("train_gpt.py", *arguments(tmp_path, fields), **server.environment, HOME=str(tmp_path))
    run = tmp_path / "mirrored"
    last = read_metrics(run / "metrics.jsonl")[-1]
    row = [row for row in server.history if "charts" in row][-1]
    assert row["val_loss/240"] == last["val_loss"]["240"]
    assert not any(isinstance(value, list) for value in row.values())
    (path,) = run.glob(f"wandb/run-*/files/{row['charts']['path']}")
    assert image.imread(path).shape[:2] == (row["charts"]["height"], row["charts"]["width"])


def test_panels_draw_the_numbers_of_the_record():
    record = dict(
        tokens=1000,
        val_loss_by_position={"4": [5.0, 4.0, 3.0], "8": [5.0, 4.0, 3.5, 3.0]},
        copy_gain=dict(random={"8": 2.0, "64": -1.0}, text={"8": 0.5, "64": 0.25}),
        max_logit={"0": 3.0, "1": 4.0},
        attention_entropy={"0": 1.0, "1": 2.0},
    )
    losses, copies, layers = (list(lines.values()) for lines in find_panels(record).values())
    shorter, longer = losses
    assert shorter == {1: 5.0, 2: 4.0, 4: 3.0}
    assert longer == {1: 5.0, 2: 4.0, 4: 3.5, 8: 3.0}
    assert copies == [{8: 2.0, 64: -1.0}, {8: 0.5, 64: 0.25}]
    assert layers == [{0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0}]
    height, width, colours = draw_validation(record).shape
    assert width > 3 * height and colours == 3
    del record["copy_gain"], record["max_logit"], record["attention_entropy"]
    assert draw_validation(record).shape == (height, width // 3, 3)


def test_a_run_that_is_killed_before_its_first_checkpoint_keeps_its_id(tmp_path, monkeypatch):
    def kill(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WandbRun, "log", kill)
        train_tiny_run(tmp_path, "--wandb offline")
    wandb.finish()  # this process goes on, unlike a killed one
    run = tmp_path / "run"
    first = (run / "wandb_id").read_text()
    assert not list(run.glob("checkpoints/*"))
    succeeds(train, *arguments(tmp_path, "--wandb offline --resume auto"))
    assert (run / "summary.json").exists() and (run / "wandb_id").read_text() == first
    assert {path.name for path in run.glob("wandb/offline-run-*/*.wandb")} == {f"run-{first}.wandb"}
