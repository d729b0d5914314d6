"""The settings and tensors of GPT-OSS in Hugging Face's format."""

from ...models.gpt_oss import GptOssConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._rope import ROPE, read_yarn, write_yarn
from ._tables import LLAMA_FIELDS, LLAMA_LAYER, dense, fused, llama_attention, llama_ends
from ._windows import local_layers, write_windows

BASE_PREFIX = "model."

_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": "num_key_value_heads",
    "experts": "num_local_experts",
    "chosen": "num_experts_per_tok",
    "head_size": ("head_dim", 64),
    "rope_base": ("rope_theta", 150000.0),
    "window": ("sliding_window", 128),
    "limit": ("swiglu_limit", 7.0),
    "router_loss_weight": ("router_aux_loss_coef", 0.001),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "context": ("max_position_embeddings", 131072),
}
_DEFAULT_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
_DEFAULT_ROPE |= {"original_max_position_embeddings": 4096}


def read(settings: Settings) -> Fields:
    defaults = {"eos_token_id": None, "layer_types": None, **ROPE}
    only = {
        "model_type": ("gpt_oss",),
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
    }
    renamed = {"experts_per_token": "num_experts_per_tok"}
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, renamed=renamed)
    local = local_layers(c, 2)
    # Without a window, layers of both types are alike.
    if c["sliding_window"] is None:
        local = (False,) * len(local)
    return fields | {"local": local, **read_yarn(c, _DEFAULT_ROPE)}


def write(config: GptOssConfig) -> Settings:
    c = config
    # Stated even if nothing is scaled, since a file without it is scaled by default.
    rope = {"rope_type": "default"}
    if c.rope_scaling is not None:
        rope = write_yarn(c.rope_scaling)
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim, "attention_bias": True}
    settings["layer_types"] = write_windows(c.local or (False,) * c.layers)
    return settings | {"rope_scaling": rope}


def tensors(config: GptOssConfig) -> dict[str, Tensor]:
    """Gates and other features of the experts alternate in the tensors."""
    mlp, hidden = LLAMA_LAYER + "mlp.", "experts hidden"
    experts = mlp + "experts."
    table = llama_attention("qkvo") | {
        "layers/sinks": Tensor(LLAMA_LAYER + "self_attn.sinks", "heads -> heads"),
        **dense("layers/router", mlp + "router"),
        "layers/down": Tensor(experts + "down_proj", f"{hidden} width -> {hidden} width"),
        "layers/down_bias": Tensor(experts + "down_proj_bias", "experts width -> experts width"),
    }
    # Here the weights of experts are (inputs, outputs).
    both = experts + "gate_up_proj"
    # The part varies fastest: gate, feature, gate, feature.
    weight = "experts width (hidden part) -> experts width hidden"
    table |= fused(("layers/gate", "layers/up"), both, weight)
    bias = "experts (hidden part) -> experts hidden"
    table |= fused(("layers/gate_bias", "layers/up_bias"), both + "_bias", bias)
    return table | llama_ends(config)
