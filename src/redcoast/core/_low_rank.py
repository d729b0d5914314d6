"""A base class by which the structural rules recognise a weight with a low-rank adapter."""

import equinox as eqx
from jaxtyping import Array, Float


class AbstractLowRank(eqx.Module):
    """A weight, and two matrices whose product is added to it."""

    weight: eqx.AbstractVar[Float[Array, "..."]]
    a: eqx.AbstractVar[Float[Array, "..."]]
    b: eqx.AbstractVar[Float[Array, "..."]]
