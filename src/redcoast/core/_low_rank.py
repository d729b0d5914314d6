"""Base classes by which the structural rules recognise what stands in place of a weight."""

from abc import abstractmethod

import equinox as eqx
from jaxtyping import Array, Float, Integer, PyTree


class AbstractLowRank(eqx.Module):
    """A weight, and two matrices whose product is added to it."""

    weight: eqx.AbstractVar[PyTree]
    a: eqx.AbstractVar[Float[Array, "..."]]
    b: eqx.AbstractVar[Float[Array, "..."]]


class AbstractQuantised(eqx.Module):
    """A weight as integers with scales. Both arrays have its dimensions."""

    codes: eqx.AbstractVar[Integer[Array, "..."]]
    scales: eqx.AbstractVar[Integer[Array, "..."]]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
