"""What devices gather along a sequence that is split between the tensor-parallel parts.

A product reads its operands as a whole along the sequence, and its partial sums are divided along
it: a reduce-scatter and an all-gather in place of an all-reduce (arXiv:2205.05198, section 4.2.2).
The two are not made equally often. A rematerialised block gathers the operands of all its products
again, and sums only what these depend on.
"""

from collections.abc import Iterator, Mapping

from ...core._control_flow import Call, control_flow, open_jaxpr
from ...core._jaxpr import struct_of
from .._mesh_axes import used_axes
from ..program._graph import Dims, PartialSum, Work
from ..solver._hardware import all_gather
from ..solver._strategy import Decision
from ._asked import path_of
from ._sent import Sent


def is_divided(decision: Decision, dims: Dims) -> bool:
    """Whether an activation is split along the sequence, and not along a chosen dimension."""
    return decision.is_sequence(dims) and not decision.is_parallel(dims)


def gathers_of_sequence(decision: Decision) -> Iterator[Sent]:
    """All-gathers of the operands of products, and of the cotangents of their sums."""
    if not decision.splits_sequence:
        return
    over, works = used_axes(decision.model_axes, decision.sizes), list[Work]()
    for work in decision.program.graph.works:
        if work.forward and work.source[-1].primitive.name == "dot_general":
            works.append(work)
    gathered: set[tuple[int, ...]] = set()
    for work in works:
        for side, dims in enumerate(work.of):
            # Products of one array with several matrices gather it once.
            array = _array(work, side)
            if array in gathered or not is_divided(decision, dims):
                continue
            gathered.add(array)
            size = _bytes_of(decision, work, side) * work.times * work.forwards
            cause = "all-gathers of the sequence, forward"
            yield Sent(over, "activations", cause, all_gather(decision.n, size), work.source)
    by_path = {path_of(work.source): work for work in works}
    for summed in decision.program.graph.partial_sums.values():
        if summed.backward or not summed.value.grad or not decision.is_chosen(summed.node):
            continue
        if is_divided(decision, summed.value.dims):
            sent = all_gather(decision.n, _cotangent_bytes(decision, summed, by_path))
            cause = "all-gathers of the sequence, backward"
            yield Sent(over, "activations", cause, sent, summed.source)


def _array(work: Work, side: int) -> tuple[int, ...]:
    """Identifies an operand of a product: the calls around it, and the variable.

    What is an argument of a call, as of `jnp.einsum`, is the variable outside of it.
    """
    *around, equation = work.source
    atom = equation.invars[side]
    while around:
        call = control_flow(around[-1])
        if not isinstance(call, Call) or atom not in open_jaxpr(call.jaxpr).invars:
            break
        atom = around.pop().invars[open_jaxpr(call.jaxpr).invars.index(atom)]
    return (*path_of(around), id(atom))


def _bytes_of(decision: Decision, work: Work, side: int) -> int | float:
    """The bytes of an operand of a product, for the rows of a device."""
    array = struct_of(work.source[-1].invars[side])
    return array.size * array.dtype.itemsize / decision.batch.parts((*work.rows, *work.of[side]))


def _cotangent_bytes(
    decision: Decision, summed: PartialSum, works: Mapping[tuple[int, ...], Work]
) -> int | float:
    """The bytes of the cotangents of a partial sum in a step, for the rows of a device."""
    times, dims, work = summed.times, summed.value.dims, works.get(path_of(summed.source))
    if work is not None:
        times, dims = work.times, (*work.rows, *dims)  # without rematerialisation
    return summed.value.bytes * times / decision.batch.parts(dims)
