"""Checks that processes which share a model decode the same prompts."""

from dataclasses import Field, fields

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PyTree

from ..core._program_lines import describe_array
from ..distributed._agreement import Listing, agree
from ._request import Request


def check_same_prompts(
    model: PyTree,
    tokens: Array | np.ndarray,
    mask: Array | np.ndarray | None,
    request: Request,
) -> None:
    """Raises `ValueError` on all processes if their prompts, masks or options differ.

    A process whose own devices have the entire model decodes independently, and is not compared.
    """
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    if jax.process_count() == 1 or all(_is_addressable(x) for x in arrays):
        return
    options = {f"the option `{field.name}`": _describe(request, field) for field in fields(request)}
    agree(options, {"`tokens`": _rows("tokens", tokens), "`mask`": _rows("mask", mask)})


def _describe(request: Request, field: Field) -> str:
    value = getattr(request, field.name)
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return describe_array(value)
    if callable(value):
        # The text of a function has its address, which differs.
        return getattr(value, "__qualname__", type(value).__qualname__)
    return repr(value)


def _rows(name: str, x: Array | np.ndarray | None) -> Listing:
    """One line for each row that this process has in full."""
    if x is None or not _is_addressable(x):
        return Listing([])
    return Listing([f"{name}[{i}]: {describe_array(row)}" for i, row in enumerate(np.asarray(x))])


def _is_addressable(x: Array | np.ndarray) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_addressable
