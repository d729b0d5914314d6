"""The decoder of Phi-3, Phi-3.5 and Phi-4: LLaMA with rotary embeddings of a part of each head, a
scaling of these for long contexts, and dropout of the residuals. `_transformer.py` has the
arithmetic."""

from dataclasses import dataclass

import equinox as eqx
from jaxtyping import PRNGKeyArray

from ._transformer import Transformer, TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Phi3Config(TransformerConfig):
    """The configuration of a `Phi3`.

    It has the arguments of [`LlamaConfig`][redcoast.models.LlamaConfig], with other defaults, and:

    - `residual_dropout`: the dropout rate of the outputs of attention and feed-forward network.
    """

    residual_dropout: int | float | None = 0.0
    context: int = 4096


class Phi3(Transformer):
    """The Phi-3 decoder (Abdin et al., 2024, <https://arxiv.org/abs/2404.14219>).

    ```python
    config = Phi3Config(vocab=256, width=128, layers=4, heads=4, kv_heads=2, hidden=352)
    model = Phi3(config, key=jax.random.key(0))
    logits = model(jnp.zeros((8, 64), jnp.int32))  # (8, 64, 256)
    ```
    """

    config: Phi3Config = eqx.field(static=True)

    def __init__(self, config: Phi3Config, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        super().__init__(config, key=key)
