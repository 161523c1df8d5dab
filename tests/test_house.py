"""The house stays small: lines, files, imports; the training step stays visible; ruff finds nothing."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from commands import ROOT

FOLDERS = ("configs", "data", "model", "optim", "runtime", "scripts")
SUFFIXES = (".py", ".cpp", ".h", ".sh", ".js")
CODE = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
CODE += ROOT.glob("*.py")
NAMES = {path: path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in CODE}
MODULES = {name.removesuffix(".__init__"): path for path, name in NAMES.items() if path.suffix == ".py"}


def count(paths):
    return sum(path.read_text().count("\n") for path in paths)


def own_imports(path):
    """The names of our own that a file imports when it is imported: modules, or what is in them."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    nodes = [node for node in nodes if node.module.split(".")[0] in {*FOLDERS, "errors", "files"}]
    return [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]


def test_the_code_does_not_grow():
    """A reader has one evening. The first limits were 12,500, 12,000 and 5,200. The records add to scripts/."""
    assert count(CODE) <= 13_500
    assert count((ROOT / "tests").glob("*.py")) <= 12_500
    assert count(path for path in CODE if ROOT / "scripts" in path.parents) <= 5_550
    assert [path for path in CODE if ROOT / "model" not in path.parents and count([path]) > 300] == []
    assert len([path for path in (ROOT / "results").rglob("*") if path.is_file()]) <= 100


def test_the_training_step_is_visible():
    path = ROOT / "train_gpt.py"
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert count([path]) <= 280 and ".backward()" in path.read_text() and len(own_imports(path)) <= 15
    assert functions == [node for node in tree.body if isinstance(node, ast.FunctionDef)]  # none is nested


def test_no_two_files_import_each_other():
    graph = {name: {*own_imports(path)} | {one.rpartition(".")[0] for one in own_imports(path)} - {name}
             for name, path in MODULES.items()}  # fmt: skip
    assert "runtime.run" in graph["train_gpt"]
    TopologicalSorter(graph).prepare()  # CycleError names a circle


def test_imports_go_one_way():
    below = {"configs", "data", "model", "optim"}
    allowed = dict.fromkeys(below, set()) | {"runtime": below, "scripts": below | {"runtime"}}
    for folder, others in allowed.items():
        for path in (ROOT / folder).rglob("*.py"):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
            imported = {node.module.split(".")[0] for node in nodes} & {*allowed, "train_gpt"}
            assert imported <= others | {folder}, path


@pytest.mark.parametrize("words", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing_in_committed_files(words):
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout:
        pytest.skip("uncommitted work may look as it likes")
    done = subprocess.run([sys.executable, "-m", "ruff", *words, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
