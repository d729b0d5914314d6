"""Speeds of devices, behaviour of their compiler, and bytes of ring collectives."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh

from ...core._errors import check_number

DEFAULT_MEMORY = 80e9  # of an A100, for devices that do not report their memory
# The part of the memory that an estimate may use: it does not include the compiler's temporaries.
FILLED = 0.85
_COMPILERS = "cpu", "gpu", "tpu"
# Their compiler all-reduces over all chips of a three-dimensional slice what it should scatter.
_ALL_REDUCED = "TPU v4", "TPU v5"  # the second is v5p


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
        devices that it is summed over. XLA does so for GPU and TPU, but on TPU v4 and v5p not over
        all chips of a three-dimensional slice.
    - `overlaps`: Whether the compiler gathers weights and sums gradients while it computes. XLA
        does so for GPU and TPU.
    - `compiler`: The compiler whose memory use is estimated: `"cpu"`, `"gpu"` or `"tpu"`. For GPU
        and TPU, XLA recomputes squares where they are read. For TPU, it also recomputes
        exponentials and similar functions, and stores arrays in bfloat16 if only products of
        default precision read them.

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[:5]:  # the speeds and the memory
            value = getattr(self, field.name)
            if value is not None:
                check_number(field.name, value, above=0)
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
    kind = mesh.devices.flat[0].device_kind
    scatters = scatters_gradients(kind, shape, mesh.shape)
    return dataclasses.replace(hardware, scatters=scatters)


def scatters_gradients(device_kind: str, shape: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Whether gradients are reduce-scattered in TPU slices of so many chips along each dimension.

    They are scattered over `fsdp`, or over `data` to the devices that update parts of copies.
    """
    shards = axes.get("fsdp", 1)
    if shards == 1:
        shards = axes.get("data", 1)
    is_whole = math.prod(shape) == shards
    has_three_dims = sum(size > 1 for size in shape) == 3
    return not (device_kind in _ALL_REDUCED and is_whole and has_three_dims)


def hardware_for(platform: str, memory: int | float | None) -> Hardware:
    """What the compiler for a platform does; platforms other than "cpu" and "tpu" are GPUs."""
    if platform == "cpu":
        return Hardware(
            memory=memory, adds_first=False, scatters=False, overlaps=False, compiler="cpu"
        )
    if platform == "tpu":
        return Hardware(memory=memory, compiler="tpu")
    return Hardware(memory=memory, compiler="gpu")


def all_reduce(count: int, size: int | float) -> int | float:
    """Bytes that each of `count` devices sends for an all-reduce of `size` bytes in a ring."""
    return 2 * (count - 1) / count * size  # a reduce-scatter, and then an all-gather


def all_gather(count: int, size: int | float) -> int | float:
    """Bytes that each of `count` devices sends for an all-gather with a result of `size` bytes.

    A reduce-scatter of an operand of `size` bytes sends as much.
    """
    return (count - 1) / count * size
