"""Names of settings, and patterns and tables of tensors, that several families share."""

from collections.abc import Mapping, Sequence
from typing import Any

from .._tensors import Tensor, tensor_names

SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
BERT_FIELDS = {
    **SIZES,
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
}
LLAMA_FIELDS = {
    **SIZES,
    "vocab": "vocab_size",
    "norm_eps": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "attention_dropout": ("attention_dropout", 0.0),
    "context": "max_position_embeddings",
    "bos": ("bos_token_id", None),
    "pad": ("pad_token_id", None),
}

# Published weights of linear layers are (outputs, inputs), as torch stores them, with the heads in
# one dimension; arrays of models begin with the inputs. Kernels of patches are those of torch's
# convolutions, (outputs, channels, rows, columns).
VECTOR = "width -> width"
EMBED = "vocab width -> vocab width"
TABLE = "rows width -> rows width"
KERNEL = "width channels rows columns -> channels rows columns width"
TURNED = "outputs inputs -> inputs outputs"
INTO_HEADS = "(heads head_dim) width -> width heads head_dim"
OUT_OF_HEADS = "width (heads head_dim) -> heads head_dim width"
HEADS_BIAS = "(heads head_dim) -> heads head_dim"
# The modules of gated networks and of attention layers.
GATED = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
PROJ = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
OUT_PROJ = PROJ | {"o": "out_proj"}


def weights(prefix: str, names: Mapping[str, str], pattern: str) -> dict[str, Tensor]:
    """Returns weights of one pattern. `names` has the names behind `prefix` by their leaves."""
    return {leaf: Tensor(f"{prefix}{name}.weight", pattern) for leaf, name in names.items()}


def under(prefix: str, table: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the table of a part of a model, whose leaves begin with `prefix`."""
    return {prefix + leaf: tensor for leaf, tensor in table.items()}


def layers_with(kind: str, kinds: Sequence[str]) -> str:
    """Returns the prefix of the tensors of the layers of one kind."""
    numbers = [str(number) for number, other in enumerate(kinds) if other == kind]
    return f"model.layers.{{layer:{','.join(numbers)}}}."


def linear(leaf: str, name: str) -> dict[str, Tensor]:
    """Returns the two tensors of a `Linear`."""
    weight = Tensor(name + ".weight", TURNED)
    return {leaf + "/w": weight, leaf + "/b": Tensor(name + ".bias", "outputs -> outputs")}


def norm(leaf: str, name: str) -> dict[str, Tensor]:
    """Returns the scale and the shift of a layer norm."""
    shift = Tensor(name + ".bias", VECTOR)
    return {leaf: Tensor(name + ".weight", VECTOR), leaf + "_shift": shift}


def dense(leaf: str, name: str, pattern: str = TURNED) -> dict[str, Tensor]:
    """Returns a weight and its bias."""
    bias = Tensor(name + ".bias", VECTOR)
    return {leaf: Tensor(name + ".weight", pattern), leaf + "_bias": bias}


def patches(leaf: str, name: str) -> dict[str, Tensor]:
    """Returns the weight and the bias of the embedding of patches."""
    weight, bias = Tensor(name + ".weight", KERNEL), Tensor(name + ".bias", VECTOR)
    return {leaf + "patch_embed": weight, leaf + "patch_bias": bias}


def attention(
    leaf: str,
    prefix: str,
    modules: Mapping[str, str],
    *,
    letters: str = "qkvo",
    biases: str = "",
    **fixed: int,
) -> dict[str, Tensor]:
    """Returns the weights of attention layers, and the biases of the letters in `biases`.

    `modules` has the names behind `prefix` by their letter: `q`, `k`, `v`, and `o` for the output.
    `letters` are those that have a tensor of their own.
    """
    table = {}
    # The output matrix has the heads on its other side, and a bias of the width.
    for letter in letters:
        name = prefix + modules[letter]
        weight, bias = f"{name}.weight", f"{name}.bias"
        if letter == "o":
            tensors = Tensor(weight, OUT_OF_HEADS, **fixed), Tensor(bias, VECTOR)
        else:
            tensors = Tensor(weight, INTO_HEADS, **fixed), Tensor(bias, HEADS_BIAS, **fixed)
        table[f"{leaf}w{letter}"] = tensors[0]
        if letter in biases:
            table[f"{leaf}b{letter}"] = tensors[1]
    return table


def fused(leaves: Sequence[str], name: str, pattern: str, **sizes: int) -> dict[str, Tensor]:
    """Returns arrays of one shape that are in one tensor, whose factor `part` counts them."""
    table = {}
    for i, leaf in enumerate(leaves):
        table[leaf] = Tensor(name, pattern, part=(i, len(leaves)), **sizes)
    return table


def consecutive(
    sizes: Mapping[str, int], factor: str, name: str, pattern: str
) -> dict[str, Tensor]:
    """Returns arrays that are ranges of a factor of one tensor, in this order and of these
    sizes."""
    table, start, total = {}, 0, sum(sizes.values())
    for leaf, size in sizes.items():
        table[leaf] = Tensor(name, pattern, **{factor: (start, total)})
        start += size
    return table


def gate_and_up(name: str, *, biased: bool = False) -> dict[str, Tensor]:
    """Returns the two inputs of gated layers, which are in one tensor, and their biases."""
    weight, bias = "(part outputs) inputs -> inputs outputs", "(part outputs) -> outputs"
    table = fused(("layers/gate", "layers/up"), name + ".weight", weight)
    if biased:
        table |= fused(("layers/gate_bias", "layers/up_bias"), name + ".bias", bias)
    return table


def with_prefix(prefix: str, table: Mapping[str, Tensor], layers: int) -> dict[str, str]:
    """Maps the names of all tensors of a table, behind a prefix that files may omit, to the
    names."""
    return {prefix + name: name for name in all_names(table, layers)}


def all_names(table: Mapping[str, Tensor], layers: int) -> list[str]:
    return [name for t in table.values() for name in tensor_names(t, (layers,)).values()]


LLAMA_LAYER = "model.layers.{layer}."


def llama_attention(biases: str = "") -> dict[str, Tensor]:
    """Returns the attention layers of LLaMA and its descendants, and the norms of a layer."""
    layer = LLAMA_LAYER
    return {
        "layers/attention_norm": Tensor(layer + "input_layernorm.weight", VECTOR),
        **attention("layers/", layer + "self_attn.", PROJ, biases=biases),
        "layers/mlp_norm": Tensor(layer + "post_attention_layernorm.weight", VECTOR),
    }


def llama_mlp() -> dict[str, Tensor]:
    """Returns the gated feed-forward network of LLaMA and Gemma."""
    return under("layers/", weights(LLAMA_LAYER + "mlp.", GATED, TURNED))


def qk_norms(
    leaf: str, attention: str, letters: str = "qk", pattern: str = "head_dim -> head_dim"
) -> dict[str, Tensor]:
    """Returns the norms of queries and keys."""
    names = {f"{leaf}{letter}_norm": f"{letter}_norm" for letter in letters}
    return weights(attention, names, pattern)


def llama_ends(config: Any) -> dict[str, Tensor]:
    """Returns the embedding, the final norm, and the output head unless it is tied."""
    norm = Tensor("model.norm.weight", VECTOR)
    return {"embed": Tensor("model.embed_tokens.weight", EMBED), "norm": norm, **own_head(config)}


def own_head(config: Any, pattern: str = TURNED) -> dict[str, Tensor]:
    """Returns the output head, unless it shares the weights of the embedding."""
    if config.tied:
        return {}
    return {"head": Tensor("lm_head.weight", pattern)}
