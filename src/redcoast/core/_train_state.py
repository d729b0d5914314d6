"""The base class of a training state, which contains a model and its optimizer state."""

import equinox as eqx
from jaxtyping import PyTree


class AbstractTrainState(eqx.Module):
    """A training state. The planner recognises it by this class, and not by the names of its
    fields."""

    model: eqx.AbstractVar[PyTree]
    opt_state: eqx.AbstractVar[PyTree]


def refuse_state(model: object, caller: str) -> None:
    """Raises `TypeError` if a function of a model, named `caller`, was given a training state."""
    if isinstance(model, AbstractTrainState):
        raise TypeError(
            f"`{caller}` takes a model, but was given a {type(model).__name__}. Pass its model, "
            "`state.model`, or `state.averaged_model` for the averaged weights."
        )
