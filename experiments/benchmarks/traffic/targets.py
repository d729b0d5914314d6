"""Eight devices to compile for, of hardware that need not exist on this machine."""

from typing import Any, Literal

import jax

import redcoast as rc
from redcoast.dryrun import _devices as devices
from redcoast.dryrun import _target_name as target

Platform = Literal["a100", "h100", "v4", "v5e", "cpu"]

NAMES = {"a100": "a100-80gb:8", "h100": "h100:8", "v4": "v4:2x2x2", "v5e": "v5e:2x4"}
EXTRAS = {"a100": "cuda12", "h100": "cuda12", "v4": "tpu", "v5e": "tpu"}


def target_devices(platform: Platform) -> list[Any]:
    """Returns eight devices to compile for; only those of the CPU can also run programs."""
    if platform == "cpu":
        rc.emulate_devices(8)
        return jax.devices()
    found = devices.target_devices(target.parse_target(NAMES[platform]))
    if found.compiler == "cpu":
        raise SystemExit(
            f"The compiler for {platform} is not installed. Run "
            f"`pip install 'redcoast[{EXTRAS[platform]}]'`, which does not need such a device."
        )
    return list(found.devices)
