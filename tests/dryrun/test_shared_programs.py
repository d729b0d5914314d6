"""A search over meshes traces a loss once, unless its program depends on the mesh."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from redcoast.core._tracing import size_of_axis
from redcoast.dryrun import _mesh_search
from redcoast.dryrun._devices import target_place
from redcoast.dryrun._job import make_job
from redcoast.dryrun._mesh_search import _estimate_all

MESHES = 6  # of four devices, without stages


def init_fn(key):
    return {"up": jnp.zeros((4, 64, 256)), "down": jnp.zeros((4, 256, 64))}


def forward(model, x):
    layer = lambda x, w: (x + jax.nn.relu(x @ w["up"]) @ w["down"], None)
    return jax.lax.scan(layer, x, model)[0]


def plain(model, x, key):
    return jnp.mean(forward(model, x) ** 2)


def of_a_size(model, x, key):
    """Another program if `model` has several devices."""
    x = forward(model, x)
    return jnp.mean((x + jnp.sin(x)) ** 2 if size_of_axis("model") > 1 else x**2)


def constrained(model, x, key):
    x = forward(model, x)
    return jnp.mean(jax.lax.with_sharding_constraint(x, P("data", None)) ** 2)


def over_the_ambient_mesh(model, x, key):
    """`jax.shard_map` without a mesh needs an ambient one."""
    square = jax.shard_map(lambda x: x**2, in_specs=P("data"), out_specs=P("data"))
    return jnp.mean(square(forward(model, x)))


def estimate(loss_fn):
    """The estimates of all meshes of four devices, and how often the loss is traced for them."""
    traced = []

    def counted(*args):
        traced.append(args)
        return loss_fn(*args)

    batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    job = make_job(init_fn, counted, batch, optax.sgd(0.1))
    traced.clear()
    return _estimate_all(job, target_place("cpu:4")), len(traced)


@pytest.mark.thorough
@pytest.mark.parametrize("loss_fn", [plain, of_a_size, constrained, over_the_ambient_mesh])
def test_estimates_are_those_of_meshes_planned_one_at_a_time(loss_fn, monkeypatch):
    shared, traces = estimate(loss_fn)
    monkeypatch.setattr(_mesh_search, "sharing_programs", contextlib.nullcontext)
    alone, more_traces = estimate(loss_fn)
    assert shared == alone
    assert len({one.priced_seconds for one in shared}) > 3
    if loss_fn in (constrained, over_the_ambient_mesh):
        assert traces == more_traces
        return
    # For all meshes, and for stages with several numbers of rows; before, to count the layers.
    assert any("pipe" in one.mesh for one in shared)
    assert traces <= MESHES < more_traces / 1.5
