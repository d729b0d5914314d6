"""The estimated time of a step, compared with training runs that others have published.

    python experiments/benchmarks/published_runs.py --compile
    python experiments/benchmarks/published_runs.py --fit
    python experiments/benchmarks/published_runs.py --page docs/measured/published_runs.md

`published/runs.toml` has the runs and their sources. `--compile` compiles redcoast's program for
the same model, batch, mesh and target, with the compilers of `redcoast[cuda12,tpu]`, which need no
device, and keeps its schedule in `published/<program>.json`. That takes minutes for each program;
programs that have a file are not compiled again. `--fit` prints the efficiencies that fit the runs
that the file names for it. Without options, the script prints all runs, as predicted with the
efficiencies of the library.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

import contextlib
import functools as ft
import itertools as it
import json
import math
import multiprocessing
import re
import statistics
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import tyro
from _pages import Printed
from jax.sharding import Mesh
from jaxlib.xla_client import make_cpu_client
from jaxtyping import PyTree
from megatron_ahead import spec

import redcoast as rc
from redcoast import models
from redcoast.core._target import compiling_for
from redcoast.core._tracing import without_ambient_mesh
from redcoast.dryrun._chips import Chip
from redcoast.dryrun._devices import missing_compiler, planner_hardware, target_place
from redcoast.dryrun._efficiencies import Efficiencies, efficiencies_of
from redcoast.dryrun._job import make_job, trace_job
from redcoast.dryrun._links import axis_bandwidths, slow_axes
from redcoast.dryrun._step_time import StepTime, estimate_step_time
from redcoast.dryrun._target_name import TargetDevices, parse_target
from redcoast.dryrun.hlo._events import Done, Event, Loop, Start, Transfer, read_schedule
from redcoast.dryrun.hlo._kernels import KernelWork
from redcoast.losses import cross_entropy
from redcoast.models import _attention

FOLDER = Path(__file__).parent / "published"
DEPTHS = (2, 4)  # the numbers of unrolled layers that are compiled
CONFIGS = {"llama": models.LlamaConfig, "gpt2": models.GPT2Config}
CLASSES = {"llama": models.Llama, "gpt2": models.GPT2}
# Machine code is not read, only the schedule. The runs recompute nothing but what `remat` says.
OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_disable_hlo_passes": "rematerialization",
}


@dataclass(frozen=True)
class Program:
    """A model with its batch, mesh and precision, and the runs of it that were published."""

    name: str
    project: str
    fit: bool
    target: str
    mesh: Mapping[str, int]
    rows: int  # sequences for each device and microbatch
    seq: int
    remat: str
    model: Mapping[str, Any]
    runs: Sequence[Mapping[str, float]]
    accumulate: int = 1
    fused_attention: bool = True
    chip: Mapping[str, float] | None = None
    differs: str = ""  # work of the published program that ours does not do

    @property
    def devices(self) -> TargetDevices:
        return parse_target(self.target)

    @property
    def tokens(self) -> int:
        """Tokens for each device and step."""
        return self.rows * self.accumulate * self.seq


@dataclass(frozen=True)
class Prediction:
    """A published run beside its prediction, in seconds for a step."""

    program: Program
    groups: int  # hosts or slices
    published: float
    step: StepTime

    @property
    def error(self) -> float:
        return self.step.seconds / self.published - 1


def main(
    compile: bool = False,
    fit: bool = False,
    only: tuple[str, ...] = (),
    page: Path | None = None,
) -> None:
    """Compiles programs, fits efficiencies, or prints predictions beside published runs.

    Args:
        compile: Compile the programs that have no file yet, and whose compiler is installed.
        fit: Print the efficiencies that fit the runs that are marked for it.
        only: The names of the programs to take; by default all.
        page: A page of `docs/measured/` to write the tables into.
    """
    programs = [program for program in read_programs() if not only or program.name in only]
    if compile:
        for program in programs:
            if not stored(program).exists() and not missing_compiler(program.devices.chip):
                print(program.name, flush=True)
                text = json.dumps(compile_depths(program), separators=(",", ":"))
                stored(program).write_text(text + "\n", "utf-8")
        return
    programs = [program for program in programs if stored(program).exists()]
    if fit:
        for family, efficiencies in fit_efficiencies(programs).items():
            print(family, efficiencies)
        return
    write(predict(programs), page)


def read_programs() -> list[Program]:
    data = tomllib.loads((FOLDER / "runs.toml").read_text("utf-8"))
    return [Program(**fields) for fields in data["program"]]


def stored(program: Program) -> Path:
    return FOLDER / f"{program.name}.json"


# Compiling


def compile_depths(program: Program) -> dict[str, Any]:
    """The schedules of our step, by the number of layers that are compiled.

    All layers are alike. A loop over them is compiled as it is, and of unrolled layers a few.
    """
    depths = [program.model["layers"]]
    if program.devices.chip.kind == "gpu":
        depths = [depth for depth in DEPTHS if depth < program.model["layers"]]
    schedules = {}
    for depth in depths:
        shallow = replace(program, model={**program.model, "layers": depth})
        schedules[str(depth)] = compile_program(shallow)
    return schedules


def compile_program(program: Program) -> dict[str, Any]:
    """The schedule of our step for this model, batch, mesh and target."""
    mesh = {axis: program.mesh.get(axis, 1) for axis in ("data", "fsdp", "model")}
    if program.devices.chip.kind == "tpu":
        text = schedule_text(program)
    else:
        text = lower_program(program).compile(compiler_options=OPTIONS).as_text()
    return {"jax": jax.__version__, "events": encode(read_schedule(text, mesh))}


def schedule_text(program: Program) -> str:
    """The program's schedule, which the compiler for TPUs writes before it generates machine code.

    The schedule takes seconds, and machine code minutes, for which this does not wait.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(
            (
                f"--xla_jf_dump_to={folder}",
                "--xla_jf_dump_hlo_text=true",
                "--xla_jf_dump_llo_text=false",
            )
        )
        child = multiprocessing.get_context("spawn").Process(target=compile_all, args=(program,))
        child.start()
        text = ""
        while not text.endswith("\n}\n\n"):
            if text == "" and not child.is_alive():
                raise SystemExit(f"{program.name} was not compiled; see above.")
            time.sleep(0.5)
            for file in Path(folder).glob("*-TLP-hlo.txt"):
                text = file.read_text("utf-8")
        child.kill()
        child.join()
    return text


def compile_all(program: Program) -> None:
    lower_program(program).compile()


def lower_program(program: Program) -> jax.stages.Lowered:
    """Our step for this model, batch, mesh and target."""
    config = config_of(program)
    model_class = CLASSES[program.model["kind"]]

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return cross_entropy(model(batch["tokens"]), batch["targets"])

    place = target_place(program.target)
    rows = program.rows * program.accumulate * len(place.devices)
    tokens = jax.ShapeDtypeStruct((rows, program.seq), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    with without_ambient_mesh(), compiling_for(place.device):
        mesh = place.mesh(program.mesh)
        hardware = planner_hardware(place, mesh)
        is_tensor_parallel = mesh.shape["model"] > 1
        if is_tensor_parallel:
            # The runs did fit. For want of memory, the planner would split the sequence instead.
            hardware = replace(hardware, memory=None)
        init_fn = lambda key: model_class(config, key=key)
        job = make_job(
            init_fn,
            loss_fn,
            batch,
            optax.adamw(1e-4),
            accumulate=program.accumulate,
            compute_dtype=jnp.bfloat16,
            overrides=tensor_parallel(init_fn, mesh),
        )
        plan = rc.plan_step(
            job.state,
            loss_fn,
            batch,
            mesh,
            accumulate=program.accumulate,
            compute_dtype=jnp.bfloat16,
            overrides=job.overrides,
            hardware=hardware,
            # All these runs also split what is between the tensor-parallel parts.
            sequence=is_tensor_parallel,
        )
        with attention(fused=program.fused_attention):
            return trace_job(job, plan, mesh).lower()


@contextlib.contextmanager
def attention(*, fused: bool) -> Iterator[None]:
    """Attention with the kernels of a device, or with all scores in memory."""
    if fused:
        yield
        return
    with mock.patch.object(_attention, "_has_kernel", return_value=False):
        yield


def tensor_parallel(init_fn: Any, mesh: Mesh) -> list[Any]:
    """Megatron's shardings over `model`, which runs that name this axis have, whatever the planner
    would choose."""
    if mesh.shape["model"] == 1:
        return []
    model = eqx.filter_eval_shape(init_fn, jax.random.key(0))
    overrides = []
    for path, x in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(x, jax.ShapeDtypeStruct):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            overrides.append((f"^{re.escape(name)}$", spec(name, x.shape, mesh)))
    return overrides


def config_of(program: Program) -> Any:
    sizes = {name: value for name, value in program.model.items() if name != "kind"}
    # None of the runs on GPUs scans its layers, and all on TPUs do.
    unroll = 1
    if program.devices.chip.kind == "gpu":
        unroll = program.model["layers"]
    return CONFIGS[program.model["kind"]](**sizes, remat=program.remat, unroll=unroll)


_MISALIGNED = "misaligned product"


def encode(events: Sequence[Event]) -> list[Any]:
    """Events as JSON. Kernels that follow each other are one, if they are equal or have no
    products: their times then depend on their number and the sum of their bytes."""
    encoded: list[list[Any]] = []
    begun = {event.key for event in events if isinstance(event, Start)}
    for event in events:
        match event:
            case KernelWork(_, kind, flops, size, misaligned):
                if misaligned:
                    kind = _MISALIGNED
                before = []
                if encoded:
                    before = encoded[-1]
                alike = before[:3] == ["kernel", kind, dict(flops)]
                if alike and (not flops or before[3] == size * before[4]):
                    before[3] += size
                    before[4] += 1
                else:
                    encoded.append(["kernel", kind, dict(flops), size, 1])
            case Transfer():
                encoded.append(["transfer", *encode_transfer(event)])
            case Start(key, transfer):
                encoded.append(["start", key, *encode_transfer(transfer)])
            case Done(key) if key in begun:
                encoded.append(["done", key])
            case Loop(times, inner, exact):
                encoded.append(["loop", times, exact, encode(inner)])
    return encoded


def encode_transfer(transfer: Transfer) -> list[Any]:
    return [transfer.kind, list(transfer.axes), transfer.sent_bytes, transfer.devices]


def decode(data: Sequence[Any]) -> Iterator[Event]:
    """The events of `encode`."""
    for kind, *rest in data:
        match kind:
            case "kernel":
                what, flops, size, times = rest
                misaligned = what == _MISALIGNED
                if misaligned:
                    what = "product"
                each = KernelWork("", what, tuple(flops.items()), size // times, misaligned)
                yield from it.repeat(each, times)
            case "transfer":
                yield decode_transfer(rest)
            case "start":
                yield Start(rest[0], decode_transfer(rest[1:]))
            case "done":
                yield Done(rest[0])
            case "loop":
                yield Loop(rest[0], tuple(decode(rest[2])), rest[1])


def decode_transfer(data: Sequence[Any]) -> Transfer:
    kind, axes, size, devices = data
    return Transfer(kind, tuple(axes), size, devices)


@ft.cache
def schedules_of(path: Path) -> dict[int, tuple[Event, ...]]:
    """The schedules of a program by their numbers of layers."""
    data = json.loads(path.read_text("utf-8"))
    return {int(layers): tuple(decode(schedule["events"])) for layers, schedule in data.items()}


# Predicting


def predict(
    programs: Sequence[Program], efficiencies: Mapping[str, Efficiencies] | None = None
) -> list[Prediction]:
    """All runs of some programs, with the efficiencies of the library or others, by family."""
    predictions = []
    for program in programs:
        attained = None
        if efficiencies is not None:
            attained = efficiencies[family_of(program)]
        for run in program.runs:
            groups = int(run["groups"])
            step = predicted(program, groups, attained)
            predictions.append(Prediction(program, groups, published_seconds(program, run), step))
    return predictions


def predicted(program: Program, groups: int, attained: Efficiencies | None) -> StepTime:
    """The estimated step of a program on so many hosts or slices.

    A program is compiled for one slice, or for the hosts of its target. With more of them, their
    gradients are summed over the network between them, behind the backward pass of all but the last
    layer.
    """
    chip = chip_of(program)
    devices = program.devices
    bandwidths, slow = links_of(program.name)
    estimate = ft.partial(
        estimate_step_time,
        chip=chip,
        bandwidths=bandwidths,
        slow_axes=slow,
        efficiencies=attained,
        groups=groups,
    )
    schedules = schedules_of(stored(program))
    steps = {layers: estimate(events) for layers, events in schedules.items()}
    step = at_depth(steps, program.model["layers"])
    compiled_groups = devices.hosts
    if chip.kind == "tpu":
        compiled_groups = 1
    if groups == compiled_groups:
        return step
    if attained is None:
        attained = efficiencies_of(chip)
    gradients = 2 * parameters(program) / devices.count
    sent_bytes = 2 * (groups - 1) / groups * gradients
    summing = sent_bytes / (attained.between * chip.host_bandwidth)
    backward = 0.6 * (step.products + step.attention + step.other)
    waited = max(summing / program.model["layers"], summing - backward)
    return replace(step, seconds=step.seconds + waited, exposed={**step.exposed, "between": waited})


def at_depth(steps: Mapping[int, StepTime], layers: int) -> StepTime:
    """The step of a model with so many layers, on the straight line through those of shallower
    models."""
    if layers in steps:
        return steps[layers]
    (few, first), (more, second) = sorted(steps.items())
    factor = (layers - few) / (more - few)
    # Deep models can hide what shallow ones expose at their ends, but no more than that.
    between = lambda x, y: max(0.0, x + factor * (y - x))

    def between_all(x: Mapping[str, float], y: Mapping[str, float]) -> dict[str, float]:
        return {axes: between(x.get(axes, 0.0), y.get(axes, 0.0)) for axes in {**x, **y}}

    products = between(first.products, second.products)
    attention = between(first.attention, second.attention)
    rest = between(first.other, second.other)
    exposed = between_all(first.exposed, second.exposed)
    waiting = between(first.waiting, second.waiting)
    seconds = products + attention + rest + sum(exposed.values()) + waiting
    at_peak = between(first.seconds * first.utilisation, second.seconds * second.utilisation)
    return StepTime(
        seconds=seconds,
        products=products,
        attention=attention,
        other=rest,
        exposed=exposed,
        hidden=between_all(first.hidden, second.hidden),
        waiting=waiting,
        kernels=round(between(first.kernels, second.kernels)),
        utilisation=at_peak / seconds,
        misaligned=between(first.misaligned, second.misaligned),
    )


def chip_of(program: Program) -> Chip:
    chip = program.devices.chip
    if program.chip is None:
        return chip
    return replace(chip, **program.chip)


@ft.cache
def links_of(name: str) -> tuple[dict[str, float], frozenset[str]]:
    """The bandwidths along the axes of a program's mesh, and the axes between hosts or slices."""
    (program,) = (program for program in read_programs() if program.name == name)
    devices = replace(program.devices, chip=chip_of(program))
    # CPU devices stand for the target's, whose places follow from their order.
    stand_ins = make_cpu_client(num_devices=devices.count).devices()
    mesh = rc.make_mesh(**program.mesh, devices=stand_ins)
    return axis_bandwidths(devices, mesh), slow_axes(devices, mesh)


def family_of(program: Program) -> str:
    chip = program.devices.chip
    if chip.kind == "tpu":
        return "tpu"
    return chip.name.partition("-")[0]


def parameters(program: Program) -> int:
    """The number of parameters, without the input embedding unless it is tied."""
    model = program.model
    size = model.get("head_size", model["width"] // model["heads"])
    heads = 2 * model["heads"] + 2 * model.get("kv_heads", model["heads"])
    matrices = 2
    if model["kind"] == "llama":
        matrices = 3
    layer = model["width"] * (heads * size + matrices * model["hidden"])
    return model["layers"] * layer + model["vocab"] * model["width"]


def model_flops(program: Program) -> float:
    """Model operations for each device and step, as MaxText counts them."""
    model = program.model
    size = model.get("head_size", model["width"] // model["heads"])
    attention = 12 * model["layers"] * model["heads"] * size * program.seq
    return program.tokens * (6 * parameters(program) + attention)


def published_seconds(program: Program, run: Mapping[str, float]) -> float:
    if "seconds" in run:
        return run["seconds"]
    if "tokens" in run:
        return program.tokens / run["tokens"]
    return model_flops(program) / (run["tflops"] * 1e12)


# Fitting


STEPS = {
    "product": (0.45, 0.98),
    "attention": (0.2, 0.9),
    "memory": (0.5, 1.0),
    "network": (0.4, 1.0),
    "between": (0.2, 1.0),
    "per_doubling": (0.0, 0.03),
}


def fit_efficiencies(programs: Sequence[Program]) -> dict[str, Efficiencies]:
    """By family of chips, the efficiencies with the least mean square of the logarithm of
    predicted over published, one after another."""
    families: dict[str, list[Program]] = {}
    for program in programs:
        if program.fit:
            families.setdefault(family_of(program), []).append(program)
    return {family: fit_family(family, some) for family, some in families.items()}


def fit_family(family: str, programs: Sequence[Program]) -> Efficiencies:
    best = efficiencies_of(programs[0].devices.chip)

    def loss(attained: Efficiencies) -> float:
        predictions = predict(programs, {family: attained})
        # A weak pull towards the start decides what the runs leave open.
        prior = sum((getattr(attained, name) - getattr(best_at_start, name)) ** 2 for name in STEPS)
        squares = [math.log1p(prediction.error) ** 2 for prediction in predictions]
        return sum(squares) / len(squares) + 1e-3 * prior

    best_at_start = best
    for width in (0.2, 0.1, 0.05, 0.02, 0.01):
        for name, (low, high) in STEPS.items():
            scale = width * (high - low)
            values = [getattr(best, name) + scale * step for step in (-2, -1, 0, 1, 2)]
            tried = [replace(best, **{name: min(high, max(low, value))}) for value in values]
            best = min(tried, key=loss)
    return best


# Tables


def write(predictions: Sequence[Prediction], page: Path | None) -> None:
    for fitted, name in ((True, "fitted"), (False, "blind")):
        rows = [prediction for prediction in predictions if prediction.program.fit == fitted]
        table = Printed()
        if rows:
            table.add(*summary(rows), "", *lines(rows))
        table.write(page, name)
        print()
    ordered = Printed()
    ordered.add(*order(predictions))
    ordered.write(page, "order")


HEADS = (
    "run",
    "hosts or slices",
    "published s",
    "predicted s",
    "error",
    "products",
    "attention",
    "other",
    "exposed",
    "waiting",
)


def lines(predictions: Sequence[Prediction]) -> list[str]:
    rows = [f"| {' | '.join(HEADS)} |", "| --- " + "| ---: " * (len(HEADS) - 1) + "|"]
    for prediction in predictions:
        step = prediction.step
        exposed = sum(step.exposed.values())
        cells = [
            prediction.program.name,
            str(prediction.groups),
            f"{prediction.published:.3g}",
            f"{step.seconds:.3g}",
            f"{prediction.error:+.0%}",
        ]
        for part in (step.products, step.attention, step.other, exposed, step.waiting):
            cells.append(f"{part / step.seconds:.0%}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def size_of_error(prediction: Prediction) -> float:
    return abs(prediction.error)


def summary(predictions: Sequence[Prediction]) -> list[str]:
    errors = [*map(size_of_error, predictions)]
    worst = max(predictions, key=size_of_error)
    projects = len({prediction.program.project for prediction in predictions})
    text = [
        f"{len(predictions)} runs of {projects} projects: the median error is "
        f"{statistics.median(errors):.0%}, the largest {max(errors):.0%} ({worst.program.name}).",
    ]
    alike = [prediction for prediction in predictions if not prediction.program.differs]
    if len(alike) < len(predictions):
        worst = max(alike, key=size_of_error)
        text.append(
            f"Of the {len(alike)} whose programs do the work of ours, the largest is "
            f"{abs(worst.error):.0%} ({worst.program.name})."
        )
    return text


def order(predictions: Sequence[Prediction]) -> list[str]:
    """How often the faster of two runs, by tokens of a model per device, is predicted so."""
    right = total = 0
    wrong = []
    rate = lambda x, seconds: model_flops(x.program) / seconds
    for a, b in it.combinations(predictions, 2):
        if not comparable(a, b):
            continue
        published = rate(a, a.published) / rate(b, b.published)
        estimated = rate(a, a.step.seconds) / rate(b, b.step.seconds)
        if abs(published - 1) < 0.02:
            continue
        total += 1
        if (published > 1) == (estimated > 1):
            right += 1
        else:
            names = f"{a.program.name} on {a.groups}, {b.program.name} on {b.groups}"
            wrong.append(f"- {names}: published {published:.2f}, predicted {estimated:.2f}")
    summary = f"Of {total} pairs of runs of one project and chip, {right} are in the right order."
    return [summary, *wrong]


def comparable(a: Prediction, b: Prediction) -> bool:
    """Whether two runs are of one project, on one kind of chip."""
    same_project = a.program.project == b.program.project
    return same_project and a.program.devices.chip == b.program.devices.chip


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
