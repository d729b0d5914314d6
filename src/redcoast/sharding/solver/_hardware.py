"""Speeds of devices, behaviour of their compiler, and bytes of ring collectives."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh

from ...core._errors import check_integer, check_number

DEFAULT_MEMORY = 80e9  # of an A100, for devices that do not report their memory
# The part of the memory that an estimate may use: it does not include the compiler's temporaries.
FILLED = 0.85
_COMPILERS = "cpu", "gpu", "tpu"
# Their compiler does not scatter over all chips of a three-dimensional slice.
_NOT_SCATTERED = "TPU v4", "TPU v5"  # the second is v5p


@dataclass(frozen=True)
class Hardware:
    """Hardware speeds for estimating the cost of a plan. Defaults approximate an A100 in a server.

    Only the ratios of the speeds determine which plan is cheapest.

    **Attributes:**

    - `flops`: Attained floating point operations per second.
    - `model_bandwidth`: Bytes that a device sends per second over the `model` axis.
    - `batch_bandwidth`: Bytes that a device sends per second over `data` and `fsdp`.
    - `memory_bandwidth`: Bytes read and written per second.
    - `memory`: Bytes of memory per device. If no `Hardware` is given, the memory that the devices
        report. `None` means unknown: plans then assume 80 GB, and shard every large array.
    - `adds_first`: Whether the compiler adds the gradients of several uses of one value before the
        all-reduce, so that they cost only one. XLA does so for GPU and TPU.
    - `scatters`: Whether the compiler uses a reduce-scatter for a gradient that is sharded over the
        devices that it is summed over. XLA does so for GPU and TPU. If it is sharded over some of
        them, XLA all-reduces the parts over the others.
    - `overlaps`: Whether the compiler gathers weights and sums gradients while it computes. XLA
        does so for GPU and TPU.
    - `compiler`: The compiler whose memory use is estimated: `"cpu"`, `"gpu"` or `"tpu"`. For GPU
        and TPU, XLA recomputes squares where they are read. For TPU, it also recomputes
        exponentials and similar functions, and stores arrays in bfloat16 if only products of
        default precision read them.
    - `not_scattered`: The number of devices over which the compiler uses an all-reduce in any case:
        on TPU v4 and v5p, all chips of a three-dimensional slice.

    !!! example

        ```python
        import redcoast as rc

        # About a TPU v5e, with `data` over a slower network.
        hardware = rc.Hardware(
            flops=1e14,
            model_bandwidth=1e11,
            batch_bandwidth=1e10,
            memory_bandwidth=8e11,
            memory=16e9,
        )
        ```
    """

    flops: int | float = 1e14
    model_bandwidth: int | float = 2e11
    batch_bandwidth: int | float = 2e11
    memory_bandwidth: int | float = 1.5e12
    memory: int | float | None = None
    adds_first: bool = True
    scatters: bool = True
    overlaps: bool = True
    compiler: str = "gpu"
    not_scattered: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:5]:  # the speeds and the memory
            value = getattr(self, field.name)
            if value is not None:
                check_number(field.name, value, above=0)
        if self.not_scattered is not None:
            check_integer("not_scattered", self.not_scattered)
        if self.compiler not in _COMPILERS:
            raise ValueError(f'`compiler` is {self.compiler!r}. It must be "cpu", "gpu" or "tpu".')


def hardware_of(mesh: Mesh | AbstractMesh) -> Hardware:
    """The default for a mesh.

    XLA for CPU neither uses reduce-scatters nor adds gradients first, and overlaps nothing.
    """
    if not isinstance(mesh, Mesh):
        return Hardware()
    platform = mesh.devices.flat[0].platform
    try:
        stats = mesh.local_devices[0].memory_stats() or {}
    except (IndexError, NotImplementedError, jax.errors.JaxRuntimeError):  # not local devices
        stats = {}
    memory = stats.get("bytes_limit")  # CPUs report none
    hardware = hardware_for(platform, memory)
    if platform != "tpu":
        return hardware
    coordinates = zip(*(device.coords for device in mesh.devices.flat), strict=True)
    shape = [len(set(along)) for along in coordinates]
    chips = not_scattered(mesh.devices.flat[0].device_kind, shape)
    return dataclasses.replace(hardware, not_scattered=chips)


def not_scattered(device_kind: str, shape: Sequence[int]) -> int | None:
    """The number of chips, if any, over which nothing is reduce-scattered in a TPU slice of so many
    along each dimension."""
    has_three_dims = sum(size > 1 for size in shape) == 3
    if device_kind in _NOT_SCATTERED and has_three_dims:
        return math.prod(shape)
    return None


def hardware_for(platform: str, memory: int | float | None) -> Hardware:
    """What the compiler for a platform does; platforms other than "cpu" and "tpu" are GPUs."""
    if platform == "cpu":
        return Hardware(
            memory=memory, adds_first=False, scatters=False, overlaps=False, compiler="cpu"
        )
    if platform == "tpu":
        return Hardware(memory=memory, compiler="tpu")
    return Hardware(memory=memory, compiler="gpu")


def scatters_over(hardware: Hardware, devices: int) -> bool:
    """Whether what is summed over so many devices, and divided over them, is reduce-scattered."""
    return devices > 1 and hardware.scatters and devices != hardware.not_scattered


def gradient_sum(hardware: Hardware, devices: int, shards: int, size: int | float) -> int | float:
    """Bytes that each of `devices` sends to sum a gradient of `size` bytes, of which as many as
    `shards` store different parts."""
    if not scatters_over(hardware, shards):
        return all_reduce(devices, size)
    return all_gather(shards, size) + all_reduce(devices // shards, size / shards)


def all_reduce(count: int, size: int | float) -> int | float:
    """Bytes that each of `count` devices sends for an all-reduce of `size` bytes in a ring."""
    return 2 * (count - 1) / count * size  # a reduce-scatter, and then an all-gather


def all_gather(count: int, size: int | float) -> int | float:
    """Bytes that each of `count` devices sends for an all-gather with a result of `size` bytes.

    A reduce-scatter of an operand of `size` bytes sends as much.
    """
    return (count - 1) / count * size
