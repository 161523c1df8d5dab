"""What the README says works as it says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from configs import sweeps
from configs.config import config_hash
from configs.presets import PRESETS
from scripts import reproduce

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_opens_with_the_two_commands():
    commands = re.findall(r"^    (bash .*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_its_example_of_a_method_followed_to_the_letter_passes_the_tests(tmp_path):
    """In a copy of the tree: all tests that run over the methods, those of the new one and of what lists them."""
    text = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in text.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    recipe = r"`(model/methods/\w+\.py)`:\n\n```python\n(.*?)```.*?```python\n(.*?)```"
    path, mechanism, lines = re.search(recipe, README, re.DOTALL).groups()
    (tmp_path / path).write_text(mechanism)
    table = tmp_path / "model" / "methods" / "__init__.py"
    imported, line = lines.splitlines(keepends=True)
    text = table.read_text().replace("from model.methods.logn", f"{imported}from model.methods.logn", 1)
    table.write_text(text.replace("METHODS = {\n", f"METHODS = {{\n{line}", 1))

    def python(*words):
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    lists = "kerple or the_methods_are_those or it_names or every_run_give or every_method"
    files = "methods decoding gpt config attention kernels logits report reproduce sweep readme".split()
    said = python("-m", "pytest", "-q", "-m", "not slow", "-k", lists, *(f"tests/test_{file}.py" for file in files))
    assert int(re.search(r"(\d+) passed", said)[1]) >= 20
    code = "import torch; from model.gpt import GPT; t = torch.randint(16, (2, 32)); "
    code += "m = GPT(vocab_size=16, num_layers=1, num_heads=2, model_dim=16, train_length=8, method='kerple_p_rope', "
    python("-c", code + "method_options={'slope': 2.0}); m(t, t).backward(); assert m.head.grad.norm() > 0")


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
