"""Which indices a loss reads, computed from the integers of a batch alone.

Only here: JAX reads the last row in place of one beyond the end, and the loss is finite.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast.train._lookups import find_lookups
from redcoast.train._loss import ExaminedLoss

ONE = rc.make_mesh(devices=jax.devices()[:1])
TABLE = jnp.ones((10, 3))
IDS = np.array([[1, 2], [3, 12]], np.int32)


def compiled(w, ids):
    return eqx.filter_checkpoint(lambda w, ids: jnp.mean(jax.jit(lambda x: x[ids])(w)))(w, ids)


LOOKUPS = {
    "rows": (lambda w, b, k: jnp.mean(w[b["ids"]]), 12, True),
    "each by vmap": (lambda w, b, k: jnp.mean(jax.vmap(lambda i: w[i])(b["ids"][:, 1])), 12, True),
    "computed": (lambda w, b, k: jnp.mean(w[2 * b["ids"] + 1]), 25, True),
    "compiled inside": (lambda w, b, k: compiled(w, b["ids"]), 12, True),
    "NaN": (lambda w, b, k: jnp.mean(jnp.take(w, b["ids"], axis=0)), 12, False),
    "masked": (lambda w, b, k: jnp.mean(w[jnp.where(b["ids"] < 10, b["ids"], 0)]), 3, True),
}
NONE = {
    "the last one is asked for": lambda w, b, k: jnp.mean(
        jnp.take(w, b["ids"], axis=0, mode="clip")
    ),
    "positions": lambda w, b, k: jnp.mean(w[jnp.arange(2)] * b["ids"].sum().astype(jnp.float32)),
    "of the model": lambda w, b, k: jnp.mean(w[jnp.argmax(w, 0)]) * jnp.mean(b["x"]),
}


def lookups(loss):
    batch = {"ids": IDS, "x": np.ones(2, np.float32)}
    actual = find_lookups(ExaminedLoss(loss, TABLE, batch, ONE, None), training=True)
    return actual.axes, actual.extremes(jax.tree.leaves(batch))


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_largest_index_is_known(name):
    loss, largest, silent = LOOKUPS[name]
    (axis, *_), (extremes, *_) = lookups(loss)
    assert (axis.shape, axis.size, axis.paths, axis.silent) == ((10, 3), 10, ("ids",), silent)
    assert axis.where.startswith("test_lookups.py:")
    assert extremes[1] == largest


@pytest.mark.parametrize("name", NONE)
def test_other_indices_are_none(name):
    axes, _ = lookups(NONE[name])
    assert not axes
