"""Copies a module of this repository, and all modules that it imports, to a folder that works without the repository.

transformers loads a model's code from a folder of .py files that import each other as `from .NAME import ...`. It
allows no subfolders. So model/methods/rope.py becomes methods_rope.py, imports become relative, and the first file
names all others. Operators and hooks are global to the process, so each version of the code has its own names.

C++ kernels are not copied, so a CPU computes in plain PyTorch (backend `blocks`).
"""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMESPACE = '"scale_invariant::'  # of operators (torch.library.custom_op) and of hooks in transformers (convert.py)


def find_module(name: str) -> Path | None:
    """Return the file of a module of this repository, or None for other modules."""
    path = ROOT.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def flat_name(module: str) -> str:
    """Return the name of a module in the exported folder."""
    return module.removeprefix("scripts.hf.").removeprefix("model.").replace(".", "_")


def rewrite(source: str) -> tuple:
    """Return a module's source with relative imports, and the names of the repository's modules that it imports."""
    lines, needed = source.splitlines(), set()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom | ast.Import)]
    for node in sorted(imports, key=lambda node: -node.lineno):  # from the end, so that line numbers stay valid
        new = []
        for alias in node.names:
            name = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            if isinstance(node, ast.Import):
                assert find_module(name) is None, f"{ast.unparse(node)}: write it as `from ... import`"
            elif find_module(name):
                new.append(f"from . import {flat_name(name)} as {alias.asname or alias.name}")
                needed.add(name)
            elif find_module(node.module):
                new.append(f"from .{flat_name(node.module)} import {ast.unparse(alias)}")
                needed.add(node.module)
        if new:
            lines[node.lineno - 1 : node.end_lineno] = [" " * node.col_offset + line for line in new]
    return "\n".join(lines) + "\n", needed


def export_modules(first: str) -> dict:
    """Return the source of a module and of all repository modules that it needs, by file name."""
    found, missing = {}, {first}
    while missing:
        module = missing.pop()
        found[module], needed = rewrite(find_module(module).read_text())
        missing |= needed - found.keys()
    others = sorted(flat_name(module) for module in found if module != first)
    found[first] += "from typing import TYPE_CHECKING  # noqa: E402\n\nif TYPE_CHECKING:  # lists the files to copy\n"
    found[first] += "".join(f"    from .{name} import __name__  # noqa: F401\n" for name in others)
    version = hashlib.sha256("".join(found[module] for module in sorted(found)).encode()).hexdigest()[:12]
    namespace = NAMESPACE.replace("::", f"_{version}::")
    return {f"{flat_name(module)}.py": text.replace(NAMESPACE, namespace) for module, text in found.items()}
