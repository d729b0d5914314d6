"""The training step that `fit` runs, planned and traced with abstract values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray, PyTree

from ..core._dtypes import tree_to_jax_dtypes
from ..core._errors import check_functions
from ..core._pytree import abstract_array, show_place
from ..core._tracing import abstract_key, trace_for
from ..data._per_batch import is_per_batch
from ..distributed._mesh import AXES, batch_sharding, divisors
from ..sharding import Hardware, Plan
from ..sharding._plan_arguments import check_memory
from ..sharding.tree._overrides import Override
from ..tracking._metrics import pack_metrics
from ..train._compile import compile_step
from ..train._compiler_options import Option
from ..train._loss import LossFn
from ..train._plan_step import plan_training
from ..train._precision import ComputeDtype
from ..train._state import TrainState, init_state, is_model
from ..train._training import Training, make_training
from ._phases import enter_phase

# The mesh for the loss's own constraints before there is a mesh. Any dimension is divisible by it.
_ANY_MESH = AbstractMesh((1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class Job:
    """A training step without its devices."""

    state: TrainState  # abstract
    batch: PyTree[jax.ShapeDtypeStruct]
    training: Training
    overrides: Sequence[Override]
    memory: int | float | Literal["auto"] | None = None  # bytes of each device that it may take

    @property
    def rows(self) -> int:
        """The number of examples in the global batch."""
        parts = jax.tree.leaves(self.batch, is_leaf=is_per_batch)
        of_examples = [part for part in parts if not is_per_batch(part)]
        return jax.tree.leaves(of_examples or parts)[0].shape[0]


def as_init_fn(model_or_init_fn: PyTree) -> Callable[..., PyTree]:
    """Returns a function `init_fn(key)` that returns a model, or creates it from its shapes."""
    if not is_model(model_or_init_fn):
        return model_or_init_fn

    def create(x: PyTree) -> PyTree:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jnp.zeros(x.shape, x.dtype)
        return x

    return lambda key: jax.tree.map(create, model_or_init_fn)


def make_job(
    init_fn: Callable[..., PyTree],
    loss_fn: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    compute_dtype: ComputeDtype = None,
    overrides: Sequence[Override] = (),
    trainable: PyTree = eqx.is_inexact_array,
    average: int | float | None = None,
    compiler_options: Mapping[str, Option] | None = None,
    memory: int | float | Literal["auto"] | None = None,
) -> Job:
    """Makes an abstract training step from its parts; no arrays are created.

    Raises `TypeError` or `ValueError` if an argument is invalid; any error that `loss_fn` raises.
    """
    check_functions(init_fn=init_fn)
    training = make_training(
        loss_fn, optimizer, accumulate, compute_dtype, trainable, compiler_options
    )
    check_memory(memory)
    batch = batch_shapes(batch)

    def create(key: PRNGKeyArray) -> TrainState:
        return init_state(
            init_fn,
            optimizer,
            key=key,
            compute_dtype=training.compute_dtype,
            trainable=trainable,
            average=average,
        )

    def evaluate() -> TrainState:
        state = eqx.filter_eval_shape(create, abstract_key())
        # An error in the loss is the same on all meshes, so it is raised here, before planning.
        eqx.filter_eval_shape(training.loss, state.model, batch, abstract_key())
        return state

    enter_phase("Tracing", "the model and its loss")
    state = trace_for(_ANY_MESH, evaluate)
    return Job(state, batch, training, overrides, memory)


def batch_shapes(batch: PyTree) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a batch, whose leaves must all have the same number of rows, unless
    they are marked as `per_batch`."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    # An array marked as `per_batch` is inside a node, whose path is shorter than the array's.
    parts = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_per_batch)
    of_examples = {path for path, part in parts if not is_per_batch(part)}
    if not leaves:
        raise ValueError("`batch` has no arrays. Pass arrays or `jax.ShapeDtypeStruct`s.")
    rows: dict[str, int] = {}
    for path, x in leaves:
        name = show_place(path, "batch", "(the array)")
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"The batch has {type(x).__name__} at {name}. Its leaves must be arrays or "
                "`jax.ShapeDtypeStruct`s."
            )
        if path not in of_examples:
            continue
        if not x.shape:
            raise ValueError(
                f"{name} in the batch is a scalar. Its first dimension must be the batch."
            )
        rows[name] = x.shape[0]
        if x.shape[0] == 0:
            raise ValueError(f"{name} in the batch has no rows: its shape is {x.shape}.")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{count} at {name}" for name, count in rows.items())
        raise ValueError(
            f"The arrays of the batch differ in their number of rows: {counts}. Mark arrays that "
            "belong to the batch as a whole with `redcoast.per_batch`."
        )
    # As JAX stores them: float64 becomes float32 unless `jax_enable_x64` is set.
    return jax.tree.map(abstract_array, tree_to_jax_dtypes(batch, "the batch", of="batch"))


def plan_job(job: Job, mesh: Mesh, hardware: Hardware | None) -> Plan:
    """The plan that `fit` makes for this step on a mesh."""
    options = {"overrides": job.overrides, "hardware": hardware, "memory": job.memory}
    return plan_training(job.training, job.state, job.batch, mesh, **options)


def trace_job(job: Job, plan: Plan, mesh: Mesh) -> jax.stages.Traced:
    """Traces the step as `fit` calls it, ready to be lowered for the mesh's devices."""
    training = job.training
    step = pack_metrics(training.step(plan, training.accumulate))
    compiled = compile_step(step, plan.shardings, compiler_options=training.compiler_options)
    return compiled.trace(job.state, split_batch(job, mesh))


def split_batch(job: Job, mesh: Mesh) -> PyTree[jax.ShapeDtypeStruct]:
    """The batch with the sharding that `fit` gives it."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P())
        if x.shape:
            sharding = batch_sharding(mesh, x.shape[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, job.batch)


def scanned_layers(job: Job) -> list[int]:
    """For each scan of the loss over arrays of the model, the number of its iterations."""
    loops = job.training.loops(job.state.model, job.batch, _ANY_MESH)
    return [length for length, _ in loops]


def factorisations(count: int) -> list[dict[str, int]]:
    """All sizes of data, fsdp and model whose product is `count`."""
    sizes = []
    for fsdp in divisors(count):
        for model in divisors(count // fsdp):
            sizes.append({"data": count // (fsdp * model), "fsdp": fsdp, "model": model})
    return sizes
