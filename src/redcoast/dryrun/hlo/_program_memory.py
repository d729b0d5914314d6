"""The memory of a compiled program on each device, from the figures of its compiler."""

from typing import Any


def persistent_bytes(memory: Any) -> int:
    """The bytes of arguments and results. Results overwrite donated arguments."""
    arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return arguments + results - memory.alias_size_in_bytes


def peak_bytes(memory: Any, platform: str) -> int:
    """The peak of each device's memory, from `compiled.memory_analysis()`.

    The compiler for TPUs counts the fragments between temporaries twice in their size, so that the
    sum may be far more than what it compares with a device's memory. Its own figure of the peak
    does not, but includes memory on the chip, such as the 128 MiB of TPU v4 that it copies weights
    to. For other compilers it excludes temporaries.
    """
    allocated = persistent_bytes(memory) + memory.temp_size_in_bytes
    if platform != "tpu":
        return allocated
    reported = memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes
    return min(allocated, reported)


def temporary_bytes(memory: Any, platform: str) -> int:
    """The part of the peak that is neither arguments nor results."""
    return max(0, peak_bytes(memory, platform) - persistent_bytes(memory))
