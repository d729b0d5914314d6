"""Plans the arrays of a training state: the optimizer's state is sharded like the parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...core._train_state import AbstractTrainState
from ._leaf_plans import LeafPlan, Reason, trim_spec
from ._leaves import Leaf, flat_leaves, key_name

Path = tuple[str, ...]


def plan_leaves(tree: PyTree, model: list[LeafPlan], sizes: Mapping[str, int]) -> list[LeafPlan]:
    """Returns the plan of each array, in flattened order; `model` has those of the model alone.

    The optimizer's state and an average of the weights are sharded like the parameters; `sizes` are
    those of the axes over which its square statistics of matrices are divided.
    """
    if model_of(tree) is tree:
        return model
    by_path = {plan.leaf.path: plan for plan in model}
    updated = elementwise_states(tree)
    of_model = iter(model)  # in the order of the leaves, which the state keeps
    plans: list[LeafPlan] = []
    for leaf in flat_leaves(tree):
        # A training state is a class of ours, so that no user chooses these names.
        field_name = leaf.path[0]
        if field_name == "model":
            plan = next(of_model)
            plans.append(replace(plan, leaf=replace(plan.leaf, index=leaf.index)))
        elif field_name == "opt_state":
            plan = _like_parameter(leaf, by_path, sizes)
            if leaf.path in updated:
                plan = _in_parts(by_path[updated[leaf.path].path]) or plan
            plans.append(LeafPlan(leaf, *plan, "optimizer state"))
        elif field_name == "average":
            plans.append(LeafPlan(leaf, *_like_parameter(leaf, by_path, sizes), "other"))
        else:
            plans.append(LeafPlan(leaf, P(), _not_sharded(leaf, "not a parameter"), "other"))
    return plans


def _not_sharded(leaf: Leaf, why: str) -> Reason:
    if not leaf.shape:
        why = "scalar"
    return Reason("replicated", why)


def model_of(tree: PyTree) -> PyTree:
    """The model of a training state, or the tree itself if it is not a training state."""
    if isinstance(tree, AbstractTrainState):
        return tree.model
    return tree


def _like_parameter(
    state: Leaf, by_path: Mapping[Path, LeafPlan], sizes: Mapping[str, int]
) -> tuple[P, Reason]:
    """The spec of an array of the optimizer's state or of an average, and the reason for it.

    Optimizers keep their arrays in trees like the parameters', so the path of an array ends with
    the path of its parameter. If it ends with several paths, the longest is used.
    """
    candidates = list(_candidates(state, by_path))
    for plan, rest in candidates:
        spec = _matching_spec(state, plan, rest)
        if spec is not None:
            return spec, Reason("follows", f"sharded like {plan.leaf.name or 'the model'}")
    # A path fits and no shape, as that of the products of one side of a matrix.
    if candidates and candidates[0][0].leaf.path:
        name = candidates[0][0].leaf.name
        spec = _divided_statistics(state, candidates[0][0].leaf, sizes)
        if spec is not None:
            return spec, Reason("follows", f"statistics of {name}, divided over all devices")
        return P(), Reason("replicated", f"its sharding cannot be inferred from that of {name}")
    return P(), _not_sharded(state, "belongs to no parameter")


# States of optax whose arrays are updated element by element. What other parts of an optimizer
# compute, such as the norm of a gradient, is a sum over parts.
_ELEMENTWISE = (
    optax.EmaState,
    optax.ScaleByAdamState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByLionState,
    optax.ScaleByRmsState,
    optax.ScaleByRssState,
    optax.ScaleByRStdDevState,
    optax.TraceState,
)


def elementwise_states(tree: PyTree) -> dict[Path, Leaf]:
    """The arrays of a training state's optimizer that it updates element by element, by path, each
    with its parameter."""
    if model_of(tree) is tree:
        return {}
    parameters = {leaf.path: leaf for leaf in flat_leaves(tree.model)}
    updated: dict[Path, Leaf] = {}
    for path, state in _nodes(tree.opt_state, _ELEMENTWISE):
        updated |= _by_parameter(path, state, parameters)
    # Sums of gradients over several steps, from which such states are updated.
    for path, state in _nodes(tree.opt_state, optax.MultiStepsState):
        sums = _by_parameter((*path, "acc_grads"), state.acc_grads, parameters)
        of_updated = set(updated.values())
        for place, parameter in sums.items():
            if parameter in of_updated:
                updated[place] = parameter
    return updated


def _nodes(opt_state: PyTree, kinds: type | tuple[type, ...]) -> Iterator[tuple[Path, Any]]:
    """The parts of an optimizer's state that are of some types, with their paths."""

    def is_of_kind(node: PyTree) -> bool:
        return isinstance(node, kinds)

    for path, node in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_of_kind):
        if is_of_kind(node):
            yield ("opt_state", *map(key_name, path)), node


def _by_parameter(prefix: Path, state: PyTree, parameters: Mapping[Path, Leaf]) -> dict[Path, Leaf]:
    """The arrays of a part of the state that have the shape of their parameter, with it."""
    by_path: dict[Path, Leaf] = {}
    for leaf in flat_leaves(state):
        # The longest end of the path that is a parameter's.
        starts = range(len(leaf.path) + 1)
        start = next((i for i in starts if leaf.path[i:] in parameters), None)
        if start is None:
            continue
        parameter = parameters[leaf.path[start:]]
        if parameter.shape == leaf.shape:
            by_path[*prefix, *leaf.path] = parameter
    return by_path


def _in_parts(parameter: LeafPlan) -> tuple[P, Reason] | None:
    """The spec of an array that is updated as the elements of a parameter are, and the reason;
    None if it is divided as the parameter is."""
    spec = parameter.update_spec
    if spec is None or spec == parameter.spec:
        return None
    name = parameter.leaf.name or "the model"
    return spec, Reason("follows", f"each device updates its part of {name}")


def _candidates(state: Leaf, by_path: Mapping[Path, LeafPlan]) -> Iterator[tuple[LeafPlan, Path]]:
    """The parameters that an array may belong to, the likeliest first, and the rest of its path.

    The rest is a number for SM3, which numbers its accumulators by dimension. A model that is one
    array has the empty path.
    """
    # Longer ends come before shorter ones: a layer may have the name of the whole model.
    ends: list[tuple[Path, Path]] = [(state.path, ())]
    if state.path and state.path[-1].isdecimal():
        ends.append((state.path[:-1], state.path[-1:]))
    for path, rest in ends:
        for start in range(len(path)):
            if path[start:] in by_path:
                yield by_path[path[start:]], rest
    if () in by_path:
        yield by_path[()], ()


def _matching_spec(state: Leaf, parameter: LeafPlan, rest: Path) -> P | None:
    """The spec of a state whose shape follows from its parameter's; None if it does not."""
    # Specs end with their last sharded dimension; here all dimensions have an entry.
    shape, like = state.shape, parameter.leaf.shape
    entries = (*parameter.spec, *(None,) * (len(like) - len(parameter.spec)))
    if rest:
        dim = int(rest[0])
        if shape != like[dim : dim + 1]:
            return None
        return trim_spec(entries[dim : dim + 1])
    if shape == like:
        return parameter.spec
    # Some optimizers keep a history of states as leading dimensions.
    extra = len(shape) - len(like)
    if extra > 0 and shape[extra:] == like:
        return trim_spec((None,) * extra + entries)
    if extra == 0 and all(own in (1, size) for own, size in zip(shape, like, strict=True)):
        # Statistics over some dimensions, which are kept with size one.
        kept = list(entries)
        for d, own in enumerate(shape):
            if own <= 1:
                kept[d] = None
        return trim_spec(kept)
    # A placeholder, as Adafactor has for vectors.
    if prod(shape) == 1:
        return P()
    if extra == -1:
        return _without_one(state, like, entries)
    return None


def _divided_statistics(state: Leaf, parameter: Leaf, sizes: Mapping[str, int]) -> P | None:
    """The spec of square matrices with the products of one side of a parameter's matrices, such as
    SOAP keeps; None if the array is of another kind, or the devices do not divide it.

    Each device computes with some of the matrices, and so stores them.
    """
    *stack, rows, columns = (1, 1, *state.shape)  # also of arrays of less than two dimensions
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    count = prod(sizes.values())
    is_square = len(state.shape) > 1 and rows == columns > 0
    if not axes or not is_square or parameter.size % (prod(stack) * rows):
        return None
    for d in range(len(state.shape) - 1):  # the matrices, and then the rows of each
        if state.shape[d] % count == 0:
            return P(*(None,) * d, axes)
    return None


def _without_one(state: Leaf, like: tuple[int, ...], entries: tuple[object, ...]) -> P | None:
    """The spec of an array with one dimension less, such as the row means of Adafactor."""
    specs: set[P] = set()
    for d in range(len(like)):
        if like[:d] + like[d + 1 :] == state.shape:
            specs.add(trim_spec(entries[:d] + entries[d + 1 :]))
    if len(specs) == 1:
        return specs.pop()
    if not specs:
        return None
    # With equal sizes, the shape does not tell which dimension was removed. Adafactor removes
    # the largest for its rows, and the second largest for its columns.
    by_size = np.argsort(like)
    if "v_row" in state.path:
        removed = int(by_size[-1])
    elif "v_col" in state.path:
        removed = int(by_size[-2])
    else:
        return None
    return trim_spec(entries[:removed] + entries[removed + 1 :])
