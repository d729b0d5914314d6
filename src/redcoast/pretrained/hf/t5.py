"""The settings and tensors of T5 and mT5 in Hugging Face's format."""

import dataclasses
from collections.abc import Collection

from ...models.t5 import T5Config
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._tables import EMBED, VECTOR, attention

# An unused table in the first files.
BUFFERS = (r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",)

_HEAD = "lm_head.weight"
_FIELDS = {
    "vocab": "vocab_size",
    "width": "d_model",
    "layers": "num_layers",
    "decoder_layers": ("num_decoder_layers", None),
    "heads": "num_heads",
    "hidden": "d_ff",
    "head_size": "d_kv",
    "buckets": ("relative_attention_num_buckets", 32),
    "distance": ("relative_attention_max_distance", 128),
    "activation": "dense_act_fn",
    "gated": "is_gated_act",
    "norm_eps": ("layer_norm_epsilon", 1e-6),
    "dropout": ("dropout_rate", 0.1),
    "kind": ("model_type", "t5"),
    "decoder_start": ("decoder_start_token_id", None),
    "bos": ("bos_token_id", None),
    "pad": ("pad_token_id", 0),
}
_OTHER_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}


def read(settings: Settings) -> Fields:
    mt5 = settings.get("model_type") == "mt5"
    default_proj = "relu"
    if mt5:
        default_proj = "gated-gelu"
    proj = settings.get("feed_forward_proj", default_proj)
    activation = proj.removeprefix("gated-")
    if proj == "gated-gelu":
        activation = "gelu_new"
    defaults = {
        "dense_act_fn": activation,
        "is_gated_act": proj.startswith("gated-"),
        "eos_token_id": 1,
        "tie_word_embeddings": None,
        "scale_decoder_outputs": None,
    }
    only = {"model_type": ("t5", "mt5"), "is_encoder_decoder": (True,), "is_decoder": (False,)}
    options = {"only": only, "ignored": "feed_forward_proj", "renamed": _OTHER_NAMES}
    c, fields = read_settings(settings, _FIELDS, defaults, **options)
    fields["tied"] = not mt5 and _is_scaled(c)
    if fields["decoder_layers"] is None:
        fields["decoder_layers"] = c["num_layers"]
    if fields["decoder_start"] is None:
        fields["decoder_start"] = c["pad_token_id"] or 0
    return fields


def _is_scaled(c: Settings) -> bool:
    # Version 4 of `transformers` scales tied heads. Version 5 saves every head as tied, and saves
    # in a separate setting whether it is scaled. The head of mT5 is never scaled.
    if c["scale_decoder_outputs"] is None:
        return c["tie_word_embeddings"] is not False
    return c["scale_decoder_outputs"]


def settle(config: T5Config, names: Collection[str]) -> T5Config:
    """A head that is not scaled is tied if the files do not contain it; see `_is_scaled`."""
    if config.tied or _HEAD in names:
        return config
    return dataclasses.replace(config, tied=True, scale_head=False)


def write(config: T5Config) -> Settings:
    c = config
    name = {"t5": "T5", "mt5": "MT5"}[c.kind]
    if c.scaled and c.kind == "mt5":
        raise ValueError(
            "A tied head is scaled by default, but the head of an mT5 is never scaled. Set "
            "`scale_head=False`, `tied=False` or `kind='t5'`."
        )
    settings = write_fields(c, _FIELDS)
    proj = c.activation
    if c.gated:
        # "gated-gelu" is the approximation by tanh, as `read` takes it.
        proj = "gated-" + {"gelu_new": "gelu"}.get(proj, proj)
    return settings | {
        "architectures": [f"{name}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_kv": c.head_dim,
        "feed_forward_proj": proj,
        "tie_word_embeddings": c.tied,
        "scale_decoder_outputs": c.scaled,
    }


def tensors(config: T5Config) -> dict[str, Tensor]:
    table = {"embed": Tensor("shared.weight", EMBED)}
    table |= _stack(config, "encoder")
    table |= _stack(config, "decoder")
    # The tied head is the embedding, and has no tensor.
    if not config.tied:
        table["head"] = Tensor(_HEAD, "vocab width -> width vocab")
    return table


def _stack(config: T5Config, stack: str) -> dict[str, Tensor]:
    block, leaf = stack + ".block.{layer}.layer.", stack + "/layers/"
    decoder = stack == "decoder"
    # After self-attention, and in the decoder after attention to the encoder.
    mlp = f"{block}{1 + decoder}."
    dense = mlp + "DenseReluDense."
    # `wi` is called `wi_1` where there is a gate, `wi_0`.
    up = "wi"
    if config.gated:
        up = "wi_1"
    into, out = "hidden width -> width hidden", "width hidden -> hidden width"
    # Only the first block has the table, which all blocks use.
    biases = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    table = {
        f"{stack}/relative_bias": Tensor(biases, "buckets heads -> buckets heads"),
        **_attention(block + "0.", "SelfAttention.", leaf + "attention/"),
        leaf + "mlp_norm": Tensor(mlp + "layer_norm.weight", VECTOR),
        leaf + "up": Tensor(f"{dense}{up}.weight", into),
        leaf + "down": Tensor(dense + "wo.weight", out),
        f"{stack}/norm": Tensor(f"{stack}.final_layer_norm.weight", VECTOR),
    }
    if config.gated:
        table[leaf + "gate"] = Tensor(dense + "wi_0.weight", into)
    if decoder:
        table |= _attention(block + "1.", "EncDecAttention.", leaf + "cross/")
    return table


def _attention(layer: str, name: str, leaf: str) -> dict[str, Tensor]:
    table = attention(leaf, layer + name, {"q": "q", "k": "k", "v": "v", "o": "o"})
    return table | {leaf + "norm": Tensor(layer + "layer_norm.weight", VECTOR)}


def duplicates(config: T5Config) -> dict[str, str]:
    names = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    return dict.fromkeys(names + [_HEAD] * config.tied, "shared.weight")
