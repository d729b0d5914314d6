"""The Mixtral decoder: LLaMA with mixture-of-experts feed-forward networks. `_transformer.py` has
the arithmetic.

Options turn it into Qwen3-MoE (norms of Q and K in each head, unnormalised weights of experts).
"""

from dataclasses import KW_ONLY, dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ._decoder import RoutedDecoder
from ._transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class MixtralConfig(TransformerConfig):
    """The configuration of a `Mixtral`.

    It has the arguments of [`LlamaConfig`][redcoast.models.LlamaConfig], with other defaults, and:

    - `hidden`: the hidden size of each expert.
    - `experts`, `chosen`: the number of experts in each layer, and the number of experts that each
      token is routed to (top-k).
    - `weights_sum_to_one`: whether the weights of a token's experts are divided by their sum.
    - `router_loss_weight`: the weight of the router loss of `hidden_and_router_loss` in a training
      loss. The model itself does not use it.
    """

    experts: int | None = 8
    chosen: int = 2
    _: KW_ONLY
    rope_base: int | float = 1000000.0
    context: int = 32768


class Mixtral(Transformer, RoutedDecoder):
    """The Mixtral decoder (Jiang et al., 2024, <https://arxiv.org/abs/2401.04088>).

    ```python
    config = MixtralConfig(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
    model = Mixtral(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    config: MixtralConfig = eqx.field(static=True)

    def __init__(self, config: MixtralConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)
