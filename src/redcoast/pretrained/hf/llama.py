"""The settings and tensors of LLaMA and its variants in Hugging Face's format."""

from ...models.llama import LlamaConfig
from .._settings import Fields, Settings
from .._tensors import Tensor
from ._kinds import (
    TRANSFORMER_FIELDS,
    WINDOW_FIELDS,
    Kind,
    read_kind,
    transformer_tensors,
    write_kind,
)
from ._rope import kind_of_rope, read_rope_settings, rope_of, write_rope
from ._tables import LLAMA_LAYER, TURNED, gate_and_up
from ._windows import GLOBAL, LOCAL, all_but_last_of, local_layers, write_windows

BASE_PREFIX = "model."
# The first files hold the frequencies of the rotary embeddings.
BUFFERS = (r"\.rotary_emb\.inv_freq$",)
_FIELDS = WINDOW_FIELDS


def _window(c: Settings) -> Fields:
    """Reads a sliding window, which Qwen's models may have from some layer on."""
    if not c["use_sliding_window"] or not c["sliding_window"]:
        return {"window": None}
    # Layers from this number on have a window.
    if not c["layer_types"] and c["max_window_layers"] >= c["num_hidden_layers"]:
        return {"window": None}  # the layers before it have none
    if c["max_window_layers"] or {*(c["layer_types"] or ())} - {"sliding_attention"}:
        raise ValueError(
            "`max_window_layers` or `layer_types` gives only some layers a sliding window, but "
            "only a window in all layers or in none is implemented."
        )
    return {"window": c["sliding_window"]}


def _rope_layers(c: Settings) -> Fields:
    count, each = c["num_hidden_layers"], c["no_rope_layer_interval"]
    numbers = c["no_rope_layers"]  # they are 1 where there are rotary embeddings
    if numbers is None:
        numbers = all_but_last_of(each, count)
    return {"rope_layers": tuple(map(bool, numbers[:count]))}


_QWEN: Settings = {
    "free": ("head_size", "window"),
    "fields": _FIELDS,
    "more": _window,
    "written": lambda c: {"use_sliding_window": bool(c.window), "max_window_layers": 0},
}
_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
_QWEN_DEFAULTS |= {"layer_types": None, "max_position_embeddings": 32768}
_ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}


def _layer_types(c: Settings) -> Fields:
    """Reads which layers of an OLMo 3 have a window; by default, three of four."""
    local = local_layers(c, 4)
    if not any(local):
        return {"local": local, "window": None}
    return {"local": local, "window": c["sliding_window"]}


def _rope_by_layer_type(c: Settings) -> Fields:
    """Reads rotary embeddings that are not scaled in layers with a window."""
    rope = c["rope_parameters"] or {}
    if not {LOCAL, GLOBAL} & rope.keys():
        everywhere = read_rope_settings(c)
        return everywhere | {"local_rope_base": everywhere["rope_base"]}
    near, everywhere = rope.get(LOCAL) or {}, rope.get(GLOBAL) or {}
    if kind_of_rope(near) != "default":
        raise ValueError(
            f"`rope_parameters` scales the layers with {LOCAL!r}, which is not implemented."
        )
    fields = read_rope_settings(c | {"rope_parameters": everywhere})
    return fields | {"local_rope_base": near.get("rope_theta") or c["rope_theta"]}


def _written_by_layer_type(c: LlamaConfig) -> Settings:
    scaling = write_rope(c.rope_scaling, c.context).get("rope_scaling", {"rope_type": "default"})
    near = {"rope_type": "default", "rope_theta": c.local_rope_base or c.rope_base}
    rope = {LOCAL: near, GLOBAL: scaling | {"rope_theta": c.rope_base}}
    local = c.local or (c.window is not None,) * c.layers
    return {"layer_types": write_windows(local), "rope_parameters": rope}


def _growing(c: Settings) -> Fields:
    """Reads the rotary embeddings of Ministral 3, and how its queries grow."""
    # A file without the setting has the scaling that `transformers` gives it.
    rope = rope_of(c) or _MINISTRAL_ROPE
    growth = rope.get(_GROWTH) or 0.0
    rope = {name: x for name, x in rope.items() if name not in (_GROWTH, _LENGTH)}
    fields = read_rope_settings(c | {"rope_parameters": rope, "rope_scaling": None})
    return fields | {"query_growth": growth}


def _written_growing(c: LlamaConfig) -> Settings:
    rope = write_rope(c.rope_scaling, c.context)["rope_scaling"]
    rope |= {"rope_theta": c.rope_base, _GROWTH: c.query_growth}
    return {"rope_parameters": rope, "rope_scaling": None}  # which would count in its place


def _attention_alone(c: Settings) -> Fields:
    """Reads a Granite 4 whose layers all have attention, and a network in place of experts."""
    if {*(c["layer_types"] or ["mamba"])} - {"attention", "full_attention"}:
        raise ValueError(
            "`layer_types` has layers of states, and only models whose layers all have attention "
            "are implemented of this type."
        )
    # Layers without rotary embeddings know positions by causality alone.
    rotated = c["position_embedding_type"] == "rope"
    return {"kind": "granitemoehybrid", "rope_layers": (rotated,) * c["num_hidden_layers"]}


def _written_attention_alone(c: LlamaConfig) -> Settings:
    embedding = "rope"
    if c.rope_layers:  # no layer has rotary positions
        embedding = None
    return {
        "attention_multiplier": c.score_factor or c.head_dim**-0.5,
        "layer_types": ["full_attention"] * c.layers,
        "num_local_experts": 0,
        "mamba_n_heads": 1,  # must divide the width, although there are no such layers
        "position_embedding_type": embedding,
    }


_GROWTH, _LENGTH = "llama_4_scaling_beta", "max_position_embeddings"
_MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _GROWTH: 0.1}
_MINISTRAL_ROPE |= {"original_max_position_embeddings": 16384, "mscale": 1.0}
_MINISTRAL_ROPE |= {"mscale_all_dim": 1.0}
_GRANITE_FIELDS = {
    **TRANSFORMER_FIELDS,
    "embed_scale": ("embedding_multiplier", 1.0),
    "residual_scale": ("residual_multiplier", 1.0),
    "score_factor": ("attention_multiplier", 1.0),
    "logit_divisor": ("logits_scaling", 1.0),
}
_GRANITE_FREE = ("head_size", "embed_scale", "residual_scale", "score_factor", "logit_divisor")
_OF_STATES = """
    mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand
    mamba_chunk_size mamba_conv_bias mamba_proj_bias time_step_limit intermediate_size
    num_experts_per_tok
"""
_NO_WINDOW = "sliding_window use_sliding_window max_window_layers layer_types"

KINDS = {
    "llama": Kind(
        architecture="Llama",
        free=("head_size",),
        defaults={"bos_token_id": 1, "eos_token_id": 2},
        ignored=_NO_WINDOW,
    ),
    "mistral": Kind(
        architecture="Mistral",
        fields=_FIELDS,
        free=("head_size", "window"),
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
            **_ALL_LAYERS,
        },
        more=_window,
    ),
    "qwen2": Kind(
        architecture="Qwen2", options={"qkv_bias": True}, defaults=_QWEN_DEFAULTS, **_QWEN
    ),
    "qwen3": Kind(
        architecture="Qwen3",
        options={"qk_norm": True},
        defaults={"head_dim": 128, **_QWEN_DEFAULTS},
        **_QWEN,
    ),
    "olmo2": Kind(
        architecture="Olmo2",
        options={"qk_norm": True, "output_norms": True},
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279, "pad_token_id": 1},
        ignored=_NO_WINDOW,
    ),
    "olmo3": Kind(
        architecture="Olmo3",
        options={"qk_norm": True, "output_norms": True},
        free=("window", "local", "local_rope_base"),
        fields=_FIELDS,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "eos_token_id": 50279,
            "pad_token_id": 1,
            "sliding_window": 4096,
            "layer_types": None,
        },
        rope=_rope_by_layer_type,
        more=_layer_types,
        written=_written_by_layer_type,
    ),
    "ministral3": Kind(
        architecture="Ministral3",
        free=("head_size", "window", "query_growth"),
        fields=_FIELDS,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "pad_token_id": 11,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        rope=_growing,
        written=_written_growing,
    ),
    "granite": Kind(
        architecture="Granite",
        free=_GRANITE_FREE,
        fields=_GRANITE_FIELDS,
        defaults={"bos_token_id": 1, "eos_token_id": 2},
        written=lambda c: {"attention_multiplier": c.score_factor or c.head_dim**-0.5},
    ),
    "granitemoehybrid": Kind(
        architecture="GraniteMoeHybrid",
        free=(*_GRANITE_FREE, "rope_layers"),
        named=True,
        fields=_GRANITE_FIELDS | {"hidden": ("shared_intermediate_size", 1024)},
        defaults={
            "bos_token_id": 1,
            "eos_token_id": 2,
            "layer_types": None,
            "position_embedding_type": None,
        },
        only={"num_local_experts": (0,), "normalization_function": ("rmsnorm",)},
        # Settings of layers with states or experts, of which there are none.
        ignored=_OF_STATES,
        renamed={"layers_block_type": "layer_types"},
        more=_attention_alone,
        written=_written_attention_alone,
    ),
    "smollm3": Kind(
        architecture="SmolLM3",
        free=("rope_layers",),
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "pad_token_id": 128004,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        only={"use_sliding_window": (False,)},
        ignored=_NO_WINDOW,
        more=_rope_layers,
        written=lambda c: {"no_rope_layers": list(map(int, c.rope_layers))},
    ),
}


def read(settings: Settings) -> Fields:
    return read_kind(settings, KINDS)


def write(config: LlamaConfig) -> Settings:
    return write_kind(config, KINDS)


def tensors(config: LlamaConfig) -> dict[str, Tensor]:
    # Granite 4 names the network of a layer after the experts that it shares.
    tables = transformer_tensors(config)
    if config.kind != "granitemoehybrid":
        return tables
    mlp = LLAMA_LAYER + "shared_mlp."
    down = Tensor(mlp + "output_linear.weight", TURNED)
    return tables | gate_and_up(mlp + "input_linear") | {"layers/down": down}
