"""The rooms of scripts/ stay small, import each other in one direction and keep their commands; ruff finds nothing."""

import ast
import runpy
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("sweep", "reproduce", "shared", "hf")
FILES = sorted(path for room in ROOMS for path in (ROOT / "scripts" / room).iterdir() if path.is_file())
COMMANDS = ("sweep", "reproduce", "report", "reproduce.theory", "evaluate", "needle", "quickstart", "logit_statistics")
MODULES = sorted(path for path in (ROOT / "scripts").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The names that a file imports from scripts/, those within its functions too: modules, or what is in them."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {f"{node.module}.{alias.name}" for node in sources for alias in node.names}
    return names | {node.module for node in sources}


def test_no_two_files_import_each_other():
    name = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
    graph = {name[path]: (imports(path) & {*name.values()}) - {name[path]} for path in MODULES}
    assert "scripts.shared.runs" in graph["scripts.sweep.plan"]
    assert len([*TopologicalSorter(graph).static_order()]) == len(graph)  # CycleError names a circle


def test_imports_go_the_way_that_the_readme_says():
    below = {"configs", "data", "model", "optim"}
    may = dict.fromkeys(below, set()) | dict(runtime=below, scripts=below | {"runtime"})
    for room, others in may.items():
        for path in (ROOT / room).rglob("*.py"):
            imported = {name.split(".")[0] for name in imports(path)} & {*may, "train_gpt"}
            assert imported <= others | {room}, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_is_long_and_no_function(path):
    assert len(path.read_text().splitlines()) <= 400
    if path.suffix == ".py":
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assert all(node.end_lineno - node.lineno < 80 for node in functions)


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing_in_what_is_committed(words):
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    if changed.returncode or changed.stdout:
        pytest.skip("work under way may look as it likes")
    done = subprocess.run([sys.executable, "-m", "ruff", *words, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # runpy's, of a module that is imported already
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_where_it_was(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"scripts.{command}", run_name="__main__", alter_sys=True)
    assert end.value.code == 0 and capsys.readouterr().out.startswith(f"usage: python -m scripts.{command}")
