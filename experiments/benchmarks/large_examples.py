"""One example on eight devices: memory and communication of a step, against one device.

    python experiments/benchmarks/large_examples.py
    python experiments/benchmarks/large_examples.py --names pair unet --data 2 --model 4 --rows 2
    python experiments/benchmarks/large_examples.py --platform a100

Each program computes a loss and its gradients for a batch of one example. `before` leaves it to
XLA: every device computes the example. `after` is the plan for devices whose memory is a sixth of
the temporaries of one device, and its constrained loss. `by hand` constrains the inputs along one
dimension, and in the forecast also the edges that its loss closes over. Of several constraints it
is the one with the fewest bytes, among those whose temporaries are at most 1.3 / 8 of one device's
if there are any. Parameters are stored in all three as in the plan: with the default mesh, they are
replicated. Temporaries are those of the compiler, relative to one device's (1/8 is ideal), and
bytes those that each device sends; `planned` is the plan's estimate of them. Errors are relative to
the largest element of the loss and of each gradient.
"""

# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import tyro
from _pages import Printed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from traffic.targets import Platform, target_devices

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes, temporary_bytes

rc.emulate_devices(8)
KEY = jr.key(0)
DEVICES = 8
# Programs of this size would fit into the memory on the chip of a TPU v4.
OPTIONS: dict[str, dict[str, Any]] = {"tpu": {"xla_tpu_cmem_memory_space_assignment": False}}
LARGEST_SHARE = 1.3 / DEVICES  # of one device's temporaries


@dataclass(frozen=True)
class Example:
    """A loss of a model and a batch, and the dimensions that may be split by hand.

    `with_edges` returns the loss with a constraint of the edges that it closes over.
    """

    loss: Callable[..., Any]
    model: Any
    batch: Any
    dims: tuple[int, ...]
    with_edges: Callable[[Callable[[Any], Any]], Callable[..., Any]] | None = None


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def squared_error(predict: Callable[..., Any]) -> Callable[..., Any]:
    """The mean squared error of a prediction for each example."""

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        x, y = batch
        return jnp.mean((jax.vmap(lambda x: predict(model, x))(x) - y) ** 2)

    return loss


def normalized(z: jax.Array) -> jax.Array:
    mean, variance = z.mean(-1, keepdims=True), z.var(-1, keepdims=True)
    return (z - mean) * jax.lax.rsqrt(variance + 1e-5)


def matrix(key: jax.Array, width: int, out: int) -> jax.Array:
    return jr.normal(key, (width, out)) / width**0.5


def attention(p: PyTree, z: jax.Array, heads: int = 4) -> jax.Array:
    """Attention along the second last dimension."""
    split = lambda w: (z @ w).reshape(*z.shape[:-1], heads, -1)
    q, k, v = (split(p[name]) for name in "qkv")
    scores = jnp.einsum("...jhc,...khc->...hjk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("...hjk,...khc->...jhc", jax.nn.softmax(scores), v).reshape(z.shape) @ p["e"]


def pair(
    rows: int, *, triangle_attention: bool = False, size: int = 64, width: int = 32
) -> Example:
    """A pair matrix with triangle updates, as in AlphaFold, one block rematerialised at a time."""
    names = {"a": 1, "b": 1, "g": 1, "o": 1, "u": 4, "q": 1, "k": 1, "v": 1, "e": 1}

    def block_of(key: jax.Array) -> PyTree:
        keys = jr.split(key, len(names) + 1)
        block = {
            name: matrix(k, width, width * factor)
            for (name, factor), k in zip(names.items(), keys, strict=False)
        }
        return block | {"d": matrix(keys[-1], 4 * width, width)}

    def triangle(p: PyTree, z: jax.Array, product: str) -> jax.Array:
        n = normalized(z)
        mixed = jnp.einsum(product, n @ p["a"], n @ p["b"])
        return z + jax.nn.sigmoid(n @ p["g"]) * (normalized(mixed) @ p["o"])

    @jax.checkpoint
    def block(p: PyTree, z: jax.Array) -> jax.Array:
        z = triangle(p, z, "ikc,jkc->ijc")
        z = triangle(p, z, "kic,kjc->ijc")
        if triangle_attention:
            z = z + attention(p, normalized(z))
            z = z + jnp.swapaxes(attention(p, normalized(jnp.swapaxes(z, 0, 1))), 0, 1)
        return z + jax.nn.relu(normalized(z) @ p["u"]) @ p["d"]

    def predict(model: PyTree, z: jax.Array) -> PyTree:
        for p in model:
            z = block(p, z)
        return z

    batch = normal(rows, size, size, width)
    model = [block_of(key) for key in jr.split(KEY, 2)]
    return Example(squared_error(predict), model, (batch, batch[:, ::-1]), (1, 2))


def unet(
    rows: int, *, ndim: int = 2, size: tuple[int, ...] = (128, 128), width: int = 16
) -> Example:
    """Convolutions with strides, pooling, upsampling, a transposed convolution and skips."""
    conv_of, up_of = eqx.nn.Conv, eqx.nn.ConvTranspose
    keys = jr.split(KEY, 7)
    conv = lambda i, a, b, **how: conv_of(ndim, a, b, 3, padding=1, key=keys[i], **how)
    model = {
        "first": conv(0, 4, width),
        "down": conv(1, width, 2 * width, stride=2),
        "deep": conv(2, 2 * width, 2 * width),
        "middle": conv(3, 2 * width, 2 * width),
        "up": up_of(ndim, 2 * width, width, 2, stride=2, key=keys[4]),
        "joined": conv(5, 2 * width, width),
        "last": conv(6, width, 4),
    }
    pool = (eqx.nn.MaxPool2d if ndim == 2 else eqx.nn.MaxPool3d)(2, 2)

    def predict(m: Any, x: jax.Array) -> jax.Array:
        fine = jax.nn.gelu(m["first"](x))
        coarse = jax.nn.gelu(m["down"](fine))
        h = jax.nn.gelu(m["middle"](pool(jax.nn.gelu(m["deep"](coarse)))))
        h = m["up"](jax.image.resize(h, coarse.shape, "nearest") + coarse)
        return m["last"](jax.nn.gelu(m["joined"](jnp.concatenate([h, fine]))))

    batch = normal(rows, 4, *size)
    return Example(squared_error(predict), model, (batch, batch[..., ::-1]), (2, 3))


def mlp(key: jax.Array, width: int, into: int, out: int) -> Any:
    return eqx.nn.MLP(into, out, width, 1, jax.nn.silu, key=key)


def random_edges(edges: int, senders: int, receivers: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(edges)
    sent, received = rng.integers(0, senders, edges), rng.integers(0, receivers, edges)
    return sent.astype(np.int32), received.astype(np.int32)


def mesh_forecast(rows: int, *, grid: int = 4096, nodes: int = 1024, width: int = 32) -> Example:
    """From a grid to the nodes of a mesh, four rounds of messages there, and back, as GraphCast."""
    edges = {
        "encode": random_edges(2 * grid, grid, nodes),
        "process": random_edges(8 * nodes, nodes, nodes),
        "decode": random_edges(3 * grid, nodes, grid),
    }
    keys = iter(jr.split(KEY, 20))
    part = lambda: (
        mlp(next(keys), 2 * width, 2 * width, width),
        mlp(next(keys), 2 * width, 2 * width, width),
    )
    model = {
        "embed": mlp(next(keys), width, 8, width),
        "encode": part(),
        "process": [part() for _ in range(4)],
        "decode": part(),
        "last": mlp(next(keys), width, width, 8),
    }

    def messages(
        part: Any, edges: Any, x: jax.Array, y: jax.Array, constrain: Callable[[Any], Any]
    ) -> jax.Array:
        sent, received = map(constrain, edges)
        message, update = part
        inputs = jnp.concatenate([x[sent], y[received]], -1)
        added = jax.ops.segment_sum(jax.vmap(message)(inputs), received, len(y))
        return y + jax.vmap(update)(jnp.concatenate([y, added], -1))

    def with_edges(constrain: Callable[[Any], Any]) -> Callable[..., Any]:
        def predict(m: Any, x: jax.Array) -> jax.Array:
            h = jax.vmap(m["embed"])(x)
            z = messages(m["encode"], edges["encode"], h, jnp.zeros((nodes, width)), constrain)
            for part in m["process"]:
                z = messages(part, edges["process"], z, z, constrain)
            y = messages(m["decode"], edges["decode"], z, h, constrain)
            return x + jax.vmap(m["last"])(y)

        return squared_error(predict)

    batch = normal(rows, grid, 8)
    loss = with_edges(lambda edges: edges)
    return Example(loss, model, (batch, batch[:, ::-1]), (1,), with_edges)


def windows(rows: int, *, size: int = 64, width: int = 32, window: int = 8) -> Example:
    """Attention in windows of an image, every second time shifted by half a window, as Swin."""
    names = {"q": 1, "k": 1, "v": 1, "e": 1, "u": 4}

    def block_of(key: jax.Array) -> PyTree:
        keys = jr.split(key, 6)
        pairs = zip(names.items(), keys, strict=False)
        block = {name: matrix(k, width, width * factor) for (name, factor), k in pairs}
        return block | {"d": matrix(keys[5], 4 * width, width)}

    def block(p: PyTree, z: jax.Array, shift: int) -> jax.Array:
        n = jnp.roll(normalized(z), (-shift, -shift), (0, 1))
        count = size // window
        parts = n.reshape(count, window, count, window, width).swapaxes(1, 2)
        parts = attention(p, parts.reshape(count, count, window * window, width))
        parts = parts.reshape(count, count, window, window, width).swapaxes(1, 2)
        z = z + jnp.roll(parts.reshape(size, size, width), (shift, shift), (0, 1))
        return z + jax.nn.gelu(normalized(z) @ p["u"]) @ p["d"]

    def predict(model: PyTree, z: jax.Array) -> PyTree:
        for i, p in enumerate(model):
            z = jax.checkpoint(block, static_argnums=2)(p, z, window // 2 * (i % 2))
        return z

    model = [block_of(key) for key in jr.split(KEY, 4)]
    batch = normal(rows, size, size, width)
    return Example(squared_error(predict), model, (batch, batch[:, ::-1]), (1, 2))


def fourier(rows: int, *, size: int = 128, width: int = 16, modes: int = 8) -> Example:
    """A Fourier neural operator in two dimensions."""
    keys = jr.split(KEY, 10)
    spectral = lambda key: jr.normal(key, (2, width, width, modes, modes)) / width
    model = {
        "lift": matrix(keys[0], 2, width),
        "layers": [(spectral(keys[i]), matrix(keys[i + 4], width, width)) for i in range(1, 5)],
        "last": matrix(keys[9], width, 2),
    }

    def predict(m: Any, x: jax.Array) -> jax.Array:
        h = jnp.einsum("ixy,io->oxy", x, m["lift"])
        for (real, imaginary), pointwise in m["layers"]:
            spectrum = jnp.fft.rfft2(h)
            low = jnp.einsum("ixy,ioxy->oxy", spectrum[:, :modes, :modes], real + 1j * imaginary)
            spectrum = jnp.zeros_like(spectrum).at[:, :modes, :modes].set(low)
            h = h + jax.nn.gelu(jnp.fft.irfft2(spectrum) + jnp.einsum("ixy,io->oxy", h, pointwise))
        return jnp.einsum("ixy,io->oxy", h, m["last"])

    batch = normal(rows, 2, size, size)
    return Example(squared_error(predict), model, (batch, batch[:, ::-1]), (2, 3))


def graph(rows: int, *, nodes: int = 2048, edges: int = 16384, width: int = 32) -> Example:
    """Messages in one large graph, whose nodes and edges are the rows of the batch's arrays."""
    keys = jr.split(KEY, 6)
    model = [
        (mlp(keys[i], 64, 2 * width, width), mlp(keys[i + 1], 64, 2 * width, width))
        for i in (0, 2, 4)
    ]

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        x, sent, received, y = batch
        for message, update in model:
            inputs = jnp.concatenate([x[sent], x[received]], -1)
            added = jax.ops.segment_sum(jax.vmap(message)(inputs), received, len(x))
            x = x + jax.vmap(update)(jnp.concatenate([x, added], -1))
        return jnp.mean((x - y) ** 2)

    sent, received = random_edges(rows * edges, rows * nodes, rows * nodes)
    x = normal(rows * nodes, width)
    return Example(loss, model, (x, jnp.asarray(sent), jnp.asarray(received), x[::-1]), (0,))


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "pair": pair,
    "pair with triangle attention": lambda rows: pair(rows, triangle_attention=True),
    "unet": unet,
    "unet in 3-D": lambda rows: unet(rows, ndim=3, size=(64, 32, 16), width=8),
    "mesh forecast": mesh_forecast,
    "shifted windows": windows,
    "fourier": fourier,
    "graph": graph,
}


@dataclass(frozen=True)
class Step:
    """A compiled step: the bytes of its temporaries, those it sends, and what it returned."""

    temporaries: int
    sent: int
    result: Any


def main(
    names: tuple[str, ...] = (),
    rows: int = 1,
    data: int = 8,
    fsdp: int = 1,
    model: int = 1,
    platform: Platform = "cpu",
    page: Path | None = None,
    show: bool = False,
) -> None:
    """Prints a table.

    Args:
        names: The programs, by parts of their names; all if there are none.
        rows: The number of examples of the batch.
        data: The size of the mesh's axis `data`.
        fsdp: The size of the mesh's axis `fsdp`.
        model: The size of the mesh's axis `model`.
        platform: The devices to compile for. Only programs for the CPU run.
        page: A page to write the table into. With `names`, its other rows are kept.
        show: Also prints what each plan says of the batch.
    """
    devices = target_devices(platform)
    mesh = rc.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)
    alone = rc.make_mesh(devices=devices[:1])
    table = Printed()
    heads = ("program", "temporaries, MB", "before", "by hand", "after")
    heads += ("kB by hand", "after", "planned")
    table.row(*heads, "loss", "gradients")
    table.add(f"| --- |{' ---: |' * (len(heads) + 1)}")
    for name, make in EXAMPLES.items():
        if names and not any(part in name for part in names):
            continue
        example, run = make(rows), platform == "cpu"
        one = compile_step(example.loss, example, alone, run=run)
        plan, step = planned(example, mesh, one.temporaries / 6, run)
        specs = eqx.filter(plan.shardings, lambda x: isinstance(x, NamedSharding))
        before = compile_step(example.loss, example, mesh, specs, run=False)
        most = LARGEST_SHARE * one.temporaries
        hands = by_hand(example, mesh, specs)
        fitting = [hand for hand in hands if hand.temporaries <= most]
        hand = min(fitting or hands, key=lambda hand: hand.sent)
        shares = [f"{x.temporaries / one.temporaries:.3f}" for x in (before, hand, step)]
        planned_bytes = sum(traffic.bytes for traffic in plan.report.program.traffic)
        sent = [f"{size / 1e3:,.0f}" for size in (hand.sent, step.sent, planned_bytes)]
        errors = differences(one.result, step.result) if run else ("", "")
        table.row(name, f"{one.temporaries / 1e6:.2f}", *shares, *sent, *errors)
        if show:
            print(plan.report.program.batch)
            print([(round(t.bytes / 1e3), t.cause) for t in plan.report.program.traffic])
    write = table.update if names else table.write
    write(page, f"large_examples_{platform}")


def planned(example: Example, mesh: Mesh, memory: float, run: bool) -> tuple[rc.Plan, Step]:
    hardware = hardware_of(mesh.devices.flat[0].platform, memory)
    args = (example.batch, KEY)
    plan = rc.plan_shardings(example.model, mesh, fn=example.loss, args=args, hardware=hardware)
    specs = eqx.filter(plan.shardings, lambda x: isinstance(x, NamedSharding))
    return plan, compile_step(plan.constrain(example.loss), example, mesh, specs, run=run)


def hardware_of(platform: str, memory: float) -> rc.Hardware:
    """What the compiler for a platform does, with so much memory on each device."""
    if platform == "cpu":
        return rc.Hardware(
            memory=memory, adds_first=False, scatters=False, overlaps=False, compiler="cpu"
        )
    return rc.Hardware(memory=memory, compiler="tpu" if platform == "tpu" else "gpu")


def by_hand(example: Example, mesh: Mesh, specs: PyTree) -> list[Step]:
    """A step for each dimension, with the edges constrained and not."""
    axes = tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    over_edges = NamedSharding(mesh, P(axes))
    losses = [example.loss]
    if example.with_edges is not None:
        losses.append(
            example.with_edges(
                lambda x: jax.lax.with_sharding_constraint(jnp.asarray(x), over_edges)
            )
        )
    steps: list[Step] = []
    for dim, loss in itertools.product(example.dims, losses):
        sharding = NamedSharding(mesh, P(*[None] * dim, axes))
        steps.append(compile_step(loss, example, mesh, specs, sharding, run=False))
    return steps


def compile_step(
    loss: Callable[..., Any],
    example: Example,
    mesh: Mesh,
    specs: PyTree = None,
    batch_sharding: Any = None,
    *,
    run: bool,
) -> Step:
    arrays, static = eqx.partition(example.model, eqx.is_array)
    everywhere = NamedSharding(mesh, P())
    if specs is None:
        specs = jax.tree.map(lambda x: everywhere, arrays)

    def step(arrays: PyTree, batch: PyTree) -> PyTree:
        of_arrays = lambda arrays: loss(eqx.combine(arrays, static), batch, KEY)
        return jax.value_and_grad(of_arrays)(arrays)

    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    batch = jax.tree.map(lambda x: place(x, batch_sharding or everywhere), example.batch)
    abstract = jax.tree.map(place, arrays, specs), batch
    lowered = jax.jit(step, out_shardings=(everywhere, specs)).lower(*abstract)
    platform = mesh.devices.flat[0].platform
    compiled = lowered.compile(compiler_options=OPTIONS.get(platform))
    sent = sent_bytes(collectives(compiled.as_text(), mesh)) if mesh.size > 1 else 0
    result = None
    if run:
        placed = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), example.batch, batch)
        result = jax.device_get(compiled(jax.device_put(arrays, specs), placed))
    return Step(temporary_bytes(compiled.memory_analysis(), platform), sent, result)


def differences(expected: PyTree, found: Any) -> tuple[str, str]:
    """The largest relative difference of the loss, and of a gradient."""
    (loss, gradients), (other, others) = expected, found
    largest = [float(np.max(np.abs(x))) for x in jax.tree.leaves(gradients)]
    # A gradient that is zero in exact arithmetic has no scale of its own.
    least = 1e-3 * max(largest)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(others), largest, strict=True)
    errors = [float(np.max(np.abs(x - y))) / max(scale, least) for x, y, scale in pairs]
    return f"{abs(float(loss - other) / float(loss)):.0e}", f"{max(errors):.0e}"


if __name__ == "__main__":
    tyro.cli(main)
