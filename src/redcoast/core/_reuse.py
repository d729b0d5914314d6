"""Results that are cached as long as functions, and what they read, do not change."""

import dis
import functools as ft
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import equinox as eqx
import jax

_MOST = 16  # results in a cache
_MOST_OBJECTS = 10_000  # searching a function that refers to more of them takes too long


class Weakly:
    """A function that can be called, but is not kept alive."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = weakref.WeakMethod(fn) if inspect.ismethod(fn) else weakref.ref(fn)

    @property
    def __wrapped__(self) -> Any:
        return self._fn()

    @property
    def __name__(self) -> str:
        return str(getattr(self._fn(), "__name__", type(self._fn()).__name__))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self._fn()
        assert fn is not None, "The function is gone."
        return fn(*args, **kwargs)


def reuse(
    cache: dict[Any, Any],
    functions: Sequence[Callable[..., Any]],
    key: Any,
    make: Callable[[Sequence[Callable[..., Any]]], Any],
) -> Any:
    """Returns what `make(functions)` returned for the same functions and an equal key before.

    Functions are compared by identity. `make` gets functions that refer to them weakly, so the
    result does not keep them alive. The result is dropped with them, and recomputed if a name that
    one of them reads has been rebound. Functions without weak references and unhashable keys are
    never cached.
    """

    def drop(_: Any, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the process, parts of the key may be gone, and an error would be printed.
        if not finalizing():
            cache.pop(key, None)

    try:
        identity = lambda fn: (id(fn.__self__), id(fn.__func__)) if inspect.ismethod(fn) else id(fn)
        key = (tuple(map(identity, functions)), key)
        entry = cache.pop(key, None)
        read = [x for fn in functions for x in bindings(fn)]
        marks, kept = _marks(read, drop)
        weak = list(map(Weakly, functions))
    except (TypeError, ValueError):  # also of dicts whose keys cannot be sorted
        return make(functions)
    # A value, the marks of what was read when it was made, and what keeps these marks valid.
    if entry is None or entry[1] != marks:
        entry = make(weak), marks, kept
    cache[key] = entry  # the last one is the most recently used
    while len(cache) > _MOST:
        cache.pop(next(iter(cache)), None)
    return entry[0]


def _marks(objects: list[Any], drop: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """Marks of objects, and what is to be kept so that the marks are valid.

    Containers are kept only if they hold nothing but values. `drop` is called if a mark becomes
    invalid.
    """
    marks, kept = [], []
    for x in objects:
        if inspect.ismethod(x) or isinstance(x, tuple):
            continue  # their parts are among the objects
        container = isinstance(x, list | dict)
        parts = [leaf for leaf in jax.tree.leaves(x) if not _is_value(leaf)] if container else [x]
        for part in parts or [x]:
            if _is_value(part):
                marks.append((type(part), part))
            else:
                kept.append(part if part is x and container else weakref.ref(part, drop))
                marks.append(id(part))
    return marks, kept


def _is_value(x: Any) -> bool:
    """Whether an object is compared by value: a number, a string, a dtype, a sharding."""
    known = type(x).__module__.split(".")[0] in ("builtins", "numpy", "jax", "jaxlib")
    return known and type(x).__weakrefoffset__ == 0 and type(x).__hash__ is not None


def bindings(fn: Any) -> list[Any]:
    """Returns a function, and the objects that it and the functions it calls read by name.

    Names in closures are followed into all functions, and global names into functions of the same
    module. Attributes that can be set, such as a configuration's, count as names. Names that a
    function itself assigns to are left out.
    """
    found, seen, todo = [], set(), [fn]
    module = getattr(fn, "__module__", None)
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        found.append(x)
        if len(found) > _MOST_OBJECTS:
            raise TypeError("The function refers to too many objects.")
        todo.extend(_named(x, module))
    return found


def _named(x: Any, module: str | None) -> Iterator[Any]:
    if inspect.ismethod(x):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, ft.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif _is_mutable(x):
        yield from vars(x).values()
    elif isinstance(x, tuple):  # such as the parts of `optax.chain`
        yield from x
    elif isinstance(x, FunctionType):
        yield from x.__defaults__ or ()
        yield from (x.__kwdefaults__ or {}).values()
        codes = list(_codes(x.__code__))
        instructions = (one for code in codes for one in dis.get_instructions(code))
        stores = ("STORE_DEREF", "STORE_GLOBAL")
        assigned = {one.argval for one in instructions if one.opname in stores}
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            if name not in assigned:
                try:
                    yield cell.cell_contents
                except ValueError:  # the name is not bound yet
                    yield None
        if x.__module__ == module:
            names = {name: None for code in codes for name in code.co_names}  # in order
            yield from (
                x.__globals__[name]
                for name in names
                if name in x.__globals__ and name not in assigned
            )


def _is_mutable(x: Any) -> bool:
    """Whether attributes of an object can be set."""
    if isinstance(x, FunctionType | type | ModuleType | jax.Array | eqx.Module):
        return False
    frozen = getattr(type(x), "__dataclass_params__", None)
    return hasattr(x, "__dict__") and not (frozen is not None and frozen.frozen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
