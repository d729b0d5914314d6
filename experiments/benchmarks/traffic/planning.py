"""Measures the time of planning."""

import dataclasses
import statistics
from typing import Any

import jax
from architectures import Case
from jax.sharding import Mesh

from redcoast.core._jaxpr import iter_equations

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
    return sum(1 for _ in iter_equations(jax.make_jaxpr(case.loss)(*args).jaxpr))
