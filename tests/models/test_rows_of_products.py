"""On a CPU, products with weights are products of matrices, in the form that takes less time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redcoast.core._jaxpr import iter_equations, struct_of
from redcoast.models._einsum import product

SHAPES = {
    "bsd,dhk->bshk": ((2, 7, 6), (6, 2, 4)),
    "bshk,hkd->bsd": ((2, 7, 2, 3), (2, 3, 5)),
    "bsd,de->bse": ((2, 7, 6), (6, 5)),
}


@pytest.mark.few("1-bsd,dhk->bshk")
@pytest.mark.parametrize("equation", SHAPES)
@pytest.mark.parametrize("devices", [1, 8])
def test_rows_are_merged_only_if_the_process_has_one_device(equation, devices, monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    random = np.random.default_rng(0)
    x, weight = (jnp.asarray(random.standard_normal(s, np.float32)) for s in SHAPES[equation])
    ours = lambda x, weight: jnp.sum(jnp.sin(product(equation, x, weight)))
    plain = lambda x, weight: jnp.sum(jnp.sin(jnp.einsum(equation, x, weight)))

    gradient = jax.grad(ours, argnums=(0, 1))
    for actual, expected in zip(
        gradient(x, weight), jax.grad(plain, argnums=(0, 1))(x, weight), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

    equations = iter_equations(jax.make_jaxpr(gradient)(x, weight))
    products = [eqn for eqn in equations if eqn.primitive.name == "dot_general"]
    # The product itself, its gradient by `x`, and by the weights.
    dims = [tuple(struct_of(v).ndim for v in eqn.invars) for eqn in products]
    rows = 2 if devices == 1 else 3
    assert sorted(dims) == sorted([(rows, 2), (rows, 2), (rows, rows)])
