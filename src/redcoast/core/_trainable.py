"""Partitions a model into trainable and frozen leaves, for each form of `trainable`."""

import difflib
import inspect
import re
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ._errors import several
from ._pytree import ARRAYS, is_layer_state, is_none, join, map_where, show_path, split

_FORMS = (
    "It must be a function of the model that returns a part of it, such as `lambda m: "
    "m.layers[-1]`; a function of a leaf, or of a path and a leaf, that returns a boolean; "
    "patterns of paths; or a tree like the model of booleans and such functions of a leaf, one for "
    "each leaf or for a part of the model."
)


def partition_trainable(model: PyTree, trainable: PyTree) -> tuple[PyTree, PyTree]:
    """Partitions a model into its trainable leaves and all others, as `eqx.partition` does."""
    trainable = _as_filter(model, trainable)
    try:
        selected, _ = eqx.partition(model, trainable)
    except ValueError as error:
        described = _does_not_fit(model, trainable)
        if described is None:
            raise
        raise described from error
    # A part that a filter selects may have integers, and states that the loss updates itself.
    mask = jax.tree.map(
        lambda x: not is_layer_state(x) and eqx.is_inexact_array(x),
        selected,
        is_leaf=lambda x: x is None or is_layer_state(x),
    )
    return eqx.partition(model, mask)


def abstract_trainable(model: PyTree, trainable: PyTree) -> PyTree:
    """The shapes and dtypes of the trainable leaves of a model, concrete or abstract.

    As in `partition_trainable`, other leaves are `None`.
    """
    arrays, static = split(model)
    # Filters such as `eqx.is_inexact_array` recognise abstract arrays only inside a trace.
    params = lambda arrays: partition_trainable(join(arrays, static), trainable)[0]
    return jax.eval_shape(params, arrays)


def trainable_arrays(model: PyTree, trainable: PyTree) -> list[bool]:
    """Whether the optimizer trains each array of a model, concrete or abstract."""
    leaves = jax.tree.leaves(model, is_leaf=is_none)
    params = jax.tree.leaves(abstract_trainable(model, trainable), is_leaf=is_none)
    are_trained: list[bool] = []
    for x, param in zip(leaves, params, strict=True):
        if isinstance(x, ARRAYS):
            are_trained.append(param is not None)
    return are_trained


def refuse_filter_of_numpy(model: PyTree, trainable: PyTree) -> None:
    """Raises if `trainable` selects a NumPy array only once it is an array of JAX, or vice versa.

    Training converts the NumPy arrays of a model, and applies `trainable` before and after.
    """
    arrays, _ = split(model)
    if not any(isinstance(x, np.ndarray) and eqx.is_inexact_array(x) for x in arrays):
        return
    # By place, since one array may be at several places of a model.
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_none)
    params, _ = partition_trainable(model, trainable)
    params_before = jax.tree.leaves(params, is_leaf=is_none)
    # Inside of a trace, all arrays are those of JAX.
    params_after = jax.tree.leaves(abstract_trainable(model, trainable), is_leaf=is_none)
    changed: list[str] = []
    for (path, x), before, after in zip(leaves, params_before, params_after, strict=True):
        if isinstance(x, np.ndarray) and (before is None) != (after is None):
            changed.append(show_path(path))
    if changed:
        raise ValueError(
            f"`trainable` selects other leaves once the NumPy arrays at {several(changed, 3)} are "
            "arrays of JAX, to which training converts them. It may test the type of a leaf, as "
            "`isinstance(x, jax.Array)` does. Select leaves by path, such as with "
            f"`trainable=lambda path, x: path != {changed[0]!r}`, or by a tree of booleans."
        )


def _as_filter(model: PyTree, trainable: PyTree) -> PyTree:
    """Converts each form of `trainable` to a filter for `eqx.partition`."""
    if trainable is eqx.is_inexact_array:
        return trainable
    if isinstance(trainable, str | re.Pattern):
        return _matching(model, [trainable])
    if isinstance(trainable, list | tuple) and _are_patterns(trainable):
        return _matching(model, trainable)
    if not (callable(trainable) and jax.tree_util.all_leaves([trainable])):
        return _plain_booleans(trainable)
    if _required_arguments(trainable) == 2:
        return _of_leaves(model, lambda path, x: trainable(show_path(path), x))
    # A function of one argument may be of the model or of a leaf. It is tried with the model.
    try:
        chosen = trainable(model)
    except Exception as error:  # a function of a leaf
        return _of_leaves(model, lambda _, x: trainable(x), of_model=error)
    if _is_boolean(chosen):
        return _of_leaves(model, lambda _, x: trainable(x))
    leaves = jax.tree.leaves(chosen)
    if leaves and all(map(_is_boolean, leaves)):
        return _plain_booleans(chosen)
    return _part(model, trainable, chosen)


def _is_boolean(x: object) -> bool:
    return isinstance(x, bool | np.bool_)


def _plain_booleans(mask: PyTree) -> PyTree:
    """A mask without booleans of NumPy, which comparisons return, and Equinox does not take."""
    return map_where(_is_boolean, bool, mask)


def _are_patterns(items: Sequence[object]) -> bool:
    return bool(items) and all(isinstance(x, str | re.Pattern) for x in items)


def _required_arguments(fn: Callable[..., object]) -> int:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # functions implemented in C may have no signature
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(x.kind in kinds and x.default is inspect.Parameter.empty for x in parameters)


def _of_leaves(
    model: PyTree, select: Callable[[KeyPath, PyTree], object], *, of_model: Exception | None = None
) -> PyTree:
    """Returns a mask with the result of a function for each path and floating array.

    `of_model` is the error that the function raised for the model itself.
    """

    def choose(path: KeyPath, x: PyTree) -> bool:
        if not eqx.is_inexact_array(x):
            return False
        where = show_path(path, "its root")
        try:
            chosen = select(path, x)
        except Exception as error:
            before = ""
            if of_model is not None:
                before = f"{_shown(of_model)} for the model, and "
            raise ValueError(
                f"The function `trainable` raised {before}{_shown(error)} for the leaf at {where}. "
                f"{_FORMS}"
            ) from (of_model or error)
        if not _is_boolean(chosen):
            raise ValueError(
                f"The function `trainable` returned {type(chosen).__name__} for the leaf at "
                f"{where}. {_FORMS}"
            )
        return bool(chosen)

    return jax.tree_util.tree_map_with_path(choose, model)


def _shown(error: Exception) -> str:
    first = str(error).strip().split("\n")[0].removesuffix(".")
    return f"{type(error).__name__} ({first})"


def _part(model: PyTree, select: Callable[[PyTree], PyTree], chosen: PyTree) -> PyTree:
    """A mask of the part of a model that a function returned, `chosen`."""
    leaves, structure = jax.tree.flatten(model)
    # A model may contain an array several times, and the selected part may contain it once.
    apart = list(map(_stand_in, leaves))
    try:
        of_apart = jax.tree.leaves(select(structure.unflatten(apart)))
    except Exception:  # it may need the arrays themselves
        of_apart = []
    candidates = ((apart, of_apart), (leaves, jax.tree.leaves(chosen)))
    for leaves_of_model, leaves_of_part in candidates:
        # Arrays that the function computed, such as slices, are no part of the model.
        ids = set(map(id, leaves_of_part))
        if ids and ids <= set(map(id, leaves_of_model)):
            return structure.unflatten([id(x) in ids for x in leaves_of_model])
    kind = "nothing"
    if jax.tree.leaves(chosen):
        kind = f"a value of type {type(chosen).__name__}"
    raise ValueError(
        f"The function `trainable` returned {kind} for the model, which is not a part "
        f"of it. {_FORMS}"
    )


def _stand_in(x: PyTree) -> PyTree:
    """A distinct array with the shape and dtype of another, which takes no memory."""
    if not eqx.is_inexact_array(x):
        return x
    # A view of one element, with strides of 0.
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def _matching(model: PyTree, patterns: Sequence[str | re.Pattern[str]]) -> PyTree:
    """A mask of the leaves whose paths match one of the patterns."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    names = [show_path(path) for path, x in leaves if eqx.is_inexact_array(x)]
    chosen: set[str] = set()
    for pattern in patterns:
        if isinstance(pattern, str):
            text = pattern
        else:  # it is compiled
            text = pattern.pattern
        try:
            matched = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ValueError(
                f"The pattern {text!r} of `trainable` is not a regular expression: {error}."
            ) from error
        if not matched:
            close = difflib.get_close_matches(text, names, n=5, cutoff=0.3) or names[:5]
            raise ValueError(
                f"The pattern {text!r} of `trainable` matches no path of a floating array. Among "
                f"the {len(names)} paths are: {', '.join(close) or 'none at all'}."
            )
        chosen |= matched
    return jax.tree_util.tree_map_with_path(lambda path, _: show_path(path) in chosen, model)


def _does_not_fit(model: PyTree, trainable: PyTree) -> ValueError | None:
    """Returns an error that explains why `trainable` does not fit, for common mistakes."""
    filters = dict(jax.tree_util.tree_leaves_with_path(trainable, is_leaf=is_none))
    parts: set[KeyPath] = set()  # all places in the model, leaves and what holds them
    lacking: list[str] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(model):
        # A filter at any of these decides about the leaf.
        prefixes = [path[:length] for length in range(len(path) + 1)]
        parts.update(prefixes)
        if filters.keys().isdisjoint(prefixes):
            lacking.append(show_path(path, "its root"))
    wrong: list[str] = []
    nowhere: list[str] = []
    for path, select in filters.items():
        if not (isinstance(select, bool) or callable(select)):
            wrong.append(show_path(path, "its root"))
        if path not in parts:
            nowhere.append(show_path(path, "its root"))
    faults: list[str] = []
    if wrong:
        faults.append(f"neither a boolean nor a function at {several(sorted(wrong))}")
    if lacking:
        faults.append(f"nothing for {several(sorted(lacking))}")
    if nowhere:
        places = several(sorted(nowhere))
        faults.append(f"something at {places}, where the model has nothing")
    if not faults:
        return None
    return ValueError(f"`trainable` does not fit the model: it has {'; '.join(faults)}. {_FORMS}")
