"""Arrays that callers pass to models: JAX arrays, or NumPy arrays of tokenizers; and what models
return."""

import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

AnyArray = Array | np.ndarray
Tokens = Integer[AnyArray, "batch seq"]
Mask = Bool[AnyArray, "batch seq"] | Integer[AnyArray, "batch seq"]
Segments = Integer[AnyArray, "batch seq"]
Positions = Integer[AnyArray, "#batch seq"]
Pixels = Float[AnyArray, "batch channels height width"]
HiddenStates = Float[Array, "batch seq width"]
Key = PRNGKeyArray | None  # for dropout
