"""Lower bounds on the time of a step, compared with bounds computed by hand."""

from typing import Any

import pytest

from redcoast import Chip
from redcoast.dryrun._roofline import Bounds, time_bounds

CHIP = Chip(
    name="made up",
    kind="gpu",
    memory=10**9,
    usable=10**9,
    flops={"float32": 1e12, "bfloat16": 4e12},
    memory_bandwidth=1e11,
    link_bandwidth=1e10,
    host_bandwidth=1e9,
    per_host=4,
    source="none",
)
BANDWIDTHS = {"data": 1e9, "fsdp": 1e10, "model": 2e10}
NEEDS: dict[str, Any] = {
    "flops": {"float32": 2e12},
    "moved_bytes": 5 * 10**10,
    "sent_bytes": {"model": 10**10},
}


def bounds(**changes: Any):
    given: Any = {"chip": CHIP, "bandwidths": BANDWIDTHS, **NEEDS, **changes}
    return time_bounds(**given)


def test_each_bound_and_which_is_the_largest():
    assert bounds() == Bounds(2.0, 0.5, {"model": 0.5}, "arithmetic", 1.0)
    actual = bounds(moved_bytes=4e11)
    assert actual == Bounds(2.0, 4.0, {"model": 0.5}, "memory", 0.5)
    actual = bounds(sent_bytes={"model": 1e10, "data": 8e9})
    assert actual == Bounds(2.0, 0.5, {"model": 0.5, "data": 8.0}, "network (data)", 0.25)


def test_what_devices_repeat_is_no_utilisation():
    actual = bounds(repeated=0.75)
    assert actual.arithmetic == bounds().arithmetic
    assert actual.utilisation == 0.25


def test_several_axes_are_as_fast_as_the_fastest_of_them():
    actual = bounds(sent_bytes={"data": 4e9, "data+fsdp": 5e10, "data+fsdp+model": 2e10})
    assert actual.network == {"data": 4.0, "data+fsdp": 5.0, "data+fsdp+model": 1.0}
    assert (actual.binding, actual.utilisation) == ("network (data+fsdp)", 0.4)


def test_axes_whose_bandwidth_together_is_known():
    together = BANDWIDTHS | {"data+fsdp": 2e10}
    actual = bounds(sent_bytes={"data+fsdp": 5e10}, bandwidths=together)
    assert actual.network == {"data+fsdp": 2.5}


def test_other_groups_of_devices_are_as_fast_as_the_fastest_axis():
    assert bounds(sent_bytes={"": 4e10}).network == {"": 2.0}


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("float32", 1e12),
        ("bfloat16", 4e12),
        ("float16", 4e12),
        ("int8", 8e12),
        ("float8_e4m3fn", 8e12),
        ("float64", 1e12),
        ("complex64", 1e12),
    ],
)
def test_each_dtype_has_a_rate(dtype, rate):
    assert bounds(flops={dtype: 8e12}).arithmetic == 8e12 / rate


def test_times_of_dtypes_add_up():
    assert bounds(flops={"float32": 1e12, "bfloat16": 2e12}).arithmetic == 1.5


def test_arithmetic_is_the_bottleneck_if_bounds_are_equal():
    assert bounds(moved_bytes=2e11).binding == "arithmetic"


def test_a_step_without_arithmetic_uses_none_of_the_peak():
    actual = bounds(flops={}, moved_bytes=0, sent_bytes={})
    assert actual == Bounds(0.0, 0.0, {}, "arithmetic", 0.0)
