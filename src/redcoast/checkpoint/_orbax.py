"""Arrays in a nested dict, to and from Orbax."""

import contextlib
import functools as ft
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ..core._json import read_json
from ._checksums import write_checksums

ARRAYS = "state"
METADATA = "metadata"
Names = tuple[str, ...]
# What arrays may take in memory beyond this times their bytes on disk, and a gigabyte, are no
# arrays that were saved: zstd makes zeros smaller than that by no more.
MOST_COMPRESSED, SPARE_BYTES = 2**16, 2**30


class CheckpointDamaged(ValueError):
    """A checkpoint of which something is missing, or is not as it was written."""


def make_checkpointer(*, background: bool, barrier: Any = None) -> Any:
    """An Orbax checkpointer that leaves checksums in what it writes.

    `barrier(key=..., timeout_ms=...)` is where all processes wait for each other in the background,
    in the place of Orbax's.
    """
    import orbax.checkpoint as ocp

    # Made in the background, directories that cannot be made would leave threads behind that wait
    # for them for twenty minutes, and the process with them.
    how = ocp.AsyncOptions(create_directories_asynchronously=False, barrier_sync_fn=barrier)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(async_options=how)
    )
    finish = handler.finalize

    def finalize(directory: Any) -> None:
        # All processes have written, and process 0 alone is here, before the checkpoint gets its
        # name; in the background, if it is saved there.
        finish(directory)
        write_checksums(Path(directory))

    # A subclass would have to be registered with Orbax, and its name be in the checkpoints.
    handler.finalize = finalize
    if background:
        return ocp.AsyncCheckpointer(handler, async_options=how)
    return ocp.Checkpointer(handler)


def orbax_args(flat: Mapping[Names, Any], document: dict[str, Any]) -> Any:
    """What Orbax is to write: the arrays in a nested dict, and the JSON beside them."""
    import orbax.checkpoint as ocp

    return ocp.args.Composite(
        **{ARRAYS: ocp.args.PyTreeSave(nest(flat)), METADATA: ocp.args.JsonSave(document)}
    )


def saved_arrays(path: Path) -> dict[Names, Any]:
    """Shapes and dtypes of all the arrays in a checkpoint."""
    import orbax.checkpoint as ocp
    from etils import epath

    _check_names(path)
    tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path / ARRAYS)).tree
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = {tuple(jax.tree_util.keystr((k,), simple=True) for k in p): x for p, x in leaves}
    for names, x in found.items():
        if not hasattr(x, "shape"):  # what Orbax makes of a type that it does not know
            raise CheckpointDamaged(f"{path / ARRAYS} says of {'/'.join(names)} no shape.")
    return found


def read_arrays(
    path: Path, wanted: Mapping[Names, tuple[Any, Sharding | None] | None]
) -> dict[str, Any]:
    """Reads arrays, each to where it is wanted; as NumPy arrays where nothing is said."""
    import orbax.checkpoint as ocp
    from etils import epath

    def how(place: tuple[Any, Sharding | None] | None) -> ocp.RestoreArgs:
        if place is None or place[1] is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=place[1], global_shape=place[0].shape)

    args = ocp.args.PyTreeRestore(
        item=nest(dict.fromkeys(wanted, 0)),
        restore_args=nest({names: how(place) for names, place in wanted.items()}),
        partial_restore=True,
    )
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(path / ARRAYS), args=args)


@contextlib.contextmanager
def reading(path: Path, *, verified: bool) -> Iterator[None]:
    """Says of what Orbax raises on unexpected files which checkpoint it was. If their checksums
    are right, that is no damage, and the checkpoint before it may not be used in its place."""
    try:
        yield
    except (CheckpointDamaged, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        if verified:
            raise ValueError(f"{path} cannot be read, although it is whole: {reason}") from error
        raise CheckpointDamaged(f"{path} is damaged: {reason}") from error


def check_size(path: Path, arrays: Mapping[Names, Any]) -> None:
    """Refuses arrays that claim more memory than files so small can fill."""
    stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    claimed = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays.values())
    if claimed > stored * MOST_COMPRESSED + SPARE_BYTES:
        raise CheckpointDamaged(
            f"{path / ARRAYS} claims to hold arrays of {claimed:,} bytes in files of {stored:,}."
        )


def _check_names(path: Path) -> None:
    """Reads the files of JSON that Orbax would read without bounds, and refuses names that are
    paths to somewhere else."""
    file = path / ARRAYS / "_METADATA"
    for other in (path / ARRAYS).glob("array_metadatas/*"):
        read_json(other)
    if (path / ARRAYS / "_sharding").exists():
        read_json(path / ARRAYS / "_sharding")
    for entry in read_json(file)["tree_metadata"].values():
        for key in entry["key_metadata"]:
            if {"/", "\0"} & set(str(key["key"])):  # ours have "%2F" in their place
                raise ValueError(f"{file} names an array {key['key']!r}, which leads elsewhere")


def nest(flat: Mapping[Names, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for names, x in flat.items():
        inner = nested
        for name in names[:-1]:
            inner = inner.setdefault(name, {})
        inner[names[-1]] = x
    return nested


def get(nested: Any, names: Names) -> Any:
    return ft.reduce(lambda inner, name: inner[name], names, nested)
