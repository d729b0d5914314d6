"""The Mamba-2 decoder: state spaces in place of attention."""

import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from ._attention import as_array, real_tokens, wide
from ._basic import initial_tables, look_up, normal, output_scale, rms_norm
from ._by_layer import StackedLayers
from ._check_config import check_config
from ._decoder import DecoderConfig, TableHead
from ._einsum import product
from ._inputs import AnyArray, Mask
from ._recurrent import convolve, decays_between, pad_to_chunks, states_of_layer, with_layer
from ._scan_layers import scan_layers


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
    - `norm_eps`: added to the mean square in RMSNorm.
    - `wide_residual`: whether the residual stream is at least float32, whatever the parameters'
      dtype.
    - `tied`: whether the output head shares the weights of the embedding.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
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
        if self.heads % self.groups:
            raise ValueError(
                f"`heads` must be a multiple of `groups`, but {self.heads} is not a multiple of "
                f"{self.groups}."
            )

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
        return Mamba2Cache(*(jnp.take(x, rows, axis=1) for x in (self.state, self.before)))


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
        keys = iter(jax.random.split(key, 10))
        into = lambda size: normal(next(keys), (c.layers, c.width, size), fan_in=c.width)
        conv = lambda size: normal(next(keys), (c.layers, c.taps, size), fan_in=c.taps)
        small = c.groups * c.state
        zeros = lambda size: jnp.zeros((c.layers, size))
        self.norm, self.inner_norm = jnp.ones((c.layers, c.width)), jnp.ones((c.layers, c.inner))
        self.gate, self.x, self.b, self.c = map(into, (c.inner, c.inner, small, small))
        self.steps = into(c.heads)
        self.conv_x, self.conv_b, self.conv_c = map(conv, (c.inner, small, small))
        biases = map(zeros, (c.inner, small, small))
        self.conv_x_bias, self.conv_b_bias, self.conv_c_bias = biases
        # Time steps between 0.001 and 0.1, whose logarithms are uniform.
        ends = math.log(1e-3), math.log(0.1)
        steps = jnp.exp(jax.random.uniform(next(keys), (c.layers, c.heads), None, *ends))
        self.steps_bias = steps + jnp.log(-jnp.expm1(-steps))
        rates = jnp.log(jnp.arange(1, c.heads + 1, dtype=self.steps.dtype))
        self.log_decay = jnp.broadcast_to(rates[None], (c.layers, c.heads))
        self.skip = jnp.ones((c.layers, c.heads))
        scale = output_scale(c.layers)
        shape = (c.layers, c.inner, c.width)
        self.down = normal(next(keys), shape, fan_in=c.inner, scale=scale)


class Mamba2(TableHead):
    """The Mamba-2 decoder (Dao and Gu, 2024, <https://arxiv.org/abs/2405.21060>).

    It has no positions, and does not take several sequences packed into one row.

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

    def __call__(
        self,
        tokens: Integer[AnyArray, "batch seq"],
        *,
        mask: Mask | None = None,
        segments: Integer[AnyArray, "batch seq"] | None = None,
        positions: Integer[AnyArray, "batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of the next token at each position.

        **Arguments:**

        - `tokens`: token ids from 0 to `vocab - 1`. A larger id gives NaN.
        - `mask`: 1 at real tokens and 0 at padding tokens, which may be on either side. The logits
          of real tokens do not depend on padding; the logits of padding tokens are meaningless.
        - `segments`, `positions`: must be None: the states go through the whole row.
        - `key`: has no effect, since there is no dropout.

        **Raises:**

        `ValueError` if there are `segments` or `positions`.
        """
        hidden = self.hidden(tokens, mask=mask, segments=segments, positions=positions, key=key)
        return self.unembed(hidden)

    def hidden(
        self,
        tokens: Integer[AnyArray, "batch seq"],
        *,
        mask: Mask | None = None,
        segments: Integer[AnyArray, "batch seq"] | None = None,
        positions: Integer[AnyArray, "batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq width"]:
        """Returns the final hidden states, from which `unembed` computes the logits.

        The arguments are the same as for `__call__`.
        """
        if segments is not None or positions is not None:
            name = "positions" if segments is None else "segments"
            raise ValueError(
                f"A Mamba-2 does not take `{name}`, because its states go from each token to all "
                "later ones of its row. Put one text into each row, and pad it with `mask`."
            )
        return self._run(tokens, as_array(real_tokens(tokens.shape, mask)), None)[0]

    def init_cache(self, batch: int, length: int) -> Mamba2Cache:
        """Returns an empty cache for `batch` rows, of any number of tokens."""
        c, dtype = self.config, self.embed.dtype
        state = jnp.zeros((c.layers, batch, c.heads, c.head_size, c.state), wide(dtype))
        channels = c.inner + 2 * c.groups * c.state
        return Mamba2Cache(state, jnp.zeros((c.layers, batch, c.taps - 1, channels), dtype))

    def decode(
        self,
        tokens: Integer[AnyArray, "batch new"],
        cache: Mamba2Cache,
        *,
        mask: Mask | None = None,
    ) -> tuple[Float[Array, "batch new width"], Mamba2Cache]:
        """Appends tokens to a cache. Returns their hidden states and the updated cache."""
        return self._run(tokens, as_array(real_tokens(tokens.shape, mask)), cache)

    def _run(self, tokens, real, cache):
        c, dtype = self.config, self.embed.dtype
        x = look_up(self.embed, tokens)
        x = x.astype(wide(dtype)) if c.wide_residual else x

        def layer_fn(x, cache, layer, index, key):
            before = None if cache is None else states_of_layer(cache, index)
            y = rms_norm(x, layer.norm, c.norm_eps).astype(dtype)
            y, after = _mixer(layer, y, real, before, c)
            if cache is not None:
                cache = with_layer(cache, after, index)
            return x + y.astype(x.dtype), cache

        options = {"cache": cache, "remat": c.remat, "unroll": c.unroll}
        x, cache = scan_layers(layer_fn, x, self.layers, **options)
        return rms_norm(x, self.norm, c.norm_eps).astype(dtype), cache


def _mixer(layer, x, real, cache, config):
    """One layer, and its part of the cache after these tokens."""
    c, kind = config, wide(x.dtype)
    gate, steps = (product("bsd,de->bse", x, w) for w in (layer.gate, layer.steps))
    # Padding is treated as missing tokens: it does not enter the convolutions and the states, and
    # its time steps are 0.
    parts = [product("bsd,de->bse", x, w) for w in (layer.x, layer.b, layer.c)]
    parts = [jnp.where(real[..., None], part, 0) for part in parts]
    steps = jax.nn.softplus(steps.astype(kind) + layer.steps_bias.astype(kind)[None, None])
    steps = jnp.where(real[..., None], steps, 0)
    small = c.groups * c.state
    kernels = (layer.conv_x, layer.conv_b, layer.conv_c)
    biases = (layer.conv_x_bias, layer.conv_b_bias, layer.conv_c_bias)
    ends = (c.inner, c.inner + small)
    past = (None,) * 3 if cache is None else jnp.split(cache.before[0], ends, axis=-1)
    made = [convolve(*each) for each in zip(parts, kernels, biases, past, strict=True)]
    inputs, b, outputs = (y for y, _ in made)
    heads = inputs.reshape(*x.shape[:2], c.heads, c.head_size).astype(kind)
    b, outputs = (y.reshape(*x.shape[:2], c.groups, c.state).astype(kind) for y in (b, outputs))
    rates = -jnp.exp(layer.log_decay.astype(kind))
    state = None if cache is None else cache.state[0]
    y, state = scan_states(heads, steps, rates, b, outputs, state, chunk=c.chunk)
    y = y + layer.skip.astype(kind)[None, None, :, None] * heads
    y = _gated_norm(y.reshape(*x.shape[:2], -1), gate, layer.inner_norm, c).astype(x.dtype)
    before = jnp.concatenate([last for _, last in made], axis=-1)
    return product("bse,ed->bsd", y, layer.down), Mamba2Cache(state[None], before[None])


def _gated_norm(y, gate, scale, c):
    """RMSNorm of each group's features, after the gate."""
    y = y * jax.nn.silu(gate.astype(y.dtype))
    groups = y.reshape(*y.shape[:2], c.groups, -1)
    ones = jnp.ones(groups.shape[-1], y.dtype)
    return rms_norm(groups, ones, c.norm_eps).reshape(y.shape) * scale.astype(y.dtype)[None, None]


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
    chunk = min(chunk, length)
    divide = lambda y, *shape: pad_to_chunks(y, chunk).reshape(batch, -1, chunk, groups, *shape)
    each = heads // groups
    x = divide(x * steps[..., None], each, size)
    # Logarithms of the decays from the start of a chunk: (batch, chunk, group, head, token).
    decays = jnp.moveaxis(divide(steps * rates[None, None], each), 2, -1)
    decays = jnp.cumsum(decays, axis=-1)
    b, c = divide(b, b.shape[3]), divide(c, c.shape[3])
    between = decays_between(decays)
    pairs = jnp.einsum("zklgn,zkmgn->zkglm", c, b)[:, :, :, None] * between
    within = jnp.einsum("zkgrlm,zkmgrp->zklgrp", pairs, x)
    left = jnp.moveaxis(jnp.exp(decays[..., -1:] - decays), -1, 2)
    added = jnp.einsum("zklgn,zklgrp->zkgrpn", b, x * left[..., None])
    kept = jnp.exp(decays[..., -1])

    def pass_on(state, inputs):
        kept, added = inputs
        return state * kept[..., None, None] + added, state

    state = jnp.zeros_like(added[:, 0]) if state is None else state.reshape(added[:, 0].shape)
    steps_of = lambda y: jnp.moveaxis(y, 1, 0)
    state, before = jax.lax.scan(pass_on, state, (steps_of(kept), steps_of(added)))
    past = jnp.einsum("zklgn,kzgrpn->zklgrp", c, before)
    past = past * jnp.moveaxis(jnp.exp(decays), -1, 2)[..., None]
    y = (within + past).reshape(batch, -1, heads, size)[:, :length]
    return y, state.reshape(batch, heads, size, -1)
