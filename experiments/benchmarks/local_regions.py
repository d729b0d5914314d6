"""Collectives of programs whose examples are independent of each other, and the time of a step.

    pip install -e ".[experiments]" blackjax diffrax lineax optimistix
    python experiments/benchmarks/local_regions.py --page docs/measured/local_regions.md

Each program computes a loss and its gradients on eight emulated devices. `jit` is `jax.jit` with
replicated parameters and a batch that is split, `plan` is redcoast's plan and its constrained loss,
and `by hand` is `jax.shard_map` around the loss and its gradients, with one mean at the end; some
derivative rules cannot be traced inside of it. Collectives in loops are those of the compiled
program's loops, counted once. Bytes are those of the results of all collectives, loops counted
once. Times are divided by that of one device with the whole batch, which takes turns with the
program, and are medians of these ratios; they say how long devices wait for each other on a machine
with few cores, and not how fast eight devices are.

With `--fsdp`, parameters are FSDP-sharded and there is no program by hand, which replicates them.
With `--alone`, the loss is computed without its gradients, as in an evaluation. With
`--platform v4` or `--platform a100`, programs are compiled for eight of these, and not run.
"""

# pyright: reportMissingImports=false, reportOptionalSubscript=false, reportCallIssue=false

import functools as ft
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

# On the threads that run emulated devices, one device may wait for another that has none.
os.environ.setdefault("NPROC", "64")

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import tyro
from _pages import Printed
from _timing import elapsed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from traffic.targets import Platform, target_devices

import redcoast as rc

rc.emulate_devices(8)
KEY = jr.key(0)
ROWS = 64
COLLECTIVE = (
    r" ((?:all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?)\("
)
CALLED = "calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
CALLS = rf"(?:{CALLED})=(\{{[^}}]*\}}|%[\w.\-]+)"
# A loss, the model, and the batch.
Program = tuple[Callable[..., Any], Any, Any]


def spread(*shape: int) -> jax.Array:
    """A batch whose examples differ in scale, so that solvers take another number of steps."""
    rows = np.random.default_rng(0).normal(size=(ROWS, *shape)).astype(np.float32)
    return jnp.asarray(rows * np.geomspace(0.1, 5, ROWS).reshape(-1, *[1] * len(shape)), "float32")


def ode() -> Program:
    """Adaptive Euler steps in a `while_loop`; only the readout is trained."""
    field, readout = eqx.nn.MLP(4, 4, 64, 2, key=KEY), eqx.nn.Linear(4, 1, key=KEY)

    def solve(field: Any, y: jax.Array) -> jax.Array:
        def step(state: PyTree) -> PyTree:
            t, y, n = state
            slope = field(y)
            h = 0.05 / (1 + jnp.max(jnp.abs(slope)))
            return t + h, y + h * slope, n + 1

        going = lambda state: (state[0] < 1) & (state[2] < 200)
        return jax.lax.while_loop(going, step, (jnp.float32(0), y, 0))[1]

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        field, readout = model
        ends = jax.lax.stop_gradient(jax.vmap(lambda y: solve(field, y))(batch))
        return jnp.mean(jax.vmap(readout)(ends) ** 2)

    return loss, (field, readout), spread(4)


def diffrax_field(adjoint: str, solver: str = "Tsit5") -> Program:
    """A neural ODE with adaptive steps."""
    import diffrax

    field, readout = eqx.nn.MLP(4, 4, 64, 2, key=KEY), eqx.nn.Linear(4, 2, key=KEY)
    term = diffrax.ODETerm(lambda t, y, field: field(y))

    def of_example(model: PyTree, y: jax.Array) -> jax.Array:
        field, readout = model
        solution = diffrax.diffeqsolve(
            term,
            getattr(diffrax, solver)(),
            0.0,
            1.0,
            0.1,
            y,
            field,
            adjoint=getattr(diffrax, adjoint)(),
            stepsize_controller=diffrax.PIDController(1e-3, 1e-4),
            max_steps=32 if adjoint == "DirectAdjoint" else 256,
        )
        return readout(solution.ys[-1])

    loss = lambda model, batch, key: jnp.mean(jax.vmap(lambda y: of_example(model, y))(batch) ** 2)
    return loss, (field, readout), spread(4)


def neural_sde() -> Program:
    """A neural SDE with a Brownian tree for each example."""
    import diffrax
    import lineax

    drift, diffusion = eqx.nn.MLP(4, 4, 32, 1, key=KEY), eqx.nn.MLP(4, 4, 32, 1, key=KEY)

    def of_example(model: PyTree, y: jax.Array, key: jax.Array) -> jax.Array:
        noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-3, (4,), key)
        scale = lambda t, y, args: lineax.DiagonalLinearOperator(0.1 * args[1](y))
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, args: args[0](y)), diffrax.ControlTerm(scale, noise)
        )
        solver = diffrax.Heun()
        return diffrax.diffeqsolve(terms, solver, 0.0, 1.0, 0.05, y, model, max_steps=64).ys[-1]

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(lambda y, key: of_example(model, y, key))(*batch) ** 2)

    return loss, (drift, diffusion), (spread(4), jr.split(KEY, ROWS))


def optimistix_root() -> Program:
    """A layer that solves `z = tanh(f(z) + x)` by Newton's method."""
    import optimistix

    inside, outside = eqx.nn.MLP(8, 8, 32, 1, key=KEY), eqx.nn.Linear(8, 2, key=KEY)

    def of_example(model: PyTree, x: jax.Array) -> jax.Array:
        inside, outside = model
        residual = lambda z, args: z - jnp.tanh(0.3 * args[0](z) + args[1])
        solver = optimistix.Newton(1e-5, 1e-5)
        root = optimistix.root_find(
            residual, solver, jnp.zeros(8), (inside, x), max_steps=64, throw=False
        )
        return outside(root.value)

    loss = lambda model, batch, key: jnp.mean(jax.vmap(lambda x: of_example(model, x))(batch) ** 2)
    return loss, (inside, outside), spread(8)


def hmc() -> Program:
    """Hamiltonian Monte Carlo: 5 proposals of a chain, each of a random number of leaps."""
    energy = eqx.nn.MLP(4, "scalar", 32, 1, key=KEY)

    def of_example(energy: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        potential = lambda x: energy(x) + 0.5 * jnp.sum(x**2)
        force = jax.grad(potential)

        def propose(x: jax.Array, key: jax.Array) -> PyTree:
            a, b, c = jr.split(key, 3)
            momentum = jr.normal(a, x.shape)

            def leap(i: Any, state: PyTree) -> PyTree:
                x, p = state
                p = p - 0.05 * force(x)
                x = x + 0.1 * p
                return x, p - 0.05 * force(x)

            leaps = jr.randint(b, (), 1, 20)
            new, end = jax.lax.fori_loop(0, leaps, leap, (x, momentum))
            kinetic = 0.5 * jnp.sum(momentum**2) - 0.5 * jnp.sum(end**2)
            accept = jnp.log(jr.uniform(c)) < potential(x) - potential(new) + kinetic
            return jnp.where(accept, new, x), None

        return jax.lax.scan(propose, x, jr.split(key, 5))[0]

    def loss(energy: Any, batch: PyTree, key: jax.Array) -> jax.Array:
        samples = jax.vmap(lambda x, key: of_example(energy, x, key))(*batch)
        samples = jax.lax.stop_gradient(samples)
        return jnp.mean(jax.vmap(energy)(batch[0])) - jnp.mean(jax.vmap(energy)(samples))

    return loss, energy, (spread(4), jr.split(KEY, ROWS))


def nuts() -> Program:
    """Blackjax's no-U-turn sampler, whose trajectories double until they turn."""
    import blackjax

    energy = eqx.nn.MLP(4, "scalar", 32, 1, activation=jnp.tanh, key=KEY)

    def of_example(energy: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        density = lambda x: -energy(x) - 0.5 * jnp.sum(x**2)
        sampler = blackjax.nuts(density, 0.2, jnp.ones(4), max_num_doublings=4)
        state, _ = sampler.step(key, sampler.init(x))
        return state.position  # pyright: ignore[reportAttributeAccessIssue]

    def loss(energy: Any, batch: PyTree, key: jax.Array) -> jax.Array:
        samples = jax.vmap(lambda x, key: of_example(energy, x, key))(*batch)
        samples = jax.lax.stop_gradient(samples)
        return jnp.mean(jax.vmap(energy)(batch[0])) - jnp.mean(jax.vmap(energy)(samples))

    return loss, energy, (spread(4), jr.split(KEY, ROWS))


def fno(*, scanned: bool) -> Program:
    """Spectral convolutions in one dimension; `scanned` over the layers, and rematerialised."""
    a, b, c = jr.split(KEY, 3)
    weights = jr.normal(a, (4, 16, 16)) * 0.1, jr.normal(b, (4, 16, 16)) * 0.1
    model = (*weights, jr.normal(c, (4, 16, 16)) * 0.1)

    def layer(h: PyTree, weights: PyTree) -> PyTree:
        real, imaginary, pointwise = weights
        modes = jnp.fft.rfft(h, axis=-1)[..., :8]
        modes = jnp.einsum("bix,io->box", modes, real + 1j * imaginary)
        h = h + jnp.einsum("bix,io->box", h, pointwise)
        return h + jax.nn.gelu(jnp.fft.irfft(modes, n=64, axis=-1)), None

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        if scanned:
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, model)[0] ** 2)
        for i in range(4):
            batch, _ = layer(batch, [x[i] for x in model])
        return jnp.mean(batch**2)

    return loss, model, spread(16, 64)


def gaussian_process() -> Program:
    """The marginal likelihood of a Gaussian process for each example, with a learned kernel."""
    features = eqx.nn.MLP(2, 8, 32, 1, key=KEY)

    def of_example(features: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        z = jax.vmap(features)(x)
        distances = jnp.sum((z[:, None] - z[None]) ** 2, -1)
        factor = jnp.linalg.cholesky(jnp.exp(-distances) + 0.1 * jnp.eye(len(x)))
        white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return 0.5 * jnp.sum(white**2) + jnp.sum(jnp.log(jnp.diagonal(factor)))

    loss = lambda model, batch, key: jnp.mean(
        jax.vmap(lambda x, y: of_example(model, x, y))(*batch)
    )
    return loss, features, (spread(24, 2), spread(24))


def fft() -> Program:
    model = eqx.nn.Conv1d(1, 8, 3, padding=1, key=KEY)

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        return jnp.mean(jnp.abs(jnp.fft.rfft(jax.vmap(model)(batch), axis=-1)) ** 2)

    return loss, model, spread(1, 1024)


def linear_algebra(decompose: Callable[[Any], Any]) -> Program:
    """A decomposition of a matrix of each example."""
    model = eqx.nn.MLP(16, 16 * 16, 32, 1, key=KEY)

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        matrices = jax.vmap(model)(batch).reshape(-1, 16, 16)
        matrices = matrices @ jnp.swapaxes(matrices, -1, -2) + jnp.diag(jnp.arange(1.0, 17.0))
        return jnp.mean(jax.vmap(decompose)(matrices) ** 2)

    return loss, model, spread(16)


def lineax_solve(solver: str) -> Program:
    """A system of equations for each example."""
    import lineax

    model = eqx.nn.MLP(16, 16 * 16, 32, 1, key=KEY)
    options = {"CG": {"rtol": 1e-4, "atol": 1e-4, "max_steps": 200}}

    def of_example(model: PyTree, x: jax.Array) -> jax.Array:
        matrix = model(x).reshape(16, 16)
        matrix = matrix @ matrix.T + jnp.diag(jnp.arange(1.0, 17.0))
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        method = getattr(lineax, solver)(**options.get(solver, {}))
        return lineax.linear_solve(operator, x, solver=method).value

    loss = lambda model, batch, key: jnp.mean(jax.vmap(lambda x: of_example(model, x))(batch) ** 2)
    return loss, model, spread(16)


def one_by_one() -> Program:
    """`jax.lax.map` over the examples."""
    model = eqx.nn.MLP(16, 16, 64, 2, key=KEY)
    return lambda model, batch, key: jnp.mean(jax.lax.map(model, batch) ** 2), model, spread(16)


def on_host() -> Program:
    """A function on the host that is called for each example."""
    model = eqx.nn.MLP(16, 16, 64, 2, key=KEY)

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        z = jax.lax.stop_gradient(jax.vmap(model)(batch))
        struct = jax.ShapeDtypeStruct((16,), z.dtype)
        call = lambda z: jax.pure_callback(np.sin, struct, z, vmap_method="sequential")
        return jnp.mean((jax.vmap(call)(z) + jax.vmap(model)(batch)) ** 2)

    return loss, model, spread(16)


def error_if() -> Program:
    model = eqx.nn.MLP(16, 16, 64, 2, key=KEY)

    def loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        z = jax.vmap(model)(batch)
        return jnp.mean(eqx.error_if(z, jnp.any(jnp.isnan(z)), "NaN") ** 2)

    return loss, model, spread(16)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "ODE, `while_loop`": ode,
    "diffrax, `RecursiveCheckpointAdjoint`": lambda: diffrax_field("RecursiveCheckpointAdjoint"),
    "diffrax, `BacksolveAdjoint`": lambda: diffrax_field("BacksolveAdjoint"),
    "diffrax, `DirectAdjoint`": lambda: diffrax_field("DirectAdjoint"),
    "diffrax, `DirectAdjoint`, implicit": lambda: diffrax_field("DirectAdjoint", "Kvaerno3"),
    "diffrax, neural SDE": neural_sde,
    "optimistix, `root_find`": optimistix_root,
    "HMC by hand": hmc,
    "blackjax, NUTS": nuts,
    "FNO": lambda: fno(scanned=False),
    "FNO, scanned": lambda: fno(scanned=True),
    "Gaussian process": gaussian_process,
    "FFT": fft,
    "Cholesky": lambda: linear_algebra(jnp.linalg.cholesky),
    "QR": lambda: linear_algebra(lambda x: jnp.linalg.qr(x)[1]),
    "SVD": lambda: linear_algebra(lambda x: jnp.linalg.svd(x, compute_uv=False)),
    "eigh": lambda: linear_algebra(lambda x: jnp.linalg.eigh(x)[0]),
    "solve": lambda: linear_algebra(lambda x: jnp.linalg.solve(x, jnp.ones(16))),
    "lineax, `LU`": lambda: lineax_solve("LU"),
    "lineax, `CG`": lambda: lineax_solve("CG"),
    "`lax.map`": one_by_one,
    "`pure_callback`": on_host,
    "`error_if`": error_if,
}


def main(
    names: tuple[str, ...] = (),
    data: int = 8,
    fsdp: int = 1,
    model: int = 1,
    platform: Platform = "cpu",
    turns: int = 9,
    page: Path | None = None,
    alone: bool = False,
) -> None:
    """Prints a table.

    Args:
        names: The programs, by parts of their names; all if there are none.
        data: The size of the mesh's axis `data`.
        fsdp: The size of the mesh's axis `fsdp`.
        model: The size of the mesh's axis `model`.
        platform: The devices to compile for. Only programs for the CPU run.
        turns: The number of timed steps; with 0, programs are compiled and do not run.
        page: A page of `docs/measured/` to write the table into.
        alone: Compute the loss without its gradients.
    """
    differentiate = gradients_of
    if alone:
        differentiate = loss_of
    hows = ("jit", "plan", "by hand")
    if fsdp > 1:  # the other steps do not shard parameters
        hows = ("plan",)
    mesh = rc.make_mesh(data=data, fsdp=fsdp, model=model, devices=target_devices(platform))
    table = Printed()
    heads = ("program", "", "collectives in loops", "kB", "time", "loss", "gradients")
    table.add(f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, make in PROGRAMS.items():
        if names and not any(part in name for part in names):
            continue
        reference = None
        if platform == "cpu" and turns:
            reference = Reference(*make(), differentiate)
        for how in hows:
            row = measure(make(), mesh, how, reference, turns, differentiate)
            table.row(name, how, *row)
    region = "local_regions" if fsdp == 1 else f"local_regions_data{data}_fsdp{fsdp}"
    if platform != "cpu":
        region = f"{region}_{platform}"
    table.write(page, f"{region}_alone" if alone else region)


class Reference:
    """A step on one device, its loss and its gradients."""

    def __init__(
        self,
        loss: Callable[..., Any],
        model: PyTree,
        batch: PyTree,
        differentiate: Callable[..., Any],
    ):
        arrays, static = eqx.partition(model, eqx.is_array)
        step = jax.jit(differentiate(loss, static)).lower(arrays, batch).compile()
        self.step = ft.partial(step, arrays, batch)
        self.loss, self.gradients = self.step()


def measure(
    program: Program,
    mesh: Mesh,
    how: str,
    reference: Reference | None,
    turns: int,
    differentiate: Callable[..., Any],
) -> list[str]:
    loss, model, batch = program
    arrays, static = eqx.partition(model, eqx.is_array)
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    if how == "plan":
        plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, KEY))
        specs = eqx.filter(plan.shardings, lambda x: isinstance(x, NamedSharding))
        step = differentiate(plan.constrain(loss), static)
    else:
        specs = jax.tree.map(lambda x: NamedSharding(mesh, P()), arrays)
        step = differentiate(loss, static)
        if how == "by hand":
            step = by_hand(step, mesh)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    abstract = jax.tree.map(place, arrays, specs), jax.tree.map(lambda x: place(x, rows), batch)
    results = NamedSharding(mesh, P()), specs if differentiate is gradients_of else ()
    jitted = jax.jit(step, out_shardings=results)
    try:
        compiled = jitted.lower(*abstract).compile()
    except Exception as error:
        print(f"{type(error).__name__}: {error}"[:200], file=sys.stderr)
        return ["-"] * 5
    in_loops, sent = collectives(compiled.as_text() or "")
    row = [str(in_loops), f"{sent / 1e3:.1f}"]
    if reference is None:
        return [*row, "", "", ""]
    placed = jax.device_put(arrays, specs), jax.device_put(batch, rows)
    value, gradients = compiled(*placed)
    times = ratio(ft.partial(compiled, *placed), reference.step, turns)
    of_loss = difference(value, reference.loss, 0)
    # A gradient that is zero in exact arithmetic has no scale of its own.
    sizes = [float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(reference.gradients)]
    least = 1e-3 * max(sizes, default=0.0)
    compare = lambda computed, expected: difference(computed, expected, least)
    errors = jax.tree.leaves(jax.tree.map(compare, gradients, reference.gradients))
    of_gradients = f"{max(errors):.0e}" if errors else ""
    # A single step says nothing of the time.
    of_time = f"{times:.1f}" if turns > 1 else ""
    return [*row, of_time, f"{of_loss:.0e}", of_gradients]


def gradients_of(loss: Callable[..., Any], static: PyTree) -> Callable[..., Any]:
    def step(arrays: PyTree, batch: PyTree) -> PyTree:
        of_arrays = lambda arrays: loss(eqx.combine(arrays, static), batch, KEY)
        return jax.value_and_grad(of_arrays)(arrays)

    return step


def loss_of(loss: Callable[..., Any], static: PyTree) -> Callable[..., Any]:
    return lambda arrays, batch: (loss(eqx.combine(arrays, static), batch, KEY), ())


def by_hand(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The step of the rows of each device, and the mean of the losses and of the gradients."""

    def local(arrays: PyTree, batch: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.pmean(x, mesh.axis_names), step(arrays, batch))

    rows = P(("data", "fsdp"))
    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), rows), out_specs=(P(), P()), check_vma=False
    )


def difference(computed: Any, expected: PyTree, least: float) -> float:
    """The largest difference, relative to the largest element and to at least `least`."""
    computed, expected = np.asarray(computed), np.asarray(expected)
    return float(np.max(np.abs(computed - expected)) / max(float(np.max(np.abs(expected))), least))


def ratio(step: Callable[[], Any], reference: Callable[[], Any], turns: int) -> float:
    """The time of a step, divided by that of another that takes turns with it."""
    ratios: list[float] = []
    for _ in range(turns):
        own = elapsed(step, time.perf_counter)
        ratios.append(own / elapsed(reference, time.perf_counter))
    return statistics.median(ratios)


def collectives(program: str) -> tuple[int, int]:
    """The number of collectives in the loops of a compiled program, and the bytes of all."""
    parts: dict[str, str] = {}
    for text in re.split(r"\n(?=(?:ENTRY )?%)", program):
        if (name := re.match(r"\s*(?:ENTRY )?%?([\w.\-]+)", text)) is not None:
            parts[name[1]] = text
    waiting = re.findall(r"(?:body|condition)=%([\w.\-]+)", program)
    inside: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in inside and name in parts:
            inside.add(name)
            waiting += re.findall(r"%([\w.\-]+)", " ".join(re.findall(CALLS, parts[name])))
    counts = Counter({name: len(re.findall(COLLECTIVE, parts[name])) for name in inside})
    results = re.findall(r" = (.*)" + COLLECTIVE, program)
    return counts.total(), sum(bytes_of(result, kind) for result, kind in results)


def bytes_of(result: str, kind: str) -> int:
    """The size of the arrays in a type such as `(f32[8,16]{1,0}, pred[])`."""
    arrays = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", result)
    if kind in ("all-gather-start", "collective-permute-start"):
        arrays = arrays[len(arrays) // 2 :]  # what is sent comes before what is received
    total = 0
    for element, shape in arrays:
        bits = int(re.sub(r"\D", "", element) or 8)
        total += prod(int(n) for n in shape.split(",") if n) * max(bits // 8, 1)
    return total


if __name__ == "__main__":
    tyro.cli(main)
