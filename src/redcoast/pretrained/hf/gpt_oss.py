"""The settings and tensors of GPT-OSS in Hugging Face's format."""

import math
from typing import Any

from ...models._rotary import Yarn
from ...models.gpt_oss import GptOssConfig
from .._settings import REQUIRED, read_fields, read_settings, rename, write_fields
from .._tensors import Tensor
from ._tables import (
    HEADS_BIAS,
    LLAMA_LAYER,
    TURNED,
    VECTOR,
    llama_attention,
    llama_norm,
    own_head,
    tied_head,
)

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
    "limit": "swiglu_limit",
    "attention_dropout": "attention_dropout",
    "router_loss_weight": "router_aux_loss_coef",
    "context": "max_position_embeddings",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}
_YARN = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "rounded": "truncate",
    "amplitude": "attention_factor",
}
_DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
_DEFAULT_ROPE |= {"original_max_position_embeddings": 4096}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_dropout": 0.0,
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 131072,
        **dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id")),
        **dict.fromkeys(("rope_scaling", "rope_parameters", "layer_types")),
    }
    only = {
        "model_type": ("gpt_oss",),
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
    }
    settings = rename(settings, {"experts_per_token": "num_experts_per_tok"})
    # `output_router_logits` only selects the training loss. The initial context is that of YaRN,
    # which states it again.
    c = read_settings(settings, defaults, only, ("output_router_logits", "initial_context_length"))
    kinds = c["layer_types"] or [(_LOCAL, _GLOBAL)[i % 2] for i in range(c["num_hidden_layers"])]
    if odd := {*kinds} - {_LOCAL, _GLOBAL}:
        raise ValueError(
            f"`layer_types` has {sorted(odd)}, but only {[_LOCAL, _GLOBAL]} are implemented."
        )
    local = tuple(kind == _LOCAL and c["sliding_window"] is not None for kind in kinds)
    return read_fields(c, _NAMES) | {"local": local, **_read_rope(c)}


def _read_rope(c: dict[str, Any]) -> dict[str, Any]:
    rope = dict(c["rope_parameters"] or c["rope_scaling"] or _DEFAULT_ROPE)
    base = rope.pop("rope_theta", c["rope_theta"])
    kinds = {rope.pop(name, "default") for name in ("rope_type", "type")} - {"default"}
    if not kinds:
        return {"rope_base": base, "rope_scaling": None}
    if kinds != {"yarn"}:
        raise ValueError(
            f"The rotary embeddings have the types {sorted(kinds)}, but only 'default' and 'yarn' "
            "are implemented for this model."
        )
    if unknown := rope.keys() - {*_YARN.values()}:
        raise ValueError(f"The rotary embeddings have unknown settings: {sorted(unknown)}.")
    if missing := {_YARN["factor"], _YARN["original"]} - rope.keys():
        raise ValueError(f"Rotary embeddings of the type 'yarn' need {sorted(missing)}.")
    fields = {field: rope[name] for field, name in _YARN.items() if rope.get(name) is not None}
    factor = fields["factor"]
    fields.setdefault("amplitude", 0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return {"rope_base": base, "rope_scaling": Yarn(**fields)}


def write(config: GptOssConfig) -> dict[str, Any]:
    c = config
    rope: dict[str, Any] = {"rope_type": "yarn" if c.rope_scaling else "default"}
    if c.rope_scaling:
        rope |= {name: getattr(c.rope_scaling, field) for field, name in _YARN.items()}
    settings = write_fields(c, _NAMES)
    settings |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim, "attention_bias": True}
    local = c.local or (False,) * c.layers
    settings["layer_types"] = [_LOCAL if near else _GLOBAL for near in local]
    return settings | {"rope_scaling": rope}


def tensors(config: GptOssConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors: the gates and the other features of the experts are
    in turn in one tensor."""
    attention, mlp = LLAMA_LAYER + "self_attn.", LLAMA_LAYER + "mlp."
    found = llama_attention()
    for letter in "qkv":
        found[f"layers/b{letter}"] = Tensor(f"{attention}{letter}_proj.bias", HEADS_BIAS)
    found |= {
        "layers/bo": Tensor(attention + "o_proj.bias", VECTOR),
        "layers/sinks": Tensor(attention + "sinks", "heads -> heads"),
        "layers/router": Tensor(mlp + "router.weight", TURNED),
        "layers/router_bias": Tensor(mlp + "router.bias", "experts -> experts"),
        "layers/down": Tensor(
            mlp + "experts.down_proj", "experts hidden width -> experts hidden width"
        ),
        "layers/down_bias": Tensor(
            mlp + "experts.down_proj_bias", "experts width -> experts width"
        ),
    }
    both = mlp + "experts.gate_up_proj"
    for i, leaf in enumerate(("gate", "up")):
        weight = "experts width (hidden part) -> experts width hidden"
        found[f"layers/{leaf}"] = Tensor(both, weight, part=(i, 2))
        bias = "experts (hidden part) -> experts hidden"
        found[f"layers/{leaf}_bias"] = Tensor(both + "_bias", bias, part=(i, 2))
    return found | llama_norm() | own_head(config)


duplicates = tied_head("model.embed_tokens.weight")
