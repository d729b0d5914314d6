"""Checks that all processes of a run have the same values, programs and data."""

import itertools as it
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._control_flow import AnyJaxpr
from ..core._errors import several
from ..core._program_lines import describe_array, line_of, program_lines
from ..core._pytree import show_path
from ._kv_store import decide, exchange
from ._rendezvous import name_processes

_LONGEST = 300  # letters of a value in a message
_MOST = 200_000  # lines that are compared one by one: their checksums have to fit in one message


@dataclass(frozen=True)
class Listing:
    """A text that is compared by its checksum, and line by line if that differs.

    - `where`: where line `i` comes from, such as `train.py:12`; it is not compared.
    - `varies`: returns whether the lines are random, and therefore need not be equal. It is only
        called if the lines of processes differ.
    """

    lines: list[str]  # what is compared
    where: Callable[[int], str] = lambda _: ""
    varies: Callable[[], bool] = lambda: False


def agree(values: Mapping[str, object], listings: Mapping[str, Listing] | None = None) -> None:
    """Checks that all processes have the same values and the same lines of each listing.

    Raises `ValueError` in all processes if they disagree. It names the values and the first lines
    that differ, and the processes that have them.
    """
    if jax.process_count() == 1:
        return
    listings = listings or {}
    checksums = {name: checksum("\n".join(x.lines).encode()) for name, x in listings.items()}
    everyone = exchange("configuration", [dict(values), checksums])
    all_values, all_checksums = zip(*everyone, strict=True)
    differences = []
    for name, of_processes in _differing(all_values).items():
        # As text, because values of different types may be compared.
        texts = list(map(json.dumps, of_processes))
        differences.append(_difference(name, _parts_that_differ(texts)))
    for name in _differing(all_checksums):
        listing = listings.get(name, Listing([]))
        # Lines that are random in any process are compared by none.
        if not any(exchange("what varies", listing.varies())):
            differences.append(_first_difference(name, listing))
    if differences:
        raise ValueError(
            f"The processes of this run disagree. {' '.join(differences)} Start all of them with "
            "the same code, arguments and data."
        )


def program_listing(jaxpr: AnyJaxpr) -> Listing:
    """The equations and constants of a traced program."""
    lines = program_lines(jaxpr)
    return Listing([text for text, _ in lines], lambda i: line_of(lines[i][1]))


def tree_listing(tree: PyTree) -> Listing:
    """The paths, types and values of a tree's arrays that each process has in full."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return Listing([f"{show_path(path, 'the root')}: {describe_array(x)}" for path, x in leaves])


def agree_on_program(name: str, jaxpr: AnyJaxpr, mesh: Mesh) -> None:
    """Checks that all processes are about to run the same program, if it runs on all devices.

    Raises `ValueError` in all processes if they differ, with the first such equation and its line.
    """
    if jax.process_count() == 1:
        return
    # Processes outside of the mesh do not call this, and would be waited for.
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count():
        agree({}, {name: program_listing(jaxpr)})


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _differing(everyone: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """The values of all processes, for each name whose values differ."""
    differing = {}
    for name in it.chain.from_iterable(everyone):
        values = [of_process.get(name) for of_process in everyone]
        if any(value != values[0] for value in values):
            differing[name] = values
    return differing


def _first_difference(name: str, listing: Listing) -> str:
    """Describes the first line that differs between process 0 and any other process."""
    own = [checksum(line.encode()) for line in listing.lines[:_MOST]]
    first = decide("the lines of process 0", own)
    differs = _common_prefix([own, first])
    if own == first:
        # Another process differs, and this one takes part in the search all the same.
        differs = _MOST
    # The first line at which any process differs from process 0.
    at = min(exchange("where lines differ", differs))
    line, where = "nothing", ""
    if at < len(listing.lines):
        line, where = listing.lines[at], listing.where(at)
    everyone = exchange("lines that differ", [line[: 20 * _LONGEST], where])
    lines, places = zip(*everyone, strict=True)
    texts = _parts_that_differ(lines)
    for process, where in enumerate(places):
        if where:
            texts[process] += f" ({where})"
    return _difference(name, texts)


def _common_prefix(sequences: Sequence[Sequence[str]]) -> int:
    """The number of items with which all sequences begin."""
    count = 0
    for items in zip(*sequences, strict=False):
        if len({*items}) > 1:
            break
        count += 1
    return count


def _parts_that_differ(lines: Sequence[str]) -> list[str]:
    """Shortens long lines to the parts around the first difference."""
    begin, before = 0, ""
    if max(map(len, lines)) > _LONGEST:
        # With something before the difference, to recognise the line by.
        begin = max(0, _common_prefix(lines) - _LONGEST // 3)
    if begin:
        before = "..."
    shortened: list[str] = []
    for line in lines:
        part = line[begin:]
        if len(part) > _LONGEST:
            part = f"{part[:_LONGEST]}..."
        shortened.append(before + part)
    return shortened


def _difference(name: str, texts: Sequence[str]) -> str:
    """Lists which processes have which version of one value."""
    who: dict[str, list[int]] = {}
    for process, text in enumerate(texts):
        who.setdefault(text, []).append(process)
    versions = [f"{text} on {name_processes(ids)}" for text, ids in who.items()]
    return f"{name}: {several(versions, 8, separator='; ', noun=' versions')}."
