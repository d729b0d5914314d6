"""Arrays that a function closes over: constants of its program, and of those inside it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from ._graph import Value, is_differentiable
from ._walk import Scope

# Smaller ones, such as masks and tables of positions, are not worth a word.
LARGE_CONSTANT = 1_000_000  # bytes


@dataclass(frozen=True)
class Constant:
    """One array, with a value for each place where it enters the program."""

    values: tuple[Value, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values[0].shape

    @property
    def bytes(self) -> int:
        return self.values[0].bytes

    @property
    def name(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_planned(self) -> bool:
        """Whether it may be computed split, as the arrays of the model are."""
        return self.bytes >= LARGE_CONSTANT and is_differentiable(self)


def find_constants(jaxpr: ClosedJaxpr, scope: Scope) -> tuple[Constant, ...]:
    """The arrays that a program closes over, each once, in the order of the program."""
    found: dict[int, list[tuple[Any, Value]]] = {}
    for x, value in _entering(jaxpr.consts, scope):
        if isinstance(getattr(x, "dtype", None), np.dtype):  # and not a key
            found.setdefault(id(x), []).append((x, value))
    return tuple(
        Constant(tuple(value for _, value in places), places[0][0].dtype)
        for places in found.values()
    )


def _entering(consts: Any, scope: Scope) -> Iterator[tuple[Any, Value]]:
    yield from zip(consts, (scope.values[var] for var in scope.jaxpr.constvars), strict=False)
    for place, inner in scope.inner.items():
        closed = {id(one.jaxpr): one.consts for one in _closed(scope.jaxpr.eqns[place].params)}
        for one in inner:
            yield from _entering(closed.get(id(one.jaxpr), ()), one)


def _closed(params: dict[str, Any]) -> Iterator[ClosedJaxpr]:
    for param in params.values():
        several = param if isinstance(param, tuple | list) else (param,)
        yield from (one for one in several if isinstance(one, ClosedJaxpr))
