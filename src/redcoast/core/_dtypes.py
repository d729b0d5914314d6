"""Converts NumPy arrays to the dtypes of JAX, if that changes no value."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ._pytree import show_path, show_place

_KINDS = "biufc"  # booleans, integers, floating and complex numbers
# These have more than 64 bits on some machines.
_DOUBLE = {
    np.dtype(np.longdouble): np.dtype(np.float64),
    np.dtype(np.clongdouble): np.dtype(np.complex128),
}
_DOUBLE = {wide: dtype for wide, dtype in _DOUBLE.items() if wide != dtype}
_X64 = "JAX computes with 32 bits unless `jax_enable_x64` is set"


def to_jax_dtype(x: np.ndarray, what: str) -> np.ndarray:
    """Converts a NumPy array to a dtype of JAX, unless it already has one.

    Numbers get the byte order of this machine, and 64-bit numbers become 32-bit numbers, unless
    `jax_enable_x64` is set. Messages refer to the array by `what`, such as "The array at x".
    """
    if is_jax_dtype(x.dtype):
        return x
    if not x.dtype.isnative:
        return to_jax_dtype(x.astype(x.dtype.newbyteorder("=")), what)
    if x.dtype in _DOUBLE:
        double = x.astype(_DOUBLE[x.dtype])
        # Only if no digit is lost; otherwise the error below says what to do.
        if np.array_equal(double, x, equal_nan=True):
            return to_jax_dtype(double, what)
    if not has_numbers(x.dtype) or x.dtype in _DOUBLE:
        raise TypeError(
            f"{what} has the dtype {x.dtype}, which JAX does not have.{dtype_advice(x.dtype)}"
        )
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    # What overflows becomes infinite, which the check below finds.
    with np.errstate(over="ignore"):
        narrow = x.astype(dtype)
    if x.dtype.kind in "iu":
        changed = narrow != x
        advice = (
            "Map the numbers to a smaller range on the host, such as rows of a table by "
            "`x % rows`, or pass their upper and lower 32 bits."
        )
    else:
        changed = np.isinf(narrow)
        # Infinity in the array itself stays what it is.
        if np.any(changed):
            changed = changed & np.isfinite(x)
        advice = "Scale the numbers; where infinity is meant, pass `np.inf`."
    if np.any(changed):
        value = x[changed].flat[0]
        raise ValueError(
            f"{what} has the dtype {x.dtype} and the value {value}, which {dtype.name} cannot "
            f"hold: {_X64}. {advice}"
        )
    return narrow


def keep_large_counts(results: list[PyTree]) -> list[PyTree]:
    """Casts integers of NumPy that do not fit into JAX's to float32, in what a function returned.

    A trace would cast them to int32, in which they are other numbers.
    """
    cast = list(results)
    for i, x in enumerate(results):
        if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iu":
            narrow = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
            if not np.array_equal(narrow, x):
                cast[i] = x.astype(np.float32)
    return cast


def has_numbers(dtype: np.dtype) -> bool:
    """Whether a dtype of NumPy holds numbers or booleans."""
    # JAX's own, such as bfloat16, float8 and int4, are void to NumPy.
    return dtype.kind in _KINDS or (dtype.kind == "V" and hasattr(jnp, dtype.name))


def is_jax_dtype(dtype: np.dtype) -> bool:
    """Whether JAX computes with a dtype of NumPy as it is."""
    if not (has_numbers(dtype) and dtype.isnative) or dtype in _DOUBLE:
        return False
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def dtype_advice(dtype: np.dtype) -> str:
    """A sentence on how to convert an array of a dtype that JAX does not have."""
    if dtype.kind in "mM":
        return " Convert it to numbers, such as `(x - start) / np.timedelta64(1, 's')`."
    if dtype.names:
        return " Pass its fields one by one, such as `tuple(x[name] for name in x.dtype.names)`."
    if dtype.kind in "OSUT":
        return " Convert it to numbers; labels become indices into a list."
    return " Convert it to numbers of at most 64 bits."


def tree_to_jax_dtypes(tree: PyTree, root: str, *, of: str = "") -> PyTree:
    """Converts the NumPy arrays of a tree, which is called `root` in messages.

    `of` is the name of the tree in the places of its arrays, if it is data: `batch` in `batch[0]`.
    Data must not have text.
    """

    def convert(path: KeyPath, x: PyTree) -> PyTree:
        where = show_path(path)
        if of:
            where = show_place(path, of)
        if of and isinstance(x, str | bytes):
            raise TypeError(
                f"There is text at {where or root}, and {root} must have arrays alone. Encode text "
                "with the tokenizer of the model."
            )
        what = root
        if where:
            what = f"The array at {where} of {root}"
        if _is_foreign(x):
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            raise TypeError(
                f"{what} is of type {kind}, with which JAX does not compute. Pass an array of "
                "NumPy, such as `np.asarray(x)`."
            )
        if not isinstance(x, np.ndarray | np.generic):
            return x
        check_unmasked(x, what)
        return to_jax_dtype(np.asarray(x), what)

    # Computing the paths takes most of the time.
    if all(map(_is_jax_leaf, jax.tree.leaves(tree))):
        return tree
    return jax.tree_util.tree_map_with_path(convert, tree)


def check_unmasked(x: PyTree, what: str) -> None:
    """Raises a `ValueError` for an array with masked elements, whose mask JAX would not see."""
    if np.ma.is_masked(x):
        raise ValueError(
            f"{what} is a masked array of NumPy, with {np.ma.count_masked(x):,} of {np.size(x):,} "
            "elements masked, and arrays of JAX have no mask. Pass the values, such as "
            "`x.filled(0)`, and the mask, `np.ma.getmaskarray(x)`, as two arrays."
        )


def _is_foreign(x: object) -> bool:
    """Whether this is an array of another library, such as a tensor of PyTorch or TensorFlow."""
    if isinstance(x, jax.Array | np.ndarray | np.generic | type):
        return False
    # JAX asks others than its own and NumPy's for the second method.
    return hasattr(x, "__array__") and not hasattr(x, "__jax_array__")


def _is_jax_leaf(x: object) -> bool:
    if not isinstance(x, str | bytes | np.ndarray | np.generic):
        return not _is_foreign(x)
    if isinstance(x, str | bytes):
        return False
    return is_jax_dtype(x.dtype) and not isinstance(x, np.ma.MaskedArray)
