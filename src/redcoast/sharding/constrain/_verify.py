"""Compares the loss and the gradients of a planned program with those on one device."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray, PyTree

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

Loss = Callable[..., Any]  # `loss_fn(model, batch, key)`


def verify(
    planned: Loss,
    loss_fn: Loss,
    shardings: PyTree,
    mesh: Mesh,
    model: PyTree,
    batch: PyTree,
    key: PRNGKeyArray | None,
    tolerance: int | float,
) -> dict[str, float]:
    """Computes the relative differences of the loss and of each gradient, by path.

    Raises `ValueError` if one is larger than `tolerance`.
    """
    with without_ambient_mesh():  # `jax.jit` would use the devices of an ambient mesh
        expected = _on_one_device(loss_fn, mesh, model, batch, key)
    placed = jax.tree.map(_place, model, shardings)

    def of_rows(x: jax.Array | np.ndarray) -> Sharding:
        # Rows are split as `fit` splits them, so that the same program runs.
        if x.ndim == 0:
            return NamedSharding(mesh, P())
        return batch_sharding(mesh, x.shape[0])

    placed_key = _put(key, lambda x: NamedSharding(mesh, P()))
    actual = _loss_and_grads(planned, placed, _put(batch, of_rows), placed_key, mesh)
    errors = _differences(actual, expected)
    # A NaN is not less than the tolerance, and not more either.
    wrong = [f"{name} (by {error:.2g})" for name, error in errors.items() if not error <= tolerance]
    if wrong:
        raise ValueError(
            "The planned program and one device give different results. Relative to the largest "
            f"element, these differ by more than {tolerance:g}: {several(wrong)}. Either the loss "
            "depends on how arrays are sharded, as with collectives or device numbers, or the "
            "compiler is wrong. A mesh with `data` alone, or `overrides`, may avoid it."
        )
    return errors


def _place(x: object, sharding: Sharding | None) -> object:
    if sharding is None:  # `x` is no array
        return x
    return jax.device_put(x, sharding)


def _on_one_device(
    loss_fn: Loss, mesh: Mesh, model: PyTree, batch: PyTree, key: PRNGKeyArray | None
) -> dict[str, np.ndarray]:
    """Computes the loss and gradients with all arrays and constants on one device."""
    device = SingleDeviceSharding(jax.local_devices()[0])

    def on_device(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        # The whole derivative: shardings in a `custom_vjp` are seen only when it is differentiated.
        def run(params: PyTree, batch: PyTree, key: PRNGKeyArray | None) -> PyTree:
            traced, arrays = trace_over(mesh, fn, params, (batch, key))
            results = jaxpr_as_fun(_on_device(traced.jaxpr, device))(*arrays)
            return join(results, traced.output)

        return run

    model, batch, key = _put((model, batch, key), lambda x: device)
    return _loss_and_grads(loss_fn, model, batch, key, mesh, on_device)


def _on_device(closed: AnyJaxpr, device: Sharding) -> AnyJaxpr:
    """Moves the constants of a jaxpr to a device, and replaces its shardings by the device."""
    with jax.ensure_compile_time_eval():  # the constants of inner jaxprs must not be traced
        consts = [_put(x, lambda x: device) for x in consts_of(closed)]
    jaxpr = _replace_shardings(open_jaxpr(closed), device)
    if isinstance(closed, Jaxpr) and not consts:
        return jaxpr
    return close_jaxpr(jaxpr, consts)


def _replace_shardings(jaxpr: Jaxpr, device: Sharding) -> Jaxpr:
    def replaced(param: object) -> object:
        if isinstance(param, AnyJaxpr):
            return _on_device(param, device)
        if type(param) is tuple:
            return tuple(map(replaced, param))
        if isinstance(param, NamedSharding):
            return device
        return param

    def without_sharding(param: object) -> object:
        if isinstance(param, NamedSharding):
            return None
        return replaced(param)

    def on_device(equation: JaxprEqn) -> JaxprEqn:
        if equation.primitive.name == "sharding_constraint":
            return replace_parameters(equation, replaced)
        # The output shardings of other operations follow from their operands.
        return replace_parameters(equation, without_sharding)

    return jaxpr.replace(eqns=list(map(on_device, jaxpr.eqns)))


def _loss_and_grads(
    loss_fn: Loss,
    model: PyTree,
    batch: PyTree,
    key: PRNGKeyArray | None,
    mesh: Mesh,
    place: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] = lambda fn: fn,
) -> dict[str, np.ndarray]:
    """The loss and its gradients, by the function that `place` makes of theirs."""
    params, rest = eqx.partition(model, eqx.is_inexact_array)  # gradients are of these

    def loss_of(params: PyTree, batch: PyTree, key: PRNGKeyArray | None) -> Array:
        result = loss_fn(eqx.combine(params, rest), batch, key)
        if isinstance(result, tuple):  # the loss and auxiliary outputs
            return result[0]
        return result

    compute = eqx.filter_jit(place(jax.value_and_grad(loss_of)))
    loss, grads = trace_for(mesh, lambda: compute(params, batch, key))
    arrays = {"loss": loss, **leaf_paths(grads, jax.Array)}
    return {path: np.asarray(x) for path, x in arrays.items()}


def _put(tree: PyTree, sharding_of: Callable[[jax.Array | np.ndarray], Sharding]) -> PyTree:
    """Places each array of a tree."""

    def put(x: object) -> object:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        return jax.device_put(x, sharding_of(x))

    return jax.tree.map(put, tree)


def _differences(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> dict[str, float]:
    """The relative differences of the loss and of each gradient."""
    grads = [value for name, value in expected.items() if name != "loss"]
    # Some gradients are only rounding errors, which have no meaningful scale. One is the gradient
    # of the key bias in attention, which does not change the softmax.
    floor = _FLOOR * max(map(_largest, grads), default=0.0)
    floors = {**dict.fromkeys(expected, floor), "loss": 0.0}
    return {name: _difference(actual[name], expected[name], floors[name]) for name in expected}


def _difference(actual: np.ndarray, expected: np.ndarray, floor: float) -> float:
    scale = max(_largest(expected), floor)  # what rounding errors are relative to
    error = _largest(np.asarray(_wide(actual) - _wide(expected)))
    if scale == 0:
        return error
    return error / scale


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(_wide(x)), initial=0.0))


def _wide(x: np.ndarray) -> np.ndarray:
    """The array in the precision of `float64`, complex if it is complex."""
    if x.dtype.kind == "c":
        return x.astype(np.result_type(x.dtype, np.float64))
    return x.astype(np.float64)
