"""Small encoder-decoders whose every parameter is random, and what is often asked of them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from random_models import to_device

RNG = np.random.default_rng(0)
VOCAB = 13
TOKENS = to_device(RNG.integers(0, VOCAB, (3, 7)))
DECODER_TOKENS = to_device(RNG.integers(0, VOCAB, (3, 5)))


def quick_jit(fn) -> Any:
    # There is more to compile than to run.
    options: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 0}}
    return eqx.filter_jit(fn, **options)


@quick_jit
def logits_of(model, tokens=TOKENS, decoder_tokens=DECODER_TOKENS, **options):
    return model(tokens, decoder_tokens, **options)


def loss_of(model, tokens=TOKENS, decoder_tokens=DECODER_TOKENS, **options):
    return jnp.mean(jnp.sin(model(tokens, decoder_tokens, **options)))


gradient_of = quick_jit(eqx.filter_grad(loss_of))


def in_float64(model):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), model)


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()
