"""Makes the text of the study `documents`: short documents to train on, and whole folders to validate on.

    python -m results.documents.blocks      into data/blocks, after `python -m data.python_source far`

A training document is a block of Python source that two blank lines separate from others, such as a function or a
class. It has 32 to 512 tokens, so no document is longer than a training sequence. The blocks of all training folders
of `far` are in random order, so a block does not follow its neighbour in the file. The validation text and the
tokenizer are those of `far`.
"""

import tempfile
from pathlib import Path

import numpy as np

from data.documents import DocumentReader
from data.python_source import FAR_PACKAGES, source_folders, write_folders
from data.shard_writer import ShardWriter
from data.shards import copy_tokenizer
from data.text import encode, split_documents
from data.tokenizer import load_tokenizer
from errors import exit_on_user_error, require

FAR, OUT = Path("data/far"), Path("data/blocks")
LENGTHS = range(32, 513)  # tokens of a training document, the end-of-text token included
SEED = 0


@exit_on_user_error()
def main():
    # 1. The documents of `far`, in its two splits.
    require(not any(OUT.glob("*.bin")), f"{OUT}: already has shards. Remove them first.")
    require((FAR / "tokenizer.json").exists(), f"{FAR} has no text. Run `python -m data.python_source far`.")
    tokenizer = load_tokenizer(FAR)
    with tempfile.TemporaryDirectory() as folder:
        write_folders(source_folders(FAR_PACKAGES), Path(folder))
        splits = split_documents(DocumentReader([Path(folder)]), val_fraction=0.05)

    # 2. The blocks of the training documents, in random order.
    blocks = []
    for text in splits["train"]:
        blocks += [block.strip() for block in text.split("\n\n\n")]
    order = np.random.default_rng(SEED).permutation(len(blocks))
    shuffled = [blocks[i] for i in order]
    documents = [[tokenizer.eot, *ids] for ids in tokenizer.encode_batch(shuffled)]
    chosen = [tokens for tokens in documents if len(tokens) in LENGTHS]

    # 3. Their shards.
    OUT.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer.file, OUT)
    with ShardWriter(OUT, "blocks", tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size) as writer:
        for tokens in chosen:
            writer.write("train", tokens)
        for tokens in encode(splits["val"], tokenizer):
            writer.write("val", tokens)
        writer.close()
    count = sum(map(len, chosen))
    print(f"train: {len(chosen):,} of {len(blocks):,} blocks, {count:,} tokens, {count / len(chosen):.0f} a block")


if __name__ == "__main__":
    main()
