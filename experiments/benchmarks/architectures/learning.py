"""Losses that are more than a forward pass: MAML, per-example gradients, a GAN, and PPO."""

import functools as ft
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .case import Case
from .convolutional import conv
from .layers import linear, make_arrays

WIDTH, HIDDEN, ACTIONS, LATENT = 256, 1024, 64, 128


def mlp_shapes(*widths: int) -> list[Any]:
    return [{"w": (n, m), "b": (m,)} for n, m in itertools.pairwise(widths)]


def mlp(layers: list[Any], x: jax.Array) -> jax.Array:
    for p in layers[:-1]:
        x = jax.nn.gelu(linear(x, p["w"], p["b"]))
    return linear(x, layers[-1]["w"], layers[-1]["b"])


def squared_error(layers: list[Any], x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((mlp(layers, x) - y) ** 2)


def regression_batch(*shape: int) -> PyTree:
    rng = np.random.default_rng(0)
    draw = lambda: rng.normal(size=(*shape, WIDTH)).astype(np.float32)
    return {"x": draw(), "y": draw()}


def maml_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The loss of each task after a gradient step on its first half (arXiv:1703.03400)."""
    half = batch["x"].shape[1] // 2

    def task(x: jax.Array, y: jax.Array) -> jax.Array:
        grads = jax.grad(squared_error)(params, x[:half], y[:half])
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return squared_error(adapted, x[half:], y[half:])

    return jnp.mean(jax.vmap(task)(batch["x"], batch["y"]))


def per_example_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The loss and the norm of the mean of clipped gradients (arXiv:1607.00133)."""
    loss, grads = jax.vmap(jax.value_and_grad(squared_error), (None, 0, 0))(
        params, batch["x"], batch["y"]
    )
    squares = [jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)]
    factor = jnp.minimum(1.0, 0.1 * jax.lax.rsqrt(sum(squares[1:], squares[0])))
    means = [jnp.tensordot(factor, g, axes=1) / factor.size for g in jax.tree.leaves(grads)]
    return jnp.mean(loss) + sum((jnp.sum(mean**2) for mean in means), jnp.zeros(()))


def gan_shapes() -> PyTree:
    generator = {"first": (LATENT, 4 * 4 * 256), "up": [(4, 4, 256, 128), (4, 4, 128, 64)]}
    critic = {"down": [(4, 4, 3, 64), (4, 4, 64, 128)], "last": (8 * 8 * 128, 1)}
    return {"generator": generator | {"last": (4, 4, 64, 3)}, "critic": critic}


def gan_loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """The generator's loss in a GAN, with a fixed critic."""
    generator, critic = params["generator"], jax.lax.stop_gradient(params["critic"])
    latent = batch["latent"] + 0.1 * jax.random.normal(key, batch["latent"].shape)
    x = jax.nn.silu(latent @ generator["first"]).reshape(-1, 4, 4, 256)
    for kernel in generator["up"]:
        x = jax.nn.silu(conv(x, kernel, up=2))
    x = jnp.tanh(conv(x, generator["last"], up=2))
    for kernel in critic["down"]:
        x = jax.nn.silu(conv(x, kernel, stride=2))
    logits = x.reshape(x.shape[0], -1) @ critic["last"]
    return jnp.mean(jax.nn.softplus(-logits))


def gan_batch() -> PyTree:
    return {"latent": np.random.default_rng(0).normal(size=(16, LATENT)).astype(np.float32)}


def ppo_shapes() -> PyTree:
    actor, critic = mlp_shapes(HIDDEN, ACTIONS), mlp_shapes(HIDDEN, 1)
    return {"trunk": mlp_shapes(WIDTH, HIDDEN, HIDDEN), "actor": actor, "critic": critic}


def ppo_loss(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, Any]:
    """The loss of PPO: clipped policy gradient, value and entropy (arXiv:1707.06347)."""
    x = jax.nn.tanh(mlp(params["trunk"], batch["observations"]))
    log_probs = jax.nn.log_softmax(mlp(params["actor"], x), axis=-1)
    chosen = jnp.take_along_axis(log_probs, batch["actions"][:, None], axis=-1)[:, 0]
    ratio = jnp.exp(chosen - batch["log_probs"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    advantages = batch["advantages"]
    policy = -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))
    value = jnp.mean((mlp(params["critic"], x)[:, 0] - batch["returns"]) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy + 0.5 * value - 0.01 * entropy
    return loss, {"value": value, "entropy": entropy}


def ppo_batch(count: int = 1024) -> PyTree:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=(count, *shape)).astype(np.float32)
    return {
        "observations": draw(WIDTH),
        "actions": rng.integers(0, ACTIONS, count).astype(np.int32),
        "log_probs": np.full(count, -np.log(ACTIONS), np.float32) + 0.1 * draw(),
        "advantages": draw(),
        "returns": draw(),
    }


def case(name: str, shapes: PyTree, loss: Any, batch: PyTree) -> Case:
    return Case(name, "other", ft.partial(make_arrays, shapes=shapes), loss, batch)


NETWORK = mlp_shapes(WIDTH, HIDDEN, HIDDEN, WIDTH)
LEARNING = [
    case("MAML", NETWORK, maml_loss, ft.partial(regression_batch, 16, 32)),
    case("per-example gradients", NETWORK, per_example_loss, ft.partial(regression_batch, 64)),
    case("GAN generator", gan_shapes(), gan_loss, gan_batch),
    case("PPO", ppo_shapes(), ppo_loss, ppo_batch),
]
