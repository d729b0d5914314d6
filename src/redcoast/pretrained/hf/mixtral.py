"""The settings and tensors of Mixtral and Qwen3-MoE in Hugging Face's format."""

from typing import Any

from ...models.mixtral import MixtralConfig
from .._settings import defaults_of, read_fields, read_settings, rename, write_fields
from .._tensors import Tensor
from ._rope import read_rope_settings, write_rope
from ._tables import LLAMA_FIELDS, LLAMA_LAYER, TURNED, llama_attention, llama_ends, tied_head

BASE_PREFIX = "model."

_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": ("num_key_value_heads", 8),
    "experts": ("num_local_experts", 8),
    "chosen": ("num_experts_per_tok", 2),
    "head_size": ("head_dim", None),
    "rope_base": ("rope_theta", 1e6),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "window": ("sliding_window", None),
    "router_loss_weight": ("router_aux_loss_coef", 0.001),
    "context": ("max_position_embeddings", 131072),
    "bos": ("bos_token_id", 1),
}
_QWEN3 = {
    **_FIELDS,
    "kv_heads": ("num_key_value_heads", 4),
    "hidden": "moe_intermediate_size",
    "experts": ("num_experts", 128),
    "chosen": ("num_experts_per_tok", 8),
    "weights_sum_to_one": ("norm_topk_prob", False),
    "rope_base": ("rope_theta", 1e4),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "window": ("sliding_window", 4096),
    "context": ("max_position_embeddings", 32768),
    "bos": ("bos_token_id", None),
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    qwen3 = settings.get("model_type") == "qwen3_moe"
    table = _QWEN3 if qwen3 else _FIELDS
    defaults = {
        **defaults_of(table),
        "eos_token_id": None if qwen3 else 2,
        **dict.fromkeys(("rope_scaling", "rope_parameters")),
    }
    only: dict[str, tuple[Any, ...]] = {
        "model_type": ("mixtral", "qwen3_moe"),
        "hidden_act": ("silu",),
    }
    if qwen3:
        defaults |= {"use_sliding_window": False}
        only |= {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
        only |= {"attention_bias": (False,)}
        settings = rename(settings, {"num_local_experts": "num_experts"})
    else:
        only |= {"router_jitter_noise": (0.0,)}
    # `output_router_logits` only selects the training loss, which users define themselves. The
    # size of dense layers is not used: there are none.
    ignored = ("output_router_logits", "max_window_layers", *["intermediate_size"] * qwen3)
    c = read_settings(settings, defaults, only, ignored)
    if c["num_key_value_heads"] is None:
        c["num_key_value_heads"] = c["num_attention_heads"]
    fields = read_fields(c, table) | {**read_rope_settings(c), "qk_norm": qwen3}
    return fields | ({"window": None} if qwen3 and not c["use_sliding_window"] else {})


def write(config: MixtralConfig) -> dict[str, Any]:
    c = config
    if not c.qk_norm and not c.weights_sum_to_one:
        raise ValueError(
            "Mixtral has `weights_sum_to_one`, and no published architecture has neither that nor "
            "`qk_norm`, which Qwen3-MoE has."
        )
    name, kind = ("Qwen3Moe", "qwen3_moe") if c.qk_norm else ("Mixtral", "mixtral")
    settings = write_fields(c, _QWEN3 if c.qk_norm else _FIELDS)
    settings |= {"architectures": [f"{name}ForCausalLM"], "model_type": kind}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    if c.qk_norm:
        settings |= {"use_sliding_window": bool(c.window), "decoder_sparse_step": 1}
        settings |= {"mlp_only_layers": []}
    settings |= write_rope(c.rope_scaling, c.context)
    return settings


def tensors(config: MixtralConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    moe = LLAMA_LAYER + ("mlp." if config.qk_norm else "block_sparse_moe.")
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    if config.qk_norm:
        names = {leaf: f"{leaf}_proj" for leaf in names}
    found = llama_attention() | {"layers/router": Tensor(moe + "gate.weight", TURNED)}
    for leaf, name in names.items():
        found[f"layers/{leaf}"] = Tensor(f"{moe}experts.{{expert}}.{name}.weight", TURNED)
    if config.qk_norm:
        for letter in "qk":
            name = f"{LLAMA_LAYER}self_attn.{letter}_norm.weight"
            found[f"layers/{letter}_norm"] = Tensor(name, "head_dim -> head_dim")
    return found | llama_ends(config)


duplicates = tied_head("model.embed_tokens.weight")
