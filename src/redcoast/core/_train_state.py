"""What is sharded, saved and donated as one: a model with the state of its optimizer."""

import equinox as eqx
from jaxtyping import PyTree


class AbstractTrainState(eqx.Module):
    """A training state, by which the planner tells one from a model with parts of equal names."""

    model: eqx.AbstractVar[PyTree]
    opt_state: eqx.AbstractVar[PyTree]
