"""The settings and tensors of DINOv2 in Hugging Face's format."""

from functools import partial

from ...models.dinov2 import Dinov2Config
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import image_inputs, read_architecture, read_labels, read_sides, write_labels
from ._tables import VECTOR, attention, dense, gate_and_up, linear, norm, patches, with_prefix
from .vit import VIT_ATTENTION, VIT_MODULES, rename_modules

_FIELDS = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_ratio": ("mlp_ratio", 4),
    "image": ("image_size", 224),
    "patch": ("patch_size", 14),
    "channels": ("num_channels", 3),
    "gated": ("use_swiglu_ffn", False),
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-6),
    "qkv_bias": ("qkv_bias", True),
    "layer_scale": ("layerscale_value", 1.0),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "path_dropout": ("drop_path_rate", 0.0),
}
_TYPES = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
_HEADS = {"Model": None, "Backbone": None, "ForImageClassification": "classification"}


def read(settings: Settings) -> Fields:
    kind = settings.get("model_type", "dinov2")
    has_registers = kind == "dinov2_with_registers"
    defaults = {"use_mask_token": True}
    # Each type has its own default size of patches.
    if has_registers:
        defaults = {"patch_size": 16, "num_register_tokens": 4}
    # Settings of backbones, which `features` takes as arguments.
    ignored = """
        apply_layernorm reshape_hidden_states out_features out_indices stage_names
        intermediate_size
    """
    options = {"only": {"model_type": tuple(_TYPES)}, "ignored": ignored}
    c, fields = read_settings(settings, _FIELDS, defaults, **options)
    known = {_TYPES.get(kind, "") + name: head for name, head in _HEADS.items()}
    head = read_architecture(settings, known, next(iter(known)))
    fields |= {"head": head, **read_sides(c)}
    if head:
        fields |= read_labels(settings)
    # Only files without registers say whether they have a token for masked patches.
    if not has_registers:
        return fields | {"mask_token": c["use_mask_token"]}
    if c["num_register_tokens"] < 1:
        raise ValueError(
            f"`num_register_tokens` must be at least 1, but is {c['num_register_tokens']}."
        )
    return fields | {"registers": c["num_register_tokens"]}


def write(config: Dinov2Config) -> Settings:
    c = config
    kind, name = _kind(c), "Model"
    if c.head:
        name = "ForImageClassification"
    settings = write_fields(c, _FIELDS) | write_labels(c)
    if c.registers:
        settings["num_register_tokens"] = c.registers
    else:
        settings["use_mask_token"] = c.mask_token
    return settings | {"architectures": [_TYPES[kind] + name], "model_type": kind}


def _kind(config: Dinov2Config) -> str:
    if config.registers:
        return "dinov2_with_registers"
    return "dinov2"


def _base(config: Dinov2Config) -> str:
    """The prefix of all names, of which files without a head have none."""
    if config.head:
        return f"{_kind(config)}."
    return ""


def tensors(config: Dinov2Config) -> dict[str, Tensor]:
    """The two inputs of gated layers are in one tensor."""
    c = config
    base = _base(c)
    embeddings, layer = base + "embeddings.", base + "encoder.layer.{layer}."
    mlp, tokens = layer + "mlp.", "1 tokens width -> tokens width"
    # The output matrix always has a bias.
    biases, modules = "o", VIT_ATTENTION
    if c.qkv_bias:
        biases = "qkvo"
    table = {
        **patches("", embeddings + "patch_embeddings.projection"),
        "cls_token": Tensor(embeddings + "cls_token", "1 1 width -> width"),
        "position_embed": Tensor(embeddings + "position_embeddings", tokens),
        **norm("layers/attention_norm", layer + "norm1"),
        **attention("layers/", layer + "attention.", modules, biases=biases, heads=c.heads),
        "layers/attention_scale": Tensor(layer + "layer_scale1.lambda1", VECTOR),
        **norm("layers/mlp_norm", layer + "norm2"),
        "layers/mlp_scale": Tensor(layer + "layer_scale2.lambda1", VECTOR),
        **norm("norm", base + "layernorm"),
    }
    if c.mask_token:
        table["mask_token"] = Tensor(embeddings + "mask_token", "1 width -> width")
    if c.registers:
        table["register_tokens"] = Tensor(embeddings + "register_tokens", tokens)
    # Gate and input are halves of one tensor, which modules of `transformers` 5 hold apart.
    if c.gated:
        table |= gate_and_up(mlp + "weights_in", biased=True)
        table |= dense("layers/down", mlp + "weights_out")
    else:
        table |= dense("layers/up", mlp + "fc1") | dense("layers/down", mlp + "fc2")
    if c.head:
        table |= linear("head", "classifier")
    return table


# The modules of `transformers` 5, whose files keep the names of earlier versions.
module_name = partial(rename_modules, {**VIT_MODULES, "mlp.weights_out": "mlp.down_proj"})


def split_modules(config: Dinov2Config) -> dict[str, Tensor]:
    if not config.gated:
        return {}
    mlp = _base(config) + "encoder.layer.{layer}.mlp."
    return dense("layers/gate", mlp + "gate_proj") | dense("layers/up", mlp + "up_proj")


def duplicates(config: Dinov2Config) -> dict[str, str]:
    if config.head:
        return {}
    return with_prefix(f"{_kind(config)}.", tensors(config), config.layers)


example_inputs = image_inputs
