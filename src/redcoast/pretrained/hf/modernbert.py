"""The settings and tensors of ModernBERT in Hugging Face's format."""

from ...models.modernbert import ModernBertConfig, all_but_every
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import LABELLED, architecture_of, read_architecture, read_labels, write_labels
from ._tables import (
    EMBED,
    OUT_OF_HEADS,
    SIZES,
    TURNED,
    VECTOR,
    fused,
    gate_and_up,
    linear,
    norm,
    with_prefix,
)
from ._windows import GLOBAL, LOCAL, read_windows, write_windows

BASE_PREFIX = "model."

_FIELDS = {
    **SIZES,
    "vocab": "vocab_size",
    "window": ("local_attention", 128),
    "rope_base": ("global_rope_theta", 160000.0),
    "local_rope_base": ("local_rope_theta", 10000.0),
    "pooling": ("classifier_pooling", "cls"),
    "activation": ("hidden_activation", "gelu"),
    "head_activation": ("classifier_activation", "gelu"),
    "attention_bias": ("attention_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "norm_bias": ("norm_bias", False),
    "head_bias": ("classifier_bias", False),
    "vocab_bias": ("decoder_bias", True),
    "norm_eps": ("norm_eps", 1e-5),
    "dropout": ("embedding_dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "mlp_dropout": ("mlp_dropout", 0.0),
    "head_dropout": ("classifier_dropout", 0.0),
    "context": ("max_position_embeddings", 8192),
    "bos": ("bos_token_id", 50281),
    "pad": ("pad_token_id", 50283),
}
_HEADS = {
    "ModernBertModel": None,
    "ModernBertForMaskedLM": "masked",
    "ModernBertForSequenceClassification": "classification",
    "ModernBertForTokenClassification": "tokens",
}
_BASES = {"rope_base": GLOBAL, "local_rope_base": LOCAL}


def read(settings: Settings) -> Fields:
    defaults = {
        "eos_token_id": 50282,
        "global_attn_every_n_layers": 3,
        **dict.fromkeys(("layer_types", "rope_parameters")),
    }
    only = {"model_type": ("modernbert",), "rope_scaling": (None,), "tie_word_embeddings": (True,)}
    # `norm_eps` has precedence. The others select the training loss, or its implementation.
    ignored = """
        layer_norm_eps position_embedding_type sparse_prediction sparse_pred_ignore_index
        repad_logits_with_grad
    """
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, ignored=ignored)
    head = read_architecture(settings, _HEADS, "ModernBertModel")
    # By the newer setting, or the older one.
    every = c["global_attn_every_n_layers"]
    if c["layer_types"] is not None:
        local = read_windows(c["layer_types"])
    elif every < 1:
        raise ValueError(f"`global_attn_every_n_layers` must be at least 1, but is {every}.")
    else:
        local = all_but_every(every, c["num_hidden_layers"])
    fields |= {"head": head, "local": local}
    if head in LABELLED:
        fields |= read_labels(settings)
    # The rotary embeddings of each type of layer, as `transformers` 5 writes them.
    rope = c["rope_parameters"] or {}
    for field, kind in _BASES.items():
        rope_of_kind = dict(rope.get(kind) or {})
        if "rope_theta" in rope_of_kind:
            fields[field] = rope_of_kind.pop("rope_theta")
        if rope_of_kind.pop("rope_type", "default") != "default" or rope_of_kind:
            raise ValueError(
                f"`rope_parameters` has {rope[kind]} for the layers with {kind!r}, but only "
                "'default' is implemented."
            )
    if odd := rope.keys() - {*_BASES.values()}:
        raise ValueError(f"`rope_parameters` has the unknown entries {sorted(odd)}.")
    return fields


def write(config: ModernBertConfig) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS) | write_labels(c)
    settings["layer_types"] = write_windows(c.has_window)
    # The setting of the versions of `transformers` that do not know `layer_types`.
    every = [n for n in range(1, c.layers + 1) if all_but_every(n, c.layers) == c.has_window]
    if every:
        settings["global_attn_every_n_layers"] = every[0]
    name = architecture_of(c.head, _HEADS)
    return settings | {
        "architectures": [name],
        "model_type": "modernbert",
        "tie_word_embeddings": True,
    }


def tensors(config: ModernBertConfig) -> dict[str, Tensor]:
    """Q, K and V are in one tensor, and so are gate and up."""
    c = config
    base = ""
    if c.head:
        base = BASE_PREFIX
    layer = base + "layers.{layer}."
    table = {
        "embed": Tensor(base + "embeddings.tok_embeddings.weight", EMBED),
        **_norm(c, "embed_norm", base + "embeddings.norm"),
        "layers/wo": Tensor(layer + "attn.Wo.weight", OUT_OF_HEADS, heads=c.heads),
        **_norm(c, "layers/mlp_norm", layer + "mlp_norm"),
        "layers/down": Tensor(layer + "mlp.Wo.weight", TURNED),
        **_norm(c, "norm", base + "final_norm"),
    }
    # The first layer has no norm before its attention: the embedding is normalised already.
    if c.layers > 1:
        table |= _norm(c, "attention_norm", base + "layers.{layer+1}.attn_norm")
    # The rows are all queries, then all keys, then all values.
    qkv, weight = layer + "attn.Wqkv.", "(part heads head_dim) width -> width heads head_dim"
    table |= fused(("layers/wq", "layers/wk", "layers/wv"), qkv + "weight", weight, heads=c.heads)
    if c.attention_bias:
        bias = "(part heads head_dim) -> heads head_dim"
        table |= fused(("layers/bq", "layers/bk", "layers/bv"), qkv + "bias", bias, heads=c.heads)
    table |= gate_and_up(layer + "mlp.Wi", biased=c.mlp_bias)
    if c.attention_bias:
        table["layers/bo"] = Tensor(layer + "attn.Wo.bias", VECTOR)
    if c.mlp_bias:
        table["layers/down_bias"] = Tensor(layer + "mlp.Wo.bias", VECTOR)
    return table | _head(c)


def _head(c: ModernBertConfig) -> dict[str, Tensor]:
    if c.head is None:
        return {}
    table = {
        "pooler/w": Tensor("head.dense.weight", TURNED),
        **_norm(c, "pooler/norm", "head.norm"),
    }
    # Files name it `head`, since all heads begin with it.
    if c.head_bias:
        table["pooler/b"] = Tensor("head.dense.bias", "outputs -> outputs")
    if c.head in LABELLED:
        table |= linear("head", "classifier")
    elif c.vocab_bias:
        table["head"] = Tensor("decoder.bias", "vocab -> vocab")
    return table


def _norm(c: ModernBertConfig, leaf: str, name: str) -> dict[str, Tensor]:
    if c.norm_bias:
        return norm(leaf, name)
    return {leaf: Tensor(name + ".weight", VECTOR)}


def duplicates(config: ModernBertConfig) -> dict[str, str]:
    if config.head == "masked":
        return {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    if config.head:
        return {}
    return with_prefix(BASE_PREFIX, tensors(config), config.layers)
