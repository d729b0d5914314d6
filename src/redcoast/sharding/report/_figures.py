"""A plan's figures as plain data."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec as P

from ..tree._overrides import spec_parts
from ..tree._rows import Row

ROLES = ("parameter", "optimizer state", "other")


def make_report(rows: Sequence[Row], axes: dict[str, int]) -> dict[str, Any]:
    """Rows, totals by role and what is whole, as dicts and lists of text and numbers."""
    drawn = [_row(row, axes) for row in rows]
    return {
        "mesh": dict(axes),
        "rows": drawn,
        "totals": {"all": _total(drawn)}
        | {role: _total([row for row in drawn if row["role"] == role]) for role in ROLES},
        "replicated": [
            {key: row[key] for key in ("path", "shape", "bytes", "role", "reason")}
            for row in drawn
            if row["parts"] == 1
        ],
    }


def _row(row: Row, axes: dict[str, int]) -> dict[str, Any]:
    parts = spec_parts(row.spec, axes)
    return {
        "path": row.leaf.name,
        "shape": list(row.leaf.shape),
        "dtype": str(row.leaf.dtype),
        "spec": _plain(row.spec),
        "reason": row.reason,
        "role": row.role,
        "parts": parts,
        "bytes": row.leaf.bytes,
        "bytes_per_device": row.leaf.bytes // parts,
    }


def _plain(spec: P) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def _total(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {
        "arrays": len(rows),
        "bytes": sum(row["bytes"] for row in rows),
        "bytes_per_device": sum(row["bytes_per_device"] for row in rows),
    }
