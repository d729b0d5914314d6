"""The processor time of a training step, compared with the Flax models of transformers.

    nox -s bench_redco -- --families gpt2 llama

Both have the same sizes, AdamW, the loss of all tokens, float32 and no dropout, and take turns in
one process on one CPU device. A ratio above 1 means that redcoast takes longer. Needs flax and
transformers 4.57, the last version that has Flax models.
"""

# pyright: reportMissingImports=false

import dataclasses
import functools as ft
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
import tyro

from redcoast import losses, models

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH = 512, 256, 4, 1024, 128
SIZES: dict[str, Any] = {"vocab": VOCAB, "width": WIDTH, "heads": HEADS, "hidden": HIDDEN}
BART = {"encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "max_position_embeddings": LENGTH}
BART |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "d_model": WIDTH}
OURS = {
    "gpt2": models.GPT2Config(**SIZES, layers=1, positions=LENGTH),
    "llama": models.LlamaConfig(**SIZES, layers=1, kv_heads=HEADS),
    "gptj": models.GPTJConfig(**SIZES, layers=1, rotary_dim=32),
    "opt": models.OPTConfig(**SIZES, layers=1, positions=LENGTH),
    "bert": models.BertConfig(**SIZES, layers=1, positions=LENGTH, head="masked"),
    "bart": models.BartConfig(**SIZES, layers=1, decoder_layers=1, positions=LENGTH),
    "t5": models.T5Config(**SIZES, layers=1, decoder_layers=1),
}
# The names of the class in transformers and of its sizes.
HEADED = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
THEIRS = {
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH}),
    "llama": ("Llama", "ForCausalLM", {**HEADED, "intermediate_size": HIDDEN}),
    "gptj": ("GPTJ", "ForCausalLM", {"n_embd": WIDTH, "n_head": HEADS, "rotary_dim": 32}),
    "opt": ("OPT", "ForCausalLM", {**HEADED, "ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH}),
    "bert": ("Bert", "ForMaskedLM", {**HEADED, "intermediate_size": HIDDEN}),
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "t5": ("T5", "ForConditionalGeneration", {"d_model": WIDTH, "d_kv": WIDTH // HEADS}),
}
THEIRS["t5"][2].update(d_ff=HIDDEN, num_heads=HEADS)
# How each family calls its number of layers.
LAYERS = {"gpt2": ("n_layer",), "gptj": ("n_layer",), "t5": ("num_layers", "num_decoder_layers")}
LAYERS["bart"] = ("encoder_layers", "decoder_layers")
Step = Callable[[Any], tuple[Any, Any]]


def main(
    families: tuple[str, ...] = ("gpt2", "llama", "gptj", "opt", "bert", "bart", "t5"),
    layers: int = 4,
    batch_size: int = 16,
    seq: int = 128,
    steps: int = 2,
    turns: int = 5,
) -> None:
    """Prints a table of ratios.

    Args:
        families: The families of models to compare.
        layers: The number of layers; for encoder-decoders, of each half.
        batch_size: The number of sequences in a batch.
        seq: The sequence length in tokens.
        steps: The number of steps in a turn.
        turns: The number of turns of each.
    """
    print(
        f"jax {jax.__version__}, flax {flax.__version__}, transformers {transformers.__version__}"
    )
    print("| family | ours / Flax | least and most |\n| --- | ---: | ---: |")
    for family in families:
        ours, theirs = pair(family, layers, batch_size, seq)
        found = ratios(ours, theirs, steps, turns)
        median = statistics.median(found)
        print(f"| {family} | {median:.2f} | {min(found):.2f} {max(found):.2f} |", flush=True)


def pair(
    family: str, layers: int, batch_size: int, seq: int
) -> tuple[tuple[Step, Any], tuple[Step, Any]]:
    """The compiled steps and the states of both models, of the same sizes."""
    tokens = np.random.default_rng(0).integers(3, VOCAB, (batch_size, seq), np.int32)
    halves = hasattr(OURS[family], "decoder_layers")
    config = deepen(OURS[family], layers)
    kind = getattr(models, type(config).__name__.removesuffix("Config"))
    ours = kind(config, key=jax.random.key(0))
    theirs = flax_model(family, layers)

    def our_logits(model):
        return model(tokens, tokens) if halves else model(tokens)

    def their_logits(params):
        options = {"decoder_input_ids": tokens} if halves else {}
        with mock.patch("jax.numpy.clip", _clip):
            return theirs(tokens, **options, params=params).logits

    counts = [
        sum(x.size for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))
        for tree in (ours, theirs.params)
    ]
    print(f"{family}: {counts[0]:,} and {counts[1]:,} parameters")
    return training_step(ours, our_logits, tokens), training_step(
        theirs.params, their_logits, tokens
    )


def _clip(x: Any, a_min: Any = None, a_max: Any = None, clip: Any = jnp.clip) -> Any:
    """`jnp.clip` with the names of its arguments in transformers' T5, which JAX has removed."""
    return clip(x, a_min, a_max)


def deepen(config: Any, layers: int) -> Any:
    """A configuration with this number of layers, in each half if it has two."""
    halves = {"decoder_layers": layers} if hasattr(config, "decoder_layers") else {}
    return dataclasses.replace(config, layers=layers, **halves)


def flax_model(family: str, layers: int) -> Any:
    name, suffix, sizes = THEIRS[family]
    deep = dict.fromkeys(LAYERS.get(family, ("num_hidden_layers",)), layers)
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **sizes, **deep)
    with mock.patch("jax.numpy.clip", _clip):
        return getattr(transformers, f"Flax{name}{suffix}")(config, seed=0)


def training_step(model: Any, logits_of: Callable[[Any], Any], tokens: Any) -> tuple[Step, Any]:
    """A jitted AdamW step; the same program around both models."""
    optimizer = optax.adamw(1e-4)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @ft.partial(jax.jit, donate_argnums=0)
    def step(state):
        params, opt_state = state
        loss_fn = lambda params: losses.cross_entropy(
            logits_of(eqx.combine(params, static)), jnp.asarray(tokens)
        )
        loss, gradient = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, optimizer.init(params))


def ratios(ours: tuple[Step, Any], theirs: tuple[Step, Any], steps: int, turns: int) -> list[float]:
    """The processor time of our turns divided by that of theirs."""
    states = [ours[1], theirs[1]]

    def turn(i: int, step: Step) -> float:
        begin, loss = time.process_time(), None
        for _ in range(steps):
            states[i], loss = step(states[i])
        jax.block_until_ready(loss)
        return time.process_time() - begin

    found = [turn(0, ours[0]) / turn(1, theirs[0]) for _ in range(turns + 1)]
    return found[1:]  # the first turn compiles


if __name__ == "__main__":
    tyro.cli(main)
