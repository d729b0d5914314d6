"""Hides the frames of redcoast, JAX and their wrappers in tracebacks and warnings, and adds what
JAX's messages do not say."""

import contextlib
import dataclasses
import difflib
import functools as ft
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.extend import source_info_util
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ._errors import several
from ._keywords import remedy_for
from ._pytree import show_path

Fn = TypeVar("Fn", bound=Callable[..., object])
Class = TypeVar("Class")

_EQUINOX = f"{Path(eqx.__file__).parent}{os.sep}"
# The files whose frames are left out of tracebacks, redcoast's own first.
_HIDDEN = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(jax.__file__).parent}{os.sep}",
    f"{_EQUINOX}_",  # its wrappers, and not its layers, which are in `equinox/nn`
    contextlib.__file__,
    ft.__file__,
    inspect.__file__,
)
_LIBRARIES = {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")}
# Code in no file, such as a dataclass's `__init__`, has a name such as `<string>`.
_FOREIGN = (*_HIDDEN, "<", *_LIBRARIES)
_MODELS = f"{Path(__file__).parents[1] / 'models'}{os.sep}"
_SHARED = tuple(f"{_MODELS}{name}.py" for name in ("_basic", "_einsum", "_scan_layers"))
# Raised by a line of redcoast itself, these are mistakes in redcoast, and its frames are needed.
_DEFECTS = (AssertionError, AttributeError, LookupError, NameError)
_LONGEST = 10_000  # letters of a message
# Equinox's message in an error of JAX: that of the user, empty lines, and advice below a line.
_OF_CHECK = re.compile(r"_EquinoxRuntimeError: (?P<message>.*?)\n\s*-{20}", re.DOTALL)
_NOTE_OF_JAX = "JAX has removed its internal frames"
_LEAKED = (
    "A compiled function cannot keep what it computes in a list, a dict or an attribute, where a "
    "later call reads it. Return it: `loss_fn` may return numbers to log, "
    '`(loss, {"name": value})`, and the model with changed state, `(loss, aux, model)`. '
    "For the same reason, the rules of a `jax.custom_vjp` or `jax.custom_jvp` cannot use a value "
    "of the function around them: make it an argument of the function that has the rules, and in "
    "a `custom_vjp` one of its residuals."
)
# What JAX's messages with these words leave out.
_NOTES = {
    "pytree dictionary keys": (
        "JAX sorts the entries of a dict, so the keys of each dict must be of one type, such as "
        "`str`."
    ),
    "ordered effects are not supported": (
        "JAX orders the calls of `jax.debug.print` and `jax.debug.callback` on one device only. "
        "Leave out `ordered=True`, or pass a mesh of one device, "
        "`redcoast.make_mesh(devices=jax.devices()[:1])`."
    ),
    "check which was not functionalized": (
        "A step is compiled without `checkify.checkify`. Instead of `checkify.check`, use "
        '`x = equinox.error_if(x, jnp.any(x > limit), "too large")`, which raises; or call '
        "`checkify.checkify(fn)` inside of `loss_fn`."
    ),
}
_EXITED = (
    "`sys.exit` was called inside `{}` with the status 0, as if the program were finished. Raise "
    "an error, or pass `sys.exit` another status."
)
source_info_util.register_exclusion(_HIDDEN[0])  # in the frames that JAX lists in its messages


class LastNote(str):
    """A note that comes after all others."""


class RaisedBy(str):
    """The note that names a function that the user passed, and that raised the error.

    - `name`: that of the function.
    """

    name: str

    def __new__(cls, name: str, rest: str) -> "RaisedBy":
        note = super().__new__(cls, f"Raised by `{name}`{rest}.")
        note.name = name
        return note


def hide_frames(fn: Fn) -> Fn:
    """Decorates a public function, so that its errors show only the frames of other code.

    With `JAX_TRACEBACK_FILTERING=off`, JAX shows all frames, and so does redcoast.
    """

    @ft.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except SystemExit as error:
            # Another status says that the program is not finished, and a handler of signals ends it
            # on purpose.
            if error.code or _comes_from_signal(error):
                raise
            where = fn.__name__
            for note in getattr(error, "__notes__", []):
                if isinstance(note, RaisedBy):
                    where = note.name
            exit_error = RuntimeError(_EXITED.format(where))
            tidy(error)
            raise exit_error from error
        except Exception as error:
            if isinstance(error, TypeError):
                _suggest(fn, error, kwargs)
            leaked = isinstance(error, jax.errors.UnexpectedTracerError)
            # Public functions may call each other, and one note is enough.
            notes = getattr(error, "__notes__", [])
            if leaked and _LEAKED not in notes:
                error.add_note(LastNote(_LEAKED))
            if isinstance(error, ValueError):
                for words, note in _NOTES.items():
                    if words in str(error) and note not in notes:
                        error.add_note(LastNote(note))
            explained = None
            if isinstance(error, TypeError | ValueError):
                explained = explain_static_arrays(fn, error, args, kwargs)
            tidy(error, called=fn)
            if explained is not None:
                raise explained from error
            checked = _error_of_check(error)
            if checked is not None:
                raise checked from None
            raise  # without arguments, which adds no frame

    return call  # pyright: ignore[reportReturnType]


def _error_of_check(error: Exception) -> Exception | None:
    """The error that `eqx.error_if` raised in a compiled program, as `eqx.filter_jit` shows it.

    JAX's own has the traceback of the runtime, and Equinox's advice to use `eqx.filter_jit`.
    """
    failed = None
    # JAX raises the one or the other, as it waits for a program or has called it.
    if isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        failed = _OF_CHECK.search(str(error))
    if failed is None:
        return None
    checked = eqx.EquinoxRuntimeError(failed["message"].strip())
    for note in getattr(error, "__notes__", []):
        checked.add_note(note)
    return checked


def _comes_from_signal(error: BaseException) -> bool:
    """Whether a handler of signals raised an error."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def hide_frames_of_init(cls: type[Class]) -> type[Class]:
    """Decorates a public dataclass as `hide_frames` decorates a function."""
    cls.__init__ = hide_frames(cls.__init__)
    return cls


def _suggest(fn: Callable[..., object], error: TypeError, kwargs: Mapping[str, object]) -> None:
    """Adds a note to the error of a call with an argument that the function does not have."""
    failed = re.search(
        rf"\b{fn.__name__}\(\) (?:got an unexpected keyword argument '(?P<name>\w+)'"
        r"|(?P<missing>missing \d+ required)|(?P<many>takes .* positional argument.* given))",
        str(error),
    )
    if failed is None:
        return
    parameters = inspect.signature(fn).parameters
    names = list(parameters)
    called = fn.__name__
    if called == "__init__":
        called = fn.__qualname__.split(".")[-2]
        names = names[1:]
    if name := failed["name"]:
        close = difflib.get_close_matches(name, names, n=1)
        remedy = remedy_for(name, names)
        if not remedy and close:
            remedy = f"Did you mean `{close[0]}`?"
        elif not remedy:
            remedy = f"It takes {', '.join(names)}."
        error.add_note(f"`{called}` has no argument `{name}`. {remedy}")
    elif failed["missing"]:  # of a function that takes other keywords, as `generate` does
        for name in kwargs.keys() - set(names):
            if remedy := remedy_for(name, names):
                error.add_note(f"`{called}` has no argument `{name}`. {remedy}")
    else:
        by_name = [x.name for x in parameters.values() if x.kind is x.KEYWORD_ONLY]
        if by_name:
            error.add_note(
                f"`{called}` takes arguments by name, such as `{called}({by_name[0]}=...)`: "
                f"{', '.join(by_name)}."
            )


def tidy(error: BaseException, *, called: Callable[..., object] | None = None) -> None:
    """Removes hidden frames from an error and those it came from, and puts the last notes last.

    The frame of `called` is hidden too, because a dataclass's `__init__` is in no file.
    """
    code = getattr(called, "__code__", None)
    for each in _chain(error):
        notes = getattr(each, "__notes__", [])
        shown = jax.config.jax_traceback_filtering == "off"  # pyright: ignore[reportAttributeAccessIssue]
        frames = list(traceback.walk_tb(each.__traceback__))
        here = bool(frames) and frames[-1][0].f_code.co_filename.startswith(_HIDDEN[0])
        if here and isinstance(each, ValueError | TypeError):
            _shorten(each)
        if not shown and not (here and isinstance(each, _DEFECTS)):
            # The frames that are left, chained again from the innermost one outwards.
            each.__traceback__ = None
            for frame, line in reversed(frames):
                if not is_hidden(frame.f_code.co_filename) and frame.f_code is not code:
                    below = each.__traceback__
                    each.__traceback__ = TracebackType(below, frame, frame.f_lasti, line)
            notes = [note for note in notes if _NOTE_OF_JAX not in note]
        if notes or hasattr(each, "__notes__"):
            each.__notes__ = sorted(notes, key=lambda note: isinstance(note, LastNote))


def _shorten(error: BaseException) -> None:
    """Shortens a message that quotes much of an untrusted file."""
    text = None
    if len(error.args) == 1:
        text = error.args[0]
    if isinstance(text, str) and len(text) > _LONGEST:
        half = _LONGEST // 2
        error.args = (f"{text[:half]} ... ({len(text)} letters) ... {text[-half:]}",)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors that are printed above it."""
    errors: list[BaseException] = []
    while error is not None and error not in errors:
        errors.append(error)
        if error.__cause__ is not None or error.__suppress_context__:
            error = error.__cause__
        else:
            error = error.__context__
    return iter(errors)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's code that called redcoast."""
    # `stacklevel` counts frames from this one.
    frame, level = sys._getframe(), 1
    between = (*_HIDDEN, _EQUINOX)  # as of `eqx.filter_jit`
    while frame.f_back is not None and frame.f_code.co_filename.startswith(between):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def own_line(trace: Any) -> str:
    """The innermost line of the user's code in a traceback of JAX's, such as `train.py:12`."""
    frame = own_frame(trace)
    if frame is None:
        return ""
    file, number = frame
    return f"{os.path.basename(file)}:{number}"


def own_frame(trace: Any) -> tuple[str, int] | None:
    """The file and the number of the innermost line of the user's code in a traceback of JAX's."""
    return first_own((frame.file_name, frame.line_num) for frame in getattr(trace, "frames", ()))


def own_or_model_frame(frames: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """The first of some lines, innermost first, in the user's code or in a model of redcoast.

    The products and norms that all models share are not meant.
    """
    return first_own((frame for frame in frames if not frame[0].startswith(_SHARED)), (_MODELS,))


def first_own(
    frames: Iterable[tuple[str, int]], also: tuple[str, ...] = ()
) -> tuple[str, int] | None:
    """The first of some lines in the user's code, or in a folder of `also`."""
    for file, number in frames:
        if file.startswith(also) or not file.startswith(_FOREIGN):
            return file, number
    return None


def is_hidden(file: str) -> bool:
    """Whether frames of a file are hidden."""
    return file.startswith(_HIDDEN)


# Words of JAX's and NumPy's errors, in any version, when such fields are compared or hashed.
_COMPARED = re.compile(r"metadata fields|truth value of an array|__eq__|hash")
_INIT_FN = ("init_fn", "model_or_state")  # arguments that are functions of a key


def static_arrays(tree: PyTree, path: KeyPath = ()) -> Iterator[str]:
    """Yields the static fields of dataclasses in a tree that contain arrays."""
    # One level of the tree: its children, which are flattened no further.
    inner = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if any(child is tree for _, child in inner):  # a leaf
        return
    if dataclasses.is_dataclass(tree):
        children = {id(child) for _, child in inner}
        for field in dataclasses.fields(tree):
            value = getattr(tree, field.name, None)
            if id(value) not in children and _holds_array(value):
                where = show_path((*path, jax.tree_util.GetAttrKey(field.name)))
                yield f"{where} (field `{field.name}` of {type(tree).__name__})"
    for key, child in inner:
        yield from static_arrays(child, (*path, *key))


def _holds_array(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_array, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_array, value))
    # An array of one element has a truth value, so that it can be compared.
    return isinstance(value, np.ndarray | jax.Array) and value.size != 1


def explain_static_arrays(
    fn: Callable[..., object], error: Exception, args: tuple[object, ...], kwargs: dict[str, object]
) -> ValueError | None:
    """Returns the error to raise in place of an error of `fn(*args, **kwargs)` that static arrays
    caused."""
    texts = [str(each) for each in (error, error.__cause__, error.__context__)]
    if not any(map(_COMPARED.search, texts)):
        return None
    try:
        arguments = inspect.signature(fn).bind_partial(*args, **kwargs).arguments
        names = list(static_arrays(list(map(_model_of, arguments, arguments.values()))))
    except Exception:  # nothing may hide the error itself
        return None
    if not names:
        return None
    names = list(dict.fromkeys(name.split("/", 1)[1] for name in names))
    return ValueError(
        f"An array is in a static field: {several(names, 3)}. JAX compares static fields to find "
        "out whether it has compiled a function for them, and arrays have no single truth value. "
        "Remove `static=True`, and keep the array from being trained with `trainable`, or with "
        "`jax.lax.stop_gradient` where it is used; or store a tuple of numbers, such as "
        "`tuple(array.tolist())`."
    )


def _model_of(name: str, value: PyTree) -> PyTree:
    """Returns an argument, or the model if it is a function that creates one."""
    if name not in _INIT_FN or not callable(value) or jax.tree.leaves(value) != [value]:
        return value
    models: list[PyTree] = []
    jax.eval_shape(lambda key: models.append(value(key)), jax.random.key(0))
    return models[-1]
