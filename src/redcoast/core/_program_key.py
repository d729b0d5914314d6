"""A hashable key of a traced program: programs with equal keys compute the same.

The functions that a program was traced from are no part of it, so that a function that is traced
again has the same key as long as what it reads is the same. Objects that cannot be compared by
value, such as functions on the host, which callbacks call, are compared by identity. The key does
not keep them alive: it is valid as long as the program is.
"""

import dataclasses
import functools as ft
from collections.abc import Hashable, Mapping
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jaxtyping import PyTree

from ._control_flow import AnyJaxpr, Atom, Call, consts_of, control_flow, is_high_level, open_jaxpr

# Parameters that change no value: notes, and functions for derivatives that are not taken.
_IGNORED = frozenset(
    ("bwd", "debug_info", "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "out_trees")
)
# Larger arrays of JAX are compared by identity: to read them could take seconds.
_MOST_BYTES = 1 << 20


def program_key(jaxpr: AnyJaxpr) -> Hashable:
    """Returns a key that is equal for programs with the same operations and constants."""
    programs = _Programs()
    programs.number_of(jaxpr)
    return tuple(programs.numbers)


class _Programs:
    """The jaxprs of a program, each of which may be called at several places."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}  # of each jaxpr, by its key
        self._known: dict[int, int] = {}  # the numbers by the identity of the jaxpr
        self._functions: dict[int, Hashable] = {}  # their keys, by their identity
        self._operations: dict[Hashable, Hashable] = {}

    def number_of(self, jaxpr: AnyJaxpr) -> int:
        """The number of a jaxpr, which is the same for two jaxprs with equal keys."""
        number = self._known.get(id(jaxpr))
        if number is None:
            key = self._jaxpr_key(jaxpr)
            number = self.numbers.setdefault(key, len(self.numbers))
            self._known[id(jaxpr)] = number
        return number

    def _jaxpr_key(self, jaxpr: AnyJaxpr) -> Hashable:
        inner = open_jaxpr(jaxpr)
        names: dict[Var, int] = {}

        def atom_key(atom: Atom) -> Hashable:
            if isinstance(atom, Literal):
                return atom.aval, _array_key(np.asarray(atom.val))
            return names.setdefault(atom, len(names)), atom.aval

        arguments = tuple(map(atom_key, (*inner.invars, *inner.constvars)))
        constants = tuple(map(_array_key, consts_of(jaxpr)))
        equations: list[Hashable] = []
        for equation in inner.eqns:
            operands = tuple(map(atom_key, equation.invars))
            what = self._operation_key(equation)
            what = self._operations.setdefault(what, what)  # one object for equal keys
            results = tuple(map(atom_key, equation.outvars))
            equations.append((what, operands, results))
        outputs = tuple(map(atom_key, inner.outvars))
        return arguments, constants, tuple(equations), outputs

    def _operation_key(self, equation: JaxprEqn) -> Hashable:
        """What an equation does with its operands, and in which context."""
        context = equation.ctx
        # All settings of the context, such as its mesh, whichever the version of JAX has.
        settings = [getattr(context, name, None) for name in _slots(type(context))]
        return (
            equation.primitive.name,
            self._value_key(self._parameters(equation)),
            self._value_key(settings),
            # Effects are a set of objects without an order.
            str(sorted(map(str, equation.effects))),
        )

    def _parameters(self, equation: JaxprEqn) -> Mapping[str, object]:
        if not is_high_level(equation):
            return {k: v for k, v in equation.params.items() if k not in _IGNORED}
        # The one parameter of these holds functions for derivatives, beside what it runs.
        call = control_flow(equation)
        if isinstance(call, Call):
            return {"runs": call.jaxpr, "prevent_cse": call.prevent_cse}
        return equation.params

    def _value_key(self, value: object) -> Hashable:
        """The key of a parameter: its value, or else its identity."""
        if isinstance(value, AnyJaxpr):
            return "program", self.number_of(value)
        if isinstance(value, Mapping):
            return "mapping", frozenset((k, self._value_key(v)) for k, v in value.items())
        if isinstance(value, tuple | list):
            return type(value), tuple(map(self._value_key, value))
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return _array_key(value)
        if isinstance(value, float | complex):
            return type(value), repr(value)  # 0.0 and -0.0 are equal, and nan is not
        if isinstance(value, ft.partial):
            return "partial", self._value_key((value.func, value.args, value.keywords))
        if isinstance(value, FunctionType):
            return self._function_key(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return type(value), self._value_key(fields)
        try:
            hash(value)
        except TypeError:
            return "object", id(value)
        return type(value), value

    def _function_key(self, function: FunctionType) -> Hashable:
        """The same for functions with the same code and the same variables.

        JAX wraps what a callback calls in a function of its own, each time that it is traced.
        """
        if id(function) in self._functions:
            return self._functions[id(function)]
        self._functions[id(function)] = "function", id(function)  # if it refers to itself
        try:
            variables = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # one of them has no value yet
            return "function", id(function)
        if not function.__module__.startswith("jax."):
            # They may be assigned to later, so it is not enough that their values are equal.
            variables = list(map(id, function.__closure__ or ()))
        parts = (variables, function.__defaults__, function.__kwdefaults__)
        key = function.__code__, id(function.__globals__), self._value_key(parts)
        self._functions[id(function)] = key
        return key


@ft.cache
def _slots(cls: type) -> tuple[str, ...]:
    return tuple(name for name in cls.__dict__["__slots__"] if not name.startswith("_"))


def _array_key(x: PyTree) -> Hashable:
    """The type and the bytes of an array, or the identity of a large one."""
    is_value = not isinstance(x, jax.Array)
    if not is_value and x.nbytes <= _MOST_BYTES and x.is_fully_addressable and not x.is_deleted():
        is_value = not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if not is_value:
        return "array", id(x)
    values = np.asarray(x)
    if values.dtype == object:
        return "array", id(x)
    return str(values.dtype), values.shape, bool(getattr(x, "weak_type", False)), values.tobytes()
