"""Copies what a module of this repository imports of it, to be loaded where the repository is not.

transformers loads the code of a model from a folder or the hub by copying one file and those that it imports, as
`from .NAME import ...` beside it: no folders, no `from . import NAME`, nothing but .py files. So model/methods/rope.py
becomes methods_rope.py, imports become relative ones, and the first file names all others. transformers also refuses a
file that imports what is not installed, unless it is in a `try`: Triton is not everywhere. Nothing else is changed but
the names of operators, which are the whole process's: each version of the code has its own.

Triton's kernels come along; C++ does not, so a CPU computes in plain PyTorch (model/backends/blocks.py).
"""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMESPACE = '"scale_invariant::'  # of operators (torch.library.custom_op)
OPTIONAL = {"triton"}  # what is imported only where it is used
LIST = """
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:  # never: these lines tell transformers which files to copy
"""


def find_module(name: str) -> Path | None:
    """Return the file of a module of this repository, None for another one."""
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def flat_name(module: str) -> str:
    """Return the name that a module has in an exported folder."""
    return module.removeprefix("scripts.export.").removeprefix("model.").replace(".", "_")


def relative_lines(node: ast.ImportFrom) -> tuple[list[str], set[str]]:
    """Return the lines that take the place of an import, and the modules of this repository that it needs."""
    names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    modules = {name for name, module in names.items() if find_module(module)}
    lines = [
        f"from . import {flat_name(names[alias.name])} as {alias.asname or alias.name}"
        for alias in node.names
        if alias.name in modules
    ]
    others = [ast.unparse(alias) for alias in node.names if alias.name not in modules]
    if others:
        lines.append(f"from .{flat_name(node.module)} import {', '.join(others)}")
    return lines, {names[name] for name in modules} | ({node.module} if others else set())


def rewrite(source: str) -> tuple[str, set[str]]:
    """Return a module's source with relative imports, and the modules of this repository that it imports."""
    lines, needed = source.splitlines(), set()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom | ast.Import)]
    for node in sorted(nodes, key=lambda node: -node.lineno):  # from the last on, so that the numbers of lines stay
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert not any(map(find_module, names)), f"{ast.unparse(node)}: only `from` is understood"
            if {name.split(".")[0] for name in names} & OPTIONAL:
                new = ["try:", f"    {ast.unparse(node)}", "finally:", "    pass"]
                lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
        elif find_module(node.module):
            new, modules = relative_lines(node)
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
            needed |= modules
    return "\n".join(lines) + "\n", needed


def export_modules(first: str) -> dict[str, str]:
    """Return the files, by name, that a module of this repository needs to be loaded by transformers, itself too."""
    found, missing = {}, {first}
    while missing:
        module = missing.pop()
        found[module], needed = rewrite(find_module(module).read_text())
        missing |= needed - found.keys()
    others = sorted(flat_name(module) for module in found if module != first)
    found[first] += LIST + "".join(f"    from .{name} import __name__  # noqa: F401\n" for name in others)
    version = hashlib.sha256("".join(found[module] for module in sorted(found)).encode()).hexdigest()[:12]
    own = NAMESPACE.replace("::", f"_{version}::")
    return {f"{flat_name(module)}.py": text.replace(NAMESPACE, own) for module, text in found.items()}
