"""Scanning over layers of several kinds, whose arrays are stacked for each kind."""

import functools as ft
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._inputs import Key
from ._scan_layers import (
    Remat,
    default_unroll,
    has_cache,
    is_by_layer,
    layer_arrays,
    scan_layers,
    with_remat,
)


@dataclass(frozen=True)
class RepeatedLayers:
    """Consecutive layers whose kinds repeat."""

    pattern: tuple[str, ...]  # the kinds of one period
    repeats: int  # the number of periods
    before: tuple[str, ...]  # the kinds of all layers before them

    def fold(self, array: Array, first: int, each: int) -> Array:
        """Returns the layers from `first` on, `each` in a period: `"repeats each ..."`."""
        count = self.repeats * each
        if count < array.shape[0]:  # a slice of all would be a copy
            array = array[first : first + count]
        return array.reshape(self.repeats, each, *array.shape[1:])


def repeated_layers(kinds: Sequence[str]) -> list[RepeatedLayers]:
    """Divides layers into parts, from the first on: each is the longest whose kinds repeat."""
    parts, start = [], 0
    while start < len(kinds):
        period, repeats = 1, 1
        for size in range(1, (len(kinds) - start) // 2 + 1):
            pattern, count = kinds[start : start + size], 1
            while kinds[start + count * size : start + (count + 1) * size] == pattern:
                count += 1
            # The pattern that covers most layers; of several, the shortest.
            if count > 1 and size * count > period * repeats:
                period, repeats = size, count
        pattern = tuple(kinds[start : start + period])
        parts.append(RepeatedLayers(pattern, repeats, tuple(kinds[:start])))
        start += period * repeats
    return parts


def scan_kinds(
    layer_fn: Callable[..., tuple[Array, PyTree]],
    x: Float[Array, "..."],
    stacks: Mapping[str, PyTree],
    kinds: Sequence[str],
    *,
    inputs: PyTree = None,
    cache: PyTree = None,
    key: Key = None,
    remat: Remat = "none",
    unroll: int | None = None,
) -> tuple[Float[Array, "..."], PyTree]:
    """Applies layers of several kinds one after the other to the residual stream.

    Where the kinds repeat, one iteration of a loop runs the layers of a period.

    - `layer_fn`: `layer_fn(kind, x, cache, layer, inputs, index, key)` returns the residual stream
        and the cache after a layer. `layer` is one slice of the arrays of its kind, and `index` its
        number among the layers of its kind.
    - `stacks`: for each kind, a PyTree whose arrays are stacked over its layers along their first
        dimension, or are `ByLayer`s.
    - `inputs`: a PyTree whose arrays are stacked over all layers, or None.
    - `cache`, `key`, `remat`, `unroll`: as for `scan_layers`.

    Returns the residual stream and the cache after the last layer.
    """
    # One for each layer, in the order of the layers, whatever their kinds are.
    keys = None
    if key is not None:
        keys = jax.random.split(key, len(kinds))
    if any(map(is_by_layer, jax.tree.leaves(dict(stacks), is_leaf=is_by_layer))):
        for position, kind in enumerate(kinds):
            nth = kinds[:position].count(kind)
            layer = layer_arrays(stacks[kind], nth)
            of_all = jax.tree.map(lambda a, position=position: a[position], (inputs, keys))
            x, cache = layer_fn(kind, x, cache, layer, of_all[0], np.int32(nth), of_all[1])
        return x, cache
    unroll = unroll or default_unroll(dict(stacks), len(kinds), has_cache=has_cache(cache))
    for part in repeated_layers(kinds):
        # Where the layers of each kind begin in the stack of their kind.
        before, slices = Counter(part.before), {}
        for kind, each in Counter(part.pattern).items():
            fold = ft.partial(part.fold, first=before[kind], each=each)
            slices[kind] = jax.tree.map(fold, stacks[kind])
        of_all = ft.partial(part.fold, first=len(part.before), each=len(part.pattern))
        layers = slices, jax.tree.map(of_all, (inputs, keys))
        run = ft.partial(_run_period, layer_fn, part, remat)
        if part.repeats == 1:
            first = jax.tree.map(lambda a: a[0], layers)
            x, cache = run(x, cache, first, jnp.zeros((), jnp.int32), None)
        else:
            periods = max(1, unroll // len(part.pattern))
            x, cache = scan_layers(run, x, layers, cache=cache, unroll=periods)
    return x, cache


def _run_period(layer_fn, part, remat, x, cache, layers, number, key):
    """Runs the layers of the period with this number; a `layer_fn` of `scan_layers`."""
    slices, of_all = layers
    counts, before = Counter(part.pattern), Counter(part.before)
    # A loop whose iteration has one layer keeps its backward pass separate.
    prevent_cse = len(part.pattern) > 1 or part.repeats == 1
    for position, kind in enumerate(part.pattern):
        nth = part.pattern[:position].count(kind)
        layer = jax.tree.map(lambda a, nth=nth: a[nth], slices[kind])
        inputs, key = jax.tree.map(lambda a, position=position: a[position], of_all)
        index = before[kind] + number * counts[kind] + nth  # among the layers of its kind
        run = with_remat(ft.partial(layer_fn, kind), remat, prevent_cse=prevent_cse)
        x, cache = run(x, cache, layer, inputs, index, key)
    return x, cache
