"""Loads a pretrained model."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._pytree import join, leaf_paths, split
from ..core._tracing import abstract_key
from ..models._quantised_weight import Numbers
from ._fused_experts import split_experts
from ._generation import with_generation
from ._lazy_tensor import Stored
from ._match import Layout, layout_of, match, needed_shapes
from ._placement import choose_shardings
from ._quantise_loaded import fill_quantised, matrices_to_quantise
from ._quantised import dequantised
from ._read_plan import ArrayToRead
from ._read_to_device import fill_device
from ._read_to_host import fill_host
from ._registry import find_family
from ._source import check_computed, check_elements, check_layers, open_source
from ._text_part import text_part


def load(
    path: Path,
    mesh: Mesh | None,
    shardings: PyTree | None,
    dtype: Any,
    quantise: Numbers | None,
    options: Mapping[str, Any],
) -> Any:
    """Loads the model at a path; see `load_pretrained`."""
    if dtype is not None:
        dtype = _floating(dtype)
    if quantise not in (None, "nf4", "int8"):
        raise ValueError(f"`quantise` must be 'nf4', 'int8' or None, but is {quantise!r}.")
    source = open_source(path)
    # Before anything is traced: a file may claim billions of layers.
    check_layers(source.settings, len(source.stored), path)
    source = text_part(source, path)
    family, config = find_family(source.settings, path)
    source = dequantised(source, dtype, path)
    if settle := getattr(family.hf, "settle", None):
        config = settle(config, source.stored.keys())
    decoding = options.get("decoding")
    config = with_generation(config, source.settings, source.generation, path, decoding=decoding)
    fields = [field.name for field in dataclasses.fields(config)]
    if unknown := sorted(options.keys() - set(fields)):
        raise TypeError(
            f"{type(config).__name__} has no field {', '.join(unknown)}. It has: "
            f"{', '.join(fields)}."
        )
    config = dataclasses.replace(config, **options)
    computed = getattr(family.hf, "computed", lambda config: {})
    # Before the model is created in the abstract, which computes these arrays.
    check_computed(computed(config), source.stored, path)
    abstract = _abstract(family.model, config, path)
    arrays = leaf_paths(abstract, jax.ShapeDtypeStruct)
    check_elements(arrays.values(), source.stored, path)
    if source.table is None:
        layout = layout_of(config)
    else:
        layout = Layout(source.table)
    needed = needed_shapes(layout, arrays)
    in_file = split_experts(source.stored, needed)
    stored = match(layout, needed, in_file, path, source.settings)
    # By the tensors that are used, so that buffers, for example, do not count.
    if dtype is None:
        dtype = _common_dtype(stored)
    leaves, static = split(abstract)
    abstract = join([jax.ShapeDtypeStruct(x.shape, dtype) for x in leaves], static)
    places = choose_shardings(abstract, family, config, mesh, shardings)
    targets, platforms = {}, set()
    for name, x in arrays.items():
        targets[name] = ArrayToRead(x.shape, dtype, layout.table[name], places[name])
        platforms |= {device.platform for device in places[name].device_set}
    fill = partial(fill_device, stored=stored, most=_piece_elements(stored, dtype, 2**24))
    if platforms == {"cpu"}:
        # Arrays of CPU devices are in the host's memory, and are written there at once.
        fill = partial(fill_host, stored=stored, most=_piece_elements(stored, dtype, 2**22))
    filled: dict[str, Any] = {}
    if quantise is not None:
        chosen = matrices_to_quantise(targets, path)
        # Before the other arrays, because their parts in `dtype` need memory for a while.
        filled = fill_quantised({name: targets.pop(name) for name in chosen}, quantise, fill)
    if targets:
        filled |= fill(targets)
    return join([filled[name] for name in arrays], static)


def _abstract(model_class: Any, config: Any, path: Path) -> PyTree:
    try:
        return eqx.filter_eval_shape(model_class, config, key=abstract_key())
    except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{path} cannot be loaded: its settings do not describe a valid model ({error})."
        ) from error


def _common_dtype(stored: Mapping[str, Stored]) -> np.dtype:
    # One dtype for all arrays, because models do not mix dtypes.
    sizes = Counter()
    for x in stored.values():
        sizes[x.dtype] += x.nbytes
    return jax.dtypes.canonicalize_dtype(sizes.most_common(1)[0][0])


def _floating(dtype: Any) -> np.dtype:
    # Any text, or a type of another library, raises a TypeError.
    with contextlib.suppress(TypeError):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not (isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, np.floating)):
        raise ValueError(
            f"`dtype` must be a floating type of JAX or NumPy or its name, such as 'bfloat16', but "
            f"is {dtype}. By default, it is the dtype of the files."
        )
    return dtype


def _piece_elements(stored: Mapping[str, Stored], dtype: np.dtype, most: int) -> int:
    """Returns the number of elements to read at once: `most` bytes, or less if all tensors are
    small, so that the pieces in flight are smaller than the largest tensor."""
    largest = max(x.nbytes for x in stored.values())
    size = max(dtype.itemsize, *(x.dtype.itemsize for x in stored.values()))
    return min(max(largest // 16, 2**18), most) // size
