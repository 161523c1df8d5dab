"""A tiny Llama of the real class with grouped queries, random weights and a tokenizer, and text in its tokens."""

import json
import random

import torch

VOCAB = 304
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def save_tokenizer(folder, vocab_size=VOCAB):
    """A tokenizers file with <s>, and the configuration that names it, as Llama's folder has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(50), trainers.BpeTrainer(vocab_size=vocab_size, **options))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="<s>", model_max_length=64)))


def texts(count):
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefgh \u00e9\u4e16<s>", k=400)) for _ in range(count)]


def save_model(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokens = dict(vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **tokens))
    with torch.no_grad():
        for parameter in model.parameters():  # without it, all scores and losses are almost the same
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    save_tokenizer(folder)
