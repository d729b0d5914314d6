"""The gated delta rule of Gated DeltaNet (Yang et al., 2024, <https://arxiv.org/abs/2412.06464>).

Each head has a matrix as its state, which maps keys to values. A token lets it decay, and then
moves the value of its key towards its own value:

    state = decay * state
    state = state + strength * key (value - key state)
    output = query state
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._recurrent import decays_between, to_chunks

_EPS = 1e-6  # added to the squares of a key or a query


def unit_length(x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
    """Divides vectors by their length."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def gated_delta_rule(
    q: Float[Array, "batch seq groups key_size"],
    k: Float[Array, "batch seq groups key_size"],
    v: Float[Array, "batch seq heads value_size"],
    decays: Float[Array, "batch seq heads"],
    strengths: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads key_size value_size"] | None = None,
    *,
    chunk: int,
) -> tuple[
    Float[Array, "batch seq heads value_size"], Float[Array, "batch heads key_size value_size"]
]:
    """Computes the outputs of all tokens, and the state behind the last one.

    Within a chunk, outputs are computed for all pairs of tokens, as in attention. States pass from
    chunk to chunk.

    - `q`, `k`: each query and key serves `heads / groups` heads. Keys have unit length.
    - `decays`: the logarithms of the decays.
    - `strengths`: how far a value moves, from 0 to 1.
    - `chunk`: the number of tokens of a chunk, a power of two.
    """
    batch, length, groups, size = k.shape
    heads = v.shape[2]
    each = heads // groups
    # A power of two, and not many more than there are tokens.
    chunk = min(chunk, 1 << (length - 1).bit_length())
    # Letters below: row z, chunk c, tokens l and m, group g, head r of a group, key n, value p.
    q, k = to_chunks(q, chunk, groups, size), to_chunks(k, chunk, groups, size)  # zclgn
    v = to_chunks(v, chunk, groups, each, v.shape[3])  # zclgrp
    strengths = jnp.moveaxis(to_chunks(strengths, chunk, groups, each), 2, -1)  # zcgrl
    decays = jnp.moveaxis(to_chunks(decays, chunk, groups, each), 2, -1)  # zcgrl
    decays = jnp.cumsum(decays, axis=-1)  # since the chunk's start
    between = decays_between(decays)  # zcgrlm
    pairs = jnp.einsum("zclgn,zcmgn->zcglm", q, k)[:, :, :, None] * between
    system = jnp.einsum("zclgn,zcmgn->zcglm", k, k)[:, :, :, None] * between
    inverse = invert_unit_lower(system * strengths[..., None])  # zcgrlm
    # What a token writes depends on what the tokens before it in the chunk have written.
    written = jnp.einsum("zcgrlm,zcmgrp->zcgrlp", inverse * strengths[..., None, :], v)
    weights = strengths * jnp.exp(decays)  # zcgrl
    read = jnp.einsum("zcgrlm,zcmgn->zcgrln", inverse * weights[..., None, :], k)
    left = jnp.exp(decays[..., -1:] - decays)  # until the chunk's end: zcgrl

    def pass_on(state, inputs):
        q, k, pairs, written, read, decays, left = inputs
        new = written - jnp.einsum("zgrln,zgrnp->zgrlp", read, state)
        out = jnp.einsum("zlgn,zgrnp->zgrlp", q, state) * jnp.exp(decays)[..., None]
        out = out + jnp.einsum("zgrlm,zgrmp->zgrlp", pairs, new)
        state = state * jnp.exp(decays[..., -1])[..., None, None]
        state = state + jnp.einsum("zlgn,zgrlp->zgrnp", k, new * left[..., None])
        return state, out

    shape = (batch, groups, each, size, v.shape[-1])
    if state is None:
        state = jnp.zeros(shape, v.dtype)
    inputs = (q, k, pairs, written, read, decays, left)
    chunks_first = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), inputs)
    state, out = jax.lax.scan(pass_on, state.reshape(shape), chunks_first)
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # czgrlp -> zclgrp
    out = out.reshape(batch, out.shape[1] * chunk, heads, v.shape[-1])[:, :length]
    return out, state.reshape(batch, heads, size, v.shape[-1])


def invert_unit_lower(x: Float[Array, "*rows n n"]) -> Float[Array, "*rows n n"]:
    """Returns the inverses of matrices that are 1 on the diagonal, `x` below it, and 0 above it.
    Their size is a power of two.

    The halves on the diagonal are inverted together, which takes a few products of matrices. A
    product of powers of `x` would take as few, and lose all digits where keys are alike.
    """
    size = x.shape[-1]
    if size == 1:
        return jnp.ones_like(x)
    half = size // 2
    upper, lower = invert_unit_lower(jnp.stack([x[..., :half, :half], x[..., half:, half:]]))
    corner = -_multiply(_multiply(lower, x[..., half:, :half]), upper)
    top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)


def _multiply(a: Float[Array, "*rows n m"], b: Float[Array, "*rows m k"]) -> Array:
    return jnp.einsum("...ij,...jk->...ik", a, b, precision="highest")
