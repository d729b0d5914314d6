"""What stands below the arrays of a plan: sums, memory, the batch, and what is sent."""

from typing import Any

from .closed_over import closed_over_sentences
from .coupling import coupling_sentence
from .text import megabytes, paragraph

# For each axis, so many causes at most, and none with less than this part of what is sent.
_SHOWN, _LITTLE = 6, 0.01

_COUPLED = "With `accumulate`, or batches of another size, it is another loss."


def summary(report: dict[str, Any]) -> list[str]:
    lines = _totals(report["totals"])
    if "memory" in report:
        lines += _memory(report)
    if report.get("closed_over"):
        lines += ["", *paragraph(closed_over_sentences(report["closed_over"]))]
    if report.get("batch"):
        lines += ["", *paragraph(report["batch"])]
    for entry in report.get("repeated", []):
        lines += ["", *paragraph(_repeated(entry, report["arithmetic"]["flops"]))]
    for entry in report.get("coupled", []):
        lines += ["", *paragraph(f"{coupling_sentence(entry)} {_COUPLED}")]
    if report.get("hindrances"):
        lines += ["", "Could not be split otherwise:"]
    for entry in report.get("hindrances", []):
        lines += paragraph(f"{entry['arrays']}: {entry['why']}", "  ", "    ")
    if "traffic" in report:
        lines += ["", *_traffic(report["traffic"])]
    if report.get("unknown"):
        lines += ["", *_unknown(report["unknown"])]
    return lines


def _totals(totals: dict[str, Any]) -> list[str]:
    parameters, states = totals["parameter"], totals["optimizer state"]
    lines = [_total("parameters", parameters)]
    if states["arrays"]:
        times = states["bytes"] / max(1, parameters["bytes"])
        # Where few parameters are trained, there is little of it.
        shown = f"{times:.1f}" if times > 0.05 else f"{times:.2g}"
        lines.append(_total("optimizer state", states))
        lines.append(f"{'':<17}(follows its parameters: {shown} x)")
    if totals["other"]["bytes"] > 1e6:
        lines.append(_total("other", totals["other"]))
    return [*lines, _total("all", totals["all"])] if len(lines) > 1 else lines


def _total(name: str, total: dict[str, int]) -> str:
    whole, device = megabytes(total["bytes"]), megabytes(total["bytes_per_device"])
    times = total["bytes"] / max(1, total["bytes_per_device"])
    less = f" ({times:.1f} x less)" if times > 1 else ""
    return f"{name:<15}  {device:>12} MB per device of {whole} MB{less}"


def _memory(report: dict[str, Any]) -> list[str]:
    memory, available = report["memory"], report["device_memory"]
    parts = ", ".join(
        f"{megabytes(memory[key])} {key.replace('_', ' ')}"
        for key in ("arrays", "gradients", "optimizer_state", "activations", "closed_over")
        if memory.get(key)
    )
    total = megabytes(memory["total"])
    lines = paragraph(f"Memory of each device, estimated: {total} MB ({parts}).")
    if memory["total"] > available:
        lines += paragraph(
            f"That is more than the {megabytes(available)} MB that it has "
            "(`Hardware.memory`): use more devices, a larger `fsdp` or `model`, a smaller batch, "
            "or `jax.checkpoint` in the model."
        )
    return ["", *lines]


def _repeated(entry: dict[str, Any], flops: int | float) -> str:
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1, "FLOP"))
        if flops >= scale or scale == 1
    )
    of = f": products with {entry['arrays']}" if entry["arrays"] else ""
    return (
        f"{entry['flops'] / scale:.3g} of {flops / scale:.3g} {unit} are computed by every device"
        f"{of}, because {entry['why']}."
    )


def _traffic(traffic: list[dict[str, Any]]) -> list[str]:
    """The causes below the axis that they are sent over, the largest first."""
    if not traffic:
        return ["Nothing is sent between devices."]
    axes: dict[str, list[dict[str, Any]]] = {}
    for entry in traffic:
        axes.setdefault(entry["axis"], []).append(entry)
    size = lambda entries: sum(entry["bytes"] for entry in entries)
    lines = [f"Sent by each device in a step, as priced: {megabytes(size(traffic))} MB"]
    for axis, entries in sorted(axes.items(), key=lambda item: -size(item[1])):
        lines += _cause(size(entries), f"over {axis}", 0)
        shown = [entry for entry in entries if entry["bytes"] > _LITTLE * size(entries)][:_SHOWN]
        rest = entries[len(shown) :]
        for entry in shown:
            lines += _cause(entry["bytes"], entry["cause"], 4)
        if megabytes(size(rest)).strip("0."):
            lines += _cause(size(rest), f"{len(rest)} smaller", 4)
    return lines


def _cause(count: int, text: str, indent: int) -> list[str]:
    first = f"{'':<{indent}}{megabytes(count):>12} MB  "
    return paragraph(text, first, " " * len(first))


def _unknown(unknown: dict[str, int]) -> list[str]:
    names = ", ".join(f"{count} x {name}" for name, count in unknown.items())
    text = (
        f"Not understood: {names}. What goes into them is taken to be whole on every device, so "
        "that it is gathered before, and may be split again behind."
    )
    return paragraph(text)
