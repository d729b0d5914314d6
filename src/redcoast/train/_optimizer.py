"""What an optimizer of optax is given, what it must return, and which cannot be used."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ..core._errors import several


def refuse_per_example(opt_state: PyTree) -> None:
    """Refuses the state of an optimizer that takes the gradient of each example."""
    kind = optax.contrib.DifferentiallyPrivateAggregateState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    if any(isinstance(x, kind) for x in nodes):
        raise ValueError(
            "`optimizer` holds `optax.contrib.differentially_private_aggregate`, which takes the "
            "gradient of each example; a training step computes that of their mean. Compute the "
            "gradients in a step of your own, `jax.vmap(jax.grad(loss), (None, 0))(params, batch)` "
            "with the loss of one example, and compile it with `redcoast.compile_step`."
        )


def refuse_optimizer_states(params: PyTree, kind: type) -> None:
    """Refuses a model of which an optimizer's state, in a `kind` or by itself, would be trained."""
    ends = lambda x: isinstance(x, kind) or _is_of_optax(x)
    held = lambda x: x.opt_state if isinstance(x, kind) else x if _is_of_optax(x) else None
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=ends)
    names = [_name(path) for path, x in nodes if jax.tree.leaves(held(x))]
    if names:
        raise TypeError(
            "The model holds the state of an optimizer, which would be trained as if it were "
            f"parameters, at {several(names)}. Of a `TrainState`, pass `state.model`; or leave out "
            "the optimizer's state by `trainable`. Several `TrainState`s are trained by a step of "
            "your own, compiled with `redcoast.compile_step`."
        )


def _is_of_optax(x: Any) -> bool:
    kind = type(x)
    named = issubclass(kind, tuple) and kind.__name__.endswith("State")
    return named and kind.__module__.split(".")[0] == "optax"


def call_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extras: Any,
) -> tuple[PyTree, PyTree]:
    """`optimizer.update` with those of the extra arguments that it takes."""
    update = optax.with_extra_args_support(optimizer).update
    refused: list[str] = []
    while True:
        try:
            updates, new_state = update(grads, opt_state, params, **extras)
            break
        except (AttributeError, TypeError, ValueError) as error:
            # `optax.chain` takes all arguments and passes them to parts that do not, so that
            # nothing but calling it says which.
            match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if isinstance(error, TypeError) and match and match[1] in extras:
                del extras[match[1]]
                refused.append(match[1])
                continue
            _check_same(optimizer, opt_state, params, error)
            if refused and "missing" in str(error):
                raise TypeError(
                    f"A part of `optimizer` takes no `{'`, no `'.join(refused)}`, and without them "
                    f'another one raised "{error}". Wrap the part that takes none, so that optax '
                    "passes it none: `optax.GradientTransformation(part.init, part.update)`."
                ) from error
            raise
    _check_shapes(updates, params)
    return updates, new_state


def _check_shapes(updates: PyTree, params: PyTree) -> None:
    """Refuses what `optax.apply_updates` would broadcast."""
    if jax.tree.structure(updates) != jax.tree.structure(params):
        return  # `optax.apply_updates` says so, or takes it
    for (where, shape), (_, wanted) in zip(_shapes(updates), _shapes(params), strict=True):
        if shape != wanted:
            raise ValueError(
                f"`optimizer` returned an update of shape {shape} for the parameter at {where}, "
                f"of shape {wanted}. They must have the same shape. Optimizers that take the "
                "gradient of each example cannot be used here: a training step computes that of "
                "their mean."
            )


def _check_same(
    optimizer: optax.GradientTransformation, opt_state: PyTree, params: PyTree, error: Exception
) -> None:
    """Says where the state differs from that which the optimizer makes of the parameters."""
    expected = jax.eval_shape(optimizer.init, params)
    wanted, given = dict(_shapes(expected)), dict(_shapes(opt_state))
    same = jax.tree.structure(expected) == jax.tree.structure(opt_state)
    if same and wanted == given:
        return
    differ = [where for where in wanted if wanted[where] != given.get(where, wanted[where])]
    parts = {
        "lacks": [where for where in wanted if where not in given],
        "has besides": [where for where in given if where not in wanted],
        "has other shapes at": differ,
    }
    said = ", and ".join(f"{words} {several(names)}" for words, names in parts.items() if names)
    raise ValueError(
        "`optimizer` is not the one that the state was made with, or `trainable` selects other "
        f"leaves: the optimizer's state {said or 'has other nodes'}. Pass both as they were passed "
        "to `init_state`."
    ) from error


def _shapes(tree: PyTree) -> list[tuple[str, tuple[int, ...]]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(_name(path), jnp.shape(x)) for path, x in leaves]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "its root"
