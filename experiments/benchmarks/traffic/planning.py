"""How long planning takes, and how that grows with the depth of a model."""

import dataclasses
import statistics
from typing import Any

import jax
from architectures import Case
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh

from .columns import abstract, abstract_key, plan_by_dataflow


def plan_times(case: Case, mesh: Mesh, *, repeats: int = 3) -> dict[str, Any]:
    """The median of several times, and the equations of the loss; or the error."""
    entry: dict[str, Any] = {"case": case.name, "equations": equations(case)}
    try:
        times = [plan_by_dataflow(untraced(case), mesh)[1] for _ in range(repeats)]
    except Exception as error:
        return entry | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return entry | {"plan_seconds": statistics.median(times)}


def untraced(case: Case) -> Case:
    """The same case with a loss that JAX has not seen, whose trace it does not remember."""
    return dataclasses.replace(case, loss=lambda *args: case.loss(*args))


def equations(case: Case) -> int:
    """How many equations the loss has, those of inner programs once each."""
    args = (case.abstract_params(), abstract(case.batch()), abstract_key())
    return count(jax.make_jaxpr(case.loss)(*args).jaxpr)


def count(jaxpr: Jaxpr) -> int:
    inner = (body for equation in jaxpr.eqns for body in jaxprs_in_params(equation.params))
    return len(jaxpr.eqns) + sum(map(count, inner))
