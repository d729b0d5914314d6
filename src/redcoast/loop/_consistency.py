"""Checks that all processes run the same program on the same data."""

import functools as ft
import zlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..data._batches import Batches
from ..data._collate import CollateFn, describe_batch
from ..data._sources import count_examples
from ..distributed._kv_store import agree
from ..sharding import Plan
from ..tracking._loggers import code_version
from ..train._loss import LossFn
from ._evaluation import Evaluation
from ._setup import is_init_fn


def check_agreement(
    plan: Plan,
    model: PyTree,
    data: Batches,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    evaluation: Evaluation | None,
    **values: Any,
) -> None:
    """Raises `ValueError` on all processes if they are about to run different things.

    The error names what differs, and which process has what.

    **Arguments:**

    - `plan`: how the program is sharded; it follows from the program.
    - `model`: what the run begins with; of a function, the code is compared.
    - `collate_fn`, `loss_fn`: the code of these functions is compared.
    - `data`, `evaluation`: the number of their examples and the shapes of a batch are compared.
    - `values`: all else by name, as JSON can hold it.
    """
    if jax.process_count() == 1:
        return
    functions: dict[str, Any] = {"collate_fn": collate_fn, "loss_fn": loss_fn}
    functions |= {"init_fn": model} if is_init_fn(model) else {}
    lengths = {"examples": data.length}
    if evaluation is not None:
        own = {f"Evaluation.{x.name}": getattr(evaluation, x.name) for x in fields(evaluation)}
        lengths["Evaluation.examples"] = count_examples(own.pop("Evaluation.examples"))
        functions |= {x: own.pop(x) for x in list(own) if x.endswith("_fn")}
        values |= own
    values["mesh"] = dict(data.mesh.shape)
    agree(
        {
            **{f"the version of {name}": text for name, text in code_version().items()},
            **{f"`{name}`": value for name, value in values.items()},
            **{f"the number of `{name}`": length for name, length in lengths.items()},
            "what `collate_fn` returns": describe_batch(data.spec),
            **{f"the code of `{name}`": _code(fn) for name, fn in functions.items()},
            "the plan of the model": _checksum([plan.table().encode()]),
            "the values of the initial model": _checksum(_bytes(model)),
        }
    )


def _checksum(parts: Iterator[bytes] | list[bytes]) -> str:
    return f"{ft.reduce(lambda crc, part: zlib.crc32(part, crc), parts, 0):08x}"


def _bytes(model: PyTree) -> Iterator[bytes]:
    """The bytes of the arrays that each process has in full."""
    for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def _code(fn: Any) -> str | None:
    """A checksum of a function's code, without that of the functions it calls."""
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
