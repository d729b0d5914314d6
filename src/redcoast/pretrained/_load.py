"""Loads a pretrained model."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._pytree import join, leaf_paths, split
from ..core._tracing import abstract_key
from ..models._quantised_weight import Numbers, QuantisedWeight, quantised_weight
from ..sharding import infer_shardings
from ._generation import with_generation
from ._lazy_tensor import Box, Stored, bytes_by_dtype
from ._match import Layout, layout_of, match, needed_shapes
from ._matrix_roles import matrix_of
from ._quantised import dequantised
from ._read_plan import ArrayToRead
from ._read_to_device import fill_device, fill_host
from ._registry import Family, find_family
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
        # Any text, or a type of another library, raises a TypeError.
        with contextlib.suppress(TypeError):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        if not (isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, np.floating)):
            raise ValueError(
                f"`dtype` must be a floating type of JAX or NumPy or its name, such as 'bfloat16', "
                f"but is {dtype}. By default, it is the dtype of the files."
            )
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
    try:
        abstract = eqx.filter_eval_shape(family.model, config, key=abstract_key())
    except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise ValueError(
            f"{path} cannot be loaded: its settings do not describe a valid model ({error})."
        ) from error
    arrays = leaf_paths(abstract, jax.ShapeDtypeStruct)
    check_elements(arrays.values(), source.stored, path)
    if source.table is None:
        layout = layout_of(config)
    else:
        layout = Layout(source.table)
    needed = needed_shapes(layout, arrays)
    in_file = split_experts(source.stored, needed)
    stored = match(layout, needed, in_file, path, source.settings)
    if dtype is None:
        # One dtype for all arrays, because models do not mix dtypes; by the tensors that are used,
        # so that buffers, for example, do not count.
        stored_dtype, _ = bytes_by_dtype(stored.values()).most_common(1)[0]
        dtype = jax.dtypes.canonicalize_dtype(stored_dtype)
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
    filled: dict[str, PyTree] = {}
    if quantise is not None:
        matrices: dict[str, ArrayToRead] = {}
        for name, target in targets.items():
            if "layers" in name and matrix_of(target.tensor):
                matrices[name] = target
        if not matrices:
            raise ValueError(
                f"The model at {path} has no matrices of layers to quantise. Load it without "
                "`quantise`, and choose its matrices by `redcoast.lora.quantise(model, "
                "targets=...)`."
            )
        # Before the other arrays, because their parts in `dtype` need memory for a while.
        filled = fill_quantised(matrices, quantise, fill)
        for name in matrices:
            del targets[name]
    if targets:
        filled |= fill(targets)
    return join([filled[name] for name in arrays], static)


def _piece_elements(stored: Mapping[str, Stored], dtype: np.dtype, most: int) -> int:
    """Returns the number of elements to read at once: `most` bytes, or less if all tensors are
    small, so that the pieces in flight are smaller than the largest tensor."""
    largest, size = 0, dtype.itemsize
    for x in stored.values():
        largest = max(largest, x.nbytes)
        size = max(size, x.dtype.itemsize)
    return min(max(largest // 16, 2**18), most) // size


PLANNED_TOKENS = 128  # in a row


def choose_shardings(
    abstract: PyTree, family: Family, config: Any, mesh: Mesh | None, shardings: PyTree | None
) -> dict[str, Sharding]:
    """Returns the sharding of each array by its path: as given, as planned for the mesh, or on
    JAX's default device."""
    arrays = leaf_paths(abstract, jax.ShapeDtypeStruct)
    if shardings is not None:
        chosen = leaf_paths(shardings, Sharding)
        if odd := chosen.keys() ^ arrays.keys():
            raise ValueError(
                "`shardings` must have one sharding for each array of the model, such as "
                f"`rc.infer_shardings` returns; {', '.join(sorted(odd))} is in only one of the two."
            )
        meshes: set[object] = set()
        device_sets: set[frozenset] = set()
        for sharding in chosen.values():
            device_sets.add(frozenset(sharding.device_set))
            if isinstance(sharding, NamedSharding):
                meshes.add(sharding.mesh)
        if len(device_sets) > 1:
            raise ValueError(
                "`shardings` use several sets of devices. All must use the same devices."
            )
        if mesh is not None and meshes != {mesh}:
            raise ValueError("`shardings` use another mesh than `mesh`. Pass only one of the two.")
        return chosen
    if mesh is None:
        # Where JAX puts a new array, which `jax.default_device` may have changed.
        device = next(iter(jnp.zeros(()).devices()))
        return dict.fromkeys(arrays, SingleDeviceSharding(device))
    if mesh.size == 1:
        return dict.fromkeys(arrays, NamedSharding(mesh, P()))
    if own := getattr(family.hf, "example_inputs", None):
        inputs = own(config, mesh.size)
    else:
        # A row for each device, so that the rows can be divided over any axes.
        length = min(PLANNED_TOKENS, getattr(config, "positions", PLANNED_TOKENS))
        inputs = (jax.ShapeDtypeStruct((mesh.size, length), jnp.int32),)
        if hasattr(family.model, "encode"):
            inputs *= 2  # for the encoder and the decoder
    planned = infer_shardings(abstract, mesh, fn=lambda model, *args: model(*args), args=inputs)
    return leaf_paths(planned, Sharding)


Fill = Callable[[Mapping[str, ArrayToRead]], dict[str, jax.Array]]

_MOST = 2**28  # bytes of a device that a part of a matrix has before it is quantised


def fill_quantised(
    targets: Mapping[str, ArrayToRead], numbers: Numbers, fill: Fill
) -> dict[str, QuantisedWeight]:
    """Creates quantised matrices. `fill` creates arrays from the files."""
    quantised: dict[str, QuantisedWeight] = {}
    for name, target in targets.items():
        matrix = matrix_of(target.tensor)
        assert matrix is not None
        quantise = partial(quantised_weight, numbers=numbers, axis=matrix.last_input(target.shape))
        quantise = jax.jit(quantise)
        parts: list[QuantisedWeight] = []
        for part in _parts(target):
            weight = quantise(fill({name: part})[name])
            # Waits, so that the array before is freed.
            parts.append(jax.block_until_ready(weight))
        quantised[name] = parts[0]
        if len(parts) > 1:
            quantised[name] = jax.jit(_concatenate)(parts)
    return quantised


def _parts(target: ArrayToRead) -> list[ArrayToRead]:
    """A matrix in parts of whole layers, if its first dimension counts them."""
    # A first dimension that is sharded, or is not of layers, is not divided.
    layers = target.shape[0]
    if not target.tensor.fields or target.box_shape[0] != layers:
        return [target]
    of_layer = prod(target.box_shape[1:]) * target.dtype.itemsize
    count = max(1, _MOST // of_layer)
    firsts = range(0, layers, count)
    return [target.layers_from(first, min(count, layers - first)) for first in firsts]


def _concatenate(parts: list[QuantisedWeight]) -> QuantisedWeight:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


# `x.experts.gate_up_proj` is (experts, rows, columns), and becomes `x.experts.0.gate_proj.weight`,
# `x.experts.0.up_proj.weight`, `x.experts.1.gate_proj.weight` and so on.
_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up_proj|down_proj)")
# The parts of a tensor, each of which is a matrix of an expert.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(
    stored: Mapping[str, Stored], needed: Mapping[str, tuple[int, ...]]
) -> dict[str, Stored]:
    """Returns the tensors of a file, with one for each matrix of an expert where a model needs
    these. They are read in parts, as all others are."""
    split: dict[str, Stored] = {}
    for name, tensor in stored.items():
        match = _FUSED.fullmatch(name)
        matrices: dict[str, Stored] = {}
        if match is not None:
            matrices = dict(_matrices(match, tensor, needed))
        split |= matrices or {name: tensor}
    return split


def _matrices(
    match: re.Match[str], fused: Stored, needed: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Stored]]:
    """The names of the matrices of all experts, and where they are in a tensor."""
    parts = _PARTS[match["name"]]
    shape = needed.get(f"{match['experts']}.0.{parts[0]}.weight")
    if shape is None or len(fused.shape) != 3:
        return
    # Gates come before the other rows of an expert. For a square tensor both orders match, and the
    # usual one, (outputs, inputs), is taken.
    rows, columns = len(parts) * shape[0], shape[1]
    if fused.shape[1:] not in ((rows, columns), (columns, rows)):
        return
    turned = fused.shape[1:] != (rows, columns)
    for expert in range(fused.shape[0]):
        for i, part in enumerate(parts):
            name = f"{match['experts']}.{expert}.{part}.weight"
            yield name, _matrix(fused, expert, i * shape[0], shape, turned=turned)


def _matrix(
    fused: Stored, expert: int, start: int, shape: tuple[int, ...], *, turned: bool
) -> Stored:
    """The matrix of one expert that begins at a row of a tensor."""

    def read(box: Box, out: np.ndarray) -> None:
        rows, columns = box
        rows = slice(start + rows.start, start + rows.stop)
        if turned:
            matrix = fused.take((slice(expert, expert + 1), columns, rows))  # (1, columns, rows)
            out[...] = matrix[0].T
        else:
            fused.read((slice(expert, expert + 1), rows, columns), out[None])

    return Stored(shape, fused.dtype, read)
