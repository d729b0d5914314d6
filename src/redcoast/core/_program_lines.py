"""A traced program as lines of text, which are equal wherever the same program is traced.

JAX's own text contains addresses of functions, and omits the values of constants.
"""

import functools as ft
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from ._control_flow import AnyJaxpr, Atom, consts_of, inner_jaxprs, is_high_level, open_jaxpr
from ._frames import own_line

# A memory address, and the directory of a file, which may differ between machines.
_OF_A_PROCESS = re.compile(r"\b0x[0-9a-f]+\b|(?<=['\" ])/[^'\" ]*/")
# Parameters that change no value: names, and functions for derivatives that are not taken.
_IGNORED = frozenset(
    "bwd debug debug_info fwd_jaxpr_thunk jvp_jaxpr_fun jvp_jaxpr_thunk name name_and_src_info "  # noqa: SIM905
    "out_trees".split()
)
_FEW = 4  # elements of a constant that is written out

Lines = list[tuple[str, JaxprEqn | None]]


def program_lines(jaxpr: AnyJaxpr) -> Lines:
    """Returns a line for each equation and constant of a jaxpr and its inner jaxprs, with the
    equation.

    Constants are described by their values. The host functions that callbacks call are not part of
    a program.
    """
    return _Describer().lines(jaxpr)


def line_of(equation: JaxprEqn | None) -> str:
    """The line of the user's code that an equation comes from, such as `train.py:12`."""
    return own_line(getattr(getattr(equation, "source_info", None), "traceback", None))


def describe_array(x: PyTree) -> str:
    """The type and the values of an array, or their checksum."""
    if isinstance(x, jax.Array) and x.is_deleted():
        return "a deleted array"
    dtype, shape = x.dtype, np.shape(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"{dtype}{list(shape)}"
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    values = np.asarray(x)
    if 0 < values.size <= _FEW and values.dtype.kind in "biufc":
        return f"{values.tolist()}:{dtype}"
    return f"{dtype}{list(shape)} with checksum {_checksum(values)}"


def _checksum(values: np.ndarray) -> str:
    if values.dtype == object:
        return f"{zlib.crc32(repr(values.tolist()).encode()):08x}"
    return f"{zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data):08x}"


class _Describer:
    """Describes jaxprs, each of which may be called at several places."""

    def __init__(self) -> None:
        # By id, with the jaxpr, so that it stays alive and its id is not given to another.
        self._known: dict[int, tuple[AnyJaxpr, Lines]] = {}

    def lines(self, jaxpr: AnyJaxpr) -> Lines:
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, list(self._describe(jaxpr))
        return self._known[id(jaxpr)][1]

    def _describe(self, jaxpr: AnyJaxpr) -> Iterator[tuple[str, JaxprEqn | None]]:
        inner, names = open_jaxpr(jaxpr), _Names()
        yield f"arguments {names.of_all(inner.invars)}", None
        for var, value in zip(inner.constvars, consts_of(jaxpr), strict=False):
            yield f"{names.of(var)} = constant {self._text(value, [])}", None
        for equation in inner.eqns:
            called: list[AnyJaxpr] = []
            params = equation.params
            if is_high_level(equation):  # its one parameter holds functions and the jaxpr
                params = {"runs": inner_jaxprs(equation)}
            shown = {}
            for name, value in params.items():
                if name not in _IGNORED and not (value is None or value is False or value == ()):
                    shown[name] = value
            operands = names.of_all(equation.invars)
            options = ""
            if shown:
                options = f" {self._text(shown, called)}"
            text = f"{equation.primitive.name} {operands}{options}"
            yield f"{names.of_all(equation.outvars)} = {text}", equation
            # The lines of inner programs follow the equation that runs them.
            for each in called:
                yield from self.lines(each)
        yield f"results {names.of_all(inner.outvars)}", None

    def _text(self, value: object, called: list[AnyJaxpr]) -> str:
        """Describes a parameter of an equation, and collects the jaxprs in it."""
        text = ft.partial(self._text, called=called)
        if isinstance(value, AnyJaxpr):
            called.append(value)
            return "program"
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{text(k)}: {text(v)}' for k, v in value.items()))}}}"
        if isinstance(value, set | frozenset):
            # The order of a set of strings differs from process to process.
            return f"{{{', '.join(sorted(map(text, value)))}}}"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(text, value))})"
        if isinstance(value, NamedSharding):
            return f"{value.spec} over {text(value.mesh)}"
        if isinstance(value, Mesh | AbstractMesh):
            return f"a mesh of {dict(value.shape)}"
        if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "__array__"):
            return describe_array(value)
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        return _OF_A_PROCESS.sub("", repr(value))


class _Names:
    """Numbers the variables of a jaxpr in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Var, int] = {}

    def of(self, atom: Atom) -> str:
        if isinstance(atom, Literal):
            return describe_array(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
        number = self._numbers.setdefault(atom, len(self._numbers))
        return f"v{number}:{_OF_A_PROCESS.sub('', str(atom.aval))}"

    def of_all(self, atoms: Iterable[Atom]) -> str:
        return f"({', '.join(map(self.of, atoms))})"
