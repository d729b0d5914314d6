"""The settings and tensors of LLaMA, Mistral, OLMo 2, Qwen2, Qwen3 and SmolLM3 in Hugging Face's
format."""

from typing import Any

from ...models.llama import LlamaConfig
from ._kinds import WINDOW_FIELDS, Kind, read_kind, transformer_tensors, write_kind
from ._tables import tied_head

BASE_PREFIX = "model."
# The first files hold the frequencies of the rotary embeddings.
BUFFERS = (r"\.rotary_emb\.inv_freq$",)
_FIELDS = WINDOW_FIELDS


def _window(c: dict[str, Any]) -> dict[str, Any]:
    """Reads a sliding window, which Qwen's models have from some layer on if it is used."""
    if not c["use_sliding_window"] or not c["sliding_window"]:
        return {"window": None}
    if not c["layer_types"] and c["max_window_layers"] >= c["num_hidden_layers"]:
        return {"window": None}  # the layers before it have none
    if c["max_window_layers"] or {*(c["layer_types"] or ())} - {"sliding_attention"}:
        raise ValueError(
            "`max_window_layers` or `layer_types` gives only some layers a sliding window, but "
            "only a window in all layers or in none is implemented."
        )
    return {"window": c["sliding_window"]}


def _rope_layers(c: dict[str, Any]) -> dict[str, Any]:
    count, each = c["num_hidden_layers"], c["no_rope_layer_interval"]
    numbers = c["no_rope_layers"]  # they are 1 where there are rotary embeddings
    if numbers is None:
        numbers = [(i + 1) % each for i in range(count)]
    return {"rope_layers": tuple(map(bool, numbers[:count]))}


_QWEN: dict[str, Any] = {
    "free": ("head_size", "window"),
    "fields": _FIELDS,
    "more": _window,
    "written": lambda c: {"use_sliding_window": bool(c.window), "max_window_layers": 0},
}
_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
_QWEN_DEFAULTS |= {"layer_types": None}
_ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
_NO_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

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
        written=lambda c: {"no_rope_layers": [int(rotated) for rotated in c.rope_layers]},
    ),
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    return read_kind(settings, KINDS)


def write(config: LlamaConfig) -> dict[str, Any]:
    return write_kind(config, KINDS)


tensors = transformer_tensors
duplicates = tied_head("model.embed_tokens.weight")
