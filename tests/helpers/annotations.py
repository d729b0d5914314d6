"""The annotations of redcoast, checked at run time at a fraction of what jaxtyping alone takes.

jaxtyping binds the arguments of every call to remember the sizes of arrays. Here it does so for the
functions whose annotations name arrays. Those of other functions are checked by beartype alone.
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
    if not isinstance(f, types.FunctionType) or not plain:
        return check(f)
    return check_when_called(f, check)


def check_when_called(f, check) -> Any:
    """A function that is checked by `check(f)`.

    This is made at the first call: most functions of the package are not called in one process.
    """
    checked: Any = None

    def call(*args, **kwargs):
        nonlocal checked
        if checked is None:
            checked = check(f)
        return checked(*args, **kwargs)

    # Like those of beartype, its frames are in no file, so that they are none of the user's.
    call.__code__ = call.__code__.replace(co_filename="<checked annotations>")
    return ft.wraps(f)(call)


def names_arrays(annotation):
    """Whether an annotation has axes anywhere; one that is a string may have."""
    if isinstance(annotation, str) or hasattr(annotation, "dims"):
        return True
    if isinstance(annotation, list):
        return any(map(names_arrays, annotation))
    leaf = getattr(annotation, "leaftype", None)
    return any(map(names_arrays, [*typing.get_args(annotation), *([leaf] if leaf else [])]))
