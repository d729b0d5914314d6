"""Small programs that use their weights in unusual ways."""

import functools as ft
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .case import Case
from .layers import like, linear, make_arrays
from .learning import maml_loss, mlp_shapes, squared_error
from .ode import field, runge_kutta

WIDTH, HIDDEN, RANK, CLIENTS, STEPS, FEATURES, BLOCK = 256, 512, 8, 8, 8, 16, 8


def batch(*shape: int, width: int = WIDTH) -> PyTree:
    make = lambda key: dict(zip("xy", jax.random.normal(key, (2, *shape, width)), strict=True))
    return jax.device_get(make(jax.random.key(0)))


def mlp_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    return squared_error(params, batch["x"], batch["y"])


def spectral_shapes() -> PyTree:
    widths = (WIDTH, HIDDEN, HIDDEN, WIDTH)
    layers = mlp_shapes(*widths)
    return [p | {"u": (p["w"][1],), "v": (p["w"][0],)} for p in layers]


def spectral_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """Spectral normalisation: divides matrices by their largest singular value
    (arXiv:1802.05957)."""
    unit = lambda x: x * jax.lax.rsqrt(jnp.sum(x**2) + 1e-12)

    def normalised(p: PyTree) -> PyTree:
        fixed = jax.lax.stop_gradient(p)
        v = unit(fixed["w"] @ fixed["u"])
        u = unit(v @ fixed["w"])
        return {"w": p["w"] / (v @ p["w"] @ u), "b": p["b"]}

    return squared_error([normalised(p) for p in params], batch["x"], batch["y"])


def adapted_shapes() -> PyTree:
    layers = mlp_shapes(WIDTH, HIDDEN, HIDDEN, WIDTH)
    return [p | {"down": (p["w"][0], RANK), "up": (RANK, p["w"][1])} for p in layers]


def adapted_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The loss of an MLP with frozen matrices and LoRA of rank 8 (arXiv:2106.09685)."""
    wrapped = [
        {"w": jax.lax.stop_gradient(p["w"]) + p["down"] @ p["up"], "b": p["b"]} for p in params
    ]
    return squared_error(wrapped, batch["x"], batch["y"])


def flow_shapes() -> PyTree:
    sizes = ((1, BLOCK), (BLOCK, BLOCK), (BLOCK, 1))
    layer = lambda n, m: {"w": (FEATURES * n, FEATURES * m), "b": (FEATURES * m,)}
    return [layer(n, m) | {"log_norm": (FEATURES * m,)} for n, m in sizes]


def flow_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The loss of a block autoregressive flow (arXiv:1904.04676)."""
    x, log_det = masked_layer(params[0], batch["x"])
    for p in params[1:]:
        slope = jnp.log1p(-(jnp.tanh(x) ** 2) + 1e-6).reshape(len(x), FEATURES, 1, -1)
        x, jacobian = masked_layer(p, jnp.tanh(x))
        log_det = log_matmul(log_det + slope, jacobian)
    return jnp.mean(x**2) / 2 - jnp.mean(log_det)


def masked_layer(p: PyTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A layer with positive diagonal blocks, a block-triangular weight and learned column norms."""
    n, m = (size // FEATURES for size in p["w"].shape)
    row, column = (jnp.repeat(jnp.arange(FEATURES), size) for size in (n, m))
    diagonal = row[:, None] == column[None]
    w = jnp.where(diagonal, jnp.exp(p["w"]), jnp.where(row[:, None] < column[None], p["w"], 0.0))
    norm = jnp.exp(p["log_norm"]) * jax.lax.rsqrt(jnp.sum(w**2, axis=0))
    w = w * like(norm, w)
    blocks = jnp.stack(
        [w[i * n : (i + 1) * n, i * m : (i + 1) * m] for i in range(FEATURES)], axis=0
    )
    jacobian = jnp.broadcast_to(jnp.log(blocks)[None], (len(x), FEATURES, n, m))
    return linear(x, w, p["b"]), jacobian


def log_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(a[..., :, :, None] + b[..., None, :, :], axis=-2)


def ode_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """Integrates each example in a bounded while loop, and differentiates through the steps."""
    dt = 1 / STEPS

    def solve(y: jax.Array) -> jax.Array:
        more = lambda carry: carry[0] < 1 - dt / 2
        slope = ft.partial(row_field, params)
        step = lambda carry: (carry[0] + dt, runge_kutta(slope, carry[1], dt))
        start = (jnp.zeros(()), y)
        return eqxi.while_loop(more, step, start, max_steps=20, kind="bounded")[1]

    return jnp.mean((jax.vmap(solve)(batch["x"]) - batch["y"]) ** 2)


def row_field(params: PyTree, y: jax.Array) -> jax.Array:
    return field(params, y[None])[0]


def federated_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The distance between the parameters and their mean after local training by the clients.

    Its gradient is the update of federated averaging (arXiv:1602.05629).
    """

    def client(x: jax.Array, y: jax.Array) -> jax.Array:
        def step(local: PyTree, _: None) -> PyTree:
            grads = jax.grad(squared_error)(local, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, local, grads), None

        return jax.lax.scan(step, jax.lax.stop_gradient(params), length=2)[0]

    learned = jax.vmap(client)(batch["x"], batch["y"])
    means = jax.tree.map(lambda x: jnp.mean(x, axis=0), learned)
    squares = jax.tree.map(lambda p, mean: jnp.sum((p - mean) ** 2) / 2, params, means)
    return sum(jax.tree.leaves(squares), jnp.zeros(()))


def case(name: str, shapes: PyTree, loss: Any, *size: int, width: int = WIDTH) -> Case:
    init = ft.partial(make_arrays, shapes=shapes)
    return Case(name, "other", init, loss, ft.partial(batch, *size, width=width))


NETWORK = mlp_shapes(WIDTH, HIDDEN, WIDTH)
UNUSUAL = [
    case("MLP", mlp_shapes(WIDTH, HIDDEN, HIDDEN, WIDTH), mlp_loss, 64),
    case("MLP, spectral norm", spectral_shapes(), spectral_loss, 64),
    case("MLP, LoRA", adapted_shapes(), adapted_loss, 64),
    case("block autoregressive flow", flow_shapes(), flow_loss, 64, width=FEATURES),
    case("neural ODE, bounded", NETWORK, ode_loss, 64),
    case("MAML", NETWORK, maml_loss, 16, 16),
    case("federated averaging", NETWORK, federated_loss, CLIENTS, 16),
]
