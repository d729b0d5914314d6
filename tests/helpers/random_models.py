"""Models of random numbers, without a program for each shape.

`jnp.asarray` compiles one for each shape and dtype that it converts, which takes 10 to 20 ms.
"""

import zlib

import equinox as eqx
import jax
import numpy as np


def to_device(x, dtype=None):
    """`jnp.asarray` for what NumPy holds."""
    array = np.asarray(x)
    return jax.device_put(array if dtype is None else array.astype(dtype))


def random_model(model_class, config):
    """A model whose every parameter, norm scales too, is random and depends on its path alone."""

    def random(path, leaf):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return to_device(rng.normal(0, 0.4, leaf.shape), np.float32)

    abstract = eqx.filter_eval_shape(model_class, config, key=jax.random.key(0))
    return jax.tree_util.tree_map_with_path(random, abstract)


def cast(model, dtype):
    return jax.tree.map(lambda x: to_device(x, dtype), model)
