"""Processes that do not run the same thing are told so at the start, and not by a hang."""

import functools as ft
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..data._collate import describe_batch
from ..data._sources import count_examples
from ..distributed._kv_store import agree
from ..sharding import Plan
from ..tracking._run import code_version


def check_agreement(
    plan: Plan,
    model: PyTree,
    functions: Mapping[str, Callable[..., Any] | None],
    examples: Mapping[str, Any],
    batch: PyTree,
    **values: Any,
) -> None:
    """Makes sure that all processes are about to do the same.

    **Arguments:**

    - `plan`: how the program is split; it follows from the program.
    - `model`: what the run begins with.
    - `functions`: the user's, by name; of each the code is compared.
    - `examples`: the data, by name; of each the length is compared.
    - `batch`: a batch, or its shapes.
    - `values`: all else by name, as JSON can hold it.

    **Raises:**

    `ValueError` on all of them if they differ: it names what differs, and who has what.
    """
    if jax.process_count() == 1:
        return
    code = {f"the code of `{name}`": _code(fn) for name, fn in functions.items()}
    lengths = {f"the number of `{name}`": count_examples(x) for name, x in examples.items()}
    batches = {"what `collate_fn` returns": describe_batch(batch)}
    named = {f"`{name}`": value for name, value in values.items()}
    versions = {f"the version of {name}": text for name, text in code_version().items()}
    plans = {"the plan of the model": _checksum([str(plan).encode()])}
    models = {"the values of the initial model": _checksum(_bytes(model))}
    agree({**versions, **named, **lengths, **batches, **code, **plans, **models})


def _checksum(parts: Iterator[bytes] | list[bytes]) -> str:
    return f"{ft.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0):08x}"


def _bytes(model: PyTree) -> Iterator[bytes]:
    """The bytes of the arrays that each process has whole; of the others there is but one."""
    for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def _code(fn: Any) -> str | None:
    """A checksum of a function's code: not of what it calls."""
    while isinstance(fn, ft.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return None if code is None else _checksum(list(_instructions(code)))


def _instructions(code: Any) -> Iterator[bytes]:
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _instructions(constant)
        elif isinstance(constant, int | float | complex | str | bytes | None):
            yield repr(constant).encode()
