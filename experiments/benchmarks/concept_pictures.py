"""Draws the pictures of docs/concepts.md.

python experiments/benchmarks/concept_pictures.py
"""

from pathlib import Path
from typing import NamedTuple

import tyro

IMAGES = Path(__file__).parents[2] / "docs" / "images"
COLOURS = ("#7fb0dd", "#f2b26b")  # of the first and of the second device
SHARED, INK = "#dddddd", "#222222"
SIZE = 72  # of the drawing of an array


class Kind(NamedTuple):
    """What two devices hold of the batch and of a matrix."""

    title: str
    batch: str
    matrix: str
    communication: tuple[str, ...]


KINDS = (
    Kind("Data parallelism", "rows", "all", ("the gradients are", "summed (all-reduce)")),
    Kind(
        "FSDP (ZeRO-3)",
        "rows",
        "rows",
        ("weights are gathered where used,", "gradients reduced to shards"),
    ),
    Kind(
        "Tensor parallelism",
        "all",
        "columns",
        ("the activations are", "summed (all-reduce)"),
    ),
)


def text(x: float, y: float, words: str, *, size: int = 13, bold: bool = False) -> str:
    weight = ""
    if bold:
        weight = ' font-weight="bold"'
    return f'<text x="{x}" y="{y}" font-size="{size}"{weight}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, style: str = "") -> str:
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'{shape} fill="{fill}" stroke="#444444" {style}/>'


def array(x: float, y: float, width: float, part: str, device: int) -> list[str]:
    """An array of which a device holds all, a half of the rows or a half of the columns."""
    if part == "all":
        return [box(x, y, width, SIZE, SHARED)]
    whole = box(x, y, width, SIZE, "none", 'stroke-dasharray="3 3"')
    if part == "columns":
        return [whole, box(x + device * width / 2, y, width / 2, SIZE, COLOURS[device])]
    return [whole, box(x, y + device * SIZE / 2, width, SIZE / 2, COLOURS[device])]


def panel(left: float, kind: Kind) -> list[str]:
    drawn = [text(left + 130, 24, kind.title, size=15, bold=True)]
    for device in range(2):
        x = left + 4 + 130 * device
        drawn += [
            box(x, 40, 122, 142, "#f7f7f7", 'rx="6"'),
            text(x + 61, 60, f"device {device}"),
            *array(x + 10, 76, 22, kind.batch, device),
            *array(x + 42, 76, SIZE, kind.matrix, device),
            text(x + 22, 168, "batch", size=11),
            text(x + 78, 168, "matrix", size=11),
        ]
    for i, line in enumerate(kind.communication):
        drawn.append(text(left + 130, 204 + 18 * i, line))
    return drawn


def drawing(width: float, height: float, drawn: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    parts = [
        f'{head} font-family="sans-serif" font-size="13">',
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'  <g fill="{INK}" text-anchor="middle">',
        *(f"    {part}" for part in drawn),
        "  </g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def parallelism() -> str:
    drawn: list[str] = []
    for i, kind in enumerate(KINDS):
        drawn += panel(290 * i + 5, kind)
    return drawing(850, 236, drawn)


class Question(NamedTuple):
    """A question of the chart, and the mesh if the answer is yes."""

    lines: tuple[str, ...]
    mesh: tuple[str, ...]


QUESTIONS = (
    Question(
        ("Do the model, its optimizer state and the", "activations of a device's examples fit?"),
        ("rc.make_mesh()", "data parallelism"),
    ),
    Question(
        ("Are there at least as many examples in a batch as", "devices, and does one example fit?"),
        ("rc.make_mesh(data=1, fsdp=-1)", "FSDP over all devices"),
    ),
    Question(
        ("Are there links of high bandwidth between", "2, 4 or 8 of the devices?"),
        ("rc.make_mesh(data=1, fsdp=-1, model=4)", "FSDP, and tensor parallelism over fast links"),
    ),
    Question(
        ("Are the layers a jax.lax.scan, and does a stage", "fit with one microbatch in it?"),
        ("rc.make_mesh(data=1, fsdp=-1, pipe=4)", "FSDP, and a pipeline over slow links"),
    ),
)
LAST = ("Rematerialise layers, use bfloat16, or more devices:", "see Out of memory")


def chart() -> str:
    """The questions from top to bottom, with a mesh to the right of each."""
    drawn: list[str] = []
    for i, question in enumerate(QUESTIONS):
        y = 10 + 110 * i
        drawn += [
            box(10, y, 370, 64, "#f7f7f7", 'rx="6"'),
            *(text(195, y + 28 + 20 * k, line) for k, line in enumerate(question.lines)),
            *arrow(380, y + 32, 468, y + 32),
            text(420, y + 24, "yes"),
            box(470, y, 330, 64, COLOURS[0], 'rx="6"'),
            *(text(635, y + 28 + 20 * k, line) for k, line in enumerate(question.mesh)),
            *arrow(195, y + 64, 195, y + 108),
            text(216, y + 90, "no"),
        ]
    y = 10 + 110 * len(QUESTIONS)
    drawn.append(box(10, y, 370, 64, COLOURS[1], 'rx="6"'))
    drawn += [text(195, y + 28 + 20 * k, line) for k, line in enumerate(LAST)]
    return drawing(812, y + 76, drawn)


def arrow(x: float, y: float, to_x: float, to_y: float) -> list[str]:
    wings = [(-7, -4), (-7, 4)]
    if to_x == x:  # down
        wings = [(-4, -7), (4, -7)]
    corners = " ".join(f"{to_x + dx},{to_y + dy}" for dx, dy in [*wings, (0, 0)])
    line = f'<path d="M{x} {y} L{to_x} {to_y}" stroke="#555555" stroke-width="1.6"/>'
    return [line, f'<polygon points="{corners}" fill="#555555"/>']


def main(images: Path = IMAGES) -> None:
    """Writes parallelism.svg and which_mesh.svg.

    Args:
        images: Directory for the pictures.
    """
    (images / "parallelism.svg").write_text(parallelism(), "utf-8")
    (images / "which_mesh.svg").write_text(chart(), "utf-8")


if __name__ == "__main__":
    tyro.cli(main)
