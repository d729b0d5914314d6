"""The ModernBERT encoder: BERT with rotary positions, gated layers, norms before each sublayer, and
attention within a window in most layers."""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._attention import attend_near, count_positions, full_view, real_tokens
from ._attention_layers import AttentionLayers, sample_attention
from ._base_config import TextConfig, TokenSizes, check_config, check_even_heads
from ._basic import (
    ACTIVATIONS,
    activate_gated,
    dropout,
    layer_norm,
    look_up,
    ones,
    output_scale,
    small_normal,
    split_key,
    wide,
    zeros,
)
from ._check_config import check_local
from ._check_tokens import check_tokens
from ._einsum import keys_values, outputs, product, queries
from ._heads import Linear, first_token
from ._inputs import HiddenStates, Key, Mask, Positions, Segments, Tokens
from ._rotary import rotary_angles, rotary_frequencies, rotate
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class ModernBertConfig(TokenSizes, TextConfig):
    """The configuration of a `ModernBert`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`, `norm_eps`: as in
      [`GPT2Config`][redcoast.models.GPT2Config].
    - `hidden`: the hidden size of the gated feed-forward network.
    - `local`: for each layer, whether it has a sliding attention window; by default, all except the
      first and every third after it.
    - `window`: the size of that window: a token sees tokens that are at most `window // 2` away.
    - `rope_base`, `local_rope_base`: the bases of the rotary embeddings' wavelengths in the layers
      without and with a window.
    - `head`: determines what a call returns. `None`: the hidden states. `"masked"`: the logits of
      each token. `"classification"`: the logits of the labels of each row; with one label, the
      prediction of a regression. `"tokens"`: the logits of the labels of each token.
    - `labels`, `label_names`: the number of labels of a classification head, and their names.
    - `pooling`: what a classification head reads: the first token of a row (`"cls"`), or the mean
      of all (`"mean"`).
    - `activation`, `head_activation`: the activation functions of the feed-forward network and of
      the dense layer before a head, by their names in `config.json` files.
    - `attention_bias`, `mlp_bias`, `norm_bias`, `head_bias`, `vocab_bias`: whether there are biases
      in attention, the feed-forward network, all norms, the dense layer before a head, and the
      logits of tokens.
    - `dropout`, `attention_dropout`, `mlp_dropout`, `head_dropout`: the dropout rates of the
      embeddings; of the attention weights and the output of attention; of the hidden features of
      the feed-forward network; and of the input of a classification head.
    - `context`, `remat`, `unroll`, `eos`, `bos`, `pad`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    local: tuple[bool, ...] = ()
    window: int = 128
    rope_base: int | float = 160000.0
    local_rope_base: int | float = 10000.0
    head: Literal["masked", "classification", "tokens"] | None = None
    labels: int = 2
    label_names: tuple[str, ...] | None = None
    pooling: Literal["cls", "mean"] = "cls"
    activation: str = "gelu"
    head_activation: str = "gelu"
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False
    vocab_bias: bool = True
    norm_eps: int | float = 1e-5
    dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    mlp_dropout: int | float = 0.0
    head_dropout: int | float = 0.0
    context: int = 8192

    def __post_init__(self):
        check_config(self)
        check_even_heads(self)
        check_local(self)
        if self.local == all_but_every(3, self.layers):
            object.__setattr__(self, "local", ())  # configurations of the same model are equal

    @property
    def has_window(self) -> tuple[bool, ...]:
        """For each layer, whether it has a window."""
        return self.local or all_but_every(3, self.layers)


def all_but_every(nth: int, layers: int) -> tuple[bool, ...]:
    """The layers with a window, if the first and every `nth` after it have none."""
    return tuple(i % nth > 0 for i in range(layers))


class ModernBertLayers(AttentionLayers):
    """The parameters of all layers, stacked along their first dimension. The norms of attention,
    which the first layer does not have, are not among them."""

    mlp_norm: Float[Array, "layers width"]
    mlp_norm_shift: Float[Array, "layers width"] | None
    gate: Float[Array, "layers width hidden"]
    gate_bias: Float[Array, "layers hidden"] | None
    up: Float[Array, "layers width hidden"]
    up_bias: Float[Array, "layers hidden"] | None
    down: Float[Array, "layers hidden width"]
    down_bias: Float[Array, "layers width"] | None

    def __init__(self, config: ModernBertConfig, *, key: PRNGKeyArray):
        c = config
        *of_attention, gate, up, down = jax.random.split(key, 7)
        scale = output_scale(c.layers)
        weights = sample_attention(c, of_attention, out_scale=scale)
        super().__init__(c, weights, biases="qkvo" * c.attention_bias, norm=False)
        stream, inside = (c.layers, c.width), (c.layers, c.hidden)
        self.mlp_norm, self.mlp_norm_shift = jnp.ones(stream), zeros(stream, when=c.norm_bias)
        self.gate, self.up = (small_normal(k, (*stream, c.hidden)) for k in (gate, up))
        self.gate_bias, self.up_bias = (zeros(inside, when=c.mlp_bias) for _ in range(2))
        self.down = small_normal(down, (*inside, c.width), scale)
        self.down_bias = zeros(stream, when=c.mlp_bias)


class ModernBertPooler(eqx.Module):
    """The dense layer and the norm before the logits of tokens or labels."""

    w: Float[Array, "inputs outputs"]
    b: Float[Array, " outputs"] | None
    norm: Float[Array, " outputs"]
    norm_shift: Float[Array, " outputs"] | None

    def __init__(self, config: ModernBertConfig, *, key: PRNGKeyArray):
        c = config
        self.w = small_normal(key, (c.width, c.width))
        self.b = zeros((c.width,), when=c.head_bias)
        self.norm, self.norm_shift = jnp.ones(c.width), zeros((c.width,), when=c.norm_bias)


class ModernBert(eqx.Module):
    """The ModernBERT encoder (Warner et al., 2024, <https://arxiv.org/abs/2412.13663>).

    ```python
    config = ModernBertConfig(vocab=256, width=128, layers=4, heads=4, hidden=192)
    model = ModernBert(config, key=jax.random.key(0))
    hidden = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 128)
    classifier = with_head(model, labels=3, key=jax.random.key(1))
    logits = classifier(jnp.zeros((8, 64), jnp.int32))  # (8, 3)
    ```
    """

    embed: Float[Array, "vocab width"]
    embed_norm: Float[Array, " width"]
    embed_norm_shift: Float[Array, " width"] | None
    attention_norm: Float[Array, "later width"] | None
    attention_norm_shift: Float[Array, "later width"] | None
    layers: ModernBertLayers
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"] | None
    pooler: ModernBertPooler | None
    head: Linear | Float[Array, " vocab"] | None
    config: ModernBertConfig = eqx.field(static=True)

    def __init__(self, config: ModernBertConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases 0 and norm scales 1. The output projections of the layers
        are divided by sqrt(2 * layers)."""
        c = config
        embed, layers, pooler, head = jax.random.split(key, 4)
        self.embed = small_normal(embed, (c.vocab, c.width))
        self.embed_norm = jnp.ones(c.width)
        self.embed_norm_shift = zeros((c.width,), when=c.norm_bias)
        # The input of the first layer is normalised already.
        later, several = (c.layers - 1, c.width), c.layers > 1
        self.attention_norm = ones(later, when=several)
        self.attention_norm_shift = zeros(later, when=several and c.norm_bias)
        self.layers = ModernBertLayers(c, key=layers)
        self.norm, self.norm_shift = jnp.ones(c.width), zeros((c.width,), when=c.norm_bias)
        self.pooler = self.head = None
        if c.head is not None:
            self.pooler = ModernBertPooler(c, key=pooler)
        if c.head == "masked":
            self.head = zeros((c.vocab,), when=c.vocab_bias)
        elif c.head is not None:
            self.head = Linear(c.width, c.labels, key=head)
        self.config = config

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        key: Key = None,
    ) -> Float[Array, "batch ..."]:
        """Returns the output of the head.

        That is the logits of each token, of shape (batch, seq, vocab), or of the labels, of shape
        (batch, labels) or (batch, seq, labels); without a head, the hidden states, of shape
        (batch, seq, width).

        **Arguments:**

        - `tokens`, `mask`, `segments`, `positions`, `key`: as for a
          [`Llama`][redcoast.models.Llama]. Windows count the tokens of the row.

        **Raises:**

        `ValueError` if `segments` is given to a classification head, which reads one sequence per
        row.
        """
        if self.config.head == "classification" and segments is not None:
            raise ValueError(
                "A classification head reads one sequence per row, so rows cannot hold several "
                "`segments`. Put each text into its own row."
            )
        key, head_key = split_key(key, 2)
        hidden = self.hidden(tokens, mask=mask, segments=segments, positions=positions, key=key)
        if self.config.head is None:
            return hidden
        if not isinstance(self.head, Linear):
            return self.unembed(hidden)
        if self.config.head == "classification":
            read = self.pool(hidden, mask=mask)  # (batch, width)
        else:
            read = self._project(hidden)  # (batch, seq, width)
        return self.head(dropout(read, self.config.head_dropout, head_key))

    def hidden(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        key: Key = None,
    ) -> HiddenStates:
        """Returns the final hidden states, for any head. The arguments are the same as for
        `__call__`."""
        c = self.config
        check_tokens(tokens, c.vocab, mask=mask, segments=segments, positions=positions)
        real = real_tokens(tokens.shape, mask)
        if positions is None:
            positions = count_positions(real, segments)
        embed_key, key = split_key(key, 2)
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        x = layer_norm(x, self.embed_norm, self.embed_norm_shift, c.norm_eps)
        x = dropout(x, c.dropout, embed_key)
        frequencies = rotary_frequencies(c.head_dim, c.rope_base)
        near_frequencies = rotary_frequencies(c.head_dim, c.local_rope_base)
        angles = rotary_angles(positions, frequencies, wide(x.dtype))
        near_angles = rotary_angles(positions, near_frequencies, wide(x.dtype))
        # A window counts the token itself in both directions.
        views = (full_view(real, segments), full_view(real, segments, window=c.window // 2 + 1))

        def layer_fn(x, cache, inputs, index, key):
            layer, norm, shift, local = inputs
            attention_key, mlp_key = split_key(key, 2)
            weights_key, out_key = split_key(attention_key, 2)
            y = x
            if norm is not None:
                y = layer_norm(x, norm, shift, c.norm_eps)
            # The embedding has a norm of its own, so the first layer has none.
            y = jnp.where(index == 0, x, y)
            # Layers with and without a window are scanned together, so each selects its angles.
            turns = jax.tree.map(lambda a, b: jnp.where(local, b, a), angles, near_angles)
            q = queries(layer, y)  # (batch, seq, heads, head_dim)
            k, v = keys_values(layer, y)
            q, k = rotate(q, turns), rotate(k, turns)
            options = {"rate": c.attention_dropout, "key": weights_key}
            y = attend_near(q, k, v, local=local, visible=views, **options)
            x = x + dropout(outputs(layer, y), c.attention_dropout, out_key)
            y = layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
            gate = product("bsd,dh->bsh", y, layer.gate, layer.gate_bias)  # (batch, seq, hidden)
            up = product("bsd,dh->bsh", y, layer.up, layer.up_bias)
            y = dropout(activate_gated(c.activation, gate, up), c.mlp_dropout, mlp_key)
            return x + product("bsh,hd->bsd", y, layer.down, layer.down_bias), cache

        # With a row for the first layer, which does not use it.
        add_row = lambda norm: jnp.concatenate([jnp.ones_like(norm[:1]), norm])
        norms = jax.tree.map(add_row, (self.attention_norm, self.attention_norm_shift))
        layers = (self.layers, *norms, jnp.asarray(c.has_window))
        x, _ = scan_layers(layer_fn, x, layers, key=key, **c.loop_options)
        return layer_norm(x, self.norm, self.norm_shift, c.norm_eps)

    def pool(
        self, hidden: HiddenStates, *, mask: Mask | None = None
    ) -> Float[Array, "batch width"]:
        """Returns what a classification head reads: the first real token of each row or the mean of
        all, after the dense layer and the norm."""
        if self.config.pooling == "cls":
            return self._project(first_token(hidden, mask)[:, None])[:, 0]
        where = None
        if mask is not None:
            where = mask.astype(bool)[:, :, None]
        # The mean of hidden states, not of logits, as in the published classifiers.
        return self._project(jnp.mean(hidden, axis=1, keepdims=True, where=where))[:, 0]

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of each token, with the head `"masked"`."""
        if self.config.head != "masked" or isinstance(self.head, Linear):
            raise ValueError(
                f"`unembed` needs the head 'masked', but this model's head is {self.config.head!r}."
            )
        # The head shares the weights of the embedding, and may have a bias.
        return product("bsd,vd->bsv", self._project(hidden), self.embed, self.head)

    def _project(self, x: HiddenStates) -> HiddenStates:
        if self.pooler is None:
            raise ValueError("This model has no pooler, because its configuration has no `head`.")
        x = product("bsd,de->bse", x, self.pooler.w, self.pooler.b)
        x = ACTIVATIONS[self.config.head_activation](x)
        return layer_norm(x, self.pooler.norm, self.pooler.norm_shift, self.config.norm_eps)
