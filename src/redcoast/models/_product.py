"""Products with weights, adapted or not."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._attention import wide


class LowRank(eqx.Module):
    """A weight with a low-rank sum beside it, `weight + scale * a b`
    (LoRA, Hu et al., 2021, <https://arxiv.org/abs/2106.09685>).

    It stands in a model where the weight stood. `weight @ x` works as in `eqx.nn.Linear`; the
    models here multiply by `product`. Leading dimensions that all three share are stacks, of
    layers or experts.

    - `weight`: `"*stack *inputs *outputs"`, or, with `outputs_first`, `"*stack output input"`.
    - `a`: `"*stack *inputs rank"`.
    - `b`: `"*stack rank *outputs"`.
    """

    weight: Float[Array, "..."]
    a: Float[Array, "..."]
    b: Float[Array, "..."]
    scale: float = eqx.field(static=True)
    outputs_first: bool = eqx.field(static=True, default=False)

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
        a, b = (jnp.swapaxes(m, -1, -2).astype(x.dtype) for m in (self.a, self.b))
        return self.weight @ x + self.scale * (b @ (a @ x))

    def __jax_array__(self) -> Array:
        raise ValueError(
            f"A weight of shape {self.shape} has an adapter (LoRA), but this model does something "
            "else with it than to multiply by it. Adapt other weights, or merge the adapters."
        )

    def merged(self) -> Float[Array, "..."]:
        """The weight with the sum in it."""
        a, b = (x.astype(wide(x.dtype)) for x in (self.a, self.b))
        stacked = a.ndim + b.ndim - self.ndim - 2
        letters = iter("bcdefghijklmnopq")
        stack = "".join(next(letters) for _ in range(stacked))
        inputs = "".join(next(letters) for _ in range(a.ndim - stacked - 1))
        outputs = "".join(next(letters) for _ in range(b.ndim - stacked - 1))
        sides = outputs + inputs if self.outputs_first else inputs + outputs
        change = jnp.einsum(f"{stack}{inputs}r,{stack}r{outputs}->{stack}{sides}", a, b)
        weight = self.weight.astype(change.dtype) + self.scale * change
        return weight.astype(self.dtype)


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
    # Adapters may be kept in a wider dtype than what is computed in.
    a, b = weight.a.astype(x.dtype), weight.b.astype(x.dtype)
    low = jnp.einsum(f"{letters},{both}{summed}r->{middle}", x, a)
    change = jnp.einsum(f"{middle},{both}r{left}->{result}", low, b)
    return jnp.einsum(equation, x, weight.weight) + weight.scale * change
