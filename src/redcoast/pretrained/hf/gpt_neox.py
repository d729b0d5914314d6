"""The settings and tensors of GPT-NeoX and Pythia in Hugging Face's format."""

from ...models.gpt_neox import GPTNeoXConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._rope import PART, ROPE, read_rope, rope_of, rotated_part
from ._tables import EMBED, OUT_OF_HEADS, SIZES, TURNED, VECTOR, dense, fused, norm

BASE_PREFIX = "gpt_neox."
# Causal masks, the score of masked tokens, and the frequencies of rotary embeddings.
BUFFERS = (r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",)

_FIELDS = {
    **SIZES,
    "vocab": "vocab_size",
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "tied": ("tie_word_embeddings", False),
    "parallel": ("use_parallel_residual", True),
    "attention_bias": ("attention_bias", True),
    "attention_dropout": ("attention_dropout", 0.0),
    "residual_dropout": ("hidden_dropout", 0.0),
    "context": ("max_position_embeddings", 2048),
    "bos": ("bos_token_id", 0),
    "pad": ("pad_token_id", None),
}


def read(settings: Settings) -> Fields:
    defaults = {"eos_token_id": 2, "rotary_pct": 0.25, "rotary_emb_base": 10000.0, **ROPE}
    options = {"only": {"model_type": ("gpt_neox",)}, "ignored": "is_decoder"}
    c, fields = read_settings(settings, _FIELDS, defaults, **options)
    # Files of `transformers` 5 have both numbers among the settings of rotary embeddings.
    rope = rope_of(c)
    part, base = rope.pop(PART, c["rotary_pct"]), rope.get("rope_theta", c["rotary_emb_base"])
    if read_rope(rope) is not None:
        raise ValueError("`rope_scaling` is not implemented for this model.")
    rotary_dim = int(c["hidden_size"] // max(c["num_attention_heads"], 1) * part)
    dropout = {"embed_dropout": c["hidden_dropout"]}
    return fields | {"rotary_dim": rotary_dim, "rope_base": base, **dropout}


def write(config: GPTNeoXConfig) -> Settings:
    c = config
    # What the file has no setting for is refused.
    part = rotated_part(c.rotary_dim, c.head_dim)
    if c.embed_dropout != c.residual_dropout:
        raise ValueError(
            f"`embed_dropout` and `residual_dropout` are one setting of the file, but they are "
            f"{c.embed_dropout} and {c.residual_dropout}."
        )
    if c.rope_pairs or c.head_bias or not c.mlp_norm:
        raise ValueError("A GPT-NeoX has `mlp_norm`, and neither `rope_pairs` nor `head_bias`.")
    settings = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    settings |= {"rotary_pct": part, "rotary_emb_base": c.rope_base}
    return write_fields(c, _FIELDS) | settings


def tensors(config: GPTNeoXConfig) -> dict[str, Tensor]:
    """Q, K and V of a head are side by side in one tensor."""
    layer = "gpt_neox.layers.{layer}."
    attention = layer + "attention."
    tables = {
        "embed": Tensor("gpt_neox.embed_in.weight", EMBED),
        **norm("layers/norm", layer + "input_layernorm"),
        **norm("layers/mlp_norm", layer + "post_attention_layernorm"),
        "layers/wo": Tensor(attention + "dense.weight", OUT_OF_HEADS),
        **dense("layers/up", layer + "mlp.dense_h_to_4h"),
        **dense("layers/down", layer + "mlp.dense_4h_to_h"),
        **norm("norm", "gpt_neox.final_layer_norm"),
    }
    weight = "(heads part head_dim) width -> width heads head_dim"
    # (heads, part, head_dim): the query, key and value of a head are neighbours.
    name = attention + "query_key_value."
    tables |= fused(("layers/wq", "layers/wk", "layers/wv"), name + "weight", weight)
    if config.attention_bias:
        bias = "(heads part head_dim) -> heads head_dim"
        tables |= fused(("layers/bq", "layers/bk", "layers/bv"), name + "bias", bias)
        tables["layers/bo"] = Tensor(attention + "dense.bias", VECTOR)
    if not config.tied:
        tables["head"] = Tensor("embed_out.weight", TURNED)
    return tables


def module_name(name: str) -> str:
    return name.replace("embed_out.", "lm_head.")
