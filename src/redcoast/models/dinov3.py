"""The DINOv3 encoder: DINOv2 with registers, rotary instead of learned positions of the patches,
and gated layers of another size."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ._base_config import ImageSizes, LayersConfig, check_config
from ._basic import split_key
from ._check_config import check_patches
from ._inputs import Key
from ._patches import PatchEncoder


@dataclass(frozen=True)
class Dinov3Config(ImageSizes, LayersConfig):
    """The configuration of a `Dinov3`.

    **Arguments:**

    - `width`, `layers`, `heads`, `hidden`, `channels`, `norm_eps`: as in
      [`ViTConfig`][redcoast.models.ViTConfig].
    - `image`, `patch`: the height and width of the images of pretraining and of patches, in pixels.
      Images of any other size can be encoded too.
    - `registers`: the number of register tokens.
    - `gated`: whether the feed-forward network has a gate.
    - `activation`: the activation function of the feed-forward network, or of its gate, by its name
      in `config.json` files.
    - `rope_base`: the base of the wavelengths of rotary embeddings.
    - `shift`, `jitter`, `rescale`: in training, the coordinates of the patches, which are between
      -1 and 1, are shifted by at most `shift`, and multiplied by at most `jitter`, both separately
      for rows and columns; and by at most `rescale`. None disables it.
    - `q_bias`, `k_bias`, `v_bias`, `o_bias`, `mlp_bias`: whether Q, K, V, the output of attention
      and the feed-forward network have biases.
    - `layer_scale`, `attention_dropout`, `path_dropout`: as in
      [`Dinov2Config`][redcoast.models.Dinov2Config].
    - `remat`, `unroll`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    image: int = 224
    patch: int = 16
    channels: int = 3
    registers: int = 4
    gated: bool = False
    activation: str = "gelu"
    rope_base: int | float = 100.0
    shift: int | float | None = None
    jitter: int | float | None = None
    rescale: int | float | None = 2.0
    norm_eps: int | float = 1e-5
    q_bias: bool = True
    k_bias: bool = False
    v_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    layer_scale: int | float = 1.0
    attention_dropout: int | float = 0.0
    path_dropout: int | float = 0.0

    def __post_init__(self):
        check_config(self, "image", "patch", "channels", "registers")
        check_patches(self.image, self.patch)
        if self.head_dim % 4:
            raise ValueError(
                "The head size must be a multiple of 4, a half of it for rows and the other for "
                f"columns, but is {self.head_dim}."
            )
        for name in ("jitter", "rescale"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value}.")

    @property
    def biases(self) -> str:
        """The letters of the projections of attention that have biases."""
        return "q" * self.q_bias + "k" * self.k_bias + "v" * self.v_bias + "o" * self.o_bias


class Dinov3(PatchEncoder):
    """The DINOv3 encoder (Siméoni et al., 2025, <https://arxiv.org/abs/2508.10104>).

    ```python
    config = Dinov3Config(width=128, layers=4, heads=4, hidden=512, image=32, patch=8)
    model = Dinov3(config, key=jax.random.key(0))
    hidden = model(jnp.zeros((8, 3, 32, 32)))  # (8, 21, 128)
    maps = model.features(jnp.zeros((8, 3, 48, 32)), [2, 4])  # two of (8, 6, 4, 128)
    ```
    """

    config: Dinov3Config = eqx.field(static=True)

    def __init__(self, config: Dinov3Config, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases and the mask token 0, and norm scales 1."""
        c = config
        keys = jax.random.split(key, 4)
        super().__init__(c, keys, biases=c.biases, mlp_bias=c.mlp_bias, mask=True)

    def _run(self, pixels, masked, after, key):
        c = self.config
        position_key, key = split_key(key, 2)
        x = self._with_first(self._embed(pixels, masked), self.cls_token)  # (batch, tokens, width)
        grid = tuple(size // c.patch for size in pixels.shape[2:])
        angles = _angles(c, grid, x.dtype, position_key)
        return self._apply_layers(x, after, key, gate=c.activation, angles=angles)


def _angles(config, grid, dtype, key):
    """The cosines and sines for all tokens: half of each head's pairs rotate with the row of a
    patch, and half with its column. The class token and the registers are not rotated."""
    c = config
    # The centres of the patches, between -1 and 1.
    centres = [(2 * np.arange(size) + 1) / size - 1 for size in grid]
    # (patches, 2): row and column
    points = np.stack(np.meshgrid(*centres, indexing="ij"), axis=-1).reshape(-1, 2)
    points = _changed(jnp.asarray(points, jnp.float32), c, key)  # (patches, 2)
    frequencies = 2 * np.pi * float(c.rope_base) ** -(np.arange(0, c.head_dim, 4) / c.head_dim)
    # (patches, 2, head_dim / 4)
    angles = points[:, :, None] * jnp.asarray(frequencies, jnp.float32)[None, None]
    angles = angles.reshape(1, len(points), 1, -1)  # (1, patches, 1, head_dim / 2)
    # An angle of 0 for the tokens that are no patches.
    angles = jnp.pad(angles, ((0, 0), (1 + c.registers, 0), (0, 0), (0, 0)))
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def _changed(
    points: Float[Array, "patches 2"], c: Dinov3Config, key: Key
) -> Float[Array, "patches 2"]:
    """The coordinates in a training step."""
    if key is None:
        return points
    shift_key, jitter_key, rescale_key = jax.random.split(key, 3)
    if c.shift is not None:
        shift = jax.random.uniform(shift_key, (1, 2), None, -c.shift, c.shift)
        points = points + shift.astype(points.dtype)
    # Rows and columns have factors of their own, and one in common.
    for own_key, size, most in ((jitter_key, 2, c.jitter), (rescale_key, 1, c.rescale)):
        if most is not None:
            most = float(np.log(most))
            # Uniform in the logarithm, so that halving is as likely as doubling.
            factor = jnp.exp(jax.random.uniform(own_key, (1, size), None, -most, most))
            points = points * factor.astype(points.dtype)
    return points
