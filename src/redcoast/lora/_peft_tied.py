"""Output heads that share the weights of the embedding, in a model with adapters of PEFT."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import PyTree

from ..models._heads import can_untie, untie
from ..pretrained._lazy_tensor import Stored
from ..pretrained._match import layout_of
from ..pretrained._read_plan import read_whole
from ..pretrained._registry import hf_names
from ..pretrained._tensors import Tensor
from ._peft_config import PeftConfig
from ._peft_names import PREFIX, is_saved, live_table, module_of


def tied_heads(model: PyTree) -> dict[str, str]:
    """Returns the published names of tensors that share the weights of the embedding, each with the
    name of the embedding."""
    embed = live_table(model).get("embed")
    if embed is None:
        return {}
    # The head has a name only in the table of the same model with separate weights.
    if can_untie(model):
        own = dataclasses.replace(model.config, tied=False)
        return {hf_names(own).tensors(own)["head"].name: embed.name}
    copies = layout_of(model.config).duplicates
    return {copy: name for copy, name in copies.items() if name == embed.name}


def with_own_head(
    model: PyTree, stored: Mapping[str, Stored], config: PeftConfig, path: Path
) -> tuple[PyTree, dict[str, Stored]]:
    """Makes a tied head a separate array, if its weights differ from the embedding with the
    adapters.

    PEFT replaces an embedding that is saved entirely by a copy. The head keeps the original
    weights, unless `ensure_weight_tying` is set.

    Returns the model; and the tensors, without those that repeat the embedding.
    """
    rest = dict(stored)
    for head, embed in tied_heads(model).items():
        if not _is_apart(model, head, embed, stored, config):
            # What the file has of the head equals the embedding.
            rest.pop(PREFIX + head, None)
        elif can_untie(model):
            return untie(model), rest
        else:
            raise ValueError(
                f"The adapters in {path} give {embed} and {head} different weights, but in a "
                f"{type(model).__name__} they are the same array. Merge the adapters with PEFT "
                "(`merge_and_unload`), or train them with `ensure_weight_tying=True`."
            )
    return model, rest


def _is_apart(
    model: PyTree, head: str, embed: str, stored: Mapping[str, Stored], config: PeftConfig
) -> bool:
    # An adapter of the head changes the head alone.
    if any(name.startswith(f"{PREFIX}{module_of(head)}.lora_") for name in stored):
        return True
    # Under a name of its own, since the head is published like the embedding.
    tensor = Tensor("tensor", live_table(model)["embed"].pattern)
    new_embed = model.embed
    if PREFIX + embed in stored:
        new_embed = read_whole(tensor, model.embed, {"tensor": stored[PREFIX + embed]})
    if PREFIX + head in stored:
        new_head = read_whole(tensor, model.embed, {"tensor": stored[PREFIX + head]})
        return not jnp.array_equal(new_head, new_embed)
    # The head is not in the file. It has the old weights, unless it follows the embedding.
    stays = not is_saved(embed, config.saved) or config.stays_tied
    return not stays and not jnp.array_equal(new_embed, model.embed)
