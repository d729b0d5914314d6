"""Where devices wait for each other although the examples of a batch may be independent.

XLA partitions a loop whose number of iterations depends on data so that all devices agree on the
condition in every iteration. Each device runs such a loop for its own rows instead, if nothing in
it combines rows. Planned traffic has neither: the condition of a loop under `jax.vmap` is combined
over rows when JAX lowers it, and not by an operation of the jaxpr.
"""

from itertools import chain

from jax.sharding import AbstractMesh, Mesh

from ...core._control_flow import Scan, While, control_flow
from ..constrain._local_choice import find_waiting
from ..constrain._local_region import asks_any_row, waits_for_rows
from ..constrain._shardings import find_shardings
from ..program._graph import Source
from ..program._program import Program
from ..program._walk import Scope
from ..tree._leaf_plans import Compute
from ._sent import line_of_source


def waiting(program: Program, mesh: Mesh | AbstractMesh, compute: Compute) -> tuple[str, ...]:
    """Sentences on the lines where devices wait for each other, or do the same."""
    # Most programs have no such loop, and no need of the shardings of their values.
    if not _may_wait(program.scope):
        return ()
    shardings = find_shardings(program, mesh, compute)
    texts: list[str] = []
    for source, why in find_waiting(program.scope, shardings):
        texts.append(_sentence(source, why))
    return tuple(dict.fromkeys(texts))


def _may_wait(scope: Scope) -> bool:
    # Loops are in the program itself, or in those of its loops, branches and calls.
    inner = chain(*scope.inner.values())
    return any(map(waits_for_rows, scope.jaxpr.eqns)) or any(map(_may_wait, inner))


def _sentence(source: Source, why: str) -> str:
    match control_flow(source[-1]):
        case Scan() if not asks_any_row(source[-1]):
            what = "has a loop over the examples that every device runs for all of them"
        case While() | Scan():
            what = "has a loop in which all devices wait for each other in every iteration"
        case _:
            what = "has an operation in which devices communicate about each other's examples"
    line = line_of_source(source)
    return f"{line} {what}, because {why}. `jax.vmap` of a function of one example avoids that."
