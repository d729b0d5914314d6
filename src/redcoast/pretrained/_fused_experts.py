"""Experts of which a file has the matrices in one tensor for each layer, where a model by itself
has a tensor for each expert.

Files of mixtures of experts have either, and those of Qwen3-VL have each matrix transposed.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from ._lazy_tensor import Box, Stored

# `x.experts.gate_up_proj` is (experts, rows, columns), and becomes `x.experts.0.gate_proj.weight`,
# `x.experts.0.up_proj.weight`, `x.experts.1.gate_proj.weight` and so on.
_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<name>gate_up_proj|down_proj)")
# The parts of a tensor, each of which is a matrix of an expert.
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_experts(
    stored: Mapping[str, Stored], needed: Mapping[str, tuple[int, ...]]
) -> dict[str, Stored]:
    """Returns the tensors of a file, with one for each matrix of an expert where a model needs
    these. They are read in parts, as all others are."""
    split = {}
    for name, tensor in stored.items():
        match = _FUSED.fullmatch(name)
        matrices = [] if match is None else list(_matrices(match, tensor, needed))
        split |= dict(matrices) if matrices else {name: tensor}
    return split


def _matrices(
    match: re.Match[str], fused: Stored, needed: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Stored]]:
    """The names of the matrices of all experts, and where they are in a tensor."""
    parts = _PARTS[match["name"]]
    shape = needed.get(f"{match['experts']}.0.{parts[0]}.weight")
    if shape is None or len(fused.shape) != 3:
        return
    # Gates come before the other rows of an expert. For a square tensor both orders match, and the
    # usual one, (outputs, inputs), is taken.
    rows, columns = len(parts) * shape[0], shape[1]
    if fused.shape[1:] not in ((rows, columns), (columns, rows)):
        return
    turned = fused.shape[1:] != (rows, columns)
    for expert in range(fused.shape[0]):
        for i, part in enumerate(parts):
            name = f"{match['experts']}.{expert}.{part}.weight"
            yield name, _matrix(fused, expert, i * shape[0], shape, turned=turned)


def _matrix(
    fused: Stored, expert: int, start: int, shape: tuple[int, ...], *, turned: bool
) -> Stored:
    """The matrix of one expert that begins at a row of a tensor."""

    def read(box: Box, out: np.ndarray) -> None:
        rows, columns = box
        rows = slice(start + rows.start, start + rows.stop)
        if turned:
            matrix = fused.take((slice(expert, expert + 1), columns, rows))  # (1, columns, rows)
            out[...] = matrix[0].T
        else:
            fused.read((slice(expert, expert + 1), rows, columns), out[None])

    return Stored(shape, fused.dtype, read)
