"""The BERT encoder: learned positions, token types, and layer norms behind each part.

RoBERTa is the same with its positions further on in their table and other heads' habits.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import Mask, count_positions, full_view, real_tokens
from ._basic import ACTIVATIONS, check_activation, layer_norm
from ._checks import check_config, check_heads, check_length, check_rates
from ._dropout import dropout, split_key
from ._einsum import product
from ._encoder import EncoderLayers, attention, attention_norm, mlp, mlp_norm
from ._heads import Linear, MaskedHead, check_labels, first_token, small_normal
from ._scan import Remat, scan_layers

Head = Literal["masked", "pretraining", "classification"]


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a `Bert`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: how many different tokens, the size of the residual
      stream, and how many layers and heads there are.
    - `hidden`: the hidden size of the feed-forward network, usually four times the width.
    - `kind`: `"bert"`; or `"roberta"`, whose first position is the one after `pad`.
    - `positions`: the greatest length in tokens, since positions are learned.
    - `types`: how many token types there are.
    - `head`: what a call returns. Hidden states, without one; with `"masked"`, logits of each
      token; `"pretraining"` is the same with BERT's second head beside, whose logits are
      `model.head.follows(model.pool(hidden))`; with `"classification"`, logits of the row's
      labels, or with one label what regression predicts.
    - `labels`, `label_names`: of classification.
    - `pooler`: whether there is a pooler where no head needs one; `"pretraining"` and
      `"classification"` do.
    - `activation`: of the feed-forward network, by its name in `config.json` files.
    - `norm_eps`: what the norms add to the variance.
    - `dropout`, `attention_dropout`, `head_dropout`: the rates at which are dropped: the
      embeddings and what is added to the residual stream; attention weights; what a
      classification head reads, as much as `dropout` by default.
    - `remat`: what is computed again in the backward pass, to save memory: `"none"`, `"dots"`
      (everything but the products with weights) or `"full"` (everything in a layer).
    - `pad`, `bos`, `eos`: the tokens that fill what is behind a text, begin it and end it.

    **Raises:**

    `ValueError` if the sizes do not fit together.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    kind: Literal["bert", "roberta"] = "bert"
    positions: int = 512
    types: int = 2
    head: Head | None = None
    labels: int = 2
    label_names: tuple[str, ...] | None = None
    pooler: bool = False
    activation: str = "gelu"
    norm_eps: int | float = 1e-12
    dropout: int | float = 0.1
    attention_dropout: int | float = 0.1
    head_dropout: int | float | None = None
    remat: Remat = "none"
    pad: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = ("vocab", "width", "layers", "heads", "hidden", "positions", "types")
        check_config(self, *sizes)
        check_heads(self)
        check_activation(self.activation)
        check_labels(self)
        check_rates(self, "dropout", "attention_dropout", "head_rate")
        if self.kind == "roberta" and self.pad is None:
            raise ValueError("RoBERTa needs `pad`: its first position is the one after it.")
        if self.kind == "roberta" and self.head == "pretraining":
            raise ValueError("RoBERTa was trained with the head 'masked' alone.")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def first_position(self) -> int:
        """The row of the table of positions that a text begins with."""
        return self.pad + 1 if self.kind == "roberta" and self.pad is not None else 0

    @property
    def pools(self) -> bool:
        return self.pooler or self.head in ("pretraining", "classification")

    @property
    def head_rate(self) -> int | float:
        return self.dropout if self.head_dropout is None else self.head_dropout


class Bert(eqx.Module):
    """The BERT encoder (Devlin et al., 2018, <https://arxiv.org/abs/1810.04805>), and RoBERTa
    (Liu et al., 2019, <https://arxiv.org/abs/1907.11692>).

    ```python
    config = BertConfig(vocab=256, width=128, layers=4, heads=4, hidden=512)
    model = Bert(config, key=jax.random.key(0))
    hidden = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 128)
    classifier = with_head(model, labels=3, key=jax.random.key(1))
    logits = classifier(jnp.zeros((8, 64), jnp.int32))  # (8, 3)
    ```
    """

    embed: Float[Array, "vocab width"]
    position_embed: Float[Array, "rows width"]
    type_embed: Float[Array, "types width"]
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    layers: EncoderLayers
    pooler: Linear | None
    head: MaskedHead | Linear | None
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Initial parameters of these sizes by `key`: normal with a deviation of 0.02, truncated
        at three; biases 0 and norms 1."""
        c = config
        keys = jax.random.split(key, 6)
        self.embed = small_normal(keys[0], (c.vocab, c.width))
        self.position_embed = small_normal(keys[1], (c.first_position + c.positions, c.width))
        self.type_embed = small_normal(keys[2], (c.types, c.width))
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.layers = EncoderLayers(c, key=keys[3])
        self.pooler = Linear(c.width, c.width, key=keys[4]) if c.pools else None
        if c.head == "classification":
            self.head = Linear(c.width, c.labels, key=keys[5])
        else:
            both = c.head == "pretraining"
            head = MaskedHead(c.width, c.vocab, follows=both, key=keys[5]) if c.head else None
            self.head = head
        self.config = config

    def __call__(
        self,
        tokens: Integer[Array, "batch seq"],
        *,
        mask: Mask | None = None,
        types: Integer[Array, "batch seq"] | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        positions: Integer[Array, "#batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch ..."]:
        """What the head makes of the hidden states: logits "batch seq vocab" of the tokens, logits
        "batch labels", or without a head the hidden states "batch seq width" themselves.

        **Arguments:**

        - `tokens`: below the vocabulary's size; one that is not gives NaN.
        - `mask`: 1 at real tokens, 0 at padding on either side. What comes out for real tokens
          does not depend on padding; what comes out for padding means nothing.
        - `types`: of the tokens, 0 by default; such as 1 for the second text of a pair.
        - `segments`: of several texts packed into one row, the number of each token's own; it
          sees no other.
        - `positions`: of the tokens in their text, from 0; by default counted over the real ones
          of the row or segment. A position that there is not gives NaN.
        - `key`: of the dropout; without it there is none.

        **Raises:**

        `ValueError` if there are more tokens in a row than positions, or if there are `segments`
        for a classification head, which reads one text a row.
        """
        if self.config.head == "classification" and segments is not None:
            raise ValueError(
                "A classification head reads the first token of each row, but `segments` says "
                "that there are several texts in one. Give each text a row of its own."
            )
        key, pool_key, head_key = split_key(key, 3)
        options = {"types": types, "segments": segments, "positions": positions, "key": key}
        hidden = self.hidden(tokens, mask=mask, **options)
        if isinstance(self.head, Linear):
            pooled = self.pool(hidden, mask=mask, key=pool_key)
            return self.head(dropout(pooled, self.config.head_rate, head_key))
        return hidden if self.head is None else self.unembed(hidden)

    def hidden(
        self,
        tokens: Integer[Array, "batch seq"],
        *,
        mask: Mask | None = None,
        types: Integer[Array, "batch seq"] | None = None,
        segments: Integer[Array, "batch seq"] | None = None,
        positions: Integer[Array, "#batch seq"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch seq width"]:
        """The hidden states, whatever the head; the arguments are those of a call."""
        c = self.config
        if mask is None and segments is None and positions is None:
            check_length(c, tokens.shape[1])
        real = real_tokens(tokens.shape, mask)
        if positions is None:
            positions = count_positions(real, segments)
        # Indexing would give what is not in a table the row of something that is.
        x = jnp.take(self.embed, tokens, axis=0)
        x += jnp.take(self.position_embed, positions + c.first_position, axis=0)
        first = self.type_embed[:1][None]
        x += first if types is None else jnp.take(self.type_embed, types, axis=0)
        embed_key, key = split_key(key, 2)
        x = dropout(layer_norm(x, self.norm, self.norm_shift, c.norm_eps), c.dropout, embed_key)
        visible = full_view(real, segments)

        def layer_fn(x, cache, layer, index, key):
            attention_key, mlp_key = split_key(key, 2)
            x = x + attention(layer, x, visible, c, attention_key)
            x = attention_norm(layer, x, c.norm_eps)
            x = x + mlp(layer, x, c, mlp_key)
            return mlp_norm(layer, x, c.norm_eps), cache

        return scan_layers(layer_fn, x, self.layers, key=key, remat=c.remat)[0]

    def pool(
        self,
        hidden: Float[Array, "batch seq width"],
        *,
        mask: Mask | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "batch width"]:
        """What the pooler makes of the first real token of each row."""
        if self.pooler is None:
            raise ValueError("This model has no pooler: its configuration says `pooler=False`.")
        x = first_token(hidden, mask)
        if self.config.kind == "roberta":
            x = dropout(x, self.config.head_rate, key)
        return jnp.tanh(self.pooler(x))

    def unembed(self, hidden: Float[Array, "batch seq width"]) -> Float[Array, "batch seq vocab"]:
        """The logits of each token, by the head `"masked"` or `"pretraining"`."""
        head, c = self.head, self.config
        if not isinstance(head, MaskedHead):
            raise ValueError(f"Only the head 'masked' gives logits of tokens; here is {c.head!r}.")
        x = product("bsd,de->bse", hidden, head.w, head.b)
        x = ACTIVATIONS["gelu" if c.kind == "roberta" else c.activation](x)
        x = layer_norm(x, head.norm, head.norm_shift, c.norm_eps)
        return product("bsd,vd->bsv", x, self.embed, head.vocab_bias)
