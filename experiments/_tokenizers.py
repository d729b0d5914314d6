"""Tokenizers that are trained on the texts of an experiment, and batches of tokens."""

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, START, END = range(3)  # the first three tokens of a trained tokenizer


def train_tokenizer(texts: Iterable[str], vocab: int, *, start: bool = True) -> Tokenizer:
    """Trains a byte-level byte-pair encoding with `vocab` tokens. Texts end with the token `END`,
    and begin with `START` unless `start` is false. `[MASK]` in a text is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[START]", "[END]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # so that no text has an unknown token
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, **options))
    template = "$0 [END]"
    if start:
        template = f"[START] {template}"
    ids = [("[START]", START), ("[END]", END)]
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 256 tokens, the bytes of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of texts, truncated or padded to `seq`, and their mask, (count, seq)."""
    tokenizer.enable_truncation(seq)
    tokenizer.enable_padding(length=seq)
    tokens, masks = [], []
    for encoded in tokenizer.encode_batch(list(texts)):
        tokens.append(encoded.ids)
        masks.append(encoded.attention_mask)
    return np.array(tokens), np.array(masks)
