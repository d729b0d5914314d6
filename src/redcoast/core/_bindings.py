"""What the names that a function reads are bound to."""

import dis
import functools as ft
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import equinox as eqx
import jax

_MOST = 10_000  # objects; a function that refers to more of them takes long to look through


def bindings(fn: Any) -> list[Any]:
    """Returns a function, and the objects that it and the functions it calls read by name.

    Names in closures are followed into all functions, names in modules into functions of the same
    module. Attributes that can be set, such as those of a configuration, count as names. Names that
    a function itself assigns to are left out.
    """
    found, seen, todo = [], set(), [fn]
    module = getattr(fn, "__module__", None)
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        found.append(x)
        if len(found) > _MOST:
            raise TypeError("The function refers to too many objects.")
        todo.extend(_named(x, module))
    return found


def _named(x: Any, module: str | None) -> Iterator[Any]:
    if inspect.ismethod(x):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, ft.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif _has_settable_attributes(x):
        yield from vars(x).values()
    elif isinstance(x, tuple):  # such as the parts of `optax.chain`
        yield from x
    elif isinstance(x, FunctionType):
        yield from x.__defaults__ or ()
        yield from (x.__kwdefaults__ or {}).values()
        codes = list(_codes(x.__code__))
        assigned = {name for code in codes for name in _assigned(code)}
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if name not in assigned:
                yield from _content(cell)
        if x.__module__ == module:
            names = {name: None for code in codes for name in code.co_names}  # in order
            yield from (
                x.__globals__[name]
                for name in names
                if name in x.__globals__ and name not in assigned
            )


def _has_settable_attributes(x: Any) -> bool:
    if isinstance(x, FunctionType | type | ModuleType | jax.Array | eqx.Module):
        return False
    frozen = getattr(type(x), "__dataclass_params__", None)
    return hasattr(x, "__dict__") and not (frozen is not None and frozen.frozen)


def _content(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # the name is not bound yet
        yield None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those that are defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _assigned(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_DEREF", "STORE_GLOBAL"):
            yield instruction.argval
