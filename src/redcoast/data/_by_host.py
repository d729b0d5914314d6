"""Sources of which each host reads its own part."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from ..core._errors import check_functions
from ..distributed._mesh import batch_sharding, batch_shards
from ._sources import read_source
from ._streams import Stream


class SplitByHost:
    """The source that [`redcoast.split_by_host`][] returns."""

    def __init__(self, make: Callable[[int, int], object]):
        self.make = make


def split_by_host(make: Callable[[int, int], object]) -> SplitByHost:
    """Creates a stream of which each process reads its own part, for `fit` and `batches`.

    Without it, each process reads the entire stream, and uses only the rows of its own devices.
    Sources with an index do not need it: each process reads only the examples of its own rows.
    Parts may have different lengths, and each is read again when it ends, so pass `steps`. A
    checkpoint contains the position in each part, and a run can only be resumed with the same
    number of parts.

    **Arguments:**

    - `make`: `make(part, parts)` returns a stream for [`redcoast.fit`][]: an iterable, or a
        function that returns one. `parts` is the number of processes with different rows of the
        batch, and `part` is between 0 and `parts - 1`. Processes that share the rows of a batch,
        because `model` extends over them, read the same part.

    **Returns:**

    A source to pass as `examples`. `batch_size` must be divisible by data x fsdp.

    **Raises:**

    `TypeError` if `make` is not a function.

    !!! Example

        ```python
        files = ["a.txt", "b.txt", "c.txt"]
        source = rc.split_by_host(lambda part, parts: files[part::parts].__iter__)
        ```
    """
    check_functions(make=make)
    return SplitByHost(make)


def host_part(mesh: Mesh) -> tuple[int, int]:
    """Returns the index of the part of a batch on this process's devices, and the number of
    parts."""
    rows = batch_shards(mesh)  # a row for each shard
    indices = batch_sharding(mesh, rows).devices_indices_map((rows,))
    rows_of: dict[int, set[int]] = {}  # the rows on the devices of each process
    for device, (index,) in indices.items():
        rows_of.setdefault(device.process_index, set()).update(range(*index.indices(rows)))
    # Processes that share rows, as if `model` spans them, read the same part.
    parts = sorted({tuple(sorted(part)) for part in rows_of.values()})
    sizes = set(map(len, parts))
    distinct = set().union(*parts)
    if sum(map(len, parts)) != len(distinct) or len(sizes) > 1:
        raise ValueError(
            "With `split_by_host`, two processes must hold the same rows of a batch, or no row in "
            "common. On this mesh, they have some in common. Let `model` be a multiple or a "
            "divisor of the number of devices of a process."
        )
    return parts.index(tuple(sorted(rows_of[jax.process_index()]))), len(parts)


def read_part(source: SplitByHost, mesh: Mesh, batch_size: int | None) -> tuple[Stream, int, int]:
    """Returns the stream that this process reads, the index of its part, and the number of
    parts."""
    shards = batch_shards(mesh)
    if batch_size is None or batch_size % shards:
        raise ValueError(
            f"With `split_by_host`, `batch_size` must be divisible by data x fsdp = {shards}, and "
            f"is {batch_size}."
        )
    part, parts = host_part(mesh)
    stream = read_source(source.make(part, parts), name=f"make({part}, {parts})")
    if not isinstance(stream, Stream):
        raise TypeError(
            "What `make` returned to `split_by_host` has a length and an index. Pass all examples "
            "as `examples`: each process reads only the examples of its own rows."
        )
    return stream, part, parts
