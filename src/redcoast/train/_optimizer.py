"""Calls an optax optimizer, and checks its state and its updates."""

import inspect
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from ..core._errors import noting, several
from ..core._pytree import map_where, show_path


def refuse_per_example(opt_state: PyTree) -> None:
    """Raises an error for optimizers that need the gradient of each example."""
    kind = optax.contrib.DifferentiallyPrivateAggregateState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    if any(isinstance(x, kind) for x in nodes):
        raise ValueError(
            "`optimizer` contains `optax.contrib.differentially_private_aggregate`, which needs "
            "the gradient of each example, but a training step computes only the gradient of their "
            "mean. Compute the gradients in a custom step, "
            "`jax.vmap(jax.grad(loss), (None, 0))(params, batch)` with the loss of one example, "
            "and compile it with `redcoast.compile_step`."
        )


def refuse_optimizer_states(params: PyTree, kind: type) -> None:
    """Raises an error if an optimizer state, alone or in a `kind`, is among the parameters."""

    def is_end(x: object) -> bool:
        return isinstance(x, kind) or _is_optax_state(x)

    names: list[str] = []
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_end):
        opt_state = None
        if isinstance(x, kind):
            opt_state = x.opt_state
        elif _is_optax_state(x):
            opt_state = x
        if jax.tree.leaves(opt_state):
            names.append(show_path(path, "its root"))
    if names:
        raise TypeError(
            f"The model contains an optimizer state at {several(names)}, which would be trained "
            "like parameters. Instead of a `TrainState`, pass `state.model`, or exclude the "
            "optimizer state with `trainable`. To train several `TrainState`s, write a custom step "
            "and compile it with `redcoast.compile_step`."
        )


def _is_optax_state(x: object) -> bool:
    kind = type(x)
    # Optax has no common class for its states, which are named tuples.
    named = issubclass(kind, tuple) and kind.__name__.endswith("State")
    return named and kind.__module__.split(".")[0] == "optax"


def call_init(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Calls `optimizer.init`, and notes what it was called with if it raises an error."""
    names = list(_shapes(params))
    note = (
        f"Raised by `optimizer.init`, for the trainable leaves of the model: {several(names)}. "
        "Masks and labels are trees like the model, or functions that return one for it, such as "
        "`lambda params: jax.tree.map(lambda x: x.ndim > 1, params)`."
    )
    with noting(note):
        return numbers_to_arrays(optimizer.init(params))


def numbers_to_arrays(opt_state: PyTree) -> PyTree:
    """Converts the Python numbers of an optimizer state to arrays, as `jax.jit` does.

    An update returns arrays in their place, such as for a lowest loss that begins at `jnp.inf`.
    """

    def is_number(x: object) -> bool:
        return isinstance(x, int | float | complex) and not isinstance(x, np.generic)

    # With a dtype, since an array without one would be weakly typed.
    return map_where(is_number, lambda x: jnp.asarray(x, jnp.result_type(x)), opt_state)


def call_update(
    optimizer: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    on_demand: Mapping[str, PyTree],
    **extras: PyTree,
) -> tuple[PyTree, PyTree]:
    """Calls `optimizer.update` with the extra arguments that it accepts, and with those of
    `on_demand` that it cannot do without."""
    update = optimizer.update
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        extras = _named_by(update, extras)
    refused: list[str] = []
    while True:
        try:
            updates, new_state = update(grads, opt_state, params, **extras)
        except (AttributeError, TypeError, ValueError) as error:
            # `optax.chain` accepts all arguments and passes them to its parts, which may not
            # accept them. Calling it is the only way to find out.
            match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if isinstance(error, TypeError) and match and match[1] in extras:
                del extras[match[1]]
                refused.append(match[1])
                continue
            missing = re.search(r"(\w+) must be provided", str(error))
            tried = (*extras, *refused)
            if missing and missing[1] in on_demand and missing[1] not in tried:
                extras[missing[1]] = on_demand[missing[1]]
                continue
            _check_opt_state(optimizer, opt_state, params, error)
            if refused and "missing" in str(error):
                raise TypeError(
                    f"A part of `optimizer` does not accept `{'` and `'.join(refused)}`, but "
                    f'without them another part raised "{error}". Wrap the first part, so that '
                    "optax does not pass them to it: "
                    "`optax.GradientTransformation(part.init, part.update)`."
                ) from error
            raise
        _check_shapes(updates, params)
        # An optimizer without a state of its own returns the arrays of another's as they are.
        before = {id(x) for x in jax.tree.leaves(opt_state)}
        if any(id(x) in before for x in jax.tree.leaves(new_state)):
            _check_opt_state(optimizer, opt_state, params, None)
        return updates, new_state


def _named_by(update: Callable[..., PyTree], extras: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Those of the extra arguments that a function has as parameters.

    Optax would call it without any, and a user's function that a loop calls by hand may have some.
    """
    try:
        parameters = inspect.signature(update).parameters
    except ValueError:  # functions implemented in C may have no signature
        return {}
    # The first three are the gradient, the state and the parameters, whatever their names.
    names = list(parameters)[3:]
    return {name: value for name, value in extras.items() if name in names}


def constant_hyperparameters(opt_state: PyTree) -> dict[str, float]:
    """The values of `optax.inject_hyperparams` that follow no schedule, by their names."""

    def is_injected(x: object) -> bool:
        return hasattr(x, "hyperparams") and hasattr(x, "hyperparams_states")

    constants: dict[str, float] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_injected):
        if not is_injected(node):
            continue
        of_part = ""
        if path:
            of_part = f" of {show_path(path)}"
        for name, value in node.hyperparams.items():
            if name not in node.hyperparams_states and not jnp.ndim(value):
                constants[f"{name}{of_part}"] = float(value)
    return constants


def initial_hyperparameters(
    optimizer: optax.GradientTransformation, params: PyTree
) -> dict[str, float]:
    """Those of a new state of an optimizer; none if it cannot be made for empty parameters."""
    # Hyperparameters do not depend on the sizes, and a state of full size would need memory.
    empty = jax.tree.map(lambda x: jnp.zeros((0,) * x.ndim, x.dtype), params)
    try:
        return constant_hyperparameters(optimizer.init(empty))
    except Exception:  # of an optimizer that computes with the sizes of parameters
        return {}


def _check_shapes(updates: PyTree, params: PyTree) -> None:
    """Raises an error for missing updates, and those that `optax.apply_updates` would broadcast."""
    shapes = _shapes(updates)
    for where, expected in _shapes(params).items():
        if where not in shapes:
            raise ValueError(
                f"`optimizer` returned no update for the parameter at {where}. Return zeros for "
                "parameters that do not change, as `optax.set_to_zero` does, or leave them out "
                "with `trainable`."
            )
        shape = shapes[where]
        if shape != expected:
            raise ValueError(
                f"`optimizer` returned an update of shape {shape} for the parameter at {where}, "
                f"of shape {expected}. They must have the same shape. Optimizers that need the "
                "gradient of each example cannot be used: a training step computes only the "
                "gradient of their mean."
            )


def _check_opt_state(
    optimizer: optax.GradientTransformation,
    opt_state: PyTree,
    params: PyTree,
    error: Exception | None,
) -> None:
    """Raises an error if the state differs from the one that the optimizer initialises.

    `error` is the one that the update raised, if it did.
    """
    # Only where there is a reason, since it traces the optimizer again.
    expected = jax.eval_shape(optimizer.init, params)
    same = error is None or jax.tree.structure(expected) == jax.tree.structure(opt_state)
    if same and _shapes(expected) == _shapes(opt_state):
        return
    raise ValueError(
        "`optimizer` is not the one that the state was created with, or `trainable` selects other "
        f"leaves: the optimizer state {differences(expected, opt_state)}. Pass the same "
        "`optimizer` and `trainable` as to `init_state`."
    ) from error


def differences(expected: PyTree, other: PyTree) -> str:
    """A verb phrase that says what another state of an optimizer lacks, and has besides."""
    expected_shapes, shapes = _shapes(expected), _shapes(other)
    missing: list[str] = []
    differ: list[str] = []
    for where, shape in expected_shapes.items():
        if where not in shapes:
            missing.append(where)
        elif shapes[where] != shape:
            differ.append(where)
    more = [where for where in shapes if where not in expected_shapes]
    verbs = {"lacks": missing, "also has": more, "has other shapes at": differ}
    phrases = [f"{verb} {several(names)}" for verb, names in verbs.items() if names]
    return ", and ".join(phrases) or "has another structure"


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {show_path(path, "its root"): jnp.shape(x) for path, x in leaves}
