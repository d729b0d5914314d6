"""Tables of vocabularies, compiled for devices that are not there."""

import itertools as it

import jax
import jax.numpy as jnp
import optax
import pytest

import redcoast as rc
from redcoast.losses import cross_entropy
from redcoast.models import GPT2, GPT2Config

LAYERS, WIDTH, ROWS, LENGTH = 3, 256, 2, 128


def check_sent(target, devices):
    """Checks that only the sums of Megatron's layers are communicated, two in each pass."""
    config = GPT2Config(1001, WIDTH, LAYERS, 4, 4 * WIDTH, positions=LENGTH)
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    run = rc.dry_run(
        lambda key: GPT2(config, key=key),
        lambda model, batch, key: cross_entropy(model(batch), batch),
        tokens,
        optax.adamw(1e-3),
        target=target,
        mesh={"model": devices},
    )
    assert {one["kind"] for one in run.traffic} == {"all-reduce"}
    activations = ROWS * LENGTH * WIDTH * 4
    by_hand = 4 * LAYERS * 2 * (devices - 1) / devices * activations
    assert run.sent_bytes == pytest.approx(by_hand, rel=1e-3)


def check_tied(target, devices):
    """Checks that the gradient of a tied table is summed once, for its lookups and products."""
    tokens = jax.ShapeDtypeStruct((8 * devices, LENGTH), jnp.int32)

    for axis, dtype in it.product(("data", "fsdp"), (jnp.float32, jnp.bfloat16)):

        def loss_fn(model, batch, key, dtype=dtype):
            table = model["table"].astype(dtype)
            hidden = jnp.tanh(table[batch])
            logits = jnp.einsum("bsw,vw->bsv", hidden, table)
            return cross_entropy(logits.astype(jnp.float32), batch)

        run = rc.dry_run(
            lambda key: {"table": jax.random.normal(key, (1024, WIDTH))},
            loss_fn,
            tokens,
            optax.sgd(1e-3),
            target=target,
            mesh={axis: devices},
        )
        table = 1024 * WIDTH * dtype.dtype.itemsize
        # all-reduced, or gathered and its gradient reduce-scattered
        by_hand = 2 * (devices - 1) / devices * table
        assert run.sent_bytes == pytest.approx(by_hand, rel=1e-2), (axis, dtype)
