"""The settings and tensors of OPT in Hugging Face's format."""

from ...models.opt import OPTConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._tables import EMBED, OUT_PROJ, TABLE, TURNED, attention, dense, norm, own_head

BASE_PREFIX = "model."

_FIELDS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "ffn_dim",
    "embed_width": ("word_embed_proj_dim", None),
    "positions": ("max_position_embeddings", 2048),
    "activation": ("activation_function", "relu"),
    "bias": ("enable_bias", True),
    "affine": ("layer_norm_elementwise_affine", True),
    "tied": ("tie_word_embeddings", True),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "bos": ("bos_token_id", 2),
    "pad": ("pad_token_id", 1),
}


def read(settings: Settings) -> Fields:
    defaults = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "eos_token_id": 2}
    only = {
        "model_type": ("opt",),
        **dict.fromkeys(("layerdrop", "activation_dropout"), (0.0,)),
        "learned_embeddings": (True,),
        "scale_embeddings": (False,),
        "add_cross_attention": (False,),
    }
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, ignored="is_decoder")
    # OPT-350M has its norms behind attention and network, and no final one.
    before = c["do_layer_norm_before"]
    return fields | {
        "post_norm": not before,
        "final_norm": before and not c["_remove_final_layer_norm"],
    }


def write(config: OPTConfig) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS)
    settings |= {"do_layer_norm_before": not c.post_norm}
    settings |= {"_remove_final_layer_norm": not c.post_norm and not c.final_norm}
    return settings | {"architectures": ["OPTForCausalLM"], "model_type": "opt"}


def tensors(config: OPTConfig) -> dict[str, Tensor]:
    base = "model.decoder."
    positions, layer = base + "embed_positions.weight", base + "layers.{layer}."
    biases = ""
    if config.bias:
        biases = "qkvo"
    table = {
        "embed": Tensor(base + "embed_tokens.weight", EMBED),
        # Two rows that are not used, and one for each position.
        "position_embed": Tensor(positions, TABLE),
        **attention("layers/", layer + "self_attn.", OUT_PROJ, biases=biases),
    }
    # Biases, and the numbers of norms, are missing in some published models.
    mlp = dense("layers/up", layer + "fc1") | dense("layers/down", layer + "fc2")
    table |= {leaf: t for leaf, t in mlp.items() if config.bias or not leaf.endswith("bias")}
    if config.affine:
        table |= norm("layers/attention_norm", layer + "self_attn_layer_norm")
        table |= norm("layers/mlp_norm", layer + "final_layer_norm")
    if config.final_norm and config.affine:
        table |= norm("norm", base + "final_layer_norm")
    # Embeddings of another width are projected to the layers', and back before the head.
    if config.embed_width != config.width:
        table["project_in"] = Tensor(base + "project_in.weight", TURNED)
        table["project_out"] = Tensor(base + "project_out.weight", TURNED)
    return table | own_head(config)
