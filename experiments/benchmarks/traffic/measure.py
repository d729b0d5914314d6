"""Compiles a training step, and reads its communication and memory from the program."""

import functools as ft
import time
from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from architectures import Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from redcoast.dryrun.hlo import collectives

from .columns import COLUMNS, Layout, abstract, abstract_key

# Optimises the machine code less; the passes over the program and its collectives are the same.
OPTIONS = {"xla_backend_optimization_level": 0}
ERROR = 1e-5
ROUNDING = 1e-6  # of the largest gradient; a smaller gradient is zero in exact arithmetic


def measure(case: Case, mesh: Mesh, column: str) -> dict[str, Any] | None:
    """Measures a row of the results; returns None if the column does not apply to the case.

    Errors of the layout and the compiler are recorded in the row.
    """
    row = {
        "case": case.name,
        "family": case.family,
        "mesh": list(mesh.shape.values()),
        "column": column,
    }
    try:
        layout = COLUMNS[column](case, mesh)
        if layout is None:
            return None
        return row | measure_layout(case, mesh, layout, column)
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def measure_layout(case: Case, mesh: Mesh, layout: Layout, column: str) -> dict[str, Any]:
    begin = time.perf_counter()
    lowered = lower_step(case, mesh, layout)
    lowering = time.perf_counter() - begin
    begin = time.perf_counter()
    compiled = lowered.compile(compiler_options=OPTIONS)
    compiling = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    row = {
        **count_collectives(compiled.as_text(), mesh),
        **stored(case.abstract_params(), layout.params),
        "temporary_bytes": memory.temp_size_in_bytes if memory else None,
        "plan_seconds": layout.plan_seconds,
        "lower_seconds": lowering,
        "compile_seconds": compiling,
    }
    if column == "redcoast" and not case.abstract:
        row |= compare(case, run_step(case, layout, compiled))
        if not max(row["loss_error"], row["grad_error"]) <= ERROR:
            row["float64"] = compare_exactly(case, mesh, layout)
    return row


def compare_exactly(case: Case, mesh: Mesh, layout: Layout) -> dict[str, Any]:
    """Compares in float64. In float32, rounding can change the sign of a ReLU's argument."""
    with jax.enable_x64(True):
        compiled = lower_step(case, mesh, layout).compile(compiler_options=OPTIONS)
        return compare(case, run_step(case, layout, compiled))


def lower_step(case: Case, mesh: Mesh, layout: Layout) -> Any:
    """Lowers the loss with its gradients, which are sharded like the parameters."""
    replicated = NamedSharding(mesh, P())
    # Auxiliary values are scalars, and a returned model is sharded like the model.
    returned = layout.params if returns_model(case) else replicated
    step = jax.jit(
        jax.value_and_grad(uniform(layout.loss), has_aux=True),
        in_shardings=(layout.params, layout.batch, replicated),
        out_shardings=((replicated, (replicated, returned)), layout.params),
    )
    return step.lower(case.abstract_params(), abstract(batch_of(case)), abstract_key())


def uniform(loss: Any) -> PyTree:
    """Wraps a loss of any of the three forms so that it returns `(scalar, (aux, model))`."""

    def wrapped(params: PyTree, batch: PyTree, key: jax.Array) -> Any:
        out = loss(params, batch, key)
        if not isinstance(out, tuple):
            return out, ({}, None)
        value, aux, *models = out
        return value, (aux, *(models or [None]))

    return wrapped


def returns_model(case: Case) -> bool:
    out = jax.eval_shape(
        case.loss, case.abstract_params(), abstract(batch_of(case)), abstract_key()
    )
    return isinstance(out, tuple) and len(out) == 3


def count_collectives(text: str, mesh: Mesh) -> dict[str, Any]:
    operations = collectives(text, mesh)
    by_axes: Counter[str] = Counter()
    by_kind: Counter[str] = Counter()
    for operation in operations:
        by_axes["+".join(operation.axes)] += operation.count * operation.sent_bytes
        by_kind[operation.kind] += operation.count * operation.sent_bytes
    return {
        "sent_bytes": sum(operation.count * operation.sent_bytes for operation in operations),
        "collectives": sum(operation.count for operation in operations),
        "sent_by_axes": dict(by_axes),
        "sent_by_kind": dict(by_kind),
    }


def stored(params: PyTree, shardings: PyTree) -> dict[str, Any]:
    """The bytes of parameters on a device, and the fraction of elements sharded over `model`."""
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True))
    stored_bytes = sum(prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)
    sharded = sum(prod(x.shape) for x, s in pairs if "model" in jax.tree.leaves(tuple(s.spec)))
    total = sum(prod(x.shape) for x, _ in pairs)
    return {"param_bytes": stored_bytes, "model_share": sharded / total}


def run_step(case: Case, layout: Layout, compiled: Any) -> Any:
    params, batch, key = inputs(case)
    placed = jax.device_put((params, batch), (layout.params, layout.batch))
    (value, _), grads = compiled(*placed, key)
    return jax.tree.map(np.asarray, (value, grads))


def inputs(case: Case) -> PyTree:
    return jax.jit(case.init)(jax.random.key(0)), batch_of(case), jax.random.key(1)


def batch_of(case: Case) -> Any:
    """The batch, cast to the default floating dtype."""
    real = jnp.zeros(()).dtype
    is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(real) if is_real(x) else x, case.batch())


@ft.lru_cache(maxsize=2)
def on_one_device(case: Case, precision: Any) -> PyTree:
    step = jax.jit(jax.value_and_grad(uniform(case.loss), has_aux=True))
    (value, _), grads = step(*inputs(case))
    return jax.tree.map(np.asarray, (value, grads))


def compare(case: Case, results: Any) -> dict[str, Any]:
    """The largest differences from one device, relative to the largest element of each leaf."""
    value, grads = on_one_device(case, jnp.zeros(()).dtype)
    named, _ = jax.tree.flatten_with_path(grads)
    largest = max(np.max(np.abs(grad)) for _, grad in named)
    errors = {}
    for (path, right), ours in zip(named, jax.tree.leaves(results[1]), strict=True):
        size = np.max(np.abs(right))
        if not size > ROUNDING * largest:  # or it is NaN
            size = largest
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        errors[name] = float(np.max(np.abs(ours - right)) / size)
    worst = max(errors, key=lambda name: (not np.isfinite(errors[name]), errors[name]))
    return {
        "loss_error": float(abs(results[0] - value) / abs(value)),
        "grad_error": errors[worst],
        "grad_error_at": worst,
    }
