"""Functions on the host that `jax.vmap` calls once for all elements.

With `vmap_method="expand_dims"` or `"broadcast_all"`, `jax.pure_callback` calls its function with
all elements along leading dimensions. The traced program does not say which calls are such: a
function that gets an entire batch without `vmap` looks alike, and may combine its rows. JAX's rule
for `vmap` is therefore replaced by one that does the same, and marks the function.
"""

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.interpreters.batching import fancy_primitive_batchers as rules_for_vmap

# With these, the function acts on each element along the dimensions that `vmap` adds.
_FOR_ALL_AT_ONCE = ("expand_dims", "broadcast_all")


@dataclass(frozen=True)
class OfEach:
    """A function on the host that acts on each element along its `levels` first dimensions."""

    fn: Callable[..., Sequence[Any]]
    levels: int

    def __call__(self, *arrays: object) -> Sequence[Any]:
        return self.fn(*arrays)


def independent_levels(equation: JaxprEqn) -> int:
    """How many leading dimensions a function on the host acts on each element along."""
    callback = equation.params.get("callback")
    if isinstance(callback, OfEach):
        return callback.levels
    return 0


@ft.cache
def mark_mapped_callbacks() -> None:
    """Makes `jax.vmap` mark the functions that it calls once for all elements."""
    # The primitive has no public name. A trace shows it, without a call of `abs`.
    probe = jax.make_jaxpr(lambda x: jax.pure_callback(abs, x, x))(1.0)
    primitive = probe.eqns[0].primitive
    rule = rules_for_vmap[primitive]

    def marked_rule(
        axis: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any
    ) -> tuple[Sequence[Any], Sequence[int | None]]:
        callback = params["callback"]
        is_mapped = any(dim is not None for dim in dims)
        if is_mapped and params["vmap_method"] in _FOR_ALL_AT_ONCE:
            # Each `vmap` around another one adds a dimension.
            fn, levels = callback, 0
            if isinstance(callback, OfEach):
                fn, levels = callback.fn, callback.levels
            params["callback"] = OfEach(fn, levels + 1)
        return rule(axis, args, dims, **params)

    rules_for_vmap[primitive] = marked_rule
