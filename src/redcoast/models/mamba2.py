"""The Mamba-2 decoder: state spaces in place of attention."""

import functools as ft
import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from ._attention import as_array, real_tokens
from ._base_config import DecoderConfig, check_config
from ._basic import initial_tables, look_up, normal, output_scale, rms_norm, wide
from ._by_layer import StackedLayers
from ._check_config import check_multiple
from ._check_tokens import check_tokens
from ._decoder import Decoder, TableHead
from ._einsum import product
from ._inputs import HiddenStates, Mask, Tokens
from ._recurrent import convolve, decays_between, states_of_layer, to_chunks, with_layer
from ._scan_layers import scan_layers

# In place of positions and of the masks of attention: states need neither.
_NOTHING: Any = None


@dataclass(frozen=True)
class Mamba2Config(DecoderConfig):
    """The configuration of a `Mamba2`.

    **Arguments:**

    - `vocab`, `width`, `layers`: the vocabulary size, the size of the residual stream and the
      number of layers.
    - `heads`, `head_size`: the number of heads of a layer, and the number of features of each.
      Their product is a multiple of `width`.
    - `state`: the size of the state of each feature.
    - `groups`: the number of groups of heads with common inputs and outputs of the state.
    - `taps`: the number of tokens that the convolutions see, including the token itself.
    - `chunk`: the number of tokens whose pairs are computed at once.
    - `wide_residual`: whether the residual stream is at least float32, whatever the parameters'
      dtype.
    - `norm_eps`, `tied`, `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    vocab: int
    width: int
    layers: int
    heads: int
    head_size: int = 64
    state: int = 128
    groups: int = 1
    taps: int = 4
    chunk: int = 256
    norm_eps: int | float = 1e-5
    wide_residual: bool = True
    tied: bool = False

    def __post_init__(self):
        check_config(self, "head_size", "state", "groups", "taps", "chunk")
        if self.inner % self.width:
            raise ValueError(
                f"`heads` times `head_size` must be a multiple of `width`, but {self.inner} is not "
                f"a multiple of {self.width}."
            )
        check_multiple(self, "heads", "groups")

    @property
    def inner(self) -> int:
        """The number of features of all heads."""
        return self.heads * self.head_size


class Mamba2Cache(eqx.Module):
    """The states and the last inputs of the convolutions, in all layers. Its size does not depend
    on the number of tokens."""

    state: Float[Array, "layers batch heads head_size state"]
    before: Float[Array, "layers batch past channels"]

    def take(self, rows: Int[Array, " rows"]) -> "Mamba2Cache":
        """Gathers rows of the batch; a row may be repeated."""
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), self)


class Mamba2Layers(StackedLayers):
    """The parameters of all layers, stacked along their first dimension.

    `x`, `b` and `c` are the projections to the inputs of the heads, from the inputs to the states,
    and from the states to the outputs; `steps` are the projections to the sizes of time steps.
    """

    norm: Float[Array, "layers width"]
    gate: Float[Array, "layers width inner"]
    x: Float[Array, "layers width inner"]
    b: Float[Array, "layers width group_state"]
    c: Float[Array, "layers width group_state"]
    steps: Float[Array, "layers width heads"]
    steps_bias: Float[Array, "layers heads"]
    conv_x: Float[Array, "layers taps inner"]
    conv_b: Float[Array, "layers taps group_state"]
    conv_c: Float[Array, "layers taps group_state"]
    conv_x_bias: Float[Array, "layers inner"]
    conv_b_bias: Float[Array, "layers group_state"]
    conv_c_bias: Float[Array, "layers group_state"]
    log_decay: Float[Array, "layers heads"]
    skip: Float[Array, "layers heads"]
    inner_norm: Float[Array, "layers inner"]
    down: Float[Array, "layers inner width"]

    def __init__(self, config: Mamba2Config, *, key: PRNGKeyArray):
        c = config
        *keys, steps_key, down_key = jax.random.split(key, 10)
        small = c.groups * c.state
        into, into_small = (c.layers, c.width, c.inner), (c.layers, c.width, small)
        self.norm, self.inner_norm = jnp.ones((c.layers, c.width)), jnp.ones((c.layers, c.inner))
        self.gate, self.x = (normal(k, into, fan_in=c.width) for k in keys[:2])
        self.b, self.c = (normal(k, into_small, fan_in=c.width) for k in keys[2:4])
        self.steps = normal(keys[4], (c.layers, c.width, c.heads), fan_in=c.width)
        self.conv_x = normal(keys[5], (c.layers, c.taps, c.inner), fan_in=c.taps)
        self.conv_b = normal(keys[6], (c.layers, c.taps, small), fan_in=c.taps)
        self.conv_c = normal(keys[7], (c.layers, c.taps, small), fan_in=c.taps)
        self.conv_x_bias = jnp.zeros((c.layers, c.inner))
        self.conv_b_bias = jnp.zeros((c.layers, small))
        self.conv_c_bias = jnp.zeros((c.layers, small))
        # Time steps between 0.001 and 0.1, whose logarithms are uniform.
        ends = math.log(1e-3), math.log(0.1)
        steps = jnp.exp(jax.random.uniform(steps_key, (c.layers, c.heads), None, *ends))
        self.steps_bias = steps + jnp.log(-jnp.expm1(-steps))  # the inverse of softplus
        rates = jnp.log(jnp.arange(1, c.heads + 1, dtype=self.steps.dtype))
        self.log_decay = jnp.broadcast_to(rates[None], (c.layers, c.heads))
        self.skip = jnp.ones((c.layers, c.heads))
        shape = (c.layers, c.inner, c.width)
        self.down = normal(down_key, shape, fan_in=c.inner, scale=output_scale(c.layers))


class Mamba2(TableHead, Decoder):
    """The Mamba-2 decoder (Dao and Gu, 2024, <https://arxiv.org/abs/2405.21060>).

    It has no positions, does not take several sequences packed into one row, and has no dropout.

    ```python
    config = Mamba2Config(vocab=256, width=128, layers=4, heads=8, head_size=32, state=16)
    model = Mamba2(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    layers: Mamba2Layers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: Mamba2Config = eqx.field(static=True)

    def __init__(self, config: Mamba2Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations, the output projections divided by sqrt(2 * layers); time steps between 0.001 and
        0.1, and decays of 1 to `heads`."""
        embed, layers, head = jax.random.split(key, 3)
        self.embed, self.head = initial_tables(config, embed, head)
        self.layers = Mamba2Layers(config, key=layers)
        self.norm = jnp.ones(config.width)
        self.config = config

    def init_cache(self, batch: int, length: int) -> PyTree:
        """Returns an empty cache for `batch` rows, of any number of tokens."""
        c, dtype = self.config, self.embed.dtype
        state = jnp.zeros((c.layers, batch, c.heads, c.head_size, c.state), wide(dtype))
        channels = c.inner + 2 * c.groups * c.state
        return Mamba2Cache(state, jnp.zeros((c.layers, batch, c.taps - 1, channels), dtype))

    def decode(
        self, tokens: Tokens, cache: PyTree, *, mask: Mask | None = None
    ) -> tuple[HiddenStates, PyTree]:
        check_tokens(tokens, self.config.vocab, mask=mask)
        return self._run(tokens, mask, _NOTHING, _NOTHING, cache, None)[:2]

    def _run_from_start(self, tokens, mask, segments, positions, key):
        check_tokens(tokens, self.config.vocab, mask=mask)
        for name, argument in (("segments", segments), ("positions", positions)):
            if argument is not None:
                raise ValueError(
                    f"A Mamba-2 does not take `{name}`, because its states go from each token to "
                    "all later ones of its row. Put one text into each row, and pad it with `mask`."
                )
        return self._run(tokens, mask, _NOTHING, _NOTHING, None, key)

    def _run(self, tokens, mask, positions, see, cache, key):
        c, dtype = self.config, self.embed.dtype
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        if c.wide_residual:
            # Each layer adds little to it, which a narrow dtype would round away.
            x = x.astype(wide(dtype))

        def layer_fn(x, cache, layer, index, key):
            before = None
            if cache is not None:
                before = states_of_layer(cache, index)
            y = rms_norm(x, layer.norm.astype(x.dtype), c.norm_eps).astype(dtype)
            y, after = _mixer(layer, y, real, before, c)
            if cache is not None:
                cache = with_layer(cache, after, index)
            return x + y.astype(x.dtype), cache

        x, cache = scan_layers(layer_fn, x, self.layers, cache=cache, **c.loop_options)
        x = rms_norm(x, self.norm.astype(x.dtype), c.norm_eps)
        return x.astype(dtype), cache, None


def _mixer(layer, x, real, cache, config):
    """One layer, and its part of the cache after these tokens."""
    c, kind = config, wide(x.dtype)
    into = ft.partial(product, "bsd,de->bse", x)
    gate, steps = into(layer.gate), into(layer.steps)  # (batch, seq, inner), (batch, seq, heads)
    inputs, writes, reads = into(layer.x), into(layer.b), into(layer.c)
    # Padding is treated as missing tokens: it does not enter the convolutions and the states, and
    # its time steps are 0.
    inputs, writes, reads = (jnp.where(real[..., None], y, 0) for y in (inputs, writes, reads))
    steps = jax.nn.softplus(steps.astype(kind) + layer.steps_bias.astype(kind)[None, None])
    steps = jnp.where(real[..., None], steps, 0)  # (batch, seq, heads)
    state, past = None, (None,) * 3
    if cache is not None:
        state, ends = cache.state[0], (c.inner, c.inner + c.groups * c.state)
        past = jnp.split(cache.before[0], ends, axis=-1)
    inputs, past_x = convolve(inputs, layer.conv_x, layer.conv_x_bias, past[0])
    writes, past_b = convolve(writes, layer.conv_b, layer.conv_b_bias, past[1])
    reads, past_c = convolve(reads, layer.conv_c, layer.conv_c_bias, past[2])
    # States are sums over many tokens, so they have a wide dtype.
    heads = inputs.reshape(*x.shape[:2], c.heads, c.head_size).astype(kind)
    writes = writes.reshape(*x.shape[:2], c.groups, c.state).astype(kind)
    reads = reads.reshape(*x.shape[:2], c.groups, c.state).astype(kind)
    rates = -jnp.exp(layer.log_decay.astype(kind))  # (heads,)
    y, state = scan_states(heads, steps, rates, writes, reads, state, chunk=c.chunk)
    y = y + layer.skip.astype(kind)[None, None, :, None] * heads  # (batch, seq, heads, head_size)
    # RMSNorm of each group's features, after the gate.
    y = y.reshape(gate.shape) * jax.nn.silu(gate.astype(y.dtype))  # (batch, seq, inner)
    of_groups = y.reshape(*x.shape[:2], c.groups, c.inner // c.groups)
    ones = jnp.ones(of_groups.shape[-1], y.dtype)
    y = rms_norm(of_groups, ones, c.norm_eps).reshape(y.shape)
    y = (y * layer.inner_norm.astype(y.dtype)[None, None]).astype(x.dtype)
    before = jnp.concatenate([past_x, past_b, past_c], axis=-1)  # (batch, past, channels)
    return product("bse,ed->bsd", y, layer.down), Mamba2Cache(state[None], before[None])


def scan_states(
    x: Float[Array, "batch seq heads head_size"],
    steps: Float[Array, "batch seq heads"],
    rates: Float[Array, " heads"],
    b: Float[Array, "batch seq groups state"],
    c: Float[Array, "batch seq groups state"],
    state: Float[Array, "batch heads head_size state"] | None = None,
    *,
    chunk: int,
) -> tuple[Float[Array, "batch seq heads head_size"], Float[Array, "batch heads head_size state"]]:
    """Computes the outputs `c h` of the states `h = exp(step * rate) * h + step * x b`, and the
    last states (Dao and Gu, 2024, section 6).

    Within a chunk of tokens, outputs are computed for all pairs of tokens, as in attention. States
    pass from chunk to chunk.
    """
    batch, length, heads, size = x.shape
    groups = b.shape[2]
    chunk = min(chunk, length)  # one token, when decoding
    # Letters below: row z, chunk k, tokens l and m, group g, head r of a group, feature p, state n.
    by_head, by_state = (groups, heads // groups), (groups, b.shape[3])
    x = to_chunks(x * steps[..., None], chunk, *by_head, size)  # zklgrp
    decays = to_chunks(steps * rates[None, None], chunk, *by_head)  # zklgr
    decays = jnp.moveaxis(decays, 2, -1)  # zkgrl
    decays = jnp.cumsum(decays, axis=-1)  # logarithms, since the chunk's start
    b, c = to_chunks(b, chunk, *by_state), to_chunks(c, chunk, *by_state)  # zklgn
    between = decays_between(decays)  # zkgrlm
    # What token l reads of what token m wrote, decayed over the tokens between.
    pairs = jnp.einsum("zklgn,zkmgn->zkglm", c, b)[:, :, :, None] * between
    within = jnp.einsum("zkgrlm,zkmgrp->zklgrp", pairs, x)
    left = jnp.moveaxis(jnp.exp(decays[..., -1:] - decays), -1, 2)  # until the chunk's end: zklgr
    # What a chunk adds to the state at its end.
    added = jnp.einsum("zklgn,zklgrp->zkgrpn", b, x * left[..., None])
    decay = jnp.exp(decays[..., -1])  # of the whole chunk: zkgr

    def pass_on(state, inputs):
        decay, added = inputs
        return state * decay[..., None, None] + added, state

    if state is None:
        state = jnp.zeros_like(added[:, 0])
    else:
        state = state.reshape(added[:, 0].shape)
    inputs = (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(added, 1, 0))  # chunks first
    state, before = jax.lax.scan(pass_on, state, inputs)
    # What tokens read of the state before their chunk.
    past = jnp.einsum("zklgn,kzgrpn->zklgrp", c, before)
    past = past * jnp.moveaxis(jnp.exp(decays), -1, 2)[..., None]
    y = within + past  # zklgrp
    y = y.reshape(batch, y.shape[1] * chunk, heads, size)[:, :length]  # without padding
    return y, state.reshape(batch, heads, size, state.shape[-1])
