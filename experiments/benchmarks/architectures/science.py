"""Programs of the sciences: one large example, or many that are independent of each other."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .case import Case
from .convolutional import conv
from .layers import layer_norm, like, linear, make_arrays

PAIR, RESIDUES, BLOCKS = 64, 256, 4
FIELD, CHANNELS, CONVOLUTIONS = 512, 32, 4
NODES, EDGES, FEATURES, ROUNDS = 4096, 32_768, 128, 4
ROWS, MEMBERS = 64, 8


def normal(*shapes: tuple[int, ...]) -> PyTree:
    """A batch of as many random arrays."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    if len(arrays) == 1:
        return arrays[0]
    return tuple(arrays)


def perceptron_shapes(inside: int, hidden: int, outside: int) -> dict[str, tuple[int, ...]]:
    return {"up": (inside, hidden), "up_bias": (hidden,), "down": (hidden, outside)}


def perceptron(p: PyTree, x: jax.Array) -> jax.Array:
    return jax.nn.relu(linear(x, p["up"], p["up_bias"])) @ p["down"]


def pair_shapes() -> PyTree:
    norms = dict.fromkeys(("in_scale", "in_shift", "out_scale", "out_shift"), (PAIR,))
    norms |= dict.fromkeys(("mlp_scale", "mlp_shift"), (PAIR,))
    square = dict.fromkeys(("left", "right", "gate", "out"), (PAIR, PAIR))
    return [norms | square | perceptron_shapes(PAIR, 4 * PAIR, PAIR)] * BLOCKS


def pair_block(p: PyTree, z: jax.Array) -> jax.Array:
    """Triangle multiplication and a transition (AlphaFold 2), `1 residue residue channel`."""
    x = layer_norm(z, p["in_scale"], p["in_shift"])
    left, right, gate = x @ p["left"], x @ p["right"], jax.nn.sigmoid(x @ p["gate"])
    product = jnp.einsum("bikc,bjkc->bijc", left, right)
    z = z + gate * (layer_norm(product, p["out_scale"], p["out_shift"]) @ p["out"])
    return z + perceptron(p, layer_norm(z, p["mlp_scale"], p["mlp_shift"]))


def pair_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    z, target = batch
    for p in params:
        z = jax.checkpoint(pair_block)(p, z)
    return jnp.mean((z - target) ** 2)


def field_shapes() -> PyTree:
    inner = [(3, 3, CHANNELS, CHANNELS)] * CONVOLUTIONS
    return {"first": (3, 3, 4, CHANNELS), "inner": inner, "last": (3, 3, CHANNELS, 4)}


def field_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    x, target = batch
    x = conv(x, params["first"])
    for kernel in params["inner"]:
        x = x + jax.nn.gelu(conv(x, kernel))
    return jnp.mean((conv(x, params["last"]) - target) ** 2)


def graph_shapes() -> PyTree:
    perceptrons = perceptron_shapes(2 * FEATURES, 256, FEATURES)
    return [{"edge": perceptrons, "node": perceptrons}] * ROUNDS


def graph_batch() -> PyTree:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, NODES, (2, EDGES)).astype(np.int32)
    x, target = normal((NODES, FEATURES), (NODES, FEATURES))
    return {"x": x, "senders": ends[0], "receivers": ends[1], "target": target}


def graph_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """Message passing on one graph: nodes are gathered at edges, and messages summed at nodes."""
    x, senders, receivers = batch["x"], batch["senders"], batch["receivers"]
    for p in params:
        messages = perceptron(p["edge"], jnp.concatenate([x[senders], x[receivers]], axis=-1))
        inbox = jax.ops.segment_sum(messages, receivers, x.shape[0])
        x = x + perceptron(p["node"], jnp.concatenate([x, inbox], axis=-1))
    return jnp.mean((x - batch["target"]) ** 2)


def adaptive_shapes() -> PyTree:
    return {"field": perceptron_shapes(4, 64, 4), "readout": (4, 1)}


def adaptive_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """As many steps as each example needs; only the readout is trained."""

    def solve(y: jax.Array) -> jax.Array:
        def step(state: PyTree) -> PyTree:
            time, y, count = state
            slope = perceptron(params["field"], y)
            size = 0.05 / (1 + jnp.max(jnp.abs(slope)))
            return time + size, y + size * slope, count + 1

        more = lambda state: (state[0] < 1) & (state[2] < 200)
        return jax.lax.while_loop(more, step, (jnp.zeros(()), y, jnp.zeros((), jnp.int32)))[1]

    ends = jax.lax.stop_gradient(jax.vmap(solve)(batch))
    return jnp.mean((ends @ params["readout"]) ** 2)


def spectrum_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    signal = batch[:, :, None] * like(params, jnp.zeros((*batch.shape, params.shape[0])))
    return jnp.mean(jnp.abs(jnp.fft.rfft(signal, axis=1)) ** 2)


def cholesky_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """A factorisation of a matrix of each example."""
    matrices = perceptron(params, batch).reshape(-1, 64, 64)
    kernels = matrices @ jnp.swapaxes(matrices, -1, -2) + 64 * jnp.eye(64)[None]
    return jnp.mean(jnp.linalg.cholesky(kernels) ** 2)


def ensemble_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """Members with the same batch, under `vmap`."""
    member = lambda p: jnp.mean((perceptron(p, batch) - batch) ** 2)
    return jnp.sum(jax.vmap(member)(params))


def ensemble_shapes() -> PyTree:
    shapes = perceptron_shapes(64, 512, 64)
    return {name: (MEMBERS, *shape) for name, shape in shapes.items()}


def case(name: str, shapes: PyTree, loss: Any, batch: PyTree) -> Case:
    return Case(name, "other", ft.partial(make_arrays, shapes=shapes), loss, batch)


_PAIRS = (1, RESIDUES, RESIDUES, PAIR)
_FIELDS = (1, FIELD, FIELD, 4)
SCIENCE: tuple[Case, ...] = (
    case("pair representation", pair_shapes(), pair_loss, ft.partial(normal, _PAIRS, _PAIRS)),
    case("field", field_shapes(), field_loss, ft.partial(normal, _FIELDS, _FIELDS)),
    case("graph", graph_shapes(), graph_loss, graph_batch),
    case("adaptive ODE", adaptive_shapes(), adaptive_loss, ft.partial(normal, (ROWS, 4))),
    case("spectrum", (8,), spectrum_loss, ft.partial(normal, (ROWS, 1024))),
    case(
        "Cholesky",
        perceptron_shapes(64, 64, 64 * 64),
        cholesky_loss,
        ft.partial(normal, (ROWS, 64)),
    ),
    case("ensemble", ensemble_shapes(), ensemble_loss, ft.partial(normal, (ROWS, 64))),
)
