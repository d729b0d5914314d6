"""Training steps of a LLaMA, planned and written by hand, compiled by the same compiler.

    pip install -e ".[experiments,cuda12]"
    python experiments/benchmarks/peers_ahead.py --page docs/measured/peers.md

The hand-written program in JAX is only for this model, mesh and batch. Both are for eight H100 with
FSDP, in bfloat16, with AdamW in float32, and are read and timed as in a dry run. Nothing is run.
The figures of programs with 2 and 4 layers are extrapolated linearly to all layers.
"""

import functools as ft
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# This import sets the platform before JAX is imported.
from accelerators import (
    LLAMA_7B,
    TOKENS,
    Case,
    Figures,
    compile_lowered,
    compiling_ahead,
    measure,
)

# isort: split
import jax
import jax.numpy as jnp
import optax
import tyro
from _pages import Printed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

FSDP = {"target": "h100:8", "mesh": {"data": 1, "fsdp": 8}, "depths": (2, 4)}
CASES = {
    "1.1B": Case("1.1B", **FSDP, rows=64),
    "7B": Case("7B", **FSDP, rows=16, model=LLAMA_7B, remat="dots"),
}
COLUMNS = ("temporaries", "kernels", "other_bytes", "sent", "exposed", "seconds")
Params = PyTree[Array]


def main(page: Path | None = None, only: tuple[Literal["1.1B", "7B"], ...] = ()) -> None:
    """Prints the figures of all programs, and the ratios of ours to the others'.

    Args:
        page: A page with a place for the table, to write it into.
        only: The models to take; by default both.
    """
    table = Printed()
    table.add(
        "| program | temporaries GB | kernels | other GB | sent GB | exposed ms | ms |",
        "| --- |" + " ---: |" * len(COLUMNS),
    )
    for name, case in CASES.items():
        if only and name not in only:
            continue
        ours = measure(case)
        plain = measure(case, compile_plain)
        table.add(line(f"{name}: redcoast", ours), line(f"{name}: by hand", plain))
        table.add(ratios(f"{name}: ratio", ours, plain))
    table.write(page, "peers")


def line(name: str, figures: Figures) -> str:
    return f"| {name} | {' | '.join(figures.cells())} |"


def ratios(name: str, ours: Figures, other: Figures) -> str:
    cells: list[str] = []
    for column in COLUMNS:
        mine, others = getattr(ours, column), getattr(other, column)
        cells.append(f"{mine / others:.2f}" if others else "")
    return f"| {name} | {' | '.join(cells)} |"


# The program by hand: arrays for each layer, weights gathered in bfloat16 where they are used.


def compile_plain(case: Case) -> Figures:
    with compiling_ahead(case.target) as place:
        mesh = place.mesh(case.mesh)
        lowered = lower_plain(case, mesh)
    return compile_lowered(lowered, case.target, mesh)


def lower_plain(case: Case, mesh: Mesh) -> jax.stages.Lowered:
    optimizer = optax.adamw(1e-4)
    params = shapes_of(case.model)
    state = (params, jax.eval_shape(optimizer.init, params))
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, largest_split(x, mesh)), state)
    rows = NamedSharding(mesh, P("fsdp"))
    tokens = jax.ShapeDtypeStruct((case.rows, TOKENS), jnp.int32)

    def step(
        state: tuple[Params, Any], tokens: Int[Array, "batch seq"], targets: Int[Array, "batch seq"]
    ) -> tuple[tuple[Params, Any], Array]:
        params, opt_state = state
        loss = ft.partial(loss_of, case=case, mesh=mesh)
        value, grads = jax.value_and_grad(loss)(params, tokens, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    jitted = jax.jit(
        step,
        in_shardings=(shardings, rows, rows),
        out_shardings=(shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jitted.lower(state, tokens, tokens)


def shapes_of(config: Any) -> Params:
    width, size = config.width, config.width // config.heads
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    layer = {
        "norm": shape(width),
        "q": shape(width, config.heads, size),
        "k": shape(width, config.kv_heads, size),
        "v": shape(width, config.kv_heads, size),
        "o": shape(config.heads, size, width),
        "mlp_norm": shape(width),
        "gate": shape(width, config.hidden),
        "up": shape(width, config.hidden),
        "down": shape(config.hidden, width),
    }
    return {
        "embed": shape(config.vocab, width),
        "layers": [layer] * config.layers,
        "norm": shape(width),
        "head": shape(width, config.vocab),
    }


def largest_split(x: jax.ShapeDtypeStruct | Array, mesh: Mesh) -> P:
    """FSDP along the largest dimension that can be split."""
    sizes = [size if size % mesh.shape["fsdp"] == 0 else 0 for size in x.shape]
    if not any(sizes):
        return P()
    dim = sizes.index(max(sizes))
    return P(*[None] * dim, "fsdp")


def loss_of(
    params: Params,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    *,
    case: Case,
    mesh: Mesh,
) -> Float[Array, ""]:

    def whole(x: jax.Array) -> jax.Array:
        return gather(x, mesh)

    by_rows = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("fsdp")))
    x = by_rows(whole(params["embed"])[tokens])  # (batch, seq, width)
    angles = rotations(case.model)
    layer_fn: Callable[..., Any] = lambda x, layer: by_rows(
        one_layer(x, jax.tree.map(whole, layer), angles)
    )
    if case.remat == "dots":
        policies = jax.checkpoint_policies
        policy = policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable,
            lambda primitive, *_, **__: "dot_product_attention_fwd" in primitive.name,
        )
        layer_fn = jax.checkpoint(layer_fn, policy=policy)
    for layer in params["layers"]:
        x = layer_fn(x, layer)
    logits = rms_norm(x, whole(params["norm"])) @ whole(params["head"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)
    return jnp.mean(losses)


@ft.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(x: Array, mesh: Mesh) -> Array:
    """A whole parameter in bfloat16, whose gradient is scattered as the parameter is."""
    return jax.lax.with_sharding_constraint(x.astype(jnp.bfloat16), NamedSharding(mesh, P()))


def gather_forward(x: Array, mesh: Mesh) -> tuple[Array, None]:
    return gather(x, mesh), None


def gather_backward(mesh: Mesh, _: None, gradient: Array) -> tuple[Array]:
    split = NamedSharding(mesh, largest_split(gradient, mesh))
    return (jax.lax.with_sharding_constraint(gradient, split).astype(jnp.float32),)


gather.defvjp(gather_forward, gather_backward)


def one_layer(
    x: Float[Array, "batch seq width"], layer: Params, angles: tuple[Array, Array]
) -> Float[Array, "batch seq width"]:
    y = rms_norm(x, layer["norm"])
    q, k, v = (jnp.einsum("bsw,whd->bshd", y, layer[name]) for name in "qkv")
    out = jax.nn.dot_product_attention(
        rotate(q, angles), rotate(k, angles), v, is_causal=True, implementation="cudnn"
    )
    x = x + jnp.einsum("bshd,hdw->bsw", out, layer["o"])
    y = rms_norm(x, layer["mlp_norm"])
    return x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


def rms_norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def rotations(config: Any) -> tuple[Float[Array, "seq half"], Float[Array, "seq half"]]:
    half = config.width // config.heads // 2
    angles = jnp.outer(jnp.arange(TOKENS), 10000.0 ** (-jnp.arange(half) / half))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "batch seq heads size"], angles: tuple[Array, Array]) -> Array:
    cos, sin = (angle[:, None] for angle in angles)  # (seq, 1, half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
