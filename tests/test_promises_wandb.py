"""What docs/reliability.md promises of the mirror in wandb, with wandb's own client and a server that is lost."""

import pytest
from test_train import arguments, make_data, python
from wandb_stand_in import StandIn

from runtime.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.promise(14, "a network that is lost costs wandb's mirror nothing")]

# The network is lost when the record of step 8 is written.
LOSING = """
import os, urllib.request
import train_gpt
from runtime.metrics import Metrics

write = Metrics.write

def losing(self, record):
    write(self, record)
    if record["step"] == 8:
        urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/lose").close()

Metrics.write = losing
train_gpt.main()
"""


@pytest.mark.parametrize("loss", ["closed", "no answer"])
def test_a_run_goes_on_without_network_and_is_brought_up_later(loss, faults, long, tmp_path):
    if loss == "no answer" and not long:
        pytest.skip("of the long form")
    data, home = make_data(tmp_path / "data"), dict(HOME=str(tmp_path))
    with faults(f"network lost in a run ({loss})"):
        words = arguments(data, tmp_path / "runs", wandb="online")
        with StandIn(loss) as server:
            done = python("-c", LOSING, *words, WANDB_FINISH_TIMEOUT="1", **home, **server.environment)
        run = tmp_path / "runs/run"
        assert (run / "summary.json").exists()
        (mirror,) = (run / "wandb").glob("run-*")
        command = f"wandb sync --no-skip-online {mirror}"
        assert command in done.stdout and command in (run / "log.txt").read_text(), done.stdout
        with StandIn() as server:
            python("-m", *command.split(), **home, **server.environment)
        records = read_metrics(run / "metrics.jsonl")
        there = {record["_step"]: record for record in server.history}
        assert sorted(there) == [*range(len(records))] and len(records) == 25
        for number, record in enumerate(records):
            assert there[number]["step"] == record["step"]
            assert there[number].get("train_loss") == record.get("train_loss")
            assert there[number].get("val_loss/64") == record.get("val_loss", {}).get("64")
