"""Trains a LLaMA-style language model on text, and prints a sample."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Hosts, exit_if_stopped, make_optimizer, plot_metric, print_once, run_directory
from _corpus import read_texts, windows
from tokenizers import ByteLevelBPETokenizer

import redcoast as rc
from redcoast.models import Llama, LlamaConfig


@dataclass(frozen=True)
class Config:
    text: Path | None = None  # file or folder of text; by default Python's standard library
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
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # compute dtype (weights are float32)
    data: int = -1  # number of data-parallel groups (-1: all remaining devices)
    fsdp: int = 1  # number of devices to shard parameters, optimizer state and batch over (FSDP)
    model: int = 1  # number of devices for tensor parallelism
    directory: Path = Path("runs/language_modeling")  # directory with one directory per run
    resume: bool = False  # resume the newest run in the directory
    wandb: bool = False  # log to Weights & Biases (to a local file without an account)
    seed: int = 0  # random seed for the parameters, the data order and the sample
    prompt: str = "def main("  # prompt for the sample
    hosts: tyro.conf.OmitArgPrefixes[Hosts] = field(default_factory=Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    mesh = rc.make_mesh(data=c.data, fsdp=c.fsdp, model=c.model)
    directory = run_directory(c.directory, resume=c.resume, config=c)

    # Data: examples are windows of one long array of tokens.
    texts, valid_texts = read_texts(c.text)
    encode, decode, vocab = make_tokenizer(c, texts)
    train, valid = (windows(map(encode, part), c.seq) for part in (texts, valid_texts))
    # Bits per byte can be compared between tokenizers; nats per token cannot.
    bits_per_nat = np.sum(valid[:, 1:] >= 0) / len("".join(valid_texts).encode()) / np.log(2)

    def loss_fn(model, batch, key):
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(inputs).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        loss = jnp.mean(losses, where=targets >= 0)
        return loss, {"weight": jnp.sum(targets >= 0), "bits_per_byte": loss * bits_per_nat}

    # `fit` plans the model before creating it, so it may be larger than the memory of a device.
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
        evaluation=rc.Evaluation(valid, every=max(1, c.steps // 4)),
        checkpoints=rc.Checkpoints(directory),
        log=rc.wandb_logger(project="lm", config=c) if c.wandb else rc.console_logger(every=60),
        accumulate=c.accumulate,
        compute_dtype=jnp.dtype(c.compute_dtype),
    )

    exit_if_stopped(int(state.step), c.steps)
    bits = plot_metric(directory, "bits_per_byte")
    prompt = np.fromiter(encode(c.prompt), np.int32)[: c.seq // 2]
    sampling = {"max_new_tokens": c.seq - len(prompt), "temperature": 0.8, "key": key}
    new = rc.generate(state.model, prompt[None], **sampling)[0]
    text = decode([*prompt.tolist(), *new.tolist()])
    print_once(f"Sample:\n{text}\nValidation bits per byte: {bits:.3f}\nRun: {directory}")


def make_tokenizer(c: Config, texts: list[str]):
    """Returns functions that encode and decode text, and the vocabulary size."""
    if c.tokenizer == "bytes":
        return str.encode, lambda tokens: bytes(tokens).decode(errors="replace"), 256
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=c.vocab, show_progress=False)
    return lambda text: bpe.encode(text).ids, bpe.decode, bpe.get_vocab_size()


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
