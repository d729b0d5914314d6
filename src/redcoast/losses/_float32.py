"""The precision of losses."""

import numpy as np
from jaxtyping import Array


def at_least_float32(x: Array) -> Array:
    """Converts to float32, unless the dtype is that or wider."""
    # float64 stays, for users who enable it.
    return x.astype(np.promote_types(x.dtype, np.float32))
