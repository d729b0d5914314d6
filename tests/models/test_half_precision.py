"""Every published architecture with all of its arrays in 16 bits, traced under strict promotion of
types: what a model computes in float32 does not depend on parameters that are in float32."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from grids import few_of
from published import apply, make_batch
from stored_outputs import STORED_OUTPUTS

from redcoast.pretrained._registry import find_family

KEY = jax.random.key(0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", few_of(STORED_OUTPUTS, "mamba2", "qwen3.5", "phi3 long"))
def test_outputs_have_the_dtype_of_the_arrays(name, dtype):
    case = STORED_OUTPUTS[name]
    family, config = find_family(case["settings"], name)
    model = eqx.filter_eval_shape(family.model, config, key=KEY)
    half = lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
    model = jax.tree.map(half, model)
    batch = make_batch(case["settings"], pixels=case["pixels"], text=case["text"])
    assert eqx.filter_eval_shape(apply, model, batch).dtype == dtype
    if hasattr(model, "init_cache") and not hasattr(model, "encode"):
        new_cache = lambda model: model.init_cache(len(batch["tokens"]), 32)
        read = lambda model: model.decode(batch["tokens"], new_cache(model))
        hidden, cache = eqx.filter_eval_shape(read, model)
        assert hidden.dtype == dtype
        assert cache == eqx.filter_eval_shape(new_cache, model)  # shapes and dtypes
