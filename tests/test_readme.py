"""The README and the pages of docs/: commands, links, the map of the files, and the example of a method."""

import itertools
import re
import runpy
import shlex
import subprocess

import pytest
from commands import ROOT, parametrize, python, read_json, slow, succeeds, write_files
from test_train import arguments
from torch.distributed.run import get_args_parser

from configs.config import Config
from configs.presets import PRESETS
from runtime.build import read_run
from scripts.reproduce.__main__ import all_items

README = (ROOT / "README.md").read_text()
DOCS = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", *DOCS)}
TEXT = "\n".join(PAGES.values())
COMMANDS = sorted(set(re.findall(r"^    ((?:python|torchrun|bash) .*?)(?:  +#.*)?$", TEXT, re.MULTILINE)))


def test_the_pages_are_short():
    assert README.count("\n") <= 130
    assert sum(len(PAGES[name].split()) for name in DOCS) <= 5_000


def tracked_files():
    text = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return [name for name in text.splitlines() if (ROOT / name).is_file()]


def test_the_map_is_the_tree_on_disk():
    (tree,) = re.findall(r"^## The files\n.*?```\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    named, folder = set(), ""
    for line in tree.splitlines():
        indent, names = re.match(r"( *)([\w./-]+(?:, [\w./-]+)*)", line).groups()
        named |= {(folder if indent else "") + name for name in names.split(", ")}
        if not indent:
            folder = names if names.endswith("/") else ""
    for name in named:
        assert (ROOT / name).exists() and (ROOT / name).is_dir() == name.endswith("/"), name
    top = {re.sub("/.*", "/", name) for name in tracked_files() if not name.startswith((".", "README.md"))}
    assert {name for name in named if "/" not in name[:-1]} == top


def test_links_lead_somewhere_and_every_page_is_linked():
    linked = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").rglob("*.md")):
        for link, path, anchor in re.findall(r"\]\((?!https?:)(([^)#]*)#?(.*?))\)", page.read_text()):
            target = (page.parent / path).resolve() if path else page
            assert target.exists() and target.is_relative_to(ROOT), f"{page.name}: {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)", target.read_text().lower(), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", title).replace(" ", "-") for title in titles], link
            linked.add((page.name, target))
    assert {("README.md", ROOT / name) for name in DOCS} <= linked


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # runpy, of a module that other tests imported
@parametrize("line", COMMANDS)
def test_commands_are_understood(line, capsys):
    """Training commands pass read_config. For the others, --help knows the command and every option."""
    program, *argv = shlex.split(line)
    if program == "bash":
        assert (ROOT / argv[0]).is_file()
        return
    if program == "torchrun":
        given = get_args_parser().parse_args(argv)
        argv = ["-m"] * given.module + [given.training_script, *given.training_script_args]
    start, *argv = argv
    if start == "train_gpt.py":
        if "--help" not in argv:
            read_run(argv)
        return
    assert start == "-m"
    options = {word for word in argv if word.startswith("--")}
    module, *words = itertools.takewhile(lambda word: word not in options, argv)
    succeeds(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), *words, "--help")
    output = capsys.readouterr().out
    known = {*re.findall(r"--[\w-]+", output)}
    if "fields" in output.lower():
        known |= {f"--{name}" for name in Config.__dataclass_fields__}
    assert options <= known


def test_shell_scripts_of_the_pages_are_understood():
    scripts = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    assert len(scripts) == 4  # launch.sh runs in test_faults.py
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)
    for script in (script for script in scripts if "scripts.sweep" not in script):
        (argv,) = re.findall(r"torch\.distributed\.run (.*?)(?: &)?$", script.replace("\\\n", ""), re.MULTILINE)
        given = get_args_parser().parse_args(shlex.split(argv))
        read_run(given.training_script_args)
        assert given.training_script == "train_gpt.py"


@slow
def test_its_example_of_a_method_trains(data, tmp_path):
    """The method is added to a copy of the tree, as in the README."""
    write_files(tmp_path, {name: (ROOT / name).read_bytes() for name in tracked_files()})
    recipe = r"`(model/methods/\w+\.py)`:\n\n```python\n(.*?)```\n\nand [^\n]*? of `(.*?)`:\n\n```python\n(.*?)```\n"
    path, mechanism, table, lines = re.search(recipe, README, re.DOTALL).groups()
    text = (ROOT / table).read_text()
    for before, line in zip(("from model.methods.logn ", '    "rope": RoPE,\n'), lines.splitlines(keepends=True)):
        assert text.count(before) == 1
        text = text.replace(before, line + before)
    write_files(tmp_path, {path: mechanism, table: text})
    options = re.search(r"Now `(--method .*?)` trains", README)[1].split()
    argv = arguments(data, "runs", "--steps 1 --cooldown_steps 0")
    python("train_gpt.py", *argv, *options, cwd=tmp_path, timeout=None, PYTHONPATH="")
    config = read_json(tmp_path / "runs/run/config.json")
    assert (config["method"], config["method_options"]) == ("p_rope+sqrt", {"slope": 2})


def test_the_pages_name_every_table_and_only_presets_that_exist():
    assert all(f"`{item}`" in PAGES["docs/sweeps.md"] for item in all_items())
    names = set(re.findall(r"`((?:gpt|small|mini)_\w+|quickstart|taught|mini)`", TEXT))
    assert len(names) >= 6 and names <= set(PRESETS)
