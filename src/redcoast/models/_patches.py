"""The embedding of patches, and their positions in images of any size; and the layers of DINOv2
and DINOv3, and maps of their patches."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox import AbstractVar
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import AllReal, attend, full_view
from ._attention_layers import AttentionLayers, sample_attention
from ._basic import activate_gated, dropout, layer_norm, small_normal, split_key, wide, zeros
from ._check_tokens import check_floats, refuse_mask
from ._einsum import LowRank, feed_forward, keys_values, outputs, product, queries
from ._inputs import Key, Pixels, Replaced
from ._rotary import rotate
from ._scan_layers import scan_layers


def embed_patches(
    pixels: Pixels, kernel: Array | LowRank, bias: Float[Array, " features"] | None
) -> Float[Array, "batch patches features"]:
    """Returns the embeddings of all patches, row by row. `kernel` has the shape
    `"channels rows columns features"`."""
    channels, height, width, size = kernel.shape
    rows, columns = pixels.shape[2] // height, pixels.shape[3] // width
    # A product over patches, not a convolution, so that every dimension can be sharded.
    x = jnp.asarray(pixels, kernel.dtype).reshape(-1, channels, rows, height, columns, width)
    x = product("bcrpsq,cpqd->brsd", x, kernel, bias)  # (batch, rows, columns, features)
    return x.reshape(-1, rows * columns, size)


class ScaledLayers(AttentionLayers):
    """The parameters of all layers of DINOv2 or DINOv3, stacked along their first dimension."""

    attention_scale: Float[Array, "layers width"]
    mlp_norm: Float[Array, "layers width"]
    mlp_norm_shift: Float[Array, "layers width"]
    gate: Float[Array, "layers width hidden"] | None
    gate_bias: Float[Array, "layers hidden"] | None
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"] | None
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"] | None
    mlp_scale: Float[Array, "layers width"]

    def __init__(self, config: Any, *, biases: str, mlp_bias: bool, key: PRNGKeyArray):
        c = config
        *of_attention, gate, up, down = jax.random.split(key, 7)
        super().__init__(c, sample_attention(c, of_attention), biases=biases, shift=True)
        stream, inside = (c.layers, c.width), (c.layers, c.hidden)
        into = (*stream, c.hidden)
        self.attention_scale = jnp.full(stream, c.layer_scale, float)
        self.mlp_scale = jnp.full(stream, c.layer_scale, float)
        self.mlp_norm, self.mlp_norm_shift = jnp.ones(stream), jnp.zeros(stream)
        self.gate, self.gate_bias = None, zeros(inside, when=c.gated and mlp_bias)
        if c.gated:
            self.gate = small_normal(gate, into)
        self.up, self.up_bias = small_normal(up, into), zeros(inside, when=mlp_bias)
        self.down = small_normal(down, (*inside, c.width))
        self.down_bias = zeros(stream, when=mlp_bias)


Maps = tuple[Float[Array, "batch tokens width"], ...]


class PatchEncoder(eqx.Module):
    """The encoder of DINOv2 and DINOv3, for images of any size. Its tokens are the class token, the
    registers and the patches.

    A family embeds images in `_run`.
    """

    patch_embed: Float[Array, "channels rows columns width"]
    patch_bias: Float[Array, " width"]
    cls_token: Float[Array, " width"]
    mask_token: Float[Array, " width"] | None
    register_tokens: Float[Array, "registers width"] | None
    position_embed: Float[Array, "tokens width"] | None
    layers: ScaledLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    config: AbstractVar[Any]

    def __init__(
        self, config: Any, keys: Iterable[PRNGKeyArray], *, biases: str, mlp_bias: bool, mask: bool
    ):
        """`keys` are those of patches, the class token, registers and layers. `biases` has the
        letters of the projections of attention that have biases, and `mask` is whether there is a
        mask token."""
        c = config
        patches, first, registers, layers = keys
        self.patch_embed = small_normal(patches, (c.channels, c.patch, c.patch, c.width))
        self.patch_bias = jnp.zeros(c.width)
        self.cls_token = small_normal(first, (c.width,))
        self.mask_token = zeros((c.width,), when=mask)
        self.register_tokens = self.position_embed = None
        if c.registers:
            self.register_tokens = small_normal(registers, (c.registers, c.width))
        self.layers = ScaledLayers(c, biases=biases, mlp_bias=mlp_bias, key=layers)
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.config = c

    @abstractmethod
    def _run(
        self, pixels: Pixels, masked: Replaced, after: tuple[int, ...], key: Key
    ) -> tuple[Float[Array, "batch tokens features"], Maps]:
        """Returns the hidden states after all layers, and after each number of layers in
        `after`."""

    def _outputs(self, hidden: Float[Array, "batch tokens width"]) -> Float[Array, "batch ..."]:
        """Returns what a call returns of hidden states."""
        return hidden

    def __call__(
        self, pixels: Pixels, *, mask: None = None, masked: Replaced = None, key: Key = None
    ) -> Float[Array, "batch ..."]:
        """Returns the hidden states of images after the final norm, of shape (batch, tokens,
        width): of the class token, of the registers, and of the patches, row by row. With a head,
        returns the logits of images, of shape (batch, labels).

        **Arguments:**

        - `pixels`: images with the channels first, normalised in the same way as in training. Their
          height and width are any multiples of the patch size.
        - `mask`: must be None, since images have no padding.
        - `masked`: which patches are replaced by the mask token, row by row.
        - `key`: PRNG key for dropout, and for the changes of coordinates in training. Without it,
          both are disabled.

        **Raises:**

        `ValueError` if the channels of the images do not match the configuration, or if their size
        is not a multiple of the patch size.
        """
        return self._outputs(self.hidden(pixels, mask=mask, masked=masked, key=key))

    def hidden(
        self, pixels: Pixels, *, mask: None = None, masked: Replaced = None, key: Key = None
    ) -> Float[Array, "batch tokens features"]:
        """Returns the hidden states after the final norm, for any head. The arguments are those of
        `__call__`."""
        refuse_mask(mask)
        return self._norm(self._run(pixels, masked, (), key)[0])

    def features(
        self, pixels: Pixels, layers: Sequence[int], *, normalise: bool = True, key: Key = None
    ) -> tuple[Float[Array, "batch rows columns features"], ...]:
        """Returns maps of the patches' hidden states after some layers, for tasks such as
        segmentation.

        **Arguments:**

        - `pixels`, `key`: as in `__call__`.
        - `layers`: the number of layers after which each map is taken; 0 means the embeddings.
          `transformers` names these `stem`, `stage1` and so on.
        - `normalise`: whether the final norm is applied to each map.

        **Raises:**

        `ValueError` if there are no such layers.
        """
        c = self.config
        for number in layers:
            if not 0 <= number <= c.layers:
                raise ValueError(
                    f"`layers` has {number}, but the model has {c.layers} layers. Pass numbers "
                    f"from 0 to {c.layers}."
                )
        _, maps = self._run(pixels, None, tuple(layers), key)
        if normalise:
            maps = map(self._norm, maps)
        grid = [size // c.patch for size in pixels.shape[2:]]
        # Without the class token and the registers.
        return tuple(x[:, 1 + c.registers :].reshape(-1, *grid, c.width) for x in maps)

    def _embed(self, pixels: Pixels, masked: Replaced) -> Float[Array, "batch patches features"]:
        c = self.config
        check_floats("pixels", pixels, ("batch", "channels", "height", "width"))
        if pixels.shape[1] != c.channels or any(size % c.patch for size in pixels.shape[2:]):
            raise ValueError(
                f"The images have shape {pixels.shape[1:]}, but the model takes {c.channels} "
                f"channels, and a height and a width that are multiples of {c.patch}. Resize them."
            )
        x = embed_patches(pixels, self.patch_embed, self.patch_bias)
        if masked is None:
            return x
        if self.mask_token is None:
            raise ValueError(
                "`masked` needs a mask token, but the configuration has `mask_token=False`."
            )
        return jnp.where(masked.astype(bool)[:, :, None], self.mask_token[None, None], x)

    def _with_first(
        self, x: Float[Array, "batch patches width"], cls: Float[Array, " width"]
    ) -> Float[Array, "batch tokens width"]:
        """Returns all tokens: the class token, the registers and the patches."""
        first = cls[None]  # (1, width)
        if self.register_tokens is not None:
            first = jnp.concatenate([first, self.register_tokens])  # (1 + registers, width)
        first = jnp.broadcast_to(first[None], (x.shape[0], *first.shape))
        return jnp.concatenate([first, x], axis=1)

    def _apply_layers(
        self,
        x: Float[Array, "batch tokens width"],
        after: Sequence[int],
        key: Key,
        *,
        gate: str,
        angles: tuple[Array, Array] | None = None,
    ) -> tuple[Float[Array, "batch tokens width"], Maps]:
        """Returns what `_run` does. `gate` is the activation function of gated layers. With
        `angles`, queries and keys are rotated."""
        c = self.config
        visible = full_view(AllReal(x.shape[1]))

        def layer_fn(x, maps, layer, index, key):
            keys = split_key(key, 3)  # of attention weights, and of the two outputs
            y = layer_norm(x, layer.attention_norm, layer.attention_norm_shift, c.norm_eps)
            q = queries(layer, y)  # (batch, tokens, heads, head_dim)
            k, v = keys_values(layer, y)
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            # (batch, tokens, heads, head_dim)
            y = attend(q, k, v, visible=visible, rate=c.attention_dropout, key=keys[0])
            x = _add_scaled(x, outputs(layer, y), layer.attention_scale, c, keys[1])
            y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
            x = _add_scaled(x, _mlp(layer, y, gate, c), layer.mlp_scale, c, keys[2])
            # Maps are carried through the scan: stacking all layers' outputs would need their
            # memory.
            numbered = zip(after, maps, strict=True)
            return x, tuple(jnp.where(index + 1 == n, x, before) for n, before in numbered)

        maps = (x,) * len(after)  # right already where no layer is before a map
        return scan_layers(layer_fn, x, self.layers, cache=maps, key=key, **c.loop_options)

    def _norm(self, x: Float[Array, "batch tokens width"]) -> Float[Array, "batch tokens width"]:
        return layer_norm(x, self.norm, self.norm_shift, self.config.norm_eps)


def _add_scaled(x, y, scale, config, key):
    """Adds the scaled output of a sublayer to all images that do not skip it."""
    y = y * scale[None, None]
    if key is None or config.path_dropout == 0:
        return x + y
    # Stochastic depth (Huang et al., 2016): dropout of a whole image's output.
    factors = dropout(jnp.ones((x.shape[0], 1, 1), x.dtype), config.path_dropout, key)
    return x + y * factors


def _mlp(layer, x, gate_activation, config):
    if layer.gate is None:
        return feed_forward(layer, x, config.activation)
    gate = product("bsd,dh->bsh", x, layer.gate, layer.gate_bias)
    up = product("bsd,dh->bsh", x, layer.up, layer.up_bias)  # (batch, tokens, hidden)
    y = activate_gated(gate_activation, gate, up)
    return product("bsh,hd->bsd", y, layer.down, layer.down_bias)


def resample(
    table: Float[Array, "positions width"], side: int, grid: tuple[int, int], *, filtered: bool
) -> Float[Array, "patches width"]:
    """Returns the positions of a grid of patches, given the positions of `side` by `side` patches,
    by bicubic resampling, as PyTorch computes it.

    - `table`: the positions, row by row.
    - `side`: the number of patches along the height and the width of the table.
    - `grid`: the number of patches along the height and the width of the result.
    - `filtered`: whether a smaller grid averages over more positions, to avoid aliasing.
    """
    if grid == (side, side):
        return table
    dtype = wide(table.dtype)
    rows = jnp.asarray(cubic_weights(side, grid[0], filtered), dtype)  # (new rows, old rows)
    columns = jnp.asarray(cubic_weights(side, grid[1], filtered), dtype)
    square = table.astype(dtype).reshape(side, side, -1)  # (old rows, old columns, width)
    resampled = jnp.einsum("ri,sj,ijd->rsd", rows, columns, square)
    return resampled.reshape(grid[0] * grid[1], -1).astype(table.dtype)


def cubic_weights(old: int, new: int, filtered: bool) -> Float[np.ndarray, "new old"]:
    """Returns the weights of the old positions for each new one. The kernel is Keys' (1981), with
    the parameter -1/2 if filtered, and -3/4 otherwise."""
    ratio = old / new  # the width of a new position, in old ones
    centres = (np.arange(new) + 0.5) * ratio - 0.5  # of the new positions, in old ones
    if filtered:
        weights = _kernel((np.arange(old)[None] - centres[:, None]) / max(ratio, 1), -0.5)
        return weights / weights.sum(axis=1, keepdims=True)
    weights = np.zeros((new, old))
    taps = np.floor(centres).astype(int)[:, None] + np.arange(-1, 3)[None]  # (new, 4)
    # Beyond the border, the outermost position repeats.
    at = np.clip(taps, 0, old - 1)
    np.add.at(weights, (np.arange(new)[:, None], at), _kernel(taps - centres[:, None], -0.75))
    return weights


def _kernel(x: Float[np.ndarray, "..."], a: float) -> Float[np.ndarray, "..."]:
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1  # up to 1 away
    far = a * (x**3 - 5 * x**2 + 8 * x - 4)  # from 1 to 2 away
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))
