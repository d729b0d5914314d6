"""Every test runs on 8 emulated CPU devices with the strictest settings that JAX has."""

import os
import shutil
import tempfile

# Processes that tests start inherit this; it is read when the first device is asked for.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
# With fewer threads, collectives of eight devices on two cores may deadlock.
os.environ["NPROC"] = "32"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# What many tests compile is compiled once in a session, for all processes that it starts.
OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if OWN_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="redcoast-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure():
    if OWN_CACHE:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
