"""The README and the pages of docs/: commands, links, the map of the files, and the example of a method."""

import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from commands import ROOT, python, read_json
from test_train import arguments, make_data
from torch.distributed.run import get_args_parser

from configs.config import Config
from configs.presets import PRESETS
from runtime.build import read_run
from scripts.reproduce.__main__ import ITEMS

README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {"README.md": README} | {f"docs/{name}": text for name, text in DOCS.items()}
COMMAND = r"^    ((?:python|torchrun|bash) .*?)(?:  +#.*)?$"
COMMANDS = sorted({line for text in PAGES.values() for line in re.findall(COMMAND, text, re.MULTILINE)})


def tracked_files():
    text = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return [name for name in text.splitlines() if (ROOT / name).is_file()]


def test_the_map_is_the_tree_on_disk():
    top = {re.sub("/.*", "/", name) for name in tracked_files() if not name.startswith((".", "README.md"))}
    named, folder = set(), ""
    for line in re.search(r"^## The files\n.*?```\n(.*?)```", README, re.DOTALL | re.MULTILINE)[1].splitlines():
        indent, names = re.match(r"( *)([\w./-]+(?:, [\w./-]+)*)", line).groups()
        folder = folder if indent else names if names.endswith("/") else ""
        named |= {f"{folder if indent else ''}{name}" for name in names.split(", ")}
    assert {name for name in named if (ROOT / name).exists() and (ROOT / name).is_dir() == name.endswith("/")} == named
    assert {name for name in named if "/" not in name.rstrip("/")} == top


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
    """Training commands pass read_config. For the others, --help knows the command and every option."""
    argv = shlex.split(line)
    if argv[0] == "torchrun":
        given = get_args_parser().parse_args(argv[1:])
        module = ["-m"] if given.module else []
        argv = ["python", *module, given.training_script, *given.training_script_args]
    if argv[:2] == ["python", "train_gpt.py"]:
        if "--help" not in argv:
            read_run(argv[2:])
    elif argv[0] == "bash":
        assert (ROOT / argv[1]).is_file()
    else:
        assert argv[:2] == ["python", "-m"]
        options = [word for word in argv if word.startswith("--")]
        command = argv[2 : argv.index(options[0]) if options else None]
        monkeypatch.setattr(sys, "argv", [*command, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        output = capsys.readouterr()
        assert not end.value.code, output.err
        fields = {f"--{name}" for name in Config.__dataclass_fields__} if "fields" in output.out.lower() else set()
        assert {*options} <= fields | {*re.findall(r"--[\w-]+", output.out)}


def test_shell_scripts_of_the_pages_are_understood():
    scripts = re.findall(r"```bash\n(.*?)```", "\n".join(PAGES.values()), re.DOTALL)
    assert len(scripts) == 3  # the first runs in test_faults.py
    for script in scripts:
        subprocess.run(["bash", "-n", "-c", script], check=True)
        (argv,) = re.findall(r"torch\.distributed\.run (.*?)(?: &)?$", script.replace("\\\n", ""), re.MULTILINE)
        given = get_args_parser().parse_args(shlex.split(argv))
        read_run(given.training_script_args)
        assert given.training_script == "train_gpt.py"


@pytest.mark.slow
def test_its_example_of_a_method_trains(tmp_path):
    """The method is added to a copy of the tree, as in the README."""
    for name in tracked_files():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    recipe = r"`(model/methods/\w+\.py)`:\n\n```python\n(.*?)```\n\nand [^\n]*? of `(.*?)`:\n\n```python\n(.*?)```\n"
    path, mechanism, table, lines = re.search(recipe, README, re.DOTALL).groups()
    (tmp_path / path).write_text(mechanism)
    text = (tmp_path / table).read_text()
    for before, line in zip(("from model.methods.logn ", '    "rope": RoPE,\n'), lines.splitlines(keepends=True)):
        assert text.count(before) == 1
        text = text.replace(before, line + before)
    (tmp_path / table).write_text(text)
    options = re.search(r"Now `(--method .*?)` trains", README)[1].split()
    make_data(tmp_path / "text")
    argv = arguments(tmp_path / "text", "runs", steps=1, cooldown_steps=0)
    python("train_gpt.py", *argv, *options, cwd=tmp_path, timeout=None)
    config = read_json(tmp_path / "runs/run/config.json")
    assert (config["method"], config["method_options"]) == ("p_rope+root", {"slope": 2})


def test_the_pages_name_every_table_and_only_presets_that_exist():
    assert all(f"`{item}`" in DOCS["sweeps.md"] for item in ITEMS)
    names = set(re.findall(r"`((?:gpt|small|mini)_\w+|quickstart|taught|mini)`", "\n".join(PAGES.values())))
    assert len(names) >= 6 and names <= set(PRESETS)
