"""What devices can do: the constants that weigh arithmetic against communication."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """The constants by which plans are priced, by default about those of an A100 in a server.

    Only their ratios decide which plan is cheapest.

    **Attributes:**

    - `flops`: attained floating point operations, per second.
    - `model_bandwidth`: bytes that a device sends per second over the `model` axis.
    - `batch_bandwidth`: the same over `data` and `fsdp`.
    - `memory_bandwidth`: bytes read and written per second.
    - `memory`: bytes of memory.
    """

    flops: int | float = 1e14
    model_bandwidth: int | float = 2e11
    batch_bandwidth: int | float = 2e11
    memory_bandwidth: int | float = 1.5e12
    memory: int | float = 80e9


def all_reduce(count: int, size: int | float) -> int | float:
    """Bytes that each of `count` devices sends for an all-reduce of `size` bytes in a ring."""
    return 2 * (count - 1) / count * size


def all_gather(count: int, size: int | float) -> int | float:
    """Bytes that each of `count` devices sends for an all-gather with a result of `size` bytes."""
    return (count - 1) / count * size
