"""The decoder of GPT-NeoX and Pythia: attention and the feed-forward network in parallel, each with
its own norm, and rotary embeddings of some features of each head. `_parallel.py` has the
arithmetic."""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ._parallel import ParallelConfig, ParallelDecoder


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(ParallelConfig):
    """The configuration of a `GPTNeoX`.

    It has the arguments of [`GPTJConfig`][redcoast.models.GPTJConfig], with other defaults, and:

    - `rope_base`: the base of the rotary embeddings' wavelengths.
    - `parallel`: whether the feed-forward network reads the residual stream before attention, not
      after it.
    - `attention_bias`: whether the projections of attention have biases.
    """

    rotary_dim: int = 16
    rope_pairs: bool = False
    mlp_norm: bool = True
    attention_bias: bool = True
    head_bias: bool = False
    activation: str = "gelu"


class GPTNeoX(ParallelDecoder):
    """The GPT-NeoX decoder (Black et al., 2022, <https://arxiv.org/abs/2204.06745>), also of Pythia
    (Biderman et al., 2023, <https://arxiv.org/abs/2304.01373>).

    ```python
    config = GPTNeoXConfig(vocab=256, width=128, layers=4, heads=4, hidden=512, rotary_dim=8)
    model = GPTNeoX(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    config: GPTNeoXConfig = eqx.field(static=True)

    def __init__(self, config: GPTNeoXConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with standard deviation 0.02. The output projections
        of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)
