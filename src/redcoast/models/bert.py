"""The BERT encoder: learned positions, token types and post-layer-norm.

RoBERTa differs in where its table of positions starts and in details of the heads.
"""

from dataclasses import dataclass
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from ._attention import count_positions, full_view, real_tokens
from ._base_config import TextConfig, TokenSizes, check_config
from ._basic import ACTIVATIONS, dropout, layer_norm, look_up, small_normal, split_key
from ._check_config import check_length
from ._check_tokens import check_tokens
from ._einsum import feed_forward, keys_values, product, queries
from ._encoder import EncoderLayers, attention_output
from ._heads import Linear, MaskedHead, first_token
from ._inputs import AnyArray, HiddenStates, Key, Mask, Positions, Segments, Tokens
from ._scan_layers import scan_layers

Head = Literal["masked", "pretraining", "classification", "tokens"]


@dataclass(frozen=True)
class BertConfig(TokenSizes, TextConfig):
    """The configuration of a `Bert`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`, `hidden`, `positions`, `activation`, `norm_eps`: as in
      [`GPT2Config`][redcoast.models.GPT2Config].
    - `kind`: `"bert"`, `"roberta"` or `"distilbert"`. RoBERTa's first position is row `pad + 1` of
      the table. DistilBERT has no token types, and only has a pooler with the head
      `"classification"`, with a ReLU in place of tanh.
    - `types`: the number of token types.
    - `head`: determines what a call returns. `None`: the hidden states. `"masked"`: the logits of
      each token. `"pretraining"`: the same, with an additional next-sentence head, whose logits are
      `model.head.follows(model.pool(hidden))`. `"classification"`: the logits of the labels of each
      row; with one label, the prediction of a regression. `"tokens"`: the logits of the labels of
      each token.
    - `labels`, `label_names`: the number of labels of a classification head, and their names.
    - `pooler`: whether to include a pooler if the head does not need one. The heads `"pretraining"`
      and `"classification"` always have one.
    - `dropout`, `attention_dropout`, `head_dropout`: the dropout rates of the embeddings and the
      outputs that are added to the residual stream; of the attention weights; and of the input of a
      classification head (by default the same as `dropout`).
    - `remat`, `unroll`, `eos`, `bos`, `pad`: as in [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    kind: Literal["bert", "roberta", "distilbert"] = "bert"
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

    def __post_init__(self):
        check_config(self, "positions", "types")
        if self.kind == "roberta" and self.pad is None:
            raise ValueError("RoBERTa needs `pad`: its first position is `pad + 1`.")
        if self.kind != "bert" and self.head == "pretraining":
            name = {"roberta": "RoBERTa", "distilbert": "DistilBERT"}[self.kind]
            raise ValueError(f"{name} has no head 'pretraining'. Use 'masked'.")
        if self.kind == "distilbert" and self.pooler and self.head != "classification":
            raise ValueError("DistilBERT has a pooler only with the head 'classification'.")
        if self.kind == "distilbert" and self.types != 1:
            raise ValueError(f"DistilBERT has 1 token type, but `types` is {self.types}.")

    @property
    def first_position(self) -> int:
        """The row of the position table for the first token of a sequence."""
        if self.kind == "roberta" and self.pad is not None:
            return self.pad + 1
        return 0

    @property
    def pools(self) -> bool:
        return self.pooler or self.head in ("pretraining", "classification")

    @property
    def head_rate(self) -> int | float:
        if self.head_dropout is None:
            return self.dropout
        return self.head_dropout


class Bert(eqx.Module):
    """The BERT encoder (Devlin et al., 2018, <https://arxiv.org/abs/1810.04805>), RoBERTa
    (Liu et al., 2019, <https://arxiv.org/abs/1907.11692>) and DistilBERT (Sanh et al., 2019,
    <https://arxiv.org/abs/1910.01108>).

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
    type_embed: Float[Array, "types width"] | None
    norm: Float[Array, " width"]
    norm_shift: Float[Array, " width"]
    layers: EncoderLayers
    pooler: Linear | None
    head: MaskedHead | Linear | None
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: weights normal with standard deviation 0.02, truncated at
        three standard deviations; biases 0 and norm scales 1."""
        c = config
        keys = jax.random.split(key, 6)
        self.embed = small_normal(keys[0], (c.vocab, c.width))
        self.position_embed = small_normal(keys[1], (c.first_position + c.positions, c.width))
        self.type_embed = self.pooler = self.head = None
        if c.kind != "distilbert":
            self.type_embed = small_normal(keys[2], (c.types, c.width))
        self.norm, self.norm_shift = jnp.ones(c.width), jnp.zeros(c.width)
        self.layers = EncoderLayers(c, key=keys[3])
        if c.pools:
            self.pooler = Linear(c.width, c.width, key=keys[4])
        if c.head in ("classification", "tokens"):
            self.head = Linear(c.width, c.labels, key=keys[5])
        elif c.head is not None:
            follows = c.head == "pretraining"
            self.head = MaskedHead(c.width, c.vocab, follows=follows, key=keys[5])
        self.config = config

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        types: Integer[AnyArray, "#batch seq"] | None = None,
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
          [`Llama`][redcoast.models.Llama].
        - `types`: the token types, 0 by default. The second text of a pair has type 1.

        **Raises:**

        `ValueError` if a row is longer than `config.positions` (unless `mask`, `segments` or
        `positions` is given), or if `segments` is given to a classification head, which reads one
        sequence per row.
        """
        if self.config.head == "classification" and segments is not None:
            raise ValueError(
                "A classification head reads the first token of each row, so rows cannot hold "
                "several `segments`. Put each text into its own row."
            )
        key, pool_key, head_key = split_key(key, 3)
        options = {"types": types, "segments": segments, "positions": positions, "key": key}
        hidden = self.hidden(tokens, mask=mask, **options)  # (batch, seq, width)
        if self.head is None:
            return hidden
        if isinstance(self.head, MaskedHead):
            return self.unembed(hidden)
        if self.config.head == "classification":
            hidden = self.pool(hidden, mask=mask, key=pool_key)  # (batch, width)
        return self.head(dropout(hidden, self.config.head_rate, head_key))

    def hidden(
        self,
        tokens: Tokens,
        *,
        mask: Mask | None = None,
        types: Integer[AnyArray, "#batch seq"] | None = None,
        segments: Segments | None = None,
        positions: Positions | None = None,
        key: Key = None,
    ) -> HiddenStates:
        """Returns the final hidden states, for any head. The arguments are the same as for
        `__call__`."""
        c = self.config
        check_tokens(
            tokens, c.vocab, mask=mask, types=types, segments=segments, positions=positions
        )
        if mask is None and segments is None and positions is None:
            check_length(c, tokens.shape[1])
        real = real_tokens(tokens.shape, mask)
        if positions is None:
            positions = count_positions(real, segments)
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        x += look_up(self.position_embed, positions + c.first_position)
        if self.type_embed is None and types is not None:
            raise ValueError("This model has no token types, but `types` are given.")
        if types is not None:
            x = x + look_up(self.type_embed, types)
        elif self.type_embed is not None:
            x = x + self.type_embed[:1][None]  # all tokens have type 0
        embed_key, key = split_key(key, 2)
        x = dropout(layer_norm(x, self.norm, self.norm_shift, c.norm_eps), c.dropout, embed_key)
        visible = full_view(real, segments)

        def layer_fn(x, cache, layer, index, key):
            attention_key, key = split_key(key, 2)
            q, kv = queries(layer, x), keys_values(layer, x)  # (batch, seq, heads, head_dim)
            x = x + attention_output(layer, q, kv, visible, c, attention_key)  # (batch, seq, width)
            x = layer_norm(x, layer.attention_norm, layer.attention_norm_shift, c.norm_eps)
            x = x + dropout(feed_forward(layer, x, c.activation), c.dropout, key)
            return layer_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps), cache

        return scan_layers(layer_fn, x, self.layers, key=key, **c.loop_options)[0]

    def pool(
        self, hidden: HiddenStates, *, mask: Mask | None = None, key: Key = None
    ) -> Float[Array, "batch width"]:
        """Applies the pooler to the hidden state of the first real token of each row."""
        if self.pooler is None:
            raise ValueError("This model has no pooler: its configuration has `pooler=False`.")
        x = first_token(hidden, mask)  # (batch, width)
        if self.config.kind == "roberta":
            # Only RoBERTa's classifier has dropout before its dense layer, too.
            x = dropout(x, self.config.head_rate, key)
        x = self.pooler(x)
        if self.config.kind == "distilbert":
            return jax.nn.relu(x)
        return jnp.tanh(x)

    def unembed(self, hidden: HiddenStates) -> Float[Array, "batch seq vocab"]:
        """Returns the logits of each token, with the head `"masked"` or `"pretraining"`."""
        head, c = self.head, self.config
        if not isinstance(head, MaskedHead):
            raise ValueError(
                "`unembed` needs the head 'masked' or 'pretraining', but this model's head is "
                f"{c.head!r}."
            )
        activation = c.activation
        if c.kind == "roberta":  # its head has a GELU, whatever its layers have
            activation = "gelu"
        x = ACTIVATIONS[activation](product("bsd,de->bse", hidden, head.w, head.b))
        x = layer_norm(x, head.norm, head.norm_shift, c.norm_eps)
        # The head shares the weights of the embedding.
        return product("bsd,vd->bsv", x, self.embed, head.vocab_bias)
