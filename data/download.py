"""Downloads from the Hugging Face hub: FineWeb as shards of GPT-2 tokens, and single files.

    python -m data.download fineweb10B --shards 25      2.5 B tokens, 5 GB, enough for gpt_162m_4k
    python -m data.download fineweb100B --shards 101    10.1 B tokens, 20 GB, enough for gpt_304m_4k

The hub's client retries and resumes. Only a complete file gets its final name, so a second run of the command fetches
only the missing files. Keller Jordan made the FineWeb shards. Every shard is compared with its sha256 on the hub.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from data.shards import GPT2_VOCAB, describe_shard, read_manifest, shard_bytes, write_manifest
from data.sources import FINEWEB_SHARDS
from errors import UserError, exit_on_user_error, require


@contextmanager
def one_line_errors(action: str) -> Iterator[None]:
    """Turn every error of an action on the hub into a one-line OSError, because HTTP libraries raise many types."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"cannot {action}: {message}. Run the command again.") from error


def fetch(repo: str, name: str, folder: Path | None = None, repo_type: str = "dataset") -> Path:
    """Download a file of the hub into a folder (None: the cache) and return its path. Raise OSError if that fails.

    An interrupted download continues where it stopped, if the folder still has the partial file.
    """
    from huggingface_hub import hf_hub_download

    with one_line_errors(f"download {name} of {repo}"):
        return Path(hf_hub_download(repo, name, repo_type=repo_type, local_dir=folder))


def model_file(model: str | Path, name: str) -> Path:
    """Return the path of a model's file. model: a folder, or a name on the hub. Raise OSError if a download fails."""
    return Path(model) / name if Path(model).is_dir() else fetch(str(model), name, repo_type="model")


def download_fineweb(dataset: str, num_shards: int | None, out: Path) -> dict:
    """Fetch the validation shard and the first training shards (None: all) and return the manifest.

    dataset: "fineweb10B" or "fineweb100B". Raise ValueError for more shards than there are, and for a folder of other
    data. Remove a file with a wrong sha256 or a bad header, and raise ValueError. Raise OSError if a download fails.
    """
    # 1. List the files.
    repo = f"kjj0/{dataset}-gpt2"
    available = FINEWEB_SHARDS[dataset]
    num_shards = available if num_shards is None else num_shards
    problem = f"--shards {num_shards}: {repo} has {available} training shards. Use 1 to {available}."
    require(1 <= num_shards <= available, problem)
    train = [f"fineweb_train_{i:06d}.bin" for i in range(1, available + 1)]
    present = [name for name in train[num_shards:] if (out / name).exists()]  # modded-nanogpt may have made the folder
    names = ["fineweb_val_000000.bin", *train[:num_shards], *present]

    # 2. Start or read the manifest. It is written first, so open_split refuses unchecked files: they have no entry.
    out.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(out) or {"tokenizer": "gpt2", "vocab_size": GPT2_VOCAB, "source": repo, "files": {}}
    source = manifest.get("source")  # fineweb10B and fineweb100B have files of the same names and sizes
    require(source == repo, f"{out}: has data of {source or 'another source'}. Choose another --out.")
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name in names}  # others are gone
    write_manifest(out, manifest)

    # 3. Fetch the files that are not there yet.
    for name in tqdm(names, desc=repo, unit="file", disable=None):
        path = out / name
        entry = manifest["files"].get(name)
        if entry and path.exists() and path.stat().st_size == shard_bytes(entry["tokens"]):
            continue
        manifest["files"][name] = fetch_shard(repo, name, out)
        write_manifest(out, manifest)
    return manifest


def fetch_shard(repo: str, name: str, out: Path) -> dict:
    """Download a shard into a folder and return its entry in the manifest. Remove a bad file and raise ValueError."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with one_line_errors(f"download {name} of {repo}"):
        sha256 = get_hf_file_metadata(hf_hub_url(repo, name, repo_type="dataset")).etag  # of an LFS file: sha256
    path = fetch(repo, name, out)
    try:
        entry = describe_shard(path)
        require(entry["sha256"] == sha256, f"{path}: its sha256 differs from the hub's.")
    except ValueError as error:
        path.unlink()
        raise UserError(f"{error} The file was removed. Run the command again.") from error
    return entry


@exit_on_user_error()
def main():
    parser = argparse.ArgumentParser(prog="python -m data.download", description="Download FineWeb's GPT-2 tokens.")
    parser.add_argument("dataset", choices=FINEWEB_SHARDS)
    parser.add_argument("--shards", type=int, help="training shards of 100 M tokens, 200 MB (default: all)")
    parser.add_argument("--out", type=Path, help="output folder (default: data/DATASET)")
    args = parser.parse_args()
    out = args.out or Path("data") / args.dataset
    manifest = download_fineweb(args.dataset, args.shards, out)
    tokens = sum(entry["tokens"] for entry in manifest["files"].values())
    print(f"{out}: {len(manifest['files'])} verified shards, {tokens:,} tokens")


if __name__ == "__main__":
    main()
