"""What a library keeps from a trace does not depend on the mesh of the trace."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from jax.sharding import PartitionSpec as P
from problem import make_examples

import redcoast as rc

KEPT = {}


def kept(size):
    """Made while a program is traced and used by all that follow, as Equinox's `RoPE` does."""
    with jax.ensure_compile_time_eval():
        if size not in KEPT:
            KEPT[size] = jnp.cos(jnp.arange(float(size)))
        return KEPT[size][:size]


def times_kept(batch):
    return jax.vmap(lambda row: row * kept(row.size))(batch)


def plain(model, batch, key):
    return jnp.mean((times_kept(batch) * model["w"]) ** 2)


def with_spec(model, batch, key):
    batch = jax.lax.with_sharding_constraint(batch, P("data"))
    return plain(model, batch, key)


def with_shard_map(model, batch, key):
    loss = plain(model, batch, key)
    double = jax.shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data"))
    return loss + jnp.mean(double(batch)) * jnp.mean(model["w"])


ONE: Any = {"devices": jax.devices()[:1]}
OPTIONS = {"collate_fn": lambda rows: np.stack([row["x"] for row in rows]), "batch_size": 8}


def fit(loss_fn, mesh):
    fit = ft.partial(rc.fit, {"w": jnp.ones((1, 16))}, optax.sgd(0.1), make_examples(8), steps=1)
    return fit(loss_fn=loss_fn, mesh=rc.make_mesh(**mesh), log=False, **OPTIONS).model["w"]


@pytest.mark.parametrize(
    "loss_fn", few_of([plain, with_spec, with_shard_map], plain, with_shard_map)
)
@pytest.mark.thorough
def test_a_library_keeps_nothing_of_a_mesh(loss_fn):
    """Only here: one process uses meshes of several sizes, and arrays of the first trace."""
    KEPT.clear()
    expected = fit(loss_fn, ONE)
    for mesh in ({"model": 4}, {"devices": jax.devices()[:2]}, ONE):
        np.testing.assert_allclose(fit(loss_fn, mesh), expected, rtol=1e-5)
    KEPT.clear()
    np.testing.assert_allclose(fit(loss_fn, {"model": 4}), expected, rtol=1e-5)
    np.testing.assert_allclose(fit(loss_fn, ONE), expected, rtol=1e-5)
    batch = OPTIONS["collate_fn"](make_examples(8))
    rc.plan_shardings(
        {"w": jnp.ones((1, 16))},
        jax.sharding.AbstractMesh((4, 1, 16), ("data", "fsdp", "model")),
        fn=loss_fn,
        args=(batch, None),
    )
    predict = lambda model, batch, key: times_kept(batch) * model["w"]
    options = {"predict_fn": predict, "mesh": rc.make_mesh(**ONE)}
    rc.predict_examples({"w": jnp.ones((1, 16))}, make_examples(8), **options, **OPTIONS)
    # A mesh of the user's own.
    with jax.set_mesh(rc.make_mesh(devices=jax.devices()[:4])):
        times_kept(batch)


@pytest.mark.thorough
def test_equinox_rotary_embeddings_on_meshes_of_two_sizes():
    rope = eqx.nn.RotaryPositionalEmbedding(6, theta=123.0)  # arguments of no other test

    def loss_fn(model, batch, key):
        rows = batch[:, :, None] * model["w"][None, :, :]
        return jnp.mean(jax.vmap(rope)(rows)[:, :, 0])

    model = {"w": jnp.ones((16, 6))}
    examples = make_examples(8)
    for mesh in (rc.make_mesh(), rc.make_mesh(**ONE)):
        options = {"loss_fn": loss_fn, "mesh": mesh, "steps": 1, "log": False}
        rc.fit(model, optax.sgd(0.1), examples, **options, **OPTIONS)


@pytest.mark.parametrize("mesh", [{"model": 4}, ONE])
def test_an_error_that_a_second_trace_would_hide_is_raised(mesh):
    calls = []

    def loss_fn(model, batch, key):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return plain(model, batch, key)

    with pytest.raises(RuntimeError, match="once"):
        fit(loss_fn, mesh)


def test_prints_of_a_function_that_needs_a_mesh_are_printed_once(capfd):
    def loss_fn(model, batch, key):
        jax.debug.print("printed")
        return with_shard_map(model, batch, key)

    fit(loss_fn, {"model": 4})
    jax.effects_barrier()
    assert capfd.readouterr().out.count("printed") == 1
