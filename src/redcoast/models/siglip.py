"""SigLIP: an image encoder and a text encoder, whose outputs are compared."""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import AllReal, attend, full_view, real_tokens
from ._basic import layer_norm, look_up, small_normal
from ._check_config import HeadSizes, check_config, check_heads, check_length
from ._dropout import split_key
from ._einsum import feed_forward, product
from ._encoder import EncoderLayers, pre_norm_layers
from ._heads import Linear
from ._inputs import AnyArray, Mask
from ._pairs import PairImageConfig, embed_square, of_length_one
from ._scan_layers import Remat


@dataclass(frozen=True)
class SiglipImageConfig(PairImageConfig):
    """The configuration of the image encoder of a `Siglip`.

    **Arguments:**

    - `width`, `layers`, `heads`: the size of the residual stream, the number of layers and the
      number of heads.
    - `hidden`: the hidden size of the feed-forward network.
    - `image`, `patch`: the height and width of images and of patches, in pixels. Pixels beyond the
      last whole patch are not read.
    - `channels`: the number of channels of an image.
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `norm_eps`: added to the variance in layer norms.
    - `attention_dropout`: the dropout rate of the attention weights.
    - `remat`: what to rematerialise: `"none"`, `"dots"` (not products with weights) or `"full"`.
    - `unroll`: the number of layers in one iteration of the loop over layers; by default, all of
      them on a CPU if there are at most four, and otherwise one.

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """


@dataclass(frozen=True)
class SiglipTextConfig(HeadSizes):
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

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    positions: int = 64
    outputs: int | None = None
    activation: str = "gelu_pytorch_tanh"
    norm_eps: int | float = 1e-6
    attention_dropout: int | float = 0.0
    remat: Remat = "none"
    unroll: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    dropout = 0.0  # of the residual stream

    def __post_init__(self):
        check_config(self, "positions")
        check_heads(self)
        if self.outputs == self.width:
            object.__setattr__(self, "outputs", None)


@dataclass(frozen=True)
class SiglipConfig:
    """The configuration of a `Siglip`.

    **Arguments:**

    - `image`, `text`: the configurations of the two encoders.

    **Raises:**

    `ValueError` if the outputs of the two have different sizes.
    """

    image: SiglipImageConfig
    text: SiglipTextConfig

    def __post_init__(self):
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


class SiglipImageEncoder(eqx.Module):
    """The image encoder of a `Siglip`."""

    patch_embed: Float[Array, "channels rows columns width"]
    patch_bias: Float[Array, " width"]
    position_embed: Float[Array, "patches width"]
    layers: EncoderLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    pooler: SiglipPooler

    def __init__(self, config: SiglipImageConfig, *, key: PRNGKeyArray):
        c = config
        patch, positions, layers, pooler = jax.random.split(key, 4)
        self.patch_embed = small_normal(patch, (c.channels, c.patch, c.patch, c.width))
        self.patch_bias = jnp.zeros(c.width)
        self.position_embed = small_normal(positions, ((c.image // c.patch) ** 2, c.width))
        self.layers = EncoderLayers(c, key=layers)
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.pooler = SiglipPooler(c, key=pooler)


class SiglipTextEncoder(eqx.Module):
    """The text encoder of a `Siglip`."""

    embed: Float[Array, "vocab width"]
    position_embed: Float[Array, "positions width"]
    layers: EncoderLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    head: Linear

    def __init__(self, config: SiglipTextConfig, *, key: PRNGKeyArray):
        c = config
        embed, positions, layers, head = jax.random.split(key, 4)
        self.embed = small_normal(embed, (c.vocab, c.width))
        self.position_embed = small_normal(positions, (c.positions, c.width))
        self.layers = EncoderLayers(c, key=layers)
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.head = Linear(c.width, c.outputs or c.width, key=head)


class Siglip(eqx.Module):
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
        self,
        pixels: Float[Array, "images channels height width"],
        tokens: Integer[AnyArray, "texts seq"],
        *,
        mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "images texts"]:
        """Returns the logits of each image and each text: the probability that they belong together
        is the sigmoid.

        **Arguments:**

        - `pixels`: images with the channels first, normalised to the range from -1 to 1.
        - `tokens`: token ids from 0 to `vocab - 1`. A larger id gives NaN. The published weights
          were trained on texts that are padded to all positions, without a mask. The output for a
          text is the output of its last position.
        - `mask`: 1 at tokens that are attended to. It does not change which position is the last.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the images do not have the size of the configuration, or if a text is longer
        than its positions.
        """
        image_key, text_key = split_key(key, 2)
        images = of_length_one(self.encode_images(pixels, key=image_key))
        texts = of_length_one(self.encode_texts(tokens, mask=mask, key=text_key))
        scale, bias = jnp.exp(self.logit_scale)[None], self.logit_bias[None]
        return jnp.einsum("id,td->it", images, texts) * scale + bias

    def encode_images(
        self,
        pixels: Float[Array, "images channels height width"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "images outputs"]:
        """Returns the outputs for images, before they are normalised."""
        return self.pool(self.hidden_of_images(pixels, key=key))

    def encode_texts(
        self,
        tokens: Integer[AnyArray, "texts seq"],
        *,
        mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "texts outputs"]:
        """Returns the outputs for texts, before they are normalised."""
        return self.text.head(self.hidden_of_texts(tokens, mask=mask, key=key)[:, -1])

    def hidden_of_images(
        self,
        pixels: Float[Array, "images channels height width"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "images patches features"]:
        """Returns the hidden states of the patches after the final norm, row by row."""
        c, part = self.config.image, self.image
        x = embed_square(c, pixels, part.patch_embed, part.patch_bias)
        x = x + part.position_embed[None]
        visible = full_view(AllReal(x.shape[1]))
        return pre_norm_layers(part, x, visible, c, key)

    def hidden_of_texts(
        self,
        tokens: Integer[AnyArray, "texts seq"],
        *,
        mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "texts seq width"]:
        """Returns the hidden states of tokens after the final norm."""
        c, part = self.config.text, self.text
        check_length(c, tokens.shape[1])
        x = look_up(part.embed, tokens) + part.position_embed[None, : tokens.shape[1]]
        visible = full_view(real_tokens(tokens.shape, mask))
        return pre_norm_layers(part, x, visible, c, key)

    def pool(self, hidden: Float[Array, "images patches width"]) -> Float[Array, "images width"]:
        """Returns the outputs for images, given the hidden states of their patches."""
        c, pooler = self.config.image, self.image.pooler
        w = pooler.attention
        q = product("bsd,dhk->bshk", pooler.query[None, None], w.wq, w.bq)
        q = jnp.broadcast_to(q, (hidden.shape[0], *q.shape[1:]))
        k, v = (product("bsd,dhk->bshk", hidden, *pair) for pair in ((w.wk, w.bk), (w.wv, w.bv)))
        x = attend(q, k, v, visible=jnp.ones((1, 1, hidden.shape[1]), bool))
        x = product("bshk,hkd->bsd", x, w.wo, w.bo)
        y = layer_norm(x, pooler.norm, pooler.norm_shift, c.norm_eps)
        return (x + feed_forward(pooler, y, c.activation))[:, 0]
