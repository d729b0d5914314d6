"""The time of a step, estimated from the schedule of its compiled program.

Kernels run one after another. Each takes as long as its arithmetic or its memory traffic, whichever
is longer, at the rates that such kernels attain. A transfer is hidden as far as kernels run between
its start and its end; the rest of it, and every transfer that is not asynchronous, is exposed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ._chips import Chip
from ._efficiencies import Efficiencies, efficiencies_of
from ._roofline import bandwidth, peak
from .hlo._events import Done, Event, Loop, Start, Transfer, count_flops
from .hlo._kernels import KernelWork

# Bytes per second between a device and the memory of its host: PCIe 4.0 x16, as attained.
_HOST_LINK = 25e9
# Copies between the memories of a device, such as into the vector memory of a TPU.
_MEMORY = "memory"


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a training step, in seconds.

    - `exposed`: By mesh axes, such as `"fsdp"`, the time that the step waits for communication.
        `"memory"` and `"host"` are copies between the memories of a device and its host.
    - `utilisation`: The arithmetic of the step, including what is rematerialised, divided by what
        the device could compute in this time at its peak rate.
    - `misaligned`: The part of `products` that is lost because rows of matrices are not aligned to
        16 bytes.
    """

    seconds: float
    products: float  # the time of matrix products and convolutions
    attention: float  # the time of kernels for attention
    other: float  # the time of all other kernels
    exposed: dict[str, float]
    hidden: dict[str, float]  # by mesh axes, the time of communication during which kernels run
    waiting: float  # the time that devices wait for the slowest host
    kernels: int  # the number of kernels that run
    utilisation: float
    misaligned: float = 0.0


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)


@dataclass
class _Totals:
    """What one execution of a list of events takes; the clock is at `now`."""

    now: float = 0.0
    busy: defaultdict[str, float] = field(default_factory=_zeros)
    exposed: defaultdict[str, float] = field(default_factory=_zeros)
    transfers: defaultdict[str, float] = field(default_factory=_zeros)
    misaligned: float = 0.0
    kernels: int = 0


@dataclass(frozen=True)
class AttainedRates:
    """What a device attains: its chip, the bandwidths of its links, and its efficiencies.

    `slow_axes` are the axes whose devices are in different hosts (GPUs) or slices (TPUs).
    """

    chip: Chip
    bandwidths: Mapping[str, int | float]
    efficiencies: Efficiencies
    slow_axes: frozenset[str] = frozenset()


def estimate_step_time(
    events: Sequence[Event],
    *,
    chip: Chip,
    bandwidths: Mapping[str, int | float],
    slow_axes: frozenset[str] = frozenset(),
    efficiencies: Efficiencies | None = None,
    groups: int = 1,
) -> StepTime:
    """Estimates the time of a step from the schedule of its compiled program.

    - `bandwidths`: Bytes per second that a device can send along each mesh axis.
    - `slow_axes`: The mesh axes whose devices are in different hosts or slices.
    - `efficiencies`: The shares of the published rates that are attained; by default, those of the
        chip.
    - `groups`: The number of hosts (GPUs) or slices (TPUs).
    """
    if efficiencies is None:
        efficiencies = efficiencies_of(chip)
    rates = AttainedRates(chip, bandwidths, efficiencies, slow_axes)
    totals = _run(events, rates)
    waiting = totals.now * efficiencies.per_doubling * math.log2(groups)
    seconds = totals.now + waiting
    hidden = {axes: time - totals.exposed[axes] for axes, time in totals.transfers.items()}
    utilisation = 0.0
    if seconds:
        at_peak = 0.0
        for dtype, count in count_flops(events).items():
            at_peak += count / peak(chip, _name(dtype))
        utilisation = at_peak / seconds
    return StepTime(
        seconds=float(seconds),
        products=float(totals.busy["product"]),
        attention=float(totals.busy["attention"]),
        other=float(totals.busy["other"]),
        exposed=_positive(totals.exposed),
        hidden=_positive(hidden),
        waiting=float(waiting),
        kernels=totals.kernels,
        utilisation=float(utilisation),
        misaligned=float(totals.misaligned),
    )


def _positive(times: Mapping[str, float]) -> dict[str, float]:
    return {axes: float(time) for axes, time in times.items() if time > 1e-12}


def _run(events: Sequence[Event], rates: AttainedRates) -> _Totals:
    """Runs events on a device whose networks are free at first, and are again at the end."""
    totals = _Totals()
    free: dict[str, float] = {}  # when each network is free again
    ends: dict[str, tuple[str, float]] = {}  # of transfers under way: axes and time
    for event in events:
        match event:
            case KernelWork():
                time = kernel_seconds(event, rates)
                totals.now += time
                totals.busy[event.kind] += time
                aligned = replace(event, is_misaligned=False)
                totals.misaligned += time - kernel_seconds(aligned, rates)
                totals.kernels += 1
            case Start(key, transfer):
                ends[key] = _queue(transfer, rates, totals, free)
            case Transfer():
                _wait(totals, *_queue(event, rates, totals, free))
            case Done(key):
                if key in ends:
                    _wait(totals, *ends.pop(key))
            case Loop(times, inner):
                body = _run(inner, rates)
                totals.now += times * body.now
                totals.kernels += times * body.kernels
                totals.misaligned += times * body.misaligned
                _add(totals.busy, body.busy, times)
                _add(totals.exposed, body.exposed, times)
                _add(totals.transfers, body.transfers, times)
    # The step is over when the last transfer is.
    for where, end in ends.values():
        _wait(totals, where, end)
    return totals


def _queue(
    transfer: Transfer, rates: AttainedRates, totals: _Totals, free: dict[str, float]
) -> tuple[str, float]:
    """Begins a transfer as soon as its network is free. Returns its axes and its end."""
    where = "+".join(transfer.axes) or transfer.kind
    # GPUs run one collective at a time; TPUs have links of their own for each axis.
    network = where
    if transfer.axes and rates.chip.kind != "tpu":
        network = "links"
    time = transfer_seconds(transfer, rates)
    end = max(totals.now, free.get(network, 0.0)) + time
    free[network] = end
    totals.transfers[where] += time
    return where, end


def _wait(totals: _Totals, where: str, end: float) -> None:
    waited = max(0.0, end - totals.now)
    totals.exposed[where] += waited
    totals.now += waited


def _add(totals: defaultdict[str, float], more: Mapping[str, float], times: int) -> None:
    for name, time in more.items():
        totals[name] += times * time


def kernel_seconds(kernel: KernelWork, rates: AttainedRates) -> float:
    """The time of a kernel: its arithmetic or its memory traffic, whichever takes longer."""
    chip, attained = rates.chip, rates.efficiencies
    share = attained.product
    if kernel.kind == "attention":
        share = attained.attention
    arithmetic = 0.0
    for dtype, count in kernel.flops:
        rate = peak(chip, _name(dtype))
        time = count / (share * rate)
        # Tensor cores are for dtypes that are faster than float32.
        if kernel.is_misaligned and rate > peak(chip, "float32"):
            time *= attained.misaligned
        arithmetic += time
    memory = kernel.memory_bytes / (attained.memory * chip.memory_bandwidth)
    return attained.launch + max(arithmetic, memory)


# HLO's names of the dtypes whose rates differ.
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def _name(dtype: str) -> str:
    """The name in JAX of one of HLO's dtypes."""
    if dtype.startswith("f8"):  # f8e4m3fn, f8e5m2
        return f"float8_{dtype}"
    if dtype[0] in "su" and dtype[1:].isdecimal():  # s8, u4
        return f"int{dtype[1:]}"
    return _DTYPES.get(dtype, dtype)


def transfer_seconds(transfer: Transfer, rates: AttainedRates) -> float:
    """The time of a transfer on links that nothing else uses."""
    if transfer.devices <= 1 and transfer.axes:
        return 0.0  # a collective of one device
    attained, size = rates.efficiencies, transfer.sent_bytes
    if transfer.kind == _MEMORY:
        return size / (attained.memory * rates.chip.memory_bandwidth)
    if transfer.kind == "host":
        return size / _HOST_LINK
    share = attained.network
    if not rates.slow_axes.isdisjoint(transfer.axes):
        share = attained.between
    rate = bandwidth("+".join(transfer.axes), rates.bandwidths)
    return attained.latency + size / (share * rate)


def show_step_time(step: StepTime) -> list[str]:
    """The lines of a table."""
    rows = [
        ("matrix products", step.products),
        ("attention", step.attention),
        ("other kernels", step.other),
        *((f"exposed communication ({axes})", time) for axes, time in step.exposed.items()),
        ("waiting for the slowest host", step.waiting),
    ]
    lines = [f"Estimated time of a step: {step.seconds * 1e3:,.4g} ms"]
    for name, seconds in rows:
        if seconds >= _LITTLE * step.seconds > 0:
            lines.append(f"  {seconds * 1e3:>12,.4g} ms  {name}")
    if step.misaligned >= _LITTLE * step.seconds > 0:
        lines.append(
            f"  Of the products, {step.misaligned * 1e3:,.4g} ms are lost because rows of matrices "
            "are not aligned to 16 bytes.\n  Pad sizes such as that of the vocabulary to multiples "
            "of 8."
        )
    hidden = sum(step.hidden.values())
    if hidden >= _LITTLE * step.seconds > 0:
        lines.append(f"  Of the communication, {hidden * 1e3:,.4g} ms are hidden behind kernels.")
    return lines


_LITTLE = 1e-3  # a part of less than this share of the step is not shown


@dataclass(frozen=True)
class TrainingCost:
    """What a training run takes."""

    steps: float
    hours: float
    device_hours: float  # the sum over all devices
    price: float | None  # the price of all device hours; `None` if the price of one is not known


def check_positive(name: str, value: int | float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"`{name}` is {value!r}. It must be a positive number.")
