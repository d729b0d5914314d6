"""How little time a step can take: what its arithmetic, its memory and its networks allow."""

from collections.abc import Mapping
from dataclasses import dataclass

from ._chips import Chip


@dataclass(frozen=True)
class Bounds:
    """The least seconds that a step takes, by what it needs on each device.

    **Attributes:**

    - `arithmetic`: Contractions, at the chip's peak rate.
    - `memory`: Each byte of the step's arguments and results, once.
    - `network`: For each set of mesh axes, such as `"model"` or `"data+fsdp"`, what is sent over
        them, one after the other.
    - `binding`: The largest of these: `"arithmetic"`, `"memory"`, or `"network (model)"`.
    - `utilisation`: Arithmetic's share of the largest: of the peak no larger share can be had.
    """

    arithmetic: float
    memory: float
    network: dict[str, float]
    binding: str
    utilisation: float


def time_bounds(
    *,
    flops: Mapping[str, int | float],
    moved_bytes: int | float,
    sent_bytes: Mapping[str, int | float],
    chip: Chip,
    bandwidths: Mapping[str, int | float],
) -> Bounds:
    """Bounds the time of a step from below; what a device does at the same time may overlap.

    **Arguments:**

    - `flops`: Floating point operations of a device, by the dtype of their operands.
    - `moved_bytes`: Bytes of the step's arguments and results on a device.
    - `sent_bytes`: Bytes that a device sends, by the mesh axes, joined by `+`.
    - `chip`: The device.
    - `bandwidths`: Bytes that it sends along each mesh axis, per second.

    **Returns:**

    [`Bounds`][redcoast._dryrun.bounds.Bounds], in seconds.

    !!! example

        ```python
        from redcoast._dryrun.bounds import time_bounds
        from redcoast._dryrun.chips import CHIPS

        time_bounds(
            flops={"bfloat16": 2.75e14},
            moved_bytes=1.2e12,
            sent_bytes={"model": 5e10},
            chip=CHIPS["v4"],
            bandwidths={"data": 5e10, "fsdp": 5e10, "model": 1e11},
        )
        ```
    """
    arithmetic = sum(count / peak(chip, dtype) for dtype, count in flops.items())
    memory = moved_bytes / chip.memory_bandwidth
    network = {axes: size / bandwidth(axes, bandwidths) for axes, size in sent_bytes.items()}
    # The first of equals: arithmetic.
    every = {"arithmetic": arithmetic, "memory": memory}
    every |= {f"network ({axes})": seconds for axes, seconds in network.items()}
    binding = max(every, key=lambda name: every[name])
    utilisation = arithmetic / every[binding] if every[binding] else 0.0
    return Bounds(float(arithmetic), float(memory), network, binding, float(utilisation))


def peak(chip: Chip, dtype: str) -> int | float:
    """Operations per second on operands of a dtype."""
    if dtype.startswith(("float8", "int8", "uint8", "float4", "int4", "uint4")):
        return 2 * chip.flops["bfloat16"]  # where they gain anything, twice the rate of 16 bits
    # What is wider than float32 is not faster.
    return chip.flops["bfloat16" if dtype in ("bfloat16", "float16") else "float32"]


def bandwidth(axes: str, bandwidths: Mapping[str, int | float]) -> int | float:
    """That along some axes together; of all of them, for a collective over other groups."""
    if axes in bandwidths:
        return bandwidths[axes]
    found = [bandwidths[axis] for axis in axes.split("+") if axis in bandwidths]
    return max(found or bandwidths.values())
