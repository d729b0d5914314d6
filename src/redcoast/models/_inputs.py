"""Arrays that callers pass to models: JAX arrays, or NumPy arrays of tokenizers."""

import numpy as np
from jaxtyping import Array, Bool, Integer

AnyArray = Array | np.ndarray
Mask = Bool[AnyArray, "batch seq"] | Integer[AnyArray, "batch seq"]
