"""The gather of an array that is stored in parts, whose gradient is summed into these parts.

The cotangent of a sharding constraint has the same sharding, so that the gradient of an array that
is gathered by one is summed as a whole. If only some of the devices of the batch store different
parts, as on data 2 x fsdp 4, compilers all-reduce it over all of them. Of a gradient that is
constrained to the parts alone, they reduce-scatter over `fsdp`, and all-reduce these parts over
`data`: a fourth of the bytes for the second.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding


def gather_stored(x: jax.Array, whole: NamedSharding, parts: NamedSharding) -> jax.Array:
    """Constrains an array to the sharding `whole`, and its cotangent to that of its parts."""
    return _gather_p.bind(x, sharding=whole, parts=parts, unconstrained_dims=frozenset())


def _constrain(
    x: jax.Array, *, sharding: NamedSharding, parts: NamedSharding, unconstrained_dims: frozenset
) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)


def _constrain_cotangent(
    cotangent: jax.Array, x: object, *, parts: NamedSharding, **params: object
) -> list[jax.Array]:
    return [jax.lax.with_sharding_constraint(cotangent, parts)]


def _constrain_each(
    arrays: tuple[jax.Array], dims: tuple[int], *, sharding: NamedSharding, **params: object
) -> tuple[jax.Array, int]:
    (x,), (d,) = arrays, dims
    constrain = lambda x: jax.lax.with_sharding_constraint(x, sharding)
    return jax.vmap(constrain, in_axes=d, out_axes=d)(x), d


# It has the name of a constraint, which policies of rematerialisation ask for.
_gather_p = Primitive("sharding_constraint")
_gather_p.def_impl(_constrain)
_gather_p.def_abstract_eval(lambda aval, **params: aval)
mlir.register_lowering(_gather_p, mlir.lower_fun(_constrain, multiple_results=False))
batching.primitive_batchers[_gather_p] = _constrain_each
ad.deflinear2(_gather_p, _constrain_cotangent)
