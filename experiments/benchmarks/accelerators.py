"""What compilers for absent accelerators make of a training step of a LLaMA: time and overlap.

    pip install -e ".[experiments,cuda12,tpu]"
    python experiments/benchmarks/accelerators.py h100

The programs are compiled, and not run. The time of a step is a rough estimate: matrix products at
72 % of the device's peak rate, attention at 50 %, and all other kernels at 85 % of its memory
bandwidth, without communication. A collective counts as exposed if it is not asynchronous, or if no
product runs between its start and its end.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from _pages import Printed

import redcoast as rc
from redcoast.core._target import compiling_for
from redcoast.core._tracing import without_ambient_mesh
from redcoast.dryrun._chips import CHIPS
from redcoast.dryrun._job import make_job, plan_job, trace_job
from redcoast.dryrun._place import planner_hardware, target_place
from redcoast.dryrun.hlo._parse import (
    Instruction,
    Module,
    called,
    operands,
    parse_module,
    size_in_bytes,
)
from redcoast.dryrun.hlo._trip_counts import CallScope, inner_scope, loop_scope, trip_count

LAYERS, WIDTH, HIDDEN, VOCABULARY, TOKENS = 16, 2048, 8192, 32000, 2048
HEADS, KV_HEADS = 16, 8
PRODUCTS = 0.72, 0.5, 0.85  # rates of products, of attention and of memory
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
KERNEL = re.compile(
    r'(?:custom_call_target=|"kind":|"name":)"[^"]*(?:gemm|cublas|cudnn|fmha|tpu_custom_call)'
)
FREE = frozenset({"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "iota"})


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of the model: how it is compiled, for which devices."""

    name: str
    target: str
    mesh: dict[str, int]
    rows: int
    remat: Literal["none", "dots", "full"] = "none"
    unroll: int | None = None
    options: dict[str, bool | int | str] | None = None


ONE = {"target": "h100:1", "mesh": {"data": 1}, "rows": 8}
FSDP = {"target": "h100:8", "mesh": {"data": 1, "fsdp": 8}, "rows": 64}
SMALL = {"target": "v5e:2x2", "rows": 4, "remat": "full"}
CASES: dict[str, list[Case]] = {
    "h100": [
        Case("none, unrolled (default)", **ONE),
        Case("none, loop", **ONE, unroll=1, options={}),
        Case("full, loop", **ONE, remat="full", unroll=1, options={}),
        Case("dots, loop", **ONE, remat="dots", unroll=1),
        Case("dots, unrolled", **ONE, remat="dots"),
        Case("none, 4 in a loop", **ONE, unroll=4),
    ],
    "h100-fsdp": [
        Case("none, loop, no options", **FSDP, unroll=1, options={}),
        Case("none, unrolled, no options", **FSDP, options={}),
        Case("none, unrolled (default)", **FSDP),
    ],
    "v5e": [
        Case("fsdp=4 (default)", **SMALL, mesh={"data": 1, "fsdp": 4}),
        Case("model=4", **SMALL, mesh={"data": 1, "model": 4}),
    ],
}


def main(programs: Literal["h100", "h100-fsdp", "v5e"], /) -> None:
    """Prints a table of the programs for these devices."""
    table = Printed()
    heads = ("program", "compile s", "temporaries GB", "kernels", "GB", "exposed", "ms", "MFU %")
    table.add(f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1))
    for case in CASES[programs]:
        table.add(f"| {' | '.join(measure(case))} |")


def measure(case: Case) -> list[str]:
    compiled, seconds = compile_case(case)
    counted = count_kernels(compiled.as_text())
    chip = CHIPS[case.target.partition(":")[0]]
    tokens = case.rows * TOKENS / max(1, len(target_place(case.target).devices))
    product, pairs = arithmetic(tokens)
    peak, (fast, attention, memory) = chip.flops["bfloat16"], PRODUCTS
    again = 4 / 3 if case.remat == "full" else 1  # the forward pass of the layers once more
    head = 6 * WIDTH * VOCABULARY * tokens
    step = ((product - head) * again + head) / (fast * peak)
    step += pairs * again / (attention * peak)
    step += counted["bytes"] / (memory * chip.memory_bandwidth)
    exposed = f"{counted['exposed']:,} ({counted['exposed bytes'] / 1e9:.2f} GB)"
    return [
        case.name,
        f"{seconds:.1f}",
        f"{compiled.memory_analysis().temp_size_in_bytes / 1e9:.1f}",
        f"{counted['kernels']:,}",
        f"{counted['bytes'] / 1e9:.0f}",
        exposed,
        f"{1e3 * step:.0f}",
        f"{100 * (product + pairs) / step / peak:.0f}",
    ]


def arithmetic(tokens: float) -> tuple[float, float]:
    """The operations of a step in products with weights, and in causal attention."""
    head_dim = WIDTH // HEADS
    of_layer = 2 * WIDTH**2 + 2 * WIDTH * KV_HEADS * head_dim + 3 * WIDTH * HIDDEN
    weights = LAYERS * of_layer + WIDTH * VOCABULARY
    return 6 * weights * tokens, 6 * LAYERS * TOKENS * WIDTH * tokens


def compile_case(case: Case) -> tuple[Any, float]:
    """The compiled step, and the processor seconds of its compilation."""
    config = rc.models.LlamaConfig(
        vocab=VOCABULARY,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        hidden=HIDDEN,
        remat=case.remat,
        unroll=case.unroll,
    )
    tokens = jax.ShapeDtypeStruct((case.rows, TOKENS), jnp.int32)

    def loss_fn(model, batch, key):
        return rc.losses.cross_entropy(model(batch["tokens"]), batch["targets"])

    place = target_place(case.target)
    with without_ambient_mesh(), compiling_for(place.device):
        job = make_job(
            lambda key: rc.models.Llama(config, key=key),
            loss_fn,
            {"tokens": tokens, "targets": tokens},
            optax.adamw(1e-4),
            compute_dtype="bfloat16",
            compiler_options=case.options,
        )
        mesh = place.mesh(case.mesh)
        plan = plan_job(job, mesh, planner_hardware(place, mesh))
        lowered = trace_job(job, plan, mesh).lower()
        begin = time.process_time()
        compiled = lowered.compile()
    return compiled, time.process_time() - begin


def count_kernels(text: str) -> Counter[str]:
    """Kernels, the bytes of those that are neither products nor attention, and exposed collectives,
    each as often as it runs."""
    module = parse_module(text)
    counted: Counter[str] = Counter()

    def walk(scope: CallScope, times: int) -> None:
        order = list(scope.computation.instructions.values())
        place = {instruction.name: n for n, instruction in enumerate(order)}
        for n, one in enumerate(order):
            if one.opcode == "while":
                body = loop_scope(scope, one, called(one, "body")[0])
                walk(body, times * (trip_count(scope, one) or 1))
            elif one.opcode == "call":
                walk(inner_scope(scope, one, called(one, "to_apply")[0]), times)
            elif one.opcode.endswith("-done"):
                start = order[place[operands(one)[0]]]
                hides = any(is_product(module, x) for x in order[place[start.name] + 1 : n])
                if collective_of(module, start) and not hides:
                    add_exposed(counted, one, times)
            elif one.opcode in KINDS:
                add_exposed(counted, one, times)
            elif one.opcode not in FREE and not one.opcode.endswith("-start"):
                counted["kernels"] += times
                if not is_product(module, one):
                    counted["bytes"] += times * accessed(module, scope, one)

    walk(CallScope(module, module.entry, lambda number, place: None), 1)
    return counted


def add_exposed(counted: Counter[str], one: Instruction, times: int) -> None:
    counted["exposed"] += times
    counted["exposed bytes"] += times * size_in_bytes(one.shape)


def collective_of(module: Module, start: Instruction) -> bool:
    names = [start.opcode]
    for name in called(start, "calls"):
        names += [x.opcode for x in module.computations[name].instructions.values()]
    return any(name.removesuffix("-start") in KINDS for name in names)


def is_product(module: Module, one: Instruction) -> bool:
    """Whether a kernel is a matrix product or attention."""
    if one.opcode in ("dot", "convolution", "while"):
        return True
    if KERNEL.search(one.rest):
        return True
    if one.opcode != "fusion":
        return False
    inside = module.computations[called(one, "calls")[0]].instructions.values()
    return any(is_product(module, x) for x in inside)


def accessed(module: Module, scope: CallScope, one: Instruction) -> int:
    """The bytes that a kernel reads and writes: of a slice of an array, those of the slice."""
    known = scope.computation.instructions
    sizes = [size_in_bytes(known[name].shape) for name in operands(one) if name in known]
    size = size_in_bytes(one.shape) + sum(sizes)
    if one.opcode != "fusion":
        return size
    inside = module.computations[called(one, "calls")[0]].instructions
    for x in inside.values():
        if x.opcode == "dynamic-slice":
            size += size_in_bytes(x.shape) - whole(inside, operands(x)[:1])
        elif x.opcode == "dynamic-update-slice":
            update = size_in_bytes(inside[operands(x)[1]].shape)
            size += update - 2 * size_in_bytes(x.shape)
    return max(0, size)


def whole(inside: dict[str, Instruction], names: Sequence[str]) -> int:
    """The bytes of those of these that are parameters of a fusion."""
    sizes = [size_in_bytes(inside[x].shape) for x in names if inside[x].opcode == "parameter"]
    return sum(sizes)


if __name__ == "__main__":
    tyro.cli(main)
