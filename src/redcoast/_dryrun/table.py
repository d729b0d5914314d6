"""A dry run drawn as text."""

from .._sharding.report.text import megabytes, paragraph
from .bounds import Bounds
from .result import DryRun

_SHOWN = 8  # causes of traffic
_LITTLE = 1e-3  # of the largest bound: a network that takes less is not shown
_COMPILERS = {
    "tpu": "the TPU compiler",
    "cuda": "the CUDA compiler",
    "cpu": "the CPU compiler",
}


def draw(run: DryRun) -> str:
    sizes = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    devices = "1 device" if run.devices == 1 else f"{run.devices} devices"
    head = (
        f"Dry run for {run.target}: {devices}, mesh {sizes}; by {_COMPILERS[run.compiler]} in "
        f"{run.compile_seconds:.1f} s"
    )
    lines = [*paragraph(head), "", *paragraph(_verdict(run)), ""]
    lines += [*_memory(run), "", *_traffic(run)]
    lines += ["", *(_refused(run) if run.bounds is None else _time(run.bounds, run.arithmetic))]
    if not run.fits:
        lines += ["", *_changes(run)]
    for note in run.notes:
        lines += ["", *paragraph(note)]
    return "\n".join(lines)


def _verdict(run: DryRun) -> str:
    peak, usable = run.memory["peak"], run.memory["usable"]
    of = f"{gib(peak)} of {gib(usable)} GiB of memory"
    if run.fits:
        return f"It fits: {of}, {gib(usable - peak)} GiB to spare."
    if run.refused:
        return f"It does not fit: at least {of}, {gib(peak - usable)} GiB or more too much."
    return f"It does not fit: {of}, {gib(peak - usable)} GiB too much."


def _memory(run: DryRun) -> list[str]:
    memory = run.memory
    rows = ["parameters", "optimizer_state", "other", "batch", "temporaries", "peak", "usable"]
    lines = [f"{'Memory of each device':<30}{'GiB':>10}"]
    for name in rows:
        if name not in memory or (name == "other" and memory[name] < 2**20):
            continue
        more = ""
        if name == "temporaries":
            # Compilers may do without some that are planned.
            among = "are among them" if memory["gradients"] <= memory[name] else "if all were kept"
            more = f"  (gradients, {gib(memory['gradients'])}, {among})"
        lines.append(f"  {name.replace('_', ' '):<28}{gib(memory[name]):>10}{more}")
    return lines


def _traffic(run: DryRun) -> list[str]:
    if run.sent_bytes is None:
        return ["What it would send is not known, since the compiler refused it."]
    if not run.traffic:
        return ["Nothing is sent between devices."]
    lines = [f"Sent by each device in a step: {megabytes(run.sent_bytes)} MB"]
    lines.append(f"  {'MB':>12}  {'times':>5}  over, kind, cause")
    for one in run.traffic[:_SHOWN]:
        words = f"{one['axis']}: {one['kind']}, {one['cause']}"
        first = f"  {megabytes(one['bytes']):>12}  {one['times']:>5}  "
        lines += paragraph(words, first, " " * len(first))
    if rest := run.traffic[_SHOWN:]:
        size = megabytes(sum(one["bytes"] for one in rest))
        times = sum(one["times"] for one in rest)
        lines.append(f"  {size:>12}  {times:>5}  {len(rest)} smaller")
    return lines


def _refused(run: DryRun) -> list[str]:
    return paragraph(f"Arithmetic of each device in a step: {_flops(run.arithmetic) or 'none'}.")


def _flops(arithmetic: dict[str, float]) -> str:
    return ", ".join(f"{_scaled(count)}FLOP in {name}" for name, count in arithmetic.items())


def _scaled(count: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9)):
        if count >= 0.1 * size:
            return f"{count / size:.4g} {unit}"
    return f"{count / 1e6:.4g} M"


def _time(bounds: Bounds, arithmetic: dict[str, float]) -> list[str]:
    flops = _flops(arithmetic)
    every = {"arithmetic": bounds.arithmetic, "memory": bounds.memory}
    every |= {f"network ({axes})": seconds for axes, seconds in bounds.network.items()}
    lines = ["A step takes at least"]
    for name, seconds in every.items():
        if name.startswith("network") and seconds < _LITTLE * every[bounds.binding]:
            continue
        what = f": {flops}" if name == "arithmetic" and flops else ""
        binds = "  <- binds" if name == bounds.binding else ""
        lines.append(f"  {seconds * 1e3:>12,.4g} ms  {name}{what}{binds}")
    share = f"so that it uses at most {bounds.utilisation:.0%} of the peak rate of arithmetic."
    return [*lines, share]


def _changes(run: DryRun) -> list[str]:
    if not run.changes:
        return paragraph(
            "No change of mesh, remat, accumulation or precision that was compiled makes it fit: "
            "it takes more devices, or a smaller batch."
        )
    lines = ["With one of these changes it fits, as the compiler confirmed:"]
    for change in run.changes:
        lines += paragraph(f"{change.what}: {gib(change.peak)} GiB", "  ", "    ")
    return lines


def gib(size: int | float) -> str:
    """Two digits behind the point, more where it is little."""
    size = size / 2**30
    return f"{size:,.2f}" if size >= 1 or not size else f"{size:.4f}"
