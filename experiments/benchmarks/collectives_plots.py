"""Plots the results of `collectives.py`.

python experiments/benchmarks/collectives_plots.py --out runs/collectives
"""

import json
from pathlib import Path
from typing import Any

import tyro
from traffic.claims import Row, by_place

# Markers of different shapes and mostly open, so that equal values are visible.
STYLES: dict[str, dict[str, Any]] = {
    "replicated": {"marker": "s", "color": "#5dade2", "markersize": 9},
    "fsdp": {"marker": "o", "color": "#1f618d", "markersize": 9},
    "rules": {"marker": "^", "color": "#7f8c8d", "markersize": 8},
    "megatron": {"marker": "D", "color": "#2c3e50", "markersize": 7},
    "unconstrained": {"marker": "x", "color": "#e67e22", "markersize": 7},
    "redcoast": {"marker": "o", "color": "#c0392b", "markersize": 6, "fillstyle": "full"},
}


def main(out: Path = Path("runs/collectives")) -> None:
    """Draws PNGs from the results in a directory.

    Args:
        out: Directory with `collectives.json`, and for the plots.
    """
    file = out / "collectives.json"
    if not file.exists():
        raise SystemExit(f"There is no {file}. Run collectives.py first.")
    draw(out, json.loads(file.read_text()))


def draw(out: Path, results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    for family, base in (("transformer", "megatron"), ("other", "fsdp")):
        rows = [row for row in results["rows"] if row["family"] == family]
        for mesh in dict.fromkeys(tuple(row["mesh"]) for row in rows):
            here = [row for row in rows if tuple(row["mesh"]) == mesh]
            name = f"{family}s_{'_'.join(map(str, mesh))}.png"
            draw_bytes(out / name, here, base, mesh)


def draw_bytes(file: Path, rows: list[Row], base: str, mesh: tuple[int, ...]) -> None:
    """Plots the communication of each column, relative to column `base`, one line per case."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    places = {}
    for (case, _), columns in by_place(rows).items():
        if columns.get(base, {}).get("sent_bytes"):
            places[case] = columns
    if not places:
        return
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.3 * len(places)), layout="constrained")
    for name, style in STYLES.items():
        ratios, lines = [], []
        for line, columns in enumerate(places.values()):
            if name in columns:
                ratios.append(columns[name]["sent_bytes"] / columns[base]["sent_bytes"])
                lines.append(line)
        if lines:
            marks: dict[str, Any] = {"fillstyle": "none", "linestyle": "none"} | style
            axes.plot(ratios, lines, label=name, **marks)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_yticks(range(len(places)), list(places))
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(f"bytes communicated per device and step, relative to {base}")
    axes.set_title(f"data {mesh[0]}, fsdp {mesh[1]}, model {mesh[2]}", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(file, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    tyro.cli(main)
