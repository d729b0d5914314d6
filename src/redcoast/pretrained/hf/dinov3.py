"""The settings and tensors of DINOv3 in Hugging Face's format."""

from ...models.dinov3 import Dinov3Config
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import image_inputs, read_architecture, read_sides
from ._tables import PROJ, SIZES, TURNED, VECTOR, all_names, attention, norm, patches

_FIELDS = {
    **SIZES,
    "image": ("image_size", 224),
    "patch": ("patch_size", 16),
    "channels": ("num_channels", 3),
    "registers": ("num_register_tokens", 0),
    "gated": ("use_gated_mlp", False),
    "activation": ("hidden_act", "gelu"),
    "rope_base": ("rope_theta", 100.0),
    "shift": ("pos_embed_shift", None),
    "jitter": ("pos_embed_jitter", None),
    "rescale": ("pos_embed_rescale", 2.0),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "q_bias": ("query_bias", True),
    "k_bias": ("key_bias", False),
    "v_bias": ("value_bias", True),
    "o_bias": ("proj_bias", True),
    "mlp_bias": ("mlp_bias", True),
    "layer_scale": ("layerscale_value", 1.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "path_dropout": ("drop_path_rate", 0.0),
}
_HEADS = {"DINOv3ViTModel": None, "DINOv3ViTBackbone": None}


def read(settings: Settings) -> Fields:
    # Settings of backbones, which `features` takes as arguments.
    ignored = "apply_layernorm reshape_hidden_states out_features out_indices stage_names"
    only = {"model_type": ("dinov3_vit",)}
    c, fields = read_settings(settings, _FIELDS, only=only, ignored=ignored)
    read_architecture(settings, _HEADS, next(iter(_HEADS)))
    return fields | read_sides(c)


def write(config: Dinov3Config) -> Settings:
    kind = {"architectures": ["DINOv3ViTModel"], "model_type": "dinov3_vit"}
    return write_fields(config, _FIELDS) | kind


def tensors(config: Dinov3Config) -> dict[str, Tensor]:
    c, layer = config, "layer.{layer}."
    embeddings, tokens = "embeddings.", "1 tokens width -> tokens width"
    table = {
        **patches("", embeddings + "patch_embeddings"),
        "cls_token": Tensor(embeddings + "cls_token", "1 1 width -> width"),
        "mask_token": Tensor(embeddings + "mask_token", "1 1 width -> width"),
        "register_tokens": Tensor(embeddings + "register_tokens", tokens),
        **norm("layers/attention_norm", layer + "norm1"),
        **attention("layers/", layer + "attention.", PROJ, biases=c.biases, heads=c.heads),
        "layers/attention_scale": Tensor(layer + "layer_scale1.lambda1", VECTOR),
        **norm("layers/mlp_norm", layer + "norm2"),
        "layers/mlp_scale": Tensor(layer + "layer_scale2.lambda1", VECTOR),
        **norm("norm", "norm"),
    }
    # All matrices of the network have a bias, or none has.
    matrices = ["up", "down"]
    if c.gated:
        matrices.insert(0, "gate")
    for leaf in matrices:
        name = f"{layer}mlp.{leaf}_proj"
        table[f"layers/{leaf}"] = Tensor(name + ".weight", TURNED)
        if c.mlp_bias:
            table[f"layers/{leaf}_bias"] = Tensor(name + ".bias", VECTOR)
    return table


def module_name(name: str) -> str:
    # The model of `transformers` has its layers one level deeper than the files.
    before, table, after = name.rpartition("layer.")
    inside = before.removeprefix("base_model.model.")  # PEFT's own prefix
    if not table or inside.endswith("model."):
        return name
    return f"{before}model.layer.{after}"


def duplicates(config: Dinov3Config) -> dict[str, str]:
    names = all_names(tensors(config), config.layers)
    return {module_name(name): name for name in names if module_name(name) != name}


example_inputs = image_inputs
