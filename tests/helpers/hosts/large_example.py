"""A run in which each process reads the parts of examples that its own devices have, for tests.

large_example.py '{"folder": "...", "zarr": false}'
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc

sys.path.insert(0, str(Path(__file__).parents[1]))
from problem import quiet

asked = json.loads(sys.argv[1])
rc.initialize()
mesh = rc.make_mesh()
sharding = NamedSharding(mesh, P(None, "data"))
read: set[int] = set()


def open_field(file):
    if asked["zarr"]:
        import zarr  # pyright: ignore[reportMissingImports]

        return zarr.open_array(file, mode="r")
    return np.load(file, mmap_mode="r")


def collate_fn(files):
    fields = list(map(open_field, files))

    def part(index):
        rows, along, across = index
        read.update(range(*along.indices(fields[0].shape[0])))
        return np.stack([field[along, across] for field in fields[rows]])

    return jax.make_array_from_callback((len(files), *fields[0].shape), sharding, part)


def loss_fn(model, batch, key):
    batch = jax.lax.with_sharding_constraint(batch, sharding)
    return jnp.mean((jnp.tanh(batch @ model["up"]) @ model["down"] - batch) ** 2)


losses: list[float] = []
rows = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
rc.fit(
    {"up": jnp.asarray(rows[0]), "down": jnp.asarray(rows[1])},
    optax.adam(1e-2),
    sorted(Path(asked["folder"]).iterdir()),
    collate_fn=collate_fn,
    loss_fn=loss_fn,
    batch_size=1,
    steps=4,
    mesh=mesh,
    log=quiet(lambda metrics, step: losses.append(float(metrics["loss"]))),
)
actual = {"process": jax.process_index(), "read": sorted(read), "losses": losses}
print("RESULT " + json.dumps(actual), flush=True)
