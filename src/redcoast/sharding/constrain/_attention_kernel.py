"""Runs the kernel for attention on TPUs in `jax.shard_map`, because XLA cannot partition a kernel.

Each device computes attention for its own rows and heads.
"""

import jax
from jax.sharding import PartitionSpec as P

from ...core._jaxpr import bind_local
from ..operations import Atom, shape_of
from ..program._trace import Arrays
from ..tree._overrides import spec_parts
from ._bound_equation import BoundEquation

KERNELS = frozenset(["dot_product_attention_bwd_splash", "dot_product_attention_fwd_splash"])


def run_kernel(bound: BoundEquation) -> Arrays | None:
    """The results of a kernel on the rows and heads of each device.

    It is None if the devices do not divide them evenly. The equation then stands for operations
    that XLA partitions.
    """
    equation, shardings, mesh = bound.equation, bound.shardings, bound.shardings.mesh
    queries, keys = bound.values[:2]
    # The stages of a pipeline are mapped, and `jax.shard_map` would gather them.
    if shardings.in_pipeline or mesh.size == 1:
        return None
    of_queries, of_keys = shardings.spec(queries), shardings.spec(keys)
    rows, heads = of_queries[0], of_queries[2]
    row_shards, head_shards = spec_parts([rows], mesh.shape), spec_parts([heads], mesh.shape)
    is_even = queries.shape[0] % row_shards == 0 and keys.shape[2] % head_shards == 0
    if of_keys[0] != rows or of_keys[2] != heads or not is_even:
        return None
    # Queries, keys and results have rows and heads, sums of the softmax no channels, segments rows.
    by_rank = {4: P(rows, None, heads), 3: P(rows, heads), 2: P(rows)}

    def spec_of(atom: Atom) -> P:
        return by_rank[len(shape_of(atom))]

    run = jax.shard_map(
        lambda *inputs: tuple(bind_local(equation, inputs, {})),
        mesh=mesh,
        in_specs=tuple(map(spec_of, equation.invars)),
        out_specs=tuple(map(spec_of, equation.outvars)),
        check_vma=False,
    )
    return list(run(*bound.operands))
