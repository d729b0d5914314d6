"""Patterns and tables of tensors that several families share."""

from collections.abc import Callable
from typing import Any

from .._tensors import Tensor

VECTOR = "width -> width"
EMBED = "vocab width -> vocab width"
TURNED = "outputs inputs -> inputs outputs"
INTO_HEADS = "(heads head_dim) width -> width heads head_dim"
OUT_OF_HEADS = "width (heads head_dim) -> heads head_dim width"
HEADS_BIAS = "(heads head_dim) -> heads head_dim"


def linear(leaf: str, name: str) -> dict[str, Tensor]:
    """Returns the two tensors of a `Linear`."""
    weight = Tensor(name + ".weight", TURNED)
    return {leaf + "/w": weight, leaf + "/b": Tensor(name + ".bias", "outputs -> outputs")}


def norm(leaf: str, name: str) -> dict[str, Tensor]:
    """Returns the scale and the shift of a layer norm."""
    shift = Tensor(name + ".bias", VECTOR)
    return {leaf: Tensor(name + ".weight", VECTOR), leaf + "_shift": shift}


def attention(names: str, *letters: str) -> dict[str, Tensor]:
    """Returns the weights of attention layers: of `letters`, and of the output if `o` is in them.

    `names` has a field `{part}` for the letter, such as `"{part}_proj.weight"`.
    """
    patterns = dict.fromkeys("qkv", INTO_HEADS) | {"o": OUT_OF_HEADS}
    return {f"layers/w{x}": Tensor(names.replace("{part}", x), patterns[x]) for x in letters}


LLAMA_LAYER = "model.layers.{layer}."


def llama_attention() -> dict[str, Tensor]:
    """Returns the embedding and the attention layers of LLaMA and its descendants, and the norm
    after them."""
    layer = LLAMA_LAYER
    return {
        "embed": Tensor("model.embed_tokens.weight", EMBED),
        "layers/attention_norm": Tensor(layer + "input_layernorm.weight", VECTOR),
        **attention(layer + "self_attn.{part}_proj.weight", *"qkvo"),
        "layers/mlp_norm": Tensor(layer + "post_attention_layernorm.weight", VECTOR),
    }


def llama_mlp() -> dict[str, Tensor]:
    """Returns the gated feed-forward network of LLaMA and Gemma, and the final norm."""
    names = {name: f"{LLAMA_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    found = {f"layers/{leaf}": Tensor(name, TURNED) for leaf, name in names.items()}
    return found | llama_norm()


def llama_norm() -> dict[str, Tensor]:
    return {"norm": Tensor("model.norm.weight", VECTOR)}


def own_head(config: Any, pattern: str = TURNED) -> dict[str, Tensor]:
    """Returns the output head, unless it shares the weights of the embedding."""
    return {} if config.tied else {"head": Tensor("lm_head.weight", pattern)}


def tied_head(embed: str) -> Callable[[Any], dict[str, str]]:
    """Returns the function `duplicates` of a family: if the head is tied, a file may hold the
    embedding again as the head."""
    return lambda config: {"lm_head.weight": embed} if config.tied else {}
