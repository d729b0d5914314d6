"""Runs the kernel for attention on TPUs in `jax.shard_map`, because XLA cannot partition a kernel.

Each device computes attention for its own rows and heads.
"""

from collections.abc import Sequence

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

from ...core._control_flow import primitive_name
from ...core._jaxpr import bind_local
from ..operations._rule import shape_of
from ..program._graph import Value
from ..program._trace import Arrays
from ..tree._overrides import spec_parts
from ._shardings import Shardings

KERNELS = frozenset(["dot_product_attention_bwd_splash", "dot_product_attention_fwd_splash"])


def is_kernel(equation: JaxprEqn) -> bool:
    """Whether an equation is a kernel for attention, which XLA cannot partition."""
    return primitive_name(equation) in KERNELS


def run_kernel(
    equation: JaxprEqn,
    operands: Arrays,
    values: Sequence[Value | None],
    shardings: Shardings,
) -> Arrays | None:
    """The results of a kernel on the rows and heads of each device.

    It is None if the devices do not divide them evenly. The equation then stands for operations
    that XLA partitions. `values` are the values of the operands.
    """
    mesh = shardings.mesh
    queries, keys = values[:2]
    # The stages of a pipeline are mapped, and `jax.shard_map` would gather them.
    if queries is None or keys is None or shardings.rows is not None or mesh.size == 1:
        return None
    of_queries, of_keys = shardings.spec(queries), shardings.spec(keys)
    rows, heads = of_queries[0], of_queries[2]
    row_shards, head_shards = spec_parts([rows], mesh.shape), spec_parts([heads], mesh.shape)
    is_even = queries.shape[0] % row_shards == 0 and keys.shape[2] % head_shards == 0
    if of_keys[0] != rows or of_keys[2] != heads or not is_even:
        return None
    by_rank = {4: P(rows, None, heads), 3: P(rows, heads), 2: P(rows)}
    spec_of = lambda atom: by_rank[len(shape_of(atom))]
    run = jax.shard_map(
        lambda *inputs: tuple(bind_local(equation, inputs, {})),
        mesh=mesh,
        in_specs=tuple(map(spec_of, equation.invars)),
        out_specs=tuple(map(spec_of, equation.outvars)),
        check_vma=False,
    )
    return list(run(*operands))
