"""A plan's report as data."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from operator import attrgetter
from typing import Any, Literal

from jax.sharding import PartitionSpec as P

from ..solver._figures import Arithmetic, Memory, Pipelining
from ..tree._leaf_plans import LeafPlan, Reason, Role
from ..tree._overrides import axes_of_spec, spec_parts

TrafficKind = Literal["gradients", "activations", "parameters", "optimizer"]


@dataclass(frozen=True)
class PlannedArray:
    """One array of a plan.

    `parts` is the number of parts that it is sharded into, 1 if it is replicated.
    `bytes_per_device` is the size of one part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: P
    reason: Reason
    role: Role
    parts: int
    bytes: int
    bytes_per_device: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it is sharded over."""
        return tuple(axes_of_spec(self.spec))


@dataclass(frozen=True)
class Total:
    """How many arrays there are, their bytes, and those on each device."""

    arrays: int
    bytes: int
    bytes_per_device: int

    @property
    def factor(self) -> float:
        """How many times less there is on each device."""
        return self.bytes / max(1, self.bytes_per_device)


@dataclass(frozen=True)
class Totals:
    """The sums over arrays, by their role."""

    all: Total
    parameters: Total
    optimizer_state: Total
    other: Total


@dataclass(frozen=True)
class Traffic:
    """Communication with one cause: an estimate of the `bytes` of one device in a step.

    `axes` are the mesh axes that it is over. `cause` names the collectives, and the arrays that
    they are for.
    """

    axes: tuple[str, ...]
    kind: TrafficKind
    cause: str
    bytes: int

    @property
    def axis(self) -> str:
        """The axes as text, such as `"data x fsdp"`."""
        return " x ".join(self.axes)


@dataclass(frozen=True)
class LineCost:
    """What a line of the user's code costs on each device.

    **Attributes:**

    - `file`, `number`: The line; `""` and 0 for what belongs to no line of the user's code.
    - `memory_bytes`: Its values that are in memory when most is in use, and arrays that it closes
        over.
    - `sent_bytes`: What a device communicates in a step because of it.
    - `causes`: The causes of communication and of memory, the largest first.
    - `caller`: The file and the number of your line that runs it, for a line of a model of
        redcoast; otherwise its own.
    """

    file: str
    number: int
    memory_bytes: int
    sent_bytes: int
    causes: tuple[str, ...]
    caller: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class ClosedOver:
    """A large array that the function closes over, and the axes that it is tensor-parallel over."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Coupling:
    """An operation by which the examples of a batch depend on each other, and why.

    `where` is the line of the user's code, such as `"train.py:12"`, or `""`.
    """

    operation: str
    where: str
    why: str


@dataclass(frozen=True)
class Repeated:
    """Floating point operations that every device computes: with which arrays, and why."""

    flops: float
    arrays: str
    why: str


@dataclass(frozen=True)
class Hindrance:
    """Tensor-parallel arrays that cannot be sharded along another dimension, and why."""

    arrays: str
    why: str


@dataclass(frozen=True)
class NotDone:
    """Something that the mesh asks for and the plan does not do, and why.

    `asked` is such as `"tensor parallelism over model=4"`. `forced_by` is a sentence, or `""` if
    nothing forces it.
    """

    asked: str
    why: str
    forced_by: str


@dataclass(frozen=True)
class Recomputation:
    """What the backward pass recomputes to save memory.

    **Attributes:**

    - `saved`: The estimated bytes that this saves on each device.
    - `flops`, `share`: The floating point operations of a device that it adds, and by which part of
        all of them these are more.
    - `what`: What is recomputed: the lines of the user's code, the costliest first.
    """

    saved: int
    flops: float
    share: float
    what: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramReport:
    """What a plan infers from the program of a function.

    **Attributes:**

    - `batch_axes`, `model_axes`: The mesh axes that the batch is split over, and those that arrays
        are tensor-parallel over.
    - `batch`: What happens to the batch, and why, as sentences; `""` without a batch.
    - `batch_sizes`: The sizes of the batch dimension.
    - `sequences`: Whether the batch is split along dimensions of its examples, such as a sequence.
    - `split_examples`: Each axis over which examples are split, and not only their number, with
        `"context parallel"` for a sequence or `"domain parallel"`.
    - `not_rows`: The arrays of the batch that are not split with it, by path, with the size of
        their first dimension.
    - `hindrances`: Arrays that could not be sharded along another dimension.
    - `traffic`: The estimated communication of each device in a step, the largest cause first.
    - `closed_over`: Arrays of a megabyte or more that the function closes over.
    - `coupled`: The first operation by which examples depend on each other, if there is one.
    - `unknown`: Primitives that the planner does not understand, and how often they occur.
    - `arithmetic`, `repeated`: The floating point operations of a step, and those that every device
        computes, if they are many.
    - `memory`: An estimate of the memory in use on each device.
    - `pipeline`: How layers run as a pipeline; `None` if they do not.
    - `summed`: The scalar results of the function that are sums over the examples, by path, with
        the lines of the user's code.
    - `shared_masks`: The lines of the user's code that use one random mask, as of dropout, for all
        examples.
    - `promotions`: The lines of the user's code that combine predictions of shape `(n, 1)` with
        labels of shape `(n,)`, so that NumPy's rank promotion makes an `(n, n)` array.
    - `gathered_whole`: The lines of the user's code at which every device sends all that it has of
        an array, as sentences: where a function runs on the host, and where the program asks for a
        sharding that the compiler cannot reach step by step.
    - `waiting`: The lines of the user's code with loops in which devices wait for each other's
        examples in every iteration, or which every device runs for all examples, as sentences.
    - `lines`: The lines of the user's code that cost memory or communication, the costliest first.
    - `recomputed`: What the backward pass recomputes because of `memory`: the bytes that are
        `saved` on each device, the `flops` that this adds and their `share`, and in `what` the
        lines of the user's code; `None` if nothing.
    - `offloaded`: The bytes of each device's optimizer state that are in the memory of the host
        because of `memory`.
    - `device_memory`, `device_memory_known`: The bytes of memory that a device has, and whether the
        devices, or `Hardware.memory`, specify it. Otherwise it is assumed.
    - `axes_for_memory`: Whether mesh axes are used otherwise than they are named because a step
        would not fit into memory.
    """

    batch_axes: tuple[str, ...]
    model_axes: tuple[str, ...]
    batch: str
    batch_sizes: tuple[int, ...]
    not_rows: Mapping[str, int]
    hindrances: tuple[Hindrance, ...]
    traffic: tuple[Traffic, ...]
    closed_over: tuple[ClosedOver, ...]
    coupled: Coupling | None
    unknown: Mapping[str, int]
    arithmetic: Arithmetic
    repeated: tuple[Repeated, ...]
    memory: Memory
    device_memory: int | float
    device_memory_known: bool
    # Most programs have none of these.
    pipeline: Pipelining | None = None
    summed: Mapping[str, str] = field(default_factory=dict)
    shared_masks: tuple[str, ...] = ()
    promotions: tuple[str, ...] = ()
    # Plans of one program are equal, wherever its files are.
    lines: tuple[LineCost, ...] = field(default=(), repr=False, compare=False)
    split_examples: Mapping[str, str] = field(default_factory=dict, repr=False)
    gathered_whole: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    recomputed: Recomputation | None = None
    offloaded: int = 0
    axes_for_memory: bool = False

    @property
    def sequences(self) -> bool:
        return bool(self.split_examples)


@dataclass(frozen=True)
class PlanReport:
    """The figures of a plan, as data.

    **Attributes:**

    - `mesh`: The size of each mesh axis.
    - `arrays`: For each array its `path`, `shape`, `dtype`, `spec`, `reason` (with a `kind` and a
        `text`), `role`, `parts`, `bytes` and `bytes_per_device`.
    - `totals`: The number of `arrays`, the `bytes` and the `bytes_per_device` of `all` of them and
        of the `parameters`, the `optimizer_state` and `other` arrays.
    - `program_or_none`: The same as `program`, and `None` where that raises an error.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import redcoast as rc

        model = {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        plan = rc.plan_shardings(model, rc.make_mesh(), fn=loss_fn, args=(batch, None))
        for array in plan.report.arrays:
            print(array.path, array.spec, array.reason.kind, array.bytes_per_device)
        print(sum(traffic.bytes for traffic in plan.report.program.traffic))
        ```
    """

    mesh: Mapping[str, int]
    arrays: tuple[PlannedArray, ...]
    totals: Totals
    program_or_none: ProgramReport | None = None

    @property
    def program(self) -> ProgramReport:
        """What was inferred from the program of a function: `memory`, `traffic` and more.

        A plan made without a function, or by a training function for a mesh of one device, has no
        such figures, and raises `ValueError`.
        """
        if self.program_or_none is None:
            raise ValueError(
                "The plan has no estimates of memory, arithmetic and communication. Either it was "
                "made without a function: pass `fn` and `args` to `plan_shardings`. Or `fit`, "
                "`prepare` or `plan_step` made it for a mesh of one device, where there is nothing "
                "to choose: call `plan_shardings(state, mesh, fn=loss_fn, args=(batch, key))`."
            )
        return self.program_or_none

    @property
    def replicated(self) -> tuple[PlannedArray, ...]:
        """The arrays that are replicated on every device."""
        return tuple(array for array in self.arrays if array.parts == 1)

    @property
    def not_done(self) -> tuple[NotDone, ...]:
        """Kinds of parallelism that the plan does not use although the mesh has an axis for them,
        with the reason."""
        # Imported where it is called, since it reads reports itself.
        from ._not_done import find_not_done

        return find_not_done(self)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as dicts and lists of text and numbers, for `json.dumps`.

        Those of `program` are entries of the same dict as those of the arrays.
        """
        rows = list(map(_array_to_json, self.arrays))
        replicated: list[dict[str, Any]] = []
        for row in rows:
            if row["parts"] == 1:  # what a reader looks for first: it takes memory on every device
                replicated.append({key: row[key] for key in _REPLICATED})
        totals = asdict(self.totals).values()
        without_program = {
            "mesh": dict(self.mesh),
            "rows": rows,
            "totals": dict(zip(_ROLES, totals, strict=True)),
            "replicated": replicated,
            "not_done": list(map(asdict, self.not_done)),
        }
        return without_program | _program_to_json(self.program_or_none)


def make_report(
    rows: Sequence[LeafPlan], axes: Mapping[str, int], program: ProgramReport | None = None
) -> PlanReport:
    """The report of a plan with these rows over a mesh with such axes."""
    arrays: list[PlannedArray] = []
    by_role: defaultdict[Role, list[PlannedArray]] = defaultdict(list)  # empty for other roles
    for row in rows:
        leaf, parts = row.leaf, spec_parts(row.spec, axes)
        array = PlannedArray(
            path=leaf.name,
            shape=leaf.shape,
            dtype=str(leaf.dtype),
            spec=row.spec,
            reason=row.reason,
            role=row.role,
            parts=parts,
            bytes=leaf.bytes,
            bytes_per_device=leaf.bytes // parts,  # specs divide
        )
        arrays.append(array)
        by_role[row.role].append(array)
    totals = Totals(
        all=_total(arrays),
        parameters=_total(by_role["parameter"]),
        optimizer_state=_total(by_role["optimizer state"]),
        other=_total(by_role["other"]),
    )
    return PlanReport(dict(axes), tuple(arrays), totals, program)


def total_bytes(items: Iterable[PlannedArray | Traffic | ClosedOver]) -> int:
    """The sum of the bytes of some items."""
    return sum(map(attrgetter("bytes"), items))


def _total(arrays: Sequence[PlannedArray]) -> Total:
    each = sum(map(attrgetter("bytes_per_device"), arrays))
    return Total(len(arrays), total_bytes(arrays), each)


# The names of the sums, in the order of the fields of `Totals`.
_ROLES = ("all", "parameter", "optimizer state", "other")
_REPLICATED = ("path", "shape", "bytes", "role", "reason")


def _array_to_json(array: PlannedArray) -> dict[str, Any]:
    return {
        "path": array.path,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "spec": _lists(tuple(array.spec)),
        "kind": array.reason.kind,
        "reason": array.reason.text,
        "together": array.reason.together,
        "role": array.role,
        "parts": array.parts,
        "bytes": array.bytes,
        "bytes_per_device": array.bytes_per_device,
    }


def _program_to_json(program: ProgramReport | None) -> dict[str, Any]:
    """The figures of a program; none for a plan made without a function."""
    if program is None:
        return {}
    figures = asdict(program)
    # Most programs have none of these.
    if not program.split_examples:
        del figures["split_examples"]
    if program.recomputed is None:
        del figures["recomputed"]
    if not program.offloaded:
        del figures["offloaded"]
    figures["memory"]["total"] = program.memory.total
    figures["sequences"] = program.sequences
    figures["coupled"] = []
    if program.coupled is not None:
        figures["coupled"] = [asdict(program.coupled)]
    figures["traffic"] = []
    for traffic in program.traffic:
        entry = asdict(traffic)
        del entry["axes"]
        figures["traffic"].append({"axis": traffic.axis, **entry})
    return _lists(figures)


def _lists(value: Any) -> Any:
    """A value with lists in place of tuples, also inside dicts and tuples."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return list(map(_lists, value))
    return value
