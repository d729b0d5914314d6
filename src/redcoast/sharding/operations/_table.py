"""The table: which rule a primitive has."""

from collections.abc import Callable

from jax.extend.core import JaxprEqn

from ...core._control_flow import primitive_name
from ._arranging_rules import (
    along,
    bitcast,
    broadcast_in_dim,
    concatenate,
    expand_dims,
    fourier,
    named_reduction,
    not_along,
    reduction,
    reshape,
    same_size,
    squeeze,
    stack,
    transpose,
    unpadded,
    unstack,
    untiled,
    unwindowed,
    window_scatter,
)
from ._contracting_rules import convolution, dot_general, fused_attention, ragged_dot
from ._elementwise_rules import ELEMENTWISE, PAIRWISE, elementwise, pairwise
from ._indexing_rules import dynamic_update_slice, gather, scatter
from ._made_rules import DECOMPOSITIONS, FRESH, KEYED, decomposition, fresh, keyed
from ._rule import Rule

REDUCTIONS = frozenset(
    """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor
    """.split()  # noqa: SIM905
)
_NAMED: dict[str, Callable[[JaxprEqn], Rule]] = {
    "approx_top_k": along(not_along("reduction_dimension"), indexed=True),
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "conv_general_dilated": convolution,
    "cumlogsumexp cummax cummin cumprod": along(not_along("axis")),
    "cumsum": along(not_along("axis"), is_linear=True),
    "dot_general": dot_general,
    "dot_product_attention_bwd_wrapper": fused_attention,
    "dot_product_attention_fwd_wrapper": fused_attention,
    "dynamic_slice": along(same_size, indexed=True, is_linear=True),
    "dynamic_update_slice": dynamic_update_slice,
    "expand_dims": expand_dims,
    "fft": fourier,
    "gather": gather,
    "pad": along(unpadded, moved=True),
    "pmax pmin psum psum_invariant": named_reduction,
    "ragged_dot ragged_dot_general": ragged_dot,
    "reduce_window reduce_window_max reduce_window_min": along(unwindowed, moved=True),
    "reduce_window_sum": along(unwindowed, moved=True, is_linear=True),
    "reshape": reshape,
    "rev": along(not_along("dimensions"), moved=True, is_linear=True),
    "scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub": scatter,
    "scatter_add scatter_max scatter_min scatter_mul scatter_sub": scatter,
    "select_and_gather_add select_and_scatter select_and_scatter_add": window_scatter,
    "sharding_constraint": pairwise,
    "slice": along(same_size, moved=True, indexed=True, is_linear=True),
    "sort": along(not_along("dimension")),
    "split": along(not_along("axis"), moved=True, indexed=True),
    "squeeze": squeeze,
    "stack": stack,
    "tile": along(untiled, moved=True),
    "top_k": along(not_along("axis"), indexed=True),
    "transpose": transpose,
    "unstack": unstack,
}
_TABLE: dict[str, Callable[[JaxprEqn], Rule]] = {
    **{name: rule for names, rule in _NAMED.items() for name in names.split()},
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(PAIRWISE, pairwise),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(FRESH, fresh),
    **dict.fromkeys(KEYED, keyed),
    **dict.fromkeys(DECOMPOSITIONS, decomposition),
}


def rule_of(equation: JaxprEqn) -> Rule | None:
    """The rule of an equation's primitive, or None if the table has none."""
    make = _TABLE.get(primitive_name(equation))
    return None if make is None else make(equation)
