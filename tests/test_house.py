"""The house stays small: tokens, files, imports; the training step stays visible; ruff finds nothing."""

import ast
import collections
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter

import pytest
from commands import ROOT, parametrize

FOLDERS = "configs data measure model optim runtime scripts".split()
CODE = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in CODE]
MODULES = dict(zip(NAMES, CODE))
TESTS = [*(ROOT / "tests").glob("*.py")]
FREE = set("COMMENT NL NEWLINE INDENT DEDENT ENDMARKER ENCODING STRING FSTRING_END".split())


def tokens_by_line(path):
    """Return Python's tokens by line, without comments, strings, line breaks and indentation."""
    counts, depth = collections.Counter(), 0
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            kind = tokenize.tok_name[token.type]
            depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")  # Python 3.12 looks into f-strings
            counts[token.start[0]] += depth == 0 and kind not in FREE
    return counts


def count(paths):
    return sum(tokens_by_line(path).total() for path in paths)


def nodes(path, kind):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind)]


def own_imports(path):
    """The names of our own that a file imports when it is imported: modules, or what is in them."""
    imports = [node for node in nodes(path, ast.ImportFrom) if node.col_offset == 0]
    imports = [node for node in imports if node.module.split(".")[0] in {*FOLDERS, "errors", "files"}]
    return [f"{node.module}.{alias.name}" for node in imports for alias in node.names]


def test_the_code_does_not_grow():
    """A reader has one evening. Lines may grow, because a reader reads lines."""
    assert count(MODULES.values()) <= 95_000
    assert count(TESTS) <= 100_000
    assert [path for path in MODULES.values() if ROOT / "model" not in path.parents and count([path]) > 2_450] == []
    assert len([path for path in (ROOT / "results").rglob("*") if path.is_file()]) <= 105


def test_a_line_is_one_step_of_thought():
    paths = [*MODULES.values(), *TESTS]
    dense = [f"{path}:{line}" for path in paths for line, tokens in tokens_by_line(path).items() if tokens >= 35]
    assert dense == []
    assert sum(path.read_text().count("# fmt" ": skip") for path in paths) <= 5


def test_the_training_step_is_visible():
    path = ROOT / "train_gpt.py"
    assert count([path]) <= 600 and ".backward()" in path.read_text() and len(own_imports(path)) <= 15
    assert not any(function.col_offset for function in nodes(path, ast.FunctionDef))  # none is nested


def test_no_two_files_import_each_other():
    graph = {}
    for name, path in MODULES.items():
        imports = own_imports(path)
        graph[name] = {*imports, *(one.rpartition(".")[0] for one in imports)} - {name}
    assert "runtime.run" in graph["train_gpt"]
    TopologicalSorter(graph).prepare()  # CycleError names a circle


def test_imports_go_one_way():
    below = {"configs", "data", "model", "optim"}
    allowed = dict.fromkeys(below, set()) | {"measure": below, "runtime": below}
    allowed["scripts"] = below | {"measure", "runtime"}
    for folder, others in allowed.items():
        for path in (ROOT / folder).rglob("*.py"):
            modules = {node.module for node in nodes(path, ast.ImportFrom)}
            if folder == "measure":
                modules.discard("runtime.processes")
            imported = {module.split(".")[0] for module in modules} & {*allowed, "train_gpt"}
            assert imported <= others | {folder}, path


@parametrize("words", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing_in_committed_files(words):
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout:
        pytest.skip("uncommitted work may look as it likes")
    done = subprocess.run([sys.executable, "-m", "ruff", *words, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
