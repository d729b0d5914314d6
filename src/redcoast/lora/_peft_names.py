"""The names and shapes of adapters in PEFT's format."""

from collections.abc import Sequence
from typing import Any

from ..pretrained._registry import hf_names
from ..pretrained._tensors import Tensor
from ._targets import inputs_of, matrix_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_WEIGHT = ".weight"


def live_table(model: Any) -> dict[str, Tensor]:
    """Maps each array of a model to its tensors in a model of `transformers`, whose modules may
    have other names than in files."""
    hf = hf_names(model.config)
    rename = getattr(hf, "module_name", str)
    split = getattr(hf, "split_modules", lambda config: {})(model.config)
    return {
        path: Tensor(rename(tensor.name), tensor.pattern, **dict(tensor.fixed))
        for path, tensor in hf.tensors(model.config).items()
    } | split


def is_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to a module with one of these names, or to a module in it."""
    return any(f".{module}." in f".{name}" for module in modules)


def is_saved(name: str, modules: Sequence[str]) -> bool:
    """Whether PEFT saves a tensor entirely with `modules_to_save`: the name of a module that it
    belongs to ends with one of these, which may be a part of a word."""
    parts = name.split(".")
    owners = [".".join(parts[:count]) for count in range(1, len(parts))]
    return any(owner.endswith(module) for owner in owners for module in modules)


def factors_of(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the tensors of the two factors of an adapter, `lora_A` (rank by inputs) and `lora_B`
    (outputs by rank), for an array with the published tensor `tensor`; None if that is not a
    matrix."""
    matrix = matrix_of(tensor)
    if matrix is None or not tensor.name.endswith(_WEIGHT):
        return None
    inputs = inputs_of(tensor)
    outputs = next(group for group in tensor.left if group != inputs)
    into, out = tensor.right[: matrix.inputs], tensor.right[matrix.inputs :]
    fixed = dict(tensor.fixed)
    of = lambda group: {f: size for f, size in fixed.items() if f in group}
    a, b = (PREFIX + module_of(tensor.name) + f".lora_{letter}{_WEIGHT}" for letter in "AB")
    return (
        Tensor(a, f"rank {_text([inputs])} -> {_text(into)} rank", **of(inputs)),
        Tensor(b, f"{_text([outputs])} rank -> rank {_text(out)}", **of(outputs)),
    )


def module_of(name: str) -> str:
    """Returns the name of the module that a weight belongs to."""
    return name.removesuffix(_WEIGHT)


def _text(groups: Sequence[tuple[str, ...]]) -> str:
    return " ".join(f"({' '.join(group)})" for group in groups)
