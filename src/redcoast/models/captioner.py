"""An image captioner: a ViT encoder and a GPT-2 decoder with cross-attention."""

from dataclasses import dataclass

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from ..core._decoding import GREEDY, Decoding
from ._basic import split_key
from ._cache import Cache
from ._check_config import check_decoder_start, check_fields
from ._cross_cache import CrossCache
from ._heads import Linear
from ._inputs import HiddenStates, Key, Mask, Pixels, Tokens
from .gpt2 import GPT2, GPT2Config
from .vit import ViT, ViTConfig


@dataclass(frozen=True)
class CaptionerConfig:
    """The configuration of a `Captioner`.

    **Arguments:**

    - `encoder`: the configuration of the ViT, which must have no head.
    - `decoder`: the configuration of the GPT-2 decoder, with `cross_attention=True`.
    - `decoder_start`: the token id that each caption starts with. `generate` needs it.
    - `eos`, `bos`, `pad`: the token ids of the end of a sequence (one or several), of its start,
      and of padding.
    - `decoding`: the defaults of [`redcoast.generate`][] for this model.

    **Raises:**

    `ValueError` if the encoder has a head, if the decoder has no cross-attention, or if a caption
    starts with a token outside of the vocabulary.
    """

    encoder: ViTConfig
    decoder: GPT2Config
    decoder_start: int | None = None
    eos: tuple[int, ...] = ()
    bos: int | None = None
    pad: int | None = None
    decoding: Decoding = GREEDY

    def __post_init__(self):
        check_fields(self)
        if self.encoder.head is not None:
            raise ValueError(
                "The encoder of a captioner must have no head: the decoder attends to its hidden "
                "states."
            )
        if not self.decoder.cross_attention:
            raise ValueError("The decoder of a captioner must have `cross_attention=True`.")
        check_decoder_start(self)

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def positions(self) -> int:
        return self.decoder.positions


class Captioner(eqx.Module):
    """An image encoder and a text decoder that attends to it (Vaswani et al., 2017,
    <https://arxiv.org/abs/1706.03762>, section 3.2.3).

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
        """Initialises the parameters of the encoder and the decoder as in separate models.

        If the widths differ, a projection connects them: normal with standard deviation 0.02,
        truncated at three standard deviations.
        """
        encoder, bridge, decoder = jax.random.split(key, 3)
        width, out = config.encoder.width, config.decoder.width
        self.encoder, self.bridge = ViT(config.encoder, key=encoder), None
        if width != out:
            self.bridge = Linear(width, out, key=bridge)
        self.decoder = GPT2(config.decoder, key=decoder)
        self.config = config

    def __call__(
        self,
        pixels: Pixels,
        decoder_tokens: Tokens,
        *,
        mask: None = None,
        decoder_mask: Mask | None = None,
        key: Key = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of the next token at each position of the captions.

        **Arguments:**

        - `pixels`: images with the channels first, as for `ViT`.
        - `decoder_tokens`: the captions, each after the token that captions start with.
        - `mask`: must be None, since images have no padding.
        - `decoder_mask`: 1 at real tokens and 0 at padding tokens, which may be on either side.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the images do not have the size of the configuration, or if a row has more
        tokens than `config.positions`.
        """
        options = {"mask": mask, "decoder_mask": decoder_mask, "key": key}
        return self.unembed(self.hidden(pixels, decoder_tokens, **options))

    def hidden(
        self,
        pixels: Pixels,
        decoder_tokens: Tokens,
        *,
        mask: None = None,
        decoder_mask: Mask | None = None,
        key: Key = None,
    ) -> Float[Array, "batch seq features"]:
        """Returns the final hidden states, from which `unembed` computes the logits. The arguments
        are those of `__call__`."""
        encoder_key, key = split_key(key, 2)
        memory = self.encode(pixels, mask=mask, key=encoder_key)  # (batch, patches, width)
        return self.decoder.hidden(decoder_tokens, mask=decoder_mask, memory=memory, key=key)

    def encode(
        self, pixels: Pixels, *, mask: None = None, key: Key = None
    ) -> Float[Array, "batch patches features"]:
        """Returns the encoder's hidden states, which the decoder attends to."""
        memory = self.encoder.hidden(pixels, mask=mask, key=key)
        # The decoder's cross-attention takes its own width.
        if self.bridge is None:
            return memory
        return self.bridge(memory)

    def init_cache(
        self,
        batch: int,
        length: int,
        *,
        memory: Float[Array, "batch patches width"],
        memory_mask: Mask | None = None,
    ) -> Cache | CrossCache:
        """Returns an empty cache for `batch` captions of up to `length` tokens. `memory` is the
        output of `encode`."""
        return self.decoder.init_cache(batch, length, memory=memory, memory_mask=memory_mask)

    def decode(
        self, tokens: Tokens, cache: Cache | CrossCache, *, mask: Mask | None = None
    ) -> tuple[HiddenStates, Cache | CrossCache]:
        """Appends tokens to a cache. Returns their hidden states and the updated cache."""
        return self.decoder.decode(tokens, cache, mask=mask)

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of hidden states."""
        return self.decoder.unembed(hidden)
