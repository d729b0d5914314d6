"""Estimates of memory and arithmetic, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """An estimate of the bytes in use on each device.

    - `gradients`, `optimizer_state`: Those of the arrays that are trained. Gradients are counted in
        the precision in which they are kept until the update.
    - `activations`: Intermediate values when most memory is in use: what is kept for the backward
        pass, and what the operations that run then need.
    - `total`: The sum.
    """

    arrays: int  # the arrays of the model
    gradients: int
    optimizer_state: int
    activations: int
    closed_over: int  # arrays that the function closes over, replicated on every device
    batch: int  # the batch and other arguments

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Pipelining:
    """How the layers of a program run as a pipeline.

    - `bubble`: The part of the time in which a stage waits for its first or after its last rows.
    """

    stages: int  # the number of stages
    layers: tuple[int, ...]  # for each scan over layers, the number of layers of a stage
    microbatches: int  # the number of microbatches of a batch
    bubble: float
    bytes: int  # the bytes that a device sends to the next stage in a step, and back


@dataclass(frozen=True)
class Arithmetic:
    """The floating point operations of contractions in a step."""

    flops: int | float  # those of the function and its gradient
    per_device: int | float  # those of one device
