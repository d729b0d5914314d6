"""Compiled training steps for absent accelerators: memory, kernels, time and overlap.

    pip install -e ".[experiments,cuda12,tpu]"
    python experiments/benchmarks/accelerators.py h100
    python experiments/benchmarks/accelerators.py steps-gpu --page docs/howto/accelerators.md

The programs are compiled, and not run. The time of a step is the estimate of a dry run. For models
with many layers, programs with a few layers are compiled, and the figures are extrapolated linearly
to all layers, which are alike.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from _pages import Printed
from jaxtyping import PyTree

import redcoast as rc
from redcoast import models
from redcoast.core._target import compiling_for
from redcoast.core._tracing import without_ambient_mesh
from redcoast.dryrun._devices import Place, planner_hardware, target_place
from redcoast.dryrun._job import make_job, plan_job, trace_job
from redcoast.dryrun._links import axis_bandwidths, slow_axes
from redcoast.dryrun._step_time import estimate_step_time
from redcoast.dryrun._target_name import parse_target
from redcoast.dryrun.hlo import temporary_bytes
from redcoast.dryrun.hlo._events import Event, Loop, Start, Transfer, read_schedule
from redcoast.dryrun.hlo._kernels import KernelWork

TOKENS = 2048  # in a sequence
LLAMA_1B = models.LlamaConfig(vocab=32000, width=2048, layers=16, heads=16, kv_heads=8, hidden=8192)
LLAMA_7B = models.LlamaConfig(
    vocab=32000, width=4096, layers=32, heads=32, kv_heads=32, hidden=11008
)
MIXTRAL = models.MixtralConfig(
    vocab=32000, width=4096, layers=32, heads=32, kv_heads=8, hidden=14336
)
CLASSES: dict[type, type] = {
    models.LlamaConfig: models.Llama,
    models.MixtralConfig: models.Mixtral,
}
Programs = Literal["h100", "h100-fsdp", "h100-combine", "v5e", "steps-gpu", "steps-tpu"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of a model: how it is compiled, for which devices."""

    name: str
    target: str
    mesh: dict[str, int]
    rows: int  # sequences of the global batch
    model: Any = LLAMA_1B
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int | None = None
    options: Mapping[str, bool | int | str] | None = None
    depths: tuple[int, int] | None = None  # the numbers of layers that are compiled


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is read off one program; seconds, bytes and numbers for each device."""

    compile_seconds: float
    temporaries: float
    kernels: float
    other_bytes: float  # read and written by kernels that are neither products nor attention
    sent: float
    exposed: float
    seconds: float

    def cells(self) -> list[str]:
        """What a table has of all but the seconds of the compiler."""
        return [
            f"{self.temporaries / 1e9:.1f}",
            f"{self.kernels:,.0f}",
            f"{self.other_bytes / 1e9:.0f}",
            f"{self.sent / 1e9:.1f}",
            f"{1e3 * self.exposed:.1f}",
            f"{1e3 * self.seconds:.0f}",
        ]

    def continued(self, other: "Figures", factor: float) -> "Figures":
        """The figures on the straight line through these and others, `factor` of the way."""
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        # Deep models can hide what shallow ones expose at their ends, but no more than that.
        between = (max(0.0, x + factor * (y - x)) for x, y in zip(mine, others, strict=True))
        return Figures(*between)


ONE = {"target": "h100:1", "mesh": {"data": 1}, "rows": 8}
FSDP = {"target": "h100:8", "mesh": {"data": 1, "fsdp": 8}, "rows": 64}
SMALL = {"target": "v5e:2x2", "rows": 4, "remat": "full"}
SEVEN = {"model": LLAMA_7B, "rows": 16, "remat": "dots", "depths": (2, 4)}
SEVEN_GPU = SEVEN | {"target": "h100:8", "mesh": {"data": 1, "fsdp": 8}}
SEVEN_TPU = SEVEN | {"target": "v5e:4x4", "remat": "full", "depths": None}
SPARSE = {"model": MIXTRAL, "target": "h100:2x8", "mesh": {"data": 1, "fsdp": 16}}
SPARSE |= {"rows": 16, "remat": "full", "depths": (2, 4)}
LOOP: dict[str, Any] = {"remat": "full", "unroll": 1, "options": {}}
# Collectives of up to 128 MiB together, as several projects set, beside the default option.
LARGE: dict[str, bool | int | str] = {"xla_gpu_enable_latency_hiding_scheduler": True}
for kind in ("all_gather", "reduce_scatter", "all_reduce"):
    LARGE[f"xla_gpu_{kind}_combine_threshold_bytes"] = 128 * 2**20
# The same model with fewer layers, which shows what its ends expose.
SHORT: dict[str, Any] = {"model": dataclasses.replace(LLAMA_1B, layers=4)}
SHORT_FSDP: dict[str, Any] = FSDP | SHORT
SHORT_DATA: dict[str, Any] = SHORT_FSDP | {"mesh": {"data": 8}}
SHORT_HOSTS: dict[str, Any] = SHORT | {"target": "h100:16x8", "rows": 1024}
SHORT_HOSTS |= {"mesh": {"data": 1, "fsdp": 128}}
CASES: dict[Programs, list[Case]] = {
    "h100": [
        Case("none, unrolled (default)", **ONE),
        Case("none, loop", **ONE, unroll=1),
        Case("full, loop", **ONE, **LOOP),
        Case("dots, unrolled", **ONE, remat="dots"),
    ],
    "h100-fsdp": [
        Case("none, unrolled (default)", **FSDP),
        Case("none, unrolled, 128 MiB", **FSDP, options=LARGE),
        Case("none, loop", **FSDP, unroll=1),
        Case("none, loop, 128 MiB", **FSDP, unroll=1, options=LARGE),
    ],
    "h100-combine": [
        Case("fsdp=8, 8 H100", **SHORT_FSDP),
        Case("the same, 128 MiB", **SHORT_FSDP, options=LARGE),
        Case("fsdp=8, layers in a loop", **SHORT_FSDP, unroll=1),
        Case("the same, 128 MiB", **SHORT_FSDP, unroll=1, options=LARGE),
        Case("data=8", **SHORT_DATA),
        Case("the same, 128 MiB", **SHORT_DATA, options=LARGE),
        Case("fsdp=128, 16 hosts of 8 H100", **SHORT_HOSTS),
        Case("the same, 128 MiB", **SHORT_HOSTS, options=LARGE),
    ],
    "v5e": [
        Case("fsdp=4 (default)", **SMALL, mesh={"data": 1, "fsdp": 4}),
        Case("model=4", **SMALL, mesh={"data": 1, "model": 4}),
    ],
    "steps-gpu": [
        Case("1.1B, H100: loop, full remat", **ONE, **LOOP),
        Case("1.1B, H100: default", **ONE),
        Case("7B, 8 H100: loop, full remat", **SEVEN_GPU | LOOP),
        Case("7B, 8 H100: default, dots", **SEVEN_GPU),
        Case("Mixtral 8x7B, 16 H100: loop, full remat", **SPARSE | LOOP),
        Case("Mixtral 8x7B, 16 H100: unrolled, full remat", **SPARSE, unroll=32),
    ],
    "steps-tpu": [
        Case("7B, 16 v5e: fsdp=16", **SEVEN_TPU, mesh={"data": 1, "fsdp": 16}),
        Case("7B, 16 v5e: model=16", **SEVEN_TPU, mesh={"data": 1, "model": 16}),
    ],
}
HEADS = (
    "program",
    "compile s",
    "temporaries GB",
    "kernels",
    "other GB",
    "sent GB",
    "exposed ms",
    "ms",
    "MFU %",
)


def main(programs: Programs, /, page: Path | None = None, only: tuple[int, ...] = ()) -> None:
    """Prints a table of the programs for these devices.

    Args:
        programs: The table.
        page: A page with a place for the table, to write it into.
        only: The numbers of the rows to measure, from 0; by default all.
    """
    table = Printed()
    table.add(f"| {' | '.join(HEADS)} |", "| --- |" + " ---: |" * (len(HEADS) - 1))
    for number, case in enumerate(CASES[programs]):
        if not only or number in only:
            table.row(*row(case))
    table.write(page, programs)


def row(case: Case) -> list[str]:
    figures = measure(case)
    chip = parse_target(case.target).chip
    tokens = case.rows * TOKENS / parse_target(case.target).count
    utilisation = model_flops(case.model) * tokens / figures.seconds / chip.flops["bfloat16"]
    return [
        case.name,
        f"{figures.compile_seconds:.0f}",
        *figures.cells(),
        f"{100 * utilisation:.0f}",
    ]


def model_flops(config: Any) -> float:
    """Operations for each token of a step: six for each parameter that it meets, apart from the
    embedding, and those of causal attention."""
    size = config.width // config.heads
    projections = 2 * config.width * size * (config.heads + config.kv_heads)
    feed_forward = 3 * config.width * config.hidden
    if isinstance(config, models.MixtralConfig):
        feed_forward *= config.chosen
    weights = config.layers * (projections + feed_forward) + config.width * config.vocab
    return 6 * (weights + config.layers * TOKENS * config.width)


def measure(case: Case, compile_one: Callable[[Case], Figures] | None = None) -> Figures:
    """The figures of a step, if need be continued from programs with fewer layers.

    `compile_one` compiles another program than ours.
    """
    compile_one = compile_one or compile_case
    if case.depths is None:
        return compile_one(case)
    few, more = case.depths
    first, second = (compile_one(at_depth(case, depth)) for depth in case.depths)
    return first.continued(second, (case.model.layers - few) / (more - few))


def at_depth(case: Case, layers: int) -> Case:
    return dataclasses.replace(case, model=dataclasses.replace(case.model, layers=layers))


@contextlib.contextmanager
def compiling_ahead(target: str) -> Iterator[Place]:
    """Programs that are traced inside are for the devices of a target, which are not there."""
    place = target_place(target)
    with without_ambient_mesh(), compiling_for(place.device):
        yield place


def compile_case(case: Case) -> Figures:
    config = dataclasses.replace(case.model, remat=case.remat, unroll=case.unroll)
    tokens = jax.ShapeDtypeStruct((case.rows, TOKENS), jnp.int32)

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return rc.losses.cross_entropy(model(batch["tokens"]), batch["targets"])

    with compiling_ahead(case.target) as place:
        job = make_job(
            lambda key: CLASSES[type(config)](config, key=key),
            loss_fn,
            {"tokens": tokens, "targets": tokens},
            optax.adamw(1e-4),
            compute_dtype="bfloat16",
            compiler_options=case.options,
        )
        mesh = place.mesh(case.mesh)
        plan = plan_job(job, mesh, planner_hardware(place, mesh))
        lowered = trace_job(job, plan, mesh).lower()
    return compile_lowered(lowered, case.target, mesh)


def compile_lowered(lowered: jax.stages.Lowered, target: str, mesh: jax.sharding.Mesh) -> Figures:
    """Compiles a program for a target, and reads it."""
    begin = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - begin
    events = read_schedule(compiled.as_text(), mesh)
    devices = parse_target(target)
    step = estimate_step_time(
        events,
        chip=devices.chip,
        bandwidths=axis_bandwidths(devices, mesh),
        slow_axes=slow_axes(devices, mesh),
        groups=devices.groups,
    )
    memory: Any = compiled.memory_analysis()
    others, sent = traffic(events)
    return Figures(
        compile_seconds=seconds,
        temporaries=temporary_bytes(memory, mesh.devices.flat[0].platform),
        kernels=step.kernels,
        other_bytes=others,
        sent=sent,
        exposed=sum(step.exposed.values()),
        seconds=step.seconds,
    )


def traffic(events: Sequence[Event]) -> tuple[float, float]:
    """The bytes of kernels that are neither products nor attention, and those sent to devices."""
    others = sent = 0.0
    for event in events:
        match event:
            case KernelWork(_, "other", _, size):
                others += size
            case Transfer() | Start(_, _):
                transfer = event if isinstance(event, Transfer) else event.transfer
                sent += transfer.sent_bytes if transfer.axes else 0
            case Loop(times, inner):
                some_others, some_sent = traffic(inner)
                others += times * some_others
                sent += times * some_sent
    return others, sent


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
