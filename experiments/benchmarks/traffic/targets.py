"""Eight devices to compile for, of hardware that need not exist on this machine."""

from typing import Any, Literal

import jax

import redcoast as rc

Platform = Literal["a100", "h100", "v4", "v5e", "cpu"]

NAMES = {"a100": "a100-80gb:8", "h100": "h100:8", "v4": "v4:2x2x2", "v5e": "v5e:2x4"}


def target_devices(platform: Platform) -> list[Any]:
    """Returns eight devices to compile for; only those of the CPU can also run programs."""
    if platform == "cpu":
        rc.emulate_devices(8)
        return jax.devices()
    try:
        return list(rc.target_devices(NAMES[platform]))
    except ImportError as error:
        raise SystemExit(str(error)) from error
