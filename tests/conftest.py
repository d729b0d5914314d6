"""Every test runs on 8 emulated CPU devices with the strictest settings that JAX has."""

import os

# Processes that tests start inherit this; it is read when the first device is asked for.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
# With fewer threads, collectives of eight devices on two cores may deadlock.
os.environ["NPROC"] = "32"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
