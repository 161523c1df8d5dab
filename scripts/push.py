"""Puts an exported model on the Hugging Face hub; without a login it only says what would go there.

    hf auth login                                         once, with a token that may write
    python -m scripts.push runs/NAME USER/MODEL           exports the run first, as scripts.export does
    python -m scripts.push runs/NAME/hf USER/MODEL        what was exported before

The repository is made if there is none; files of the same names are written over, and the hub keeps what was before.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils import validate_repo_id

from errors import exit_on_user_error, require
from scripts.export.__main__ import export

LOGIN = "log in with `hf auth login` (a token that may write: https://huggingface.co/settings/tokens), or set HF_TOKEN"


@contextlib.contextmanager
def exported(source: Path, tokenizer: str | None) -> Iterator[Path]:
    """Yield the exported folder that `source` is, or one that is made of it, a run folder, for as long as it is used.
    ValueError if it is neither."""
    if (source / "checkpoints").is_dir():
        with tempfile.TemporaryDirectory() as temporary:
            export(source, Path(temporary) / "hf", tokenizer)
            yield Path(temporary) / "hf"
        return
    try:
        kind = json.loads((source / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        kind = None
    require(kind == "method_gpt", f"{source} is neither a run folder nor one that scripts.export has written")
    yield source


def upload(folder: Path, repo: str, private: bool) -> str:
    """Upload the files of a folder to a model's repository, made if there is none, and return its address. OSError, in
    one line, when that fails."""
    api = HfApi()
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A model exported by scripts.export")
    except Exception as error:  # of the hub's client and of its HTTP library
        status = getattr(getattr(error, "response", None), "status_code", None)
        mend = LOGIN if status in (401, 403) else "run the command again"
        why = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"cannot upload to {repo}: {mend}: {why}") from error
    return str(url)


@exit_on_user_error()
def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_EXPORT", help="a run folder, or an exported one")
    parser.add_argument("repo", metavar="REPO", help="USER/MODEL on the hub")
    parser.add_argument("--private", action="store_true", help="if the repository is new")
    parser.add_argument("--dry-run", action="store_true", help="say what would be uploaded, even when logged in")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of a run folder: see scripts.export")
    args = parser.parse_args(argv)
    validate_repo_id(args.repo)
    require("/" in args.repo, f"{args.repo} is not of the form USER/MODEL")
    with exported(args.source, args.tokenizer) as folder:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        for path in files:
            print(f"{path.stat().st_size:>14,}  {path.name}")
        print(f"{sum(path.stat().st_size for path in files):>14,}  bytes in {len(files)} files, for {args.repo}")
        if args.dry_run or not get_token():
            print("nothing was uploaded" + ("" if args.dry_run else f": {LOGIN}"))
            return
        print(upload(folder, args.repo, args.private))


if __name__ == "__main__":
    main()
