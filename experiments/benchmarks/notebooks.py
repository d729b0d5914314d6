"""Runs the notebooks of the documentation, and writes their outputs and their pages.

    python experiments/benchmarks/notebooks.py
    python experiments/benchmarks/notebooks.py --only cnn

Each notebook runs in a process of its own, without Jupyter. `docs/notebooks/NAME.ipynb` gets the
outputs, and `docs/notebooks/NAME.md` is its page on the site. An error in a cell ends the script.
"""

import ast
import base64
import contextlib
import io
import json
import linecache
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tyro

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
Cell = dict[str, Any]


def main(
    folder: Path = NOTEBOOKS, only: tuple[str, ...] = (), in_this_process: bool = False
) -> None:
    """Runs notebooks.

    Args:
        folder: Directory with the notebooks.
        only: Names of notebooks; by default all of them.
        in_this_process: Used by the script itself: runs one notebook, without a new process.
    """
    for file in sorted(folder.glob("*.ipynb")):
        if only and file.stem not in only:
            continue
        if in_this_process:
            run(file)
            continue
        begin = time.perf_counter()
        command = [sys.executable, __file__, "--folder", str(folder), "--in-this-process"]
        subprocess.run([*command, "--only", file.stem], check=True)
        print(f"{file.stem}: {time.perf_counter() - begin:.0f} s")


def run(file: Path) -> None:
    """Runs a notebook, and writes it with its outputs, and its page with the pictures."""
    notebook = json.loads(file.read_text("utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(file.parent):  # as in Jupyter
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                cell["outputs"] = outputs("".join(cell["source"]), namespace, number)
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    text, pictures = page(notebook, file.stem)
    file.with_suffix(".md").write_text(text, "utf-8")
    for name, png in pictures.items():
        (file.parent / name).write_bytes(png)


def outputs(source: str, namespace: dict[str, Any], number: int = 0) -> list[Cell]:
    """Runs a cell, and returns what it printed, its value and its figures, as in a notebook."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.close("all")  # those of other code
    *statements, last = ast.parse(source).body
    # As in Jupyter, a cell is a file of its own, whose lines reports and tracebacks name.
    file = f"cell_{number}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if not isinstance(last, ast.Expr):
            exec(compile(source, file, "exec"), namespace)
        else:
            exec(compile(ast.Module(statements, []), file, "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), file, "eval"), namespace)
            if value is not None and not source.rstrip().endswith(";"):
                print(repr(value))
    shown = []
    if text := printed.getvalue():
        shown.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(True)})
    for number in plt.get_fignums():
        png = io.BytesIO()
        plt.figure(number).savefig(png, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(png.getvalue()).decode()}
        shown.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return shown


def page(notebook: Cell, name: str) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by file name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        # `py`, because the blocks of pages in `python` are run by the tests.
        parts.append(f"```py\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                file = f"{name}_{len(pictures)}.png"
                pictures[file] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![The figure of the cell above]({file})")
    # Weights that are downloaded are in a `.gguf` file.
    extras = "experiments,gguf" if any("smollm2(" in part for part in parts) else "experiments"
    download = (
        f"To run it, [download it]({name}.ipynb), or open `docs/notebooks/{name}.ipynb` in a copy\n"
        "of the repository, in Jupyter. Install what it needs there with\n"
        f'`python -m pip install -e ".[{extras}]" jupyterlab`.'
    )
    title, *rest = parts
    return "\n\n".join([title, download, *rest]) + "\n", pictures


if __name__ == "__main__":
    tyro.cli(main)
