"""A run in which each process reads its own part of a stream, or batches of a source, for tests.

split.py '{"mesh": {"data": 2}, "directory": "...", "steps": 8, "kill_at": 5, "batches": false}'
"""

import json
import os
import signal
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redcoast as rc

sys.path.insert(0, str(Path(__file__).parents[1]))
from problem import quiet

asked = json.loads(sys.argv[1])
rc.initialize()
read: list[int] = []
ROWS = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)


def make(part, parts):
    """Every so-many-th example, in a new order in each epoch."""

    def source(epoch):
        own = np.arange(part, len(ROWS), parts)
        for i in np.random.default_rng(epoch).permutation(own):
            read.append(int(i))
            yield ROWS[i], int(i)

    return source


def collate_fn(examples):
    if asked.get("kill_at") and len(read) > asked["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.stack([x for x, _ in examples]), np.array([i for _, i in examples], np.int32)


def loss_fn(model, batch, key):
    x, index = batch
    return jnp.mean((jax.vmap(model)(x) - x) ** 2), {"sum": jnp.sum(index)}


def batches():
    """Batches for all processes; the last of an epoch has two rows."""
    for i in range(0, len(ROWS), 8):
        read.extend(range(i, min(i + 8, len(ROWS))))
        yield ROWS[i : i + 8], np.arange(i, min(i + 8, len(ROWS)), dtype=np.int32)


own = asked.get("batches", False)
metrics: list[tuple[int, float, float]] = []
state = rc.fit(
    eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(1)),
    optax.adamw(0.01),
    batches if own else rc.split_by_host(make),
    collate_fn=None if own else collate_fn,
    loss_fn=loss_fn,
    batch_size=None if own else 8,
    steps=asked["steps"],
    mesh=rc.make_mesh(**asked["mesh"]),
    checkpoints=rc.Checkpoints(asked["directory"], every=2, keep=3),
    log=quiet(lambda values, step: metrics.append((step, values["loss"], values["sum"]))),
)
actual = {"process": jax.process_index(), "metrics": metrics, "read": read}
print("RESULT " + json.dumps(actual), flush=True)
