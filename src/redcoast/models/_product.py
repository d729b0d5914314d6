"""Products with weights, adapted or not."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


class LowRank(eqx.Module):
    """A weight with a low-rank sum beside it, `weight + scale * a b`
    (LoRA, Hu et al., 2021, <https://arxiv.org/abs/2106.09685>).

    It stands in a model where the weight stood. `weight @ x` works as in `eqx.nn.Linear`; the
    models here multiply by `product`.
    """

    weight: Float[Array, "..."]
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    @property
    def dtype(self):
        return self.weight.dtype

    def __matmul__(self, x: Array) -> Array:
        # Matrices of `eqx.nn.Linear` have their outputs first: `b` is outputs by rank there.
        return self.weight @ x + self.scale * (self.b @ (self.a @ x))


def product(
    equation: str,
    x: Float[Array, "..."],
    weight: Array | LowRank,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum(equation, x, weight) + bias`, for adapted weights too.

    **Arguments:**

    - `equation`: as of `jnp.einsum`, such as `"bsd,dhk->bshk"`.
    - `x`: the activations.
    - `weight`: an array, or one with a low-rank sum beside it: `a` has the letters that the
        equation sums over and the rank, `b` the rank and the letters that are left; letters of
        both the activations and the result (such as an expert's) come first in both.
    - `bias`: of the result's last dimensions.
    """
    if isinstance(weight, LowRank):
        out = _low_rank(equation, x, weight)
    else:
        out = jnp.einsum(equation, x, weight)
    if bias is None:
        return out
    # Said in full, since ranks are not promoted silently.
    return out + bias.reshape((1,) * (out.ndim - bias.ndim) + bias.shape)


def _low_rank(equation: str, x: Array, weight: LowRank) -> Array:
    inputs, result = equation.split("->")
    letters, of_weight = inputs.split(",")
    both = "".join(c for c in of_weight if c in letters and c in result)
    summed = "".join(c for c in of_weight if c in letters and c not in result)
    left = "".join(c for c in of_weight if c not in letters)
    middle = "".join(c for c in letters if c not in summed) + "r"
    low = jnp.einsum(f"{letters},{both}{summed}r->{middle}", x, weight.a)
    change = jnp.einsum(f"{middle},{both}r{left}->{result}", low, weight.b)
    return jnp.einsum(equation, x, weight.weight) + weight.scale * change
