"""The table: which rule a primitive has."""

from collections.abc import Callable
from itertools import chain

from jax.extend.core import JaxprEqn

from ...core._control_flow import primitive_name
from ._arranging_rules import (
    along,
    bitcast_rule,
    broadcast_in_dim_rule,
    concatenate_rule,
    expand_dims_rule,
    fourier_rule,
    named,
    padded,
    reshape_rule,
    resized,
    squeeze_rule,
    stack_rule,
    tile_rule,
    transpose_rule,
    unstack_rule,
    window_scatter_rule,
    windowed,
)
from ._batched_rules import (
    DECOMPOSITIONS,
    FRESH,
    KEYED,
    callback_rule,
    decomposition_rule,
    fresh_rule,
    kernel_rule,
    keyed_rule,
    random_gamma_rule,
    vmapped_rule,
)
from ._elementwise_rules import ELEMENTWISE, PAIRWISE, elementwise_rule, pairwise_rule
from ._indexing_rules import dynamic_update_slice_rule, gather_rule, scatter_rule
from ._reduction_rules import (
    convolution_rule,
    dot_general_rule,
    fused_attention_rule,
    named_reduction_rule,
    ragged_dot_rule,
    reduction_rule,
)
from ._rule import Factors, Rule, each_alone, primitives, together

REDUCTIONS = primitives("""
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor
""")
# The results of these are constrained, beside the batch, weights and what loops carry, and XLA
# propagates shardings through other operations. The results are in memory, and kept for the
# backward pass.
LARGE_OPERATIONS = primitives("""
    conv_general_dilated dot_general gather ragged_dot ragged_dot_general scatter
    scatter-add scatter_add
""")
# Non-linear operations, which are assumed to keep their results for the backward pass. XLA
# recomputes other elementwise results.
KEPT = primitives("""
    cos div erf exp exp2 expm1 integer_pow log log1p log2 logistic max pow rsqrt sin sqrt square
    tanh
""")
# The same elements in the same order, which need no memory of their own.
VIEWS = primitives("""
    copy copy_p expand_dims name optimization_barrier reshape sharding_constraint squeeze
    stop_gradient
""")
# XLA computes these once, and keeps the result for all uses; it computes cheaper ones again.
COSTLY = primitives("cos erf erf_inv exp exp2 expm1 log log1p log2 logistic pow sin sqrt tan tanh")
# Their derivatives are computed from their results alone.
FROM_RESULT = primitives("cbrt exp exp2 expm1 logistic sqrt tanh")
# Each element of the results depends on all earlier ones.
CUMULATIVE = primitives("cumlogsumexp cummax cummin cumprod cumsum")
# Scaled operands scale the results of these, though they are not linear.
HOMOGENEOUS = primitives("abs clamp max min reduce_max reduce_min sort")
# The results of these are counts and conditions, which say nothing of the value of an example.
UNCOUPLED = primitives("is_finite random_bits reduce_and reduce_or")
# The parameters of these have a mesh, or axes of one.
OVER_A_MESH = primitives("mesh_cast reshard shard_map sharding_constraint")
_NAMED: dict[str, Callable[[JaxprEqn], Rule | None]] = {
    "approx_top_k": along(named("reduction_dimension"), "whole", "shuffled", "indexed"),
    "bitcast_convert_type": bitcast_rule,
    "broadcast_in_dim": broadcast_in_dim_rule,
    "concatenate": concatenate_rule,
    "conv_general_dilated": convolution_rule,
    "cumlogsumexp cummax cummin cumprod": along(named("axis"), "moved"),
    "cumsum": along(named("axis"), "moved", linear=each_alone(0)),
    "dot_general": dot_general_rule,
    "dot_product_attention_bwd_splash dot_product_attention_bwd_wrapper": fused_attention_rule,
    "dot_product_attention_fwd_splash dot_product_attention_fwd_wrapper": fused_attention_rule,
    "dynamic_slice": along(resized, "whole", "indexed", linear=each_alone(0)),
    "dynamic_update_slice": dynamic_update_slice_rule,
    "expand_dims": expand_dims_rule,
    "fft": fourier_rule,
    "gather": gather_rule,
    "pallas_call": kernel_rule,
    "pad": along(padded, "moved", linear=together(2)),
    "pmax pmin psum psum_invariant": named_reduction_rule,
    "ragged_dot ragged_dot_general": ragged_dot_rule,
    "pure_callback": callback_rule,
    "random_gamma": random_gamma_rule,
    "reduce_window reduce_window_max reduce_window_min": along(
        windowed, "moved", "blocked", has_windows=True
    ),
    "reduce_window_sum": along(
        windowed, "moved", "blocked", linear=each_alone(0), has_windows=True
    ),
    "reshape": reshape_rule,
    "rev": along(named("dimensions"), "moved", linear=each_alone(0)),
    "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub": scatter_rule,
    "scatter_add scatter_max scatter_min scatter_mul scatter_sub": scatter_rule,
    "select_and_gather_add select_and_scatter select_and_scatter_add": window_scatter_rule,
    "sharding_constraint": pairwise_rule,
    "slice": along(resized, "moved", "indexed", linear=each_alone(0)),
    "sort": along(named("dimension"), "whole", "shuffled"),
    "split": along(named("axis"), "moved", "indexed", linear=each_alone(0)),
    "squeeze": squeeze_rule,
    "stack": stack_rule,
    "tile": tile_rule,
    "top_k": along(named("axis"), "whole", "shuffled", "indexed"),
    "transpose": transpose_rule,
    "unstack": unstack_rule,
    "vprim": vmapped_rule,
}
_TABLE: dict[str, Callable[[JaxprEqn], Rule | None]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise_rule),
    **dict.fromkeys(PAIRWISE, pairwise_rule),
    **dict.fromkeys(REDUCTIONS, reduction_rule),
    **dict.fromkeys(FRESH, fresh_rule),
    **dict.fromkeys(KEYED, keyed_rule),
    **dict.fromkeys(DECOMPOSITIONS, decomposition_rule),
}
for text, rule in _NAMED.items():
    _TABLE.update(dict.fromkeys(primitives(text), rule))


def rule_of(equation: JaxprEqn) -> Rule | None:
    """The rule of an equation's primitive, or None if the table has none."""
    make_rule = _TABLE.get(primitive_name(equation))
    if make_rule is None:
        return None
    return make_rule(equation)


def is_cumulative(equation: JaxprEqn) -> bool:
    """Whether each element of the results depends on all earlier ones."""
    return equation.primitive.name in CUMULATIVE


def opaque_rule(equation: JaxprEqn, *, results: bool = True) -> Rule:
    """The rule of an operation that the table does not have: all arrays are needed as a whole.

    Without `results`, these may be sharded in any way.
    """
    factors = Factors()
    before = factors.of_each(equation.invars)
    after = factors.of_each(equation.outvars)
    whole = [*chain(*before)]
    if results:
        whole += chain(*after)
    return factors.rule(before, after, whole=whole)
