"""The device groups of a collective, and the mesh axes that they span."""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

Groups = Sequence[Sequence[int]]

_MESH = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<over>[^}]*)\}"
)
_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_FACTOR = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_REPLICA_GROUPS = re.compile(
    r"\breplica_groups=(\{[\d,{} ]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|" + _MESH.pattern + ")"
)
_PAIRS = re.compile(r"\b(source_target_pairs=\{[\d,{} ]*\})")


def written_groups(attributes: str) -> str:
    """The attribute of a collective that lists its groups; empty for one group of all devices."""
    match = _PAIRS.search(attributes) or _REPLICA_GROUPS.search(attributes)
    if match is not None:
        return match[1]
    if "replica_groups=" in attributes:
        raise ValueError(
            f"The HLO text has replica groups in an unknown format: {attributes[:200]!r}."
        )
    return ""


# Most collectives of a program have one of few sets of groups.
@lru_cache(maxsize=4096)
def axes_and_size(groups: str, axes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which the devices of a group differ, and the size of a group."""
    devices = parse_groups(groups, prod(size for _, size in axes))
    return spanned_axes(devices, dict(axes)), max(len(group) for group in devices)


def spanned_axes(groups: Groups, axes: dict[str, int]) -> tuple[str, ...]:
    """The axes, in the order of the mesh, along which the devices of a group differ."""
    sizes = tuple(axes.values())
    spanned: set[str] = set()
    for group in groups:
        if max(group) >= prod(sizes):
            raise ValueError(
                f"A collective of the HLO text names device {max(group)}, but the mesh has "
                f"{prod(sizes)} devices. Pass the mesh that the program was compiled for."
            )
        coordinates = np.unravel_index(np.asarray(group), sizes)  # of the group, for each axis
        for axis, along in zip(axes, coordinates, strict=True):
            if (along != along[0]).any():
                spanned.add(axis)
    return tuple(filter(spanned.__contains__, axes))


def parse_groups(text: str, devices: int) -> Groups:
    """Parses groups of devices in any of the formats of HLO text."""
    if text.startswith("source_target_pairs="):
        return connected(_lists(text), devices)
    # `{{0,1},{2,3}}`, or `{}` or nothing for all devices.
    if text.startswith("{") or not text:
        return _lists(text) or [range(devices)]
    try:
        if text.startswith("mesh"):
            array = _mesh_groups(text)
        else:  # `[2,4]<=[4,2]T(1,0)`: 2 groups of 4 of such an array
            shape, order = text.split("<=")
            array = _transposed(order).reshape(_numbers(shape))
    except (KeyError, ValueError) as error:
        raise ValueError(f"The HLO text has invalid replica groups: {text}.") from error
    return array.reshape(-1, array.shape[-1]).tolist()  # (groups, devices of a group)


def _lists(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d, ]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))


def _transposed(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: 0, 1, 2, ... as a 4 x 2 array, transposed."""
    dims, _, order = text.partition("T")
    array = np.arange(prod(_numbers(dims))).reshape(_numbers(dims))
    if not order:
        return array
    return array.transpose(_numbers(order))


def _mesh_groups(text: str) -> np.ndarray:
    """`mesh['a'=4,'b'=2] {'b','a':(2)2}`: groups along `b` and along a factor of 2 of `a`.

    `'a':(2)2` is the factor of size 2 after a factor of size 2. `device_ids` gives the order of the
    devices, if it is not 0, 1, 2, ...
    """
    match = _MESH.fullmatch(text)
    assert match is not None
    axes = {axis: int(size) for axis, size in _AXIS.findall(match["axes"])}
    # Of each axis, the factors that groups are along, as (size of the factors before, size).
    factors: dict[str, list[tuple[int, int]]] = {axis: [] for axis in axes}
    for axis, before, size in _FACTOR.findall(match["over"]):
        if size:
            factors[axis].append((int(before), int(size)))
        else:
            factors[axis].append((1, axes[axis]))
    # Each axis becomes several dimensions: its factors, and what is between and after them.
    dims: list[int] = []
    over: list[int] = []  # the dimensions that groups are along
    group_size = 1
    for axis, size in axes.items():
        slower = 1
        for before, factor in sorted(factors[axis]):
            over.append(len(dims) + 1)
            group_size *= factor
            dims += [before // slower, factor]
            slower = before * factor
        dims.append(size // slower)
    rest = [dim for dim in range(len(dims)) if dim not in over]
    # A transposed array, `[4,2]T(1,0)`, or a list.
    written = match["ids"]
    if written is None:
        ids = np.arange(prod(dims))
    elif written.startswith("["):
        ids = _transposed(written)
    else:
        ids = np.asarray(_numbers(written))
    ids = ids.reshape(dims)
    return ids.transpose(rest + over).reshape(-1, group_size)


def connected(pairs: Groups, devices: int) -> Groups:
    """The connected components of source-target pairs; other devices form groups of one."""
    groups = {device: {device} for device in range(devices)}  # the group of each device
    for source, target in pairs:
        merged = groups.setdefault(source, {source}) | groups.setdefault(target, {target})
        groups |= dict.fromkeys(merged, merged)
    return sorted({tuple(sorted(group)) for group in groups.values()})
