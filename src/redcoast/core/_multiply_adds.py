"""The arithmetic of the primitives that contract dimensions."""

from math import prod

from jax.extend.core import JaxprEqn


def multiply_adds(equation: JaxprEqn) -> int | None:
    """Counts the multiply-adds of a contraction; None for other equations.

    Zeros that pad or dilate the input of a convolution are counted.
    """
    params = equation.params
    shape = lambda atom: atom.aval.shape
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = shape(equation.invars[0])
            return prod(shape(equation.outvars[0])) * prod(left[d] for d in contracted)
        case "ragged_dot_general":
            # Each row belongs to one group, whichever dimension the groups are along.
            numbers = params["ragged_dot_dimension_numbers"]
            (_, contracted), (_, batch) = numbers.dot_dimension_numbers
            counted = {*contracted, *batch, *numbers.rhs_group_dimensions}
            left, right = map(shape, equation.invars[:2])
            # Each element of the left side is multiplied with all outputs of its group.
            outputs = 1
            for dim, size in enumerate(right):
                if dim not in counted:
                    outputs *= size
            return prod(left) * outputs
        case "conv_general_dilated":
            kernel = shape(equation.invars[1])
            # Multiply-adds of one element of the result: the kernel without its output features.
            taps = prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
            return prod(shape(equation.outvars[0])) * taps
        case (
            "dot_product_attention_fwd_wrapper"
            | "dot_product_attention_bwd_wrapper"
            | "dot_product_attention_fwd_splash"
            | "dot_product_attention_bwd_splash"
        ):
            # Two products forward, five backward, where the scores are recomputed.
            (batch, queries, heads, head_dim), (_, keys, *_) = map(shape, equation.invars[:2])
            products = 2
            if "bwd" in equation.primitive.name:
                products = 5
            return products * batch * heads * queries * keys * head_dim
    return None
