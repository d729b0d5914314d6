"""The shares of the published rates that training attains, by kind of chip.

They are fitted to published runs by `experiments/benchmarks/published_runs.py`, whose page lists
the runs that they are fitted to, and the errors for all other runs.
"""

from dataclasses import dataclass, replace

from ._chips import Chip


@dataclass(frozen=True)
class Efficiencies:
    """How much of a chip's published rates kernels and transfers attain.

    - `per_doubling`: The part of a step that is lost with each doubling of the number of hosts or
      slices, because all of them wait for the slowest.
    """

    product: float  # the share of the peak rate that matrix products attain
    attention: float  # the share that kernels for attention attain
    memory: float  # the share of the memory bandwidth that all other kernels attain
    network: float  # the share of the bandwidth of links inside a host or slice
    between: float  # the share of the bandwidth between hosts or slices
    launch: float  # seconds that each kernel takes at least
    latency: float  # seconds that each transfer takes at least
    per_doubling: float
    misaligned: float = 1.0


# Not fitted: Netflix measured that the head of a language model takes three times as long with such
# a vocabulary ("Scaling LLM Post-Training at Netflix", Netflix Technology Blog, February 2026).
_MISALIGNED = 3.0
_TPU = Efficiencies(
    product=0.948,
    attention=0.20,
    memory=0.92,
    network=0.814,
    between=0.7,
    launch=1e-6,
    latency=5e-6,
    per_doubling=0.018,
)
_AMPERE = Efficiencies(
    product=0.715,
    attention=0.299,
    memory=0.90,
    network=0.964,
    between=0.7,
    launch=4e-6,
    latency=2e-5,
    per_doubling=0.01,
    misaligned=_MISALIGNED,
)
_HOPPER = replace(_AMPERE, product=0.491, attention=0.20, memory=0.95, network=0.85)
_NOMINAL = Efficiencies(
    product=0.5,
    attention=0.5,
    memory=0.5,
    network=0.5,
    between=0.5,
    launch=1e-5,
    latency=1e-5,
    per_doubling=0.0,
)


def efficiencies_of(chip: Chip) -> Efficiencies:
    """The efficiencies of a chip."""
    if chip.kind == "tpu":
        return _TPU
    if chip.name in ("h100", "h200"):
        return _HOPPER
    if chip.kind == "gpu":
        return _AMPERE  # of others than the A100, nothing is published
    return _NOMINAL
