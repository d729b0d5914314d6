"""Arrays that callers pass to models: JAX arrays, or NumPy arrays of tokenizers; and what models
return."""

import numpy as np
from jaxtyping import Array, Bool, Float, Integer, PRNGKeyArray

AnyArray = Array | np.ndarray
Tokens = Integer[AnyArray, "batch seq"]
# Beside tokens, an array may have one row for all.
Mask = Bool[AnyArray, "#batch seq"] | Integer[AnyArray, "#batch seq"]
Segments = Integer[AnyArray, "#batch seq"]
Positions = Integer[AnyArray, "#batch seq"]
Pixels = Float[AnyArray, "batch channels height width"]
Replaced = Bool[AnyArray, "batch patches"] | None  # by the token of a mask
Images = Float[AnyArray, "images channels height width"]  # of which there may be more than texts
Texts = Integer[AnyArray, "texts seq"]
HiddenStates = Float[Array, "batch seq width"]
Key = PRNGKeyArray | None  # for dropout
Queries = Float[Array, "batch queries heads head_dim"]
Keys = Float[Array, "batch keys kv_heads head_dim"]
Values = Float[Array, "batch keys kv_heads value_dim"]
Attended = Float[Array, "batch queries heads value_dim"]
