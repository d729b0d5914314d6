"""What a program is traced for: a device, which may be absent from this machine, and the number of
parts into which it divides its sequences.

A plan may split the sequence of a batch that has fewer rows than there are devices. Attention and
losses in chunks then have a dimension for the parts, which is split over the devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

# JAX's caches depend on it, so that functions are traced again for another device.
_context = jax.make_user_context()


@dataclass(frozen=True)
class Target:
    """The properties of a device that models choose their operations by.

    - `capability`: the compute capability of an NVIDIA GPU, without the digits after the point; 0
        for other devices.
    """

    platform: str  # `"cpu"`, `"gpu"` or `"tpu"`
    capability: int


def target() -> Target:
    """The device that the current trace is for; by default the first of this machine."""
    return _context.value or target_of(jax.local_devices()[0])


def target_of(device: Any) -> Target:
    capability = 0
    digits = getattr(device, "compute_capability", "").partition(".")[0]
    if digits.isdecimal():
        capability = int(digits)
    return Target(device.platform, capability)


@contextmanager
def compiling_for(device: Target) -> Iterator[None]:
    """Programs that are traced inside are for this device."""
    with _context(_context.value or device):
        yield


# JAX's caches depend on it, so that a function that was traced with parts is traced again without.
_parts = jax.make_user_context()


def sequence_parts() -> int:
    """The number of parts of a sequence; 1 if it is not split."""
    return _parts.value or 1


@contextmanager
def divided_into(parts: int) -> Iterator[None]:
    """Programs that are traced inside divide their sequences into parts."""
    with _parts(parts):
        yield
