"""The annotations of redcoast, checked at run time at a fraction of what jaxtyping alone takes.

jaxtyping binds the arguments of every call to remember the sizes of arrays. Here it does so for the
functions whose annotations name arrays. Those of other functions are checked by beartype alone.
The default suite checks the first calls of a function in each test: a planner calls its smallest
functions ten thousand times. The other sessions check all calls.
"""

import collections
import dataclasses
import functools as ft
import inspect
import types
import typing
from typing import Any

import beartype
import jaxtyping

# A function inside another is made at each call, and its checks are compiled each time: those
# that are made first are checked.
MOST_TIMES = 3
made = collections.Counter()
# How many calls of a function are checked in each test of the default suite.
MOST_CALLS = 5
# For each function that was called, how many of its calls are still checked in this test.
unchecked: list[list[int]] = []
every_call = False  # whether all calls are checked
beartyped = beartype.beartype(conf=beartype.BeartypeConf(violation_type=TypeError))
jaxtyped = jaxtyping.jaxtyped


def check_annotations(f: Any = None, *, typechecker) -> Any:
    """Replaces `jaxtyping.jaxtyped`, the decorator that `--jaxtyping-packages` inserts."""
    if f is None:
        return lambda f: check_annotations(f, typechecker=typechecker)
    if inspect.isclass(f) and dataclasses.is_dataclass(f):
        f.__init__ = check_annotations(f.__init__, typechecker=typechecker)
        return f
    # beartype would put a generator of its own around one, which closes it where it should throw.
    plain = inspect.isfunction(f) and not inspect.isgeneratorfunction(f)
    if isinstance(f, types.FunctionType) and plain:
        # Generated code of two classes with the same fields is equal.
        place = f.__module__, f.__qualname__, f.__code__
        made[place] += 1
        if made[place] > MOST_TIMES:
            return f
    if not plain or any(map(names_arrays, f.__annotations__.values())):
        check = ft.partial(jaxtyped, typechecker=typechecker)
    else:
        check = beartyped
    if every_call or not isinstance(f, types.FunctionType) or not plain:
        return check(f)
    return check_first_calls(f, check)


def check_first_calls(f, check):
    """A function whose first calls in each test are checked by `check(f)`.

    This is made at the first call, as most functions of the package are not called in one process.
    """
    checked: Any = None
    left = [MOST_CALLS]

    @ft.wraps(f)
    def call(*args, **kwargs):
        nonlocal checked
        if not left[0]:
            return f(*args, **kwargs)
        if checked is None:
            checked = check(f)
            unchecked.append(left)
        left[0] -= 1
        return checked(*args, **kwargs)

    # Like those of beartype, its frames are in no file, so that they are none of the user's.
    call.__code__ = call.__code__.replace(co_filename="<checked annotations>")
    return call


def pytest_runtest_setup():
    for left in unchecked:
        left[0] = MOST_CALLS


def pytest_configure(config):
    """The default suite is the one that leaves out thorough tests."""
    global every_call
    every_call = "not thorough" not in config.option.markexpr


def names_arrays(annotation):
    """Whether an annotation has axes anywhere; one that is a string may have."""
    if isinstance(annotation, str) or hasattr(annotation, "dims"):
        return True
    if isinstance(annotation, list):
        return any(map(names_arrays, annotation))
    leaf = getattr(annotation, "leaftype", None)
    return any(map(names_arrays, [*typing.get_args(annotation), *([leaf] if leaf else [])]))
