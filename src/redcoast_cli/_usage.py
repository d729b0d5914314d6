"""Reads options of scripts, wraps their help, and ends a script with invalid options."""

import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Ends the process without a traceback if nobody reads what is printed inside to its end, as in
    `--help | head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python would flush the rest at its end, and print another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def refuse(message: str) -> NoReturn:
    """Prints a message to stderr and exits with code 2, as for an unknown option."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(2)


def refuse_impossible_size(name: str, size: int | None, most: int = 2**31 - 1) -> None:
    """Refuses a number of rows or tokens that is not from 1 to `most`."""
    if size is not None and size < 1:
        refuse(f"--{name} must be at least 1, but is {size}.")
    if size is not None and size > most:
        refuse(f"--{name} must be at most {most:,}, but is {size:,}.")


def wrap_help(text: str) -> str:
    """Wraps the prose of a help text to 79 columns, as one paragraph; examples stay as they are."""
    prose, title, examples = inspect.cleandoc(text).partition("Examples:")
    # tyro joins the lines of a paragraph, unless they begin with a space, and puts two empty lines
    # before a paragraph whose first line does.
    lines = textwrap.wrap(" ".join(prose.split()), 78)
    if len(lines) > 1:
        lines = [f" {line}" for line in lines]
    return "\n".join([*lines, f"\n{title}{examples}"]).rstrip()


def mesh_sizes(text: str) -> dict[str, int]:
    """Reads sizes of axes: `pipe=2,fsdp=4`, or `8` (data), `2x4` (data x model), `2x2x2`."""
    orders = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}
    try:
        if "=" in text:
            pairs = [pair.split("=") for pair in text.split(",")]
        else:
            sizes = text.split("x")
            pairs = [*zip(orders[len(sizes)], sizes, strict=True)]
        mesh: dict[str, int] = {axis.strip(): int(size) for axis, size in pairs}
    except (ValueError, KeyError):
        mesh, pairs = {}, []
    if len(mesh) < len(pairs):
        refuse(f"--mesh must name each axis once, but is {text}.")
    if not mesh or not mesh.keys() <= {*orders[3], "pipe"}:
        shown = text.strip() or "empty"
        refuse(f"--mesh must have the form data=1,fsdp=4,model=2, or 8, or 2x4, but is {shown}.")
    return mesh
