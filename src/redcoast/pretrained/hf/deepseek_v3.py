"""The settings and tensors of DeepSeek-V3 and Kimi-K2 in Hugging Face's format."""

from typing import Any

from ...models.deepseek_v3 import DeepseekV3Config
from .._settings import defaults_of, read_fields, read_settings, rename, write_fields
from .._tensors import Tensor
from ._rope import read_yarn, write_yarn
from ._tables import LLAMA_FIELDS, OUT_OF_HEADS, TURNED, VECTOR, llama_ends, tied_head

BASE_PREFIX = "model."
KINDS = ("deepseek_v3", "kimi_k2")
# The layer that predicts a further token, in the published files.
BUFFERS = (r"^model\.layers\.61\.",)

_FIELDS = {
    **LLAMA_FIELDS,
    "expert_hidden": "moe_intermediate_size",
    "experts": "n_routed_experts",
    "chosen": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "groups": "n_group",
    "chosen_groups": "topk_group",
    "weights_sum_to_one": ("norm_topk_prob", True),
    "route_scale": ("routed_scaling_factor", 2.5),
    "q_rank": ("q_lora_rank", 1536),
    "kv_rank": "kv_lora_rank",
    "plain_size": "qk_nope_head_dim",
    "rope_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
    "rope_base": ("rope_theta", 10000.0),
    "rope_pairs": ("rope_interleave", True),
    "context": ("max_position_embeddings", 4096),
    "bos": ("bos_token_id", 0),
}
# Settings of the training loss, of the layers that predict further tokens, of how experts are
# distributed, and sizes that follow from others.
_IGNORED = """
    aux_loss_alpha seq_aux num_nextn_predict_layers num_mtp_layers ep_size output_router_logits
    head_dim qk_head_dim
"""


def read(settings: dict[str, Any]) -> dict[str, Any]:
    settings = rename(settings, {"num_local_experts": "n_routed_experts"})
    defaults = {
        **defaults_of(_FIELDS),
        "first_k_dense_replace": 3,
        "eos_token_id": 1,
        **dict.fromkeys(("rope_scaling", "rope_parameters")),
    }
    only = {
        "model_type": KINDS,
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "num_key_value_heads": (settings.get("num_attention_heads"), None),
    }
    c = read_settings(settings, defaults, only, tuple(_IGNORED.split()))
    fields = read_fields(c, _FIELDS) | {"dense_layers": c["first_k_dense_replace"]}
    return fields | read_yarn(c, {}, ("mscale", "mscale_all_dim"))


def write(config: DeepseekV3Config) -> dict[str, Any]:
    c = config
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    settings |= {"hidden_act": "silu", "attention_bias": False, "num_key_value_heads": c.heads}
    settings |= {"first_k_dense_replace": c.dense_layers}
    if c.rope_scaling is None:
        return settings
    rope = write_yarn(c.rope_scaling) | {"mscale_all_dim": c.score_scaling}
    return settings | {"rope_scaling": rope}


def tensors(config: DeepseekV3Config) -> dict[str, Tensor]:
    """Maps each array to its published tensors. Layers without experts come first."""
    c = config
    routed = f"model.layers.{{layer+{c.dense_layers}}}."
    found = _layers(c, "layers/", routed)
    found["layers/router"] = Tensor(routed + "mlp.gate.weight", TURNED)
    correction = routed + "mlp.gate.e_score_correction_bias"
    found["layers/correction"] = Tensor(correction, "experts -> experts")
    for part in ("gate", "up", "down"):
        shared = f"{routed}mlp.shared_experts.{part}_proj.weight"
        found[f"layers/shared_{part}"] = Tensor(shared, TURNED)
        expert = f"{routed}mlp.experts.{{expert}}.{part}_proj.weight"
        found[f"layers/{part}"] = Tensor(expert, TURNED)
    if c.dense_layers:
        dense = "model.layers.{layer+0}."
        found |= _layers(c, "dense/", dense)
        for part in ("gate", "up", "down"):
            found[f"dense/{part}"] = Tensor(f"{dense}mlp.{part}_proj.weight", TURNED)
    return found | llama_ends(c)


def _layers(c: DeepseekV3Config, leaf: str, layer: str) -> dict[str, Tensor]:
    """The norms and the attention of a stack of layers."""
    attention = layer + "self_attn."
    queries = "(heads qk_size) inputs -> inputs heads qk_size"
    found = {
        "attention_norm": Tensor(layer + "input_layernorm.weight", VECTOR),
        "mlp_norm": Tensor(layer + "post_attention_layernorm.weight", VECTOR),
        "kv_norm": Tensor(attention + "kv_a_layernorm.weight", VECTOR),
        "wo": Tensor(attention + "o_proj.weight", OUT_OF_HEADS),
    }
    if c.q_rank is None:
        found["wq"] = Tensor(attention + "q_proj.weight", queries)
    else:
        found["q_down"] = Tensor(attention + "q_a_proj.weight", TURNED)
        found["q_norm"] = Tensor(attention + "q_a_layernorm.weight", VECTOR)
        found["wq"] = Tensor(attention + "q_b_proj.weight", queries)
    both, into = attention + "kv_a_proj_with_mqa.weight", c.kv_rank + c.rope_size
    found["kv_down"] = Tensor(both, TURNED, outputs=(0, into))
    found["k_rope"] = Tensor(both, TURNED, outputs=(c.kv_rank, into))
    both, out = attention + "kv_b_proj.weight", c.plain_size + c.value_size
    pattern = "(heads part) latent -> latent heads part"
    found["wk"] = Tensor(both, pattern, part=(0, out))
    found["wv"] = Tensor(both, pattern, part=(c.plain_size, out))
    return {leaf + name: tensor for name, tensor in found.items()}


duplicates = tied_head("model.embed_tokens.weight")
