"""The time of a step at the peak rate of the devices, from which MFU is computed."""

import dataclasses
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import redcoast as rc
from redcoast.dryrun import _chips
from redcoast.loop._run_config import seconds_at_peak


@pytest.fixture
def arguments():
    state = rc.init_state(
        lambda key: {"w": jnp.zeros((8, 16))}, optax.sgd(0.1), key=jax.random.key(0)
    )
    loss_fn = lambda model, batch, key: jnp.mean((batch @ model["w"]) ** 2)
    return state, loss_fn, jax.ShapeDtypeStruct((32, 8), jnp.float32), rc.make_mesh(fsdp=8)


GIVEN = {"compute_dtype": None, "trainable": eqx.is_inexact_array}


def test_a_peak_that_is_not_known(arguments):
    assert seconds_at_peak(*arguments, **GIVEN) is None


def test_three_times_the_forward_pass_over_all_devices(arguments, monkeypatch):
    chip = dataclasses.replace(_chips.CHIPS["v4"], device_kind="cpu")
    monkeypatch.setattr(_chips, "CHIPS", types.MappingProxyType({"v4": chip}))
    found = seconds_at_peak(*arguments, **GIVEN)
    assert found == pytest.approx(3 * 2 * 32 * 8 * 16 / chip.flops["float32"] / 8)
    frozen = {"compute_dtype": None, "trainable": lambda x: False}
    assert seconds_at_peak(*arguments, **frozen) is None
