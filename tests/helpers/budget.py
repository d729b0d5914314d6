"""The processor time that a test of the default suite may take."""

import resource
import time

import pytest

# Seconds of processor time that a test of the default suite may take, on a machine that counts to
# ten million in `COUNTING` seconds.
MOST, LET_PASS, COUNTING = 3.0, 2.5, 0.25
ELSEWHERE = ("integration", "thorough", "weights", "faults", "hosts", "fuzz", "experiments")


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
    marker = item.get_closest_marker("seconds")
    most = marker.args[0] if marker else MOST
    if used > LET_PASS * most and item.path.name.startswith("test_") and not elsewhere:
        factor = slowness()
        if used > LET_PASS * most * factor:
            pytest.fail(
                f"This test took {used:.1f} s of processor time, where {most:g} s are the most "
                "that one of the default suite may take on a quiet machine. Make it "
                "smaller, or mark it `thorough` or `integration`.",
                pytrace=False,
            )
    return result
