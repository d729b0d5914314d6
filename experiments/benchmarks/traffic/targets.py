"""Eight devices of hardware that is not there, for its compiler to compile for."""

from typing import Any, Literal

import jax

import redcoast as rc

Platform = Literal["a100", "v4", "v5e", "cpu"]

# What XLA's compiler wants to know of an A100 with 80 GB, in protobuf text.
A100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 167936
  shared_memory_per_block_optin: 166912 core_count: 108 fpus_per_core: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2039040000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 85100068864 cuda_compute_capability { major: 8 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
}
platform_name: "CUDA"
dnn_version_info { major: 8 minor: 9 patch: 4 }
device_description_str: "NVIDIA A100-SXM4-80GB"
"""
# How eight chips are arranged, and what else the description of a TPU needs.
TPUS = {"v4": ("v4:2x2x2", {"chip_config_name": "megacore"}), "v5e": ("v5e:2x4", {})}
PACKAGES = {"a100": "jax[cuda12]", "v4": "jax[tpu]", "v5e": "jax[tpu]"}


def target_devices(platform: Platform) -> list[Any]:
    """Eight devices that can be compiled for; of the CPU only, they can also run."""
    if platform == "cpu":
        rc.emulate_devices(8)
        return jax.devices()
    from jax.experimental import topologies

    try:
        if platform == "a100":
            options = {"topology": "1x1x8", "target_config": A100}
            return topologies.get_topology_desc("a100", "cuda", **options).devices
        shape, options = TPUS[platform]
        return topologies.get_topology_desc(shape, "tpu", **options).devices
    except Exception as error:
        raise SystemExit(
            f"There is no compiler for {platform} here ({type(error).__name__}: {error}). "
            f"It comes with `pip install '{PACKAGES[platform]}'`, which needs no such device."
        ) from error
