"""Downloads data: FineWeb as shards of GPT-2 tokens, and text of any data set on the Hugging Face hub.

    python -m data.download fineweb10B --shards 25      2.5 B tokens, 5 GB: what gpt_162m_4k reads
    python -m data.download fineweb100B --shards 101    10.1 B tokens, 20 GB: what gpt_304m_4k reads
    python -m data.download text OWNER/NAME FILE... --field content --out data/mine

The hub's client retries and resumes. A file gets its name when all of it is there, so the same command fetches what is
missing. FineWeb shards are Keller Jordan's, and are compared with the sha256 of the hub.
"""

import argparse
import fcntl
import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data.shards import FINEWEB_SHARDS, describe_shard, read_manifest, shard_bytes, write_manifest
from errors import UserError, exit_on_user_error, require
from files import replace_file, sync


@contextmanager
def _one_line_errors(description: str) -> Iterator[None]:
    """Turn every error of a download into an OSError of one line: HTTP libraries have many kinds of errors."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"cannot download {description}: {message}. Run the command again.") from error


def fetch(repo: str, name: str, folder: Path | None, revision: str | None = None, repo_type: str = "dataset") -> Path:
    """Download a file of the hub into a folder (None: the cache) and return its path; OSError if that fails.

    A download that was interrupted goes on where it stopped, if the folder still has its parts.
    """
    from huggingface_hub import hf_hub_download

    with _one_line_errors(f"{name} of {repo}"):
        return Path(hf_hub_download(repo, name, repo_type=repo_type, revision=revision, local_dir=folder))


def model_file(model: str | Path, name: str) -> Path:
    """Return the path of a file of a Hugging Face model, a folder or a name on the hub; OSError if it is not there."""
    return Path(model) / name if Path(model).is_dir() else fetch(str(model), name, None, repo_type="model")


# ---- FineWeb ----


def download_fineweb(dataset: str, num_shards: int | None, out: Path) -> dict:
    """Fetch the validation shard and the first training shards (None: all) and return the manifest.

    dataset: "fineweb10B" or "fineweb100B".
    ValueError for an impossible number of shards, a folder of other data, or a file with a wrong sha256 or wrong
    tokens, which is removed. OSError if the hub cannot give a file.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    repo, most = f"kjj0/{dataset}-gpt2", FINEWEB_SHARDS[dataset]
    num_shards = most if num_shards is None else num_shards
    require(1 <= num_shards <= most, f"--shards {num_shards}: {repo} has {most} training shards. Use 1 to {most}.")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, num_shards + 1))]
    out.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(out) or {"tokenizer": "gpt2", "vocab_size": 50257, "source": repo, "files": {}}
    source = manifest.get("source")  # fineweb10B and fineweb100B have files of the same names and sizes
    require(source == repo, f"{out}: holds data of {source or 'another source'}. Choose another --out.")

    incoming = out / ".incoming"  # an unchecked file never has a shard's name
    for name in tqdm(names, desc=repo, unit="file", disable=None):
        entry = manifest["files"].get(name)
        if entry and (out / name).exists() and (out / name).stat().st_size == shard_bytes(entry["tokens"]):
            continue
        with _one_line_errors(f"{name} of {repo}"):
            sha256 = get_hf_file_metadata(hf_hub_url(repo, name, repo_type="dataset")).etag
        path = fetch(repo, name, incoming)
        try:
            entry = describe_shard(path)
            require(entry["sha256"] == sha256, f"{path}: its sha256 is not the hub's.")
            require(entry["max_token"] < manifest["vocab_size"], f"{path}: has token {entry['max_token']}.")
        except ValueError as error:
            shutil.rmtree(incoming)
            raise UserError(f"{error} The file was removed. Run the command again.") from error
        sync(path)
        os.replace(path, out / name)
        manifest["files"][name] = entry
        write_manifest(out, manifest)
    shutil.rmtree(incoming, ignore_errors=True)
    return manifest


# ---- text of any data set ----


def fetch_text(
    repo: str, name: str, out: Path, field: str = "text", min_characters: int = 1, revision: str | None = None
) -> Path:
    """Write a file's documents to OUT/NAME.jsonl, if that is not there yet, and return its path.

    The file has one JSON object a line, or is a .txt of one document; either may be a .gz.
    ValueError if its field holds no text, or none of so many characters; OSError if the hub cannot give the file.
    """
    path = out / str(Path(name.removesuffix(".gz")).with_suffix(".jsonl")).replace("/", "-")
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of a sweep may want the same file
        if path.exists():
            return path
        fetched = fetch(repo, name, out / ".incoming", revision)

        def write(file):
            for text in _documents(fetched, name, field):
                if len(text) >= min_characters:
                    file.write(json.dumps({"text": text}).encode() + b"\n")
            require(file.tell(), f"{name} of {repo}: no document has {min_characters} characters. Use fewer.")

        try:
            replace_file(path, write)
        finally:
            shutil.rmtree(out / ".incoming")
    return path


def _documents(path: Path, name: str, field: str) -> Iterator[str]:
    try:
        with (gzip.open if name.endswith(".gz") else open)(path, "rt", encoding="utf-8", errors="replace") as file:
            if name.removesuffix(".gz").endswith(".txt"):
                yield file.read()
            for number, line in enumerate(file, 1):
                yield read_field(line, field, f"{name}: line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{name}: damaged ({error}). Run the command again.") from error


def read_field(line: str, field: str, place: str) -> str:
    """Return the text in a field of a JSON object. ValueError, naming the place, if there is none."""
    try:
        text = json.loads(line)[field]
    except (ValueError, TypeError, LookupError, RecursionError):
        text = None
    require(isinstance(text, str), f"{place}: not a JSON object with a text in field {field!r}. Choose a --field.")
    return text


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.download", description="Download text or token shards.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for dataset in FINEWEB_SHARDS:
        command = commands.add_parser(dataset, help="shards of GPT-2 tokens")
        command.add_argument("--shards", type=int, help="training shards of 100 M tokens, 200 MB (default: all)")
        command.add_argument("--out", type=Path, default=Path("data") / dataset, help="folder (default: data/NAME)")
    command = commands.add_parser("text", help="files of a data set on the hub, as .jsonl files")
    command.add_argument("repo", metavar="OWNER/NAME", help="data set")
    command.add_argument("files", nargs="+", metavar="FILE", help="files of the data set")
    command.add_argument("--out", required=True, type=Path, help="folder for the text")
    command.add_argument("--field", default="text", help="field of the text (default: text)")
    command.add_argument("--min-characters", type=int, default=1, help="leave out shorter documents")
    command.add_argument("--revision", help="branch or commit of the data set (default: main)")
    args = parser.parse_args(argv)

    if args.command in FINEWEB_SHARDS:
        manifest = download_fineweb(args.command, args.shards, args.out)
        tokens = sum(entry["tokens"] for entry in manifest["files"].values())
        print(f"{args.out}: {len(manifest['files'])} verified shards, {tokens:,} tokens")
    else:
        for name in args.files:
            print(fetch_text(args.repo, name, args.out, args.field, args.min_characters, args.revision))


if __name__ == "__main__":
    main()
