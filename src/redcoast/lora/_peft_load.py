"""Adapters from PEFT's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models._einsum import LowRank
from ..pretrained._files import file_inside
from ..pretrained._lazy_tensor import Stored
from ..pretrained._registry import family_of
from ..pretrained._safetensors import read_safetensors
from ..pretrained._slices import locate
from ..pretrained._tensors import Tensor, tensor_names, tensor_shape
from ._peft_config import PeftConfig, read_config
from ._peft_names import PREFIX, TENSORS, factors_of
from ._targets import find_adapted, matrix_of, show_path

Index = tuple[int, ...]
Ranks = dict[Index, int]


@dataclass(frozen=True)
class Slot:
    """A weight that adapters may be of.

    - `tensors`: those that the two factors of an adapter are made of.
    - `sides`: the shapes of the weight's stack, inputs and outputs.
    """

    path: str
    weight: Any
    tensors: tuple[Tensor, Tensor]
    sides: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> dict[Index, tuple[str, str]]:
        """The names of both factors, for each index in the stack."""
        a, b = (tensor_names(tensor, self.sides[0]) for tensor in self.tensors)
        return {index: (a[index], b[index]) for index in a}

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the arrays of an adapter of this rank."""
        stack, inputs, outputs = self.sides
        return (*stack, *inputs, rank), (*stack, rank, *outputs)

    def find(self, stored: Mapping[str, Stored]) -> Ranks:
        """The ranks of the adapters that there are."""
        return {i: _rank(stored[a]) for i, (a, _) in self.names.items() if a in stored}

    def read(self, ranks: Ranks, stored: Mapping[str, Stored], config: PeftConfig) -> Any:
        """The weight with its adapters, if there are any."""
        if not ranks:
            return None
        names = self.names
        scales = {i: config.scale(_module(names[i][0]), rank) for i, rank in ranks.items()}
        scale = next(iter(scales.values())) if len({*scales.values()}) == 1 else 1.0
        # Of a stack, those of less rank than others, or without adapters, have zeros. They stay
        # zeros in training, as products of two.
        dtype = stored[names[next(iter(ranks))][0]].dtype
        a, b = (np.zeros(shape, dtype) for shape in self.shapes(max(ranks.values())))
        for index, rank in ranks.items():
            one_a, one_b = (self._read(k, index, rank, stored) for k in (0, 1))
            factor = 1.0 if scales[index] == scale else scales[index]
            a[index][..., :rank] = one_a
            b[index][:rank] = one_b * np.asarray(factor, one_b.dtype)
        return LowRank(self.weight, jnp.asarray(a), jnp.asarray(b), scale)

    def _read(
        self, factor: int, index: Index, rank: int, stored: Mapping[str, Stored]
    ) -> np.ndarray:
        shape = self.shapes(rank)[factor]
        box = (*(slice(i, i + 1) for i in index), *(slice(n) for n in shape[len(index) :]))
        window = locate(self.tensors[factor], shape, box)
        part = window.place(stored[window.names[0]].take(window.slices)[None])
        return part.reshape(shape[len(index) :])


def load_adapters(model: Any, path: str | Path) -> Any:
    """Loads adapters that the package `peft`, or [`redcoast.lora.save_adapters`][], has saved.

    Where they are beside a matrix that has Q, K and V in one, each of these gets its part, with the
    same A. Layers that have none get one that is zero. The dropout of their training
    (`lora_dropout`) is not applied.

    **Arguments:**

    - `model`: a model of `redcoast.models` without adapters, of the architecture and sizes that
        they were trained on.
    - `path`: a directory with `adapter_config.json` and `adapter_model.safetensors`.

    **Returns:**

    The adapted model; the adapters have the dtype of the file.

    **Raises:**

    `ValueError` if there are no adapters at `path`, or if they have settings that are not
    implemented (DoRA, biases, other saved modules, ...), which are named; and if the file does not
    hold adapters of this model: all tensors that are missing, unexpected or misshapen are listed.

    !!! Example

        ```py
        model = lora.load_adapters(rc.load_pretrained("SmolLM2-135M"), "adapters")
        merged = lora.merge(model)
        ```
    """
    path = Path(path).expanduser().absolute()
    config = read_config(path)
    slots = _slots(model)
    stored = _stored(model, path)
    found = {slot.path: slot.find(stored) for slot in slots}
    _check(slots, found, stored, config, path)
    new = {slot.path: slot.read(found[slot.path], stored, config) for slot in slots}
    put = lambda where, leaf: new.get(show_path(where)) or leaf
    return jax.tree_util.tree_map_with_path(put, model)


def _slots(model: Any) -> list[Slot]:
    family = family_of(model)
    if family is None:
        raise ValueError(
            "`load_adapters` loads adapters of models of `redcoast.models`, and not of a "
            f"{type(model).__name__}."
        )
    if adapted := find_adapted(model):
        raise ValueError(
            f"{', '.join(adapted)} has an adapter already. Merge it (`lora.merge`) before loading "
            "another."
        )
    table = family.hf.tensors(model.config)
    slots = []
    for where, leaf in jax.tree_util.tree_leaves_with_path(model):
        tensor = table.get(show_path(where))
        if tensor and (tensors := factors_of(tensor)) and (matrix := matrix_of(tensor)):
            slots.append(Slot(show_path(where), leaf, tensors, matrix.sides(leaf.shape)))
    return slots


def _stored(model: Any, path: Path) -> dict[str, Stored]:
    if not (path / TENSORS).is_file():
        raise ValueError(
            f"{path} has no {TENSORS}. If its adapters are pickled (`adapter_model.bin`), which is "
            "refused since opening a pickle runs code, save them with `safe_serialization=True`."
        )
    stored = read_safetensors(file_inside(path, TENSORS))
    base = PREFIX + getattr(getattr(family_of(model), "hf", None), "BASE_PREFIX", "")
    if any(name.startswith(base) for name in stored):
        return stored
    # Trained beside the base of a model alone, without its head.
    return {base + name.removeprefix(PREFIX): x for name, x in stored.items()}


def _check(
    slots: Sequence[Slot],
    found: Mapping[str, Ranks],
    stored: Mapping[str, Stored],
    config: PeftConfig,
    path: Path,
) -> None:
    """Raises one error for all tensors that are missing, unexpected or misshapen."""
    used = [slot for slot in slots if found[slot.path]]
    # Parts of a fused matrix are made of the same tensors.
    missing: dict[str, None] = {}
    misshapen: dict[str, None] = {}
    for slot in used:
        for index, names in slot.names.items():
            rank = found[slot.path].get(index)
            if rank is None and config.some_layers:
                continue
            missing |= dict.fromkeys(name for name in names if name not in stored)
            for name, tensor, shape in zip(
                names, slot.tensors, slot.shapes(rank or 1), strict=True
            ):
                right = tensor_shape(tensor, shape)
                if rank is not None and name in stored and stored[name].shape != right:
                    misshapen[f"{name} ({stored[name].shape}, and not {right})"] = None
    known = {name for slot in slots for names in slot.names.values() for name in names}
    unexpected = [name for name in stored if name not in known]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    problems = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    if problems or not used:
        raise ValueError(
            f"{path} does not hold adapters of this model. "
            f"{'; '.join(problems) or 'There are none'}."
        )


def _rank(a: Stored) -> int:
    return a.shape[0] if a.shape else 0  # which is no rank, and found to be misshapen


def _module(a_name: str) -> str:
    return a_name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
