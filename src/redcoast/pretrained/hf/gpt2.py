"""The settings and tensors of GPT-2 in Hugging Face's format."""

from typing import Any

from ...models.gpt2 import GPT2Config
from .._settings import FieldNames, Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._tables import EMBED, VECTOR, dense, fused, norm, own_head, under

BASE_PREFIX = "transformer."
# Causal masks, and the score of masked tokens.
BUFFERS = (r"^(transformer\.)?h\.\d+\.(attn|crossattention)\.(masked_)?bias$",)

# The names that GPT-J shares.
GPT2_FIELDS = {
    "vocab": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "hidden": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "tied": ("tie_word_embeddings", True),
    "embed_dropout": ("embd_pdrop", 0.1),
    "residual_dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "bos": ("bos_token_id", 50256),
    "pad": ("pad_token_id", None),
}
_FIELDS = {
    **GPT2_FIELDS,
    "positions": ("n_positions", 1024),
    "scale_scores": ("scale_attn_weights", True),
    "scale_by_layer": ("scale_attn_by_inverse_layer_idx", False),
    "cross_attention": ("add_cross_attention", False),
}
OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Settings of the precision of scores, and of old versions of `transformers`.
_IGNORED = "reorder_and_upcast_attn n_special is_decoder"


def read(settings: Settings) -> Fields:
    only = {"model_type": ("gpt2",)}
    return read_gpt2(settings, _FIELDS, only=only, ignored=_IGNORED)


def read_gpt2(settings: Settings, fields: FieldNames, **options: Any) -> Fields:
    """Reads the settings of GPT-2 or GPT-J; `options` are as for `read_settings`."""
    defaults = {"eos_token_id": 50256}
    _, values = read_settings(settings, fields, defaults, renamed=OTHER_NAMES, **options)
    # `n_inner` is null in the published files.
    if values["hidden"] is None:
        values["hidden"] = 4 * values["width"]
    return values


def write(config: GPT2Config) -> Settings:
    kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return write_fields(config, _FIELDS) | kind


def tensors(config: GPT2Config) -> dict[str, Tensor]:
    layer = "transformer.h.{layer}."
    table = {
        "embed": Tensor("transformer.wte.weight", EMBED),
        "position_embed": Tensor("transformer.wpe.weight", "positions width -> positions width"),
        **_attention(layer + "attn.", layer + "ln_1", "layers/attention/"),
        **norm("layers/mlp_norm", layer + "ln_2"),
        # GPT-2 was published with `Conv1D`, whose weights are (inputs, outputs).
        **dense("layers/up", layer + "mlp.c_fc", "inputs outputs -> inputs outputs"),
        **dense("layers/down", layer + "mlp.c_proj", "inputs outputs -> inputs outputs"),
        **norm("norm", "transformer.ln_f"),
    }
    if config.cross_attention:
        names = (layer + "crossattention.", layer + "ln_cross_attn")
        table |= _attention(*names, "layers/cross/", cross=True)
    return table | own_head(config, "vocab width -> width vocab")


def _attention(prefix: str, norm_name: str, leaf: str, *, cross: bool = False) -> dict[str, Tensor]:
    # Self-attention fuses Q, K and V; cross-attention fuses K and V, with Q separate.
    weight = "width (part heads head_dim) -> width heads head_dim"
    bias = "(part heads head_dim) -> heads head_dim"
    table = {
        **norm("norm", norm_name),
        "wo": Tensor(prefix + "c_proj.weight", "(heads head_dim) width -> heads head_dim width"),
        "bo": Tensor(prefix + "c_proj.bias", VECTOR),
    }
    weights, biases = ["wq", "wk", "wv"], ["bq", "bk", "bv"]
    if cross:
        table |= fused([weights.pop(0)], prefix + "q_attn.weight", weight)
        table |= fused([biases.pop(0)], prefix + "q_attn.bias", bias)
    table |= fused(weights, prefix + "c_attn.weight", weight)
    table |= fused(biases, prefix + "c_attn.bias", bias)
    return under(leaf, table)
