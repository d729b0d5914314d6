"""The accelerators that can be asked about, with their published figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

GiB = 2**30
# Of the memory that CUDA reports, the part that JAX can be told to take: the rest is for CUDA's
# own context and for libraries.
SHARE = 0.95


@dataclass(frozen=True)
class Chip:
    """One device of a kind, as JAX counts devices: figures of the maker, in bytes and seconds.

    **Attributes:**

    - `memory`: Bytes of memory, as published.
    - `usable`: Bytes that a program can have: what its compiler says (TPU), or 95 % of what CUDA
        reports, which JAX takes with `XLA_PYTHON_CLIENT_MEM_FRACTION=.95` (GPU).
    - `flops`: Peak of dense contractions, by the dtype of their operands, in JAX's default
        precision: of float32 on TPU that is one pass in bfloat16, from Ampere on TF32.
    - `memory_bandwidth`: Bytes read and written per second.
    - `link_bandwidth`: Bytes per second in one direction: over one link to a neighbour (TPU), or
        from a card to all others of its host (GPU).
    - `host_bandwidth`: Bytes per second that a device sends to devices of other hosts (GPU), or
        of other slices (TPU).
    - `per_host`: Devices of a host, of GPUs the most.
    - `source`: Where the maker publishes them.
    - `device_kind`: What JAX calls the device.
    - `cores`: Devices that share the links of one package: two in TPU7x, of two halves.
    - `torus`: Dimensions of the network of links; 0 where every device reaches all others.
    """

    name: str
    kind: Literal["tpu", "gpu", "cpu"]
    memory: int
    usable: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    per_host: int
    source: str
    device_kind: str = ""
    cores: int = 1
    torus: int = 0


def _tpu(name: str, memory: int | float, usable: int | float, flops: float, **other: Any) -> Chip:
    rates = MappingProxyType({"float32": flops, "bfloat16": flops})
    sizes = (round(memory * GiB), round(usable * GiB))
    return Chip(name, "tpu", *sizes, rates, **{"per_host": 4, **other})


def _gpu(
    name: str, memory: int, reported: float, float32: float, bfloat16: float, **other: Any
) -> Chip:
    rates = MappingProxyType({"float32": float32, "bfloat16": bfloat16})
    sizes = (round(memory * GiB), round(reported * GiB * SHARE))
    return Chip(name, "gpu", *sizes, rates, **{"per_host": 8, **other})


# Of TPUs, `usable` is what libtpu 0.0.42 names when it refuses a program, and the bandwidth of a
# link is that of the chip, published for both directions together, by its links and by two.
_TPUS = (
    _tpu(
        "v4",
        memory=32,
        usable=30.75,
        flops=275e12,
        device_kind="TPU v4",
        memory_bandwidth=1200e9,
        link_bandwidth=50e9,  # https://arxiv.org/abs/2304.01433: six links of 50 GB/s
        host_bandwidth=6.25e9,  # derived: 200 Gb/s for the four chips of a host
        torus=3,
        source="https://cloud.google.com/tpu/docs/v4",
    ),
    _tpu(
        "v5e",
        memory=16,
        usable=15.75,
        flops=197e12,
        device_kind="TPU v5 lite",
        memory_bandwidth=819e9,
        link_bandwidth=400e9 / 4 / 2,
        host_bandwidth=3.125e9,  # 2 x 100 Gb/s for eight chips
        torus=2,
        source="https://cloud.google.com/tpu/docs/v5e",
    ),
    _tpu(
        "v5p",
        memory=95,
        usable=95.74,  # more than is published
        flops=459e12,
        device_kind="TPU v5",
        memory_bandwidth=2765e9,
        link_bandwidth=1200e9 / 6 / 2,
        host_bandwidth=6.25e9,  # 50 Gb/s for each chip
        torus=3,
        source="https://cloud.google.com/tpu/docs/v5p",
    ),
    _tpu(
        "v6e",
        memory=32,
        usable=31.25,
        flops=918e12,
        device_kind="TPU v6 lite",
        memory_bandwidth=1638e9,
        link_bandwidth=800e9 / 4 / 2,
        host_bandwidth=12.5e9,  # 100 Gb/s for each chip
        torus=2,
        source="https://cloud.google.com/tpu/docs/v6e",
    ),
    # JAX counts each of a chip's two halves as a device: half of all that is published of a chip.
    _tpu(
        "tpu7x",
        memory=192 / 2,
        usable=94.75,
        flops=2307e12 / 2,
        device_kind="TPU7x",
        memory_bandwidth=7380e9 / 2,
        link_bandwidth=1200e9 / 6 / 2,
        host_bandwidth=12.5e9 / 2,
        per_host=8,
        cores=2,
        torus=3,
        source="https://cloud.google.com/tpu/docs/tpu7x",
    ),
)
# Of GPUs, rates are without sparsity (datasheets since Ampere print twice as much), links are half
# of what is published for both directions, and `reported`, in GiB, is what CUDA says of a card
# (what its driver and error correction take is gone): no maker publishes it, and they are what
# programs report that ran out of it, to 0.05 GiB. Between hosts: the network card that the maker's
# servers have for each GPU (A100: 200 Gb/s, H100 and H200: 400 Gb/s); 12.5 Gb/s is what Google's
# machines with L4 have, and 10 Gb/s a usual port of a workstation.
_A100 = {
    "float32": 156e12,
    "bfloat16": 312e12,
    "link_bandwidth": 600e9 / 2,
    "host_bandwidth": 25e9,
    "source": "https://www.nvidia.com/en-us/data-center/a100/",
}
_HOPPER = {
    "float32": 989.4e12 / 2,
    "bfloat16": 1978.9e12 / 2,
    "link_bandwidth": 900e9 / 2,
    "host_bandwidth": 50e9,
}
_GPUS = (
    _gpu(
        "a100-40gb",
        memory=40,
        reported=39.42,
        device_kind="NVIDIA A100-SXM4-40GB",
        memory_bandwidth=1555e9,
        **_A100,
    ),
    _gpu(
        "a100-80gb",
        memory=80,
        reported=79.25,
        device_kind="NVIDIA A100-SXM4-80GB",
        memory_bandwidth=2039e9,
        **_A100,
    ),
    _gpu(
        "h100",
        memory=80,
        reported=79.10,
        device_kind="NVIDIA H100 80GB HBM3",
        memory_bandwidth=3350e9,
        source="https://www.nvidia.com/en-us/data-center/h100/",
        **_HOPPER,
    ),
    _gpu(
        "h200",
        memory=141,
        reported=139.80,
        device_kind="NVIDIA H200",
        memory_bandwidth=4800e9,
        source="https://www.nvidia.com/en-us/data-center/h200/",
        **_HOPPER,
    ),
    _gpu(
        "l4",
        memory=24,
        reported=22.05,
        float32=120e12 / 2,
        bfloat16=242e12 / 2,
        device_kind="NVIDIA L4",
        memory_bandwidth=300e9,
        link_bandwidth=64e9 / 2,  # PCIe 4.0 x16
        host_bandwidth=12.5e9 / 8,
        source="https://www.nvidia.com/en-us/data-center/l4/",
    ),
    _gpu(
        "rtx-4090",
        memory=24,
        reported=23.64,
        float32=82.6e12,
        bfloat16=165.2e12,
        device_kind="NVIDIA GeForce RTX 4090",
        memory_bandwidth=1008e9,
        link_bandwidth=64e9 / 2,  # PCIe 4.0 x16
        host_bandwidth=10e9 / 8,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/"
        "nvidia-ada-gpu-architecture.pdf",
    ),
    # It has no units for bfloat16, which the compiler turns into float32.
    _gpu(
        "1080ti",
        memory=11,
        reported=10.91,
        float32=11.34e12,  # derived: 3584 lanes x 2 x 1.582 GHz
        bfloat16=11.34e12,
        device_kind="NVIDIA GeForce GTX 1080 Ti",
        memory_bandwidth=484e9,
        link_bandwidth=15.75e9,  # PCIe 3.0 x16
        host_bandwidth=10e9 / 8,
        source="https://www.nvidia.com/en-us/geforce/products/10series/geforce-gtx-1080-ti/",
    ),
)
# Nobody publishes figures of emulated devices: these are round ones, about a core of a server.
_CPU = Chip(
    "cpu",
    "cpu",
    memory=16 * GiB,
    usable=16 * GiB,
    flops=MappingProxyType({"float32": 1e11, "bfloat16": 1e11}),
    device_kind="cpu",
    memory_bandwidth=2e10,
    link_bandwidth=1e10,
    host_bandwidth=1e9,
    per_host=512,
    source="nominal",
)
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*_TPUS, *_GPUS, _CPU)})
