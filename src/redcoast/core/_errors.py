"""Argument checks that raise errors in full sentences, and notes added to errors."""

import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ._donation import refuse_deleted_argument

_LONGEST = 200  # letters of a name or a value in a message


def check_functions(**functions: object) -> None:
    """Raises `TypeError` if a value is not callable."""
    for name, fn in functions.items():
        if not callable(fn):
            raise wrong_type(name, fn, "a function")


def check_integer(name: str, value: Any, *, least: int | None = 1, most: int | None = None) -> int:
    """Returns an integer of Python; raises `TypeError` or `ValueError` for other values."""
    try:
        # Also of NumPy's integers.
        number = operator.index(value)
    except TypeError:
        raise wrong_type(name, value, "an integer") from None
    # A bool is an int in Python.
    if isinstance(value, bool):
        raise wrong_type(name, value, "an integer")
    if least is not None and number < least:
        raise ValueError(f"`{name}` is {value}. It must be at least {least}.")
    if most is not None and number > most:
        raise ValueError(f"`{name}` is {number:,}. It must be at most {most:,}.")
    return number


def check_number(
    name: str,
    value: object,
    *,
    above: int | float | None = None,
    least: int | float | None = None,
    finite: bool = False,
) -> None:
    """Raises `TypeError` or `ValueError` unless `value` is a number within the limits."""
    # NumPy's numbers are real numbers too, and so is a bool.
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise wrong_type(name, value, "a number")
    if above is not None and not value > above:
        raise ValueError(f"`{name}` is {value}. It must be more than {above}.")
    if least is not None and not value >= least:
        raise ValueError(f"`{name}` is {value}. It must be at least {least}.")
    # NaN is not less than anything.
    if finite and not abs(value) < math.inf:
        raise ValueError(f"`{name}` is {value}. It must be a finite number.")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `TypeError` or `ValueError` unless `value` is one of these texts."""
    words = " or ".join(map(repr, choices))
    if not isinstance(value, str):
        raise wrong_type(name, value, words)
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}. It must be {words}.")


def check_optimizer(optimizer: object, *, name: str = "optimizer") -> None:
    # By its methods, since optimizers of other libraries need not be of optax's class.
    if not all(callable(getattr(optimizer, method, None)) for method in ("init", "update")):
        words = "an optax optimizer, such as `optax.adamw(3e-4)`"
        raise wrong_type(name, optimizer, words)


def check_key(key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != jnp.uint32:
        raise wrong_type("key", key, "a JAX key, such as `jax.random.key(0)`")
    refuse_deleted_argument("key", key)
    # A key without a type, as `jax.random.PRNGKey` makes it, is an array of its numbers.
    dimensions = int(not typed)
    if jnp.ndim(key) != dimensions:
        raise ValueError(
            f"`key` is an array of keys, of shape {jnp.shape(key)}, such as `jax.random.split` "
            "returns. Pass one of them."
        )
    # A new function, since JAX keeps traces, and the user may have set another implementation.
    expected = jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape
    if not typed and jnp.shape(key) != expected:
        raise ValueError(
            f"`key` has {jnp.size(key)} numbers and no type, and keys without a type have "
            f"{expected[0]}, as of JAX's default implementation. Pass a key with a type, such as "
            '`jax.random.key(0, impl="rbg")`.'
        )


def check_mesh(mesh: object) -> None:
    check_kind("mesh", mesh, (Mesh, AbstractMesh), "a mesh, as `redcoast.make_mesh` returns")


def check_kind(name: str, value: object, kind: type | tuple[type, ...], words: str) -> None:
    """Raises `TypeError` unless `value` is an instance of `kind`, described by `words`."""
    if not isinstance(value, kind):
        raise wrong_type(name, value, words)


def local_path(name: str, path: str | os.PathLike[str]) -> Path:
    """The path of a file or a directory of this machine, with `~` expanded.

    Raises `ValueError` for an address such as `s3://bucket/run`, of which `Path` makes a local
    directory, and `TypeError` for what is no path.
    """
    check_kind(name, path, (str, os.PathLike), "a path")
    text = os.fspath(path)
    address = re.match(r"([A-Za-z][A-Za-z0-9+.-]+:)/", text)
    # `Path("s3://bucket")` is "s3:/bucket", and a directory may have such a name.
    if address and ("://" in text or not Path(address[1]).exists()):
        raise ValueError(
            f"`{name}` is {text!r}, an address, and only paths of file systems are supported. Pass "
            "a local path, or the path at which the store is mounted, as with gcsfuse or s3fs."
        )
    return Path(path).expanduser()


def absolute_path(name: str, path: str | os.PathLike[str]) -> Path:
    """As `local_path`, as an absolute path, which a later `os.chdir` does not change.

    Raises `FileNotFoundError` for a relative path if the working directory has been deleted.
    """
    local = local_path(name, path)
    try:
        return local.absolute()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"`{name}` is {str(local)!r}, relative to the working directory, which has been "
            "deleted. Pass an absolute path, or change to a directory that exists."
        ) from None


def wrong_type(name: str, value: object, words: str) -> TypeError:
    # The `repr` of an array or an object could be longer than the sentence, or fail.
    shown = f"of type {type_name(value)}"
    if value is None or isinstance(value, int | float | str):
        text = repr(value)
        if len(text) < 50:
            shown = text
    return TypeError(f"`{name}` is {shown}. It must be {words}.")


def type_name(value: object) -> str:
    """The name of a value's type, as users know it: arrays of JAX have private classes."""
    if isinstance(value, jax.Array):
        return "jax.Array"
    return type(value).__name__


def several(names: Sequence[str], most: int = 8, *, separator: str = ", ", noun: str = "") -> str:
    """Formats names as `a, b, c`; of many, the first ones and how many more there are."""
    more = ""
    if len(names) > most:
        more = f" and {len(names) - most} more{noun}"
    short: list[str] = []
    for name in names[:most]:
        if len(name) > 5 * _LONGEST:  # it may be a list of names
            name = f"{name[: 5 * _LONGEST]}..."
        short.append(name)
    return separator.join(short) + more


class noting:  # used like a function; a generator would take longer in each step
    """Adds notes to any exception that is raised inside, unless it has them already."""

    def __init__(self, note: str | Callable[[BaseException], list[str]]):
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.add_to(error)

    def add_to(self, error: BaseException) -> None:
        if isinstance(self._note, str):
            notes = [self._note]
        else:
            notes = self._note(error)
        for text in notes:
            # A loss that takes training steps itself is inside two that would say the same.
            if text not in getattr(error, "__notes__", []):
                error.add_note(text)


def short_repr(value: object) -> str:
    """Formats a value as `repr` does; a long one by its beginning and its length."""
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} letters)"


def listed(items: list[int], most: int = 32) -> str:
    """Formats a list as `[1, 2, 3]`; a long one as its first items and the number of the rest."""
    more = ""
    if len(items) > most:
        more = f" and {len(items) - most} more"
    return f"{items[:most]}{more}"


def in_units(size: int | float, unit: int | float) -> str:
    """Formats a size with two decimals; one that is smaller than the unit with four."""
    decimals = 4
    if size >= unit or size == 0:
        decimals = 2
    return f"{size / unit:,.{decimals}f}"
