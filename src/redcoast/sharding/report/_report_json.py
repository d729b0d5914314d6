"""A plan's report as dicts and lists, for `json.dumps`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from . import _data as data

# The names of the sums, in the order of the fields of `Totals`.
_ROLES = ("all", "parameter", "optimizer state", "other")
_REPLICATED = ("path", "shape", "bytes", "role", "reason")


def report_to_json(report: data.PlanReport) -> dict[str, Any]:
    """All of a report; what was inferred from a program is beside the arrays."""
    rows = list(map(array_to_json, report.arrays))
    replicated: list[dict[str, Any]] = []
    for row in rows:
        if row["parts"] == 1:  # what a reader looks for first: it takes memory on every device
            replicated.append({key: row[key] for key in _REPLICATED})
    totals = asdict(report.totals).values()
    without_program = {
        "mesh": dict(report.mesh),
        "rows": rows,
        "totals": dict(zip(_ROLES, totals, strict=True)),
        "replicated": replicated,
        "not_done": list(map(asdict, report.not_done)),
    }
    return without_program | program_to_json(report.program_or_none)


def array_to_json(array: data.PlannedArray) -> dict[str, Any]:
    return {
        "path": array.path,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "spec": _lists(tuple(array.spec)),
        "kind": array.reason.kind,
        "reason": array.reason.text,
        "together": array.reason.together,
        "role": array.role,
        "parts": array.parts,
        "bytes": array.bytes,
        "bytes_per_device": array.bytes_per_device,
    }


def program_to_json(program: data.ProgramReport | None) -> dict[str, Any]:
    """The figures of a program; none for a plan made without a function."""
    if program is None:
        return {}
    figures = asdict(program)
    # Most programs have none of these.
    if not program.split_examples:
        del figures["split_examples"]
    if program.recomputed is None:
        del figures["recomputed"]
    if not program.offloaded:
        del figures["offloaded"]
    figures["memory"]["total"] = program.memory.total
    figures["coupled"] = []
    if program.coupled is not None:
        figures["coupled"] = [asdict(program.coupled)]
    figures["traffic"] = list(map(_traffic_to_json, program.traffic))
    return _lists(figures)


def _traffic_to_json(traffic: data.Traffic) -> dict[str, str | int]:
    return {
        "axis": traffic.axis,
        "kind": traffic.kind,
        "cause": traffic.cause,
        "bytes": traffic.bytes,
    }


def _lists(value: Any) -> Any:
    """A value with lists in place of tuples, also inside dicts and tuples."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return list(map(_lists, value))
    return value
