"""Saving adapters in PEFT's format."""

import functools as ft
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from ..core._durable_files import sync_name
from ..core._errors import absolute_path
from ..core._frames import hide_frames
from ..core._pytree import leaf_paths
from ..core._train_state import refuse_state
from ..distributed._arrays import whole
from ..distributed._kv_store import decide
from ..models._einsum import LowRank
from ..models._quantised_weight import QuantisedWeight, unquantised
from ..pretrained._registry import family_of
from ..pretrained._safetensors import write_safetensors
from ..pretrained._settings import Settings
from ..pretrained._slices import insert
from ..pretrained._tensors import SOME_LAYERS, Tensor, tensor_names, tensor_shape
from ._peft_names import CONFIG, PREFIX, TENSORS, factors_of, is_saved, live_table, module_of
from ._peft_tied import tied_heads
from ._targets import inputs_of


@dataclass(frozen=True)
class Part:
    """The adapter of one array, and the published tensors of its factors."""

    published: Tensor
    tensors: tuple[Tensor, Tensor]
    a: np.ndarray  # (*stack, *inputs, rank)
    b: np.ndarray  # (*stack, rank, *outputs)
    scale: float


@dataclass(frozen=True)
class AdaptedModule:
    """The adapters of one published matrix in all layers; several if the matrix is fused."""

    parts: tuple[Part, ...]

    @ft.cached_property
    def same_inputs(self) -> bool:
        """Whether all parts have the same A, as in adapters of fused matrices that PEFT trained."""
        first, *others = self.parts
        return all(np.array_equal(part.a, first.a) for part in others)

    @property
    def rank(self) -> int:
        if self.same_inputs:
            return self.parts[0].a.shape[-1]
        # `arrays` concatenates the parts' A.
        return sum(part.a.shape[-1] for part in self.parts)

    @property
    def scale(self) -> float:
        """The common scale of all parts; 1 if they differ, in which case B is scaled instead."""
        first, *others = self.parts
        if any(part.scale != first.scale for part in others):
            return 1.0
        return first.scale

    @property
    def alpha(self) -> int | float:
        # PEFT divides it by the rank again.
        alpha = self.scale * self.rank
        if float(alpha).is_integer():
            return int(alpha)
        return alpha

    @property
    def names(self) -> list[str]:
        first = self.parts[0]
        return list(map(module_of, tensor_names(first.published, first.a.shape).values()))

    @property
    def pattern(self) -> str:
        """A regular expression that matches these names."""
        published = self.parts[0].published
        if re.search(SOME_LAYERS, published.name):  # of some of the layers
            return "|".join(self.names).replace(".", r"\.")
        text = module_of(published.name).replace(".", r"\.")
        return text.format(**dict.fromkeys(published.fields, r"\d+"))

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        a_tensor, b_tensor = self.parts[0].tensors
        b_names = tensor_names(b_tensor, self.parts[0].b.shape)
        for index, a_name in tensor_names(a_tensor, self.parts[0].a.shape).items():
            a, b = [], []
            for part in self.parts:
                a.append(_published(part.tensors[0], part.a[index]))
                outputs = _published(part.tensors[1], part.b[index])
                if part.scale != self.scale:  # then the common scale is 1
                    outputs = outputs * np.asarray(part.scale, outputs.dtype)
                b.append(outputs)
            # The parts have separate outputs, so B is block-diagonal unless they share A.
            if self.same_inputs:
                yield a_name, a[0]  # (rank, inputs)
                # Each part is zero where the outputs of the others are.
                yield b_names[index], sum(b[1:], b[0])  # (outputs, rank)
            else:
                yield a_name, np.concatenate(a)  # (sum of ranks, inputs)
                yield b_names[index], np.concatenate(b, axis=1)


@hide_frames
def save_adapters(model: PyTree, path: str | Path, *, modules_to_save: Sequence[str] = ()) -> None:
    """Saves the adapters of a model in the format of `peft`.

    Writes `adapter_config.json` and `adapter_model.safetensors`, for the `transformers` model that
    [`redcoast.save_pretrained`][] would write. If that model fuses Q, K and V in one matrix, their
    adapters become one equivalent adapter: with the same A if they share it, and otherwise with the
    sum of their ranks. In a job with several processes, all of them must call this.

    **Arguments:**

    - `model`: a model of `redcoast.models` with adapters.
    - `path`: a directory without such files. It is created if it does not exist.
    - `modules_to_save`: the modules to save entirely, such as a trained `"classifier"`, by the ends
        of their names in the `transformers` model. Modules that [`redcoast.lora.load_adapters`][]
        replaced are always saved. An embedding is saved together with a head that shares its
        weights, and they stay tied in PEFT.

    **Raises:**

    `ValueError` if `model` is not a model of `redcoast.models`, has no adapters, or has an adapter
    that PEFT does not support; if no module has a name in `modules_to_save`; or if the files exist.

    !!! Example

        ```py
        lora.save_adapters(state.model, "adapters")
        # In torch: peft.PeftModel.from_pretrained(model, "adapters")
        ```
    """
    refuse_state(model, "save_adapters")
    path = absolute_path("path", path)
    # All processes use the list of process 0, which might write before the others read.
    existing = [name for name in (CONFIG, TENSORS) if (path / name).exists()]
    if existing := decide("the files of adapters", existing):
        raise ValueError(
            f"{path} has {' and '.join(existing)} already, and nothing is overwritten. Choose "
            "another directory."
        )
    modules = _modules(model)
    to_save = dict.fromkeys(modules_to_save)
    for node in leaf_paths(model, LowRank).values():
        to_save |= dict.fromkeys(node.saved_with)
    saved = _saved_modules(model, list(to_save))
    if jax.process_index() == 0:
        path.mkdir(parents=True, exist_ok=True)
        arrays = {}
        for module in modules.values():
            arrays |= dict(module.arrays())
        arrays |= saved.arrays
        # A safetensors file begins with the names and shapes of all its tensors.
        shapes = {}
        for name, x in arrays.items():
            shapes[name] = x.shape, x.dtype
        write_safetensors(path / TENSORS, shapes, iter(arrays.values()))
        text = json.dumps(_settings(modules, saved), indent=2, sort_keys=True)
        (path / CONFIG).write_text(text + "\n")
        sync_name(path)
    multihost_utils.sync_global_devices("redcoast.save_adapters")


def _modules(model: PyTree) -> dict[str, AdaptedModule]:
    family = family_of(model)
    if family is None:
        raise ValueError(
            "`save_adapters` saves adapters of models of `redcoast.models`, but got a "
            f"{type(model).__name__}. `rc.save_checkpoint(path, lora.adapters(model))` saves the "
            "adapters of any model."
        )
    adapted = leaf_paths(model, LowRank)
    if not adapted:
        raise ValueError("The model has no adapters. Add them first, with `lora.add_adapters`.")
    table = live_table(model)
    parts: dict[str, tuple[Part, ...]] = {}
    for path, node in adapted.items():
        published = table[path]
        if (tensors := factors_of(published)) is None:
            raise ValueError(
                f"{path} is published as {published.name}, which is not the weight of a module "
                "that PEFT adapts. Merge the adapter (`lora.merge`), or adapt other weights."
            )
        part = Part(published, tensors, whole(node.a), whole(node.b), node.scale)
        # The parts of a fused matrix have the same name.
        parts[published.name] = (*parts.get(published.name, ()), part)
    modules = map(AdaptedModule, parts.values())
    return dict(zip(parts, modules, strict=True))


@dataclass(frozen=True)
class SavedModules:
    """The modules that are saved with the adapters."""

    modules: list[str]  # the names that the modules end with
    arrays: dict[str, np.ndarray]  # their tensors
    tied: bool = False  # whether they are an embedding and a head with the same weights


def _saved_modules(model: PyTree, modules: list[str]) -> SavedModules:
    """Returns the tensors of modules that are saved entirely."""
    kinds = jax.Array, np.ndarray, LowRank, QuantisedWeight
    leaves, table = leaf_paths(model, kinds), live_table(model)
    names = {}
    for path, leaf in leaves.items():
        if path in table:
            for index, name in tensor_names(table[path], leaf.shape).items():
                names[name] = path, index
    heads = {}
    for head, embed in tied_heads(model).items():
        if embed in names:
            heads[head] = embed
    for module in modules:
        if not any(is_saved(name, [module]) for name in (*names, *heads)):
            known = {module_of(name).rpartition(".")[2] for name in names}
            raise ValueError(
                f"`modules_to_save` has {module!r}, but no module of the `transformers` model has "
                f"this name. Its modules are {', '.join(sorted(known))}."
            )
    # An embedding is saved with its tied heads, and a head with its embedding.
    pairs = {}
    for head, embed in heads.items():
        if is_saved(embed, modules) or is_saved(head, modules):
            pairs[head] = embed
    arrays, tied = {}, dict.fromkeys(pairs.values())
    for name, (path, index) in names.items():
        if is_saved(name, modules) or name in tied:
            # The weight of an adapter may be quantised too.
            weight = unquantised(getattr(leaves[path], "weight", leaves[path]))
            arrays[PREFIX + name] = _published(table[path], whole(weight)[index])
    more = []
    for head, embed in pairs.items():
        arrays[PREFIX + head] = arrays[PREFIX + embed]
        for module in (module_of(head), module_of(embed)):
            if not is_saved(f"{module}.weight", modules):
                more.append(module)
    return SavedModules([*modules, *more], arrays, bool(pairs))


def _published(tensor: Tensor, part: np.ndarray) -> np.ndarray:
    """Converts the part of an array at one index of its stack to its published tensor."""
    # The shape of a stack is expected, which the part no longer has: it counts as a stack of one.
    out = np.zeros(tensor_shape(tensor, (1,) * len(tensor.fields) + part.shape), part.dtype)
    insert(tensor, part, out)
    return out


def _settings(modules: Mapping[str, AdaptedModule], saved: SavedModules) -> Settings:
    first = next(iter(modules.values()))
    targets, ranks, alphas, inputs_first = [], {}, {}, False
    for module in modules.values():
        targets += module.names
        # PEFT's settings have one rank and alpha, and patterns for the modules that differ.
        if module.rank != first.rank:
            ranks[module.pattern] = module.rank
        if module.alpha != first.alpha:
            alphas[module.pattern] = module.alpha
        for part in module.parts:
            inputs_first |= inputs_of(part.published) == part.published.left[0]
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        # As PEFT saves it. Whoever trains the adapters further passes `is_trainable`.
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        # Whether published weights are (inputs, outputs), as those of GPT-2.
        "fan_in_fan_out": inputs_first,
        "target_modules": targets,
        "modules_to_save": saved.modules or None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
    }
    if saved.tied:
        settings["ensure_weight_tying"] = True
    return settings
