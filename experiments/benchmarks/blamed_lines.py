"""Whether plans attribute their bytes to lines of code, and list an expensive line first.

    python experiments/benchmarks/blamed_lines.py

The first table has, for programs of many kinds on data 2 x model 4, the share of the planned memory
and communication that belongs to a line of code. For the second, an expensive line is added to each
of twenty programs; the table has its place in the list of lines, 1 if it comes first.
"""

# pyright: reportIndexIssue=false

import itertools
from collections.abc import Callable
from linecache import getline
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _pages import Printed
from architectures import CASES, SCIENCE, VARIED
from jax.sharding import Mesh
from jaxtyping import PyTree
from traffic.columns import abstract, abstract_key

import redcoast as rc

WIDTH, ROWS, LENGTH, WIDE = 64, 32, 32, 4096
TABLE = np.ones((WIDTH, 256 * WIDTH), jnp.bfloat16)
LAYOUT = ("NWC", "WIO", "NWC")
Hidden = Callable[[Any, jax.Array], jax.Array]


def perceptron(p: PyTree, x: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ p["up"]) @ p["down"]


def attention(p: PyTree, x: jax.Array) -> jax.Array:
    q, k, v = (x @ p[name] for name in ("q", "k", "v"))
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    return x + jnp.einsum("bqk,bkd->bqd", weights, v)


def convolution(p: PyTree, x: jax.Array) -> jax.Array:
    kernel = p["kernel"]
    return x + jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=LAYOUT)


def recurrence(p: PyTree, x: jax.Array) -> jax.Array:
    def step(h: jax.Array, x: jax.Array) -> PyTree:
        h = jnp.tanh(x @ p["q"] + h @ p["k"])
        return h, h

    start = jnp.zeros_like(x[:, 0])
    return jnp.swapaxes(jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def rematerialised(p: PyTree, x: jax.Array) -> jax.Array:
    block = jax.checkpoint(lambda p, x: x + perceptron(p, x))
    return block(p, block(p, x))


def gathers(h: jax.Array) -> jax.Array:
    """Each example is compared with all others."""
    pairs = h @ jnp.swapaxes(h.reshape(-1, WIDTH), 0, 1)  # planted
    return jnp.mean(jax.nn.relu(pairs.astype(jnp.float32)))


def sorts(h: jax.Array) -> jax.Array:
    """The batch is sorted by a column."""
    order = jnp.argsort(jnp.sum(h, (1, 2)))
    repeated = jnp.repeat(h, 64, axis=-1)
    return jnp.mean(repeated[order] * repeated)  # planted


def widens(h: jax.Array) -> jax.Array:
    """A value of low precision is converted where it is largest."""
    wide = jnp.repeat(h, WIDE // WIDTH, axis=-1)
    wide = jnp.exp(wide.astype(jnp.float32))  # planted
    return jnp.mean(wide**2)


def closes_over(h: jax.Array) -> jax.Array:
    """Every device has all of an array that is not part of the model."""
    h = h @ TABLE  # planted
    return jnp.mean(h[..., :WIDTH].astype(jnp.float32) ** 2)


MODELS: tuple[Hidden, ...] = (perceptron, attention, convolution, recurrence, rematerialised)
PLANTED = (gathers, sorts, widens, closes_over)


def main(page: Path | None = None) -> None:
    """Prints two tables.

    Args:
        page: A page of `docs/measured/` to write them into.
    """
    rc.emulate_devices(8)
    mesh = rc.make_mesh(data=2, model=4)
    table = Printed()
    table.add("| program | of memory | of communication |", "|---|---:|---:|")
    programs = {case.name: case for case in (*CASES, *SCIENCE)}
    programs |= {f"{case.name} (tiny)": case for case in VARIED}
    enough = 0
    for name, case in programs.items():
        params, batch = case.abstract_params(), abstract(case.batch())
        plan = rc.plan_shardings(params, mesh, fn=case.loss, args=(batch, abstract_key()))
        shares = attributed(plan.report.program)
        enough += min(shares) >= 0.95
        table.add(f"| {name} | {shares[0]:.1%} | {shares[1]:.1%} |")
    table.add("", f"At least 95 % of both in {enough} of {len(programs)} programs.", "")
    table.add("| program | planted line | place |", "|---|---|---:|")
    places = []
    for hidden, bad in itertools.product(MODELS, PLANTED):
        places.append(place_of_planted(hidden, bad, mesh))
        table.add(f"| {hidden.__name__} | {bad.__name__} | {places[-1]} |")
    table.add("", f"The planted line comes first in {places.count(1)} of {len(places)} programs.")
    table.write(page, "blamed_lines")


def attributed(program: Any) -> tuple[float, float]:
    """The shares of memory and of communication that belong to a line."""
    shares = []
    for name in ("memory_bytes", "sent_bytes"):
        total = sum(getattr(line, name) for line in program.lines)
        of_lines = sum(getattr(line, name) for line in program.lines if line.file)
        shares.append(of_lines / total if total else 1.0)
    return shares[0], shares[1]


def place_of_planted(hidden: Hidden, bad: Callable[[jax.Array], jax.Array], mesh: Mesh) -> int:
    """The place of the planted line in the list of the costliest lines, from 1."""
    square = dict.fromkeys(("q", "k", "v"), (WIDTH, WIDTH))
    shapes = square | {"up": (WIDTH, 256), "down": (256, WIDTH), "kernel": (3, WIDTH, WIDTH)}
    model = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.bfloat16)
    loss = lambda model, x, key: bad(hidden(model, x))
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None))
    codes = [getline(line.file, line.number) for line in plan.report.program.lines]
    return 1 + next(n for n, code in enumerate(codes) if "# planted" in code)


if __name__ == "__main__":
    tyro.cli(main)
