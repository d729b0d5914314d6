"""The settings and tensors of Qwen3.5 in Hugging Face's format, with and without experts."""

from ...models.qwen3_5 import Qwen3_5Config
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._rope import PART, ROPE, read_partial_rope, rotated_part, write_rope
from ._tables import (
    GATED,
    LLAMA_FIELDS,
    PROJ,
    TURNED,
    VECTOR,
    attention,
    consecutive,
    fused,
    layers_with,
    llama_ends,
    qk_norms,
    under,
    weights,
)
from ._windows import local_layers, write_windows

BASE_PREFIX = "model."
# The layers that predict further tokens.
BUFFERS = (r"^mtp\.",)
KINDS = ("qwen3_5_text", "qwen3_5_moe_text")

_LINEAR = "linear_attention"
_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": "num_key_value_heads",
    "head_size": ("head_dim", 256),
    "rope_base": ("rope_theta", 10000.0),
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
    "context": ("max_position_embeddings", 32768),
}
_EXPERTS = {
    "shared_hidden": ("shared_expert_intermediate_size", 512),
    "experts": ("num_experts", 256),
    "chosen": ("num_experts_per_tok", 8),
    "router_loss_weight": ("router_aux_loss_coef", 0.001),
}
_OF_EXPERTS = [name for name, _ in _EXPERTS.values()]
_ROUTED = _FIELDS | {"hidden": ("moe_intermediate_size", 512)} | _EXPERTS
# Settings of the layers that predict further tokens.
_IGNORED = "mtp_num_hidden_layers mtp_use_dedicated_embeddings"


def read(settings: Settings) -> Fields:
    # The sizes of a network and of experts stand in files of either kind.
    table, ignored = _FIELDS, [_IGNORED, *_OF_EXPERTS]
    if settings.get("model_type") == KINDS[1]:
        table, ignored = _ROUTED, [_IGNORED, "intermediate_size"]
    defaults = {
        PART: None,
        "layer_types": None,
        "full_attention_interval": 4,
        "eos_token_id": None,
        **ROPE,
    }
    only = {
        "model_type": KINDS,
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "norm_topk_prob": (True,),
        "mlp_only_layers": ([], None),
    }
    c, fields = read_settings(settings, table, defaults, only=only, ignored=" ".join(ignored))
    # Which layers have Gated DeltaNet.
    linear = local_layers(c, c["full_attention_interval"], _LINEAR)
    return fields | read_partial_rope(c, 0.25) | {"linear": linear}


def write(config: Qwen3_5Config) -> Settings:
    c = config
    if c.experts is None:
        settings = write_fields(c, _FIELDS) | {"model_type": KINDS[0]}
        settings |= {"architectures": ["Qwen3_5ForCausalLM"]}
    else:
        settings = write_fields(c, _ROUTED) | {"model_type": KINDS[1]}
        settings |= {"architectures": ["Qwen3_5MoeForCausalLM"]}
    del settings["rope_theta"]  # it is among `rope_parameters`
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    settings |= {"layer_types": write_windows(c.linear, _LINEAR)}
    rope = write_rope(c.rope_scaling, c.context).get("rope_scaling", {"rope_type": "default"})
    rope |= {"rope_theta": c.rope_base, PART: rotated_part(c.rotated, c.head_dim)}
    return settings | {"rope_parameters": rope}


def tensors(config: Qwen3_5Config) -> dict[str, Tensor]:
    kind_of = {True: "linear", False: "attention"}
    kinds = [kind_of[linear] for linear in config.linear]
    table = llama_ends(config)
    if "linear" in kinds:
        layer = layers_with("linear", kinds)
        table |= under("linear/", _delta_net(config, layer) | _rest(config, layer))
    if "attention" in kinds:
        layer = layers_with("attention", kinds)
        name = layer + "self_attn."
        of_layer = attention("", name, PROJ, letters="kvo") | qk_norms("", name)
        both = "(heads part head_dim) width -> width heads head_dim"
        # A head's queries, and the gate of its outputs.
        of_layer |= fused(("wq", "wz"), name + "q_proj.weight", both)
        table |= under("attention/", of_layer | _rest(config, layer))
    return table


def _rest(c: Qwen3_5Config, layer: str) -> dict[str, Tensor]:
    """The norms of a layer, and its network or experts."""
    norms = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    table, mlp = weights(layer, norms, VECTOR), layer + "mlp."
    if c.experts is None:
        return table | weights(mlp, GATED, TURNED)
    table["router"] = Tensor(mlp + "gate.weight", TURNED)
    table["shared_router"] = Tensor(mlp + "shared_expert_gate.weight", "1 width -> width")
    table |= weights(mlp + "experts.{expert}.", GATED, TURNED)
    return table | under("shared_", weights(mlp + "shared_expert.", GATED, TURNED))


def _delta_net(c: Qwen3_5Config, layer: str) -> dict[str, Tensor]:
    name = layer + "linear_attn."
    table = {
        "wz": Tensor(name + "in_proj_z.weight", TURNED),
        "wo": Tensor(name + "out_proj.weight", TURNED),
        "strength": Tensor(name + "in_proj_b.weight", TURNED),
        "steps": Tensor(name + "in_proj_a.weight", TURNED),
        "steps_bias": Tensor(name + "dt_bias", "heads -> heads"),
        "log_decay": Tensor(name + "A_log", "heads -> heads"),
        "out_norm": Tensor(name + "norm.weight", "size -> size"),
    }
    # Queries, keys and values are in one tensor, one behind the other.
    weights = {"wq": c.keys, "wk": c.keys, "wv": c.values}
    table |= consecutive(weights, "outputs", name + "in_proj_qkv.weight", TURNED)
    kernels = {"conv_q": c.keys, "conv_k": c.keys, "conv_v": c.values}
    kernel = "outputs 1 taps -> taps outputs"
    return table | consecutive(kernels, "outputs", name + "conv1d.weight", kernel)
