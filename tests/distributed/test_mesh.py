from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.distributed._mesh import _arrange, _split_off, ambient_or_default, batch_sharding


def test_three_axes_of_type_auto():
    mesh = rc.make_mesh()
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert dict(mesh.shape) == {"data": 8, "fsdp": 1, "model": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"model": 4}, (2, 1, 4)),
        ({"data": 2, "fsdp": 2, "model": 2}, (2, 2, 2)),
        ({"data": 1, "fsdp": -1}, (1, 8, 1)),
        ({"data": 2, "model": -1}, (2, 1, 4)),
    ],
)
def test_one_size_uses_the_remaining_devices(sizes, shape):
    assert rc.make_mesh(**sizes).devices.shape == shape


def test_neighbouring_devices_are_on_model():
    mesh = rc.make_mesh(model=4)
    assert [d.id for d in mesh.devices[0, 0]] == [0, 1, 2, 3]


def test_some_of_the_devices():
    mesh = rc.make_mesh(devices=jax.devices()[:2], model=2)
    assert mesh.devices.shape == (1, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"model": 3}, "there are 8.*model in \\[1, 2, 4, 8\\]"),
        ({"data": 2, "model": 2}, "product of 8.*data in \\[4\\] or model in \\[4\\]"),
        ({"data": 16}, "needs 16 devices"),
        ({"model": 0}, "`model` must be at least 1, but is 0"),
        ({"data": -1, "model": -1}, "data and model"),
        ({"fsdp": -1, "model": 2}, "pass `data=1` with `fsdp=-1`"),
        ({"devices": []}, "empty"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words):
    with pytest.raises(ValueError, match=words):
        rc.make_mesh(**sizes)


def test_a_mesh_on_one_device_says_how_to_emulate_more():
    with pytest.raises(ValueError, match=r"first call `rc.emulate_devices\(4\)`"):
        rc.make_mesh(model=4, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="data in") as error:
        rc.make_mesh(data=4)
    assert "emulate" not in str(error.value)


def device(id, process_index=0, slice_index=None, platform="gpu"):
    return SimpleNamespace(
        id=id, process_index=process_index, slice_index=slice_index, platform=platform
    )


def test_hosts_are_on_data_in_any_order():
    devices = [device(i, process_index=i % 2) for i in range(8)]
    mesh = _arrange(devices, (2, 1, 4))
    hosts = np.vectorize(lambda d: d.process_index)(mesh)
    assert (hosts == np.array([0, 1]).reshape(2, 1, 1)).all()


def test_slices_are_on_the_leading_axes():
    assert _split_off((4, 2, 8), 2) == ((2, 1, 1), (2, 2, 8))
    assert _split_off((2, 4, 8), 8) == ((2, 4, 1), (1, 1, 8))
    with pytest.raises(ValueError, match="3 slices"):
        _split_off((4, 2, 8), 3)


def test_a_batch_is_split_where_it_divides():
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    assert batch_sharding(mesh, 8).spec == P(("data", "fsdp"))
    assert batch_sharding(mesh, 6).spec == P()


def test_what_counts_rows_is_split_like_a_batch():
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    tree = {"buffer": np.zeros((8, 3)), "size": jnp.int32(0), "name": "cart"}
    actual = rc.batch_shardings(tree, mesh)
    assert actual["buffer"] == NamedSharding(mesh, P(("data", "fsdp")))
    assert actual["size"] == NamedSharding(mesh, P())
    assert actual["name"] is None
    with jax.set_mesh(mesh):
        assert rc.batch_shardings(tree) == actual


def test_the_ambient_mesh_takes_precedence_over_the_default():
    mesh = rc.make_mesh(model=8)
    with jax.set_mesh(mesh):
        assert ambient_or_default(None) == mesh
        assert ambient_or_default(rc.make_mesh()) == rc.make_mesh()
    assert ambient_or_default(None) == rc.make_mesh()


def test_devices_cannot_be_emulated_after_the_first_use():
    jax.devices()
    with pytest.raises(ValueError, match="top of the script"):
        rc.emulate_devices(4)
    with pytest.raises(ValueError, match="`count` is 0. It must be at least 1."):
        rc.emulate_devices(0)
