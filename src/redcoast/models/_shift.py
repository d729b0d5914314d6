"""The input tokens of decoders, from their labels."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer


def shift_right(
    labels: Integer[Array | np.ndarray, "*batch seq"], *, start: int, pad: int | None = None
) -> Any:
    """Shifts labels to the right by one, which gives the input tokens of a decoder.

    ```python
    config = T5Config(vocab=99, width=8, layers=1, decoder_layers=1, heads=2, hidden=16)
    labels = np.array([[5, 7, 1], [6, 1, -100]])
    tokens = shift_right(labels, start=config.decoder_start)  # [[0, 5, 7], [0, 6, 1]]
    ```

    **Arguments:**

    - `labels`: the target tokens of the decoder, integers of shape (..., seq).
    - `start`: the token that the decoder starts with, `decoder_start` in the configuration.
    - `pad`: replaces negative labels, such as the -100 that marks padding for some losses; by
      default `start`.

    **Returns:**

    Tokens of the same shape and dtype: `start`, followed by all labels but the last. A NumPy array
    if `labels` is one.

    **Raises:**

    `TypeError` if the labels are not integers. `ValueError` if `start` or `pad` is negative or does
    not fit their dtype, or if there are no labels.
    """
    if not jnp.issubdtype(labels.dtype, np.integer):
        raise TypeError(f"`labels` must be integers, but have dtype {labels.dtype}.")
    if labels.ndim == 0 or labels.shape[-1] == 0:
        raise ValueError(
            f"`labels` has shape {labels.shape}, so there is nothing to shift. It must have a last "
            "dimension with at least one label."
        )
    if pad is None:
        pad = start
    for name, token in (("start", start), ("pad", pad)):
        if not 0 <= token <= np.iinfo(labels.dtype).max:
            raise ValueError(
                f"`{name}` is {token}, but must be from 0 to {np.iinfo(labels.dtype).max}, the "
                f"largest {labels.dtype}."
            )
    # Collate functions run on the host, where a JAX array would be moved to a device.
    xp = np if isinstance(labels, np.ndarray) else jnp
    first = xp.full_like(labels[..., :1], start)  # (..., 1)
    shifted = xp.concatenate([first, labels[..., :-1]], axis=-1)
    return xp.where(shifted < 0, xp.full_like(shifted, pad), shifted)
