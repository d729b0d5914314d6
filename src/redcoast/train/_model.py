"""Explains why a model has no trainable leaves."""

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..core._errors import several

# What to pass instead, by the library that defines the class.
_OTHERS = {
    "flax.linen": "is a Flax module, which holds no arrays. Pass its parameters, "
    "`module.init(key, x)`, as the model, and call `module.apply(model, x)` in `loss_fn`.",
    "flax.nnx": "is an NNX module. Take it apart with `graph, model = nnx.split(module)`, pass "
    "`model`, and call `nnx.merge(graph, model)(x)` in `loss_fn`.",
    "torch.nn": "is a PyTorch module, which JAX cannot differentiate. Write it as an `eqx.Module`.",
    "haiku": "is a Haiku module. Use `hk.transform`, pass the parameters that its `init` returns, "
    "and call its `apply` in `loss_fn`.",
    "keras": "is a Keras model, which is not a PyTree. Write it as an `eqx.Module`.",
}


def refuse_untrainable(model: PyTree) -> None:
    """Raises an error that names what a model without trainable leaves is."""
    if isinstance(model, type):
        raise TypeError(
            f"The model is the class {model.__name__}. Pass an instance of it, such as "
            f"`{model.__name__}(..., key=key)`, or a function that creates one, "
            f"`lambda key: {model.__name__}(..., key=key)`."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = type(leaf).__name__
        where = "The model"
        if path:
            where = f"The model's leaf {jax.tree_util.keystr(path)}"
        # A user's own module is in the user's file, and its base is in the library.
        bases = [base.__module__ for base in type(leaf).__mro__]
        for library, words in _OTHERS.items():
            if any(f"{base}.".startswith(f"{library}.") for base in bases):
                raise TypeError(f"{where}, of type {name}, {words}")
        if not path and hasattr(leaf, "__dict__") and not hasattr(leaf, "shape"):
            raise TypeError(
                f"{where} is a {name}, which is not a PyTree. Make {name} a subclass of "
                "`eqx.Module`, or pass a dict of its arrays."
            )
    leaves = jax.tree.leaves(model)
    arrays = [x for x in leaves if hasattr(x, "dtype")]
    reason = "`trainable` selects none of its floating arrays"
    if not leaves:
        reason = "it is empty. Pass the parameters as the model"
    elif not arrays:
        kinds = sorted({type(x).__name__ for x in leaves})
        reason = f"it has no arrays, but {several(kinds)}. Pass the parameters as the model"
    elif not any(map(eqx.is_inexact_array, arrays)):
        dtypes = sorted({str(x.dtype) for x in arrays})
        reason = f"its arrays are of {several(dtypes)}, and only floating arrays are trained"
    raise ValueError(f"The model has no trainable leaves: {reason}.")
