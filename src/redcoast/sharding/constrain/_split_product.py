"""Runs products of split examples with each other, such as the scores of attention."""

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from ...core._jaxpr import bind_again
from ..operations import Dimension, rule_of
from ..program._trace import Arrays
from ._bound_equation import BoundEquation


def run_split_product(bound: BoundEquation) -> Arrays | None:
    """The result of a `dot_general`, with operands that are gathered along a split dimension that
    does not stay split.

    In attention, scores have two dimensions of tokens, of which the queries' stays split. The keys
    and values are needed as a whole by every device. None if no example is split.
    """
    equation, shardings = bound.equation, bound.shardings
    if not shardings.splits_examples or any(isinstance(x, Literal) for x in equation.invars):
        return None
    rule = rule_of(equation)
    assert rule is not None
    values = [*bound.values, *bound.results]
    batch_dims = list(map(shardings.batch_dim, values))
    # The dimension that each of the operands and the result is split along.
    split: list[Dimension | None] = [None] * len(values)
    for place, dimensions in enumerate((*rule.operands, *rule.results)):
        d = batch_dims[place]
        if d is not None:
            split[place] = dimensions[d]
    sums_parts, sides = rule.split_product(split[:2], split[2])

    # Rows are split over other axes than examples. XLA gives wrong gradients of weights where the
    # operand is split along another dimension than the result, as a transposed pair matrix.
    several = len(shardings.batch.sets) > 1

    def product(*operands: jax.Array) -> jax.Array:
        gathered: Arrays = []
        for side, (x, value) in enumerate(zip(operands, values, strict=False)):
            d = batch_dims[side]
            if side in sides and d is not None:
                x = shardings.gather(x, value, d)
            elif jnp.iscomplexobj(x) or (several and any(shardings.spec(value))):
                # A spectrum is split along another dimension than the field that it is of.
                x = shardings.constrain(x, value)
            gathered.append(x)
        return bind_again(equation, gathered)[0]

    if sides:
        # Its derivative gathers again: kept for it, a whole array would take the place of a part.
        product = jax.checkpoint(product)
    result = product(*bound.operands)
    if sums_parts and batch_dims[2] is not None:
        # The sum is split again. Both operands' cotangents need its cotangent as a whole, and XLA
        # would gather it for each of them.
        entries: list[object] = [*shardings.spec(values[2])]
        entries[batch_dims[2]] = None
        result = shardings.with_spec(result, P(*entries))
    return [result]
