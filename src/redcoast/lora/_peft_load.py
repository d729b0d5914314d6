"""Loading adapters in PEFT's format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..core._errors import absolute_path
from ..core._frames import hide_frames
from ..core._pytree import leaf_paths, show_path
from ..models._einsum import LowRank
from ..models._quantised_weight import is_quantised
from ..pretrained._files import file_inside
from ..pretrained._lazy_tensor import Stored
from ..pretrained._matrix_roles import matrix_of
from ..pretrained._read_plan import read_at, read_whole
from ..pretrained._registry import family_of, hf_names
from ..pretrained._safetensors import read_safetensors
from ..pretrained._tensors import Tensor, tensor_name, tensor_names, tensor_shape
from ._peft_config import PeftConfig, read_adapter_config
from ._peft_names import (
    PREFIX,
    TENSORS,
    factors_of,
    is_in,
    is_saved,
    live_table,
    module_of,
    renamed,
)
from ._peft_tied import tied_heads, with_own_head
from ._targets import with_paths

Index = tuple[int, ...]
Ranks = dict[Index, int]
Leaf = Any  # an array, which may be abstract
_PROBLEMS = ("missing", "unexpected", "misshapen")


@dataclass(frozen=True)
class Slot:
    """A weight that may have an adapter."""

    path: str
    weight: Leaf
    tensors: tuple[Tensor, Tensor]  # the published tensors of the two factors of the adapter
    filed: Tensor  # the name of the weight in files, which may differ from the live module's name
    sides: tuple[tuple[int, ...], ...]  # the shapes of the weight's stack, inputs and outputs

    @property
    def names(self) -> dict[Index, tuple[str, str]]:
        """The names of the tensors of both factors, for each index in the stack."""
        of_a, of_b = self.tensors
        names = tensor_names(of_b, self.sides[0])
        return {index: (a, names[index]) for index, a in tensor_names(of_a, self.sides[0]).items()}

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stack, inputs, outputs = self.sides
        return (*stack, *inputs, rank), (*stack, rank, *outputs)

    def find(self, stored: Mapping[str, Stored]) -> Ranks:
        """Returns the ranks of the stored adapters, by their index in the stack."""
        ranks = {}
        for index, (a, b) in self.names.items():
            # One of the two is enough, so that `_check` lists the other as missing. A rank of 0 is
            # invalid, so that it lists the tensor as misshapen.
            if a in stored:
                # `lora_A` is (rank, inputs), and `lora_B` (outputs, rank).
                ranks[index] = next(iter(stored[a].shape), 0)
            elif b in stored:
                ranks[index] = next(reversed(stored[b].shape), 0)
        return ranks

    def modules(self, index: Index) -> tuple[str, str]:
        """Returns the names of the module of a weight in the stack, in memory and in files."""
        live = tensor_name(self.tensors[0], index).removeprefix(PREFIX)
        return live.removesuffix(".lora_A.weight"), module_of(tensor_name(self.filed, index))

    def read(
        self, ranks: Ranks, stored: Mapping[str, Stored], config: PeftConfig
    ) -> LowRank | None:
        """Reads the adapters of the weight; returns None if there are none."""
        if not ranks:
            return None
        scales = {}
        for index, rank in ranks.items():
            scales[index] = config.scale(self.modules(index), rank)
        scale = 1.0  # if they differ, in which case they are factors of `b`
        if len({*scales.values()}) == 1:
            scale = next(iter(scales.values()))
            scales = dict.fromkeys(scales, 1.0)
        # Matrices in a stack with a smaller rank, or without an adapter, are padded with zeros in
        # both factors. These stay zero in training, because the gradient of each is a product with
        # the other.
        name_of_a, _ = self.names[next(iter(ranks))]
        dtype = stored[name_of_a].dtype
        of_a, of_b = self.shapes(max(ranks.values()))  # with the stack
        a, b = np.zeros(of_a, dtype), np.zeros(of_b, dtype)
        for index, rank in ranks.items():
            a[index][..., :rank] = self._read(0, index, rank, stored)  # (*inputs, rank)
            part = self._read(1, index, rank, stored)  # (rank, *outputs)
            b[index][:rank] = part * np.asarray(scales[index], part.dtype)
        return LowRank(self.weight, jnp.asarray(a), jnp.asarray(b), scale)

    def _read(
        self, factor: int, index: Index, rank: int, stored: Mapping[str, Stored]
    ) -> np.ndarray:
        return read_at(self.tensors[factor], self.shapes(rank)[factor], index, stored)


@hide_frames
def load_adapters(model: PyTree, path: str | Path) -> PyTree:
    """Loads adapters that were saved by `peft` or by [`redcoast.lora.save_adapters`][].

    The adapter of a matrix that fuses Q, K and V is split into one adapter for each, with the same
    A. If only some layers have adapters, the adapters of the other layers are zero. Modules that
    are saved entirely (`modules_to_save`, such as a classifier; embeddings that PEFT saves with
    adapters) replace the modules of the model, in its dtype. If a tied output head then has other
    weights than the embedding, or has an adapter, it becomes a separate array, as in PEFT, and
    `config.tied` is False. Dropout of adapters (`lora_dropout`) is not implemented, and is ignored.

    **Arguments:**

    - `model`: a model of `redcoast.models` without adapters, with the architecture and sizes that
        the adapters were trained for.
    - `path`: a directory with `adapter_config.json` and `adapter_model.safetensors`.

    **Returns:**

    The model with adapters. They have the dtype of the file. [`redcoast.lora.save_adapters`][]
    saves the replaced modules with them.

    **Raises:**

    `FileNotFoundError` if `path` does not exist. `ValueError` if it contains no adapters; if a
    setting is not implemented (DoRA, biases, ...); or if the tensors do not match the model (all
    missing, unexpected and misshapen tensors are listed).

    !!! Example

        ```py
        model = lora.load_adapters(rc.load_pretrained("SmolLM2-135M"), "adapters")
        merged = lora.merge(model)
        ```
    """
    path = absolute_path("path", path)
    config = read_adapter_config(path)
    if family_of(model) is None:
        raise ValueError(
            "`load_adapters` loads adapters for models of `redcoast.models`, but got a "
            f"{type(model).__name__}."
        )
    if adapted := leaf_paths(model, LowRank):
        raise ValueError(
            f"{', '.join(adapted)} has an adapter already. Merge it (`lora.merge`) before loading "
            "another."
        )
    stored = _stored(model, path)
    _check_vocabulary(model, stored, path)
    # Before anything is compared with the model, whose arrays this may change.
    model, stored = with_own_head(model, stored, config, path)
    table, filed = live_table(model), hf_names(model.config).tensors(model.config)
    slots = []
    for name, leaf in _leaves(model).items():
        tensor = table.get(name)
        if tensor and (tensors := factors_of(tensor)) and (matrix := matrix_of(tensor)):
            slots.append(Slot(name, leaf, tensors, filed[name], matrix.sides(leaf.shape)))
    # First the ranks alone, since one error lists everything that is wrong before arrays are read.
    ranks, new = {}, {}
    for slot in slots:
        ranks[slot.path] = slot.find(stored)
    _check(slots, ranks, _shapes(model), stored, config, path)
    for slot in slots:
        new[slot.path] = slot.read(ranks[slot.path], stored, config)
    published, leaves, replaced = _whole_tensors(model), _leaves(model), {}
    modules: dict[str, None] = {}  # that differ from the model's, by names that PEFT knows
    for name, tensor in published.items():
        full_names = tensor_names(tensor, leaves[name].shape).values()
        own = [full.removeprefix(PREFIX) for full in full_names if full in stored]
        # Some of its layers are enough: the others stay as the model has them.
        if not own:
            continue
        replaced[name] = read_whole(tensor, leaves[name], stored)
        named = []
        for module in config.saved:
            if any(is_saved(short, [module]) for short in own):
                named.append(module)
        # The settings do not list it, but training has changed it.
        if not named and not jnp.array_equal(replaced[name], leaves[name]):
            named = map(module_of, own)
        modules |= dict.fromkeys(named)

    def put(key_path, leaf):
        name = show_path(key_path)
        leaf, node = replaced.get(name, leaf), new.get(name)
        if node is None:
            return leaf
        return replace(node, weight=leaf, saved_with=tuple(modules))

    return jax.tree_util.tree_map_with_path(put, model, is_leaf=is_quantised)


def _leaves(model: PyTree) -> dict[str, Leaf]:
    return dict(with_paths(model, is_quantised))


def _whole_tensors(model: PyTree) -> dict[str, Tensor]:
    """Returns the published tensors of the arrays of a model, with PEFT's prefix, by path."""
    leaves, tensors = _leaves(model), {}
    for path, tensor in live_table(model).items():
        if path in leaves:
            tensors[path] = renamed(tensor, PREFIX + tensor.name)
    return tensors


def _shapes(model: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the published tensors of a model, with PEFT's prefix, by name."""
    leaves, shapes = _leaves(model), {}
    for path, tensor in _whole_tensors(model).items():
        names = tensor_names(tensor, leaves[path].shape).values()
        shapes |= dict.fromkeys(names, tensor_shape(tensor, leaves[path].shape))
    return shapes


def _stored(model: PyTree, path: Path) -> dict[str, Stored]:
    if not (path / TENSORS).is_file():
        raise ValueError(
            f"{path} has no {TENSORS}. Adapters that are pickled (`adapter_model.bin`) are "
            "rejected, because unpickling runs any code in the file: save them with "
            "`safe_serialization=True`."
        )
    hf = hf_names(model.config)
    rename = getattr(hf, "module_name", str)  # PEFT used the names of files before transformers 5
    stored = {}
    for name, tensor in read_safetensors(file_inside(path, TENSORS)).items():
        # PEFT names the weight of an adapted embedding or head `base_layer`.
        name = rename(name.replace(".base_layer.", "."))
        if name in stored:
            raise ValueError(f"{path / TENSORS} holds {name} twice, under two names.")
        stored[name] = tensor
    base = PREFIX + getattr(hf, "BASE_PREFIX", "")
    starts = [base]
    for name in (*tied_heads(model), *_shapes(model)):
        name = PREFIX + name.removeprefix(PREFIX)
        if not name.startswith(base):  # the base model lacks it, such as a head
            starts.append(f"{module_of(name)}.")
    if any(name.startswith(tuple(starts)) for name in stored):
        return stored
    # The adapters were trained for the base model, without its head.
    renamed_tensors = {}
    for name, tensor in stored.items():
        renamed_tensors[base + name.removeprefix(PREFIX)] = tensor
    return renamed_tensors


def _check_vocabulary(model: PyTree, stored: Mapping[str, Stored], path: Path) -> None:
    """Raises if the tensors are from a model whose vocabulary was resized."""
    shapes = _shapes(model)
    # A tied head has no array of its own, but the file may hold a copy.
    for head, embed in tied_heads(model).items():
        shapes[PREFIX + head] = shapes[PREFIX + embed]
    vocab = getattr(model.config, "vocab", None)
    for name, x in stored.items():
        right = shapes.get(name, ())
        # It differs only in its first dimension, and that is the vocabulary.
        if right[:1] == (vocab,) and x.shape[1:] == right[1:] and x.shape[0] != vocab:
            raise ValueError(
                f"The adapters in {path} were trained with a vocabulary of {x.shape[0]} tokens "
                f"({name.removeprefix(PREFIX)} is {x.shape}), but the model's has {vocab}. "
                f"Resize it in `transformers` (`resize_token_embeddings({x.shape[0]})`), merge the "
                "adapters with PEFT (`merge_and_unload`), and load the merged model."
            )


def _check(
    slots: Sequence[Slot],
    all_ranks: Mapping[str, Ranks],
    published: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, Stored],
    config: PeftConfig,
    path: Path,
) -> None:
    """Raises one error for all tensors that are missing, unexpected or misshapen."""
    # A dictionary removes duplicates: the parts of a fused matrix share tensors.
    expected: dict[str, tuple[int, ...] | None] = {}
    for slot in slots:
        ranks = all_ranks[slot.path]
        for index, names in slot.names.items():
            rank = ranks.get(index)
            if rank is None and config.expects(slot.modules(index), used=bool(ranks)):
                # Of any shape: what is missing has none.
                expected |= dict.fromkeys(names)
            elif rank is not None:
                shapes = slot.shapes(rank or 1)
                expected |= dict(zip(names, map(tensor_shape, slot.tensors, shapes), strict=True))
    for name, shape in published.items():
        if name in stored or is_in(name, config.saved):
            expected[name] = shape
    missing, misshapen, problems = [], [], []
    for name, shape in expected.items():
        if name not in stored:
            missing.append(name)
        elif shape not in (None, stored[name].shape):
            misshapen.append(f"{name} ({stored[name].shape}, expected {shape})")
    unexpected = [name for name in stored if name not in expected]
    for kind, names in zip(_PROBLEMS, (missing, unexpected, misshapen), strict=True):
        if names:
            problems.append(f"{kind}: {', '.join(names)}")
    if any(".lora_embedding_" in name for name in unexpected):
        problems.append(
            "adapters of embeddings (`lora_embedding_A`) are not implemented: merge them with PEFT "
            "(`merge_and_unload`), and load the merged model"
        )
    if problems or not any(all_ranks.values()):
        raise ValueError(
            f"{path} does not hold adapters of this model. "
            f"{'; '.join(problems) or 'There are none'}."
        )
