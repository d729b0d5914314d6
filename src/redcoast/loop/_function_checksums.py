"""Checksums of functions, by which processes and later runs recognise them."""

import functools as ft
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from ..distributed._agreement import checksum

# Of larger collections, such as the words of a tokenizer, only the number of items counts.
_LARGEST = 10_000


def code_checksum(fn: object) -> str | None:
    """A checksum of a function's code, not including the functions that it calls."""
    # Without its arguments, whose text may have addresses, which differ.
    while isinstance(fn, ft.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if code is None:
        return None
    return checksum(b"".join(_instructions(code)))


def checksum_of_functions(functions: PyTree) -> str:
    """A checksum of the code of functions, and of the numbers, texts and functions that they hold:
    as `optax.adam(1e-3)` holds the learning rate.

    It differs between versions of the libraries and of Python, as their code does.
    """
    versions = f"{sys.version_info[:2]} {jax.__version__} {optax.__version__}"
    return checksum(b"\n".join([versions.encode(), *_parts(functions, {})]))


def _parts(x: PyTree, seen: dict[int, object]) -> Iterator[bytes]:
    while hasattr(x, "__wrapped__"):
        x = x.__wrapped__
    if isinstance(x, MethodType):
        x = x.__func__
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, int | float | complex | str | bytes | None):
        yield repr(x).encode()
        return
    # A function may refer to itself.
    if id(x) in seen:
        return
    seen[id(x)] = x
    held: list[object] = []  # arrays and other objects have no part: they may change in a run
    if isinstance(x, FunctionType):
        yield from _instructions(x.__code__)
        held += [x.__defaults__, x.__kwdefaults__]
        held += map(_contents, x.__closure__ or ())
    elif isinstance(x, ft.partial):
        held += [x.func, x.args, x.keywords]
    elif isinstance(x, list | tuple | dict) and len(x) > _LARGEST:
        yield str(len(x)).encode()
    elif isinstance(x, list | tuple):
        held += x
    elif isinstance(x, dict):
        for item in x.items():
            held += item
    for each in held:
        yield from _parts(each, seen)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _instructions(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        # Others, such as sets, have no fixed order.
        elif isinstance(constant, int | float | complex | str | bytes | None):
            yield repr(constant).encode()
