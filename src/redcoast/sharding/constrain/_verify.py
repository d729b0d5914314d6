"""Compares the loss and the gradients of a planned program with those on one device."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...core._control_flow import (
    AnyJaxpr,
    close_jaxpr,
    consts_of,
    open_jaxpr,
    replace_parameters,
)
from ...core._errors import several
from ...core._pytree import join, leaf_paths
from ...core._tracing import trace_for, without_ambient_mesh
from ...distributed._mesh import batch_sharding
from ..program._trace import trace_over

# Differences are relative to at least this fraction of the largest element of all gradients.
_FLOOR = 1e-3


def verify(
    planned: Callable[..., Any],
    loss_fn: Callable[..., Any],
    shardings: PyTree,
    mesh: Mesh,
    model: PyTree,
    batch: PyTree,
    key: Any,
    tolerance: int | float,
) -> dict[str, float]:
    """Computes the relative differences of the loss and of each gradient, by path.

    Raises `ValueError` if one is larger than `tolerance`.
    """
    with without_ambient_mesh():  # `jax.jit` would use the devices of an ambient mesh
        expected = _on_one_device(loss_fn, mesh, model, batch, key)
    replicated = NamedSharding(mesh, P())
    place = lambda x, sharding: x if sharding is None else jax.device_put(x, sharding)
    placed = jax.tree.map(place, model, shardings)
    rows, key_here = _shard_rows(batch, mesh), _put(key, replicated)
    found = _loss_and_grads(planned, placed, rows, key_here, mesh)
    # Some gradients are only rounding errors, which have no meaningful scale. One is the gradient
    # of the key bias in attention, which does not change the softmax.
    largest = max(
        (_largest(value) for name, value in expected.items() if name != "loss"), default=0
    )
    errors = {
        name: _difference(found[name], value, 0.0 if name == "loss" else _FLOOR * largest)
        for name, value in expected.items()
    }
    wrong = [f"{name} (by {e:.2g})" for name, e in errors.items() if not e <= tolerance]
    if wrong:
        raise ValueError(
            "The planned program and one device give different results. Relative to the largest "
            f"element, these differ by more than {tolerance:g}: {several(wrong)}. Either the loss "
            "depends on how arrays are sharded, as with collectives or device numbers, or the "
            "compiler is wrong. A mesh with `data` alone, or `overrides`, may avoid it."
        )
    return errors


def _on_one_device(
    loss_fn: Callable[..., Any], mesh: Mesh, model: PyTree, batch: PyTree, key: Any
) -> dict[str, np.ndarray]:
    """Computes the loss and gradients with all arrays and constants on one device."""
    device = SingleDeviceSharding(jax.local_devices()[0])

    def alone(model: PyTree, batch: PyTree, key: Any) -> Any:
        traced, arrays = trace_over(mesh, loss_fn, model, (batch, key))
        return join(jaxpr_as_fun(_on_device(traced.jaxpr, device))(*arrays), traced.output)

    model, batch, key = (_put(x, device) for x in (model, batch, key))
    return _loss_and_grads(alone, model, batch, key, mesh)


def _on_device(closed: AnyJaxpr, device: Sharding) -> AnyJaxpr:
    """Moves the constants of a jaxpr to a device, and replaces its shardings by the device."""
    with jax.ensure_compile_time_eval():  # the constants of inner jaxprs must not be traced
        consts = [_put(x, device) for x in consts_of(closed)]
    jaxpr = _replace_shardings(open_jaxpr(closed), device)
    return close_jaxpr(jaxpr, consts) if consts or not isinstance(closed, Jaxpr) else jaxpr


def _replace_shardings(jaxpr: Jaxpr, device: Sharding) -> Jaxpr:
    def replaced(param: Any) -> Any:
        if isinstance(param, AnyJaxpr):
            return _on_device(param, device)
        if type(param) is tuple:
            return tuple(map(replaced, param))
        return device if isinstance(param, NamedSharding) else param

    def of(equation: JaxprEqn) -> JaxprEqn:
        if equation.primitive.name == "sharding_constraint":
            return replace_parameters(equation, replaced)
        # The output shardings of other operations follow from their operands.
        without = lambda param: None if isinstance(param, NamedSharding) else replaced(param)
        return replace_parameters(equation, without)

    return jaxpr.replace(eqns=list(map(of, jaxpr.eqns)))


def _loss_and_grads(
    loss_fn: Callable[..., Any], model: PyTree, batch: PyTree, key: Any, mesh: Mesh
) -> dict[str, np.ndarray]:
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss_of(params: PyTree, batch: PyTree, key: Any) -> Any:
        result = loss_fn(eqx.combine(params, rest), batch, key)
        return result[0] if isinstance(result, tuple) else result

    compute = eqx.filter_jit(jax.value_and_grad(loss_of))
    loss, grads = trace_for(mesh, lambda: compute(params, batch, key))
    named = leaf_paths(grads, jax.Array)
    return {"loss": np.asarray(loss)} | {path: np.asarray(x) for path, x in named.items()}


def _put(tree: PyTree, sharding: Sharding) -> PyTree:
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if eqx.is_array(x) else x, tree)


def _shard_rows(batch: PyTree, mesh: Mesh) -> PyTree:
    """Places a batch as `fit` does: its rows are sharded if they divide."""
    where = lambda x: batch_sharding(mesh, x.shape[0]) if x.ndim else NamedSharding(mesh, P())
    place = lambda x: jax.device_put(x, where(x)) if eqx.is_array(x) else x
    return jax.tree.map(place, batch)


def _difference(found: np.ndarray, expected: np.ndarray, floor: int | float) -> int | float:
    scale = max(_largest(expected), floor)
    error = _largest(np.asarray(_wide(found) - _wide(expected)))
    return error / scale if scale else error


def _largest(x: np.ndarray) -> int | float:
    return float(np.max(np.abs(_wide(x)), initial=0.0))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.result_type(x.dtype, np.float64) if x.dtype.kind in "fc" else np.float64)
