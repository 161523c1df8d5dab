"""The presets of `python train_gpt.py PRESET`. To add one, write a function and enter it in PRESETS."""

import dataclasses
from functools import partial

from configs.config import Config
from errors import UserError, did_you_mean


def gpt_162m(train_length: int = 4096) -> Config:
    """The paper's 162M model, 2.4 B tokens: 4578 steps of 524,288 tokens."""
    return Config(train_length=train_length, micro_batch_tokens=max(32_768, train_length))


def gpt_304m() -> Config:
    """The paper's 304M model, 10 B tokens, with Muon's learning rate scaled by 768 / 1024."""
    return Config(
        num_layers=16,
        num_heads=8,
        model_dim=1024,
        data_dir="data/fineweb100B",
        batch_tokens=2 * 4 * 28 * 4096,
        micro_batch_tokens=14 * 4096,  # for 80 GB; the paper's 28 sequences need more (results/engineering.md)
        steps=10_900,
        schedule="cosine",
        cooldown_steps=0,
        muon_lr=0.02 * 768 / 1024,
        val_every=250,
    )


def quickstart() -> Config:
    """A model for a laptop that learns to read far tokens in two to five minutes of a CPU core.

    Natural text alone does not teach models of this size to copy in so few tokens. So half of the training rows are
    copy rows (data/copy_rows.py), and training begins with sequences of 32, then 64 tokens. The head size is 64,
    because QK-norm bounds scores by sqrt(head size). A head of size 32 cannot attend to one token alone.
    """
    return Config(
        data_dir="data/taught",
        vocab_size=1024,
        num_layers=3,
        num_heads=2,
        model_dim=128,
        train_length=256,
        length_schedule=(32, 200, 64, 400),
        batch_tokens=2048,
        micro_batch_tokens=2048,
        steps=1000,
        cooldown_steps=286,  # the paper's share, 1308 of 4578
        val_lengths=(256, 1024, 4096),
        val_tokens=262_144,
        val_copy_gaps=(32, 128, 512, 1024, 2048),
        val_every=0,
        save_every=0,
    )


def taught() -> Config:
    """The quickstart's model and text with twice the tokens, validated up to 64x (sweep `taught`)."""
    return dataclasses.replace(
        quickstart(),
        steps=2000,
        cooldown_steps=571,
        val_lengths=(256, 1024, 4096, 16_384),
        val_tokens=524_288,
        val_copy_gaps=(32, 128, 256, 512, 1024, 2048, 4096),
        save_every=500,
    )


def far() -> Config:
    """A model of 1 M parameters that learns to copy from natural text alone (sweep `far`).

    The last validation measures far gain. All checkpoints are kept: `scripts.reproduce far_heads` reads them.
    """
    return dataclasses.replace(
        quickstart(),
        data_dir="data/far",
        num_layers=4,
        train_length=512,
        length_schedule=(),
        steps=3072,
        cooldown_steps=878,
        val_lengths=(512, 2048, 8192, 32_768),
        val_tokens=524_288,
        val_copy_gaps=(64, 256, 1024, 2048, 4096),
        val_far_windows=64,
        val_every=256,
        val_profile="light",
        save_every=256,
        keep=1000,
    )


# ---- the paper's studies on a laptop and on one GPU (configs/sweeps.py) ----------------------------------------------


def mini(train_length: int = 256) -> Config:
    """The paper's 162M for CPUs: about one pass over the standard library's source, validated up to 64x.

    256, 1024 and 4096 tokens stand for the paper's 4k, 16k and 64k. So position_scale multiplies the rotary base and
    1/slope of ALiBi by 256 / 4096. Tau is 10 tokens, as in the paper. The methods compute LogN's initial scale and
    Infini-attention's segments from train_length.
    """
    return Config(
        data_dir="data/mini",
        vocab_size=2048,
        num_layers=3,
        num_heads=2,
        model_dim=128,
        train_length=train_length,
        position_scale=256 / 4096,
        batch_tokens=4096,
        micro_batch_tokens=4096,
        steps=640,
        cooldown_steps=183,  # the paper's share, 1308 of 4578
        val_lengths=(256, 1024, 4096, 16_384),
        val_tokens=65_536,
        val_every=64,
        val_profile="fast",
        save_every=0,
    )


def mini_large() -> Config:
    """The paper's 304M model at the scale of mini: 4 layers of width 192, cosine schedule."""
    return dataclasses.replace(
        mini(),
        num_layers=4,
        num_heads=3,
        model_dim=192,
        schedule="cosine",
        cooldown_steps=0,
        muon_lr=0.02 * 128 / 192,
    )


def small(train_length: int = 4096) -> Config:
    """The paper's 162M model on 100 M tokens: minutes on one GPU."""
    return dataclasses.replace(
        gpt_162m(train_length),
        steps=192,
        cooldown_steps=55,
        val_tokens=1_048_576,
        val_every=48,
        val_copy_gaps=(512, 2048, 8192, 16_384),
    )


def small_304m() -> Config:
    """The paper's 304M model on 100 M tokens."""
    return dataclasses.replace(gpt_304m(), data_dir="data/fineweb10B", steps=109, val_tokens=1_048_576, val_every=27)


PRESETS = dict(
    quickstart=quickstart,
    taught=taught,
    far=far,
    mini=mini,
    mini_1024=partial(mini, 1024),
    mini_4096=partial(mini, 4096),
    mini_large=mini_large,
    small_4k=small,
    small_16k=partial(small, 16_384),
    small_64k=partial(small, 65_536),
    small_304m=small_304m,
    gpt_162m_4k=gpt_162m,
    gpt_162m_16k=partial(gpt_162m, 16_384),
    gpt_162m_64k=partial(gpt_162m, 65_536),
    gpt_304m_4k=gpt_304m,
)


def preset(name: str) -> Config:
    """Return the preset of that name. Raise ValueError, with similar names, if there is none."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}. {did_you_mean(name, PRESETS)}")
    return PRESETS[name]()
