"""Operations whose results have the dimensions of their operands."""

from jax.extend.core import JaxprEqn

from ...core._jaxpr import is_inexact
from ._rule import Dimension, Factors, Linear, Rule, each_alone, primitives, shape_of, together

ELEMENTWISE = primitives("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg
    nextafter not one_minus_square or polygamma polynomial population_count pow random_fold_in
    random_gamma_grad real reciprocal redcoast_mark reduce_precision
    regularized_incomplete_beta rem round rsqrt select_if_vmap select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan
    tanh threefry2x32 xor zeta
""")
# Each result is the operand at the same place. The operands are independent of each other.
PAIRWISE = primitives("""
    optimization_barrier device_put pvary pcast relayout reshard layout_constraint annotate
    nonbatchable nondifferentiable_backward nontraceable
""")
# Division and conversion to integers round. The others are linear for all types.
ROUNDING = frozenset(["convert_element_type", "div"])
_COPIES = frozenset(["convert_element_type", "copy", "copy_p"])
# The results of these are their operands.
IDENTITIES = primitives(
    "copy copy_p nonbatchable nondifferentiable_backward nontraceable optimization_barrier"
)
_LINEAR_IN_FIRST = primitives("""
    conj convert_element_type copy copy_p div imag name neg real redcoast_mark reduce_precision
    stop_gradient
""")
_LINEAR: dict[str, Linear] = {
    **dict.fromkeys(["add", "add_any", "complex", "sub"], together(2)),
    **dict.fromkeys(_LINEAR_IN_FIRST, each_alone(0)),
    "mul": each_alone(0, 1),
}


def elementwise_rule(equation: JaxprEqn) -> Rule:
    """Operands of the results' rank share their dimensions, but for broadcast ones of size one."""
    factors = Factors()
    after = shape_of(equation.outvars[0])
    result = factors.of(after)
    operands: list[list[Dimension]] = []
    for atom in equation.invars:
        shape = shape_of(atom)
        dimensions = factors.of(shape)
        if len(shape) == len(after):
            for d, size in enumerate(shape):
                if size == after[d]:
                    dimensions[d] = result[d]
        operands.append(dimensions)
    results = [result] * len(equation.outvars)
    name = equation.primitive.name
    linear = _LINEAR.get(name, ())
    if name == "select_n":
        linear = together(len(operands), first=1)  # the first operand says which of the others
    elif name in ROUNDING and not is_inexact(equation.outvars[0].aval):
        linear = ()
    return factors.rule(operands, results, linear=linear, copies=name in _COPIES)


def stops_gradient(equation: JaxprEqn) -> bool:
    """Whether no gradient flows through an equation, although it is linear."""
    return equation.primitive.name == "stop_gradient"


def pairwise_rule(equation: JaxprEqn) -> Rule:
    factors = Factors()
    operands = factors.of_each(equation.invars)
    return factors.rule(operands, operands, linear=together(len(operands)))
