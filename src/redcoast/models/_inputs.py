"""Arrays that callers pass to models: those of JAX, or those of NumPy that tokenizers return."""

import numpy as np
from jaxtyping import Array, Bool, Integer

AnyArray = Array | np.ndarray
Mask = Bool[AnyArray, "batch seq"] | Integer[AnyArray, "batch seq"]
