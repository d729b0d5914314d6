"""Operations that reduce dimensions: sums, dot products, attention and convolutions."""

from math import prod

from jax.extend.core import JaxprEqn

from ._batched_rules import Numbers, independent_rule
from ._rule import (
    Dimension,
    Factors,
    Linear,
    Rule,
    at_places,
    each_alone,
    neighbours,
    shape_of,
    together,
    without,
)


def reduction_rule(equation: JaxprEqn) -> Rule:
    """Sums, maxima and similar over the dimensions that a parameter names."""
    # [i k] -> [i], with `k` reduced
    factors, params = Factors(), equation.params
    axes = params.get("axes", params.get("dimensions", ()))
    operand = factors.of(shape_of(equation.invars[0]))
    operands = [operand] * len(equation.invars)
    if equation.primitive.name == "reduce":
        operands[len(operands) // 2 :] = [[]] * len(equation.outvars)  # the initial values
    results = [without(operand, axes)] * len(equation.outvars)
    sums = equation.primitive.name == "reduce_sum"
    linear: Linear = ()
    if sums:
        linear = each_alone(0)
    return factors.rule(
        operands, results, reduced=at_places(operand, axes), sums=sums, linear=linear
    )


def named_reduction_rule(equation: JaxprEqn) -> Rule:
    """`psum` and similar: under `vmap`, the axis that they name is a dimension."""
    factors = Factors()
    axes = [axis for axis in equation.params.get("axes", ()) if isinstance(axis, int)]
    operands = factors.of_each(equation.invars)
    results: list[list[Dimension]] = []
    reduced: list[Dimension] = []
    for operand in operands:
        results.append(without(operand, axes))
        reduced += at_places(operand, axes)
    sums = equation.primitive.name.startswith("psum")
    linear: Linear = ()
    if sums:
        linear = together(len(operands))
    return factors.rule(operands, results, reduced=reduced, sums=sums, linear=linear)


def dot_general_rule(equation: JaxprEqn) -> Rule:
    # [b i k], [b k j] -> [b i j], with `k` reduced
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    factors = Factors()
    left, right = factors.of_each(equation.invars)
    left_shared, right_shared = (*left_sum, *left_batch), (*right_sum, *right_batch)
    for d, right_d in zip(left_shared, right_shared, strict=True):
        right[right_d] = left[d]
    free = without(left, left_shared) + without(right, right_shared)
    return factors.rule(
        [left, right],
        [at_places(left, left_batch) + free],
        reduced=at_places(left, left_sum),
        sums=True,
        linear=each_alone(0, 1),
    )


def ragged_dot_rule(equation: JaxprEqn) -> Rule:
    """Each group of rows is multiplied by its own matrix; the groups are needed as a whole."""
    # [i k], [g k j], [g] -> [i j], with `k` reduced
    factors = Factors()
    left, right, *group_sizes = factors.of_each(equation.invars)
    (result,) = factors.of_each(equation.outvars)
    numbers = equation.params.get("ragged_dot_dimension_numbers")
    if numbers is None or len(left) != 2 or len(right) != 3:
        operands = [left, right, *group_sizes]
        return factors.rule(operands, [result], whole=sum(operands, start=result))
    rows, _ = left  # (rows, inputs)
    groups, _, outputs = right  # (groups, inputs, outputs)
    right[1] = left[1]
    whole = sum(group_sizes, start=[groups])
    return factors.rule(
        [left, right, *group_sizes],
        [[rows, outputs]],
        reduced=[left[1]],
        whole=whole,
        blocked=whole,
        indexed=[rows],
        sums=True,
        linear=each_alone(0, 1),
    )


def fused_attention_rule(equation: JaxprEqn) -> Rule:
    """cuDNN's attention and its backward pass: the batch and the heads are carried.

    Queries, keys, values and results are (batch, sequence, heads, head_dim). A key head serves
    several adjacent query heads.
    """
    batch_size, _, head_count, head_dim = shape_of(equation.invars[0])
    dims: list[Numbers] = []
    for atom in (*equation.invars, *equation.outvars):
        shape = shape_of(atom)
        numbers: Numbers = [None] * len(shape)
        if len(shape) == 4 and (shape[0], shape[3]) == (batch_size, head_dim):
            numbers[0], numbers[2] = 0, 1
        else:
            # Biases are (batch, heads, queries, keys), softmax statistics (batch, heads, queries).
            if shape[:1] == (batch_size,):
                numbers[0] = 0
            if shape[1:2] == (head_count,):
                numbers[1] = 1
        dims.append(numbers)
    return independent_rule(equation, dims)


def makes_kernel(equation: JaxprEqn) -> bool:
    """Whether a convolution is the gradient of a kernel, as `jax.grad` makes it.

    It reads the channels of the image as a batch, and sums over the rows and the space. With a
    kernel for each row, under `jax.vmap`, rows are groups of features.
    """
    numbers = equation.params["dimension_numbers"]
    window = at_places(shape_of(equation.invars[1]), numbers.rhs_spec[2:])
    result = at_places(shape_of(equation.outvars[0]), numbers.out_spec[2:])
    return numbers.lhs_spec[0] > numbers.lhs_spec[1] and prod(window) > prod(result)


def convolution_rule(equation: JaxprEqn) -> Rule:
    """Space is moved, since each element depends on its neighbours. Groups are the slower factor
    of both channel dimensions."""
    # [n (g c) h], [(g o) c w] -> [n (g o) h], with `c` reduced, for groups `g`
    factors, params = Factors(), equation.params
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    image, kernel = factors.of_each(equation.invars)
    batch_groups = params["batch_group_count"]
    if batch_groups > 1 and not makes_kernel(equation):
        result = factors.of(shape_of(equation.outvars[0]))
        unknown = [*image, *kernel, *result]
        return factors.rule([image, kernel], [result], whole=unknown, blocked=unknown)
    batch, channel, *image_space = spec.lhs_spec
    kernel_out, kernel_in, *kernel_space = spec.rhs_spec
    result_batch, result_channel, *result_space = spec.out_spec
    inputs = kernel[kernel_in]
    space, window = at_places(image, image_space), at_places(kernel, kernel_space)
    blocked = [*space, *window]
    image[channel] = inputs
    if groups > 1:
        blocked.append(inputs)  # each group stays on one device
        outputs = shape_of(equation.invars[1])[kernel_out]
        group = factors.new(groups)
        image[channel] = group + inputs
        kernel[kernel_out] = group + factors.new(outputs // groups)
    result: list[Dimension] = [()] * len(image)
    result[result_batch] = image[batch]
    if batch_groups > 1:
        # The gradient of a grouped kernel: [(g c) n h], [(g o) n h] -> [c (g o) w]
        of_group = shape_of(equation.invars[0])[batch] // batch_groups
        outputs = shape_of(equation.invars[1])[kernel_out] // batch_groups
        group, result[result_batch] = factors.new(batch_groups), factors.new(of_group)
        image[batch] = group + result[result_batch]
        kernel[kernel_out] = group + factors.new(outputs)
    result[result_channel] = kernel[kernel_out]
    for d, dimension in zip(result_space, space, strict=True):
        result[d] = dimension
    reduced, whole, moved = [inputs], window, space
    window_sizes = at_places(shape_of(equation.invars[1]), kernel_space)
    if makes_kernel(equation):
        # [n c h], [o c h] -> [n o w], with `c` and `h` reduced
        for d, dimension in zip(kernel_space, space, strict=True):
            kernel[d] = dimension
        for d in result_space:
            result[d] = factors.new(shape_of(equation.outvars[0])[d])
        reduced, whole = [inputs, *space], at_places(result, result_space)
        blocked = [*space, *whole]
        if batch_groups > 1:
            blocked.append(result[result_batch])
    strides_and_dilations = params["window_strides"], params["lhs_dilation"], params["rhs_dilation"]
    near = [
        (dimension, neighbours(*of_window))
        for dimension, *of_window in zip(space, window_sizes, *strides_and_dilations, strict=True)
    ]
    return factors.rule(
        [image, kernel],
        [result],
        reduced=reduced,
        moved=moved,
        whole=whole,
        blocked=blocked,
        sums=True,
        linear=each_alone(0, 1),
        near=near,
    )
