"""The Whisper encoder-decoder: log-mel features of sound in, text out."""

import json
import math
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import causal_view, count_positions, full_view, real_tokens
from ._base_config import DecoderConfig, StackSizes, check_config
from ._basic import ACTIVATIONS, dropout, layer_norm, look_up, small_normal, split_key
from ._cache import extend
from ._check_config import check_length
from ._check_tokens import check_floats, check_tokens, refuse_mask
from ._einsum import keys_values, product, queries
from ._encoder import CrossLayers, attention_output, mlp_output
from ._encoder_decoder import NO_MEMORY, CrossDecoder
from ._inputs import AnyArray, HiddenStates, Key, Mask, Tokens
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class WhisperConfig(StackSizes, DecoderConfig):
    """The configuration of a `Whisper`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `decoder_layers`, `heads`, `hidden`, `activation`, `dropout`,
      `attention_dropout`, `activation_dropout`, `decoder_start`: as in
      [`BartConfig`][redcoast.models.BartConfig].
    - `mels`, `frames`: the number of features of a frame of sound, and of frames. The encoder
      halves the number of frames.
    - `positions`: the maximum length of the text in tokens.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    - `speech_settings`: settings of `generation_config.json` that `save_pretrained` writes again
      for `transformers`, such as the tokens of languages (`lang_to_id`): names, and values in JSON.
    """

    mels: int = 80
    frames: int = 3000
    positions: int = 448
    activation: str = "gelu"
    dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    activation_dropout: int | float = 0.0
    decoder_start: int = 50258
    speech_settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        check_config(self, "mels", "frames", "positions")
        for name, least in (("width", 4), ("frames", 2)):
            value = getattr(self, name)
            if value < least or value % 2:
                raise ValueError(f"`{name}` must be even and at least {least}, but is {value}.")
        for name, text in self.speech_settings:
            try:
                json.loads(text)
            except ValueError as error:
                raise ValueError(
                    f"`speech_settings` must have values in JSON, but `{name}` is {text!r}."
                ) from error


_EPS = 1e-5
# The frames that each convolution sees.
_TAPS = 3


class WhisperEncoder(eqx.Module):
    """Two convolutions over time, of which the second halves the number of frames, and layers."""

    first: Float[Array, "taps mels width"]
    first_bias: Float[Array, " width"]
    second: Float[Array, "taps width_in width"]
    second_bias: Float[Array, " width"]
    position_embed: Float[Array, "positions width"]
    layers: CrossLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]

    def __init__(self, config: WhisperConfig, *, key: PRNGKeyArray):
        c = config
        first, second, layers = jax.random.split(key, 3)
        self.first = small_normal(first, (_TAPS, c.mels, c.width))
        self.second = small_normal(second, (_TAPS, c.width, c.width))
        self.first_bias, self.second_bias = jnp.zeros(c.width), jnp.zeros(c.width)
        self.position_embed = jnp.asarray(sinusoids(c.frames // 2, c.width), self.first.dtype)
        self.layers = CrossLayers(c, c.layers, cross=False, key_bias=False, key=layers)
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)


class WhisperDecoder(eqx.Module):
    """Layers with cross-attention, over embeddings with learned positions."""

    position_embed: Float[Array, "positions width"]
    layers: CrossLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]

    def __init__(self, config: WhisperConfig, *, key: PRNGKeyArray):
        table, layers = jax.random.split(key)
        self.position_embed = small_normal(table, (config.positions, config.width))
        create = eqx.Partial(CrossLayers, config, config.decoder_layers, key_bias=False)
        self.layers = create(cross=True, key=layers)
        self.norm, self.norm_shift = jnp.ones(config.width), jnp.zeros(config.width)


class Whisper(CrossDecoder):
    """The Whisper encoder-decoder (Radford et al., 2022, <https://arxiv.org/abs/2212.04356>).

    It takes the log-mel features of 30 seconds of sound, which the processor of `transformers`
    (`WhisperFeatureExtractor`) computes.

    ```python
    config = WhisperConfig(
        vocab=256, width=128, layers=2, decoder_layers=2, heads=4, hidden=512, frames=300,
        decoder_start=1,
    )
    model = Whisper(config, key=jax.random.key(0))
    features, labels = jnp.zeros((8, 80, 300)), jnp.ones((8, 16), jnp.int32)
    logits = model(features, shift_right(labels, start=config.decoder_start))  # (8, 16, 256)
    ```
    """

    embed: Float[Array, "vocab width"]
    encoder: WhisperEncoder
    decoder: WhisperDecoder
    config: WhisperConfig = eqx.field(static=True)

    def __init__(self, config: WhisperConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02, truncated at three
        standard deviations. The positions of the encoder are sinusoids."""
        embed, encoder, decoder = jax.random.split(key, 3)
        self.embed = small_normal(embed, (config.vocab, config.width))
        self.encoder = WhisperEncoder(config, key=encoder)
        self.decoder = WhisperDecoder(config, key=decoder)
        self.config = config

    def __call__(
        self,
        features: Float[AnyArray, "batch mels frames"],
        decoder_tokens: Tokens,
        *,
        mask: None = None,
        decoder_mask: Mask | None = None,
        key: Key = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of the next token at each position of the text.

        **Arguments:**

        - `features`: log-mel features, with `config.frames` frames: shorter sounds are padded with
          silence.
        - `decoder_tokens`: the texts, each after the tokens that texts start with (see
          `shift_right`).
        - `mask`: must be None, since silence is not masked.
        - `decoder_mask`: 1 at real tokens and 0 at padding tokens, which may be on either side.
        - `key`: PRNG key for dropout. Without it, dropout is disabled.

        **Raises:**

        `ValueError` if the features do not have the size of the configuration, or if a row has
        more tokens than `config.positions`.
        """
        options = {"mask": mask, "decoder_mask": decoder_mask, "key": key}
        return self.unembed(self.hidden(features, decoder_tokens, **options))

    def hidden(
        self,
        features: Float[AnyArray, "batch mels frames"],
        decoder_tokens: Tokens,
        *,
        mask: None = None,
        decoder_mask: Mask | None = None,
        key: Key = None,
    ) -> HiddenStates:
        """Returns the final hidden states, from which `unembed` computes the logits. The arguments
        are those of `__call__`."""
        check_tokens(
            decoder_tokens, self.config.vocab, name="decoder_tokens", decoder_mask=decoder_mask
        )
        check_length(self.config, decoder_tokens.shape[1])
        encoder_key, key = split_key(key, 2)
        memory = self.encode(features, mask=mask, key=encoder_key)
        real = real_tokens(decoder_tokens.shape, decoder_mask)
        cross_visible = full_view(real_tokens(memory.shape, None))
        view = count_positions(real), causal_view(real)
        return self._run(
            self.decoder, decoder_tokens, *view, (memory, None, cross_visible), None, key
        )[0]

    def encode(
        self, features: Float[AnyArray, "batch mels frames"], *, mask: None = None, key: Key = None
    ) -> Float[Array, "batch memory width"]:
        """Returns the encoder's hidden states, which the decoder attends to. The arguments are
        those of `__call__`."""
        refuse_mask(mask)
        c, encoder = self.config, self.encoder
        check_floats("features", features, ("batch", "mels", "frames"))
        if features.shape[1:] != (c.mels, c.frames):
            raise ValueError(
                f"The features have shape {features.shape[1:]}, but the model takes "
                f"{(c.mels, c.frames)}: mel bands and frames. Pad the sound, or cut it."
            )
        embed_key, key = split_key(key, 2)
        x = jnp.swapaxes(features.astype(encoder.first.dtype), 1, 2)  # (batch, frames, mels)
        x = _convolve(x, encoder.first, encoder.first_bias, stride=1)  # (batch, frames, width)
        x = _convolve(x, encoder.second, encoder.second_bias, stride=2)  # half of the frames
        # Sinusoids are not trained. They are stored with the parameters, as in published files.
        x = x + jax.lax.stop_gradient(encoder.position_embed)[None]
        x = dropout(x, c.dropout, embed_key)
        visible = full_view(real_tokens(x.shape, None))
        return self._layers(encoder, x, visible, NO_MEMORY, None, key)[0]

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of hidden states."""
        return product("bsd,vd->bsv", hidden, self.embed)

    def _run(self, stack, tokens, positions, visible, cross, cache, key):
        embed_key, key = split_key(key, 2)
        x = look_up(self.embed, tokens) + look_up(stack.position_embed, positions)
        x = dropout(x, self.config.dropout, embed_key)
        return self._layers(stack, x, visible, cross, cache, key)

    def _layers(self, stack, x, visible, cross, cache, key):
        c = self.config
        # The memory's keys and values come from a cache or are computed in each layer.
        memory, stored, cross_visible = cross

        def layer_fn(x, cache, inputs, index, key):
            layer, kv = inputs
            keys = split_key(key, 3)
            y = _norm(layer.attention, x)
            cache, *own = extend(cache, index, *keys_values(layer.attention, y))
            q = queries(layer.attention, y)  # (batch, seq, heads, head_dim)
            x = x + attention_output(layer.attention, q, own, visible, c, keys[0])
            if layer.cross is not None:
                if kv is None:
                    kv = keys_values(layer.cross, memory)
                q = queries(layer.cross, _norm(layer.cross, x))
                x = x + attention_output(layer.cross, q, kv, cross_visible, c, keys[1])
            y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, _EPS)
            return x + mlp_output(layer, y, c, keys[2]), cache

        layers = (stack.layers, stored)
        x, cache = scan_layers(layer_fn, x, layers, cache=cache, key=key, **c.loop_options)
        return layer_norm(x, stack.norm, stack.norm_shift, _EPS), cache


def sinusoids(length: int, width: int) -> Float[np.ndarray, "length width"]:
    """Returns the sines of all positions, followed by the cosines."""
    rates = np.exp(-math.log(10000) / (width // 2 - 1) * np.arange(width // 2))  # from 1 to 1/10000
    angles = np.arange(length)[:, None] * rates[None]  # (length, width / 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _convolve(x, kernel, bias, *, stride):
    """A convolution over time, and GELU. Each end is padded with a frame of zeros."""
    # A product over windows, not a convolution, so that every dimension can be sharded.
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    length = x.shape[1]
    # Each window begins one frame later; a stride leaves frames out.
    windows = [padded[:, tap : tap + length : stride] for tap in range(_TAPS)]
    return ACTIVATIONS["gelu"](product("bstm,tmd->bsd", jnp.stack(windows, axis=2), kernel, bias))


def _norm(layer, x):
    return layer_norm(x, layer.norm, layer.norm_shift, _EPS)
