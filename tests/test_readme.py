"""What the README says works as it says."""

import re
from pathlib import Path

import torch

from configs import sweeps
from configs.config import config_hash
from configs.presets import PRESETS
from model import methods
from model.gpt import GPT
from scripts import reproduce

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_it_opens_with_the_two_commands():
    commands = re.findall(r"^    (bash .*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_its_example_of_a_method_is_one_file_and_one_line(monkeypatch):
    _, mechanism, line = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    namespace = {}
    exec(mechanism, namespace)
    (name, parts), *rest = eval("{" + line + "}", vars(methods) | namespace).items()
    assert not rest
    monkeypatch.setitem(methods.METHODS, name, parts)
    torch.manual_seed(0)
    shape = dict(vocab_size=16, num_layers=1, num_heads=2, model_dim=16, train_length=8)
    model = GPT(**shape, method=name, method_options={"slope": 2.0})
    tokens = torch.randint(16, (2, 32))
    model(tokens, tokens).backward()
    assert model.head.grad.norm() > 0


def test_its_example_of_a_sweep_is_a_function_and_a_line(monkeypatch):
    namespace = dict(vars(sweeps))
    exec(re.search(r"```python\n(def .*?)```", README, re.DOTALL)[1], namespace)
    monkeypatch.setitem(sweeps.SWEEPS, "learning_rates", namespace["learning_rates"])
    runs = sweeps.sweep("learning_rates", "mini", seeds=[0, 1])
    assert len({config_hash(run.config) for run in runs}) == 12
    assert {run.config.muon_lr for run in runs} == {0.01, 0.02, 0.04}


def test_it_names_every_table_and_figure():
    assert all(f"`{item}`" in README for item in reproduce.ITEMS)


def test_it_names_every_preset_and_every_file_of_its_tree():
    assert all(f"`{name}`" in README for name in PRESETS)
    tree = re.findall(r"^([a-z_]+(?:/[a-z_.]*)?)  +", README[README.index("## The code") :], re.MULTILINE)
    assert len(tree) >= 9
    assert all((Path(__file__).parents[1] / path).exists() for path in tree)
