"""The supported accelerators, with their published specifications."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

GiB = 2**30
# The share of the memory reported by CUDA that JAX can allocate: the rest is for CUDA's context and
# for libraries.
SHARE = 0.95


@dataclass(frozen=True)
class Chip:
    """The manufacturer's specifications of one device, as JAX counts devices.

    **Attributes:**

    - `name`: The name of the chip in targets, such as `"v4"`.
    - `kind`: `"tpu"`, `"gpu"` or `"cpu"`.
    - `memory`: Bytes of memory, as published.
    - `usable`: Bytes that a program can use: the limit of the compiler (TPU), or 95 % of what CUDA
        reports, which JAX allocates with `XLA_PYTHON_CLIENT_MEM_FRACTION=.95` (GPU).
    - `flops`: Peak floating point operations per second of dense contractions, by the dtype of
        their operands, in JAX's default precision. For float32 that is one pass in bfloat16 on
        TPUs, and TF32 on GPUs since Ampere.
    - `memory_bandwidth`: Bytes read and written per second.
    - `link_bandwidth`: Bytes per second in one direction: over one link to a neighbour (TPU), or
        from a card to all others of its host (GPU).
    - `host_bandwidth`: Bytes per second that a device sends to devices of other hosts (GPU), or
        of other slices (TPU).
    - `per_host`: The number of devices in a host; for GPUs the maximum.
    - `source`: Where the manufacturer publishes the specifications.
    - `device_kind`: JAX's name for the device.
    - `cores`: The number of devices that share the links of one package; 2 for TPU7x.
    - `torus`: The number of dimensions of the network of links; 0 if all devices of a host are
        connected to each other.

    !!! example

        ```python
        import redcoast as rc

        chip = rc.CHIPS["h100"]
        tokens_per_second, flops_per_token = 20e3, 6 * 1.2e9
        utilisation = tokens_per_second * flops_per_token / chip.flops["bfloat16"]
        ```
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
    source = f"https://cloud.google.com/tpu/docs/{name}"
    return Chip(name, "tpu", *sizes, rates, source=source, **{"per_host": 4, **other})


def _gpu(
    name: str, memory: int, reported: float, float32: float, bfloat16: float, **other: Any
) -> Chip:
    rates = MappingProxyType({"float32": float32, "bfloat16": bfloat16})
    sizes = (round(memory * GiB), round(reported * GiB * SHARE))
    return Chip(name, "gpu", *sizes, rates, **{"per_host": 8, **other})


# For TPUs, `usable` is the limit that libtpu 0.0.42 names when it rejects a program. The bandwidth
# of a link is the published bandwidth of the chip, divided by its number of links and by two,
# because it is published for both directions together.
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
    ),
    _tpu(
        "v5p",
        memory=95,
        usable=95.73,  # more than is published
        flops=459e12,
        device_kind="TPU v5",
        memory_bandwidth=2765e9,
        link_bandwidth=1200e9 / 6 / 2,
        host_bandwidth=6.25e9,  # 50 Gb/s for each chip
        torus=3,
    ),
    _tpu(
        "v6e",
        memory=32,
        usable=31.24,
        flops=918e12,
        device_kind="TPU v6 lite",
        memory_bandwidth=1638e9,
        link_bandwidth=800e9 / 4 / 2,
        host_bandwidth=12.5e9,  # 100 Gb/s for each chip
        torus=2,
    ),
    # JAX counts the two halves of a chip as devices, so the published figures are halved.
    _tpu(
        "tpu7x",
        memory=192 / 2,
        usable=94.74,
        flops=2307e12 / 2,
        device_kind="TPU7x",
        memory_bandwidth=7380e9 / 2,
        link_bandwidth=1200e9 / 6 / 2,
        host_bandwidth=12.5e9 / 2,
        per_host=8,
        cores=2,
        torus=3,
    ),
)
# For GPUs, the rates are without sparsity (datasheets since Ampere print twice as much), and link
# bandwidths are half of the figures published for both directions. `reported` is the memory in GiB
# that CUDA reports, without what the driver and error correction take. No manufacturer publishes
# it: these figures, to 0.05 GiB, are from the messages of programs that ran out of memory. Between
# hosts, the bandwidth is one network card per GPU, as in the manufacturer's servers (A100: 200
# Gb/s, H100 and H200: 400 Gb/s), 12.5 Gb/s for Google's machines with L4, and 10 Gb/s for the usual
# port of a workstation.
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
    # It has no units for bfloat16, which the compiler converts to float32.
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
# Emulated devices have no published specifications. These are rough figures for one core of a
# server.
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
    per_host=8192,
    source="nominal",
)
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (*_TPUS, *_GPUS, _CPU)})
"""The supported accelerators, by their names in targets. Each is a [`redcoast.Chip`][]."""


def published_chip(device_kind: str) -> Chip | None:
    """The accelerator of a kind; `None` if its rates are not known, as of CPUs."""
    for chip in CHIPS.values():
        if chip.device_kind == device_kind and chip.kind != "cpu":
            return chip
    return None
