"""The GPT-J decoder: attention and the feed-forward network in parallel after one shared norm, and
rotary embeddings of some features of each head. `_parallel.py` has the arithmetic."""

from dataclasses import dataclass

import equinox as eqx

from ._parallel import ParallelConfig, ParallelDecoder


@dataclass(frozen=True)
class GPTJConfig(ParallelConfig):
    """The configuration of a `GPTJ`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`: the vocabulary size, the size of the residual stream, the
      number of layers and the number of heads.
    - `hidden`: the hidden size of the feed-forward network, usually `4 * width`.
    - `rotary_dim`: the number of features of each head that rotary embeddings rotate, an even
      number.
    - `activation`: the activation function of the feed-forward network, by its name in
      `config.json` files.
    - `norm_eps`: added to the variance in layer norms.
    - `tied`: whether the output head shares the weights of the embedding. It has a bias either way.
    - `embed_dropout`, `residual_dropout`, `attention_dropout`: the dropout rates of the embeddings,
      of the outputs that are added to the residual stream, and of the attention weights.
    - `context`: the length in tokens that the weights were trained for. It is not enforced.
    - `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
      [`LlamaConfig`][redcoast.models.LlamaConfig].
    """

    rotary_dim: int = 64


class GPTJ(ParallelDecoder):
    """The GPT-J decoder (Wang and Komatsuzaki, 2021,
    <https://github.com/kingoflolz/mesh-transformer-jax>).

    ```python
    config = GPTJConfig(vocab=256, width=128, layers=4, heads=4, hidden=512, rotary_dim=16)
    model = GPTJ(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    config: GPTJConfig = eqx.field(static=True)
