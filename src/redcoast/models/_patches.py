"""What DINOv2 and DINOv3 share: maps of their patches, and how sublayers are added."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._dropout import dropout


def features(
    self,
    pixels: Float[Array, "batch channels height width"],
    layers: Sequence[int],
    *,
    normalise: bool = True,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "batch rows columns features"], ...]:
    """Returns maps of the patches' hidden states after some layers, for tasks such as
    segmentation.

    **Arguments:**

    - `pixels`, `key`: as in `__call__`.
    - `layers`: after how many layers each map is taken; 0 is the embeddings. `transformers`
      names these `stem`, `stage1` and so on.
    - `normalise`: whether the final norm is applied to each map.

    **Raises:**

    `ValueError` if there are no such layers.
    """
    c = self.config
    if odd := [n for n in layers if not 0 <= n <= c.layers]:
        raise ValueError(
            f"`layers` has {odd[0]}, but the model has {c.layers} layers. Pass numbers from 0 "
            f"to {c.layers}."
        )
    _, maps = self._run(pixels, None, tuple(layers), key)
    grid = [size // c.patch for size in pixels.shape[2:]]
    ready = (self._norm(x) if normalise else x for x in maps)
    return tuple(x[:, 1 + c.registers :].reshape(-1, *grid, c.width) for x in ready)


def add_scaled(x, y, scale, config, key):
    """Adds the output of a sublayer, with its scale, to all images but those that skip it."""
    y = y * scale[None, None]
    if key is None or config.path_dropout == 0:
        return x + y
    kept = dropout(jnp.ones((x.shape[0], 1, 1), x.dtype), config.path_dropout, key)
    return x + y * kept
