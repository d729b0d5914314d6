"""Matches the tensors in files with the tensors that a model needs."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ._lazy_tensor import Stored, split_box
from ._registry import hf_names
from ._tensors import Tensor, tensor_names, tensor_shape

# Prefixes that wrappers add to the names of a model.
_WRAPPERS = {
    "_orig_mod.": "`torch.compile`",
    "module.": "`torch.nn.parallel.DistributedDataParallel` or `DataParallel`",
    "_fsdp_wrapped_module.": "`torch.distributed.fsdp`",
}
COMPARED_BYTES = 2**22
_DIFFERENT = "different from the tensor they should duplicate"


@dataclass(frozen=True)
class Layout:
    """The names of a model's tensors in files.

    - `base_prefix`: the prefix of the base model's tensors, which files of the base model without a
      head omit.
    - `duplicates`: alternative names under which a file may hold a tensor (again, or instead), and
      the tensor's own names.
    - `tied`: whether the head shares the weights of the embedding, and may also be separate.
    """

    table: Mapping[str, Tensor]  # the tensors that each array of the model consists of
    base_prefix: str = ""
    buffers: tuple[str, ...] = ()  # regular expressions for the names of tensors that are ignored
    duplicates: Mapping[str, str] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()  # tensors that are zero if a file lacks them
    tied: bool = False


def layout_of(config: object) -> Layout:
    """Returns the layout of a model of `redcoast.models`."""
    names = hf_names(config)
    unused = getattr(names, "unused", lambda config: ())
    duplicates = getattr(names, "duplicates", _tied_head)
    return Layout(
        names.tensors(config),
        getattr(names, "BASE_PREFIX", ""),
        (*getattr(names, "BUFFERS", ()), *unused(config)),
        duplicates(config),
        tuple(getattr(names, "ZEROS", ())),
        getattr(config, "tied", False),
    )


def _tied_head(config: Any) -> dict[str, str]:
    """If the head is tied, a file may contain the embedding again as the head."""
    if not getattr(config, "tied", False):
        return {}
    # The head has a name only in the table of the same model with separate weights.
    table = hf_names(config).tensors(dataclasses.replace(config, tied=False))
    return {table["head"].name: table["embed"].name}


def needed_shapes(layout: Layout, leaves: Mapping[str, PyTree]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors that the arrays of a model consist of."""
    if odd := layout.table.keys() ^ leaves.keys():
        raise ValueError(
            "The arrays of the model do not match its table of tensors: "
            f"{', '.join(sorted(odd))} is in only one of the two."
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for path, tensor in layout.table.items():
        shape = tensor_shape(tensor, leaves[path].shape)
        for name in tensor_names(tensor, leaves[path].shape).values():
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name} is {shapes[name]} for one array and {shape} for {path}.")
    return shapes


def match(
    layout: Layout,
    needed: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    where: object,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Stored]:
    """Finds the stored tensor for each needed one. `settings` are the file's, for messages.

    Raises one `ValueError` that lists all tensors that are missing, unexpected or misshapen, or
    that differ from the tensor that they should duplicate.
    """
    known, prefix = {*needed, *layout.duplicates}, layout.base_prefix
    if prefix and not any(name.startswith(prefix) for name in stored):
        # A file that only has the base model omits its prefix.
        renamed = {}
        for name, tensor in stored.items():
            if name not in known and prefix + name in known:
                name = prefix + name
            renamed[name] = tensor
        stored = renamed
    tensors = {name: stored[name] for name in needed if name in stored}
    # A copy replaces a tensor that the file omits, such as a tied embedding.
    for copy, name in layout.duplicates.items():
        if copy in stored and name in needed:
            tensors.setdefault(name, stored[copy])
    for name in layout.zeros:
        if name in needed and name not in tensors and tensors:
            # Of any other tensor, so that the zeros do not change the dtype of the model.
            dtype = next(iter(tensors.values())).dtype
            tensors[name] = Stored(needed[name], dtype, lambda box, out: out.fill(0))
    missing, unexpected, misshapen, different = [], [], [], []
    for name in needed:
        if name not in tensors:
            missing.append(name)
    for name in stored:
        if name not in known and not any(re.search(buffer, name) for buffer in layout.buffers):
            unexpected.append(name)
    for name, x in tensors.items():
        if x.shape != needed[name] or not jnp.issubdtype(x.dtype, np.floating):
            misshapen.append(f"{name} ({x.shape} of {x.dtype}, expected {needed[name]})")
    for copy, name in layout.duplicates.items():
        if copy in stored and name in tensors and not _equal(stored[copy], tensors[name]):
            different.append(f"{copy} (of {name})")
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "misshapen": misshapen,
        _DIFFERENT: different,
    }
    if any(problems.values()):
        sentences = []
        for kind, names in problems.items():
            if names:
                sentences.append(f"{kind.capitalize()}: {', '.join(names)}.")
        raise ValueError(
            f"{where} does not hold the tensors of the model that its settings describe. "
            + " ".join(sentences)
            + _way_out(layout, stored, problems, settings)
        )
    return tensors


def _way_out(
    layout: Layout,
    stored: Mapping[str, Stored],
    problems: Mapping[str, list[str]],
    settings: Mapping[str, Any],
) -> str:
    """Returns what to do about tensors that do not match, if known."""
    for prefix, origin in _WRAPPERS.items():
        if stored and all(name.startswith(prefix) for name in stored):
            return (
                f" All names begin with the prefix `{prefix}`, which {origin} adds: save the model "
                "that it wraps."
            )
    head = layout.table.get("head")
    if head and problems["missing"] == [head.name] and not problems["unexpected"]:
        return " If the head shares the weights of the embedding, pass `tied=True`."
    if layout.tied and problems[_DIFFERENT]:
        for name in layout.duplicates:
            if name in stored and "head" in name:
                return f" To load {name} as a separate head, pass `tied=False`."
        return ""
    for name in settings.get("architectures") or ():
        # Such as `LlamaForSequenceClassification`, and neither of the heads that generate text.
        is_other = re.search(r"For(?!CausalLM|Conditional)\w+$", str(name))
        if is_other and problems["unexpected"]:
            return (
                f" The file is of a {name}, whose head is not implemented for this type of model."
            )
    return ""


def _equal(a: Stored, b: Stored) -> bool:
    if a.shape != b.shape or a is b:
        return a is b
    # In parts, since the embedding of a large vocabulary has gigabytes.
    boxes = split_box(a.shape, range(len(a.shape)), COMPARED_BYTES // a.dtype.itemsize)
    return all(np.array_equal(a.take(box), b.take(box)) for box in boxes)
