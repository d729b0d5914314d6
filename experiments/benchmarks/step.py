"""The processor time of a training step, compared with that of other libraries.

    nox -s bench_redco -- --families gpt2 llama
    nox -s bench_torch_step
    nox -s bench_levanter

Both have the same sizes, AdamW, the loss of all tokens, float32 and no dropout, and take turns in
one process on one CPU device. A ratio above 1 means that redcoast takes longer. With
`JAX_PLATFORMS=cpu`, both sides have redcoast's settings of the allocator, and otherwise glibc's.
`--against` names the other side: `flax` needs flax and transformers 4.57, the last version that has
Flax models; `torch` and `torch-compile` need torch, transformers 5 and a compiler of C++, and
compare GPT-2 and LLaMA; the three of Levanter need it, and compare LLaMA.
"""

import dataclasses
import functools as ft
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import jax
import numpy as np
import rivals
import tyro
from rivals import HEADS, HIDDEN, LENGTH, VOCAB, WIDTH, Turn

from redcoast import models

SIZES: dict[str, Any] = {"vocab": VOCAB, "width": WIDTH, "heads": HEADS, "hidden": HIDDEN}
OURS = {
    "gpt2": models.GPT2Config(**SIZES, layers=1, positions=LENGTH),
    "llama": models.LlamaConfig(**SIZES, layers=1, kv_heads=HEADS),
    "gptj": models.GPTJConfig(**SIZES, layers=1, rotary_dim=32),
    "opt": models.OPTConfig(**SIZES, layers=1, positions=LENGTH),
    "bert": models.BertConfig(**SIZES, layers=1, positions=LENGTH, head="masked"),
    "bart": models.BartConfig(**SIZES, layers=1, decoder_layers=1, positions=LENGTH),
    "t5": models.T5Config(**SIZES, layers=1, decoder_layers=1),
}
Against = Literal[
    "flax", "torch", "torch-compile", "levanter-scan", "levanter-loop", "levanter-remat"
]
LOOP = {"gradient_checkpointing": False, "scan_layers": False}
THEIRS: dict[str, tuple[str, tuple[str, ...], Callable[..., tuple[Turn, int]]]] = {
    "flax": ("Flax", tuple(OURS), rivals.with_flax),
    "torch": ("torch", ("gpt2", "llama"), rivals.with_torch),
    "torch-compile": (
        "torch.compile",
        ("gpt2", "llama"),
        ft.partial(rivals.with_torch, compiled=True),
    ),
    "levanter-scan": (
        "Levanter, scan",
        ("llama",),
        ft.partial(rivals.with_levanter, gradient_checkpointing=False),
    ),
    "levanter-loop": ("Levanter, loop", ("llama",), ft.partial(rivals.with_levanter, **LOOP)),
    "levanter-remat": ("Levanter, scan with remat", ("llama",), rivals.with_levanter),
}
PACKAGES = ("jax", "flax", "transformers", "torch", "levanter", "haliax")


def main(
    families: tuple[str, ...] = (),
    against: tuple[Against, ...] = ("flax",),
    layers: int = 4,
    batch_size: int = 16,
    seq: int = 128,
    steps: int = 2,
    turns: int = 5,
    remat: Literal["none", "dots", "full"] = "none",
) -> None:
    """Prints a table of ratios.

    Args:
        families: The families of models to compare; by default all that the other side has.
        against: What to compare with.
        layers: The number of layers; for encoder-decoders, of each half.
        batch_size: The number of sequences in a batch.
        seq: The sequence length in tokens.
        steps: The number of steps in a turn.
        turns: The number of turns of each.
        remat: What redcoast rematerialises in the backward pass.
    """
    print(", ".join(f"{name} {number}" for name in PACKAGES if (number := installed(name))))
    print("| family | against | parameters | ours / theirs | least and most |")
    print("| --- | --- | ---: | ---: | ---: |")
    tokens = np.random.default_rng(0).integers(3, VOCAB, (batch_size, seq), np.int32)
    for name in against:
        title, known, theirs = THEIRS[name]
        for family in families or known:
            ours, own = with_ours(family, layers, tokens, remat)
            turn, count = theirs(family, layers, tokens)
            quotients = ratios(ours, turn, steps, turns)
            median, ends = (
                statistics.median(quotients),
                f"{min(quotients):.2f} {max(quotients):.2f}",
            )
            counts = f"{own:,}" if own == count else f"{own:,} and {count:,}"
            print(f"| {family} | {title} | {counts} | {median:.2f} | {ends} |", flush=True)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def with_ours(family: str, layers: int, tokens: np.ndarray, remat: Any) -> tuple[Turn, int]:
    """The model of redcoast."""
    halves = hasattr(OURS[family], "decoder_layers")
    config = dataclasses.replace(deepen(OURS[family], layers), remat=remat)
    kind = getattr(models, type(config).__name__.removesuffix("Config"))
    model = kind(config, key=jax.random.key(0))
    return rivals.jax_turn(
        model, lambda model: model(tokens, tokens) if halves else model(tokens), tokens
    )


def deepen(config: Any, layers: int) -> Any:
    """A configuration with this number of layers, in each half if it has two."""
    halves = {"decoder_layers": layers} if hasattr(config, "decoder_layers") else {}
    return dataclasses.replace(config, layers=layers, **halves)


def ratios(ours: Turn, theirs: Turn, steps: int, turns: int) -> list[float]:
    """The processor time of our turns divided by that of theirs."""

    def seconds(turn: Turn) -> float:
        begin = time.process_time()
        turn(steps)
        return time.process_time() - begin

    quotients = [seconds(ours) / seconds(theirs) for _ in range(turns + 1)]
    return quotients[1:]  # the first turn compiles


if __name__ == "__main__":
    tyro.cli(main)
