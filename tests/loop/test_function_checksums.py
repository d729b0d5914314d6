"""Functions of a run are recognised by their code, and by the numbers that they hold."""

import functools as ft
from typing import Any

import jax
import numpy as np
import optax
import pytest

from redcoast.loop._function_checksums import checksum_of_functions


def weighted(weight):
    def loss_fn(model, batch, key):
        if weight is None:
            return loss_fn(model, batch, key)
        return weight * model, {"weight": weight}

    return loss_fn


def method_of(weight):
    class Loss:
        def loss_fn(self, model, batch, key):
            return model * weight

    return Loss().loss_fn


NUMPY: Any = np.float32  # which optax accepts, and its annotation does not have
PAIRS = {
    "rate": (lambda: optax.adam(1e-2), lambda: optax.adam(1e-3)),
    "NumPy's rate": (lambda: optax.sgd(NUMPY(0.5)), lambda: optax.sgd(NUMPY(0.25))),
    "kind": (lambda: optax.adam(1e-2), lambda: optax.nadam(1e-2)),
    "decay": (lambda: optax.adamw(1e-2), lambda: optax.adamw(1e-2, weight_decay=0.1)),
    "schedule": (
        lambda: optax.adam(optax.linear_schedule(1.0, 0.0, 9)),
        lambda: optax.adam(optax.linear_schedule(1.0, 0.0, 8)),
    ),
    "chain": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
        lambda: optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(1e-2)),
    ),
    "labels": (
        lambda: optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.2)}, {"w": "a"}),
        lambda: optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.3)}, {"w": "a"}),
    ),
    "closure": (lambda: weighted(1.0), lambda: weighted(2.0)),
    "partial": (lambda: ft.partial(weighted(1.0), key=1), lambda: ft.partial(weighted(1.0), key=2)),
    "default": (lambda: lambda x, scale=1.0: x * scale, lambda: lambda x, scale=2.0: x * scale),
    "jit": (lambda: jax.jit(weighted(1.0)), lambda: jax.jit(weighted(2.0))),
    "method": (lambda: method_of(1.0), lambda: method_of(2.0)),
    "large table": (lambda: ft.partial(min, [0] * 20_000), lambda: ft.partial(min, [0] * 20_001)),
    "code": (lambda: lambda x: x + 1, lambda: lambda x: x - 1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_functions_are_recognised_by_code_and_numbers(name):
    make, other = PAIRS[name]
    assert checksum_of_functions(make()) == checksum_of_functions(make())
    assert checksum_of_functions(make()) != checksum_of_functions(other())
