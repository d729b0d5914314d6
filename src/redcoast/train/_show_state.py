"""A training state in a few lines."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..core._pytree import Arrays
from ..core._train_state import AbstractTrainState
from ..sharding.report._text import scaled

_SHOWN = 3  # parts of an optimizer


def show_state(state: AbstractTrainState, step: object) -> str | None:
    """Returns the step, and the sizes and shardings of the model and the optimizer state, as text.

    The result is `None` if the leaves of the model are not arrays, as in a state of shardings.
    """
    model, opt_state = _arrays(state.model), _arrays(state.opt_state)
    if not model:
        return None
    parameters = [x for x in model if jnp.issubdtype(x.dtype, jnp.inexact)]
    dtypes: dict[str, None] = {}  # in the order of the leaves
    count = 0
    for x in parameters:
        dtypes[str(x.dtype)] = None
        count += x.size
    sizes = ", ".join([_size(model), *dtypes])
    lines = [
        f"TrainState of {type(state.model).__name__}, {_step(step)}",
        f"  model      {count:,} parameters, {sizes}",
        f"  optimizer  {_optimizer(state.opt_state)}, {_size(opt_state)}",
    ]
    return "\n".join([*lines, *_devices(model)])


def _arrays(tree: PyTree) -> Arrays:
    leaves = jax.tree.leaves(tree)
    # Only JAX's own keys have a size in bytes.
    return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)]


def _bytes(arrays: Arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def _size(arrays: Arrays) -> str:
    return scaled(_bytes(arrays))


def _step(step: object) -> str:
    # In a trace, and for planning, there is no number.
    if not isinstance(step, jax.Array) or isinstance(step, Tracer):
        return "abstract"
    if step.is_deleted():
        return "whose arrays were donated to a step"
    # Such as the states of an ensemble under `jax.vmap`.
    if step.ndim or not step.is_fully_replicated:
        return f"steps {step.dtype}{list(step.shape)}"
    return f"step {int(step.addressable_data(0)):,}"


def _optimizer(opt_state: PyTree) -> str:
    """The parts of an optimizer's state that have arrays, by the names of their types."""
    names: dict[str, None] = {}

    def visit(node: object) -> bool:
        if isinstance(node, tuple) and hasattr(node, "_fields") and _arrays(node):
            names.setdefault(type(node).__name__)
            return True
        return False

    jax.tree.leaves(opt_state, is_leaf=visit)
    shown = [*names][:_SHOWN]
    return ", ".join(shown + ["..."] * (len(names) > _SHOWN)) or "no state"


def _devices(model: Arrays) -> list[str]:
    """The mesh, and the bytes of the model on each of its devices."""
    bytes_per_device = 0
    mesh = None
    for x in model:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return []
        mesh = sharding.mesh
        bytes_per_device += math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize
    if mesh is None or mesh.size == 1:
        return []
    sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    size = scaled(bytes_per_device)
    return [f"  mesh       {sizes}; {size} of the model on each of {mesh.size} devices"]
