"""Products that sum over dimensions: dot products, attention and convolutions."""

from jax.extend.core import JaxprEqn

from ._rule import Dimension, Factors, Rule, each_alone, shape_of


def dot_general_rule(equation: JaxprEqn) -> Rule:
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    factors = Factors()
    left = factors.of(shape_of(equation.invars[0]))
    right = factors.of(shape_of(equation.invars[1]))
    for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        right[b] = left[a]
    left_free = [x for d, x in enumerate(left) if d not in (*left_sum, *left_batch)]
    right_free = [x for d, x in enumerate(right) if d not in (*right_sum, *right_batch)]
    result = [*(left[d] for d in left_batch), *left_free, *right_free]
    summed = [left[d] for d in left_sum]
    both = each_alone(0, 1)
    return factors.rule([left, right], [result], reduced=summed, sums=True, linear=both)


def ragged_dot_rule(equation: JaxprEqn) -> Rule:
    """Each group of rows is multiplied by its own matrix; the groups are needed as a whole."""
    factors = Factors()
    left, right, *rest = [factors.of(shape_of(atom)) for atom in equation.invars]
    (result,) = [factors.of(shape_of(var)) for var in equation.outvars]
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    if numbers is None or len(left) != 2 or len(right) != 3:
        unknown = [x for array in (left, right, *rest, result) for x in array]
        return factors.rule([left, right, *rest], [result], whole=unknown)
    right[1] = left[1]
    groups = [right[0], *(x for array in rest for x in array)]
    return factors.rule(
        [left, right, *rest],
        [[left[0], right[2]]],
        reduced=[left[1]],
        whole=groups,
        blocked=groups,
        indexed=[left[0]],
        sums=True,
        linear=each_alone(0, 1),
    )


def fused_attention_rule(equation: JaxprEqn) -> Rule:
    """cuDNN's attention and its backward pass: the batch and the heads are carried.

    Queries, keys, values and results are (batch, sequence, heads, head_dim). A key head serves
    several adjacent query heads.
    """
    factors = Factors()
    query = shape_of(equation.invars[0])
    batch, heads = factors.new(query[0]), factors.new(query[2])
    whole: list[Dimension] = []

    def dimensions(shape: tuple[int, ...]) -> list[Dimension]:
        array = factors.of(shape)
        if len(shape) == 4 and (shape[0], shape[3]) == (query[0], query[3]):
            array[0], array[2] = batch, heads
        else:
            # Biases are (batch, heads, queries, keys), softmax statistics (batch, heads, queries).
            for d, dimension, size in ((0, batch, query[0]), (1, heads, query[2])):
                if shape[d : d + 1] == (size,):
                    array[d] = dimension
        whole.extend(x for x in array if x not in (batch, heads))
        return array

    operands = [dimensions(shape_of(atom)) for atom in equation.invars]
    results = [dimensions(shape_of(var)) for var in equation.outvars]
    return factors.rule(operands, results, whole=whole)


def convolution_rule(equation: JaxprEqn) -> Rule:
    """Space is moved, since each element depends on its neighbours. Groups are the slower factor
    of both channel dimensions."""
    factors, params = Factors(), equation.params
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    image = factors.of(shape_of(equation.invars[0]))
    kernel = factors.of(shape_of(equation.invars[1]))
    after = shape_of(equation.outvars[0])
    result: list[Dimension] = [()] * len(after)
    batch, channel = spec.lhs_spec[:2]
    out, into = spec.rhs_spec[:2]
    if params["batch_group_count"] > 1:
        # The gradient of a grouped kernel: its batch dimension is summed over.
        result = factors.of(after)
        unknown = [*image, *kernel, *result]
        return factors.rule([image, kernel], [result], whole=unknown, blocked=unknown)
    summed = kernel[into]
    space = [image[d] for d in spec.lhs_spec[2:]]
    window = [kernel[d] for d in spec.rhs_spec[2:]]
    blocked = [*space, *window]
    if groups > 1:
        blocked.append(summed)  # each group stays on one device
        size = shape_of(equation.invars[1])
        group = factors.new(groups)
        image[channel] = (*group, *summed)
        kernel[out] = (*group, *factors.new(size[out] // groups))
    else:
        image[channel] = summed
    result[spec.out_spec[0]] = image[batch]
    result[spec.out_spec[1]] = kernel[out]
    for a, c in zip(spec.lhs_spec[2:], spec.out_spec[2:], strict=True):
        result[c] = image[a]
    return factors.rule(
        [image, kernel],
        [result],
        reduced=[summed],
        moved=space,
        whole=window,
        blocked=blocked,
        sums=True,
        linear=each_alone(0, 1),
    )
