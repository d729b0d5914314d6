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
from ..sharding.report._text import mesh_text, scaled


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
        f"  optimizer  {optimizer_name(state.opt_state) or 'no state'}, {_size(opt_state)}",
    ]
    return "\n".join([*lines, *_devices(model)])


def _arrays(tree: PyTree) -> Arrays:
    leaves = jax.tree.leaves(tree)
    # Only JAX's own keys have a size in bytes.
    return [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)]


def _size(arrays: Arrays) -> str:
    return scaled(sum(x.size * x.dtype.itemsize for x in arrays))


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


def optimizer_name(opt_state: PyTree) -> str:
    """The transformations of an optimizer that have a state, such as `ScaleByAdam`."""
    names: dict[str, None] = {}

    def collect(node: object) -> None:
        if isinstance(node, tuple | list):
            if hasattr(node, "_fields"):
                names[type(node).__name__.removesuffix("State")] = None
            # `optax.chain` nests states, of which those without arrays are named `EmptyState`.
            for part in node:
                collect(part)

    collect(opt_state)
    return ", ".join(name for name in names if name != "Empty")


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
    sizes, size = mesh_text(mesh.shape), scaled(bytes_per_device)
    return [f"  mesh       {sizes}; {size} of the model on each of {mesh.size} devices"]
