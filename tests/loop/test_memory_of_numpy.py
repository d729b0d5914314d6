"""Memory that JAX and NumPy share, or several CPU devices: nobody's values change."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.distributed._arrays import place_tree, put

MESH = rc.make_mesh()
REPLICATED = NamedSharding(MESH, P())


def aligned(count, value):
    """A NumPy array in memory that JAX uses without a copy."""
    memory = np.zeros(4 * count + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    array = memory[begin : begin + 4 * count].view(np.float32)
    array[:] = value
    return array


def pointers(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_a_copy_is_one_for_numpy_too(spec):
    leaf = aligned(1024, 1.0)
    sharding = NamedSharding(MESH, spec)
    placed = put(leaf, sharding, may_alias=False)
    tree = place_tree({"w": leaf}, {"w": sharding}, copy=True)
    leaf[:] = 2.0
    np.testing.assert_array_equal(placed, np.ones(1024))
    np.testing.assert_array_equal(tree["w"], np.ones(1024))


def test_a_step_that_donates_memory_of_several_devices_writes_into_none_of_it(tmp_path):
    """Orbax restores one NumPy buffer that all CPU devices use, and a step donates it."""
    values = np.arange(300_000, dtype=np.float32)
    rc.save_checkpoint(tmp_path / "c", {"w": values, "b": np.ones(300_000, np.float32)})
    like = jax.device_put({"w": jnp.zeros(300_000), "b": jnp.zeros(300_000)}, REPLICATED)
    restored = rc.load_checkpoint(tmp_path / "c", like)
    shared = jax.device_put(aligned(300_000, 3.0), REPLICATED)
    assert len(set(pointers(shared))) == 1  # as those of a restored array may be
    state = restored | {"shared": shared}
    step = eqx.filter_jit(lambda s: jax.tree.map(lambda x: 2 * x + 1, s), donate="all")
    for count in (1, 2, 3):
        state = step(state)
        for name, first in (("w", values), ("b", np.ones(1)), ("shared", np.full(1, 3.0))):
            expected = first * 2**count + (2**count - 1)
            for shard in state[name].addressable_shards:
                np.testing.assert_array_equal(shard.data, np.broadcast_to(expected, (300_000,)))
