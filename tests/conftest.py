"""Every test runs on 8 emulated CPU devices with the strictest settings that JAX has."""

import gc
import itertools as it
import os
import resource
import time
from pathlib import Path

# Processes that tests start inherit this; it is read when the first device is asked for. Compiling
# is most of what the tests cost: without the emitters of fusions it takes half as long.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK}"
# With fewer threads, collectives of eight devices on two cores may deadlock.
os.environ["NPROC"] = "32"
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# What is compiled is kept for all processes of a session, and for the sessions to come.
CACHE = Path(__file__).parents[1] / ".cache" / "jax"
MOST_BYTES = 2**30
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Seconds of processor time that a test of the default suite may take, on a machine that counts to
# ten million in `COUNTING` seconds.
MOST, LET_PASS, COUNTING = 3.0, 2.5, 0.25
ELSEWHERE = ("integration", "thorough", "weights", "faults", "hosts", "fuzz")


def processor_time():
    """Of this process and of those that it started, as far as they have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def slowness():
    """How much slower than the machine of `COUNTING` this one is now, 1 at least."""
    begin = time.process_time()
    for _ in range(10**7):
        pass
    return max(1.0, (time.process_time() - begin) / COUNTING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    begin = processor_time()
    result = yield
    used = processor_time() - begin
    # More is let pass, as what a session imports and traces but once is paid by the test that comes
    # first, and as a busy machine makes each second of processor time worth less.
    elsewhere = any(item.get_closest_marker(name) for name in ELSEWHERE)
    if used > LET_PASS * MOST and item.path.name.startswith("test_") and not elsewhere:
        factor = slowness()
        if used > LET_PASS * MOST * factor:
            pytest.fail(
                f"This test took {used:.1f} s of processor time, where {MOST:g} s are the most "
                "that one of the default suite may take on a quiet machine. Make it "
                "smaller, or mark it `thorough` or `integration`.",
                pytrace=False,
            )
    return result


def pytest_collection_finish():
    # The collector of garbage goes through all objects again and again: those that stay are left
    # out, and it comes less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_sessionfinish(session):
    # JAX's own limit would look at every file whenever it adds one.
    if CACHE.is_dir() and not hasattr(session.config, "workerinput"):
        files = sorted((x.stat().st_mtime, x.stat().st_size, x) for x in CACHE.iterdir())[::-1]
        totals = it.accumulate(size for _, size, _ in files)
        for (*_, file), total in zip(files, totals, strict=True):
            if total > MOST_BYTES:
                file.unlink(missing_ok=True)
