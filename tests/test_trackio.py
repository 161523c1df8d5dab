"""--wandb trackio, with a stand-in for the package, which may not be installed."""

import sys
from unittest.mock import Mock, call

from runtime.metrics import Metrics, finish_mirror, start_mirror


def test_records_arrive_by_step_without_the_reserved_key(tmp_path, monkeypatch):
    package = Mock()
    monkeypatch.setitem(sys.modules, "trackio", package)
    options = dict(project="p", name="n", config={"model_dim": 8})
    run = start_mirror("trackio", folder=tmp_path, tags=["rope"], **options)
    Metrics(tmp_path / "metrics.jsonl", run).write(dict(step=3, tokens=12, val_loss={"64": 2.5}))
    finish_mirror(run)
    assert options.items() <= package.init.call_args.kwargs.items()
    assert package.init().method_calls == [call.log({"tokens": 12, "val_loss/64": 2.5}, step=3), call.finish()]
