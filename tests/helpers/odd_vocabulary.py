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
    assert {line["kind"] for line in run.traffic} == {"all-reduce"}
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


def uses(model, batch, *, lookup=lambda x: x, head=lambda table: table.T):
    """A tied table: `lookup` changes what is looked up, and `head` the table of the products."""
    hidden = jnp.tanh(lookup(model["table"][batch]))
    table = head(model["table"])
    return jnp.mean(jnp.tanh(hidden.astype(table.dtype) @ table).astype(jnp.float32))


def in_chunks(model, batch):
    """A loop closes over the table."""
    hidden = jnp.tanh(model["table"][batch])  # (rows, length, width)
    score = lambda total, x: (total + jnp.mean(jnp.tanh(x @ model["table"].T)), None)
    return jax.lax.scan(score, 0.0, hidden.swapaxes(0, 1))[0]


HALF = lambda x: x.astype(jnp.bfloat16)
# The table is of float32 (4 bytes) and bfloat16 (2). On two devices, each device sends as many
# bytes for an all-reduce, and half of them for an all-gather or a reduce-scatter.
USES = {
    "transposed": (uses, 4, 4),
    "swapped": (lambda m, b: uses(m, b, head=lambda t: jnp.swapaxes(t, 0, 1)), 4, 4),
    "reshaped": (lambda m, b: uses(m, b, head=lambda t: t.reshape(4, 256, 64)[0].T), 4, 4),
    "checkpoint": (lambda m, b: jax.checkpoint(uses)(m, b), 4, 6),
    "three": (lambda m, b: uses(m, b) + uses(m, b[:, ::-1]), 4, 4),
    "chunks": (in_chunks, 4, 4),
    # All gradients are summed in float32, or each is scattered, and the table gathered, in its own
    # dtype.
    "cast": (lambda m, b: uses(m, b, lookup=HALF, head=lambda t: HALF(t).T), 4, 6),
    "cast before": (lambda m, b: uses({"table": HALF(m["table"])}, b), 2, 2),
}


def check_uses(target):
    """Checks that what is planned for uses of a tied table on two devices is what they send."""
    for name, (fn, *bytes_of_element) in USES.items():
        for axis, size in zip(("data", "fsdp"), bytes_of_element, strict=True):
            run = rc.dry_run(
                lambda key: {"table": jax.random.normal(key, (1024, 64))},
                lambda model, batch, key, fn=fn: fn(model, batch),
                jax.ShapeDtypeStruct((16, 32), jnp.int32),
                optax.sgd(1e-3),
                target=target,
                mesh={axis: 2},
            )
            planned = sum(row.bytes for row in run.plan.report.program.traffic)
            assert run.sent_bytes == pytest.approx(1024 * 64 * size, rel=0.01), (name, axis)
            assert planned == pytest.approx(run.sent_bytes, rel=0.01), (name, axis)
