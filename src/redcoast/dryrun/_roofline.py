"""Lower bounds on the time of a step, from its arithmetic, memory traffic and communication."""

from collections.abc import Mapping
from dataclasses import dataclass

from ._chips import Chip


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the seconds that a step takes on each device.

    - `network`: For each set of mesh axes, such as `"model"` or `"data+fsdp"`, the time of the
        communication over them, without overlap.
    - `binding`: The name of the largest bound: `"arithmetic"`, `"memory"`, or `"network (model)"`.
    - `utilisation`: `arithmetic` divided by the largest bound, without what several devices repeat:
        an upper bound on the utilisation of the peak rate.
    """

    arithmetic: float  # the time of the contractions at the chip's peak rate
    memory: float  # the time to access each byte of the step's arguments and results once
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
    repeated: float = 0.0,
) -> Bounds:
    """Computes lower bounds on the time of a step, assuming that all of them overlap.

    - `flops`: Floating point operations of a device, by the dtype of their operands.
    - `moved_bytes`: Bytes of the step's arguments and results on a device.
    - `sent_bytes`: Bytes that a device communicates, by mesh axes joined with `+`.
    - `bandwidths`: Bytes per second that it can send along each mesh axis.
    - `repeated`: The part of the arithmetic, from 0 to 1, that other devices do as well.
    """
    # Operations of different dtypes run one after another; arithmetic, memory and network overlap.
    arithmetic = sum(count / peak(chip, dtype) for dtype, count in flops.items())
    memory = moved_bytes / chip.memory_bandwidth
    network = {axes: size / bandwidth(axes, bandwidths) for axes, size in sent_bytes.items()}
    # `max` returns the first of equal bounds: arithmetic.
    every = {"arithmetic": arithmetic, "memory": memory}
    for axes, seconds in network.items():
        every[f"network ({axes})"] = seconds
    binding = max(every, key=lambda name: every[name])
    useful = arithmetic * (1 - repeated)
    utilisation = 0.0  # of a step that takes no time, such as one without arrays
    if every[binding]:
        utilisation = useful / every[binding]
    return Bounds(float(arithmetic), float(memory), network, binding, float(utilisation))


def peak(chip: Chip, dtype: str) -> int | float:
    """Peak operations per second on operands of a dtype."""
    if dtype.startswith(("float8", "int8", "uint8", "float4", "int4", "uint4")):
        return 2 * chip.flops["bfloat16"]  # at most twice the rate of 16 bits
    if dtype in ("bfloat16", "float16"):
        return chip.flops["bfloat16"]
    # Wider dtypes are at most as fast as float32.
    return chip.flops["float32"]


def bandwidth(axes: str, bandwidths: Mapping[str, int | float]) -> int | float:
    """The bandwidth along some axes together; by default the bandwidth of the fastest, or of
    all axes if none of these is listed."""
    if axes in bandwidths:
        return bandwidths[axes]
    known = [bandwidths[axis] for axis in axes.split("+") if axis in bandwidths]
    # A lower bound must not assume a slower link than the fastest one.
    return max(known or bandwidths.values())
