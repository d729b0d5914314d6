"""The GPT-J decoder: attention and the feed-forward network in parallel after one shared norm, and
rotary embeddings of some features of each head. `_parallel.py` has the arithmetic."""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ._parallel import ParallelConfig, ParallelDecoder


@dataclass(frozen=True)
class GPTJConfig(ParallelConfig):
    """The configuration of a `GPTJ`.

    **Arguments:**

    - `vocab`, `width`, `layers`, `heads`, `hidden`, `activation`, `norm_eps`, `embed_dropout`,
      `residual_dropout`, `attention_dropout`: as in [`GPT2Config`][redcoast.models.GPT2Config].
    - `rotary_dim`: the number of features of each head that rotary embeddings rotate, an even
      number.
    - `tied`: whether the output head shares the weights of the embedding. It has a bias either way.
    - `context`, `remat`, `unroll`, `eos`, `bos`, `pad`, `decoding`: as in
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

    def __init__(self, config: GPTJConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02. The output projections
        of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)
