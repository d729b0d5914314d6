"""Layers with state, such as BatchNorm, whose state a loss has to return."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._errors import several
from ..core._frames import warn
from ..core._pytree import is_layer_state, layer_states

_EQUINOX = (
    "With Equinox, the model is the pair `(net, state)` that `eqx.nn.make_with_state` returns, and "
    "the loss ends with `return loss, {}, (net, state)`."
)
_NNX = (
    "With Flax NNX, the loss ends with `return loss, {}, nnx.split(module)[1]`, or with "
    "`return loss, {}, module` if the model is the module itself."
)


def how_to_return(*trees: PyTree) -> str:
    """How a loss returns the state of layers, for the library of the states in the trees."""
    states = [x for tree in trees for x in layer_states(tree).values()]
    is_nnx = bool(states) and not isinstance(states[0], eqx.nn.State)
    return (
        "The state of layers, such as the running averages of BatchNorm, is a part of the model, "
        f"and the updated model is the third value: `return loss, aux, model`. "
        f"{_NNX if is_nnx else _EQUINOX}"
    )


def warn_of_kept_state(model: PyTree) -> None:
    """Warns that the state of a model's layers stays as it is, if they would update it.

    It is called for a loss that returns no model.
    """
    states = {path: x for path, x in layer_states(model).items() if jax.tree.leaves(x)}
    if not states or _is_frozen(model):
        return
    kinds = several(sorted({f"`{type(x).__name__}`" for x in states.values()}))
    warn(
        f"`loss_fn` returned no model, but its argument `model` has state of layers ({kinds}, at "
        f"{several([path or 'its root' for path in states], 3)}), which is now the same at every "
        f"step: running averages do not move, and an evaluation uses their first values. "
        f"{how_to_return(model)} If the state is to stay as it is, return the model that "
        "`loss_fn` was given."
    )


def returns_state(value: Any) -> bool:
    """Whether what a loss returned in the place of `aux` is meant as state or as a model."""
    leaves = jax.tree.leaves(value, is_leaf=_is_state_or_module)
    return any(map(_is_state_or_module, leaves))


def _is_state_or_module(x: Any) -> bool:
    return isinstance(x, eqx.Module) or is_layer_state(x)


def _is_frozen(model: PyTree) -> bool:
    """Whether all layers with an `eqx.nn.State` are in inference mode, in which they only read."""
    layers = jax.tree.leaves(model, is_leaf=_has_state_index)
    layers = [x for x in layers if _has_state_index(x)]
    return bool(layers) and all(getattr(x, "inference", None) is True for x in layers)


def _has_state_index(x: Any) -> bool:
    """Whether a module itself, and not one inside it, has a `StateIndex`."""
    if not isinstance(x, eqx.Module):
        return False
    inside = lambda y: isinstance(y, eqx.Module)
    fields = jax.tree.leaves(list(vars(x).values()), is_leaf=inside)
    return any(isinstance(y, eqx.nn.StateIndex) for y in fields)
