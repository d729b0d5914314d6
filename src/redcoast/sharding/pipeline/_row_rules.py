"""What operations do with the rows of a batch.

A dimension of rows may only be carried along. What sums, sorts, slices or numbers the rows would
give another result for a part of the batch than for all of it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import SupportsIndex

import jax

from ...core._jaxpr import is_inexact
from ..program._elementwise import ELEMENTWISE, PAIRWISE
from ..program._walk import REDUCTIONS
from ._row_states import SUM, Mixed, Pair, Rows, State, differing, join_rows

# Where the rows of an operation's results are, given those of its operands.
Rule = Callable[[Pair, Sequence[State]], State]


def apply_rule(pair: Pair, inputs: Sequence[State]) -> list[State]:
    """Where the rows of the results of an operation on rows, or on sums over rows, are."""
    name, count = pair.name, len(pair.few.outvars)
    if SUM in inputs:
        return [_linear(pair, inputs)] * count
    if name == "sharding_constraint":
        raise Mixed("it constrains the sharding of rows itself")
    if name == "random_bits" and inputs[0] is None:
        return [_draw(pair)]
    if name in _OF_KEYS:
        return [join_rows(pair, inputs)]
    if name in ELEMENTWISE or name in ("clamp", "copy"):
        return [_elementwise(pair, inputs)] * count
    if name in PAIRWISE:
        return list(inputs)
    if name in REDUCTIONS or name.startswith(("cum", "arg")):
        return [_reduction(pair, inputs)] * count
    if name not in _RULES:
        raise Mixed(f"`{name}` is applied to rows")
    return [_RULES[name](pair, inputs)] * count


def _linear(pair: Pair, inputs: Sequence[State]) -> State:
    """Sums of what parts of the batch add are only equal to the sum of all in a linear function."""
    name, sums = pair.name, [state is SUM for state in inputs]
    if any(isinstance(state, Rows) for state in inputs):
        raise Mixed(f"`{name}` combines a sum over rows with rows")
    fits = (
        (name in _OF_SUMS and sums[0])
        or (name in ("add", "add_any", "sub", "concatenate") and all(sums))
        or (name in ("mul", "dot_general") and sum(sums) == 1)
        or (name == "div" and sums == [True, False] and is_inexact(pair.few.outvars[0].aval))
        or (name == "select_n" and sums[0] is False and all(sums[1:]))
        or (name == "convert_element_type" and is_inexact(pair.few.outvars[0].aval))
    )
    if not fits:
        raise Mixed(f"`{name}` is applied to a sum over rows, and is not linear")
    return SUM


def _elementwise(pair: Pair, inputs: Sequence[State]) -> State:
    found, rank = join_rows(pair, inputs), len(pair.result)
    for place, state in enumerate(inputs):
        shape = pair.shape(place)
        # An array that all rows share has one element along the dimension of rows, or none.
        if not isinstance(found, Rows) or state is not None or not shape:
            continue
        if len(shape) != rank or shape[found.dim] != 1:
            raise Mixed(f"`{pair.name}` combines rows with an array of the same length")
    return found


def _reduction(pair: Pair, inputs: Sequence[State]) -> State:
    found, params = join_rows(pair, inputs), pair.params
    if not isinstance(found, Rows):
        raise Mixed(f"`{pair.name}` makes rows")
    axes = params.get("axes", params.get("dimensions", (params.get("axis"),)))
    if found.dim in axes and pair.name == "reduce_sum":
        return SUM
    if found.dim in axes:
        raise Mixed(f"`{pair.name}` reduces over rows")
    kept = pair.name.startswith("cum")
    return found if kept else found.at(found.dim - sum(a < found.dim for a in axes))


def _broadcast(pair: Pair, inputs: Sequence[State]) -> State:
    state, dims = inputs[0], pair.params["broadcast_dimensions"]
    return state.at(dims[state.dim]) if isinstance(state, Rows) else _made(pair)


def _made(pair: Pair) -> Rows:
    found = differing(pair.few.outvars[0].aval, pair.all.outvars[0].aval)
    if len(found) != 1:
        raise Mixed(f"`{pair.name}` makes an array whose size depends on the number of rows")
    return Rows(found[0], None)


def _iota(pair: Pair, inputs: Sequence[State]) -> State:
    found = _made(pair)
    if pair.params["dimension"] == found.dim:
        raise Mixed("`iota` numbers the rows")
    return found


def _reshape(pair: Pair, inputs: Sequence[State]) -> State:
    state = inputs[0]
    if pair.params.get("dimensions") is not None or not isinstance(state, Rows):
        raise Mixed("`reshape` makes rows")
    if state.outer is None:
        return _made(pair)
    shape, new = pair.shape(0), pair.result
    before = prod(shape[: state.dim]) * state.outer
    rows = shape[state.dim] // (state.outer * state.inner)
    made = _made(pair)
    outer, left = divmod(before, prod(new[: made.dim]))
    if left or new[made.dim] % (outer * rows):
        raise Mixed("`reshape` splits rows")
    return Rows(made.dim, outer, new[made.dim] // (outer * rows))


def _of_one(place: Callable[[Pair, int], SupportsIndex | None], why: str = "") -> Rule:
    """The rule of operations on the rows of their first operand alone.

    `place(pair, d)` is where the result has the dimension `d` of rows, or None: then `why` says
    what the operation does with them.
    """

    def rule(pair: Pair, inputs: Sequence[State]) -> State:
        state = inputs[0]
        if not isinstance(state, Rows) or any(inputs[1:]):
            raise Mixed(f"`{pair.name}` is applied to rows by rows")
        found = place(pair, state.dim)
        if found is None:
            raise Mixed(f"`{pair.name}` {why}")
        return state.at(found)

    return rule


def _squeezed(pair: Pair, d: int) -> int:
    return d - sum(one < d for one in pair.params["dimensions"])


def _expanded(pair: Pair, d: int) -> int:
    return [at for at in range(len(pair.result)) if at not in set(pair.params["dimensions"])][d]


def _sliced(pair: Pair, d: int) -> int | None:
    start, stop, step = (pair.params[key] for key in ("start_indices", "limit_indices", "strides"))
    taken = start[d], stop[d], 1 if step is None else step[d]
    return d if taken == (0, pair.shape(0)[d], 1) else None


def _convolved(pair: Pair, d: int) -> int | None:
    numbers = pair.params["dimension_numbers"]
    along = d != numbers.lhs_spec[0] or pair.params["batch_group_count"] > 1
    return None if along else numbers.out_spec[0]


def _along(key: str) -> Rule:
    """The rule of operations along dimensions, which those of rows may not be among."""

    def rule(pair: Pair, inputs: Sequence[State]) -> State:
        found = join_rows(pair, inputs)
        dims = pair.params[key]
        if not isinstance(found, Rows) or found.dim in ((dims,) if isinstance(dims, int) else dims):
            raise Mixed(f"`{pair.name}` is applied along rows")
        return found if len(inputs) == 1 else _all_rows(pair, inputs)

    return rule


def _all_rows(pair: Pair, inputs: Sequence[State]) -> State:
    if not all(inputs):
        raise Mixed(f"`{pair.name}` combines rows with an array of the same length")
    return join_rows(pair, inputs)


def _dynamic_update(pair: Pair, inputs: Sequence[State]) -> State:
    operand, update, *indices = inputs
    if any(indices):
        raise Mixed("`dynamic_update_slice` writes at a place that depends on rows")
    found = _all_rows(pair, [operand, update])
    if not isinstance(found, Rows) or pair.shape(0)[found.dim] != pair.shape(1)[found.dim]:
        raise Mixed("`dynamic_update_slice` writes some of the rows")
    return found


def _dot(pair: Pair, inputs: Sequence[State]) -> State:
    contracted, batched = pair.params["dimension_numbers"]
    places = []
    if _sums_rows(pair, inputs):
        return SUM
    for side, state in enumerate(inputs[:2]):
        if not isinstance(state, Rows):
            continue
        if state.dim in batched[side]:
            place = batched[side].index(state.dim)
            if inputs[1 - side] is None:
                raise Mixed("`dot_general` combines rows with an array of the same length")
        else:
            used = (*contracted[side], *batched[side])
            free = [d for d in range(len(pair.shape(side))) if d not in used]
            ahead = len(pair.shape(0)) - len(contracted[0]) if side else len(batched[0])
            place = ahead + free.index(state.dim)
        places.append(state.at(place))
    return join_rows(pair, places)


def _sums_rows(pair: Pair, inputs: Sequence[State]) -> bool:
    """Whether a product sums over the rows of both operands."""
    (ours, theirs), _ = pair.params["dimension_numbers"]
    one, other = inputs[:2]
    pairs = (one, ours), (other, theirs)
    summed = [isinstance(state, Rows) and state.dim in dims for state, dims in pairs]
    if not any(summed):
        return False
    if not (isinstance(one, Rows) and isinstance(other, Rows) and all(summed)):
        raise Mixed("`dot_general` sums over rows with an array of the same length")
    if ours.index(one.dim) != theirs.index(other.dim):
        raise Mixed("`dot_general` combines rows with other rows")
    join_rows(pair, [one, other.at(one.dim)])
    return True


def _gather(pair: Pair, inputs: Sequence[State]) -> State:
    operand, indices = inputs
    numbers, sizes = pair.params["dimension_numbers"], pair.params["slice_sizes"]
    outer = [d for d in range(len(pair.result)) if d not in numbers.offset_dims]
    batching = numbers.operand_batching_dims
    if not isinstance(operand, Rows):
        if not isinstance(indices, Rows):
            raise Mixed("`gather` makes rows")
        if indices.dim in numbers.start_indices_batching_dims:
            raise Mixed("`gather` combines rows with an array of the same length")
        return indices.at(outer[indices.dim])
    if operand.dim in batching:
        place = numbers.start_indices_batching_dims[batching.index(operand.dim)]
        if not isinstance(indices, Rows) or indices.dim != place:
            raise Mixed("`gather` indexes rows by other rows")
        return join_rows(pair, [operand.at(outer[place]), indices.at(outer[place])])
    dropped = (*numbers.collapsed_slice_dims, *batching, *numbers.start_index_map)
    if indices is not None or operand.dim in dropped:
        raise Mixed("`gather` takes some of the rows")
    if sizes[operand.dim] != pair.shape(0)[operand.dim]:
        raise Mixed("`gather` takes some of the rows")
    gone = (*numbers.collapsed_slice_dims, *batching)
    windows = [d for d in range(len(sizes)) if d not in gone]
    return operand.at(numbers.offset_dims[windows.index(operand.dim)])


def _scatter(pair: Pair, inputs: Sequence[State]) -> State:
    operand, indices, updates = inputs
    numbers = pair.params["dimension_numbers"]
    if not isinstance(operand, Rows) or not isinstance(updates, Rows):
        raise Mixed("`scatter` writes rows to an array of the same length")
    rank = len(pair.shape(2))
    if operand.dim in numbers.operand_batching_dims:
        place = numbers.scatter_indices_batching_dims[
            numbers.operand_batching_dims.index(operand.dim)
        ]
        outer = [d for d in range(rank) if d not in numbers.update_window_dims]
        fits = isinstance(indices, Rows) and indices.dim == place and updates.dim == outer[place]
    else:
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        windows = [d for d in range(len(pair.shape(0))) if d not in gone]
        fits = (
            indices is None
            and operand.dim in windows
            and operand.dim not in numbers.scatter_dims_to_operand_dims
            and numbers.update_window_dims[windows.index(operand.dim)] == updates.dim
        )
    if not fits:
        raise Mixed(f"`{pair.name}` writes some of the rows")
    return join_rows(pair, [operand, updates.at(operand.dim)])


def _attention(pair: Pair, inputs: Sequence[State]) -> State:
    if any(isinstance(state, Rows) and state.dim != 0 for state in inputs):
        raise Mixed("attention is applied along rows")
    return join_rows(pair, inputs)


def _draw(pair: Pair) -> State:
    """Random numbers that differ from row to row."""
    if str(pair.few.invars[0].aval.dtype) != "key<fry>":  # pyright: ignore[reportAttributeAccessIssue]
        raise Mixed(
            "it draws random numbers for rows with another generator than JAX's default, "
            "`threefry2x32`"
        )
    if not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        raise Mixed("it draws random numbers for rows, and `jax_threefry_partitionable` is off")
    return Rows(_made(pair).dim)


# Of keys whose leading dimensions are rows, these have results with the same dimensions.
_OF_KEYS = frozenset(
    ["random_bits", "random_fold_in", "random_split", "random_unwrap", "random_wrap"]
)
# The linear functions of one operand.
_OF_SUMS = frozenset(
    """
    broadcast_in_dim copy expand_dims neg reduce_sum reshape slice squeeze stop_gradient transpose
    """.split()  # noqa: SIM905
)
_RULES: dict[str, Rule] = {
    "bitcast_convert_type": _of_one(
        lambda pair, d: d if d < min(len(pair.shape(0)), len(pair.result)) else None, "divides rows"
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _of_one(_convolved, "is applied along rows"),
    "dot_general": _dot,
    "dot_product_attention_fwd_wrapper": _attention,
    "dynamic_slice": _of_one(
        lambda pair, d: d if pair.params["slice_sizes"][d] == pair.shape(0)[d] else None,
        "takes some of the rows",
    ),
    "dynamic_update_slice": _dynamic_update,
    "expand_dims": _of_one(_expanded),
    "gather": _gather,
    "iota": _iota,
    "pad": _of_one(
        lambda pair, d: None if any(pair.params["padding_config"][d]) else d, "adds rows"
    ),
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
    "slice": _of_one(_sliced, "takes some of the rows"),
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _of_one(_squeezed),
    "top_k": _of_one(
        lambda pair, d: d if (pair.params.get("axis", -1) - d) % len(pair.shape(0)) else None,
        "is applied along rows",
    ),
    "transpose": _of_one(lambda pair, d: pair.params["permutation"].index(d)),
}
