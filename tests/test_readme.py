"""What the README says works as it says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from configs.presets import PRESETS
from data.shards import ShardWriter
from scripts.reproduce.pages import ITEMS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_opens_with_the_two_commands():
    commands = re.findall(r"^    (bash .*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]


def test_its_examples_followed_to_the_letter_run_and_pass_the_tests(tmp_path):
    """In a copy of the tree: the method, a preset and the sweep are added as it says, then run; and so are all tests
    that run over methods, presets and sweeps, those of the new ones and of what lists them."""
    text = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in text.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)

    def insert(path, before, lines):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1
        (tmp_path / path).write_text(text.replace(before, lines + before))

    recipe = r"`(model/methods/\w+\.py)`:\n\n```python\n(.*?)```\n\nand in `(.*?)`, .*?```python\n(.*?)```\n"
    path, mechanism, table, lines = re.search(recipe, README, re.DOTALL).groups()
    options = re.search(r"Now `(--method .*?)` trains", README)[1]
    (tmp_path / path).write_text(mechanism)
    imported, line = lines.splitlines(keepends=True)
    insert(table, "from model.methods.logn ", imported)
    insert(table, '    "rope": (RoPE,),\n', line)

    assert "`configs/presets.py` (your own: a function, and its name in `PRESETS`)" in README
    preset = "return dataclasses.replace(quickstart(), steps=2, cooldown_steps=1, val_tokens=4096)"
    insert("configs/presets.py", "PRESETS = {\n", f"def mine() -> Config:\n    {preset}\n\n\n")
    insert("configs/presets.py", "        *(gpt_162m_4k,", "        mine,\n")

    recipe = r"function in `(.*?)` and its line in `SWEEPS`:\n\n```python\n(.*?)```"
    path, function = re.search(recipe, README, re.DOTALL).groups()
    insert(path, "SWEEPS = dict(\n", f"{function}\n\n")
    insert(path, ")\n\n\ndef sweep(", "    learning_rates=learning_rates,\n")

    def python(*words):
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    tokens = np.random.default_rng(0).zipf(1.5, 20_000) % 2048
    with ShardWriter(tmp_path / "data" / "quickstart", "text", tokenizer="none", vocab_size=2048) as writer:
        writer.write("train", tokens[:12_000])
        writer.write("val", tokens[12_000:])
        writer.close()
    python("train_gpt.py", "mine", *options.split(), *"--device cpu --compile off --name trained".split())
    config, summary = (json.loads((tmp_path / f"runs/trained/{x}.json").read_text()) for x in ("config", "summary"))
    assert (config["method"], config["method_options"], config["steps"]) == ("kerple_p_rope", {"slope": 2}, 2)
    assert 5 < summary["val_loss"]["4096"] < 9

    said = python("-m", "scripts.sweep", "learning_rates", "--scale", "mini", "--seeds", "0", "1", "--dry-run")
    assert "12 runs: 12 missing" in said and all(f"muon_lr{rate}" in said for rate in (0.01, 0.04))

    lists = "kerple or the_methods_are_those or it_names or every_run_give or every_method"
    lists += " or mine or learning_rates or every_preset or all_fine_tunes"
    files = "methods decoding gpt config attention kernels logits report reproduce sweep readme fineweb".split()
    said = python("-m", "pytest", "-q", "-m", "not slow", "-k", lists, *(f"tests/test_{file}.py" for file in files))
    assert int(re.search(r"(\d+) passed", said)[1]) >= 20


def test_it_names_every_table_and_figure():
    assert all(f"`{item}`" in README for item in ITEMS)


def test_there_is_every_preset_that_it_names_and_every_file_of_its_tree():
    names = re.search(r"^Presets are .*?`configs/presets.py`(.*?)\. ", README, re.DOTALL | re.MULTILINE)[1]
    names = set(re.findall(r"`(\w+)`", names)) - {"PRESETS"}
    assert len(names) >= 13 and names <= set(PRESETS)  # and any that a user adds
    tree = re.findall(r"^([a-z_]+(?:/[a-z_.]*)?)  +", README[README.index("## The code") :], re.MULTILINE)
    assert len(tree) >= 9
    assert all((ROOT / path).exists() for path in tree)
