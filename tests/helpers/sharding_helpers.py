"""Trees and meshes that several tests of shardings plan."""

import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from redcoast.sharding import plan_shardings
from redcoast.train._state import TrainState

AXES = ("data", "fsdp", "model")


def mesh_of(data=1, fsdp=1, model=1):
    return AbstractMesh((data, fsdp, model), AXES)


def real_mesh(data, fsdp, model):
    return jax.make_mesh((data, fsdp, model), AXES, axis_types=(AxisType.Auto,) * 3)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def stock(layer, *args, **kwargs):
    """A layer whose arrays are shapes only."""
    return eqx.filter_eval_shape(lambda key: layer(*args, **kwargs, key=key), jax.random.key(0))


def specs(tree, overrides=(), **axes):
    rows = plan_shardings(tree, mesh_of(**axes), overrides=overrides).report.arrays
    return {row.path: row.spec for row in rows}


def reasons(tree, **axes):
    rows = plan_shardings(tree, mesh_of(**axes)).report.arrays
    return {row.path: f"{row.reason.kind}: {row.reason.text}" for row in rows}


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, use_query_bias=True, use_output_bias=True, key=keys[0]
        )
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(lambda v: self.down(jax.nn.gelu(self.up(v))))(y)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, layers=2, width=64, heads=8, vocab=512, seq=16, *, key):
        keys = jax.random.split(key, layers + 3)
        self.embed = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.positions = eqx.nn.Embedding(seq, width, key=keys[1])
        self.blocks = [Block(width, heads, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocab, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def llama(layers=12, width=256, heads=12, kv_heads=4, head_dim=32, hidden=640, vocab=512):
    return {
        "embed": array(vocab, width),
        "head": array(width, vocab),
        "norm": array(width),
        "layers": {
            "attention": {
                "wq": array(layers, width, heads, head_dim),
                "wk": array(layers, width, kv_heads, head_dim),
                "wv": array(layers, width, kv_heads, head_dim),
                "wo": array(layers, heads, head_dim, width),
            },
            "mlp": {
                "gate": array(layers, width, hidden),
                "up": array(layers, width, hidden),
                "down": array(layers, hidden, width),
            },
            "attention_norm": array(layers, width),
            "mlp_norm": array(layers, width),
        },
    }


def train_state(model, optimizer):
    """A training state of shapes."""
    params = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    opt_state = eqx.filter_eval_shape(optimizer.init, params)
    return TrainState(model, opt_state, jnp.zeros((), jnp.int32), jax.random.key(0))


def expanded(pattern):
    """The paths that a pattern stands for, as bash would say."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = [[part] if i % 2 == 0 else list(alternatives(part)) for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def alternatives(inside):
    for one in inside.split(","):
        numbers = [int(number) for number in one.split("..")] if ".." in one else []
        if numbers:
            yield from map(str, range(numbers[0], numbers[1] + 1, *numbers[2:]))
        else:
            yield one
