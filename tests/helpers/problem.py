"""A small classification problem that several test files train on."""

import functools as ft
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redcoast as rc
from redcoast.tracking._progress import ProgressLogger


def make_examples(count, seed=0):
    rng = np.random.default_rng(seed)
    matrix = np.random.default_rng(99).normal(size=(16, 8))
    x = rng.normal(size=(count, 16)).astype(np.float32)
    y = (x @ matrix).argmax(-1).astype(np.int32)
    return [{"x": x[i], "y": y[i], "index": i} for i in range(count)]


def collate_fn(examples):
    return {name: np.stack([e[name] for e in examples]) for name in ("x", "y")}


def make_model(seed=0, width=32):
    return eqx.nn.MLP(16, 8, width, depth=2, key=jax.random.key(seed))


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    correct = jnp.argmax(logits, -1) == batch["y"]
    return jnp.mean(loss), {"accuracy": jnp.mean(correct.astype(jnp.float32))}


def predict_fn(model, batch, key):
    return jnp.argmax(jax.vmap(model)(batch["x"]), -1)


def metric_fn(examples, outputs):
    return {"right": float(np.mean([e["y"] == o for e, o in zip(examples, outputs, strict=True)]))}


def batch_of(count, seed=0):
    return collate_fn(make_examples(count, seed))


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(eqx.filter(tree, is_plain)))]


def is_plain(x):
    return eqx.is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def quiet(log=None):
    """Loggers without a progress bar."""
    logs = [] if log is None else log if isinstance(log, list) else [log]
    shown = any(isinstance(each, ProgressLogger) for each in logs)
    return logs if shown else [rc.progress_logger(False), *logs]


def fit_quietly(*args, log=None, **options):
    """`rc.fit` with no progress bar."""
    return rc.fit(*args, log=quiet(log), **options)


def stops_after_skipping(steps):
    """A context in which `fit` gives up after fewer steps in a row than the 20 of users."""
    limited = ft.partial(rc.metrics_reader, max_skipped=steps)
    return mock.patch("redcoast.loop._fit.metrics_reader", limited)


class Stream:
    """Examples one by one, from an iterator whose state can be saved."""

    def __init__(self, examples):
        self.examples, self.next = examples, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.examples):
            raise StopIteration
        self.next += 1
        return self.examples[self.next - 1]

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]
