"""SigLIP: an image encoder and a text encoder, whose outputs are compared."""

from dataclasses import KW_ONLY, dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend, full_view
from ._basic import layer_norm, small_normal
from ._check_config import check_fields
from ._einsum import feed_forward, product
from ._heads import Linear
from ._inputs import Images, Key, Mask, Texts
from ._pairs import ImageTextPair, PairEncoder, PairImageConfig, PairTextConfig, embed_square


@dataclass(frozen=True)
class SiglipImageConfig(PairImageConfig):
    """The configuration of the image encoder of a `Siglip`.

    **Arguments:**

    - `width`, `layers`, `heads`, `hidden`, `channels`, `activation`, `norm_eps`,
      `attention_dropout`: as in [`ViTConfig`][redcoast.models.ViTConfig].
    - `image`, `patch`: the height and width of images and of patches, in pixels. Pixels beyond the
      last whole patch are not read.
    - `remat`, `unroll`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    """


@dataclass(frozen=True)
class SiglipTextConfig(PairTextConfig):
    """The configuration of the text encoder of a `Siglip`.

    **Arguments:**

    - `vocab`: the vocabulary size.
    - `width`, `layers`, `heads`, `hidden`: as in `SiglipImageConfig`.
    - `positions`: the maximum length in tokens (position embeddings are learned).
    - `outputs`: the size of the output, which must be the width of the image encoder; `width` by
      default.
    - `activation`, `norm_eps`, `attention_dropout`, `remat`, `unroll`: as in `SiglipImageConfig`.
    - `eos`, `bos`, `pad`: the token ids of the end of a sequence (one or several), of its start,
      and of padding.
    """

    _: KW_ONLY
    outputs: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.outputs == self.width:
            object.__setattr__(self, "outputs", None)


@dataclass(frozen=True)
class SiglipConfig:
    """The configuration of a `Siglip`.

    **Arguments:**

    - `image`, `text`: the configurations of the two encoders.

    **Raises:**

    `ValueError` if the outputs of the two have different sizes; `TypeError` if a value has another
    type.
    """

    image: SiglipImageConfig
    text: SiglipTextConfig

    def __post_init__(self):
        check_fields(self)
        outputs = self.text.outputs or self.text.width
        if outputs != self.image.width:
            raise ValueError(
                "The outputs of both encoders must have the same size, but the width of images is "
                f"{self.image.width} and the outputs of texts have {outputs}."
            )


class SiglipPooler(eqx.Module):
    """Attention from a learned query to all patches, and a feed-forward network."""

    query: Float[Array, " width"]
    attention: "SiglipPoolerAttention"
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    up: Float[Array, "width hidden"]
    up_bias: Float[Array, " hidden"]
    down: Float[Array, "hidden width"]
    down_bias: Float[Array, " width"]

    def __init__(self, config: SiglipImageConfig, *, key: PRNGKeyArray):
        c = config
        query, attention, up, down = jax.random.split(key, 4)
        self.query = small_normal(query, (c.width,))
        self.attention = SiglipPoolerAttention(c, key=attention)
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.up, self.up_bias = small_normal(up, (c.width, c.hidden)), jnp.zeros(c.hidden)
        self.down, self.down_bias = small_normal(down, (c.hidden, c.width)), jnp.zeros(c.width)


class SiglipPoolerAttention(eqx.Module):
    """The projections of the pooler's attention."""

    wq: Float[Array, "width heads head_dim"]
    wk: Float[Array, "width heads head_dim"]
    wv: Float[Array, "width heads head_dim"]
    wo: Float[Array, "heads head_dim width"]
    bq: Float[Array, "heads head_dim"]
    bk: Float[Array, "heads head_dim"]
    bv: Float[Array, "heads head_dim"]
    bo: Float[Array, " width"]

    def __init__(self, config: SiglipImageConfig, *, key: PRNGKeyArray):
        c, head = config, (config.heads, config.head_dim)
        wq, wk, wv, wo = jax.random.split(key, 4)
        self.wq, self.wk, self.wv = (small_normal(k, (c.width, *head)) for k in (wq, wk, wv))
        self.wo = small_normal(wo, (*head, c.width))
        self.bq, self.bk, self.bv = (jnp.zeros(head) for _ in range(3))
        self.bo = jnp.zeros(c.width)


class SiglipImageEncoder(PairEncoder):
    """The image encoder of a `Siglip`."""

    patch_embed: Float[Array, "channels rows columns width"]
    patch_bias: Float[Array, " width"]
    pooler: SiglipPooler

    def __init__(self, config: SiglipImageConfig, *, key: PRNGKeyArray):
        c = config
        patch, positions, layers, pooler = jax.random.split(key, 4)
        self.patch_embed = small_normal(patch, (c.channels, c.patch, c.patch, c.width))
        self.patch_bias = jnp.zeros(c.width)
        self.pooler = SiglipPooler(c, key=pooler)
        super().__init__(c, (c.image // c.patch) ** 2, key=positions, of_layers=layers)


class SiglipTextEncoder(PairEncoder):
    """The text encoder of a `Siglip`."""

    embed: Float[Array, "vocab width"]
    head: Linear

    def __init__(self, config: SiglipTextConfig, *, key: PRNGKeyArray):
        c = config
        embed, positions, layers, head = jax.random.split(key, 4)
        self.embed = small_normal(embed, (c.vocab, c.width))
        self.head = Linear(c.width, c.outputs or c.width, key=head)
        super().__init__(c, c.positions, key=positions, of_layers=layers)


class Siglip(ImageTextPair):
    """SigLIP (Zhai et al., 2023, <https://arxiv.org/abs/2303.15343>).

    ```python
    image = SiglipImageConfig(width=64, layers=2, heads=4, hidden=256, image=32, patch=8)
    text = SiglipTextConfig(vocab=256, width=64, layers=2, heads=4, hidden=256, positions=16)
    model = Siglip(SiglipConfig(image, text), key=jax.random.key(0))
    pixels, tokens = jnp.zeros((8, 3, 32, 32)), jnp.zeros((5, 16), jnp.int32)
    logits = model(pixels, tokens)  # (8, 5)
    loss = losses.pairwise_sigmoid(model(pixels, jnp.zeros((8, 16), jnp.int32)))
    ```
    """

    image: SiglipImageEncoder
    text: SiglipTextEncoder
    logit_scale: Float[Array, "1"]
    logit_bias: Float[Array, "1"]
    config: SiglipConfig = eqx.field(static=True)

    def __init__(self, config: SiglipConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases 0 and norm scales 1. Logits begin with a factor of 10 and
        a bias of -10, as in the publication."""
        image, text = jax.random.split(key)
        self.image = SiglipImageEncoder(config.image, key=image)
        self.text = SiglipTextEncoder(config.text, key=text)
        self.logit_scale, self.logit_bias = jnp.log(jnp.full(1, 10.0)), jnp.full(1, -10.0)
        self.config = config

    def __call__(
        self, pixels: Images, tokens: Texts, *, mask: Mask | None = None, key: Key = None
    ) -> Float[Array, "images texts"]:
        """Returns the logits of each image and each text: the probability that they belong together
        is the sigmoid.

        **Arguments:**

        - `pixels`: images with the channels first, normalised to the range from -1 to 1.
        - `tokens`: token ids from 0 to `vocab - 1`. Any other id gives NaN, or raises an error
          outside of `jax.jit`. The published weights were trained on texts that are padded to all
          positions, without a mask. The output for a text is the output of its last position.
        - `mask`: 1 at tokens that are attended to. It does not change which position is the last.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the images do not have the size of the configuration, or if a text is longer
        than its positions.
        """
        return self._scaled_cosines(pixels, tokens, mask, key) + self.logit_bias[None]

    def _embed_images(self, pixels):
        part = self.image
        x = embed_square(self.config.image, pixels, part.patch_embed, part.patch_bias)
        return x + part.position_embed[None]

    def _see(self, real):
        return full_view(real)

    def _image_outputs(self, hidden):
        return self.pool(hidden)

    def _text_outputs(self, hidden, tokens):
        return self.text.head(hidden[:, -1])

    def pool(self, hidden: Float[Array, "images patches width"]) -> Float[Array, "images width"]:
        """Returns the outputs for images, given the hidden states of their patches."""
        c, pooler = self.config.image, self.image.pooler
        w = pooler.attention
        q = product("bsd,dhk->bshk", pooler.query[None, None], w.wq, w.bq)
        q = jnp.broadcast_to(q, (hidden.shape[0], *q.shape[1:]))  # (images, 1, heads, head_dim)
        k, v = (product("bsd,dhk->bshk", hidden, *pair) for pair in ((w.wk, w.bk), (w.wv, w.bv)))
        x = attend(q, k, v, visible=jnp.ones((1, 1, hidden.shape[1]), bool))
        x = product("bshk,hkd->bsd", x, w.wo, w.bo)  # (images, 1, width)
        y = layer_norm(x, pooler.norm, pooler.norm_shift, c.norm_eps)
        return (x + feed_forward(pooler, y, c.activation))[:, 0]
