"""Checks that all processes of a run have the same values, programs and data."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._control_flow import AnyJaxpr
from ..core._errors import several
from ..core._program_lines import describe_array, line_of, program_lines
from ..core._pytree import show_path
from ._kv_store import TIMEOUT, decide, exchange
from ._rendezvous import name_processes

_LONGEST = 300  # letters of a value in a message
_MOST = 200_000  # lines that are compared one by one: their checksums have to fit in one message


@dataclass(frozen=True)
class Listing:
    """A text that is compared by its checksum, and line by line if that differs.

    **Attributes:**

    - `lines`: what is compared.
    - `where`: where line `i` comes from, such as `train.py:12`; it is not compared.
    - `varies`: returns whether the lines are random, and therefore need not be equal. It is only
        called if the lines of processes differ.
    """

    lines: list[str]
    where: Callable[[int], str] = lambda _: ""
    varies: Callable[[], bool] = lambda: False


def agree(
    values: Mapping[str, Any],
    listings: Mapping[str, Listing] | None = None,
    *,
    timeout: float = TIMEOUT,
) -> None:
    """Checks that all processes have the same values and the same lines of each listing.

    **Raises:**

    `ValueError` in all processes if they disagree. It names the values and the first lines that
    differ, and the processes that have them.
    """
    if jax.process_count() == 1:
        return
    listings = listings or {}
    checksums = {name: checksum("\n".join(x.lines).encode()) for name, x in listings.items()}
    everyone = exchange("configuration", [dict(values), checksums], timeout=timeout)
    said = [
        _difference(name, _parts_that_differ([json.dumps(value) for value in found]))
        for name, found in _differing([x[0] for x in everyone]).items()
    ]
    for name in _differing([x[1] for x in everyone]):
        listing = listings.get(name, Listing([]))
        if not any(exchange("what varies", listing.varies(), timeout=timeout)):
            said.append(_first_difference(name, listing))
    if said:
        raise ValueError(
            f"The processes of this run disagree. {' '.join(said)} Start all of them with the same "
            "code, arguments and data."
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

    **Raises:**

    `ValueError` in all processes if they differ, with the first such equation and its line.
    """
    if jax.process_count() == 1:
        return
    if len({device.process_index for device in mesh.devices.flat}) == jax.process_count():
        agree({}, {name: program_listing(jaxpr)})


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _differing(everyone: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of all processes, for each name whose values differ."""
    names = dict.fromkeys(name for values in everyone for name in values)
    by_name = {name: [values.get(name) for values in everyone] for name in names}
    return {name: values for name, values in by_name.items() if any(x != values[0] for x in values)}


def _first_difference(name: str, listing: Listing) -> str:
    """Describes the first line that differs between process 0 and any other process."""
    own = [checksum(line.encode()) for line in listing.lines[:_MOST]]
    first = decide("the lines of process 0", own)
    pairs = zip(own, first, strict=False)
    shortest = min(len(own), len(first))
    differs = next((i for i, (line, other) in enumerate(pairs) if line != other), shortest)
    is_same = len(own) == len(first) == differs
    at = min(exchange("where lines differ", _MOST if is_same else differs))
    line = listing.lines[at] if at < len(listing.lines) else "nothing"
    where = listing.where(at) if at < len(listing.lines) else ""
    everyone = exchange("lines that differ", [line[: 20 * _LONGEST], where])
    shown = _parts_that_differ([line for line, _ in everyone])
    places = [where for _, where in everyone]
    texts = [f"{x} ({where})" if where else x for x, where in zip(shown, places, strict=True)]
    return _difference(name, texts)


def _parts_that_differ(lines: Sequence[str]) -> list[str]:
    """Shortens long lines to the parts around the first difference."""
    letters = enumerate(zip(*lines, strict=False))
    shortest = min(map(len, lines))
    same = next((i for i, column in letters if len(set(column)) > 1), shortest)
    begin = max(0, same - _LONGEST // 3) if max(map(len, lines)) > _LONGEST else 0
    before = "..." if begin else ""
    return [before + _shortened(line[begin:]) for line in lines]


def _difference(name: str, texts: Sequence[str]) -> str:
    """Lists which processes have which version of one value."""
    who: dict[str, list[int]] = {}
    for process, text in enumerate(texts):
        who.setdefault(text, []).append(process)
    said = [f"{text} on {name_processes(ids)}" for text, ids in who.items()]
    return f"{name}: {several(said, 8, separator='; ', noun=' versions')}."


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
