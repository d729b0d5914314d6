"""Operations that read or write at indices."""

from jax.extend.core import JaxprEqn

from ._rule import Dimension, Factors, Rule, each_alone, shape_of, together


def gather_rule(equation: JaxprEqn) -> Rule:
    """An indexed dimension is reduced: each part contributes the elements that it has."""
    factors, numbers = Factors(), equation.params["dimension_numbers"]
    before = shape_of(equation.invars[0])
    operand = factors.of(before)
    indices = factors.of(shape_of(equation.invars[1]))
    batching = numbers.operand_batching_dims
    for d, i in zip(batching, numbers.start_indices_batching_dims, strict=True):
        indices[i] = operand[d]
    indexed_dims = (*numbers.collapsed_slice_dims, *batching)
    window = [d for d in range(len(before)) if d not in indexed_dims]
    places = dict(zip(sorted(numbers.offset_dims), window, strict=True))
    rest = iter(indices[:-1])
    result: list[Dimension] = []
    partial: list[Dimension] = []  # a part of these is read
    for at, size in enumerate(shape_of(equation.outvars[0])):
        if at not in places:
            result.append(next(rest))
            continue
        d = places[at]
        result.append(operand[d])
        if size != before[d]:
            partial.append(operand[d])
    collapsed = [operand[d] for d in numbers.collapsed_slice_dims]
    return factors.rule(
        [operand, indices],
        [result],
        reduced=collapsed,
        whole=[indices[-1], *partial],
        indexed=[*collapsed, *partial],
        linear=each_alone(0),
    )


def scatter_rule(equation: JaxprEqn) -> Rule:
    """The dimensions that count the updates are summed over, or are needed as a whole where an
    update overwrites what was there."""
    factors, numbers = Factors(), equation.params["dimension_numbers"]
    before, written = shape_of(equation.invars[0]), shape_of(equation.invars[2])
    operand = factors.of(before)
    indices = factors.of(shape_of(equation.invars[1]))
    batching = numbers.operand_batching_dims
    indexed_batching = numbers.scatter_indices_batching_dims
    for d, i in zip(batching, indexed_batching, strict=True):
        indices[i] = operand[d]
    indexed_dims = (*numbers.inserted_window_dims, *batching)
    window = [d for d in range(len(before)) if d not in indexed_dims]
    places = dict(zip(sorted(numbers.update_window_dims), window, strict=True))
    rest = iter(indices[:-1])
    updates: list[Dimension] = []
    partial: list[Dimension] = []  # a part of these is written, which `parts` have
    parts: list[Dimension] = []
    for at, size in enumerate(written):
        if at not in places:
            updates.append(next(rest))
            continue
        d = places[at]
        if size == before[d]:
            updates.append(operand[d])
        else:
            updates.append(factors.new(size))
            partial.append(operand[d])
            parts.append(updates[-1])
    counted = [x for i, x in enumerate(indices[:-1]) if i not in indexed_batching]
    adds = equation.primitive.name in ("scatter-add", "scatter_add")
    overwrites = equation.primitive.name == "scatter"
    return factors.rule(
        [operand, indices, updates],
        [operand],
        reduced=[] if overwrites else counted,
        moved=partial,
        whole=[indices[-1], *parts, *(counted if overwrites else [])],
        indexed=[*partial, *(operand[d] for d in numbers.inserted_window_dims)],
        sums=adds,
        linear=(frozenset([0, 2]),) if adds or overwrites else (),
        writes=2,
    )


def dynamic_update_slice_rule(equation: JaxprEqn) -> Rule:
    factors = Factors()
    before, part = shape_of(equation.invars[0]), shape_of(equation.invars[1])
    operand = factors.of(before)
    update: list[Dimension] = []
    written: list[Dimension] = []
    partial: list[Dimension] = []
    for dimension, size, of in zip(operand, part, before, strict=True):
        if size == of:
            update.append(dimension)
        else:
            partial.append(factors.new(size))
            update.append(partial[-1])
            written.append(dimension)
    places = [factors.of(shape_of(atom)) for atom in equation.invars[2:]]
    return factors.rule(
        [operand, update, *places],
        [operand],
        moved=written,
        whole=partial,
        indexed=written,
        linear=together(2),
        writes=1,
    )
