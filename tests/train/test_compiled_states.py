"""States that are dicts, tuples and lists: what a call costs, and which arrays it uses."""

import gc
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import count_calls
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problem import arrays

import redcoast as rc
from redcoast.core._pytree import join
from redcoast.train import _last_state
from redcoast.train._compile import compile_reusable_step

OPTIMIZER = optax.adamw(1e-2)
KEYS = jax.random.split(jax.random.key(0), 9)
WHERE = NamedSharding(rc.make_mesh(devices=jax.devices()[:1]), P())
BATCH = np.ones((4, 8), np.float32)


class Layers(eqx.Module):
    layers: Any

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(state, batch):
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    return rc.train_step(state, batch, loss_fn=loss, optimizer=OPTIMIZER)


def start():
    make = lambda key: Layers(tuple(eqx.nn.Linear(8, 8, key=k) for k in KEYS))
    return rc.init_state(make, OPTIMIZER, key=KEYS[0])


FIELDS = ("model", "opt_state", "step", "key")
# Packs a `TrainState` in another kind of state, and unpacks it.
KINDS = {
    "state": (lambda s: s, lambda s: s),
    "dict": (lambda s: {"train": s}, lambda d: d["train"]),
    "tuple": (lambda s: (s, jnp.zeros(())), lambda t: t[0]),
    "fields": (
        lambda s: {name: getattr(s, name) for name in FIELDS},
        lambda d: rc.TrainState(**d),
    ),
}


def step_of(name):
    pack, unpack = KINDS[name]

    def step(state, batch):
        after, metrics = train(unpack(state), batch)
        return pack(after), metrics

    return rc.compile_step(step, WHERE), pack


def calls(step, state):
    """The Python of a step, once it is compiled and the state is the one that it returned."""
    for _ in range(3):
        state, _ = step(state, BATCH)
    return count_calls(lambda: step(state, BATCH))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dict", "tuple", "fields"])
def test_other_states_cost_as_little_python_as_a_train_state(name):
    whole = calls(rc.compile_step(train, WHERE), start())
    assert len(jax.tree.leaves(eqx.filter(start(), eqx.is_array))) == 57
    step, pack = step_of(name)
    assert calls(step, pack(start())) < 1.1 * whole


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_all_states_have_the_same_numbers(name):
    step, pack = step_of(name)
    state, expected = pack(start()), start()
    reference = rc.compile_step(train, WHERE)
    for _ in range(3):
        state, _ = step(state, BATCH)
        expected, _ = reference(expected, BATCH)
    for x, y in zip(arrays(KINDS[name][1](state)), arrays(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def double(state):
    twice = lambda x: 2 * x if eqx.is_array(x) else x
    return jax.tree.map(twice, state), {}


def test_a_part_that_is_replaced_is_used():
    make = lambda: eqx.nn.Linear(2, 2, key=KEYS[0])
    state = {"a": make(), "b": [make(), jnp.ones(3)], "name": "x"}
    step = rc.compile_step(double, WHERE)
    for _ in range(2):
        state, _ = step(state)
    state["b"][1] = jnp.full(3, 5.0)
    state, _ = step(state)
    np.testing.assert_array_equal(state["b"][1], np.full(3, 10.0))
    state["a"] = make()
    state, _ = step(state)
    np.testing.assert_array_equal(state["a"].weight, 2 * make().weight)
    np.testing.assert_array_equal(state["b"][0].weight, 16 * make().weight)
    state["name"] = "y"
    state, _ = step(state)
    assert state["name"] == "y"
    state["c"] = jnp.ones(2)
    state, _ = step(state)
    np.testing.assert_array_equal(state["c"], np.full(2, 2.0))
    np.testing.assert_array_equal(state["a"].weight, 8 * make().weight)


def test_an_array_that_is_put_in_two_places_is_donated_once():
    state = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    step = rc.compile_step(double, WHERE)
    state, _ = step(state)
    state["b"] = state["a"]
    state, _ = step(state)
    np.testing.assert_array_equal(state["a"], np.full(3, 4.0))
    np.testing.assert_array_equal(state["b"], np.full(3, 4.0))


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_deleted_is_freed(name):
    step, pack = step_of(name)
    state, _ = step(pack(start()), BATCH)
    state, _ = step(state, BATCH)
    dead = list(map(weakref.ref, jax.tree.leaves(eqx.filter(state, eqx.is_array))))
    del state
    gc.collect()
    assert not any(reference() is not None for reference in dead)


class PartlyFrozen(eqx.Module):
    weight: jax.Array
    frozen: jax.Array


def test_a_flat_state_is_made_a_tree_when_it_is_needed(monkeypatch):
    # A loop of short steps passes arrays from step to step; making modules takes longer than that.
    made = []
    monkeypatch.setattr(_last_state, "join", lambda *parts: made.append(parts) or join(*parts))

    def add(state, x):
        return eqx.tree_at(lambda s: s.weight, state, state.weight + x), {"x": x}

    mesh = rc.make_mesh(devices=jax.devices()[:1])
    state: Any = PartlyFrozen(jnp.ones(3), jnp.zeros(2))
    frozen = state.frozen
    step = compile_reusable_step(add, rc.infer_shardings(state, mesh), add)
    for number in range(4):
        state, _ = step.take(state, np.float32(number))
    assert not made
    np.testing.assert_array_equal(state.tree.weight, np.full(3, 7.0))
    assert state.tree is state.tree
    # What the step does not change is neither donated nor returned by the program.
    np.testing.assert_array_equal(frozen, np.zeros(2))
    assert state.tree.frozen is state.arrays[1]
    # The tree can be passed on, too.
    tree, _ = step(state.tree, np.float32(1))
    with pytest.raises(ValueError, match="was donated"):
        step.take(state, np.float32(1))
    np.testing.assert_array_equal(tree.weight, np.full(3, 8.0))
