"""CLIP: an image encoder and a text encoder, whose outputs are compared."""

from dataclasses import KW_ONLY, dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import causal_view
from ._basic import layer_norm, small_normal
from ._check_config import check_fields
from ._einsum import product
from ._inputs import Images, Key, Mask, Texts
from ._pairs import ImageTextPair, PairEncoder, PairImageConfig, PairTextConfig, embed_square

# The oldest files have this id in place of `eos`. The output of a text is then the output of the
# token with the largest id.
_OLD_END = 2


@dataclass(frozen=True)
class ClipImageConfig(PairImageConfig):
    """The configuration of the image encoder of a `Clip`.

    It has the arguments of [`SiglipImageConfig`][redcoast.models.SiglipImageConfig], with other
    defaults.
    """

    patch: int = 32
    activation: str = "quick_gelu"
    norm_eps: int | float = 1e-5


@dataclass(frozen=True)
class ClipTextConfig(PairTextConfig):
    """The configuration of the text encoder of a `Clip`.

    **Arguments:**

    - `vocab`: the vocabulary size.
    - `width`, `layers`, `heads`, `hidden`: as in `ClipImageConfig`.
    - `positions`: the maximum length in tokens (position embeddings are learned).
    - `activation`, `norm_eps`, `attention_dropout`, `remat`, `unroll`: as in `ClipImageConfig`.
    - `eos`, `bos`, `pad`: the token ids of the end of a sequence (one or several), of its start,
      and of padding.
    """

    positions: int = 77
    activation: str = "quick_gelu"
    norm_eps: int | float = 1e-5
    _: KW_ONLY
    eos: tuple[int, ...] = (49407,)

    def __post_init__(self):
        super().__post_init__()
        if len(self.eos) != 1:
            raise ValueError(
                f"`eos` must be one token, whose output represents a text, but is {self.eos}."
            )


@dataclass(frozen=True)
class ClipConfig:
    """The configuration of a `Clip`.

    **Arguments:**

    - `image`, `text`: the configurations of the two encoders.
    - `outputs`: the size of the outputs that are compared.

    **Raises:**

    `ValueError` if `outputs` is not positive; `TypeError` if a value has another type.
    """

    image: ClipImageConfig
    text: ClipTextConfig
    outputs: int = 512

    def __post_init__(self):
        check_fields(self)


class ClipImageEncoder(PairEncoder):
    """The image encoder of a `Clip`. Its first position is the class token."""

    patch_embed: Float[Array, "channels rows columns width"]
    class_embed: Float[Array, " width"]
    first_norm: Float[Array, " width"]
    first_norm_shift: Float[Array, " width"]
    head: Float[Array, "width outputs"]

    def __init__(self, config: ClipImageConfig, outputs: int, *, key: PRNGKeyArray):
        c = config
        patch, first, positions, layers, head = jax.random.split(key, 5)
        self.patch_embed = small_normal(patch, (c.channels, c.patch, c.patch, c.width))
        self.class_embed = small_normal(first, (c.width,))
        self.first_norm, self.first_norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.head = small_normal(head, (c.width, outputs))
        super().__init__(c, (c.image // c.patch) ** 2 + 1, key=positions, of_layers=layers)


class ClipTextEncoder(PairEncoder):
    """The text encoder of a `Clip`."""

    embed: Float[Array, "vocab width"]
    head: Float[Array, "width outputs"]

    def __init__(self, config: ClipTextConfig, outputs: int, *, key: PRNGKeyArray):
        c = config
        embed, positions, layers, head = jax.random.split(key, 4)
        self.embed = small_normal(embed, (c.vocab, c.width))
        self.head = small_normal(head, (c.width, outputs))
        super().__init__(c, c.positions, key=positions, of_layers=layers)


class Clip(ImageTextPair):
    """CLIP (Radford et al., 2021, <https://arxiv.org/abs/2103.00020>).

    ```python
    image = ClipImageConfig(width=64, layers=2, heads=4, hidden=256, image=32, patch=8)
    text = ClipTextConfig(256, width=32, layers=2, heads=4, hidden=128, positions=16, eos=(255,))
    model = Clip(ClipConfig(image, text, outputs=48), key=jax.random.key(0))
    pixels, tokens = jnp.zeros((8, 3, 32, 32)), jnp.full((5, 16), 255)
    logits = model(pixels, tokens)  # (8, 5)
    ```
    """

    image: ClipImageEncoder
    text: ClipTextEncoder
    logit_scale: Float[Array, "1"]
    config: ClipConfig = eqx.field(static=True)

    def __init__(self, config: ClipConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases 0 and norm scales 1. Logits begin with a factor of 1 /
        0.07, as in the publication."""
        image, text = jax.random.split(key)
        self.image = ClipImageEncoder(config.image, config.outputs, key=image)
        self.text = ClipTextEncoder(config.text, config.outputs, key=text)
        self.logit_scale = jnp.log(jnp.full(1, 1 / 0.07))
        self.config = config

    def __call__(
        self, pixels: Images, tokens: Texts, *, mask: Mask | None = None, key: Key = None
    ) -> Float[Array, "images texts"]:
        """Returns the logits of each image and each text. The softmax over texts is the probability
        that a text belongs to an image.

        **Arguments:**

        - `pixels`: images with the channels first, normalised in the same way as in training.
        - `tokens`: token ids from 0 to `vocab - 1`. Any other id gives NaN, or raises an error
          outside of `jax.jit`. The output for a text is the output of its first token
          `config.text.eos`.
        - `mask`: 1 at real tokens and 0 at padding tokens, which must be on the right.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the images do not have the size of the configuration, or if a text is longer
        than its positions.
        """
        return self._scaled_cosines(pixels, tokens, mask, key)

    def _embed_images(self, pixels):
        c, part = self.config.image, self.image
        x = embed_square(c, pixels, part.patch_embed, None)
        first = jnp.broadcast_to(part.class_embed[None, None], (x.shape[0], 1, x.shape[2]))
        # (images, 1 + patches, width)
        x = jnp.concatenate([first, x], axis=1) + part.position_embed[None]
        return layer_norm(x, part.first_norm, part.first_norm_shift, c.norm_eps)

    def _see(self, real):
        # A token sees no later ones, so the end of a text has seen all of it.
        return causal_view(real)

    def _image_outputs(self, hidden):
        return product("bd,do->bo", hidden[:, 0], self.image.head)  # (images, outputs)

    def _text_outputs(self, hidden, tokens):
        ends, eos = jnp.asarray(tokens), self.config.text.eos[0]
        if eos != _OLD_END:
            ends = ends == eos
        last = jnp.argmax(ends, axis=1)  # (texts,)
        x = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]  # (texts, width)
        return product("bd,do->bo", x, self.text.head)
