"""Downloads FineWeb as GPT-2 token shards: Keller Jordan's kjj0/fineweb10B-gpt2 and kjj0/fineweb100B-gpt2.

    python -m data.fineweb 10B --shards 25      what gpt_162m_4k reads: 4,578 steps of 524,288 tokens
    python -m data.fineweb 100B --shards 101    what gpt_304m_4k reads: 10,900 steps of 917,504 tokens

A shard is 100M tokens (200 MB). Every file is compared with the sha256 that the hub has for it (the hub's own client
compares sizes only), gets its name, and is then entered in the manifest, so a second run fetches what is missing,
whatever stopped the first. A failure that may pass is tried three times; without a network the command ends at once; a
server that does not answer is given up after a few minutes, one that answers too slowly after --minutes.
"""

import argparse
import errno
import math
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data.shards import TOKENIZER_FILE, describe_shard, read_manifest, refuse_file, shard_bytes, write_manifest
from errors import exit_on_user_error, require
from files import sync

SHARD_TOKENS = 100_000_000
DATASETS = {  # size: (repository, training shards in it)
    "10B": ("kjj0/fineweb10B-gpt2", 103),
    "100B": ("kjj0/fineweb100B-gpt2", 1030),
}


def data_command(folder: Path, tokens: int) -> str:
    """Return the command that gives a data folder at least `tokens` training tokens, or all that its data set has.

    The folder's name tells what it is meant to hold. More text than a prepared folder has goes into a new folder.
    """
    folder = Path(folder)
    for size, (_, most) in DATASETS.items():
        if folder.name == f"fineweb{size}":
            shards = min(most, max(1, math.ceil(tokens / SHARD_TOKENS)))
            out = [] if folder == Path("data") / folder.name else ["--out", str(folder)]
            return shlex.join(["python", "-m", "data.fineweb", size, "--shards", str(shards), *out])
    there = any(folder.glob("*.bin"))
    if folder.name == "quickstart" and not there:
        return "bash scripts/quickstart.sh"
    out = folder.with_name(f"{folder.name}-more") if there else folder
    tokenizer = folder / TOKENIZER_FILE if (folder / TOKENIZER_FILE).exists() else "gpt2"
    return shlex.join(["python", "-m", "data.text", "FILES...", "--tokenizer", str(tokenizer), "--out", str(out)])


def download(size: str, num_shards: int | None, out: Path, minutes: float = 60) -> dict:
    """Fetch the validation shard and the first `num_shards` training shards (None: all) and return the manifest.

    ValueError for a number of shards that there is not, a folder of other data, or a file that is not what the hub
    says it is (it is removed); OSError when the hub cannot be reached, or a file takes longer than `minutes`.
    """
    repo, most = DATASETS[size]
    num_shards = most if num_shards is None else num_shards
    require(1 <= num_shards <= most, f"--shards {num_shards}: {repo} has 1 to {most} training shards")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, num_shards + 1))]

    refuse_file(out)
    manifest = read_manifest(out) or {"tokenizer": "gpt2", "vocab_size": 50257, "source": repo, "files": {}}
    source = manifest.get("source", "another source")  # 10B and 100B have files of the same names and sizes
    require(source == repo, f"{out}: holds data of {source}: choose another --out")
    missing = [name for name in names if not _is_verified(out / name, manifest["files"].get(name))]
    incoming = out / ".incoming"  # so that what is not checked yet never has a shard's name
    try:
        for name in tqdm(missing, desc=repo, unit="file", disable=None):
            shutil.rmtree(incoming, ignore_errors=True)  # what a killed run left
            path, sha256 = fetch_file(f"{name} of {repo}", repo, name, incoming, minutes)
            known = re.fullmatch("[0-9a-f]{64}", sha256 or "")
            require(known, f"{name} of {repo}: the hub has no sha256 for this file, so nothing to check it with")
            try:
                entry = describe_shard(path)
                require(entry["sha256"] == sha256, f"{path}: its sha256 is not the one that the hub has")
                largest = entry["max_token"]
                require(
                    largest < manifest["vocab_size"], f"{path}: has token {largest}, which GPT-2's tokenizer has not"
                )
            except ValueError as error:
                raise ValueError(f"{error}; the file was removed, run the command again") from error
            sync(path)
            os.replace(path, out / name)
            manifest["files"][name] = entry
            write_manifest(out, manifest)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return manifest


def fetch_file(
    what: str, repo: str, name: str, folder: Path, minutes: float = 60, revision: str | None = None
) -> tuple[Path, str | None]:
    """Download a file of a data set on the hub; return its path and its ETag, which of a large file is the sha256.

    The hub is asked for the ETag first because the client does that once, while it tries a download six times. OSError,
    in one line, when the hub cannot give `what`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    where = dict(repo_type="dataset", revision=revision)
    etag = ask_hub(what, get_hf_file_metadata, hf_hub_url(repo, name, **where), minutes=minutes).etag
    path = ask_hub(what, hf_hub_download, repo, name, **where, local_dir=folder, minutes=minutes)
    return Path(path), etag


def _is_verified(path: Path, entry: dict | None) -> bool:
    """Tell whether a file was verified when it came and has kept its size (`data.shards verify` reads all of it)."""
    return bool(entry) and path.exists() and path.stat().st_size == shard_bytes(entry["tokens"])


def ask_hub(what: str, call: Callable, *args, minutes: float = 60, site: str = "the Hugging Face hub", **kwargs):
    """Return call(*args, **kwargs), a download of `what`; raise OSError, in one line, when that fails.

    The hub's client retries some failures and not others, resumes a body that stops, but waits for ever for one that
    trickles. So here: three tries of whatever may pass (no network is not that), and `minutes` for all of it.
    """
    advice = f"cannot fetch {what} from {site}, run the command again"
    with time_limit(minutes, advice):
        for wait in (1, 4, None):  # seconds
            try:
                return call(*args, **kwargs)
            except Exception as error:  # the client lets through what its HTTP library raises, and changes that library
                message = " ".join(str(error).split()) or type(error).__name__
                if wait is None or not _may_pass(error):
                    raise OSError(f"{advice}: {message}") from error
            print(f"{what}: {message}; trying again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def _may_pass(error: Exception) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    if isinstance(error, OfflineModeIsEnabled) or (isinstance(error, OSError) and error.errno):
        return False  # told to stay offline; a full disk
    causes = [error]  # the HTTP libraries wrap what the system says
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    unreachable = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED)
    return not any(isinstance(c, socket.gaierror) or getattr(c, "errno", None) in unreachable for c in causes)


class _OutOfTime(BaseException):  # no Exception: HTTP libraries catch those and try again
    pass


@contextmanager
def time_limit(minutes: float, advice: str) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer; no limit outside the main thread, where no signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"{advice}: no end after {minutes:g} minutes") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.fineweb", description="Download FineWeb as GPT-2 tokens.")
    parser.add_argument("size", choices=list(DATASETS))
    parser.add_argument("--shards", type=int, help="training shards, 100M tokens and 200 MB each (default: all)")
    parser.add_argument("--out", type=Path, help="folder (default: data/fineweb10B or data/fineweb100B)")
    parser.add_argument("--minutes", type=float, default=60, help="give up a file that takes longer (default 60)")
    args = parser.parse_args(argv)
    out = args.out or Path("data") / f"fineweb{args.size}"
    manifest = download(args.size, args.shards, out, args.minutes)
    tokens = sum(entry["tokens"] for entry in manifest["files"].values())
    print(f"{out}: {len(manifest['files'])} verified shards, {tokens:,} tokens")


if __name__ == "__main__":
    main()
