"""Trains a LLaMA-style language model on text, and prints a sample."""

from dataclasses import dataclass, field
from typing import Literal

import _options
import jax.numpy as jnp
import numpy as np
import optax
from _common import (
    exit_if_stopped,
    make_optimizer,
    refuse_uneven_batch,
    report,
    save_samples,
    start,
)
from _corpus import read_texts, windows
from _options import Existing, Maybe, Positive, refuse
from _plots import plot_metric
from _tokenizers import train_tokenizer

import redcoast as rc
from redcoast.models import Llama, LlamaConfig


@dataclass(frozen=True)
class Config:
    text: Maybe[Existing] = None  # file or folder of text; by default Python's standard library
    tokenizer: Literal["bytes", "bpe"] = "bytes"  # bytes, or byte-pair encoding trained on the text
    vocab: int = 4096  # vocabulary size of the bpe tokenizer
    width: int = 128  # size of the residual stream
    layers: int = 4  # number of decoder layers
    heads: int = 8  # number of attention heads
    kv_heads: int = 4  # number of key and value heads (grouped-query attention)
    seq: int = 128  # sequence length in tokens
    batch_size: int = 32  # global batch size in sequences
    accumulate: int = 1  # number of microbatches for gradient accumulation
    steps: int = 540  # number of training steps
    learning_rate: Positive = 3e-3  # peak learning rate after the warmup
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of layers; parameters: float32
    prompt: str = "def main("  # prompt for the sample
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if c.width % (2 * c.heads) or c.heads % c.kv_heads:
        refuse("--width must be a multiple of 2 x --heads, and --heads of --kv-heads.")
    refuse_uneven_batch(c)
    run = start(c, "language_modeling")

    # Data: examples are windows of one long array of tokens.
    texts, valid_texts = read_texts(c.text)
    encode, decode, vocab = make_tokenizer(c, texts)
    train = windows(map(encode, texts), c.seq)  # (windows, seq + 1)
    valid = windows(map(encode, valid_texts), c.seq)
    # Bits per byte can be compared between tokenizers; nats per token cannot.
    valid_bytes = len("".join(valid_texts).encode())
    tokens_per_byte = np.sum(valid[:, 1:] >= 0) / valid_bytes

    def loss_fn(model, batch, key):
        inputs, targets = batch[:, :-1], batch[:, 1:]  # (batch, seq)
        logits = model(inputs).astype(jnp.float32)  # (batch, seq, vocab)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        loss = jnp.mean(losses, where=targets >= 0)
        bits_per_byte = loss * (tokens_per_byte / np.log(2))
        return loss, {"weight": jnp.sum(targets >= 0), "bits_per_byte": bits_per_byte}

    # `fit` plans the model before creating it, so it may be larger than the memory of a device.
    hidden = 32 * max(1, round(c.width / 12))
    sizes = LlamaConfig(vocab, c.width, c.layers, c.heads, c.kv_heads, hidden)
    state = rc.fit(
        lambda key: Llama(sizes, key=key),
        make_optimizer(c, len(train), b2=0.95, weight_decay=0.1),
        train,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        accumulate=c.accumulate,
        steps=c.steps,
        compute_dtype=jnp.dtype(c.dtype),
        evaluation=rc.Evaluation(valid, every=max(1, c.steps // 4)),
        **run.fit_arguments,
    )

    exit_if_stopped(int(state.step), c.steps)
    bits_per_byte = plot_metric(run.directory, "bits_per_byte")
    prompt = np.fromiter(encode(c.prompt), np.int32)[: c.seq // 2]
    new_tokens = rc.generate(
        state.model,
        prompt[None],
        max_new_tokens=c.seq - len(prompt),
        temperature=0.8,
        key=run.key,
    )[0]
    text = decode([*prompt.tolist(), *new_tokens.tolist()])
    save_samples(run.directory, text)
    report(run.directory, validation_bits_per_byte=bits_per_byte)


def make_tokenizer(c: Config, texts: list[str]):
    """Returns functions that encode and decode text, and the vocabulary size."""
    if c.tokenizer == "bytes":
        return str.encode, lambda tokens: bytes(tokens).decode(errors="replace"), 256
    bpe = train_tokenizer(texts, c.vocab)
    encode = lambda text: bpe.encode(text, add_special_tokens=False).ids
    return encode, bpe.decode, bpe.get_vocab_size()


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
