"""The settings and tensors of LLaMA, Mistral, OLMo 2, Qwen2, Qwen3 and SmolLM3 in Hugging Face's
format."""

from typing import Any

from ...models.llama import LlamaConfig
from .._settings import defaults_of, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._rope import read_rope_settings, write_rope
from ._tables import (
    HEADS_BIAS,
    LLAMA_FIELDS,
    LLAMA_LAYER,
    VECTOR,
    llama_attention,
    llama_ends,
    llama_mlp,
    tied_head,
)

BASE_PREFIX = "model."
# The first files hold the frequencies of the rotary embeddings.
BUFFERS = (r"\.rotary_emb\.inv_freq$",)

_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": ("num_key_value_heads", None),
    "head_size": ("head_dim", None),
    "rope_base": ("rope_theta", 10000.0),
    "window": ("sliding_window", None),
    "context": ("max_position_embeddings", 2048),
}
KINDS = ("llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
# Default values that differ between them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_position_embeddings": 131072,
    },
    "olmo2": {"rms_norm_eps": 1e-5, "eos_token_id": 50279, "pad_token_id": 1},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "smollm3": {
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
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    kind = settings.get("model_type", "llama")
    defaults = {
        **defaults_of(_FIELDS),
        "eos_token_id": None,
        **dict.fromkeys(("rope_scaling", "rope_parameters", "layer_types")),
        "use_sliding_window": False,
        "max_window_layers": 0,
        **_DEFAULTS.get(kind, {}),
    }
    only = {
        "model_type": KINDS,
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_interleaved": (False,),
    }
    if kind == "smollm3":
        only["use_sliding_window"] = (False,)
    c = read_settings(settings, defaults, only)
    if c["num_key_value_heads"] is None:
        c["num_key_value_heads"] = c["num_attention_heads"]
    return read_fields(c, _FIELDS) | {
        **read_rope_settings(c),
        "window": _window(c),
        "rope_layers": _rope_layers(c) if kind == "smollm3" else (),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind in ("olmo2", "qwen3"),
        "output_norms": kind == "olmo2",
    }


def _rope_layers(c: dict[str, Any]) -> tuple[bool, ...]:
    count, each = c["num_hidden_layers"], c["no_rope_layer_interval"]
    if c["no_rope_layers"] is None:  # the numbers are 1 where there are rotary embeddings
        return tuple((i + 1) % each != 0 for i in range(count))
    return tuple(map(bool, c["no_rope_layers"][:count]))


def _window(c: dict[str, Any]) -> int | None:
    if not c["use_sliding_window"] or not c["sliding_window"]:
        return None
    if not c["layer_types"] and c["max_window_layers"] >= c["num_hidden_layers"]:
        return None  # the layers before it have none
    if c["max_window_layers"] or {*(c["layer_types"] or ())} - {"sliding_attention"}:
        raise ValueError(
            "`max_window_layers` or `layer_types` gives only some layers a sliding window, but "
            "only a window in all layers or in none is implemented."
        )
    return c["sliding_window"]


def write(config: LlamaConfig) -> dict[str, Any]:
    c = config
    name = _architecture(c)
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    settings |= write_rope(c.rope_scaling, c.context)
    if name.startswith("Qwen"):
        settings |= {"use_sliding_window": bool(c.window), "max_window_layers": 0}
    if name == "SmolLM3":
        settings["no_rope_layers"] = [int(rotated) for rotated in c.rope_layers]
    if name in ("Llama", "Olmo2", "SmolLM3"):
        del settings["sliding_window"]
    return settings


def _architecture(c: LlamaConfig) -> str:
    """Returns the published architecture that has these options."""
    options = (c.qkv_bias, c.qk_norm, c.output_norms, bool(c.rope_layers))
    found = _ARCHITECTURES.get(options)
    if found == "Llama" and c.window:
        return "Mistral"
    if found is None or (c.window and not found.startswith("Qwen")):
        raise ValueError(
            "No published architecture has this combination of `qkv_bias`, `qk_norm`, "
            "`output_norms`, `rope_layers` and `window`. Qwen2 has `qkv_bias`, Qwen3 has "
            "`qk_norm`, OLMo 2 has `qk_norm` and `output_norms`, SmolLM3 has `rope_layers`; of "
            "these, only Qwen2 and Qwen3 may have a `window`."
        )
    if found in ("Olmo2", "SmolLM3") and c.head_size is not None:
        raise ValueError(f"{found} has no `head_size` other than `width / heads`.")
    return found


# By `qkv_bias`, `qk_norm`, `output_norms`, and whether there are `rope_layers`.
_ARCHITECTURES = {
    (False, False, False, False): "Llama",
    (True, False, False, False): "Qwen2",
    (False, True, False, False): "Qwen3",
    (False, True, True, False): "Olmo2",
    (False, False, False, True): "SmolLM3",
}


def tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    layer = LLAMA_LAYER + "self_attn."
    found = llama_attention("qkv" if config.qkv_bias else "") | llama_mlp()
    if config.qk_norm:
        pattern = HEADS_BIAS if config.output_norms else "head_dim -> head_dim"
        for letter in "qk":
            found[f"layers/{letter}_norm"] = Tensor(f"{layer}{letter}_norm.weight", pattern)
    if config.output_norms:
        names = {"attention": "post_attention", "mlp": "post_feedforward"}
        for part, name in names.items():
            found[f"layers/{part}_norm"] = Tensor(f"{LLAMA_LAYER}{name}_layernorm.weight", VECTOR)
    return found | llama_ends(config)


duplicates = tied_head("model.embed_tokens.weight")
