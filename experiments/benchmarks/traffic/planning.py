"""Measures the time of planning."""

import dataclasses
import statistics
from typing import Any

import jax
from architectures import Case
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh

from .columns import abstract, abstract_key, plan_by_dataflow


def plan_times(case: Case, mesh: Mesh, *, repeats: int = 3) -> dict[str, Any]:
    """The median time of several plans and the number of equations of the loss, or the error."""
    entry: dict[str, Any] = {"case": case.name, "equations": equations(case)}
    try:
        times = [plan_by_dataflow(untraced(case), mesh)[1] for _ in range(repeats)]
    except Exception as error:
        return entry | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return entry | {"plan_seconds": statistics.median(times)}


def untraced(case: Case) -> Case:
    """A copy of a case with a new loss function, for which JAX has no cached trace."""
    return dataclasses.replace(case, loss=lambda *args: case.loss(*args))


def equations(case: Case) -> int:
    """The number of equations of the loss, counting inner programs once."""
    args = (case.abstract_params(), abstract(case.batch()), abstract_key())
    return count_equations(jax.make_jaxpr(case.loss)(*args).jaxpr)


def count_equations(jaxpr: Jaxpr) -> int:
    count = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                count += count_equations(getattr(inner, "jaxpr", inner))
    return count


def is_jaxpr(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)
