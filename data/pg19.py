"""Downloads books: the 50 of PG-19's validation split (Rae et al. 2019, arXiv 1911.05507), 17 MB of long documents.

    python -m data.pg19                      data/pg19/BOOK.txt, for `python -m data.text data/pg19 ...`

The list of the books is on the Hugging Face hub, the books, published before 1919, on the site of PG-19's authors. A
book gets its name when all of it is there, so a second run fetches what is missing, whatever stopped the first.
"""

import argparse
import os
import re
import shutil
from pathlib import Path
from urllib.request import urlopen

from tqdm import tqdm

from data.fineweb import ask_hub, fetch_file
from errors import exit_on_user_error, require

REPOSITORY, BOOKS = "deepmind/pg19", "data/validation_files.txt"
SITE = "https://storage.googleapis.com/deepmind-gutenberg"


def download(out: Path, site: str = SITE) -> list[Path]:
    """Fetch the books that are missing in the folder and return the files of all.

    OSError, in one line, when they cannot be had; ValueError when the list is no list of books.
    """
    incoming = out / ".incoming"
    try:
        listed, _ = fetch_file(f"{BOOKS} of {REPOSITORY}", REPOSITORY, BOOKS, incoming)
        names = listed.read_text().split()
        is_list = names and all(re.fullmatch(r"validation/\d+\.txt", name) for name in names)
        require(is_list, f"{BOOKS} of {REPOSITORY} is not a list of books any more: use text of your own")
        books = [out / Path(name).name for name in names]
        for name, book in tqdm(list(zip(names, books)), desc="PG-19", unit="book", disable=None):
            if not book.exists():
                fetched = incoming / book.name
                fetched.write_bytes(ask_hub(f"{name} of PG-19", read, f"{site}/{name}", site=site))
                os.replace(fetched, book)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return books


def read(url: str) -> bytes:
    with urlopen(url, timeout=60) as response:
        return response.read()


@exit_on_user_error()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.pg19", description="Download 50 books of PG-19.")
    parser.add_argument("--out", type=Path, default=Path("data/pg19"), help="folder (default: data/pg19)")
    parser.add_argument("--site", default=SITE, help="where the books are (default: their authors' site)")
    args = parser.parse_args(argv)
    books = download(args.out, args.site)
    print(f"{args.out}: {len(books)} books, {sum(book.stat().st_size for book in books) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
