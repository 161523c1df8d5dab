"""Makes shards from Python source: the standard library, PyTorch and, for scale `far`, other packages.

    python -m data.python_source taught      for the quickstart and scale `taught`, into data/taught
    python -m data.python_source mini        for scale `mini`, into data/mini
    python -m data.python_source far         for scale `far`, into data/far; needs requirements-extras.txt

`taught`: a document is a folder of source files. Whole documents are held out for validation. A held-out folder may
resemble a training folder, because packages have near-copies of files. Half of the training rows are copy rows
(data/copy_rows.py), the others are pieces of documents from random places. Rows have 32 tokens first, then 64, then
256, because the quickstart trains on sequences of these lengths in this order.
`mini`: a document is a package or a module of the standard library. All rows are natural text.
`far`: documents as in `taught`, of more packages. All rows are natural text, 512-token pieces from random places. In
the order of the text, many steps would see one document, and the model would follow it instead of learning in general.

The same installations of Python and of the packages give the same tokens. Builds of one version differ in two files:
_sysconfigdata*.py has paths of the build, and torch/version.py the version of CUDA.
"""

import argparse
import importlib.util
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data.text import prepare
from errors import exit_on_user_error, require
from files import append

COPY_ROWS = 0.5  # share of the training rows
ROW_LENGTHS = [(32, 200 * 2048), (64, 600 * 2048), (256, None)]  # copy_rows.RowLengths, as preset quickstart trains
FAR_PACKAGES = "torch transformers sympy scipy matplotlib numpy wandb networkx huggingface_hub".split()
# Excluded are tests, character tables, and packages that are not part of Python.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "entities.py"}


def find_source(root: Path) -> list[Path]:
    """Return the .py files anywhere in a folder, sorted, without files and folders named in EXCLUDED."""
    return sorted(path for path in root.rglob("*.py") if not EXCLUDED & set(path.relative_to(root).parts))


def write_folders(roots: Sequence[Path], out: Path):
    """Write each folder of Python source as one document to a .txt file in `out`.

    A document has the .py files directly in a folder, in sorted order. Sorted by name, the documents in `out` have the
    order of roots and folders.
    """
    folders = {}  # folder -> texts of its files
    for root in roots:
        for path in find_source(root):
            if text := path.read_text(encoding="utf-8", errors="replace").strip():
                folders.setdefault(path.parent, []).append(text)
    out.mkdir(parents=True, exist_ok=True)
    for number, (folder, texts) in enumerate(folders.items()):
        append(out / f"{number:05d}-{folder.name}.txt", "\n\n\n".join(texts) + "\n")


def source_folders(packages: Sequence[str]) -> list[Path]:
    """Return the folders of the standard library and of packages. Raise UserError for a package that is missing."""
    folders = [Path(sysconfig.get_path("stdlib"))]
    for package in packages:
        spec = importlib.util.find_spec(package)
        require(spec, f"no package {package}. Install requirements.txt and requirements-extras.txt.")
        folders.append(Path(spec.submodule_search_locations[0]))
    return folders


def prepare_taught(out: Path):
    with tempfile.TemporaryDirectory() as folder:
        write_folders(source_folders(["torch"]), Path(folder))
        prepare(
            [Path(folder)],
            out,
            "bpe:1024",
            val_fraction=0.1,
            name="taught",
            copy_rows=COPY_ROWS,
            row_lengths=ROW_LENGTHS,
        )


def prepare_far(out: Path):
    with tempfile.TemporaryDirectory() as folder:
        write_folders(source_folders(FAR_PACKAGES), Path(folder))
        prepare([Path(folder)], out, "bpe:1024", name="far", copy_rows=0, row_lengths=[(512, None)])


def prepare_mini(out: Path):
    library = Path(sysconfig.get_path("stdlib"))
    with tempfile.TemporaryDirectory() as folder:
        for path in find_source(library):
            package = path.relative_to(library).parts[0]
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            append(Path(folder) / f"{package}.txt", text + "\n\n\n")
        prepare([Path(folder)], out, "bpe:2048", val_fraction=0.1, name="packages")


TEXTS = dict(taught=prepare_taught, mini=prepare_mini, far=prepare_far)


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(prog="python -m data.python_source", description=__doc__.split("\n")[0])
    parser.add_argument("text", choices=TEXTS)
    parser.add_argument("--out", type=Path, help="folder for the shards (default: data/TEXT)")
    args = parser.parse_args(argv)
    TEXTS[args.text](args.out or Path("data") / args.text)


if __name__ == "__main__":
    main()
