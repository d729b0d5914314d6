"""Plans: the shardings of a tree over a mesh."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PRNGKeyArray, PyTree

from ..core._axis_types import auto_ambient_mesh, is_explicit, on_auto_axes, with_auto_axes
from ..core._errors import check_flag, check_integer, check_kind, check_number, wrong_type
from ..core._frames import hide_frames
from ..core._tracing import collection_paused, traced_over
from ._plan_arguments import (
    check_function,
    check_memory,
    check_microbatches,
    has_own_memory,
    memory_limit,
    mesh_or_ambient,
)
from .report._data import PlanReport, ProgramReport, make_report
from .solver._hardware import Hardware, hardware_of
from .tree._leaf_plans import HOST, Compute, LeafPlan
from .tree._leaves import Leaf, flat_leaves
from .tree._overrides import Override, model_dim
from .tree._state_plans import elementwise_states, model_of, plan_leaves


@dataclass(frozen=True)
class Plan:
    """How a tree of arrays is sharded over a mesh, and why.

    `print(plan)` shows a summary; `plan.table()` lists every array. A notebook shows the summary
    and a table with a picture of each array, in which each colour is another part.

    **Attributes:**

    - `shardings`: A tree like the one planned, with a `NamedSharding` for each array and `None` for
        each leaf that is not an array.
    - `mesh`: The mesh.
    - `report`: A [`redcoast.PlanReport`][]: the figures of the plan, and the reason for each array.
    - `compute`: How the program uses the model's arrays: `dims`, for each array the dimension that
        is tensor-parallel over `model`, or `None`; and `batch_axes`. `constants` has the same for
        large arrays that the function closes over.
    """

    shardings: PyTree = field(repr=False)
    mesh: Mesh | AbstractMesh
    report: PlanReport = field(repr=False)
    compute: Compute = field(repr=False)

    def __str__(self) -> str:
        # As below, what draws is imported where a plan is drawn: training draws it once.
        from .report._summary import draw_summary

        return draw_summary(self.report)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from .report._html import draw_html

        return draw_html(self.report)

    @hide_frames
    def table(self, *, by: str = "array") -> str:
        """Lists every array with its spec and the reason for it, or what each line of code costs.

        Below the table of arrays are the sums of bytes, the estimated memory and communication with
        their causes, and what happens to the batch. Similar arrays, such as those of repeated
        layers, share a line.

        **Arguments:**

        - `by`: `"array"`, or `"line"` for the lines of the planned function that cost most, the
            costliest first: the estimated bytes that are in memory when most is in use, and those
            that are communicated, on each device in a step.

        **Returns:**

        Lines of at most 80 columns.

        **Raises:**

        `ValueError` with `by="line"` if the plan was made without a function.

        !!! example

            ```python
            import jax.numpy as jnp
            import redcoast as rc

            model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
            print(rc.plan_shardings(model, rc.make_mesh(model=4)).table())
            ```
        """
        if by not in ("array", "line"):
            raise ValueError(f'`by` is {by!r}. It must be "array" or "line".')
        if by == "line":
            from .report._lines import draw_lines

            return draw_lines(self.report.program)
        from .report._table import draw_table

        return draw_table(self.report)

    @hide_frames
    def to_html(self) -> str:
        """A web page that shows the planned function's code with the cost of each line beside it.

        The costs are estimates for each device: the bytes of a line's values when most memory is in
        use, and the bytes that are communicated in a step because of it.

        **Returns:**

        The text of an HTML file, which needs no other files.

        **Raises:**

        `ValueError` if the plan was made without a function.

        !!! example

            ```python
            import jax
            import jax.numpy as jnp
            import redcoast as rc

            model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
            batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
            loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
            plan = rc.plan_shardings(model, rc.make_mesh(), fn=loss_fn, args=(batch, None))
            page = plan.to_html()  # write it to a file, and open that in a browser
            ```
        """
        from .report._source_page import draw_source_page

        return draw_source_page(self.report.program.lines, "Plan", str(self))

    @hide_frames
    def check(
        self, *, max_bytes: int | float | None = None, max_memory: int | float | None = None
    ) -> None:
        """Raises an error if the estimates exceed limits, for a test of your own.

        **Arguments:**

        - `max_bytes`: Bytes that each device communicates in a step.
        - `max_memory`: Bytes of memory on each device.

        **Raises:**

        `ValueError` with the estimate, the limit, and the lines of the function that cost most.

        !!! example

            ```python
            import jax
            import jax.numpy as jnp
            import redcoast as rc

            model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
            batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
            loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
            plan = rc.plan_shardings(model, rc.make_mesh(), fn=loss_fn, args=(batch, None))
            plan.check(max_bytes=1e6, max_memory=1e9)
            ```
        """
        from .report._lines import check_limits

        check_limits(self.report.program, max_bytes, max_memory)

    def constrain(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns the function with its activations constrained to the plan.

        The results of contractions, convolutions and lookups, and the carries of loops, are
        constrained with `jax.lax.with_sharding_constraint`, so that the compiler does not choose
        their sharding. Constraints of the function itself are kept. Some operations run in
        another form, as in `jax.shard_map`, and values are the same up to rounding. The function is
        traced at the shapes it is called with. It can be a loss, a prediction or decoding, under
        `jax.jit`, `jax.grad`, `jax.vmap` and `jax.lax.scan`.

        **Arguments:**

        - `fn`: A function `fn(model, *args)` of a model like the one planned, whose first argument
            after the model is the batch, batch dimension first.

        **Returns:**

        A function of the same arguments with the same results. A function that cannot be traced
        or rebuilt runs unchanged, with a warning.

        !!! example

            ```python
            import jax
            import jax.numpy as jnp
            import redcoast as rc

            loss_fn = lambda model, batch, key: jnp.mean((batch @ model["w"]) ** 2)
            model, batch = {"w": jnp.ones((8, 16))}, jnp.ones((32, 8))
            plan = rc.plan_shardings(model, rc.make_mesh(), fn=loss_fn, args=(batch, None))
            gradient = jax.jit(jax.grad(plan.constrain(loss_fn)))(model, batch, None)
            ```
        """
        # On one device there is nothing to constrain, but there may be values to recompute.
        if self.mesh.size == 1 and self.compute.recompute is None:
            return fn
        # Imported where a function is traced, so that importing redcoast stays cheap.
        from .constrain._function import Constrained

        specs = tuple(sharding.spec for sharding in jax.tree.leaves(model_of(self.shardings)))
        return Constrained(fn, with_auto_axes(self.mesh), self.compute, specs)

    @hide_frames
    def verify(
        self,
        loss_fn: Callable[..., PyTree],
        model: PyTree,
        batch: PyTree,
        key: PRNGKeyArray | None = None,
        *,
        tolerance: float = 1e-3,
    ) -> dict[str, float]:
        """Compares the loss and the gradients of the planned program with a program for one device.

        **Arguments:**

        - `loss_fn`: `loss_fn(model, batch, key)` as for [`redcoast.train_step`][].
        - `model`: The model, with arrays; it must fit on one device.
        - `batch`: A batch, which may be small.
        - `key`: A JAX key. Model, batch and key may be on any devices.
        - `tolerance`: The largest difference that is attributed to rounding, relative to the
            largest element of each array, or to a thousandth of the largest of all gradients if
            that is larger.

        **Returns:**

        The relative difference for the loss, as `"loss"`, and for the gradient of each array.

        **Raises:**

        `ValueError` with the names of the arrays whose gradients differ by more.
        """
        from .constrain._verify import verify

        if not isinstance(self.mesh, Mesh):
            raise ValueError(
                "`verify` runs the program, and the plan is for an abstract mesh. Plan over a mesh "
                "of devices, such as `rc.make_mesh()`."
            )
        planned, shardings = self.constrain(loss_fn), on_auto_axes(model_of(self.shardings))
        mesh, (model, batch, key) = with_auto_axes(self.mesh), on_auto_axes((model, batch, key))
        # Under a mesh with Explicit axes, JAX would refuse the constraints of the planned program.
        with auto_ambient_mesh():
            return verify(planned, loss_fn, shardings, mesh, model, batch, key, tolerance)


@hide_frames
def infer_shardings(
    tree: PyTree,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    fn: Callable[..., PyTree] | None = None,
    args: Sequence[PyTree] = (),
    overrides: Sequence[Override] = (),
) -> PyTree:
    """Infers how to shard the arrays of a tree over a mesh.

    With a function, the shardings are inferred from its program. Without one, they are inferred
    from the structure of the tree, by the rules of RedCoast (arXiv:2310.16355, section 3.1):
    consecutive matrices are sharded on alternate sides, and attention on the output of its query,
    key and value and on the input of its output matrix. [`redcoast.plan_shardings`][] gives the
    reason for each array.

    **Arguments:**

    - `tree`: Any PyTree: an Equinox module, nested dicts and lists, a [`redcoast.TrainState`][].
        Arrays may be abstract (`jax.ShapeDtypeStruct`).
    - `mesh`: A mesh with the axes `"data"`, `"fsdp"` and `"model"`, and maybe `"pipe"`. By default,
        the ambient one (`jax.set_mesh`).
    - `fn`, `args`: A function that is traced as `fn(tree, *args)`, such as a loss with
        `args=(batch, key)`; of a `TrainState`, `fn(state.model, *args)`. The first of `args` is the
        batch, batch dimension first. All may be abstract.
    - `overrides`: Ordered pairs of a pattern and a spec. The pattern is a regular expression that
        is searched in the paths of arrays, such as `layers/0/attention/wq`; the first pair
        that matches applies. The spec is a `PartitionSpec`, a tuple or `None` (replicated), and is
        used as it is. In a `TrainState`, paths are those inside the model, and the optimizer's
        state is sharded like the parameters.

    **Returns:**

    A tree of the same structure with a `NamedSharding` for each array and `None` for each leaf
    that is not an array.

    **Raises:**

    `ValueError` if the mesh is missing or lacks an axis; if there are `args` without `fn`; and if
    an override matches nothing, is not a regular expression, names an unknown axis, uses an axis
    twice, has more entries than the array has dimensions, or does not divide. `TypeError` if `tree`
    is a function.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import redcoast as rc

        model = eqx.nn.MLP(32, 10, 64, depth=2, key=jax.random.key(0))
        shardings = rc.infer_shardings(model, rc.make_mesh())
        ```
    """
    return plan_shardings(tree, mesh, fn=fn, args=args, overrides=overrides).shardings


@hide_frames
def plan_shardings(
    tree: PyTree,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    fn: Callable[..., PyTree] | None = None,
    args: Sequence[PyTree] = (),
    overrides: Sequence[Override] = (),
    budget: int | None = None,
    trainable: PyTree = eqx.is_inexact_array,
    hardware: Hardware | None = None,
    sequence: bool = False,
    microbatches: int | None = None,
    memory: int | float | Literal["auto"] | None = None,
    accumulate: int = 1,
) -> Plan:
    """Plans how to shard the arrays of a tree over a mesh, with the reason for each.

    With a function, every dimension is followed through every operation of its program. Dimensions
    that can only be sharded together form a class. The cost of a class is the estimated number of
    seconds by which a step takes longer if the class is sharded over `model`: the time of the
    communication that is added, less that of the arithmetic, memory traffic, gathers and sums of
    gradients that are divided or saved.
    The set of classes with the lowest cost is tensor-parallel. Other large arrays are FSDP-sharded,
    or replicated if the devices are known to have memory to spare. If tensor parallelism is not
    worth its cost for any class, the batch is split over `model` as well.

    On a mesh with `pipe`, the layers of a loss that are a `jax.lax.scan` are divided over the
    stages of a pipeline (arXiv:2105.04663, section 3.3): `plan.constrain` runs all stages at once,
    each on another microbatch. Losses and gradients equal the results on one device, with dropout.

    Without a function, the rules on the structure of the tree apply: over `model`, attention is
    sharded on heads, consecutive matrices on alternate sides, and embeddings and language-model
    heads on the vocabulary (arXiv:2310.16355, section 3.1; arXiv:1909.08053, section 3).

    Over `fsdp`, every large array is FSDP-sharded along its largest remaining dimension. No array
    is sharded along a dimension that does not divide, that counts stacked layers, or that is the
    window of a convolution. An optimizer's state is sharded like its parameters. With a function,
    devices of the batch that have copies of a parameter each update a part of it (ZeRO-1,
    arXiv:2004.13336) and store that part of the state, if the optimizer computes element by element
    and the function does not cast the parameter.

    **Arguments:**

    - `tree`, `mesh`, `fn`, `args`, `overrides`: As for [`redcoast.infer_shardings`][].
    - `budget`: Bytes for each device. If given, arrays are FSDP-sharded only as far as needed to
        stay within it, by an estimate of arrays, gradients, optimizer state and activations.
    - `trainable`: As for [`redcoast.train_step`][]: frozen arrays have no gradient to communicate.
    - `hardware`: A [`redcoast.Hardware`][]: the speeds that weigh arithmetic against
        communication, and properties of the compiler. By default, the speeds of an A100, and the
        compiler of the mesh's devices.
    - `sequence`: Whether activations between tensor-parallel parts are sharded along the sequence
        (arXiv:2205.05198), which takes less memory. `memory` uses it where needed.
    - `microbatches`: With `pipe` in the mesh, the number of microbatches that go through the
        pipeline in a step. By default, as many as keep the bubble under a tenth of the time, if the
        batch has enough rows.
    - `memory`: Bytes of each device that a step of a loss may take. If the plan takes more,
        `plan.constrain` recomputes values in the backward pass, with the least additional
        arithmetic by an estimate. If that is not enough, GPUs and TPUs keep the optimizer's
        state in the memory of the host. `"auto"` is 85 % of the memory that the devices report, or
        of `Hardware.memory`; without either, and by default, nothing is recomputed.
    - `accumulate`: In how many microbatches, each like `args`, a step adds up gradients, as
        [`redcoast.train_step`][] does.

    **Returns:**

    A [`redcoast.Plan`][]; `print` it to see a summary.

    **Raises:**

    `ValueError`, as [`redcoast.infer_shardings`][] does; if no plan stays within the budget, or
    within `memory` with all that can be recomputed; if the mesh has `pipe` and the layers of a loss
    cannot run as a pipeline; and if an argument that describes the program of a function is given
    without `fn`.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import redcoast as rc

        model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        plan = rc.plan_shardings(model, rc.make_mesh(), fn=loss_fn, args=(batch, None))
        print(plan)
        ```
    """
    mesh = mesh_or_ambient(mesh)
    # Wrong arguments are refused before a trace, which may take seconds.
    if callable(tree) and jax.tree_util.all_leaves([tree]):
        words = "a PyTree of arrays, such as a model; pass a function as `fn`"
        raise wrong_type("tree", tree, words)
    if not isinstance(args, list | tuple):
        raise TypeError(
            f"`args` is of type {type(args).__name__}. It must be a tuple of the arguments of `fn` "
            "after the model, such as `(batch, key)`."
        )
    check_flag("sequence", sequence)
    check_microbatches(microbatches, mesh)
    if budget is not None:
        check_number("budget", budget, above=0)
    check_memory(memory)
    accumulate = check_integer("accumulate", accumulate)
    about_program = {
        "args": bool(args),
        "budget": budget is not None,
        "microbatches": microbatches is not None,
        "memory": memory is not None,
        "accumulate": accumulate > 1,
        "sequence": sequence,
        "hardware": hardware is not None,
        "trainable": trainable is not eqx.is_inexact_array,
    }
    check_function(fn, args, about_program)
    if fn is None:
        return _plan_structure(tree, mesh, overrides)
    # Imported here, so that importing redcoast takes no longer for those who never plan.
    from ._from_program import PlannedProgram, plan_program
    from ._memory_plan import MemoryTask, plan_within

    # The planned function gets constraints, which JAX takes on Auto axes alone.
    model, args = on_auto_axes((model_of(tree), tuple(args)))
    auto_mesh = with_auto_axes(mesh)
    if hardware is None:
        hardware = hardware_of(mesh)
    check_kind("hardware", hardware, Hardware, "a `redcoast.Hardware`")
    like_parameters = _arrays_of_state(tree, "opt_state", "average")
    places = {leaf.path: place for place, leaf in enumerate(flat_leaves(model))}
    parameters = elementwise_states(tree)
    updated: Counter[int] = Counter()  # bytes of the optimizer's state
    for leaf in like_parameters:
        if leaf.path in parameters:
            updated[places[parameters[leaf.path].path]] += leaf.bytes

    # A plan within memory is made several times: of the function, and with values recomputed.
    def plan(planned: Callable[..., PyTree], sequence: bool) -> PlannedProgram:
        return plan_program(
            model,
            auto_mesh,
            planned,
            args,
            overrides=overrides,
            trainable=trainable,
            hardware=hardware,
            budget=budget,
            state_bytes=sum(leaf.bytes for leaf in like_parameters),
            updated=updated,
            sequence=sequence,
            microbatches=microbatches,
            accumulate=accumulate,
        )

    limit = memory_limit(memory, hardware)
    # The function may refer to axes of the ambient mesh, which are Explicit outside. Its derivative
    # rules, which are traced where memory is estimated, refer to those of this mesh.
    with auto_ambient_mesh(), collection_paused(), traced_over(auto_mesh):
        if limit is None:
            plans, compute, report = plan(fn, sequence)
        else:
            # Counts of steps are scalars, which are not worth a transfer.
            has_state = any(leaf.shape for leaf in _arrays_of_state(tree, "opt_state"))
            offloads = has_own_memory(mesh) and has_state
            task = MemoryTask(fn, model, args, auto_mesh, trainable, plan, sequence, offloads)
            # What devices report is a guess at what they have left, and no demand of the user's.
            plans, compute, report = plan_within(task, limit, must_fit=memory != "auto")
    return make_plan(tree, mesh, plan_leaves(tree, plans, dict(mesh.shape)), compute, report)


def _plan_structure(tree: PyTree, mesh: Mesh | AbstractMesh, overrides: Sequence[Override]) -> Plan:
    """A plan without a function, by the structure of the tree."""
    from .heuristic._structural import structural_plans

    plans = structural_plans(model_of(tree), dict(mesh.shape), overrides)
    # What is sharded over `model` is computed with in parts, as its rules mean it.
    compute = Compute(tuple(model_dim(plan.spec) for plan in plans))
    return make_plan(tree, mesh, plan_leaves(tree, plans, dict(mesh.shape)), compute, None)


def _arrays_of_state(tree: PyTree, *parts: str) -> list[Leaf]:
    """The arrays of some parts of a training state; none of a model, which may have any names."""
    if model_of(tree) is tree:
        return []
    return [leaf for leaf in flat_leaves(tree) if leaf.path[0] in parts]


def make_plan(
    tree: PyTree,
    mesh: Mesh | AbstractMesh,
    plans: Sequence[LeafPlan],
    compute: Compute,
    program: ProgramReport | None,
) -> Plan:
    leaves, treedef = jax.tree.flatten(tree)
    shardings: list[NamedSharding | None] = [None] * len(leaves)  # None if not an array
    for plan in plans:
        kind = None
        # Counts of steps are read by the program at once.
        if compute.offloaded and plan.role == "optimizer state" and plan.leaf.shape:
            kind = HOST
        shardings[plan.leaf.index] = NamedSharding(mesh, plan.spec, memory_kind=kind)
    report = make_report(plans, dict(mesh.shape), program)
    return Plan(jax.tree.unflatten(treedef, shardings), mesh, report, compute)


def with_auto_plan(plan: Plan) -> Plan:
    """The same plan over a mesh with Auto axes in place of Explicit ones."""
    if not is_explicit(plan.mesh):
        return plan
    return replace(plan, mesh=with_auto_axes(plan.mesh), shardings=on_auto_axes(plan.shardings))
