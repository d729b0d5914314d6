"""Compiled programs that later runs use again.

A program is known by what it computes on which devices, and not by the functions that it was traced
from. A later run traces its functions again, so it notices whatever they read that has changed, and
compiles nothing if the program is the same. Tracing takes a fraction of a second where compilation
takes from seconds to minutes.
"""

import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from ..core._control_flow import AnyJaxpr, consts_of, open_jaxpr
from ..core._donation import is_deleted
from ..core._program_key import program_key
from ..core._pytree import Arrays
from ..core._tracing import traced_over
from ._compiler_options import Options
from ._one_thread import in_one_thread

Shardings = Sequence[NamedSharding]
# A jitted function `(state arrays, other arrays) -> (new state arrays, other results)`.
Run = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]

_MOST = 16  # programs that are kept
_FEW_BYTES = 1 << 16  # of a constant that may stay as long as its program
_numbers = itertools.count()


class _CachedProgram(NamedTuple):
    number: int
    jaxpr: AnyJaxpr  # keeps alive what its key compares by identity
    run: Run


_PROGRAMS: dict[Hashable, _CachedProgram] = {}  # the last is the one that was used last


def compiled_once(
    jaxpr: AnyJaxpr,
    function: Callable[..., object],
    mesh: Mesh | AbstractMesh,
    in_shardings: Shardings = (),
    out_shardings: Shardings = (),
    *,
    donates: bool = False,
    only_last: bool = False,
    options: Options = (),
) -> tuple[Run, Arrays]:
    """Returns a jitted function that runs a traced program, and the arrays that it closes over.

    It is the function of an earlier call if the program, the devices and the shardings are the
    same. It refers to no function of the user. A program that closes over arrays is dropped with
    them when the user's function is deleted.

    - `jaxpr`: the program. Its first arguments, one for each of `in_shardings`, are the arrays of
        the state; its first results, one for each of `out_shardings`, those of the new state.
    - `function`: the user's function that may close over arrays, such as the loss.
    - `donates`: whether the memory of the state is used for the results. Arrays that the program
        returns as they are, such as frozen weights and keys, are not donated, and are the results.
    - `only_last`: whether nothing but the last of the other results is computed.
    - `options`: options of the compiler.
    """
    constants = list(consts_of(jaxpr))
    shardings = tuple(in_shardings), tuple(out_shardings)
    # New functions of the same code have programs with the same key.
    key = program_key(jaxpr), mesh, shardings, donates, only_last, options
    # Put back below, as the one that was used last.
    program = _PROGRAMS.pop(key, None)
    # An array that it closes over may have been donated to another program since.
    if program is None or any(map(is_deleted, consts_of(program.jaxpr))):
        run = _jit(jaxpr, mesh, in_shardings, out_shardings, donates, only_last, options)
        program = _CachedProgram(next(_numbers), jaxpr, run)
        # A program must not keep the user's data alive for longer than the function that refers to
        # it.
        holds_memory = any(map(_is_of_the_user, constants))
        if holds_memory and not _drop_with(function, program.number):
            return run, constants
    _PROGRAMS[key] = program
    while len(_PROGRAMS) > _MOST:
        oldest = next(iter(_PROGRAMS))
        _PROGRAMS.pop(oldest, None)
    return program.run, [*constants, *consts_of(program.jaxpr)]


def _is_of_the_user(constant: PyTree) -> bool:
    """Whether a constant is more than a few numbers that were written into the program."""
    return isinstance(constant, jax.Array) or constant.nbytes > _FEW_BYTES


def _jit(
    jaxpr: AnyJaxpr,
    mesh: Mesh | AbstractMesh,
    in_shardings: Shardings,
    out_shardings: Shardings,
    donates: bool,
    only_last: bool,
    options: Options,
) -> Run:
    if donates:
        return jit_donating(jaxpr, mesh, in_shardings, out_shardings, options)
    evaluate = jaxpr_as_fun(jaxpr)
    count = len(out_shardings)

    def program(arrays: Arrays, others: Arrays) -> tuple[Arrays, Arrays]:
        with traced_over(mesh):
            results = evaluate(*arrays, *others)
        others = results[count:]
        if only_last:
            others = results[-1:]  # JAX leaves out the rest
        return list(results[:count]), list(others)

    return jax.jit(
        program,
        in_shardings=(list(in_shardings), None),
        out_shardings=(list(out_shardings), None),
        compiler_options=dict(options) or None,
    )


def _unchanged(jaxpr: AnyJaxpr, in_shardings: Shardings, out_shardings: Shardings) -> list[int]:
    """The places of the arrays of the state that a program returns as they are."""
    inner = open_jaxpr(jaxpr)
    unchanged: list[int] = []
    for i, (before, after) in enumerate(zip(in_shardings, out_shardings, strict=True)):
        # Such as frozen weights, which need neither be passed out nor donated.
        if inner.outvars[i] is inner.invars[i] and before == after:
            unchanged.append(i)
    return unchanged


def jit_donating(
    jaxpr: AnyJaxpr,
    mesh: Mesh | AbstractMesh,
    in_shardings: Shardings,
    out_shardings: Shardings,
    options: Options,
) -> Run:
    """A program that is given, and returns, only the arrays that it changes: each costs time."""
    evaluate = in_one_thread(jaxpr, mesh)
    unchanged = _unchanged(jaxpr, in_shardings, out_shardings)
    count = len(out_shardings)
    changed = [i for i in range(count) if i not in unchanged]
    order = [*changed, *unchanged]

    def program(new: Arrays, same: Arrays, others: Arrays) -> tuple[Arrays, Arrays]:
        arrays = merge(new, same)
        with traced_over(mesh):
            results = evaluate(*arrays, *others)
        return _at(changed, results), list(results[count:])

    def merge(new: Arrays, same: Arrays) -> Arrays:
        arrays: Arrays = [None] * count
        for i, x in zip(order, [*new, *same], strict=True):
            arrays[i] = x
        return arrays

    jitted = jax.jit(
        program,
        in_shardings=(_at(changed, in_shardings), _at(unchanged, in_shardings), None),
        out_shardings=(_at(changed, out_shardings), None),
        donate_argnums=0,
        compiler_options=dict(options) or None,
    )

    def run(arrays: Arrays, others: Arrays) -> tuple[Arrays, Arrays]:
        same = _at(unchanged, arrays)
        new, results = jitted(_at(changed, arrays), same, others)
        return merge(new, same), results

    return run


def _at(places: Sequence[int], values: Sequence[PyTree]) -> list[PyTree]:
    return [values[i] for i in places]


def _drop_with(function: Callable[..., object], number: int) -> bool:
    """Drops a program when a function is deleted; returns whether that is possible."""
    owner = function
    if inspect.ismethod(function):
        # A method is a new object at each access.
        owner = function.__self__
    try:
        finalizer = weakref.finalize(owner, _drop, number)
    except TypeError:  # not every object can be referred to weakly
        return False
    # At the end of the process, the memory is freed anyway.
    finalizer.atexit = False
    return True


def _drop(number: int) -> None:
    for key, program in list(_PROGRAMS.items()):
        if program.number == number:
            _PROGRAMS.pop(key, None)
