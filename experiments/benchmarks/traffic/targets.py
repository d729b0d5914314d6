"""Eight devices of hardware that is not there, for its compiler to compile for."""

from typing import Any, Literal

import jax

import redcoast as rc
from redcoast.dryrun import _devices as devices
from redcoast.dryrun import _target as target

Platform = Literal["a100", "v4", "v5e", "cpu"]

NAMES = {"a100": "a100-80gb:8", "v4": "v4:2x2x2", "v5e": "v5e:2x4"}
EXTRAS = {"a100": "cuda12", "v4": "tpu", "v5e": "tpu"}


def target_devices(platform: Platform) -> list[Any]:
    """Eight devices that can be compiled for; of the CPU only, they can also run."""
    if platform == "cpu":
        rc.emulate_devices(8)
        return jax.devices()
    found = devices.target_devices(target.parse_target(NAMES[platform]))
    if found.compiler == "cpu":
        raise SystemExit(
            f"There is no compiler for {platform} here. It comes with "
            f"`pip install 'redcoast[{EXTRAS[platform]}]'`, which needs no such device."
        )
    return found.devices
