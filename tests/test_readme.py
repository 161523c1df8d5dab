"""What the README and the pages of docs/ say works as they say it."""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

from configs.command_line import read_config
from configs.config import Config
from configs.presets import PRESETS
from data.shard_writer import ShardWriter
from model import methods
from scripts.reproduce.pages import ITEMS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {"README.md": README} | {f"docs/{name}": text for name, text in DOCS.items()}
COMMAND = r"^    ((?:python|torchrun|bash) .*?)(?:  +#.*)?$"
COMMANDS = sorted({line for text in PAGES.values() for line in re.findall(COMMAND, text, re.MULTILINE)})


def tracked_files():
    text = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return [name for name in text.splitlines() if (ROOT / name).is_file()]


def test_it_opens_with_the_two_commands_and_is_short():
    commands = re.findall(r"^    (bash .*?)(?:  +#.*)?$", README, re.MULTILINE)
    assert commands[:2] == ["bash scripts/quickstart.sh", "bash scripts/test.sh"]
    assert len(README.splitlines()) <= 150


def test_the_map_is_the_tree_on_disk():
    files = tracked_files()
    top = {re.sub("/.*", "/", name) for name in files if not name.startswith((".", "README.md"))}
    rooms = {f"{Path(name).parent}/" for name in files if name.endswith((".py", ".cpp")) and "/" in name}
    named, room = set(), ""
    for line in re.search(r"^## The files\n.*?```\n(.*?)```", README, re.DOTALL | re.MULTILINE)[1].splitlines():
        indent, names, words = re.fullmatch(r"( *)([\w./-]+(?:, [\w./-]+)*)(?:  +(.*))?", line).groups()
        room = room if indent else ""
        paths = [room + name for name in names.split(", ")]
        inside = paths[0] if paths[0].endswith("/") else room
        room = room if indent else inside
        named |= {*paths, *(inside + name for name in re.findall(r"\w+\.(?:py|sh|cpp)", words or ""))}
    assert {name for name in named if (ROOT / name).exists() and (ROOT / name).is_dir() == (name[-1] == "/")} == named
    assert {name for name in named if "/" not in name.rstrip("/")} == top
    assert {room for room in rooms if room.count("/") == 1} <= named


def test_imports_go_the_way_that_it_says():
    below = {"configs", "data", "model", "optim"}
    may = dict.fromkeys(below, set()) | dict(runtime=below, scripts=below | {"runtime"})
    ours = {*may, "train_gpt"}
    for name in tracked_files():
        room = name.split("/")[0]
        if room not in may or not name.endswith(".py"):
            continue
        nodes = list(ast.walk(ast.parse((ROOT / name).read_text())))
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        imported = {module.split(".")[0] for module in modules} & ours
        assert imported <= may[room] | {room}, name


def test_links_lead_somewhere_and_every_page_is_linked():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").rglob("*.md")]
    linked = set()
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)(.*?)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and target.is_relative_to(ROOT), f"{page.name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
                slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in slugs, f"{page.name}: {link}"
            if page.name == "README.md":
                linked.add(target)
    assert DOCS and {ROOT / "docs" / name for name in DOCS} <= linked


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # runpy, of a module that other tests imported
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line, capsys, monkeypatch):
    """Training commands by what reads them; of the others, --help knows the command and every option."""
    words = shlex.split(line)
    if words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        module = ["-m"] if given.module else []
        words = ["python", *module, given.training_script, *given.training_script_args]
    if words[:2] == ["python", "train_gpt.py"]:
        if "--help" not in words:
            read_config(words[2:], "", methods)
    elif words[0] == "bash":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[:2] == ["python", "-m"]
        options = [word for word in words if word.startswith("--")]
        command = words[2 : words.index(options[0]) if options else None]
        monkeypatch.setattr(sys, "argv", [*command, "--help"])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            with pytest.raises(SystemExit) as end:
                runpy.run_module(command[0], run_name="__main__")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        said = capsys.readouterr()
        assert not end.value.code, said.err
        fields = {f"--{name}" for name in Config.__dataclass_fields__} if "fields" in said.out.lower() else set()
        assert {*options} <= fields | {*re.findall(r"--[\w-]+", said.out)}


def test_shell_scripts_of_the_pages_are_understood():
    scripts = re.findall(r"```bash\n(.*?)```", "\n".join(PAGES.values()), re.DOTALL)
    assert len(scripts) == 3  # the first runs in test_promises_run.py
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)
        (words,) = re.findall(r"torch\.distributed\.run (.*?)(?: &)?$", script.replace("\\\n", ""), re.MULTILINE)
        given = get_args_parser().parse_args(shlex.split(words))
        read_config(given.training_script_args, "", methods)
        assert given.training_script == "train_gpt.py"


@pytest.mark.slow
def test_its_examples_followed_to_the_letter_run_and_pass_the_tests(tmp_path):
    """In a copy of the tree: the method, a preset and the sweep are added as it says, then run; and so are all tests
    that run over methods, presets and sweeps, those of the new ones and of what lists them."""
    for name in tracked_files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)

    def insert(path, before, lines):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1
        (tmp_path / path).write_text(text.replace(before, lines + before))

    recipe = r"`(model/methods/\w+\.py)`:\n\n```python\n(.*?)```\n\nand its import [^\n]*? of `(.*?)`:\n\n"
    recipe += r"```python\n(.*?)```\n"
    path, mechanism, table, lines = re.search(recipe, README, re.DOTALL).groups()
    options = re.search(r"Now `(--method .*?)` trains", README)[1]
    (tmp_path / path).write_text(mechanism)
    imported, line = lines.splitlines(keepends=True)
    insert(table, "from model.methods.logn ", imported)
    insert(table, '    "rope": RoPE,\n', line)

    preset = "return dataclasses.replace(mini(), steps=2, cooldown_steps=1, val_tokens=16_384, val_every=0)"
    insert("configs/presets.py", "PRESETS = {\n", f"def mine() -> Config:\n    {preset}\n\n\n")
    insert("configs/presets.py", "        *(gpt_162m_4k,", "        mine,\n")

    recipe = r"function in `(.*?)` and its line in `SWEEPS`:\n\n```python\n(.*?)```"
    path, function = re.search(recipe, DOCS["sweeps.md"], re.DOTALL).groups()
    insert(path, "PAPER_SWEEPS = dict(\n", f"{function}\n\n")
    insert(path, ")\n\n\ndef sweep(", "    learning_rates=learning_rates,\n")

    def python(*words):
        environment = os.environ | dict(OMP_NUM_THREADS="1")
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    tokens = np.random.default_rng(0).zipf(1.5, 20_000) % 2048
    with ShardWriter(tmp_path / "data" / "mini", "text", tokenizer="none", vocab_size=2048) as writer:
        writer.write("train", tokens[:12_000])
        writer.write("val", np.resize(tokens[12_000:], 20_000))
        writer.close()
    python("train_gpt.py", "mine", *options.split(), *"--device cpu --compile off --name trained".split())
    config, summary = (json.loads((tmp_path / f"runs/trained/{x}.json").read_text()) for x in ("config", "summary"))
    assert (config["method"], config["method_options"], config["steps"]) == ("p_rope+root", {"slope": 2}, 2)
    assert 5 < summary["val_loss"]["4096"] < 9

    said = python("-m", "scripts.sweep", "learning_rates", "--scale", "mini", "--seeds", "0", "1", "--dry-run")
    assert "12 runs: 12 missing" in said and all(f"muon_lr{rate}" in said for rate in (0.01, 0.04))

    lists = "root or the_methods_are_those or it_names or every_run_give or every_method"
    lists += " or mine or learning_rates or every_preset or all_fine_tunes"
    files = "methods decoding gpt config attention logits report reproduce sweeps readme download".split()
    said = python("-m", "pytest", "-q", "-m", "not slow", "-k", lists, *(f"tests/test_{file}.py" for file in files))
    assert int(re.search(r"(\d+) passed", said)[1]) >= 20


def test_it_names_every_table_and_figure():
    assert all(f"`{item}`" in DOCS["reproduce.md"] for item in ITEMS)


def test_there_is_every_preset_that_the_pages_name():
    names = set(re.findall(r"`((?:gpt|small|mini)_\w+|quickstart|taught|mini)`", "\n".join(PAGES.values())))
    assert len(names) >= 6 and names <= set(PRESETS)  # and any that a user adds
