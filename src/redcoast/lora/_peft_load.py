"""Loading adapters in PEFT's format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core._frames import hide_frames
from ..core._pytree import show_path
from ..models._einsum import LowRank
from ..pretrained._files import file_inside
from ..pretrained._lazy_tensor import Stored
from ..pretrained._registry import family_of
from ..pretrained._safetensors import read_safetensors
from ..pretrained._slices import locate
from ..pretrained._tensors import Tensor, tensor_names, tensor_shape
from ._peft_config import PeftConfig, read_adapter_config
from ._peft_names import PREFIX, TENSORS, factors_of, is_in, live_table, module_of
from ._targets import find_adapted, matrix_of

Index = tuple[int, ...]
Ranks = dict[Index, int]


@dataclass(frozen=True)
class Slot:
    """A weight that may have an adapter.

    - `tensors`: the published tensors of the two factors of the adapter.
    - `filed`: the name of the weight in files, which may differ from that of the live module.
    - `sides`: the shapes of the weight's stack, inputs and outputs.
    """

    path: str
    weight: Any
    tensors: tuple[Tensor, Tensor]
    filed: Tensor
    sides: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> dict[Index, tuple[str, str]]:
        """The names of the tensors of both factors, for each index in the stack."""
        a, b = (tensor_names(tensor, self.sides[0]) for tensor in self.tensors)
        return {index: (a[index], b[index]) for index in a}

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of `a` and `b` for this rank."""
        stack, inputs, outputs = self.sides
        return (*stack, *inputs, rank), (*stack, rank, *outputs)

    def find(self, stored: Mapping[str, Stored]) -> Ranks:
        """Returns the ranks of the stored adapters, by their index in the stack."""
        # A rank of 0 is invalid, so `_check` lists the tensor as misshapen.
        found = {i: stored[a].shape for i, (a, _) in self.names.items() if a in stored}
        return {i: shape[0] if shape else 0 for i, shape in found.items()}

    def read(self, ranks: Ranks, stored: Mapping[str, Stored], config: PeftConfig) -> Any:
        """Reads the adapters of the weight; returns None if there are none."""
        if not ranks:
            return None
        names = self.names
        module = lambda name: name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        filed = tensor_names(self.filed, self.sides[0])
        named = {i: (module(names[i][0]), module_of(filed[i])) for i in ranks}
        scales = {i: config.scale(named[i], rank) for i, rank in ranks.items()}
        scale = next(iter(scales.values())) if len({*scales.values()}) == 1 else 1.0
        # Matrices in a stack with a smaller rank, or without an adapter, are padded with zeros in
        # both factors. These stay zero in training, because the gradient of each is a product with
        # the other.
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


@hide_frames
def load_adapters(model: Any, path: str | Path) -> Any:
    """Loads adapters that were saved by `peft` or by [`redcoast.lora.save_adapters`][].

    The adapter of a matrix that fuses Q, K and V is split into one for each, with the same A. If
    only some layers have adapters, those of the others are zero. Modules that were trained and
    saved entirely (`modules_to_save`), such as a classifier, replace those of the model, in its
    dtype. Dropout of adapters
    (`lora_dropout`) is not implemented and is ignored.

    **Arguments:**

    - `model`: a model of `redcoast.models` without adapters, with the architecture and sizes that
        the adapters were trained for.
    - `path`: a directory with `adapter_config.json` and `adapter_model.safetensors`.

    **Returns:**

    The model with adapters. Their dtype is that of the file.

    **Raises:**

    `FileNotFoundError` if `path` does not exist. `ValueError` if it holds no adapters; if they have
    settings that are not implemented (DoRA, biases, ...), which are named; or
    if the tensors do not match the model (all missing, unexpected and misshapen ones are listed).

    !!! Example

        ```py
        model = lora.load_adapters(rc.load_pretrained("SmolLM2-135M"), "adapters")
        merged = lora.merge(model)
        ```
    """
    path = Path(path).expanduser().absolute()
    config = read_adapter_config(path)
    slots = _slots(model)
    stored = _stored(model, path, slots)
    found = {slot.path: slot.find(stored) for slot in slots}
    saved = _saved(model, config)
    _check(slots, found, _shapes(model, saved), stored, config, path)
    new = {slot.path: slot.read(found[slot.path], stored, config) for slot in slots}

    def put(where, leaf):
        tensor = saved.get(show_path(where))
        adapted = new.get(show_path(where))
        return adapted or (leaf if tensor is None else _read_whole(tensor, leaf, stored))

    return jax.tree_util.tree_map_with_path(put, model)


def _saved(model: Any, config: PeftConfig) -> dict[str, Tensor]:
    """Returns the tensors of arrays that are saved entirely (`modules_to_save`), by their path."""
    return {
        path: Tensor(PREFIX + tensor.name, tensor.pattern, **dict(tensor.fixed))
        for path, tensor in live_table(model).items()
        if is_in(tensor.name, config.saved)
    }


def _shapes(model: Any, saved: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of these arrays, by their names."""
    leaves = {show_path(where): x for where, x in jax.tree_util.tree_leaves_with_path(model)}
    return {
        name: tensor_shape(tensor, leaves[path].shape)
        for path, tensor in saved.items()
        if path in leaves
        for name in tensor_names(tensor, leaves[path].shape).values()
    }


def _read_whole(tensor: Tensor, leaf: Any, stored: Mapping[str, Stored]) -> Any:
    window = locate(tensor, leaf.shape, tuple(slice(n) for n in leaf.shape))
    read = np.stack([stored[name].take(window.slices) for name in window.names])
    array = window.place(read).astype(leaf.dtype)
    return jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else array


def _slots(model: Any) -> list[Slot]:
    family = family_of(model)
    if family is None:
        raise ValueError(
            "`load_adapters` loads adapters for models of `redcoast.models`, but got a "
            f"{type(model).__name__}."
        )
    if adapted := find_adapted(model):
        raise ValueError(
            f"{', '.join(adapted)} has an adapter already. Merge it (`lora.merge`) before loading "
            "another."
        )
    table, filed = live_table(model), family.hf.tensors(model.config)
    slots = []
    for where, leaf in jax.tree_util.tree_leaves_with_path(model):
        path = show_path(where)
        tensor = table.get(path)
        if tensor and (tensors := factors_of(tensor)) and (matrix := matrix_of(tensor)):
            slots.append(Slot(path, leaf, tensors, filed[path], matrix.sides(leaf.shape)))
    return slots


def _stored(model: Any, path: Path, slots: Sequence[Slot]) -> dict[str, Stored]:
    if not (path / TENSORS).is_file():
        raise ValueError(
            f"{path} has no {TENSORS}. Adapters that are pickled (`adapter_model.bin`) are "
            "rejected, because unpickling runs any code in the file: save them with "
            "`safe_serialization=True`."
        )
    hf = getattr(family_of(model), "hf", None)
    rename = getattr(hf, "module_name", str)  # PEFT used the names of files before transformers 5
    read = read_safetensors(file_inside(path, TENSORS))
    stored = {rename(name): x for name, x in read.items()}
    base = PREFIX + getattr(hf, "BASE_PREFIX", "")
    known = {name for slot in slots for both in slot.names.values() for name in both}
    if any(name.startswith(base) or name in known for name in stored):
        return stored
    # The adapters were trained for the base model, without its head.
    return {base + name.removeprefix(PREFIX): x for name, x in stored.items()}


def _check(
    slots: Sequence[Slot],
    found: Mapping[str, Ranks],
    saved: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    config: PeftConfig,
    path: Path,
) -> None:
    """Raises one error for all tensors that are missing, unexpected or misshapen."""
    used = [slot for slot in slots if found[slot.path]]
    # A dictionary removes duplicates: the parts of a fused matrix share tensors.
    expected: dict[str, tuple[int, ...] | None] = {}
    for slot in used:
        for index, names in slot.names.items():
            rank = found[slot.path].get(index)
            if rank is None and config.some_layers:
                continue
            for name, tensor, shape in zip(
                names, slot.tensors, slot.shapes(rank or 1), strict=True
            ):
                expected[name] = None if rank is None else tensor_shape(tensor, shape)
    expected |= saved
    missing = [name for name in expected if name not in stored]
    misshapen = [
        f"{name} ({stored[name].shape}, expected {right})"
        for name, right in expected.items()
        if right is not None and name in stored and stored[name].shape != right
    ]
    known = {name for slot in slots for names in slot.names.values() for name in names}
    unexpected = [name for name in stored if name not in known | saved.keys()]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    problems = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    if problems or not used:
        raise ValueError(
            f"{path} does not hold adapters of this model. "
            f"{'; '.join(problems) or 'There are none'}."
        )
