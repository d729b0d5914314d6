"""A captioner: GPT-2 writes about what a ViT has seen."""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import Mask
from ._cache import Cache
from ._checks import check_fields
from ._cross_cache import CrossCache
from ._dropout import split_key
from ._einsum import product
from ._heads import Linear
from .gpt2 import GPT2, GPT2Config
from .vit import ViT, ViTConfig


@dataclass(frozen=True)
class CaptionerConfig:
    """The parts of a `Captioner`.

    **Arguments:**

    - `encoder`: of the ViT, which has no head.
    - `decoder`: of the GPT-2, whose layers attend to a memory: `cross_attention=True`.
    - `decoder_start`: the token that each caption begins with, which generating needs.
    - `eos`, `bos`, `pad`: the tokens that end a caption, begin a text, and fill what is behind.

    **Raises:**

    `ValueError` if the parts do not fit together.
    """

    encoder: ViTConfig
    decoder: GPT2Config
    decoder_start: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None

    def __post_init__(self):
        check_fields(self)
        if self.encoder.head is not None:
            raise ValueError("A captioner reads hidden states: its encoder must be without a head.")
        if not self.decoder.cross_attention:
            raise ValueError("A captioner's decoder must have `cross_attention=True`.")

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def positions(self) -> int:
        return self.decoder.positions


class Captioner(eqx.Module):
    """An encoder of images and a decoder of text, joined by attention from one to the other
    (Vaswani et al., 2017, <https://arxiv.org/abs/1706.03762>, section 3.2.3).

    ```python
    encoder = ViTConfig(width=64, layers=2, heads=4, hidden=256, image=(32, 32), patch=(8, 8))
    decoder = GPT2Config(
        vocab=256, width=96, layers=2, heads=4, hidden=384, positions=32, cross_attention=True
    )
    model = Captioner(CaptionerConfig(encoder, decoder), key=jax.random.key(0))
    pixels, tokens = jnp.zeros((8, 3, 32, 32)), jnp.zeros((8, 16), jnp.int32)
    logits = model(pixels, tokens)  # (8, 16, 256)
    ```
    """

    encoder: ViT
    bridge: Linear | None
    decoder: GPT2
    config: CaptionerConfig = eqx.field(static=True)

    def __init__(self, config: CaptionerConfig, *, key: PRNGKeyArray):
        """Initial parameters of these sizes by `key`: as each part has them; those of the bridge
        between different widths normal with a deviation of 0.02, truncated at three."""
        encoder, bridge, decoder = jax.random.split(key, 3)
        widths = config.encoder.width, config.decoder.width
        self.encoder = ViT(config.encoder, key=encoder)
        self.bridge = Linear(*widths, key=bridge) if widths[0] != widths[1] else None
        self.decoder = GPT2(config.decoder, key=decoder)
        self.config = config

    def __call__(
        self,
        pixels: Float[Array, "batch channels height width"],
        decoder_tokens: Integer[Array, "batch seq"],
        *,
        mask: None = None,
        decoder_mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """The logits of the token that follows each token of the captions.

        **Arguments:**

        - `pixels`: with the channels first, as image processors give them.
        - `decoder_tokens`: the captions, behind the token that they begin with.
        - `mask`: images have no padding; only that none is given is allowed.
        - `decoder_mask`: 1 at real tokens of the captions, 0 at padding on either side.
        - `key`: of the dropout; without it there is none.

        **Raises:**

        `ValueError` if the images are not of the configuration's size, or if there are more tokens
        in a row than positions.
        """
        options = {"mask": mask, "decoder_mask": decoder_mask, "key": key}
        return self.unembed(self.hidden(pixels, decoder_tokens, **options))

    def hidden(
        self,
        pixels: Float[Array, "batch channels height width"],
        decoder_tokens: Integer[Array, "batch seq"],
        *,
        mask: None = None,
        decoder_mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq features"]:
        """What the logits are made of; the arguments are those of a call."""
        encoder_key, key = split_key(key, 2)
        memory = self.encode(pixels, mask=mask, key=encoder_key)
        return self.decoder.hidden(decoder_tokens, mask=decoder_mask, memory=memory, key=key)

    def encode(
        self,
        pixels: Float[Array, "batch channels height width"],
        *,
        mask: None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch patches features"]:
        """What the decoder attends to."""
        memory = self.encoder.hidden(pixels, mask=mask, key=key)
        if self.bridge is None:
            return memory
        return product("bsi,io->bso", memory, self.bridge.w, self.bridge.b)

    def init_cache(
        self,
        batch: int,
        length: int,
        *,
        memory: Float[Array, "batch patches width"],
        memory_mask: Mask | None = None,
    ) -> Cache | CrossCache:
        """An empty cache for `length` tokens in each of `batch` captions of what was encoded."""
        return self.decoder.init_cache(batch, length, memory=memory, memory_mask=memory_mask)

    def decode(
        self,
        tokens: Integer[Array, "batch new"],
        cache: Cache | CrossCache,
        *,
        mask: Mask | None = None,
    ) -> tuple[Float[Array, "batch new width"], Cache | CrossCache]:
        """Appends tokens to a cache; what `hidden` would give for them, and the cache."""
        return self.decoder.decode(tokens, cache, mask=mask)

    def unembed(self, hidden: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """The logits of hidden states."""
        return self.decoder.unembed(hidden)
