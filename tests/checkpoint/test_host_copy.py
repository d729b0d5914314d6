"""Copies on the host keep their values whatever is computed next."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.checkpoint import _host_copy
from redcoast.checkpoint._host_copy import can_copy, copy_to_host
from redcoast.checkpoint._saver import Saver
from redcoast.distributed._mesh import AXES

SPECS = [P(), P("fsdp"), P(("data", "fsdp"), "model"), P(None, "model"), P(None, AXES)]
# The number of distinct shards of each array.
PARTS = [1, 2, 8, 2, 8]


@jax.jit
def values(number):
    return [jnp.full((256, 512), number, jnp.float32) for _ in SPECS]


def split(number):
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    places = [NamedSharding(mesh, spec) for spec in SPECS]
    return dict(enumerate(jax.device_put(values(number), places)))


@pytest.mark.thorough
def test_copies_do_not_change_with_later_steps():
    step = jax.jit(lambda xs: {name: 2 * x for name, x in xs.items()}, donate_argnums=0)
    for number in range(1, 11):
        arrays = split(number)
        copies = copy_to_host(arrays)
        for _ in range(3):
            arrays = step(arrays)
        assert all((x == 8 * number).all() for x in arrays.values())
        assert all((np.asarray(x) == number).all() for x in copies.values())


def test_one_replica_is_copied_with_its_sharding():
    copies: dict[int, Any] = copy_to_host(split(1))
    assert [len(x.sharding.device_set) for x in copies.values()] == PARTS
    assert {x.sharding.memory_kind for x in copies.values()} == {"unpinned_host"}
    for x, y in zip(copies.values(), split(1).values(), strict=True):
        assert x.sharding.shard_shape(x.shape) == y.sharding.shard_shape(y.shape)


def test_numpy_arrays_are_copied_too():
    arrays = {"x": np.arange(3), "y": jnp.uint32(4)}
    copies = copy_to_host(arrays)
    arrays["x"] += 1
    assert copies["x"].tolist() == [0, 1, 2]
    assert int(copies["y"]) == 4


def test_arrays_that_cannot_be_copied_are_passed_to_orbax(monkeypatch):
    x = jnp.ones((8, 4))
    assert can_copy({"x": x, "y": np.ones(3)})
    with monkeypatch.context() as patch:  # a device without host memory
        patch.setattr(_host_copy, "_kinds", lambda x: {"device"})
        assert not can_copy({"x": x})
    monkeypatch.setattr(_host_copy, "MOST_BYTES", x.nbytes - 1)
    assert not can_copy({"x": x})


@pytest.mark.parametrize("left_to_orbax", [False, True])
def test_a_save_contains_the_state_at_the_time_of_the_call(tmp_path, monkeypatch, left_to_orbax):
    if left_to_orbax:
        monkeypatch.setattr("redcoast.checkpoint._saver.can_copy", lambda arrays: False)
    step = jax.jit(lambda xs: [2 * x for x in xs], donate_argnums=0)
    state = list(split(3).values())
    with Saver(rc.Checkpoints(tmp_path)) as saver:
        saver.save(1, state, {"metrics": {}})
        for _ in range(3):
            state = step(state)
    actual = rc.load_checkpoint(tmp_path / "checkpoints" / "1")
    assert all((x == 3).all() for x in jax.tree.leaves(actual))


def test_the_loop_does_not_wait_for_orbax(tmp_path, monkeypatch):
    """Saving does not block, not even on the work before the first write."""
    begun, go_on = threading.Event(), threading.Event()
    with Saver(rc.Checkpoints(tmp_path)) as saver:
        save = saver._checkpointer.save

        def late(*args, **kwargs):
            begun.set()
            assert go_on.wait(30)
            save(*args, **kwargs)

        monkeypatch.setattr(saver._checkpointer, "save", late)
        saver.save(1, split(1), {"metrics": {}})
        assert begun.wait(30)
        go_on.set()
    assert (tmp_path / "checkpoints" / "1").is_dir()
