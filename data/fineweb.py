"""Downloads FineWeb as GPT-2 token shards: Keller Jordan's kjj0/fineweb10B-gpt2 and kjj0/fineweb100B-gpt2.

    python -m data.fineweb 10B --shards 25

A shard is 100M tokens (200 MB); the 162M recipe reads 25 (4578 steps of 524,288 tokens). Every file is compared with
the sha256 that the hub has for it (the hub's own client compares sizes only) and then entered in the manifest, so a
second run fetches what is missing, whatever stopped the first.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from data.shards import HEADER_BYTES, TOKEN, describe_shard, read_manifest, write_manifest

DATASETS = {  # size: (repository, training shards in it)
    "10B": ("kjj0/fineweb10B-gpt2", 103),
    "100B": ("kjj0/fineweb100B-gpt2", 1030),
}


def download(size: str, num_shards: int | None, out: Path) -> dict:
    """Fetches the validation shard and the first `num_shards` training shards (None: all) and returns the manifest.

    ValueError for a number of shards that there is not, a folder of other data, or a file that is not what the hub
    says it is (it is removed); OSError when the hub cannot be reached.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from tqdm import tqdm

    repo, most = DATASETS[size]
    num_shards = most if num_shards is None else num_shards
    if not 1 <= num_shards <= most:
        raise ValueError(f"--shards {num_shards}: {repo} has 1 to {most} training shards")
    names = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, num_shards + 1))]

    out = Path(out)
    manifest = read_manifest(out) or {"tokenizer": "gpt2", "vocab_size": 50257, "source": repo, "files": {}}
    if manifest.get("source") != repo:  # 10B and 100B have files of the same names and sizes
        raise ValueError(f"{out}: holds data of {manifest.get('source', 'another source')}: choose another --out")
    missing = [name for name in names if not _is_verified(out / name, manifest["files"].get(name))]
    for name in tqdm(missing, desc=repo, unit="file", disable=None):
        infos = ask_hub(repo, HfApi().get_paths_info, repo, name, repo_type="dataset")
        if not infos:
            raise ValueError(f"{repo} has no file {name}")
        path = Path(ask_hub(repo, hf_hub_download, repo, name, repo_type="dataset", local_dir=out))
        try:
            entry = describe_shard(path)
            if entry["sha256"] != infos[0].lfs.sha256:
                raise ValueError(f"{path}: its sha256 is not the one that the hub has")
        except ValueError as error:
            path.unlink()
            raise ValueError(f"{error}; the file was removed, run the command again") from error
        manifest["files"][name] = entry
        write_manifest(out, manifest)
    return manifest


def _is_verified(path: Path, entry: dict | None) -> bool:
    """Whether a file was verified when it came and has kept its size (`data.shards verify` reads it all again)."""
    return bool(entry) and path.exists() and path.stat().st_size == HEADER_BYTES + entry["tokens"] * TOKEN.itemsize


def ask_hub(what: str, call: Callable, *args, **kwargs):
    """call(*args, **kwargs), a function of huggingface_hub; OSError, in one line, when it cannot give `what`."""
    try:
        return call(*args, **kwargs)
    except Exception as error:  # the hub's client lets through what its HTTP library raises, and changes that library
        message = " ".join(str(error).split())
        raise OSError(f"cannot fetch {what} from the Hugging Face hub, run the command again: {message}") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m data.fineweb", description="Download FineWeb as GPT-2 tokens.")
    parser.add_argument("size", choices=list(DATASETS))
    parser.add_argument("--shards", type=int, help="training shards, 100M tokens and 200 MB each (default: all)")
    parser.add_argument("--out", type=Path, help="folder (default: data/fineweb10B or data/fineweb100B)")
    args = parser.parse_args(argv)
    out = args.out or Path("data") / f"fineweb{args.size}"
    try:
        manifest = download(args.size, args.shards, out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokens = sum(entry["tokens"] for entry in manifest["files"].values())
    print(f"{out}: {len(manifest['files'])} verified shards, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
