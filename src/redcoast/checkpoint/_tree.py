"""Saves and loads PyTrees as nested dicts of arrays, with Orbax, and a JSON document."""

import contextlib
import errno
import functools as ft
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from ..core._donation import refuse_deleted
from ..core._dtypes import check_unmasked
from ..core._durable_files import sync_name
from ..core._errors import absolute_path, check_kind, several
from ..core._frames import hide_frames
from ..core._read_json import JSONObject, read_json
from ..core._tracing import refuse_traced
from ..core._versions import own_version
from ..distributed._kv_store import is_main
from ..sharding.tree._leaves import ArrayLike
from ._checksums import FILE, algorithm, find_damage, kind_of_checksums
from ._orbax import (
    ARRAYS,
    METADATA,
    CheckpointDamaged,
    Described,
    Names,
    Place,
    can_store,
    check_names,
    check_size,
    get,
    make_checkpointer,
    nest,
    orbax_args,
    quiet_orbax,
    read_arrays,
    reading,
    saved_arrays,
)
from ._shared_directory import check_shared

FORMAT = 1  # of the JSON document
PATTERN_LETTERS = frozenset("*?[")  # that `glob` does not take as they are
# Errors of missing files, files in place of directories, bad disks and links in a circle.
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP)
LIBRARIES = ("jax", "equinox", "optax", "orbax-checkpoint")
ROOT = "value"  # the name of an array that is the entire tree
_WHICH = (
    "Pass the path that was given to `save_checkpoint`, or a step's directory inside a run's "
    "`checkpoints`."
)


class CheckpointMismatch(ValueError):
    """Raised if a checkpoint does not match the model or state to be loaded.

    !!! Example

        ```python
        rc.save_checkpoint("models/small", {"w": jnp.zeros(3)})
        try:
            rc.load_checkpoint("models/small", {"w": jnp.zeros(4)})
        except rc.CheckpointMismatch as error:
            print(error)
        ```
    """

    __module__ = "redcoast"


@hide_frames
def save_checkpoint(
    path: str | Path, tree: PyTree, *, metadata: Mapping[str, object] | None = None
) -> None:
    """Saves the arrays of a PyTree as a nested dict, with Orbax.

    The checkpoint does not depend on the sharding of the arrays, and can be read with Orbax alone.
    It is written atomically, and its files are synced to the disk. Leaves that are not arrays
    (functions, sizes, Python numbers) belong to the code and are not saved.

    **Arguments:**

    - `path`: a directory that does not exist yet.
    - `tree`: any PyTree; typed PRNG keys are saved as their data.
    - `metadata`: other values to save, of types that JSON supports.

    **Raises:**

    `ValueError` if `path` exists already, if its parent is not shared by all processes, or if no
    array of the tree has elements. `TypeError` if an array or a value of the metadata has a type
    that cannot be saved.

    !!! Example

        ```python
        rc.save_checkpoint("models/final", model, metadata={"perplexity": 12.5})
        ```
    """
    refuse_traced(tree, "save_checkpoint", "Save the results of the compiled function.")
    refuse_deleted(tree, "The tree", "Save the state that the step returned.")
    path = storable_path("path", path)
    check_shared(path.parent)
    with _one_writer(path.parent):
        if path.exists() or path.is_symlink():
            raise ValueError(
                f"{path} exists already, and a checkpoint never overwrites anything. Choose "
                "another path, or remove it first."
            )
        with quiet_orbax(), make_checkpointer(background=False) as checkpointer:
            checkpointer.save(path, args=orbax_args(*arrays_and_document(tree, metadata or {})))
        if is_main():
            sync_name(path)


def storable_path(name: str, path: str | Path) -> Path:
    """The absolute path of a directory that Orbax can write to.

    Raises `ValueError` for a path whose bytes are not UTF-8, where a save would fail, and for one
    with letters of patterns, where Orbax would not find what it has written.
    """
    absolute = absolute_path(name, path)
    if not _is_utf8(str(absolute)):
        raise ValueError(
            f"`{name}` is {str(absolute)!r}, whose letters are not encoded as UTF-8, and Orbax "
            "saves nothing there. Choose another path."
        )
    if not PATTERN_LETTERS.isdisjoint(str(absolute)):
        raise ValueError(
            f"`{name}` is {str(absolute)!r}, and Orbax takes '*', '?' and '[' in a path for a "
            "pattern: a checkpoint that is saved there could not be read. Choose another path."
        )
    return absolute


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding are single surrogates
        return False
    return True


@contextlib.contextmanager
def _one_writer(directory: Path) -> Iterator[None]:
    """Waits until nobody else saves in a directory, where it can be locked.

    Two writers to one path would remove and mix each other's temporary files.
    """
    with contextlib.ExitStack() as stack:
        # Windows has no such module, and some file systems have no locks of directories.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            if is_main():
                directory.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(directory, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def arrays_and_document(
    tree: PyTree, metadata: Mapping[str, object]
) -> tuple[dict[Names, np.ndarray | jax.Array], JSONObject]:
    """The arrays of a tree, and the JSON document that is saved next to them."""
    arrays: dict[Names, np.ndarray | jax.Array] = {}
    kinds: dict[str, dict[str, object]] = {}  # to read them from the arrays' files takes longer
    keys: dict[str, str] = {}  # the implementation of each PRNG key, which is saved as its data
    empty: dict[str, dict[str, object]] = {}  # Orbax does not save arrays without elements
    for names, x in arrays_to_save(tree).items():
        joined = "/".join(names)
        if _is_key(x):
            keys[joined] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        check_unmasked(x, f"The array at {joined}")
        if isinstance(x, np.bool_):  # Orbax saves other scalars of NumPy
            x = np.asarray(x)
        if x.size:
            arrays[names] = x
            kinds[joined] = {"shape": x.shape, "dtype": x.dtype.name}
        else:
            empty[joined] = {"shape": x.shape, "dtype": x.dtype.name}
    document = {
        "format": FORMAT,
        "versions": dict(_versions()),
        "prng_keys": keys,
        "checksums": algorithm(),
        "arrays": kinds,
        "empty": empty,
        "metadata": json.loads(json.dumps(dict(metadata), default=_as_number)),
    }
    return arrays, document


def arrays_to_save(tree: PyTree) -> dict[Names, PyTree]:
    """The arrays of a tree by the names under which they are saved.

    Raises `ValueError` or `TypeError` if they cannot be saved. The tree may be abstract.
    """
    flat = flatten_arrays(tree)
    if not any(x.size for x in flat.values()):
        raise ValueError("The tree has no arrays with elements, so there is nothing to save.")
    named: dict[Names, PyTree] = {}
    unknown: list[Names] = []
    for names, x in flat.items():
        full = _full((), names)
        named[full] = x
        if not _is_key(x) and not can_store(x.dtype):
            unknown.append(full)
    if unknown:
        names, x = unknown[0], named[unknown[0]]
        others = ""
        if len(unknown) > 1:
            others = f" (and {len(unknown) - 1} more arrays)"
        raise TypeError(
            f"{'/'.join(names)} is an array of {x.dtype}{others}, which a checkpoint cannot store. "
            "Only numbers and booleans can be saved, and of the narrow types int2, int4, "
            "float4_e2m1fn and most of float8. Keep it in a type that can hold its values, such as "
            "`x.astype(jnp.uint8)`, and convert it where it is used."
        )
    return named


def _as_number(x: PyTree) -> PyTree:
    if hasattr(x, "item") and np.ndim(x) == 0:  # metrics are often scalars of NumPy or JAX
        return x.item()
    raise TypeError(
        f"`metadata` contains a {type(x).__name__}, which JSON does not support. Use numbers and "
        "text."
    )


@ft.cache
def _versions() -> tuple[tuple[str, str], ...]:
    # Looking them up takes longer than everything else in a save that blocks the loop.
    others = [(name, importlib.metadata.version(name)) for name in LIBRARIES]
    return (("redcoast", own_version()), *others)


@hide_frames
def load_checkpoint(
    path: str | Path,
    like: PyTree | None = None,
    *,
    shardings: PyTree[NamedSharding | None] | None = None,
    subtree: str | None = None,
) -> PyTree:
    """Loads a checkpoint, or a part of one, onto any mesh.

    **Arguments:**

    - `path`: the directory of the checkpoint.
    - `like`: a tree with the saved structure, concrete or abstract (`eqx.filter_eval_shape`). Its
        arrays specify the shapes and dtypes. Its other leaves are copied to the result.
    - `shardings`: the shardings of the arrays, as returned by [`redcoast.infer_shardings`][] for
        `like`. By default, each array has the sharding of the array in `like`.
    - `subtree`: a path inside the checkpoint such as `"model"` or `"model/layers/0"`. Only this
        part is read, and `like` must have its structure.

    **Returns:**

    A tree with the structure of `like`; without `like`, a nested dict of NumPy arrays, or an array
    if an array was saved.

    **Raises:**

    `FileNotFoundError` if `path` does not exist. [`redcoast.CheckpointDamaged`][] if it is not a
    checkpoint, or if a file has changed since it was saved (the message names the file).
    [`redcoast.CheckpointMismatch`][] if it has no `subtree`, or if its structure, shapes or dtypes
    do not match `like` (the message names the paths). Both are `ValueError`s. `ValueError` if
    `shardings` do not match the arrays of `like`.

    !!! Example

        ```python
        model = rc.load_checkpoint("runs/lm/checkpoints/500", model, subtree="model")
        ```
    """
    refuse_traced(like, "load_checkpoint", "Load it before, and pass the arrays to the function.")
    path = absolute_path("path", path)
    check_kind("subtree", subtree, (str, NoneType), "a path inside of the checkpoint")
    if like is None and shardings is not None:
        raise ValueError(
            "`shardings` are those of the arrays of `like`, and without `like` arrays of NumPy are "
            "returned: pass `like` too, or leave `shardings` out."
        )
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint at {path}. {_WHICH}")
    # All files, because the other processes may not be loading this checkpoint.
    check_whole(path)
    return load_arrays(path, read_metadata(path), like, shardings=shardings, subtree=subtree)


def load_arrays(
    path: Path,
    document: JSONObject,
    like: PyTree | None,
    *,
    shardings: PyTree[NamedSharding | None] | None = None,
    subtree: str | None = None,
    resuming: bool = False,
) -> PyTree:
    """Loads a checkpoint whose files have been checked and whose metadata has been read.

    With `resuming`, the message about a mismatch is for users of `fit`, who pass no `like`.
    """
    verified = document.get("checksums") is not None
    empty = _empty_arrays(path, document)
    # The document's shapes count if the checksums say that it belongs to the files.
    everything = None
    if like is not None and verified:
        everything = _described_arrays(document)
    with reading(path, verified=verified):
        check_names(path)
        if everything is None:
            everything = saved_arrays(path)
        everything |= empty
    prefix = ()
    if subtree:
        prefix = tuple(subtree.strip("/").split("/"))
    saved = {p: x for p, x in everything.items() if p[: len(prefix)] == prefix}
    if not saved:
        tops = ", ".join(sorted({p[0] for p in everything}))
        raise CheckpointMismatch(f"{path} has no subtree {subtree!r}; its top level has {tops}.")
    if like is None:
        check_size(path, saved)
        with reading(path, verified=verified):
            inner = get(nest(_read(path, dict.fromkeys(saved), empty)), prefix)
        if isinstance(inner, dict) and set(inner) == {ROOT}:
            return inner[ROOT]
        return inner
    arrays = flatten_arrays(like)
    sharding_of: dict[Names, Sharding] = {}
    if shardings is not None:
        sharding_of = flatten_arrays(shardings, Sharding)
    expected = {_full(prefix, names): x for names, x in arrays.items()}
    _check_keys(path, expected, document["prng_keys"], _other_of(resuming))
    _check_match(path, expected, saved, resuming=resuming)
    if others := sharding_of.keys() - arrays.keys():
        where = several(["/".join(names) or "its root" for names in sorted(others)], 5)
        raise ValueError(
            f"`shardings` has a sharding where `like` has no array: {where}. Pass the shardings of "
            "the arrays of `like`, such as `plan.shardings.model` for a model."
        )
    wanted: dict[Names, Place] = {}  # in the order of `like`
    for names, x in arrays.items():
        wanted[_full(prefix, names)] = _placed(x, sharding_of.get(names))
    with reading(path, verified=verified):
        loaded = _read(path, wanted, empty)
        _check_read(loaded, saved)
    restored: dict[Names, np.ndarray | jax.Array] = {}
    for names, x in arrays.items():
        full = _full(prefix, names)
        restored[names] = loaded[full]
        if _is_key(x):
            impl = document["prng_keys"].get("/".join(full))
            restored[names] = jax.random.wrap_key_data(loaded[full], impl=impl)
    return jax.tree_util.tree_map_with_path(lambda path, x: restored.get(_names(path), x), like)


def _described_arrays(document: JSONObject) -> dict[Names, jax.ShapeDtypeStruct] | None:
    """The shapes and dtypes of the arrays of a checkpoint by its JSON document; `None` if it does
    not have them, as those of earlier versions do not."""
    arrays: dict[Names, jax.ShapeDtypeStruct] = {}
    try:
        for name, array in document["arrays"].items():
            kind = jax.ShapeDtypeStruct(array["shape"], jnp.dtype(array["dtype"]))
            arrays[tuple(name.split("/"))] = kind
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return arrays


def _check_read(
    loaded: Mapping[Names, np.ndarray | jax.Array], described: Mapping[Names, Described]
) -> None:
    """Raises `ValueError` if arrays are not those that the JSON document describes."""
    for names, x in loaded.items():
        shape, dtype = tuple(described[names].shape), np.dtype(described[names].dtype)
        if (x.shape, x.dtype) != (shape, dtype.newbyteorder("=")):
            raise ValueError(
                f"{'/'.join(names)} is {x.dtype}{list(x.shape)} in its file, and "
                f"{dtype}{list(shape)} in the description of the arrays"
            )


def _empty_arrays(path: Path, document: JSONObject) -> dict[Names, np.ndarray]:
    """The arrays of a checkpoint that have no elements, from its JSON document."""
    try:
        empty: dict[Names, np.ndarray] = {}
        for name, array in document.get("empty", {}).items():
            if 0 in array["shape"]:
                dtype = jnp.dtype(array["dtype"])
                empty[tuple(name.split("/"))] = np.zeros(array["shape"], dtype)
        return empty
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(
            f"The checkpoint {path} is damaged: its list of empty arrays cannot be read ({error})."
        ) from error


def _read(
    path: Path, wanted: Mapping[Names, Place | None], empty: Mapping[Names, np.ndarray]
) -> dict[Names, PyTree]:
    """Reads arrays, each with its sharding. Arrays without elements are not in the files."""
    stored = {names: place for names, place in wanted.items() if names not in empty}
    tree = {}
    if stored:
        tree = read_arrays(path, stored)
    loaded = {names: get(tree, names) for names in stored}
    for names in wanted.keys() & empty.keys():
        _, sharding = wanted[names] or (None, None)
        x = loaded[names] = empty[names]
        if sharding is not None:
            loaded[names] = jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
    return loaded


def check_whole(path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Compares the files of a checkpoint, or one of `parts` shares of them, with their checksums.

    Raises `CheckpointDamaged`, a `ValueError` that names the file.
    """
    if not (path / ARRAYS).is_dir():
        raise CheckpointDamaged(
            f"There is no checkpoint at {path}: it has no directory {ARRAYS!r}. {_inside(path)}"
        )
    try:
        problem = find_damage(path, part=part, parts=parts)
    except OSError as error:
        # Other errors, such as a missing permission, do not mean that the checkpoint is damaged.
        if error.errno not in DAMAGE:
            raise
        problem = str(error)
    if problem:
        # Another version may have files of other names.
        with contextlib.suppress(OSError, ValueError):
            form = read_json(path / METADATA / METADATA).get("format")
            if type(form) is int and form > FORMAT:
                problem += f" It has format {form}, but this version reads formats up to {FORMAT}."
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {problem}")


def _inside(path: Path) -> str:
    """Suggests a path instead of one that is not a checkpoint, such as a run's directory."""
    checkpoints: dict[int, Path] = {}
    for directory in (path, path / "checkpoints"):
        for arrays in directory.glob(f"*/{ARRAYS}"):
            name = arrays.parent.name
            if name.isdecimal():
                checkpoints[int(name)] = arrays.parent
    if not checkpoints:
        return _WHICH
    newest = checkpoints[max(checkpoints)]
    return f'Its newest checkpoint is {newest}. `subtree="model"` loads only the model.'


def read_metadata(path: Path) -> JSONObject:
    """Reads the JSON document of a checkpoint."""
    file = path / METADATA / METADATA
    try:
        document = read_json(file)
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {error}") from error
    form, parts = document.get("format"), ("versions", "prng_keys", "metadata")
    if type(form) is not int or not all(isinstance(document.get(part), dict) for part in parts):
        raise CheckpointDamaged(
            f"The checkpoint {path} is damaged: {file} was not written by redcoast."
        )
    if form > FORMAT:
        raise CheckpointMismatch(
            f"{path} has format {form}, written by redcoast "
            f"{document['versions'].get('redcoast')}; this version reads up to format {FORMAT}. "
            "Install that version or a newer one."
        )
    if document.get("checksums") not in (None, kind_of_checksums(path)):
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: {path / FILE} is missing.")
    return document


def flatten_arrays(tree: PyTree, kinds: type | UnionType = ArrayLike) -> dict[Names, PyTree]:
    """The arrays of a tree, by the names along their paths.

    Raises `ValueError` if two arrays would be saved under the same name, or if a name is one that
    Orbax cannot read again.
    """
    flat: dict[Names, PyTree] = {}
    joined_before: set[str] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, kinds):
            continue
        names = _names(path)
        # Orbax joins names with dots.
        if (joined := ".".join(names)) in joined_before:
            raise ValueError(
                f"Two arrays would be saved as {joined}, because dict keys on their paths differ "
                "only in '.', '/' or '%2F'. Rename one of them."
            )
        if "\0" in joined or not _is_utf8(joined):
            raise ValueError(
                f"An array would be saved as {joined!r}, and the name of a file cannot have these "
                "letters. Rename the dict key."
            )
        joined_before.add(joined)
        flat[names] = leaf
    return flat


def _names(path: KeyPath) -> Names:
    # A slash inside a key must not be read as a path separator.
    return tuple(jax.tree_util.keystr((k,), simple=True).replace("/", "%2F") for k in path)


def _full(prefix: Names, names: Names) -> Names:
    # An array that is the entire tree has no path.
    return prefix + names or (ROOT,)


def _is_key(x: ArrayLike) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stored(x: ArrayLike) -> ArrayLike:
    """The shape and dtype of an array as it is saved: PRNG keys are saved as their data."""
    if _is_key(x):
        return jax.eval_shape(jax.random.key_data, x)
    return x


def _placed(x: ArrayLike, sharding: Sharding | None) -> Place:
    """The array to read, and the sharding to read it with; `None` reads a NumPy array."""
    if sharding is None and not isinstance(x, (np.ndarray, np.generic)):
        sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return _stored(x), sharding


def _check_keys(
    path: Path, wanted: Mapping[Names, ArrayLike], saved: Mapping[str, str], other: str
) -> None:
    """Raises `CheckpointMismatch` if a key was saved with another implementation."""
    for names, x in wanted.items():
        impl = saved.get("/".join(names))
        if impl is None or not _is_key(x):
            continue
        dtype = jax.eval_shape(ft.partial(jax.random.key, impl=impl), 0).dtype
        if dtype != x.dtype:
            raise CheckpointMismatch(
                f"{path} has a key of the implementation {impl!r}, {dtype}, at {'/'.join(names)}, "
                f"and {other} has {x.dtype}. Their random numbers differ: pass a key such as "
                f"`jax.random.key(0, impl={impl!r})`."
            )


def _other_of(resuming: bool) -> str:
    """What a checkpoint is compared with, in messages."""
    if resuming:
        return "this run"
    return "`like`"


def _check_match(
    path: Path, wanted: dict[Names, ArrayLike], saved: dict[Names, Described], *, resuming: bool
) -> None:
    """Raises `CheckpointMismatch` if names, shapes or dtypes differ from the expected ones."""
    differences = _differences(wanted, saved, _other_of(resuming))
    if not differences:
        return
    if resuming:
        _refuse_other_parts(path, wanted, saved)
        raise CheckpointMismatch(
            f"{path} was saved with another model or optimizer. {differences} Build both as they "
            "were, or choose another directory to start a new run."
        )
    # Often a model is to be loaded, and the checkpoint has a whole state.
    parts = sorted({names[0] for names in saved})
    part = next((x for x in parts if all((x, *names) in saved for names in wanted)), None)
    remedy = (
        "Build the model and the optimizer as they were when the checkpoint was saved, or load a "
        "part of it with `subtree`."
    )
    if part is not None:
        remedy = f'All arrays of `like` are in the part `{part}`: pass `subtree="{part}"`.'
    raise CheckpointMismatch(f"{path} does not match `like`. {differences} {remedy}")


def _refuse_other_parts(
    path: Path, wanted: dict[Names, ArrayLike], saved: dict[Names, Described]
) -> None:
    """Raises `CheckpointMismatch` if only one of the run and its checkpoint averages weights, or
    has a loss scale."""
    of_run, of_checkpoint = {names[0] for names in wanted}, {names[0] for names in saved}
    only_wanted, only_saved = of_run - of_checkpoint, of_checkpoint - of_run
    if "average" in only_wanted:
        raise CheckpointMismatch(
            f"{path} was saved without an average of the weights, and this run has `average`. "
            "Leave it out; or load the state with `load_checkpoint`, and pass it to `fit` with "
            "`average` and another directory."
        )
    if "average" in only_saved:
        raise CheckpointMismatch(
            f"{path} was saved with an average of the weights, and this run has none. Pass "
            "`average`; or load the state with `load_checkpoint`, replace its `average` by `None`, "
            "and pass it to `fit` with another directory."
        )
    if "loss_scale" in only_wanted:
        raise CheckpointMismatch(
            f"{path} was saved without a loss scale, and this run has one, because it computes in "
            "float16. Pass the `compute_dtype` that the run was started with; or load the state "
            "with `load_checkpoint`, and pass it to `fit` with another directory."
        )
    if "loss_scale" in only_saved:
        raise CheckpointMismatch(
            f"{path} was saved with a loss scale, because the run computed in float16, and this "
            'run has none. Pass `compute_dtype="float16"`; or load the state with '
            "`load_checkpoint`, and pass it to `fit` with another directory."
        )


def _differences(wanted: dict[Names, ArrayLike], saved: dict[Names, Described], other: str) -> str:
    """Sentences about the names, shapes and dtypes that differ; empty if none do."""
    show = "/".join
    missing, extra = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or extra:
        return (
            f"Only in {other}: {several([*map(show, missing)], 5) or 'nothing'}. "
            f"Only in the checkpoint: {several([*map(show, extra)], 5) or 'nothing'}."
        )
    differences: list[str] = []
    for names in sorted(wanted):
        ours, theirs = _stored(wanted[names]), saved[names]
        # Machines with another order of bytes have the same values.
        own, other_dtype = (np.dtype(x.dtype).newbyteorder("=") for x in (ours, theirs))
        if tuple(ours.shape) != tuple(theirs.shape) or own != other_dtype:
            differences.append(
                f"{show(names)} is {other_dtype.name}{list(theirs.shape)} in the checkpoint and "
                f"{own.name}{list(ours.shape)} in {other}"
            )
    if not differences:
        return ""
    return f"{several(differences, 3, separator='; ')}."
