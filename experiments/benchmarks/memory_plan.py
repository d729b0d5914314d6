"""Plans for half of the memory of the activations, of models without rematerialisation.

    python experiments/benchmarks/memory_plan.py
    python experiments/benchmarks/memory_plan.py --large
    python experiments/benchmarks/memory_plan.py --tpu

Each model has a layer, which policies by hand wrap in `jax.checkpoint`: all of it (`full`), all
but products (`dots`), all but products with weights (`weights`), and all of every second layer.
`plan` is `plan_shardings(memory=...)` of the model as it is. Temporaries are those of the gradient
as the CPU's compiler reports them, scheduled for little memory, and with the barriers of
`jax.checkpoint`, which this compiler otherwise removes. Arithmetic is that of products and
convolutions, relative to the program without recomputation. `memory` is lowered until the compiled
temporaries are at most half. The last column is the estimate of the plan's activations,
divided by the compiled temporaries.

With `--large`, a step of OPT-66B with AdamW in float32, on 64 sequences of 512 tokens, is compiled
for 64 devices: with all layers rematerialised by hand, and by plans for less and less memory. It is
the compiler for A100 if it is installed, and that for CPUs in its place otherwise. With `--tpu`, it
is compiled for 64 TPU v4, as if each had 18 GiB, with the optimizer's state in the memory of the
host.
"""

import functools as ft
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _pages import Printed
from jaxtyping import PyTree

import redcoast as rc
from redcoast.dryrun._flops import contractions
from redcoast.losses import chunked_cross_entropy
from redcoast.models.sizes import opt_66b

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_disable_hlo_passes": "cse_barrier_expander",
}
POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "weights": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
PARTS = tuple(n / 20 for n in range(14, 1, -1))  # 0.7 to 0.1 of the estimated activations
WIDTH, LAYERS = 128, 8
GIB = 2**30
FSDP = {"fsdp": 64}
# Name, remat, GiB for the plan, and the mesh.
Cases = tuple[tuple[str, str, int | None, dict[str, int]], ...]
LARGE: Cases = (
    ("rematerialised by hand", "full", None, FSDP),
    ("planned for 28 GiB", "auto", 28, FSDP),
    ("planned for 24 GiB", "auto", 24, FSDP),
    ("planned for 18 GiB", "auto", 18, FSDP),
)
TPU: Cases = (("fsdp 16 x model 4, planned for 18 GiB", "auto", 18, {"fsdp": 16, "model": 4}),)
TPU_OPTIONS = {"xla_tpu_max_hbm_size_mib": 18 * 2**10}  # a program that needs more is refused


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def attend(x: jax.Array, p: PyTree, heads: int = 4) -> jax.Array:
    split = lambda y: y.reshape(*y.shape[:-1], heads, -1)
    q, k, v = split(x @ p["q"]), split(x @ p["k"]), split(x @ p["v"])
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), -1)
    return jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape) @ p["o"]


def transformer(x: jax.Array, p: PyTree) -> jax.Array:
    x = x + attend(norm(x), p)
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def gated(x: jax.Array, p: PyTree) -> jax.Array:
    x = x + attend(norm(x), p)
    h = norm(x)
    return x + (jax.nn.silu(h @ p["up"]) * (h @ p["gate"])) @ p["down"]


def parallel(x: jax.Array, p: PyTree) -> jax.Array:
    h = norm(x)
    return x + attend(h, p) + jax.nn.gelu(h @ p["up"]) @ p["down"]


def perceptron(x: jax.Array, p: PyTree) -> jax.Array:
    return jnp.tanh(x @ p["q"])


def residual(x: jax.Array, p: PyTree) -> jax.Array:
    return x + jax.nn.relu(norm(x) @ p["up"]) @ p["down"]


def mixer(x: jax.Array, p: PyTree) -> jax.Array:
    tokens = jnp.einsum("bsd,st->btd", norm(x), p["mix"])
    x = x + jax.nn.gelu(tokens)
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def experts(x: jax.Array, p: PyTree) -> jax.Array:
    shares = jax.nn.softmax(norm(x) @ p["router"], -1)
    hidden = jax.nn.gelu(jnp.einsum("bsd,edh->besh", norm(x), p["ups"]))
    return x + jnp.einsum("besh,ehd,bse->bsd", hidden, p["downs"], shares)


def convolution(x: jax.Array, p: PyTree) -> jax.Array:
    side = int(x.shape[1] ** 0.5)
    image = x.reshape(x.shape[0], side, side, -1)
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = ft.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=numbers,
    )
    hidden = jax.nn.relu(conv(image, p["kernel"]))
    return x + conv(hidden, p["kernel2"]).reshape(x.shape)


def linear_attention(x: jax.Array, p: PyTree) -> jax.Array:
    q, k, v = (jax.nn.elu(norm(x) @ p[name]) + 1 for name in "qkv")
    state = jnp.einsum("bsd,bse->bde", k, v)
    x = x + jnp.einsum("bsd,bde->bse", q, state) / x.shape[1] @ p["o"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


ATTENTION = "q k v o up down"
# The layer, the names of its arrays, and whether layers are scanned.
MODELS: dict[str, tuple[Callable[..., jax.Array], str, bool]] = {
    "transformer, loop": (transformer, ATTENTION, False),
    "transformer, scan": (transformer, ATTENTION, True),
    "gated transformer, loop": (gated, f"{ATTENTION} gate", False),
    "gated transformer, scan": (gated, f"{ATTENTION} gate", True),
    "parallel transformer, loop": (parallel, ATTENTION, False),
    "residual MLP, loop": (residual, "up down", False),
    "mixer, loop": (mixer, "mix up down", False),
    "experts, loop": (experts, "router ups downs", False),
    "convolutions, loop": (convolution, "kernel kernel2", False),
    "linear attention, loop": (linear_attention, ATTENTION, False),
    "perceptron, loop": (perceptron, "q", False),
}


def parameters() -> list[dict[str, jax.Array]]:
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 4 * WIDTH), "gate": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= {"mix": (64, 64), "router": (WIDTH, 4)}
    shapes |= {"ups": (4, WIDTH, WIDTH), "downs": (4, WIDTH, WIDTH)}
    shapes |= {"kernel": (3, 3, WIDTH, WIDTH), "kernel2": (3, 3, WIDTH, WIDTH)}
    random = np.random.default_rng(0)
    make = lambda shape: jnp.asarray(random.normal(0, 0.05, shape), jnp.float32)
    return [{name: make(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def loss_of(layer: Callable[..., jax.Array], scanned: bool, wrap: Any, every: int = 1) -> PyTree:
    """The loss of a model whose layers are wrapped, all or every second one."""

    def loss_fn(model: PyTree, batch: jax.Array, key: jax.Array) -> jax.Array:
        x = batch
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (wrap(layer)(x, p), None), x, model)
            return jnp.mean(norm(x) ** 4)
        for place, p in enumerate(model):
            run = wrap(layer) if place % every == 0 else layer
            x = run(x, p)
        return jnp.mean(norm(x) ** 4)

    return loss_fn


def compiled(loss: Any, model: PyTree, batch: PyTree) -> tuple[int, float]:
    """The bytes of temporaries of the gradient, and its arithmetic."""
    program = jax.jit(jax.grad(loss)).lower(model, batch, None).compile(compiler_options=OPTIONS)
    memory = program.memory_analysis()
    assert memory is not None
    # The compiler counts the body of a loop once.
    counted = contractions(jax.make_jaxpr(jax.grad(loss))(model, batch, None))
    return memory.temp_size_in_bytes, sum(counted.flops.values())


def planned(loss: Any, model: PyTree, batch: PyTree, half: float) -> tuple[int, float, float]:
    """The program of a plan that is asked for half of the temporaries, and its estimate."""
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    plan = ft.partial(rc.plan_shardings, model, mesh, fn=loss, args=(batch, None))
    memory = plan().report.program.memory
    for part in PARTS:
        room = part * memory.activations
        try:
            within = plan(memory=memory.total - memory.activations + room)
        except ValueError:
            break
        size, work = compiled(within.constrain(loss), model, batch)
        if size <= half:
            return size, work, within.report.program.memory.activations / size
    return 0, 0.0, 0.0


def print_large(
    page: Path | None, target: str, cases: Cases, marks: str, options: dict[str, int] | None = None
) -> None:
    """Prints what a step of OPT-66B takes of each device of a target, by a compiler's options."""

    def loss_fn(model: PyTree, tokens: jax.Array, key: jax.Array) -> jax.Array:
        hidden = model.hidden(tokens, key=key)
        return chunked_cross_entropy(hidden, model.unembed, tokens)

    printed = Printed()
    printed.add("| layers | GiB by the plan | GiB as compiled | on the host | more arithmetic |")
    printed.add("|---|---:|---:|---:|---:|")
    tokens = jax.ShapeDtypeStruct((64, 512), jnp.int32)
    for name, remat, memory, mesh in cases:
        try:
            run = rc.dry_run(
                ft.partial(make_large, remat),
                loss_fn,
                tokens,
                optax.adamw(1e-4),
                target=target,
                mesh=mesh,
                suggest=False,
                memory=memory and memory * GIB,
                compiler_options=options,
            )
        except ValueError as error:
            print(error)
            printed.add(f"| {name} | refused | - | - | - |")
            continue
        if run.refused:
            printed.add(f"| {name} | refused | - | - | - |")
            continue
        program = run.plan.report.program
        share = "33.3 %"  # a forward pass of a step of three
        if program.recomputed is not None:
            share = f"{program.recomputed.share:.1%}".replace("%", " %")
        compiled = run.memory["peak"]
        if not run.own_compiler:
            # The compiler for CPUs has no memory apart from the device's.
            compiled -= program.offloaded
        sizes = " | ".join(
            f"{size / GIB:.1f}" for size in (program.memory.total, compiled, program.offloaded)
        )
        printed.add(f"| {name} | {sizes} | {share} |")
    printed.write(page, marks)


def make_large(remat: str, key: jax.Array) -> PyTree:
    return opt_66b(key=key, remat=remat)


def main(
    models: tuple[str, ...] = (),
    page: Path | None = None,
    large: bool = False,
    tpu: bool = False,
) -> None:
    """Prints the memory and the arithmetic of each policy, relative to no recomputation.

    Args:
        models: Names of models; all by default.
        page: A page with the marks `memory_plan`; `memory_plan_large` with `large`, and
            `memory_plan_tpu` with `tpu`.
        large: OPT-66B on 64 A100 instead.
        tpu: OPT-66B on 64 TPU v4 instead.
    """
    if large:
        return print_large(page, "a100-80gb:8x8", LARGE, "memory_plan_large")
    if tpu:
        return print_large(page, "v4:4x4x4", TPU, "memory_plan_tpu", TPU_OPTIONS)
    layers = parameters()
    batch = jnp.asarray(np.random.default_rng(1).normal(size=(32, 64, WIDTH)), jnp.float32)
    printed = Printed()
    printed.add("| model | full | dots | weights | every second | plan | estimated / compiled |")
    printed.add("|---|---:|---:|---:|---:|---:|---:|")
    for name in models or MODELS:
        layer, arrays, scanned = MODELS[name]
        model = [{key: p[key] for key in arrays.split()} for p in layers]
        if scanned:
            model = jax.tree.map(lambda *xs: jnp.stack(xs), *model)
        make = ft.partial(loss_of, layer, scanned)
        plain = make(lambda fn: fn)
        size, flops = compiled(plain, model, batch)
        rows: list[tuple[float, float]] = []
        for policy in POLICIES.values():
            wrap = ft.partial(jax.checkpoint, policy=policy)
            rows.append(compiled(make(wrap), model, batch))
        rows.append((0, 0.0) if scanned else compiled(make(jax.checkpoint, 2), model, batch))
        *of_plan, ratio = planned(plain, model, batch, size / 2)
        rows.append((of_plan[0], of_plan[1]))
        cells = [f"{one / size:.2f}, {work / flops:.3f}" if one else "-" for one, work in rows]
        cells.append(f"{ratio:.2f}" if ratio else "-")
        printed.row(name, *cells)
    printed.write(page, "memory_plan")


if __name__ == "__main__":
    tyro.cli(main)
