"""Where devices wait for each other although the examples of a batch may be independent.

XLA partitions a loop whose number of iterations depends on data so that all devices agree on the
condition in every iteration. Each device runs such a loop for its own rows instead, if nothing in
it combines rows. Planned traffic has neither: the condition of a loop under `jax.vmap` is combined
over rows when JAX lowers it, and not by an operation of the jaxpr.
"""

from collections.abc import Sequence
from itertools import chain

from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh

from ...core._control_flow import Scan, While, control_flow
from ..constrain._local_choice import find_waiting, has_custom_rule
from ..constrain._local_region import RuleError, asks_any_row, waits_for_rows
from ..constrain._shardings import find_shardings
from ..program._graph import Source, have_grad
from ..program._local_states import NotLocal, State, is_over_rows
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
    for source, states, error in find_waiting(program.scope, shardings):
        texts.append(_sentence(source, states, error))
    return tuple(dict.fromkeys(texts))


def _may_wait(scope: Scope) -> bool:
    # Loops are in the program itself, or in those of its loops, branches and calls.
    for equation in scope.jaxpr.eqns:
        if waits_for_rows(equation) or _sums_by_rules(equation, scope):
            return True
    return any(map(_may_wait, chain(*scope.inner.values())))


def _sums_by_rules(equation: JaxprEqn, scope: Scope) -> bool:
    """Whether a scan closes over what is trained, and has derivative rules of its own."""
    scan = control_flow(equation)
    if not isinstance(scan, Scan):
        return False
    consts, _, _ = scan.split(list(map(scope.value_of, equation.invars)))
    return have_grad(filter(None, consts)) and has_custom_rule(equation)


def _sentence(source: Source, states: Sequence[State], error: NotLocal) -> str:
    match control_flow(source[-1]):
        case While():
            what = "has a loop in which all devices wait for each other in every iteration"
        case Scan() if asks_any_row(source[-1]):
            what = "has a loop in which all devices wait for each other in every iteration"
        case Scan() as scan if is_over_rows(scan, states):
            what = "has a loop over the examples that every device runs for all of them"
        case Scan():
            what = "has a loop in which devices sum gradients in every iteration"
        case _:
            what = "has an operation in which devices communicate about each other's examples"
    line = line_of_source(source)
    remedy = "`jax.vmap` of a function of one example avoids that."
    if isinstance(error, RuleError):
        remedy = "A rule that `jax.vjp` can differentiate avoids that."
    return f"{line} {what}, because {error}. {remedy}"
