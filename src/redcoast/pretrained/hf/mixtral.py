"""The settings and tensors of Mixtral in Hugging Face's format."""

from typing import Any

from ...models.mixtral import MixtralConfig
from .._settings import REQUIRED, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._rope import read_rope_settings, write_rope
from ._tables import LLAMA_LAYER, TURNED, llama_attention, llama_norm, own_head, tied_head

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
    return read_fields(c, _NAMES) | {
        "kv_heads": c["num_attention_heads"] if kv_heads is None else kv_heads,
        **read_rope_settings(c),
    }


def write(config: MixtralConfig) -> dict[str, Any]:
    c = config
    settings = write_fields(c, _NAMES)
    settings |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    settings |= write_rope(c.rope_scaling)
    return settings


def tensors(config: MixtralConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    moe = LLAMA_LAYER + "block_sparse_moe."
    expert = moe + "experts.{expert}."
    return {
        **llama_attention(),
        "layers/router": Tensor(moe + "gate.weight", TURNED),
        "layers/gate": Tensor(expert + "w1.weight", TURNED),
        "layers/up": Tensor(expert + "w3.weight", TURNED),
        "layers/down": Tensor(expert + "w2.weight", TURNED),
        **llama_norm(),
        **own_head(config),
    }


duplicates = tied_head("model.embed_tokens.weight")
