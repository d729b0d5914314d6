"""Saves a model in the format of `transformers`."""

import functools as ft
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._durable_files import sync_name, sync_tree
from ..core._pytree import leaf_paths
from ..core._tracing import abstract_key
from ..models._einsum import LowRank
from ..models._quantised_weight import QuantisedWeight
from ._card import CARD, check_card, make_card
from ._files import file_inside
from ._generation import write_decoding
from ._match import layout_of, needed_shapes
from ._registry import family_of, write_config
from ._safetensors import write_safetensors
from ._settings import Settings
from ._slices import insert
from ._source import GENERATION, INDEX, SETTINGS, SINGLE, find_gguf
from ._tensors import tensor_names
from .text._tokenizer_files import gguf_tokenizer_files

# The files of tokenizers and processors in Hugging Face's directories.
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "tekken.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
Part = tuple[str, tuple[int, ...]]  # the path of an array, and an index in its leading dimensions


def save(
    model: PyTree,
    path: Path,
    tokenizer: Path | None,
    card: Mapping[str, object] | None,
    max_file_bytes: int | float,
) -> None:
    """Saves a model; see `save_pretrained`."""
    if family_of(model) is None:
        raise ValueError(
            f"`save_pretrained` saves models of `redcoast.models`, but got a "
            f"{type(model).__name__}. `rc.save_checkpoint` saves any PyTree."
        )
    if card is not None:
        check_card(card)
    leaves = _check_model(model)
    settings, generation = write_config(model.config), None
    if hasattr(model.config, "decoding"):
        generation = write_decoding(model.config)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"{path} exists already, and nothing is overwritten. Choose another path. `tokenizer` "
            "copies the files of a tokenizer; others can be added after the model is saved."
        )
    others = _tokenizer_files(tokenizer)
    layout = layout_of(model.config)
    # The parts of each tensor: paths of arrays, and indices in their leading dimensions.
    parts: dict[str, list[Part]] = {}
    for leaf, published in layout.table.items():
        for index, name in tensor_names(published, leaves[leaf].shape).items():
            parts.setdefault(name, []).append((leaf, index))
    needed = needed_shapes(layout, leaves)
    shapes: Shapes = {}
    for name, of_tensor in parts.items():
        first, _ = of_tensor[0]
        shapes[name] = needed[name], leaves[first].dtype
        kinds = {path: leaves[path].dtype.name for path, _ in of_tensor}
        if len({*kinds.values()}) > 1:
            listed = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
            raise ValueError(
                f"The tensor {name} has one dtype, but its arrays have several: {listed}. Cast "
                "them to one."
            )
    files = _files(shapes, max_file_bytes)
    sizes, parameters = Counter(), 0
    for name, (shape, dtype) in shapes.items():
        sizes[dtype.name] += _nbytes(shapes, name)
        parameters += prod(shape)
    # `transformers` loads the model in this dtype with `dtype="auto"`.
    settings = {**settings, "torch_dtype": sizes.most_common(1)[0][0]}
    others[SETTINGS] = _json(settings)
    if generation is not None:
        others[GENERATION] = _json(generation)
    if card is not None:
        others[CARD] = make_card(card, settings, path.name, parameters)
    if list(files) != [SINGLE]:
        weight_map = {}
        for file, names in files.items():
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": sizes.total()}, "weight_map": weight_map}
        others[INDEX] = json.dumps(index, indent=2) + "\n"
    # Beside the directory, so that renaming it stays within the file system, and is atomic.
    work = path.with_name(f".{path.name}.unfinished")
    _on_first(ft.partial(_start_afresh, work), "begun")

    def tensor(name: str) -> np.ndarray:
        out = np.empty(*shapes[name])
        plain = np.dtype(f"u{out.itemsize}")  # NumPy copies its own types faster than bfloat16
        for (path, _), part in zip(parts[name], take(parts[name], leaves), strict=True):
            insert(layout.table[path], np.asarray(part).view(plain), out.view(plain))
        return out

    for i, (file, names) in enumerate(files.items()):
        if i % jax.process_count() == jax.process_index():
            write_safetensors(work / file, {n: shapes[n] for n in names}, map(tensor, names))
        else:
            for name in names:  # each process takes part in gathering
                jax.block_until_ready(take(parts[name], leaves))
    _barrier("written")
    _on_first(ft.partial(_finish, others, work, path), "finished")


def _check_model(model: PyTree) -> dict[str, PyTree]:
    """Returns the arrays of a model, after checking them against its configuration."""
    if adapted := leaf_paths(model, LowRank):
        raise ValueError(
            f"The weights {', '.join(adapted)} have adapters (LoRA), which cannot be saved in this "
            "format. Merge the adapters first (`lora.merge`)."
        )
    if quantised := leaf_paths(model, QuantisedWeight):
        raise ValueError(
            f"The weights {', '.join(quantised)} are quantised, but this format has plain arrays. "
            "Dequantise them first (`lora.dequantise`), or save the adapters alone "
            "(`lora.save_adapters`)."
        )
    leaves = leaf_paths(model, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
    abstract = eqx.filter_eval_shape(type(model), model.config, key=abstract_key())
    expected = leaf_paths(abstract, jax.ShapeDtypeStruct)
    odd = []
    for path in expected | leaves:
        shape = getattr(leaves.get(path), "shape", "missing")
        right = getattr(expected.get(path), "shape", "missing")
        if shape != right:
            odd.append(f"{path} is {shape}, but should be {right}")
    if odd or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves.values()):
        raise ValueError(
            f"The arrays of this {type(model).__name__} do not match its `config`: "
            f"{'; '.join(odd) or 'they are abstract, without values'}."
        )
    return leaves


def _files(shapes: Shapes, most: int | float) -> dict[str, list[str]]:
    """Distributes the tensors over files of at most `most` bytes."""
    groups: list[list[str]] = []
    # The first tensor begins the first file.
    size = most
    for name in shapes:
        size += _nbytes(shapes, name)
        if size > most:
            groups.append([])
            size = _nbytes(shapes, name)
        groups[-1].append(name)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    n = len(groups)
    return {f"model-{i:05}-of-{n:05}.safetensors": names for i, names in enumerate(groups, 1)}


def _nbytes(shapes: Shapes, name: str) -> int:
    shape, dtype = shapes[name]
    return prod(shape) * dtype.itemsize


def _start_afresh(work: Path) -> None:
    # Removes the files of an earlier process that died.
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)


def _finish(others: Mapping[str, Path | str], work: Path, path: Path) -> None:
    """Writes the other files, and names the directory."""
    for name, file in others.items():
        if isinstance(file, Path):
            shutil.copyfile(file, work / name)
        else:
            (work / name).write_text(file, "utf-8")
    # The files are on the disk before the directory has its name, and then the name is, too.
    sync_tree(work)
    os.rename(work, path)  # replaces an empty directory
    sync_name(path)


def _json(settings: Settings) -> str:
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _tokenizer_files(source: Path | None) -> dict[str, Path | str]:
    """The files of a tokenizer or a processor of inputs, by their names: files to copy, or the
    texts of new ones."""
    if source is None:
        return {}
    if not source.exists():
        raise FileNotFoundError(
            f"There is no directory or .gguf file {source}, which `tokenizer` names. Pass what the "
            "model was loaded from."
        )
    to_copy: set[Path] = set()
    if source.is_dir():
        for pattern in TOKENIZER:
            to_copy |= set(filter(Path.is_file, source.glob(pattern)))
    files = sorted(to_copy)
    if not files and (gguf := find_gguf(source)) is not None:
        return {**gguf_tokenizer_files(gguf)}
    if not files:
        raise ValueError(
            f"{source} contains no file of a tokenizer, such as tokenizer.json. Pass the directory "
            "or the .gguf file that the model was loaded from, or no `tokenizer`."
        )
    return {file.name: file_inside(source, file.name) for file in files}


def _on_first(action: Callable[[], None], name: str) -> None:
    """Runs an action on process 0, while the others wait for it."""
    if jax.process_index() == 0:
        action()
    _barrier(name)


def _barrier(name: str) -> None:
    multihost_utils.sync_global_devices(f"redcoast.save_pretrained {name}")


def take(parts: list[Part], leaves: Mapping[str, PyTree]) -> list[PyTree]:
    """Returns the parts of one tensor as arrays that this process can read.

    All processes must call this.
    """
    return [_slice(leaves[path], index) for path, index in parts]


def _slice(leaf: PyTree, index: tuple[int, ...]) -> jax.Array:
    """Indexes the leading dimensions of an array; the result is readable by this process."""
    if not isinstance(leaf, jax.Array):
        return leaf[index]
    sharding = None
    if isinstance(leaf.sharding, NamedSharding):
        spec = P()  # replicated if other processes hold parts of it
        if leaf.sharding.is_fully_addressable:
            # The indexed dimensions are gone, so their axes are, too.
            spec = P(*leaf.sharding.spec[len(index) :])
        sharding = NamedSharding(leaf.sharding.mesh, spec)
    # The index is an argument of the program, so one compilation serves all layers.
    return _copy_into(sharding)(leaf, np.array(index, np.int32))


@ft.lru_cache
def _copy_into(sharding: Sharding | None) -> Callable[[jax.Array, np.ndarray], jax.Array]:
    # Arrays that are not stacked are copied too: JAX caches the host's copy for the lifetime of an
    # array, and this copy is dropped soon.
    return jax.jit(lambda leaf, at: jnp.copy(leaf[tuple(at)]), out_shardings=sharding)
