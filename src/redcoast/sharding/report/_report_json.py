"""A plan's report to JSON and back."""

from collections.abc import Mapping
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
    arrays = [array_to_json(array) for array in report.arrays]
    totals = asdict(report.totals).values()
    return {
        "mesh": dict(report.mesh),
        "rows": arrays,
        "totals": dict(zip(_ROLES, totals, strict=True)),
        "replicated": [{k: row[k] for k in _REPLICATED} for row in arrays if row["parts"] == 1],
        "not_done": [asdict(one) for one in report.not_done],
    } | program_to_json(report.program_or_none)


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
    keys = ("axis", "kind", "cause", "bytes")
    figures = asdict(program)
    if not program.split_examples:
        del figures["split_examples"]
    if program.recomputed is None:
        del figures["recomputed"]
    return _lists(figures) | {
        "coupled": [] if program.coupled is None else [asdict(program.coupled)],
        "traffic": [{key: getattr(one, key) for key in keys} for one in program.traffic],
    }


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(one) for key, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, tuple) else value


def program_from_json(saved: Mapping[str, Any]) -> data.ProgramReport:
    """Reads what `program_to_json` returns; files of earlier versions lack some entries."""
    memory = saved["device_memory"]
    pipeline: dict[str, Any] | None = saved.get("pipeline")
    if pipeline is not None:
        pipeline = dict(pipeline) | {"layers": tuple(pipeline["layers"])}
    return data.ProgramReport(
        batch_axes=tuple(saved["batch_axes"]),
        model_axes=tuple(saved["model_axes"]),
        batch=saved["batch"],
        batch_sizes=tuple(saved.get("batch_sizes", ())),
        not_rows=saved["not_rows"],
        hindrances=tuple(data.Hindrance(**one) for one in saved["hindrances"]),
        traffic=tuple(map(_traffic, saved["traffic"])),
        closed_over=tuple(map(_closed_over, saved.get("closed_over", ()))),
        coupled=next((data.Coupling(**one) for one in saved.get("coupled", ())), None),
        unknown=saved["unknown"],
        arithmetic=Arithmetic(**saved["arithmetic"]),
        repeated=tuple(data.Repeated(**one) for one in saved.get("repeated", ())),
        memory=Memory(**{"closed_over": 0, "batch": 0} | saved["memory"]),
        device_memory=memory,
        device_memory_known=saved.get("device_memory_known", memory != DEFAULT_MEMORY),
        sequences=saved.get("sequences", False),
        pipeline=None if pipeline is None else Pipelining(**pipeline),
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


def _traffic(one: Mapping[str, Any]) -> data.Traffic:
    kind, cause = one.get("kind"), one["cause"]
    if not kind:  # in a file of an earlier version
        kind = "parameters" if cause.startswith("gathers of parameters") else "activations"
        kind = "gradients" if cause.startswith("gradients") else kind
    return data.Traffic(tuple(one["axis"].split(" x ")), kind, cause, one["bytes"])


def _line_cost(one: Mapping[str, Any]) -> data.LineCost:
    sizes = one["memory_bytes"], one["sent_bytes"]
    file, number = one.get("caller", ("", 0))
    causes = tuple(one["causes"])
    return data.LineCost(one["file"], one["number"], *sizes, causes, (file, number))


def _closed_over(one: Mapping[str, Any]) -> data.ClosedOver:
    sizes, axes = tuple(one["shape"]), tuple(one["axes"])
    return data.ClosedOver(one["name"], sizes, one["dtype"], one["bytes"], axes)


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
