"""Every test runs on 8 emulated CPU devices with the strictest settings that JAX has."""

import gc
import itertools as it
import os
from pathlib import Path

from xla_flags import known_flags

# Compiling is most of what the tests cost. Without the emitters of fusions, which newer compilers
# always use, it takes half as long, and with one LLVM module for each program, in place of up to
# 32, it takes 60 % of that.
QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Processes that tests start, and workers, inherit this; it is read at the first use of JAX.
    flags = ("--xla_force_host_platform_device_count=8", *known_flags(QUICK))
    os.environ["XLA_FLAGS"] = " ".join(flags)
# With fewer threads, collectives of eight devices on two cores may deadlock.
os.environ["NPROC"] = "32"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# Programs carry no source lines: writing them is a tenth of what the tests cost.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# What is compiled is kept for all processes of a session, and for the sessions to come.
CACHE = Path(__file__).parents[1] / ".cache" / "jax"
MOST_BYTES = 2**30
MAPS = Path("/proc/self/maps")
MOST_MAPS = 20_000
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
# As in pyproject.toml, for the processes that tests start.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry:UserWarning"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
from annotations import check_annotations  # noqa: E402
from budget import pytest_runtest_call  # noqa: E402, F401  # a hook
from grids import pytest_collection_modifyitems  # noqa: E402, F401  # a hook
from threads_as_processes import together  # noqa: E402, F401  # a fixture

# The hook of `--jaxtyping-packages` looks this up for each function that it decorates.
jaxtyping.jaxtyped = check_annotations  # pyright: ignore[reportAttributeAccessIssue]
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# What fails shows all frames, those of redcoast too.
jax.config.update("jax_traceback_filtering", "off")


def pytest_report_header():
    from redcoast.core._versions import installed_versions  # after the hook above is set

    return ", ".join(f"{name} {version}" for name, version in installed_versions().items())


def pytest_collection_finish():
    # The collector of garbage goes through all objects again and again: those that stay are left
    # out, and it comes less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_runtest_teardown(item, nextitem):
    # A compiled program has about a hundred maps of memory, of which Linux gives a process 65,530.
    # Without another one, XLA crashes.
    is_last_of_file = nextitem is None or nextitem.path != item.path
    if is_last_of_file and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


def pytest_sessionfinish(session):
    # JAX's own limit would look at every file whenever it adds one.
    if CACHE.is_dir() and not hasattr(session.config, "workerinput"):
        files = sorted((x.stat().st_mtime, x.stat().st_size, x) for x in CACHE.iterdir())[::-1]
        totals = it.accumulate(size for _, size, _ in files)
        for (*_, file), total in zip(files, totals, strict=True):
            if total > MOST_BYTES:
                file.unlink(missing_ok=True)
