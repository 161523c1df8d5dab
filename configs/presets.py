"""The presets: what `python train_gpt.py PRESET` runs. Edit them, or add one: a function, and its name in PRESETS."""

import dataclasses
import difflib

from configs.config import Config


def gpt_162m_4k() -> Config:
    """The paper's 162M model, 2.4 B tokens: 4578 steps of 524,288 tokens."""
    return Config()


def gpt_162m_16k() -> Config:
    return dataclasses.replace(gpt_162m_4k(), train_length=16_384)


def gpt_162m_64k() -> Config:
    return dataclasses.replace(gpt_162m_4k(), train_length=65_536, micro_batch_tokens=65_536)


def gpt_304m_4k() -> Config:
    """The paper's 304M model, 10 B tokens, with the matrices' learning rate scaled by 768 / 1024."""
    return dataclasses.replace(
        gpt_162m_4k(),
        num_layers=16,
        num_heads=8,
        model_dim=1024,
        data_dir="data/fineweb100B",
        batch_tokens=2 * 4 * 28 * 4096,
        micro_batch_tokens=28 * 4096,
        steps=10_900,
        schedule="cosine",
        cooldown_steps=0,
        muon_lr=0.02 * 768 / 1024,
        val_every=250,
    )


def quickstart() -> Config:
    """A model for a laptop: about a minute of training on 2 CPU cores, on the text that scripts/quickstart.sh makes.

    Constants tied to the training length follow one rule for every method: the paper's rotary bases, chosen at 4096
    tokens, are multiplied by 256 / 4096 (rotary_base_length); LogN's initial scale follows from train_length by itself;
    tau and ALiBi's slopes are lengths in tokens that do not depend on it.
    """
    return Config(
        data_dir="data/quickstart",
        vocab_size=2048,
        num_layers=3,
        num_heads=3,
        model_dim=96,
        train_length=256,
        rotary_base_length=4096,
        batch_tokens=2048,
        micro_batch_tokens=2048,
        steps=420,
        cooldown_steps=120,
        val_lengths=(256, 1024, 4096),
        val_tokens=49_152,
        val_every=0,
        save_every=0,
    )


PRESETS = {f.__name__: f for f in (quickstart, gpt_162m_4k, gpt_162m_16k, gpt_162m_64k, gpt_304m_4k)}


def preset(name: str) -> Config:
    """The preset of that name. ValueError, naming the nearest, when there is none."""
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown preset {name!r}; {hint}There are: {', '.join(PRESETS)}")
    return PRESETS[name]()
