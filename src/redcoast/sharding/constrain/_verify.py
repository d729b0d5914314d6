"""The planned program against one device: the same loss and the same gradients."""

from collections.abc import Callable
from math import prod
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ...core._pytree import join
from ...core._tracing import traced_over, without_ambient_mesh
from ..program._trace import trace_over

_BATCH_AXES = ("data", "fsdp")

# Of the largest element of all gradients: differences are not measured against less.
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
    """Relative differences of the loss and of each gradient; raises where they are large."""
    with without_ambient_mesh():  # which `jax.jit` would take the devices from
        expected = _on_one_device(loss_fn, mesh, model, batch, key)
    everywhere = NamedSharding(mesh, P())
    placed = _placed(model, shardings), _split_rows(batch, mesh), _put(key, everywhere)
    found = _loss_and_grads(planned, *placed, mesh)
    # Gradients that are zero but for rounding have no scale of their own: that of attention's key
    # bias is, since softmax does not see it.
    largest = max(
        (_largest(value) for name, value in expected.items() if name != "loss"), default=0
    )
    floor = {"loss": 0.0}
    errors = {
        name: _difference(found[name], value, floor.get(name, _FLOOR * largest))
        for name, value in expected.items()
    }
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        shown = ", ".join(f"{name} (by {error:.2g})" for name, error in list(wrong.items())[:8])
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"The planned program does not compute what one device does, relative to the largest "
            f"element by more than {tolerance:g}: {shown}{more}. Either the loss depends on how "
            "arrays are split, as with collectives or device numbers in it, or the compiler is at "
            "fault; a mesh with `data` alone, or `overrides`, may avoid it."
        )
    return errors


def _on_one_device(
    loss_fn: Callable[..., Any], mesh: Mesh, model: PyTree, batch: PyTree, key: Any
) -> dict[str, np.ndarray]:
    """The loss and its gradients with all that they need, arrays closed over too, on one device."""
    device = SingleDeviceSharding(jax.local_devices()[0])

    def alone(model: PyTree, batch: PyTree, key: Any) -> Any:
        traced, arrays = trace_over(mesh, loss_fn, model, (batch, key))
        return join(jaxpr_as_fun(_moved(traced.jaxpr, device))(*arrays), traced.output)

    model, batch, key = (_put(x, device) for x in (model, batch, key))
    return _loss_and_grads(alone, model, batch, key, mesh)


def _moved(program: ClosedJaxpr, device: Sharding) -> ClosedJaxpr:
    """A program on this device, in the place of those where its constants and its meshes are."""
    with jax.ensure_compile_time_eval():  # constants of inner programs cannot be traced
        consts = [_put(x, device) for x in program.consts]
    return ClosedJaxpr(_renamed(program.jaxpr, device), consts)


def _renamed(jaxpr: Jaxpr, device: Sharding) -> Jaxpr:
    def replaced(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr):
            return _moved(param, device)
        if isinstance(param, Jaxpr):
            return _renamed(param, device)
        if type(param) is tuple:
            return tuple(map(replaced, param))
        return device if isinstance(param, NamedSharding) else param

    def of(equation: JaxprEqn) -> JaxprEqn:
        params = {name: replaced(x) for name, x in equation.params.items()}
        if equation.primitive.name != "sharding_constraint":
            # What operations are told of their results' shardings follows from their operands'.
            params = {name: None if x is device else x for name, x in params.items()}
        return equation.replace(params=params)

    return jaxpr.replace(eqns=list(map(of, jaxpr.eqns)))


def _loss_and_grads(
    loss_fn: Callable[..., Any],
    model: PyTree,
    batch: PyTree,
    key: Any,
    mesh: Mesh,
) -> dict[str, np.ndarray]:
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss_of(params: PyTree, batch: PyTree, key: Any) -> Any:
        with traced_over(mesh):
            result = loss_fn(eqx.combine(params, rest), batch, key)
        return result[0] if isinstance(result, tuple) else result

    loss, grads = eqx.filter_jit(jax.value_and_grad(loss_of))(params, batch, key)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}
    return {"loss": np.asarray(loss)} | named


def _put(tree: PyTree, sharding: Sharding) -> PyTree:
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if eqx.is_array(x) else x, tree)


def _split_rows(batch: PyTree, mesh: Mesh) -> PyTree:
    """A batch as a run places it: its rows split, if they divide."""
    count = prod(mesh.shape[axis] for axis in _BATCH_AXES)
    rows = lambda x: P(_BATCH_AXES) if x.ndim and x.shape[0] % count == 0 else P()
    place = lambda x: jax.device_put(x, NamedSharding(mesh, rows(x)))
    return jax.tree.map(lambda x: place(x) if eqx.is_array(x) else x, batch)


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    places = structure.flatten_up_to(shardings)
    return structure.unflatten(
        [x if s is None else jax.device_put(x, s) for x, s in zip(leaves, places, strict=True)]
    )


def _difference(found: np.ndarray, expected: np.ndarray, floor: int | float) -> int | float:
    scale = max(_largest(expected), floor)
    error = _largest(np.asarray(_wide(found) - _wide(expected)))
    return error / scale if scale else error


def _largest(x: np.ndarray) -> int | float:
    return float(np.max(np.abs(_wide(x)), initial=0.0))


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.result_type(x.dtype, np.float64) if x.dtype.kind in "fc" else np.float64)
