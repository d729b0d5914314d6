"""Which arrays of a model are matrices, read off its loss."""

# pyright: reportArgumentType=false

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import redcoast as rc
from redcoast import models

TOKENS = jnp.zeros((2, 8), jnp.int32)
IMAGES = jnp.zeros((2, 3, 8, 8))


def language_loss(model, tokens, key):
    logits = model(tokens).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def squared(model, x, key):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def is_numbers(x):
    return isinstance(x, optax.contrib.MuonDimensionNumbers)


def matrices(model, fn, *args):
    """The sides of each matrix, by path."""
    numbers = rc.matrix_dimensions(model, fn, *args)
    flat, _ = jax.tree_util.tree_flatten_with_path(numbers, is_leaf=is_numbers)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(n)
        for path, n in flat
        if is_numbers(n)
    }


ATTENTION = {
    "layers/wq": ((1,), (2, 3)),
    "layers/wk": ((1,), (2, 3)),
    "layers/wv": ((1,), (2, 3)),
    "layers/wo": ((1, 2), (3,)),
}
SIZES = {"vocab": 64, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 48}


def test_layers_of_a_decoder_are_matrices_and_its_ends_and_norms_are_not():
    config = models.LlamaConfig(**SIZES)
    model = eqx.filter_eval_shape(models.Llama, config, key=jax.random.key(0))
    mlp = {f"layers/{name}": ((1,), (2,)) for name in ("gate", "up", "down")}
    assert matrices(model, language_loss, TOKENS, None) == ATTENTION | mlp


def test_experts_are_matrices_of_their_own():
    config = models.MixtralConfig(**SIZES, experts=4, chosen=2)
    model = eqx.filter_eval_shape(models.Mixtral, config, key=jax.random.key(0))
    actual = matrices(model, language_loss, TOKENS, None)
    experts = {f"layers/{name}": ((2,), (3,)) for name in ("gate", "up", "down")}
    assert actual == ATTENTION | experts | {"layers/router": ((1,), (2,))}


def test_outputs_come_first_in_equinox_and_the_last_layer_is_none():
    model = eqx.nn.MLP(8, 2, 16, 2, key=jax.random.key(0))
    expected = {f"layers/{i}/weight": ((1,), (0,)) for i in range(2)}
    assert matrices(model, squared, jnp.zeros((4, 8)), None) == expected


@pytest.mark.thorough
def test_a_convolution_sums_over_its_window_unless_it_is_depthwise():
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, key=keys[0]),
            eqx.nn.Conv2d(8, 8, 3, groups=8, key=keys[1]),
            eqx.nn.Lambda(lambda x: x.mean((1, 2))),
            eqx.nn.Linear(8, 4, key=keys[2]),
        ]
    )
    assert matrices(model, squared, IMAGES, None) == {"layers/0/weight": ((1, 2, 3), (0,))}


@pytest.mark.thorough
def test_an_ensemble_has_a_matrix_for_each_member():
    make = eqx.filter_vmap(lambda key: eqx.nn.MLP(8, 2, 16, 2, key=key))
    model = make(jax.random.split(jax.random.key(0), 3))
    evaluate = eqx.filter_vmap(
        lambda member, x: jax.vmap(member)(x), in_axes=(eqx.if_array(0), None)
    )
    loss = lambda model, x, key: jnp.mean(evaluate(model, x) ** 2)
    actual = matrices(model, loss, jnp.zeros((4, 8)), None)
    assert actual["layers/1/weight"] == ((2,), (1,))


def test_parts_of_arrays_adapters_and_tied_tables():
    """Layers that a Python loop takes off a stack, several matrices in one array, a product of two
    arrays that is added to a matrix, and a table that is looked up in and multiplied by."""
    params = {
        "table": jnp.zeros((50, 16)),
        "positions": jnp.zeros((8, 16)),
        "qkv": jnp.zeros((16, 48)),
        "output": jnp.zeros((16, 16)),
        "a": jnp.zeros((16, 2)),
        "b": jnp.zeros((2, 16)),
        "up": jnp.zeros((3, 16, 20)),
        "down": jnp.zeros((3, 20, 16)),
        "norms": jnp.zeros((3, 16)),
    }

    def loss(p, tokens, key):
        x = p["table"][tokens] + p["positions"][None]
        q, k, v = (x @ p["qkv"][:, 16 * i : 16 * i + 16] for i in range(3))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2))
        x = x + weights @ v @ (p["output"] + p["a"] @ p["b"])
        for i in range(3):
            x = x + jax.nn.relu(x * p["norms"][None, None, i] @ p["up"][i]) @ p["down"][i]
        return jnp.mean((x @ p["table"].T) ** 2)

    assert matrices(params, loss, TOKENS, None) == {
        "qkv": ((0,), (1,)),
        "output": ((0,), (1,)),
        "a": ((0,), (1,)),
        "b": ((0,), (1,)),
        "up": ((1,), (2,)),
        "down": ((1,), (2,)),
    }


def test_a_loss_without_products_is_refused():
    with pytest.raises(ValueError, match="multiplies by no array of the model"):
        rc.matrix_dimensions({"w": jnp.zeros((4, 4))}, lambda p, x: jnp.sum(p["w"]), None)
