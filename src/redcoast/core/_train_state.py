"""What is sharded, saved and donated as one: a model with the state of its optimizer."""

from typing import Any

import equinox as eqx
from jaxtyping import PyTree


class AbstractTrainState(eqx.Module):
    """A training state, by which the planner tells one from a model with parts of equal names."""

    model: eqx.AbstractVar[PyTree]
    opt_state: eqx.AbstractVar[PyTree]


def refuse_state(model: Any, caller: str) -> None:
    """Raises `TypeError` if a function of a model, named `caller`, was given a training state."""
    if isinstance(model, AbstractTrainState):
        raise TypeError(
            f"`{caller}` takes a model, but was given a {type(model).__name__}. Pass its model, "
            "`state.model`, or `state.averaged_model` for the averaged weights."
        )
