"""A plan's report to JSON and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..solver._figures import Arithmetic, Memory, Pipelining
from ..solver._memory import DEFAULT_MEMORY
from ..tree._leaf_plans import Kind, Reason
from . import _data as data

_ROLES = ("all", "parameter", "optimizer state", "other")
_REPLICATED = ("path", "shape", "bytes", "role", "reason")


def report_to_json(report: data.PlanReport) -> dict[str, Any]:
    """All of a report; what was inferred from a program is beside the arrays."""
    rows = [array_to_json(array) for array in report.arrays]
    replicated: list[dict[str, Any]] = []
    for row in rows:
        if row["parts"] == 1:
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
    # Most programs have none of the two.
    if not program.split_examples:
        del figures["split_examples"]
    if program.recomputed is None:
        del figures["recomputed"]
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


def program_from_json(saved: Mapping[str, Any]) -> data.ProgramReport:
    """Reads what `program_to_json` returns; files of earlier versions lack some entries."""
    memory = saved["device_memory"]
    return data.ProgramReport(
        batch_axes=tuple(saved["batch_axes"]),
        model_axes=tuple(saved["model_axes"]),
        batch=saved["batch"],
        batch_sizes=tuple(saved.get("batch_sizes", ())),
        not_rows=saved["not_rows"],
        hindrances=tuple(data.Hindrance(**entry) for entry in saved["hindrances"]),
        traffic=tuple(map(_traffic, saved["traffic"])),
        closed_over=tuple(map(_closed_over, saved.get("closed_over", ()))),
        coupled=_coupling(saved.get("coupled", ())),
        unknown=saved["unknown"],
        arithmetic=Arithmetic(**saved["arithmetic"]),
        repeated=tuple(data.Repeated(**entry) for entry in saved.get("repeated", ())),
        memory=Memory(**{"closed_over": 0, "batch": 0} | saved["memory"]),
        device_memory=memory,
        device_memory_known=saved.get("device_memory_known", memory != DEFAULT_MEMORY),
        sequences=saved.get("sequences", False),
        pipeline=_pipelining(saved.get("pipeline")),
        summed=saved.get("summed", {}),
        shared_masks=tuple(saved.get("shared_masks", ())),
        promotions=tuple(saved.get("promotions", ())),
        lines=tuple(map(_line_cost, saved.get("lines", ()))),
        split_examples=saved.get("split_examples", {}),
        gathered_whole=tuple(saved.get("gathered_whole", ())),
        recomputed=_recomputation(saved.get("recomputed")),
    )


def _recomputation(saved: Mapping[str, Any] | None) -> data.Recomputation | None:
    if saved is None:
        return None
    return data.Recomputation(saved["saved"], saved["flops"], saved["share"], tuple(saved["what"]))


def _coupling(saved: Sequence[Mapping[str, Any]]) -> data.Coupling | None:
    """Reads a list of at most one entry."""
    if not saved:
        return None
    return data.Coupling(**saved[0])


def _pipelining(saved: Mapping[str, Any] | None) -> Pipelining | None:
    if saved is None:
        return None
    figures: dict[str, Any] = dict(saved)
    figures["layers"] = tuple(saved["layers"])
    return Pipelining(**figures)


def _traffic(saved: Mapping[str, Any]) -> data.Traffic:
    axes, cause = tuple(saved["axis"].split(" x ")), saved["cause"]
    kind = saved.get("kind")
    if not kind:  # in a file of an earlier version
        kind = _kind_of_cause(cause)
    return data.Traffic(axes, kind, cause, saved["bytes"])


def _kind_of_cause(cause: str) -> data.TrafficKind:
    if cause.startswith("gradients"):
        return "gradients"
    if cause.startswith("gathers of parameters"):
        return "parameters"
    return "activations"


def _line_cost(saved: Mapping[str, Any]) -> data.LineCost:
    sizes = saved["memory_bytes"], saved["sent_bytes"]
    file, number = saved.get("caller", ("", 0))
    causes = tuple(saved["causes"])
    return data.LineCost(saved["file"], saved["number"], *sizes, causes, (file, number))


def _closed_over(saved: Mapping[str, Any]) -> data.ClosedOver:
    shape, axes = tuple(saved["shape"]), tuple(saved["axes"])
    return data.ClosedOver(saved["name"], shape, saved["dtype"], saved["bytes"], axes)


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
