"""The settings and tensors of Mixtral in Hugging Face's format."""

from typing import Any

from ...models.mixtral import MixtralConfig
from .._settings import REQUIRED, published_ids, read_settings, token_ids
from .._tensors import Tensor
from ._rope import read_rope, write_rope

BASE_PREFIX = "model."

_NAMES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "experts": "num_local_experts",
    "chosen": "num_experts_per_tok",
    "head_size": "head_dim",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
    "attention_dropout": "attention_dropout",
    "router_loss_weight": "router_aux_loss_coef",
    "context": "max_position_embeddings",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": None,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **dict.fromkeys(("pad_token_id", "rope_scaling", "rope_parameters")),
    }
    only = {
        "model_type": ("mixtral",),
        "hidden_act": ("silu",),
        "router_jitter_noise": (0.0,),
    }
    # `output_router_logits` only selects the training loss, which users define themselves.
    c = read_settings(settings, defaults, only, ("output_router_logits",))
    kv_heads = c["num_key_value_heads"]
    rope = c["rope_parameters"] or c["rope_scaling"] or {}
    fields = {field: c[name] for field, name in _NAMES.items()}
    return fields | {
        "kv_heads": c["num_attention_heads"] if kv_heads is None else kv_heads,
        "rope_base": rope.get("rope_theta", c["rope_theta"]),
        "rope_scaling": read_rope(rope),
        "eos": token_ids(c["eos_token_id"]),
    }


def write(config: MixtralConfig) -> dict[str, Any]:
    c = config
    settings = {name: getattr(c, field) for field, name in _NAMES.items()}
    settings |= published_ids(eos=c.eos, bos=c.bos, pad=c.pad)
    settings |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    if c.rope_scaling:
        settings["rope_scaling"] = write_rope(c.rope_scaling)
    return settings


def tensors(config: MixtralConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    layer = "model.layers.{layer}."
    attention, moe = layer + "self_attn.", layer + "block_sparse_moe."
    expert = moe + "experts.{expert}."
    into = "(heads head_dim) width -> width heads head_dim"
    out = "width (heads head_dim) -> heads head_dim width"
    turned = "outputs inputs -> inputs outputs"
    found = {
        "embed": Tensor("model.embed_tokens.weight", "vocab width -> vocab width"),
        "layers/attention_norm": Tensor(layer + "input_layernorm.weight", "width -> width"),
        "layers/wq": Tensor(attention + "q_proj.weight", into),
        "layers/wk": Tensor(attention + "k_proj.weight", into),
        "layers/wv": Tensor(attention + "v_proj.weight", into),
        "layers/wo": Tensor(attention + "o_proj.weight", out),
        "layers/mlp_norm": Tensor(layer + "post_attention_layernorm.weight", "width -> width"),
        "layers/router": Tensor(moe + "gate.weight", turned),
        "layers/gate": Tensor(expert + "w1.weight", turned),
        "layers/up": Tensor(expert + "w3.weight", turned),
        "layers/down": Tensor(expert + "w2.weight", turned),
        "norm": Tensor("model.norm.weight", "width -> width"),
    }
    if not config.tied:
        found["head"] = Tensor("lm_head.weight", turned)
    return found


def duplicates(config: MixtralConfig) -> dict[str, str]:
    """Maps the names under which a file may hold a tensor again to the tensor's own name."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {}
