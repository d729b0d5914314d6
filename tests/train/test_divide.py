"""Matrices that the devices of a mesh send each other to compute with."""

# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.core._stored_specs import stored_as, stored_specs
from redcoast.core._tracing import traced_over
from redcoast.train._divide import compute_divided
from redcoast.train._matrix_stacks import Numbers, stored_matrices

MESHES = [{"data": 8}, {"fsdp": 8}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2}]
# Sizes that eight devices divide, in one dimension or in two.
NUMBERS = {
    "square": Numbers(1, 2),
    "other": Numbers(1, 2),
    "heads": Numbers(1, (2, 3)),
    "experts": Numbers(2, 3),
    "alone": Numbers(0, 1),
}
SHAPES = {
    "square": (3, 16, 16),
    "other": (13, 16, 16),
    "heads": (2, 16, 8, 2),
    "experts": (3, 8, 16, 16),
    "alone": (16, 16),
}
SPECS = {
    "replicated": dict.fromkeys(SHAPES, P()),
    "rows": {
        "square": P(None, "fsdp", "model"),
        "other": P(None, ("data", "fsdp")),
        "heads": P(None, "fsdp", "model"),
        "experts": P(None, None, "fsdp", "model"),
        "alone": P("model"),
    },
    "columns": {
        "square": P(None, None, ("fsdp", "model")),
        "other": P(None, "model", "fsdp"),
        "heads": P(None, "model", "fsdp", None),
        "experts": P(None, ("model", "data")),
        "alone": P(None, ("model", "fsdp", "data")),
    },
    "mixed": {
        "square": P(None, ("model", "fsdp")),
        "other": P(None, "fsdp", ("data", "model")),
        "heads": P(None, None, "fsdp"),
        "experts": P(None, "fsdp", "model"),
        "alone": P("fsdp", "model"),
    },
}


def inverse_like(shared, stack):
    """Something that needs a whole matrix, and treats its sides differently."""
    product = stack @ stack.mT @ stack
    return [shared * product + jnp.cumsum(stack, axis=1) + jnp.flip(stack, axis=2)]


def update(arrays):
    leaves, treedef = jax.tree.flatten_with_path(arrays)
    members = []
    for path, x in leaves:
        members.append([stored_matrices(x, NUMBERS[path[-1].key], path)])
    results = compute_divided(inverse_like, jnp.float32(2), members)
    return treedef.unflatten([result for (result,) in results])


def arrays_and_results():
    rng = np.random.default_rng(0)
    arrays = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in SHAPES.items()}
    return arrays, jax.jit(update)(arrays)


def assert_same(results, expected):
    for name, x in results.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("specs", list(SPECS))
@pytest.mark.parametrize("sizes", MESHES)
def test_every_layout_has_the_results_of_one_device(sizes, specs):
    arrays, expected = arrays_and_results()
    mesh = rc.make_mesh(**sizes)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS[specs].items()}

    def divided(arrays):
        with traced_over(mesh), stored_as(stored_specs(shardings, arrays)):
            return update(arrays)

    results = jax.jit(divided, in_shardings=(shardings,), out_shardings=shardings)(arrays)
    assert_same(results, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_a_jitted_function_of_the_user_has_the_results_of_one_device(types):
    """On Auto axes it is not known how the arrays are stored; on Explicit ones, types say it."""
    arrays, expected = arrays_and_results()
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(types,) * 3)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS["rows"].items()}
    with jax.set_mesh(mesh):
        results = jax.jit(update)(jax.device_put(arrays, shardings))
    assert_same(results, expected)


def test_inside_of_shard_map_each_device_computes_with_its_own_arrays():
    arrays, expected = arrays_and_results()
    mesh = rc.make_mesh()
    with jax.set_mesh(mesh):
        inside = jax.shard_map(update, in_specs=P(), out_specs=P(), check_vma=False)
        results = jax.jit(inside)(arrays)
    assert_same(results, expected)
