"""The shardings of a training step that are compared, one function for each."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from architectures import Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

import redcoast as rc

LARGE = 4096  # elements; the planner shards arrays of at least this size over `fsdp` too
EVERY_AXIS = ("data", "fsdp", "model")


@dataclass(frozen=True)
class Layout:
    """The shardings of the parameters and the batch, and the loss to differentiate."""

    params: Any
    batch: Any
    loss: Callable[..., Any]
    plan_seconds: float | None = None


def redcoast(case: Case, mesh: Mesh, budget: int | None = None) -> Layout:
    """The planner's shardings, with its constraints on activations."""
    plan, seconds = plan_by_dataflow(case, mesh, budget)
    batch = batch_shardings(case, mesh)
    return Layout(plan.shardings, batch, plan.constrain(case.loss), seconds)


def unconstrained(case: Case, mesh: Mesh) -> Layout:
    """The planner's shardings, without constraints on activations."""
    plan, seconds = plan_by_dataflow(case, mesh)
    return Layout(plan.shardings, batch_shardings(case, mesh), case.loss, seconds)


def megatron(case: Case, mesh: Mesh) -> Layout | None:
    """Megatron's shardings over `model`, written by hand; large arrays are also FSDP-sharded."""
    if case.megatron is None:
        return None
    params = case.abstract_params()
    specs = case.megatron(params)
    if mesh.shape["model"] == 1:  # so that all dimensions are available for `fsdp`
        specs = jax.tree.map(lambda _: P(), params)
    shard = lambda path, array, spec: NamedSharding(
        mesh, also_shard(spec, array.shape, counts_layers(path), "fsdp", mesh.shape["fsdp"])
    )
    shardings = jax.tree.map_with_path(shard, params, specs)
    return Layout(shardings, batch_shardings(case, mesh), case.loss)


def rules(case: Case, mesh: Mesh) -> Layout:
    """Shardings derived from the structure of the parameters, without the computation."""
    begin = time.perf_counter()
    shardings = rc.plan_shardings(case.abstract_params(), mesh).shardings
    seconds = time.perf_counter() - begin
    return Layout(shardings, batch_shardings(case, mesh), case.loss, seconds)


def fsdp(case: Case, mesh: Mesh) -> Layout:
    """FSDP over all devices: large arrays are FSDP-sharded, and the batch is over all devices."""
    axes = ("fsdp", "model")
    count = mesh.shape["fsdp"] * mesh.shape["model"]
    shard = lambda path, array: NamedSharding(
        mesh, also_shard(P(), array.shape, counts_layers(path), axes, count)
    )
    params = jax.tree.map_with_path(shard, case.abstract_params())
    return Layout(params, batch_shardings(case, mesh, EVERY_AXIS), case.loss)


def replicated(case: Case, mesh: Mesh) -> Layout:
    """Plain data parallelism over all devices."""
    everywhere = NamedSharding(mesh, P())
    params = jax.tree.map(lambda _: everywhere, case.abstract_params())
    return Layout(params, batch_shardings(case, mesh, EVERY_AXIS), case.loss)


COLUMNS: dict[str, Callable[[Case, Mesh], Layout | None]] = {
    "redcoast": redcoast,
    "unconstrained": unconstrained,
    "megatron": megatron,
    "rules": rules,
    "fsdp": fsdp,
    "replicated": replicated,
}


def plan_by_dataflow(case: Case, mesh: Mesh, budget: int | None = None) -> tuple[Any, float]:
    params, batch, key = case.abstract_params(), abstract(case.batch()), abstract_key()
    begin = time.perf_counter()
    plan = rc.plan_shardings(params, mesh, fn=case.loss, args=(batch, key), budget=budget)
    return plan, time.perf_counter() - begin


def batch_shardings(case: Case, mesh: Mesh, axes: tuple[str, ...] = ("data", "fsdp")) -> Any:
    """Shards the first dimension over the given axes, else over `data` and `fsdp`, else not."""

    def place(array: jax.Array) -> NamedSharding:
        for names in (axes, ("data", "fsdp")):
            if array.shape[0] % prod(mesh.shape[name] for name in names) == 0:
                return NamedSharding(mesh, P(names))
        return NamedSharding(mesh, P())

    return jax.tree.map(place, case.batch())


def also_shard(spec: P, shape: tuple[int, ...], stack: int, axes: Any, count: int) -> P:
    """Shards a large array over more axes, along its largest free dimension that divides."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    free = [d for d in range(stack, len(shape)) if entries[d] is None and shape[d] % count == 0]
    if prod(shape[stack:]) < LARGE or not free:
        return spec
    entries[max(free, key=lambda d: (shape[d], -d))] = axes
    return P(*entries)


def counts_layers(path: tuple[Any, ...]) -> int:
    """The number of leading layer dimensions: 1 if layers are a dict of stacked arrays, else 0."""
    keys = [str(getattr(entry, "key", "")) for entry in path]
    return int(len(keys) > 1 and keys[0] == "layers" and keys[1] != "")


def abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)), tree)


def abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
