"""Small encoder-decoders whose every parameter is random, and what is often asked of them."""

import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

RNG = np.random.default_rng(0)
VOCAB = 13
TOKENS = jnp.asarray(RNG.integers(0, VOCAB, (3, 7)))
DECODER_TOKENS = jnp.asarray(RNG.integers(0, VOCAB, (3, 5)))


def random_model(model_class, config):
    """A model whose every parameter, norm scales too, is random and depends on its path alone."""

    def random(path, leaf):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jnp.asarray(rng.normal(0, 0.4, leaf.shape), jnp.float32)

    abstract = eqx.filter_eval_shape(model_class, config, key=jax.random.key(0))
    return jax.tree_util.tree_map_with_path(random, abstract)


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


def cast(model, dtype):
    # By NumPy, which compiles nothing.
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(dtype)), model)


def in_float64(model):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), model)


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()
