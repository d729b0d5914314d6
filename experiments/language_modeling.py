"""Trains a LLaMA-style language model on text, and lets it write some."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Hosts, leave_if_stopped, make_optimizer, plot_metric, run_directory, say
from _corpus import read_texts, windows
from tokenizers import ByteLevelBPETokenizer

import redcoast as rc
from redcoast.models import Llama, LlamaConfig


@dataclass(frozen=True)
class Config:
    text: Path | None = None  # file or folder of text; by default Python's standard library
    tokenizer: Literal["bytes", "bpe"] = "bytes"  # tokens are bytes, or byte pairs learned here
    vocab: int = 4096  # number of different tokens of the bpe tokenizer
    width: int = 128  # size of the residual stream
    layers: int = 4  # number of decoder layers
    heads: int = 8  # number of attention heads
    kv_heads: int = 4  # number of key and value heads, each for a group of heads
    seq: int = 128  # length of a sequence in tokens
    batch_size: int = 32  # sequences in a batch, over all devices
    accumulate: int = 1  # microbatches that a batch is split into, to save memory
    steps: int = 540  # number of training steps
    learning_rate: float = 3e-3  # at its peak, after the warm-up
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # parameters stay in float32
    data: int = -1  # devices the batch is split over; -1 takes what the other two leave
    fsdp: int = 1  # devices the batch and the storage of the model are split over
    model: int = 1  # devices the model and its arithmetic are split over
    directory: Path = Path("runs/language_modeling")  # each run gets a directory in it
    resume: bool = False  # go on with the newest run in the directory
    wandb: bool = False  # log to Weights & Biases; without an account, to a local file
    seed: int = 0  # decides the initial parameters, the order of the data and the sample
    prompt: str = "def main("  # what the sample at the end begins with
    hosts: tyro.conf.OmitArgPrefixes[Hosts] = field(default_factory=Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    mesh = rc.make_mesh(data=c.data, fsdp=c.fsdp, model=c.model)
    directory = run_directory(c.directory, resume=c.resume, config=c)

    # Data: examples are windows of one long array of tokens.
    texts, held_out = read_texts(c.text)
    encode, decode, vocab = make_tokenizer(c, texts)
    train, valid = (windows(map(encode, part), c.seq) for part in (texts, held_out))
    # Bits per byte compare between tokenizers; nats per token do not.
    bits_per_nat = np.sum(valid[:, 1:] >= 0) / len("".join(held_out).encode()) / np.log(2)

    def loss_fn(model, batch, key):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(inputs).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        loss = jnp.mean(losses, where=targets >= 0)
        return loss, {"weight": jnp.sum(targets >= 0), "bits_per_byte": loss * bits_per_nat}

    # `fit` plans the model before it makes it, so that it may be larger than a device.
    sizes = LlamaConfig(vocab, c.width, c.layers, c.heads, c.kv_heads, 32 * round(c.width / 12))
    optimizer = make_optimizer(c, len(train), b2=0.95, weight_decay=0.1)
    key = jax.random.key(c.seed)
    state = rc.fit(
        lambda key: Llama(sizes, key=key),
        optimizer,
        train,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        key=key,
        mesh=mesh,
        eval_examples=valid,
        eval_every=max(1, c.steps // 4),
        checkpoints=rc.Checkpoints(directory),
        log=rc.wandb_logger(project="lm", config=c) if c.wandb else rc.console_logger(every=60),
        accumulate=c.accumulate,
        compute_dtype=jnp.dtype(c.compute_dtype),
    )

    leave_if_stopped(int(state.step), c.steps)
    bits = plot_metric(directory, "bits_per_byte")
    prompt = np.fromiter(encode(c.prompt), np.int32)[: c.seq // 2]
    drawn = {"max_new_tokens": c.seq - len(prompt), "temperature": 0.8, "key": key}
    new = rc.generate(state.model, prompt[None], **drawn)[0]
    text = decode([*prompt.tolist(), *new.tolist()])
    say(f"Sample:\n{text}\nValidation bits per byte: {bits:.3f}\nRun: {directory}")


def make_tokenizer(c: Config, texts: list[str]):
    """Functions from text to tokens and back, and how many different tokens there are."""
    if c.tokenizer == "bytes":
        return str.encode, lambda tokens: bytes(tokens).decode(errors="replace"), 256
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=c.vocab, show_progress=False)
    return lambda text: bpe.encode(text).ids, bpe.decode, bpe.get_vocab_size()


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
