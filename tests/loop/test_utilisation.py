"""The time of a step at the peak rate of the devices, from which MFU is computed."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import redcoast as rc
from redcoast.dryrun import _chips
from redcoast.loop._run_config import seconds_at_peak
from redcoast.train._training import Training


@pytest.fixture
def arguments():
    optimizer = optax.sgd(0.1)
    state = rc.init_state(lambda key: {"w": jnp.zeros((8, 16))}, optimizer, key=jax.random.key(0))
    loss_fn = lambda model, batch, key: jnp.mean((batch @ model["w"]) ** 2)
    batch = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    return Training(loss_fn, optimizer), state, batch, rc.make_mesh(fsdp=8)


def test_a_peak_that_is_not_known(arguments):
    assert seconds_at_peak(*arguments) is None


def test_three_times_the_forward_pass_over_all_devices(arguments, monkeypatch):
    chip = dataclasses.replace(_chips.CHIPS["v4"], device_kind="cpu")
    monkeypatch.setattr(_chips, "CHIPS", types.MappingProxyType({"v4": chip}))
    actual = seconds_at_peak(*arguments)
    assert actual == pytest.approx(3 * 2 * 32 * 8 * 16 / chip.flops["float32"] / 8)
    training, *others = arguments
    frozen = dataclasses.replace(training, trainable=lambda x: False)
    assert seconds_at_peak(frozen, *others) is None
