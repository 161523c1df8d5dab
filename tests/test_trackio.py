"""--wandb trackio, with a stand-in for the package, which may not be installed."""

import sys
import types

from runtime.metrics import Metrics, finish_mirror, start_mirror


def start(folder):
    return start_mirror("trackio", folder=folder, project="p", name="n", config={"model_dim": 8}, tags=["rope"])


def test_records_arrive_by_step_without_the_reserved_key(tmp_path, monkeypatch):
    calls = []
    log = lambda record, step: calls.append((record, step))  # noqa: E731
    run = types.SimpleNamespace(log=log, finish=lambda: calls.append("finished"))
    package = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "trackio", package)
    metrics = Metrics(tmp_path / "metrics.jsonl", start(tmp_path))
    metrics.write(dict(step=3, tokens=12, val_loss={"64": 2.5}))
    finish_mirror(metrics.mirror)
    started, *rest = calls
    assert (started["project"], started["name"], started["config"]) == ("p", "n", {"model_dim": 8})
    assert rest == [({"tokens": 12, "val_loss/64": 2.5}, 3), "finished"]
