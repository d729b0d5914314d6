"""Layers with state, such as BatchNorm, whose state a loss has to return."""

import functools as ft
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

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
    """Explains how a loss returns the state of layers, for the library of the states in the
    trees."""
    states: list[object] = []
    for tree in trees:
        states += layer_states(tree).values()
    of_library = _EQUINOX
    if states and not isinstance(states[0], eqx.nn.State):
        of_library = _NNX
    return (
        "The state of layers, such as the running averages of BatchNorm, is a part of the model, "
        f"and the updated model is the third value: `return loss, aux, model`. {of_library}"
    )


def warn_of_kept_state(model: PyTree) -> None:
    """Warns that the state of a model's layers is never updated.

    It is called if the loss returns no model.
    """
    states = {path: x for path, x in layer_states(model).items() if jax.tree.leaves(x)}
    # Layers in inference mode are meant to keep their state.
    if not states or _is_frozen(model):
        return
    kinds = several(sorted({f"`{type(x).__name__}`" for x in states.values()}))
    warn(
        f"`loss_fn` returned no model, but its argument `model` has state of layers ({kinds}, at "
        f"{several([path or 'its root' for path in states], 3)}), which is now the same at every "
        f"step: running averages are not updated, and an evaluation uses their initial values. "
        f"{how_to_return(model)} If the state is to stay as it is, return the model that "
        "`loss_fn` was given."
    )


def warn_of_outer_state(loss_fn: object, model: PyTree) -> None:
    """Warns if a loss reads the state of a model's layers that is not in its arguments."""
    if layer_states(model) or not _layers_with_state(model) or _is_frozen(model):
        return
    if any(isinstance(x, eqx.nn.State) for x in _values_read(loss_fn)):
        warn(
            "`loss_fn` reads an `eqx.nn.State` that is not in its argument `model`, and which is "
            "the same at every step: running averages, as in BatchNorm, are not updated, "
            f"and an evaluation uses their initial values. {how_to_return()} If the layers should "
            "only read it, pass `eqx.nn.inference_mode(model)`."
        )


def _values_read(fn: PyTree) -> Iterator[object]:
    """The values of the closure of a function, and of the globals that its code loads."""
    if inspect.ismethod(fn):
        yield from _values_read(fn.__func__)
    elif isinstance(fn, ft.partial):
        yield from (*fn.args, *fn.keywords.values())
        yield from _values_read(fn.func)
    elif isinstance(fn, FunctionType):
        yield from (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
        for cell in fn.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the name is not bound yet
                continue
        # A script's loss usually reads its globals.
        for name in _names_of(fn.__code__):
            yield fn.__globals__.get(name)
    elif hasattr(fn, "__wrapped__"):  # such as a jitted function
        yield from _values_read(fn.__wrapped__)


def _names_of(code: CodeType) -> Iterator[str]:
    """Yields the global names and attributes that a function, and functions inside it, use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _layers_with_state(model: PyTree) -> list[eqx.Module]:
    nodes = jax.tree.leaves(model, is_leaf=_has_state_index)
    # Without the arrays between the layers.
    return list(filter(_has_state_index, nodes))


def returns_state(value: PyTree) -> bool:
    """Whether the value that a loss returned as `aux` looks like a state or a model."""
    leaves = jax.tree.leaves(value, is_leaf=_is_state_or_module)
    return any(map(_is_state_or_module, leaves))


def _is_state_or_module(x: object) -> bool:
    return isinstance(x, eqx.Module) or is_layer_state(x)


def _is_frozen(model: PyTree) -> bool:
    """Whether all layers with an `eqx.nn.State` are in inference mode, in which they only read."""
    layers = _layers_with_state(model)
    return bool(layers) and all(getattr(x, "inference", None) is True for x in layers)


def _has_state_index(x: object) -> bool:
    """Whether a module itself, and not one inside it, has a `StateIndex`."""
    if not isinstance(x, eqx.Module):
        return False
    # Modules inside have fields of their own, which are looked at by themselves.
    fields = jax.tree.leaves(list(vars(x).values()), is_leaf=lambda y: isinstance(y, eqx.Module))
    return any(isinstance(y, eqx.nn.StateIndex) for y in fields)
