"""A tiny Llama of the real class with grouped queries, random weights and a tokenizer, and text in its tokens."""

import random

import torch
from commands import python, write_files

VOCAB = 304


def save_tokenizer(folder, vocab_size=VOCAB):
    """Write a tokenizers file with <s>, and the configuration that names it, as Llama's folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special, alphabet = ["<unk>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    options = dict(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(50), trainers.BpeTrainer(vocab_size=vocab_size, **options))
    config = '{"bos_token": "<s>", "model_max_length": 64}'
    write_files(folder, {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": config})


def texts(count):
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefgh \u00e9\u4e16<s>", k=400)) for _ in range(count)]


def run_elsewhere(folder, script, *argv):
    """Run a script in a folder, with neither this repository nor the hub at hand."""
    variables = dict(PYTHONPATH="", HF_HOME=str(folder / "home"), HF_HUB_OFFLINE="1")
    python("-c", script, *argv, cwd=folder, timeout=600, **variables)


def make_model(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.3,  # with the default, all scores and losses are almost the same
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def save_model(folder, **changes):
    make_model(**changes).save_pretrained(folder)
    save_tokenizer(folder)
