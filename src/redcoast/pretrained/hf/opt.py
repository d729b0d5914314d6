"""The settings and tensors of OPT in Hugging Face's format."""

from typing import Any

from ...models.opt import OPTConfig
from .._settings import REQUIRED, published_ids, read_settings, token_ids
from .._tensors import Tensor

BASE_PREFIX = "model."

_NAMES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "ffn_dim",
    "embed_width": "word_embed_proj_dim",
    "positions": "max_position_embeddings",
    "activation": "activation_function",
    "bias": "enable_bias",
    "affine": "layer_norm_elementwise_affine",
    "tied": "tie_word_embeddings",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "word_embed_proj_dim": None,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 2),
        "pad_token_id": 1,
    }
    only = {
        "model_type": ("opt",),
        **dict.fromkeys(("layerdrop", "activation_dropout"), (0.0,)),
        "learned_embeddings": (True,),
        **dict.fromkeys(("scale_embeddings", "is_encoder_decoder"), (False,)),
        "add_cross_attention": (False,),
    }
    c = read_settings(settings, defaults, only, ("is_decoder", "decoder_start_token_id"))
    before = c["do_layer_norm_before"]
    fields = {field: c[name] for field, name in _NAMES.items()}
    return fields | {
        "post_norm": not before,
        "final_norm": before and not c["_remove_final_layer_norm"],
        "eos": token_ids(c["eos_token_id"]),
    }


def write(config: OPTConfig) -> dict[str, Any]:
    c = config
    settings = {name: getattr(c, field) for field, name in _NAMES.items()}
    settings |= published_ids(eos=c.eos, bos=c.bos, pad=c.pad)
    settings |= {"do_layer_norm_before": not c.post_norm}
    settings |= {"_remove_final_layer_norm": not c.post_norm and not c.final_norm}
    return settings | {"architectures": ["OPTForCausalLM"], "model_type": "opt"}


def tensors(config: OPTConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    base = "model.decoder."
    positions = base + "embed_positions.weight"
    turned = "outputs inputs -> inputs outputs"
    found = {
        "embed": Tensor(base + "embed_tokens.weight", "vocab width -> vocab width"),
        "position_embed": Tensor(positions, "rows width -> rows width"),
        **_layers(config, base + "layers.{layer}."),
    }
    if config.final_norm and config.affine:
        found |= _norm("norm", base + "final_layer_norm")
    if config.embed_width != config.width:
        found["project_in"] = Tensor(base + "project_in.weight", turned)
        found["project_out"] = Tensor(base + "project_out.weight", turned)
    if not config.tied:
        found["head"] = Tensor("lm_head.weight", turned)
    return found


def _layers(config: OPTConfig, layer: str) -> dict[str, Tensor]:
    into = "(heads head_dim) width -> width heads head_dim"
    out = "width (heads head_dim) -> heads head_dim width"
    turned = "outputs inputs -> inputs outputs"
    found = {}
    for letter in "qkv":
        name = f"{layer}self_attn.{letter}_proj."
        found[f"layers/w{letter}"] = Tensor(name + "weight", into)
        found[f"layers/b{letter}"] = Tensor(name + "bias", "(heads head_dim) -> heads head_dim")
    found["layers/wo"] = Tensor(layer + "self_attn.out_proj.weight", out)
    found["layers/bo"] = Tensor(layer + "self_attn.out_proj.bias", "width -> width")
    for leaf, name in (("up", "fc1"), ("down", "fc2")):
        found[f"layers/{leaf}"] = Tensor(f"{layer}{name}.weight", turned)
        found[f"layers/{leaf}_bias"] = Tensor(f"{layer}{name}.bias", "size -> size")
    if not config.bias:
        found = {leaf: tensor for leaf, tensor in found.items() if tensor.name.endswith("weight")}
    if config.affine:
        found |= _norm("layers/attention_norm", layer + "self_attn_layer_norm")
        found |= _norm("layers/mlp_norm", layer + "final_layer_norm")
    return found


def _norm(leaf: str, name: str) -> dict[str, Tensor]:
    return {
        leaf: Tensor(name + ".weight", "width -> width"),
        leaf + "_shift": Tensor(name + ".bias", "width -> width"),
    }


def duplicates(config: OPTConfig) -> dict[str, str]:
    """Maps the names under which a file may hold a tensor again to the tensor's own name."""
    return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if config.tied else {}
