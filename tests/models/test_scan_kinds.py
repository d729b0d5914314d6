"""Layers of several kinds: in a loop over periods, and each in its turn."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redcoast.models._by_layer import StackedLayers, by_layer
from redcoast.models._scan_kinds import repeated_layers, scan_kinds

KINDS = tuple("aabaabaabccb")


class Stack(StackedLayers):
    w: jax.Array


def layer_fn(kind, x, seen, layer, inputs, index, key):
    x = jnp.tanh(x * layer.w[None] + float(kind == "b")) + inputs
    return x, seen + jnp.sum(x) * jnp.float32(index + 1)


def run(stacks, x, inputs, **options):
    seen = jnp.zeros(())
    return scan_kinds(layer_fn, x, stacks, KINDS, inputs=inputs, cache=seen, **options)


def make_arguments():
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    stacks = {kind: Stack(array(KINDS.count(kind), 3)) for kind in "abc"}
    return stacks, array(2, 3), array(len(KINDS), 2, 3)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", [("a", 4)]),
        ("aab" * 3, [("aab", 3)]),
        ("aab" * 3 + "cd" * 2, [("aab", 3), ("cd", 2)]),
        ("aab" * 2 + "aa", [("aab", 2), ("a", 2)]),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
    ],
)
def test_kinds_that_repeat_are_found(kinds, expected):
    parts = repeated_layers(tuple(kinds))
    assert [("".join(part.pattern), part.repeats) for part in parts] == expected
    assert "".join("".join(part.pattern) * part.repeats for part in parts) == kinds


@pytest.mark.thorough
def test_each_layer_has_its_arrays_its_inputs_and_its_number():
    stacks, x, inputs = make_arguments()
    expected, seen = x, 0.0
    for position, kind in enumerate(KINDS):
        number = KINDS[:position].count(kind)
        layer = Stack(stacks[kind].w[number])
        expected, seen = layer_fn(kind, expected, seen, layer, inputs[position], number, None)
    for options in ({}, {"unroll": 6}, {"remat": "full"}):
        actual = eqx.filter_jit(run)(stacks, x, inputs, **options)
        np.testing.assert_allclose(actual[0], expected, rtol=1e-6)
        np.testing.assert_allclose(actual[1], seen, rtol=1e-5)
    apart = {kind: by_layer(stack) for kind, stack in stacks.items()}
    np.testing.assert_allclose(run(apart, x, inputs)[1], seen, rtol=1e-5)
