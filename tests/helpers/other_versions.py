"""A run that one version of JAX begins and another one continues.

python tests/helpers/other_versions.py DIRECTORY STEPS     trains, or continues what is there
python tests/helpers/other_versions.py DIRECTORY OTHER     compares the losses of two runs
"""

import sys
from pathlib import Path

import redcoast as rc

rc.emulate_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from redcoast.losses import cross_entropy  # noqa: E402
from redcoast.models import Llama, LlamaConfig  # noqa: E402


def train(directory: str, steps: int) -> None:
    # A scan over rematerialised layers, which JAX's versions describe differently.
    config = LlamaConfig(64, 32, layers=8, heads=4, kv_heads=2, hidden=64, remat="full")
    tokens = np.random.default_rng(0).integers(0, 64, (256, 17), np.int32)

    def loss_fn(model, batch, key):
        return cross_entropy(model(batch[:, :-1]), batch[:, 1:])

    rc.fit(
        lambda key: Llama(config, key=key),
        optax.adamw(1e-2),
        tokens,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        batch_size=8,
        steps=steps,
        mesh=rc.make_mesh(data=2, fsdp=2, model=2),
        checkpoints=rc.Checkpoints(directory),
    )


def compare(directory: str, other: str) -> None:
    losses, others = ([row["loss"] for row in rc.read_metrics(x)] for x in (directory, other))
    np.testing.assert_allclose(losses, others, rtol=1e-4)
    print(f"jax {jax.__version__}: {len(losses)} losses are equal, the last is {losses[-1]:.6f}.")


if sys.argv[2].isdecimal():
    train(sys.argv[1], int(sys.argv[2]))
else:
    compare(str(Path(sys.argv[1], "metrics.jsonl")), str(Path(sys.argv[2], "metrics.jsonl")))
