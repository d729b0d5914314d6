"""The time to choose the actions of a few environments, on all devices and on one of them.

    python experiments/benchmarks/acting.py

The policy is replicated over emulated devices, as training leaves it, or copied to one device, as
docs/howto/own_data.md recommends for acting. Training needs all devices; sixteen observations do
not.
"""

import statistics
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import tyro

import redcoast as rc

sys.path.insert(0, str(Path(__file__).parents[1]))
from _learner import on_one_device

CALLS, TURNS = 200, 7


def main(devices: int = 8, observations: int = 16, width: int = 64) -> None:
    """Prints the time of a call on all devices, divided by that on one.

    Args:
        devices: The number of emulated devices.
        observations: The number of rows of a call.
        width: The width of the policy's two hidden layers.
    """
    rc.emulate_devices(devices)
    mesh = rc.make_mesh()
    policy = eqx.nn.MLP(4, 2, width, 2, key=jax.random.key(0))
    policy = eqx.filter_shard(policy, jax.sharding.NamedSharding(mesh, jax.P()))
    alone = on_one_device(policy, mesh)
    rows = np.ones((observations, 4), np.float32)
    act = eqx.filter_jit(lambda policy, rows: jax.vmap(policy)(rows).argmax(axis=1))
    place = rc.batch_shardings(rows, mesh) if observations % devices == 0 else None

    def milliseconds(policy: eqx.nn.MLP, place: jax.sharding.Sharding | None) -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            np.asarray(act(policy, rows if place is None else jax.device_put(rows, place)))
        return 1000 * (time.perf_counter() - begin) / CALLS

    turns = [(milliseconds(policy, place), milliseconds(alone, None)) for _ in range(TURNS + 1)][1:]
    print(f"jax {jax.__version__}, {devices} emulated devices, {observations} observations")
    for name, times in zip(
        (f"{devices} devices", "one device"), zip(*turns, strict=True), strict=True
    ):
        print(f"{name}: {statistics.median(times):.2f} ms a call")
    print(f"ratio: {statistics.median(a / b for a, b in turns):.1f}")


if __name__ == "__main__":
    tyro.cli(main)
