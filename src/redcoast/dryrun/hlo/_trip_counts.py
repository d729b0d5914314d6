"""The trip counts of loops in compiled HLO.

The CPU and GPU compilers annotate them. The TPU compiler does not, so they are derived from the
loop's counter: its initial value, the amount that the body adds to it, and the bound that it is
compared with.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._parse import (
    Computation,
    Instruction,
    Module,
    arguments,
    attributes,
    callee,
    computation,
    lookup,
    operands,
)

# In the `backend_config` of a `while`.
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Opcodes whose result has the value of the first operand.
_SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")


@dataclass(frozen=True)
class Carried:
    """The value carried at a place of a loop's tuple (None for a single array), plus `more`."""

    place: int | None
    more: int


Value = int | Carried | None
# The value of a computation's parameter, by its number, and by the place in it if it is a tuple.
Parameters = Callable[[int, int | None], Value]


@dataclass(frozen=True)
class CallScope:
    """A computation, with the known values of its parameters at one call site."""

    module: Module
    name: str
    parameters: Parameters

    @property
    def computation(self) -> Computation:
        return computation(self.module, self.name)


def inner_scope(scope: CallScope, caller: Instruction, name: str, skip: int = 0) -> CallScope:
    """The scope of a computation that an instruction calls with its operands after `skip`."""
    inputs = operands(caller)[skip:]
    return CallScope(scope.module, name, lambda number, place: _value(scope, inputs[number], place))


def loop_scope(scope: CallScope, loop: Instruction, name: str) -> CallScope:
    """The scope of a loop's body or condition, with the known loop-invariant values."""
    return CallScope(scope.module, name, lambda number, place: _unchanged(scope, loop, place))


def trip_count(scope: CallScope, loop: Instruction) -> int | None:
    """The number of times a loop's body runs; None if that depends on data."""
    known = _KNOWN.search(loop.rest)
    if known is not None:
        return int(known[1])
    compared = _comparison(_symbolic(scope, callee(loop, "condition")))
    if compared is None:
        return None

    def start(place: Any) -> Value:
        return _value(scope, operands(loop)[0], place)

    def after(place: Any) -> Value:
        return _root(_symbolic(scope, callee(loop, "body")), place)

    return solve(compared, start, after)


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


def solve(
    compared: tuple[Value, str, Value], start: Callable[[Any], Value], after: Callable[[Any], Value]
) -> int | None:
    """Computes a trip count; None if it depends on data.

    - `compared`: the condition, as operand, direction, operand.
    - `start`, `after`: the initial value of the carry at a place, and its value after an iteration.
    """

    def invariant(value: Value) -> int | None:
        """A constant, or a number that no iteration changes."""
        if not isinstance(value, Carried):
            return value
        if after(value.place) != Carried(value.place, 0):
            return None
        begin = start(value.place)
        if not isinstance(begin, int):
            return None
        return begin + value.more

    left, direction, right = compared
    if not isinstance(left, Carried) or invariant(left) is not None:
        # The counter may be on either side. From here on, it is the left one.
        left, direction, right = right, _MIRRORED.get(direction, direction), left
    if not isinstance(left, Carried):
        return None
    begin, moved, bound = start(left.place), after(left.place), invariant(right)
    if not isinstance(begin, int) or bound is None:
        return None
    if not isinstance(moved, Carried) or moved.place != left.place:
        return None
    return iterations(begin + left.more, moved.more, direction, bound)


def iterations(start: int, step: int, direction: str, bound: int) -> int | None:
    """The number of values start, start + step, ... before one fails the comparison."""
    # A counter that steps over the bound would never be equal to it.
    if direction == "NE" and step and (bound - start) % step == 0 and (bound - start) // step >= 0:
        return (bound - start) // step
    # An integer is at most 7 if it is less than 8.
    bound += {"LE": 1, "GE": -1}.get(direction, 0)
    if (direction in ("LT", "LE") and step > 0) or (direction in ("GT", "GE") and step < 0):
        return len(range(start, bound, step))
    return None


def _symbolic(scope: CallScope, name: str) -> CallScope:
    return CallScope(scope.module, name, lambda number, place: Carried(place, 0))


def _unchanged(scope: CallScope, loop: Instruction, place: int | None) -> Value:
    """The value that a loop carries at a place, if its body does not change it."""
    if _root(_symbolic(scope, callee(loop, "body")), place) != Carried(place, 0):
        return None
    return _value(scope, operands(loop)[0], place)


def _root(scope: CallScope, place: int | None) -> Value:
    return _value(scope, scope.computation.root, place)


def _comparison(scope: CallScope) -> tuple[Value, str, Value] | None:
    """The comparison that a loop's condition consists of."""
    instruction = lookup(scope.computation, scope.computation.root)
    if instruction.opcode in ("fusion", "call"):
        inner = callee(instruction, "calls", "to_apply")
        return _comparison(inner_scope(scope, instruction, inner))
    direction = re.search(r"\bdirection=(\w+)", attributes(instruction))
    if instruction.opcode != "compare" or direction is None:
        return None
    # pred[] compare(%i, %eight), direction=LT
    compared = operands(instruction)
    left = _value(scope, compared[0], None)
    right = _value(scope, compared[1], None)
    return left, direction[1], right


def _value(scope: CallScope, name: str, place: int | None) -> Value:
    """An instruction's value, or the element of its result at `place`; None if unknown."""
    instruction = lookup(scope.computation, name)
    match instruction.opcode:
        case "constant":
            # %eight = s32[] constant(8)
            literal = arguments(instruction)[0]
            if re.fullmatch(r"-?\d+", literal) is None:
                return None
            return int(literal)
        case "parameter":
            # %carry = (s32[], f32[4]) parameter(0)
            return scope.parameters(int(arguments(instruction)[0]), place)
        case "get-tuple-element":
            # %i = s32[] get-tuple-element(%carry), index=0
            index = re.search(r"\bindex=(\d+)", attributes(instruction))
            if index is None or place is not None:
                return None
            return _value(scope, operands(instruction)[0], int(index[1]))
        case "tuple":
            if place is None:
                return None
            return _value(scope, operands(instruction)[place], None)
        case "add" | "subtract":
            terms = operands(instruction)
            left = _value(scope, terms[0], None)
            right = _value(scope, terms[1], None)
            if instruction.opcode == "add":
                return added(left, right, 1)
            return added(left, right, -1)
        case "fusion" | "call":
            inner = callee(instruction, "calls", "to_apply")
            return _root(inner_scope(scope, instruction, inner), place)
        # A loop before this one may pass a number on unchanged.
        case "while":
            return _unchanged(scope, instruction, place)
        case opcode if opcode in _SAME:
            return _value(scope, operands(instruction)[0], place)
    return None


def added(left: Value, right: Value, sign: int) -> Value:
    if isinstance(left, int) and isinstance(right, Carried) and sign == 1:
        left, right = right, left
    if not isinstance(right, int):
        return None
    if isinstance(left, Carried):
        return Carried(left.place, left.more + sign * right)
    if left is None:
        return None
    return left + sign * right
