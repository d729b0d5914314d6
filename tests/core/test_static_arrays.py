"""Arrays in static fields: JAX's errors name no field, and depend on what was compiled before."""

import contextlib
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.core._frames import static_arrays

# Equinox's own warning.
pytestmark = pytest.mark.filterwarnings("ignore:A JAX array is being set as static")

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
KEY, SGD = jax.random.key(0), optax.sgd(0.1)
SETTINGS = {"collate_fn": np.stack, "batch_size": 8}


class Layer(eqx.Module):
    weight: jax.Array
    table: object = eqx.field(static=True)


class Model(eqx.Module):
    layers: list[Layer]


def loss_fn(model, batch, key):
    return jnp.mean((batch @ model.layers[0].weight) ** 2)


def make(value):
    return Model([Layer(jnp.eye(4), (value,))])


def compiled(value):
    state = rc.init_state(lambda key: make(value), SGD, key=KEY)
    step = lambda state, x: (state, jnp.mean(x @ state.model.layers[0].weight))
    return rc.compile_step(step, rc.infer_shardings(state, rc.make_mesh()))(state, X)


fit = lambda model: rc.fit(model, SGD, X, loss_fn=loss_fn, steps=1, log=False, **SETTINGS)
CALLS = {
    "fit": lambda value: fit(make(value)),
    "fit with init_fn": lambda value: fit(lambda key: make(value.copy())),
    "evaluate": lambda value: rc.evaluate(make(value), X, loss_fn=loss_fn, **SETTINGS),
    "prepare": lambda value: rc.prepare(lambda key: make(value.copy()), SGD, loss_fn, X, key=KEY),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_field_is_named(call):
    words = r"layers/0/table \(field `table` of Layer\).*`static=True`"
    with contextlib.suppress(ValueError):
        call(np.ones(3))  # the second model is compared with it
    with pytest.raises(ValueError, match=words):
        call(np.zeros(3))


def test_errors_of_other_kinds_stay():
    def fails(model, batch, key):
        raise ValueError("unhashable thoughts")

    with pytest.raises(ValueError, match="unhashable") as error:
        rc.evaluate({"w": jnp.eye(4)}, X, loss_fn=fails, **SETTINGS)
    assert str(error.value) == "unhashable thoughts"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    weight: jax.Array
    names: list = dataclasses.field(metadata={"static": True})


def test_only_arrays_that_are_no_children_are_found():
    assert list(static_arrays(make(1.0))) == []
    assert list(static_arrays(make(np.float32(1)))) == []
    assert list(static_arrays([make(np.ones(2)), eqx.nn.MLP(2, 2, 2, 2, key=KEY)])) == [
        "0/layers/0/table (field `table` of Layer)"
    ]
    assert list(static_arrays({"a": Plain(jnp.ones(2), ["x"])})) == []
    assert list(static_arrays({"a": Plain(jnp.ones(2), [jnp.ones(2)])})) == [
        "a/names (field `names` of Plain)"
    ]
