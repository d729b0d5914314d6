"""What XLA's compiler wants to know of a GPU, written from the card's published figures."""

from dataclasses import dataclass

from .chips import SHARE, Chip


@dataclass(frozen=True)
class _Processor:
    """The processor on a card; sizes in bytes, of one multiprocessor where nothing else is said."""

    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    threads: int
    clock_ghz: float
    l2_cache: int
    shared: int
    shared_by_one_block: int


_KB, _MB = 2**10, 2**20
_PROCESSORS = {
    "a100-40gb": _Processor((8, 0), 108, 64, 2048, 1.41, 40 * _MB, 164 * _KB, 163 * _KB),
    "a100-80gb": _Processor((8, 0), 108, 64, 2048, 1.41, 40 * _MB, 164 * _KB, 163 * _KB),
    "h100": _Processor((9, 0), 132, 128, 2048, 1.98, 50 * _MB, 228 * _KB, 227 * _KB),
    "h200": _Processor((9, 0), 132, 128, 2048, 1.98, 50 * _MB, 228 * _KB, 227 * _KB),
    "l4": _Processor((8, 9), 58, 128, 1536, 2.04, 48 * _MB, 100 * _KB, 99 * _KB),
    "rtx-4090": _Processor((8, 9), 128, 128, 1536, 2.52, 72 * _MB, 100 * _KB, 99 * _KB),
    "1080ti": _Processor((6, 1), 28, 128, 2048, 1.58, 2816 * _KB, 96 * _KB, 48 * _KB),
}  # fmt: skip


def gpu_config(chip: Chip) -> str:
    """A `GpuTargetConfig` in the text format of protocol buffers, for a chip of kind `"gpu"`."""
    of = _PROCESSORS[chip.name]
    major, minor = of.capability
    figures = {
        "core_count": of.multiprocessors,
        "fpus_per_core": of.lanes,
        "threads_per_core_limit": of.threads,
        "clock_rate_ghz": of.clock_ghz,
        "l2_cache_size": of.l2_cache,
        "shared_memory_per_core": of.shared,
        "shared_memory_per_block_optin": of.shared_by_one_block,
        "device_memory_size": round(chip.usable / SHARE),
        "memory_bandwidth": int(chip.memory_bandwidth),
        **_COMMON,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in figures.items())
    return (
        f"gpu_device_info {{\n{lines}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 8 }\n'
        f'device_description_str: "{chip.device_kind}"\n'
    )


# The limits that all CUDA devices of these generations have in common.
_COMMON = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "shared_memory_per_block": 48 * _KB,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
