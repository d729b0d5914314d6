"""Specs for an optimizer's state: each array is sharded like its parameter."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
from jax.sharding import PartitionSpec as P

from ._leaves import Leaf
from ._reason import Reason


def follow_parameters(
    states: Sequence[Leaf], parameters: Sequence[Leaf], specs: Mapping[int, P]
) -> dict[int, tuple[P, Reason]]:
    """The spec of each array of the state (by index), and the reason for it.

    Optimizers keep their arrays in trees like the parameters', so the path of an array ends with
    the path of its parameter. If it ends with several paths, the longest is used.
    """
    by_path = {leaf.path: leaf for leaf in parameters}
    return {state.index: _follow(state, by_path, specs) for state in states}


def _follow(
    state: Leaf, by_path: Mapping[tuple[str, ...], Leaf], specs: Mapping[int, P]
) -> tuple[P, Reason]:
    candidates = list(_candidates(state, by_path))
    for parameter, rest in candidates:
        spec = _matching_spec(state, parameter, rest, specs[parameter.index])
        if spec is not None:
            return spec, Reason("follows", f"sharded like {parameter.name or 'the model'}")
    if not candidates or not candidates[0][0].path:
        text = "belongs to no parameter" if state.shape else "scalar"
    else:
        text = f"its sharding cannot be inferred from that of {candidates[0][0].name}"
    return P(), Reason("replicated", text)


def _candidates(
    state: Leaf, by_path: Mapping[tuple[str, ...], Leaf]
) -> Iterator[tuple[Leaf, tuple[str, ...]]]:
    """The parameters that an array may belong to, the likeliest first, and the rest of its path.

    The rest is a number for SM3, which numbers its accumulators by dimension. A model that is one
    array has the empty path.
    """
    for path, rest in ((state.path, ()), (state.path[:-1], state.path[-1:])):
        if not rest or rest[0].isdigit():
            starts = (path[start:] for start in range(len(path)))
            yield from ((by_path[end], rest) for end in starts if end in by_path)
    if () in by_path:
        yield by_path[()], ()


def _matching_spec(state: Leaf, parameter: Leaf, rest: tuple[str, ...], spec: P) -> P | None:
    shape, like = state.shape, parameter.shape
    entries = (*spec, *(None,) * (len(like) - len(spec)))
    if rest:
        dim = int(rest[0])
        return trim_spec(entries[dim : dim + 1]) if shape == like[dim : dim + 1] else None
    if shape == like:
        return spec
    extra = len(shape) - len(like)
    if extra > 0 and shape[extra:] == like:
        return trim_spec((None,) * extra + entries)
    if len(shape) == len(like) and all(s in (1, size) for s, size in zip(shape, like, strict=True)):
        return trim_spec(tuple(e if s > 1 else None for s, e in zip(shape, entries, strict=True)))
    if prod(shape) == 1:
        return P()
    return _without_one(state, like, entries) if extra == -1 else None


def _without_one(state: Leaf, like: tuple[int, ...], entries: tuple) -> P | None:
    """The spec of an array with one dimension less, such as the row means of Adafactor."""
    removed = [d for d in range(len(like)) if like[:d] + like[d + 1 :] == state.shape]
    specs = {trim_spec(entries[:d] + entries[d + 1 :]) for d in removed}
    if len(specs) > 1:
        # With equal sizes, the shape does not tell which dimension was removed. Adafactor removes
        # the largest for its rows, and the second largest for its columns.
        order = [int(d) for d in np.argsort(like)]
        dropped = order[-1] if "v_row" in state.path else order[-2]
        adafactor = "v_row" in state.path or "v_col" in state.path
        specs = {trim_spec(entries[:dropped] + entries[dropped + 1 :])} if adafactor else set()
    return specs.pop() if specs else None


def trim_spec(entries: tuple) -> P:
    """A spec without trailing Nones, because `P("model") != P("model", None)`."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return P(*entries)
