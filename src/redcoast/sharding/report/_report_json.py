"""A plan's report to JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..solver._figures import Arithmetic, Memory, Pipelining
from ..solver._memory import DEFAULT_MEMORY
from ..tree._reason import Kind, Reason
from ._data import (
    ClosedOver,
    Coupling,
    Hindrance,
    PlannedArray,
    PlanReport,
    ProgramReport,
    Repeated,
    Traffic,
    TrafficKind,
)

_ROLES = ("all", "parameter", "optimizer state", "other")
_REPLICATED = ("path", "shape", "bytes", "role", "reason")


def report_to_json(report: PlanReport) -> dict[str, Any]:
    """All of a report; what was inferred from a program is beside the arrays."""
    arrays = [array_to_json(array) for array in report.arrays]
    totals = asdict(report.totals).values()
    return {
        "mesh": dict(report.mesh),
        "rows": arrays,
        "totals": dict(zip(_ROLES, totals, strict=True)),
        "replicated": [{k: row[k] for k in _REPLICATED} for row in arrays if row["parts"] == 1],
        "not_done": [asdict(one) for one in report.not_done],
    } | program_to_json(report.program_or_none)


def array_to_json(array: PlannedArray) -> dict[str, Any]:
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


def program_to_json(program: ProgramReport | None) -> dict[str, Any]:
    """The figures of a program; none for a plan made without a function."""
    if program is None:
        return {}
    return _lists(asdict(program)) | {
        "coupled": [] if program.coupled is None else [asdict(program.coupled)],
        "traffic": [
            {"axis": one.axis, "kind": one.kind, "cause": one.cause, "bytes": one.bytes}
            for one in program.traffic
        ],
    }


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(one) for key, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, tuple) else value


def program_from_json(data: Mapping[str, Any]) -> ProgramReport:
    """Reads what `program_to_json` returns; files of earlier versions lack some entries."""
    memory = data["device_memory"]
    return ProgramReport(
        batch_axes=tuple(data["batch_axes"]),
        model_axes=tuple(data["model_axes"]),
        batch=data["batch"],
        batch_sizes=tuple(data.get("batch_sizes", ())),
        not_rows=data["not_rows"],
        hindrances=tuple(Hindrance(**one) for one in data["hindrances"]),
        traffic=tuple(map(_traffic, data["traffic"])),
        closed_over=tuple(map(_closed_over, data.get("closed_over", ()))),
        coupled=next((Coupling(**one) for one in data.get("coupled", ())), None),
        unknown=data["unknown"],
        arithmetic=Arithmetic(**data["arithmetic"]),
        repeated=tuple(Repeated(**one) for one in data.get("repeated", ())),
        memory=Memory(**{"closed_over": 0} | data["memory"]),
        device_memory=memory,
        device_memory_known=data.get("device_memory_known", memory != DEFAULT_MEMORY),
        sequences=data.get("sequences", False),
        pipeline=_pipeline(data.get("pipeline")),
    )


def _pipeline(data: Mapping[str, Any] | None) -> Pipelining | None:
    if data is None:
        return None
    known: dict[str, Any] = dict(data) | {"layers": tuple(data["layers"])}
    return Pipelining(**known)


def _traffic(one: Mapping[str, Any]) -> Traffic:
    kind = one.get("kind") or _earlier_kind(one["cause"])
    return Traffic(tuple(one["axis"].split(" x ")), kind, one["cause"], one["bytes"])


def _earlier_kind(cause: str) -> TrafficKind:
    """The kind of an entry of an earlier version, which had no kind."""
    if cause.startswith("gradients"):
        return "gradients"
    return "parameters" if cause.startswith("gathers of parameters") else "activations"


def _closed_over(one: Mapping[str, Any]) -> ClosedOver:
    sizes, axes = tuple(one["shape"]), tuple(one["axes"])
    return ClosedOver(one["name"], sizes, one["dtype"], one["bytes"], axes)


def reason_from_json(row: Mapping[str, Any], computed: bool) -> Reason:
    """The reason of a saved array; `computed` is whether it is tensor-parallel."""
    text = row["reason"]
    if "kind" in row:
        return Reason(row["kind"], text, row.get("together", ""))
    # A row of an earlier version has no kind.
    kind: Kind = "tensor-parallel" if computed else "fsdp"
    if text == "override":
        kind = "override"
    elif row["role"] == "optimizer state" and text.startswith("follows "):
        kind = "follows"
    elif not any(row["spec"]):
        kind = "replicated"
    return Reason(kind, text.removeprefix("whole: "))
