"""Arrays that a function closes over: the constants of its jaxpr and of the jaxprs inside it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core._jaxpr import is_inexact
from ._graph import Value
from ._walk import Scope

# Smaller constants, such as masks and position tables, stay replicated and are not reported.
LARGE_CONSTANT = 1_000_000  # bytes


@dataclass(frozen=True)
class Constant:
    """One array, with a value for each jaxpr that it is a constant of."""

    values: tuple[Value, ...]
    dtype: np.dtype

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
        """Whether it may be tensor-parallel, like the arrays of the model."""
        return self.bytes >= LARGE_CONSTANT and is_inexact(self)


def find_constants(scope: Scope) -> tuple[Constant, ...]:
    """Finds the arrays that a program closes over, each once, in the order of the program."""
    constants: dict[int, Constant] = {}  # by the `id` of the array
    for x, value in _consts(scope):
        dtype = getattr(x, "dtype", None)
        if not isinstance(dtype, np.dtype):  # a key
            continue
        # A function that is called twice closes over the same array twice.
        values = (value,)
        if id(x) in constants:
            values = (*constants[id(x)].values, value)
        constants[id(x)] = Constant(values, dtype)
    return tuple(constants.values())


def _consts(scope: Scope) -> Iterator[tuple[object, Value]]:
    """The constants of a jaxpr and of those inside it, with their values."""
    for x, var in zip(scope.consts, scope.jaxpr.constvars, strict=False):
        yield x, scope.values[var]
    for scopes in scope.inner.values():
        for inner in scopes:
            yield from _consts(inner)
