"""Checkpoints are nested dicts of arrays that Orbax writes, and a page of JSON."""

import contextlib
import errno
import functools as ft
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from ..core._json import read_json
from ._checksums import ALGORITHM, FILE, find_damage, kind_of_checksums
from ._orbax import (
    ARRAYS,
    METADATA,
    CheckpointDamaged,
    Names,
    check_size,
    get,
    make_checkpointer,
    orbax_args,
    read_arrays,
    reading,
    saved_arrays,
)

FORMAT = 1
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP)
LIBRARIES = ("redcoast", "jax", "equinox", "optax", "orbax-checkpoint")
ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
ROOT = "value"  # the name of an array that is the whole tree


class CheckpointMismatch(ValueError):
    """A checkpoint that is whole, but not of the tree it was asked for."""


def save_checkpoint(
    path: str | Path, tree: PyTree, *, metadata: Mapping[str, Any] | None = None
) -> None:
    """Saves the arrays of a tree as a nested dict, with Orbax.

    The checkpoint does not depend on how the arrays are split, and reads back with Orbax alone.
    It appears under its name only when it is whole. What is no array (functions, sizes, Python
    numbers) belongs to the code and is not saved.

    **Arguments:**

    - `path`: a directory that does not exist yet.
    - `tree`: any PyTree; typed PRNG keys are saved as their data.
    - `metadata`: what else to keep, as JSON can hold it.

    **Raises:**

    `ValueError` if something stands at `path` already, or if the tree holds no array.

    !!! Example

        ```python
        rc.save_checkpoint("models/final", model, metadata={"perplexity": 12.5})
        ```
    """
    path = Path(path).expanduser().absolute()
    if path.exists() or path.is_symlink():
        raise ValueError(
            f"{path} exists already, and a checkpoint never overwrites anything. Choose another "
            "path, or remove it first."
        )
    with make_checkpointer(background=False) as checkpointer:
        checkpointer.save(path, args=orbax_args(*arrays_and_document(tree, metadata or {})))


def arrays_and_document(
    tree: PyTree, metadata: Mapping[str, Any]
) -> tuple[dict[Names, Any], dict[str, Any]]:
    """What is to be written of a tree: its arrays, and the JSON beside them."""
    flat = flatten_arrays(tree)
    if not flat:
        raise ValueError("The tree holds no array, so that there is nothing to save.")
    flat = {_full((), names): x for names, x in flat.items()}
    for names, x in flat.items():
        if not _is_key(x) and x.dtype.kind in "OSU":
            raise TypeError(
                f"{'/'.join(names)} is an array of {x.dtype}. Only numbers and booleans are saved."
            )
    keys = {"/".join(p): str(jax.random.key_impl(x)) for p, x in flat.items() if _is_key(x)}
    document = {
        "format": FORMAT,
        "versions": dict(_versions()),
        "prng_keys": keys,
        "checksums": ALGORITHM,
        "metadata": json.loads(json.dumps(dict(metadata), default=_as_number)),
    }
    arrays = {p: jax.random.key_data(x) if _is_key(x) else x for p, x in flat.items()}
    return arrays, document


def _as_number(x: Any) -> Any:
    if hasattr(x, "item") and np.ndim(x) == 0:  # metrics are often scalars of NumPy or JAX
        return x.item()
    raise TypeError(
        f"`metadata` holds a {type(x).__name__}, which JSON cannot hold. Use numbers and text."
    )


@ft.cache
def _versions() -> tuple[tuple[str, str], ...]:
    # Looking them up takes longer than all else that a save makes the loop wait for.
    return tuple((name, importlib.metadata.version(name)) for name in LIBRARIES)


def load_checkpoint(
    path: str | Path,
    like: PyTree | None = None,
    *,
    shardings: PyTree[NamedSharding | None] | None = None,
    subtree: str | None = None,
) -> PyTree:
    """Loads a checkpoint, whole or in part, onto any mesh.

    **Arguments:**

    - `path`: the directory of the checkpoint.
    - `like`: a tree of the structure that was saved, concrete or abstract
        (`eqx.filter_eval_shape`). Its arrays say shapes and dtypes; all else is taken from it.
    - `shardings`: where to put the arrays, as [`redcoast.infer_shardings`][] says for `like`.
        Without, arrays go where those of `like` are.
    - `subtree`: a path inside the checkpoint such as `"model"` or `"model/layers/0"`: only what
        is below is read, and `like` is of the structure of that part.

    **Returns:**

    A tree like `like`. Without `like`, the nested dict, of NumPy arrays.

    **Raises:**

    `ValueError` if there is no checkpoint; if it is damaged, of which the message names the file;
    if `subtree` is not in it; or if structure, shapes or dtypes differ from those of `like`: the
    message names the paths that differ.

    !!! Example

        ```python
        model = rc.load_checkpoint("runs/lm/checkpoints/500", model, subtree="model")
        ```
    """
    path = Path(path).expanduser().absolute()
    # All of it, as this may be one process of several.
    check_whole(path)
    return load_arrays(path, read_metadata(path), like, shardings=shardings, subtree=subtree)


def load_arrays(
    path: Path,
    document: Mapping[str, Any],
    like: PyTree | None,
    *,
    shardings: PyTree[NamedSharding | None] | None = None,
    subtree: str | None = None,
) -> PyTree:
    """Loads a checkpoint of which the files are known to be whole, and the metadata are read."""
    verified = document.get("checksums") is not None
    with reading(path, verified=verified):
        everything = saved_arrays(path)
    prefix = tuple(subtree.strip("/").split("/")) if subtree else ()
    saved = {p: x for p, x in everything.items() if p[: len(prefix)] == prefix}
    if not saved:
        tops = ", ".join(sorted({p[0] for p in everything}))
        raise CheckpointMismatch(f"{path} has nothing at {subtree!r}; at the top it has {tops}.")
    if like is None:
        check_size(path, saved)
        with reading(path, verified=verified):
            return _unwrap(read_arrays(path, dict.fromkeys(saved)), prefix)
    flat = flatten_arrays(like)
    places = {} if shardings is None else flatten_arrays(shardings, Sharding)
    _check_same(path, {_full(prefix, p): x for p, x in flat.items()}, saved)
    with reading(path, verified=verified):
        found = read_arrays(
            path, {_full(prefix, p): _placed(x, places.get(p)) for p, x in flat.items()}
        )
    impls = document["prng_keys"]
    read = {
        p: _typed(x, get(found, _full(prefix, p)), impls.get("/".join(_full(prefix, p))))
        for p, x in flat.items()
    }
    return _fill(like, read)


def _fill(like: PyTree, read: Mapping[Names, Any]) -> PyTree:
    """A tree with the arrays that were read in their places."""
    return jax.tree_util.tree_map_with_path(lambda p, x: read.get(_names(p), x), like)


def check_whole(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Reads a checkpoint, or one of so many parts of it, and compares with what was written.

    **Raises:**

    `CheckpointDamaged`, a `ValueError`, that names the file.
    """
    if not (path / ARRAYS).is_dir():
        raise CheckpointDamaged(
            f"There is no checkpoint at {path}: it has no directory {ARRAYS!r}. Pass the directory "
            "that `save_checkpoint` was given, or one of those below a run's `checkpoints`."
        )
    try:
        problem = find_damage(path, part=part, parts=parts)
    except OSError as error:
        # All other errors, such as a missing permission, say nothing of the checkpoint.
        if error.errno not in DAMAGE:
            raise
        problem = str(error)
    if problem:
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {problem}{_if_newer(path)}")


def _if_newer(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        form = read_json(path / METADATA / METADATA).get("format")
        if type(form) is int and form > FORMAT:
            return f" It says that it is of format {form}; this version reads up to {FORMAT}."
    return ""


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint."""
    file = path / METADATA / METADATA
    try:
        document = read_json(file)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {error}") from error
    form, parts = document.get("format"), ("versions", "prng_keys", "metadata")
    if type(form) is not int or not all(isinstance(document.get(part), dict) for part in parts):
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {file} is not of redcoast.")
    if form > FORMAT:
        raise CheckpointMismatch(
            f"{path} is of format {form}, written by redcoast "
            f"{document['versions'].get('redcoast')}; this version reads up to format {FORMAT}. "
            "Install that version or a newer one."
        )
    if document.get("checksums") not in (None, kind_of_checksums(path)):
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {path / FILE} is missing.")
    return document


def flatten_arrays(tree: PyTree, kinds: Any = ARRAY_TYPES) -> dict[Names, Any]:
    """The arrays of a tree, by the names along their paths."""
    flat: dict[Names, Any] = {}
    joined_before: set[str] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, kinds):
            continue
        names = _names(path)
        # Orbax joins the names with dots.
        if (joined := ".".join(names)) in joined_before:
            raise ValueError(
                f"Two arrays would be saved as {joined}: keys of dicts that differ only in '.', "
                "'/' or '%2F'. Rename one of them."
            )
        joined_before.add(joined)
        flat[names] = leaf
    return flat


def _names(path: tuple[Any, ...]) -> Names:
    # A slash inside a key must not read as a level of its own.
    return tuple(jax.tree_util.keystr((k,), simple=True).replace("/", "%2F") for k in path)


def _full(prefix: Names, names: Names) -> Names:
    return prefix + names or (ROOT,)


def _unwrap(nested: dict[str, Any], prefix: Names) -> Any:
    inner = get(nested, prefix)
    return inner[ROOT] if isinstance(inner, dict) and set(inner) == {ROOT} else inner


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stored(x: Any) -> Any:
    """Shape and dtype of an array in the checkpoint: a PRNG key is its data."""
    return jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x


def _placed(x: Any, sharding: Sharding | None) -> tuple[Any, Sharding | None]:
    """What to read, and where to: a NumPy array stays one where nothing else is said."""
    if sharding is None and not isinstance(x, (np.ndarray, np.generic)):
        sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return _stored(x), sharding


def _typed(like: Any, found: Any, impl: str | None) -> Any:
    return jax.random.wrap_key_data(found, impl=impl) if _is_key(like) else found


def _check_same(path: Path, wanted: dict[Names, Any], saved: dict[Names, Any]) -> None:
    """Names what differs between the checkpoint and the tree that it is to fill."""
    show = lambda names: "/".join(names)
    missing, extra = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or extra:
        raise CheckpointMismatch(
            f"{path} does not have the structure of `like`. "
            + f"Only in `like`: {_some(map(show, missing))}. "
            + f"Only in the checkpoint: {_some(map(show, extra))}. "
            + "Build the model and the optimizer as they were when it was saved, or read a part "
            "of it with `subtree`."
        )
    kind = lambda x: f"{np.dtype(x.dtype).name}{list(x.shape)}"
    stored = {names: _stored(x) for names, x in wanted.items()}
    differ = [
        f"{show(names)} is {kind(saved[names])} in the checkpoint and {kind(x)} in `like`"
        for names, x in sorted(stored.items())
        if (tuple(saved[names].shape), saved[names].dtype) != (tuple(x.shape), x.dtype)
    ]
    if differ:
        raise CheckpointMismatch(f"{path} holds other arrays than `like`: {_some(differ, '; ')}.")


def _some(items: Iterable[str], separator: str = ", ", most: int = 5) -> str:
    found = list(items)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return separator.join(found[:most]) + more if found else "nothing"
