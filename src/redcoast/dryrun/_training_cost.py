"""The hours and the price of a training run."""

import math
from dataclasses import dataclass

from ._step_time import StepTime


@dataclass(frozen=True)
class TrainingCost:
    """What a training run takes."""

    steps: float
    hours: float
    device_hours: float  # the sum over all devices
    price: float | None  # the price of all device hours; `None` if the price of one is not known


def cost_of(
    step: StepTime | None, devices: int, steps: int | float, price: int | float | None
) -> TrainingCost:
    """The time and price of `steps` steps on some devices, at a price for each device hour.

    Raises `ValueError` if `steps` or `price` is not a positive number, or `step` is `None`.
    """
    check_positive("steps", steps)
    if price is not None:
        check_positive("price", price)
    if step is None:
        raise ValueError(
            "The time of a step is not known, because the compiler rejected the program. Make it "
            "fit first: with more devices, a smaller batch, or rematerialisation."
        )
    # Of the steps alone: evaluations and saves are not in them.
    hours = float(steps) * step.seconds / 3600
    device_hours = devices * hours
    total = None
    if price is not None:
        total = price * device_hours
    return TrainingCost(float(steps), hours, device_hours, total)


def check_positive(name: str, value: int | float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"`{name}` is {value!r}. It must be a positive number.")
