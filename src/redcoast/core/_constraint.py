"""A sharding constraint with another sharding for its cotangent, and another one under `jax.vmap`.

The cotangent of `jax.lax.with_sharding_constraint` has the same sharding, and `jax.vmap` constrains
what is mapped in the same way. Under `jax.vmap`, as over examples or clients, the mapped dimension
may need the axes of the mesh.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding


def constrain(
    x: jax.Array,
    sharding: NamedSharding,
    *,
    of_cotangent: NamedSharding,
    if_mapped: NamedSharding | None = None,
) -> jax.Array:
    """Constrains an array to `sharding`, and its cotangent to `of_cotangent`.

    Under `jax.vmap`, both are constrained to `if_mapped`, or not at all.
    """
    return _constrain_p.bind(
        x,
        sharding=sharding,
        of_cotangent=of_cotangent,
        if_mapped=if_mapped,
        unconstrained_dims=frozenset(),
    )


def _constrain(x: jax.Array, *, sharding: NamedSharding, **params: object) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)


def _transpose(
    y: jax.Array,
    x: object,
    *,
    sharding: NamedSharding,
    of_cotangent: NamedSharding,
    if_mapped: NamedSharding | None,
    **params: object,
) -> list[jax.Array]:
    return [constrain(y, of_cotangent, of_cotangent=sharding, if_mapped=if_mapped)]


def _map(
    arrays: tuple[jax.Array], dims: tuple[int], *, if_mapped: NamedSharding | None, **params: object
) -> tuple[jax.Array, int]:
    (x,), (d,) = arrays, dims
    if if_mapped is None:
        return x, d
    constrain_each = lambda x: jax.lax.with_sharding_constraint(x, if_mapped)
    return jax.vmap(constrain_each, in_axes=d, out_axes=d)(x), d


# It has the name of a constraint, which policies of rematerialisation ask for.
_constrain_p = Primitive("sharding_constraint")
_constrain_p.def_impl(_constrain)
_constrain_p.def_abstract_eval(lambda aval, **params: aval)
mlir.register_lowering(_constrain_p, mlir.lower_fun(_constrain, multiple_results=False))
batching.primitive_batchers[_constrain_p] = _map
ad.deflinear2(_constrain_p, _transpose)
