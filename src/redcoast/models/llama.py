"""The LLaMA decoder: RMSNorm, rotary embeddings, grouped-query attention and SwiGLU.

Options turn it into Mistral (a sliding window), Ministral 3 (queries that grow), Qwen2 (biases for
Q, K and V), Qwen3 (norms of Q and K in each head), OLMo 2 (norms of outputs), OLMo 3 (a window in
some layers), Granite (constant factors) or SmolLM3 (layers without rotary embeddings).
`_transformer.py` has the arithmetic.
"""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ._transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """The configuration of a `Llama`.

    **Arguments:**

    - `vocab`, `width`, `layers`: the vocabulary size, the size of the residual stream and the
      number of decoder layers.
    - `heads`, `kv_heads`: the number of query heads, and the number of key and value heads, which
      must divide it.
    - `hidden`: the hidden size of the feed-forward network, usually about `8 / 3 * width`.
    - `head_size`: the size of each head, an even number; `width / heads` by default.
    - `rope_base`, `rope_scaling`: the base of the rotary embeddings' wavelengths, and how they are
      scaled for long contexts.
    - `norm_eps`: added to the mean square in RMSNorm.
    - `tied`: whether the output head shares the weights of the embedding.
    - `window`: the size of the sliding attention window in tokens, including the token itself; no
      window by default.
    - `rope_layers`: whether each layer has rotary embeddings; all layers by default.
    - `rotary_dim`: the number of features of each head that rotary embeddings rotate; all by
      default.
    - `query_growth`: queries are multiplied by `1 + query_growth * log(1 + n)`, where `n` is how
      many times the `original` context of `rope_scaling` fits before them.
    - `local`: for each layer, whether it has the window; by default, all layers.
    - `local_rope_base`: the base of the rotary embeddings in the layers that `local` gives a
      window, where `rope_scaling` does not apply. By default, they have the same base as the
      others.
    - `qkv_bias`, `qk_norm`: whether Q, K and V have biases, and whether Q and K are normalised.
    - `output_norms`: whether the outputs of attention and feed-forward network are normalised, in
      place of their inputs. The norms of Q and K are then over all heads.
    - `embed_scale`, `residual_scale`: factors of the embeddings, and of the outputs of attention
      and feed-forward network.
    - `score_factor`: the factor of the attention scores; one over the square root of the head size
      by default.
    - `logit_divisor`: the logits are divided by it.
    - `attention_dropout`, `residual_dropout`: the dropout rates of the attention weights, and of
      the outputs of attention and feed-forward network.
    - `context`: the length in tokens that the weights were trained for. It is not enforced.
    - `kind`: the `model_type` of its files, if several published types have the same options.
    - `remat`: what to rematerialise: `"none"`, `"dots"` (not products with weights) or `"full"`;
      `"auto"`: the least that fits, by `memory` of [`redcoast.fit`][].
    - `unroll`: the number of layers in one iteration of the loop over layers. By default, up to 12
      layers on a CPU, and up to 32 of at most 1 GiB each on a GPU, are unrolled, which is one
      iteration; otherwise an iteration is one layer.
    - `eos`, `bos`, `pad`: the token ids of the end of a sequence (one or several), of its start,
      and of padding.
    - `decoding`: the defaults of [`redcoast.generate`][] for this model.

    **Raises:**

    `ValueError` if a value is out of range or conflicts with another; `TypeError` if a size is not
    an integer.
    """

    head_size: int | None = None


class Llama(Transformer):
    """The LLaMA decoder (Touvron et al., 2023, <https://arxiv.org/abs/2302.13971>) with
    grouped-query attention (Ainslie et al., 2023, <https://arxiv.org/abs/2305.13245>).

    ```python
    config = LlamaConfig(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
    model = Llama(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)
