"""The names and shapes of adapters in PEFT's format."""

import itertools as it
from collections.abc import Sequence

from jaxtyping import PyTree

from ..pretrained._matrix_roles import matrix_of
from ..pretrained._registry import hf_names
from ..pretrained._tensors import Tensor
from ._targets import inputs_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # the model within PEFT's
_WEIGHT = ".weight"


def live_table(model: PyTree) -> dict[str, Tensor]:
    """Maps each array of a model to its tensors in a model of `transformers`, whose modules may
    have other names than in files."""
    hf = hf_names(model.config)
    rename = getattr(hf, "module_name", str)
    table = hf.tensors(model.config)
    for path, tensor in table.items():
        table[path] = renamed(tensor, rename(tensor.name))
    if hasattr(hf, "split_modules"):
        table |= hf.split_modules(model.config)
    return table


def renamed(tensor: Tensor, name: str) -> Tensor:
    return Tensor(name, tensor.pattern, **dict(tensor.fixed))


def is_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to a module with one of these names, or to a module in it."""
    return any(f".{module}." in f".{name}" for module in modules)


def is_saved(name: str, modules: Sequence[str]) -> bool:
    """Whether PEFT saves a tensor entirely with `modules_to_save`: the name of a module that it
    belongs to ends with one of these, which may be a part of a word."""
    # `a`, `a.b` and `a.b.c` of `a.b.c.weight`.
    owners = it.accumulate(name.split(".")[:-1], "{}.{}".format)
    return any(owner.endswith(tuple(modules)) for owner in owners)


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
    # For `(heads head_dim) width -> width heads head_dim`, A is `rank (width) -> (width) rank`, and
    # B is `(heads head_dim) rank -> rank (heads) (head_dim)`. Each has the sizes of its factors.
    of_inputs, of_outputs = {}, {}
    for factor, size in tensor.fixed:
        if factor in inputs:
            of_inputs[factor] = size
        else:
            of_outputs[factor] = size
    module = PREFIX + module_of(tensor.name)
    a, b = f"{module}.lora_A{_WEIGHT}", f"{module}.lora_B{_WEIGHT}"
    return (
        Tensor(a, f"rank {_text([inputs])} -> {_text(into)} rank", **of_inputs),
        Tensor(b, f"{_text([outputs])} rank -> rank {_text(out)}", **of_outputs),
    )


def module_of(name: str) -> str:
    """Returns the name of the module that a weight belongs to."""
    return name.removesuffix(_WEIGHT)


def _text(groups: Sequence[tuple[str, ...]]) -> str:
    return " ".join(f"({' '.join(group)})" for group in groups)
