"""The settings and tensors of LLaMA, Mistral, Qwen2 and Qwen3 in Hugging Face's format."""

from typing import Any

from ...models.llama import LlamaConfig
from .._settings import REQUIRED, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._rope import read_rope_settings, write_rope
from ._tables import HEADS_BIAS, LLAMA_LAYER, llama_attention, llama_mlp, own_head

_NAMES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "intermediate_size",
    "head_size": "head_dim",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "window": "sliding_window",
    "attention_dropout": "attention_dropout",
    "context": "max_position_embeddings",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}
_KINDS = ("llama", "mistral", "qwen2", "qwen3")


def read(settings: dict[str, Any]) -> dict[str, Any]:
    kind = settings.get("model_type", "llama")
    mistral = kind == "mistral"
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "num_key_value_heads": 8 if mistral else None,
        "head_dim": 128 if kind == "qwen3" else None,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096 if mistral else None,
        "attention_dropout": 0.0,
        "max_position_embeddings": 131072 if mistral else 2048,
        **dict.fromkeys(("bos_token_id", "pad_token_id", "eos_token_id")),
        **dict.fromkeys(("rope_scaling", "rope_parameters", "layer_types")),
        "use_sliding_window": mistral,
        "max_window_layers": 0,
    }
    only = {
        "model_type": _KINDS,
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_interleaved": (False,),
    }
    c = read_settings(settings, defaults, only)
    kv_heads = c["num_key_value_heads"]
    fields = read_fields(c, _NAMES)
    return fields | {
        "kv_heads": c["num_attention_heads"] if kv_heads is None else kv_heads,
        **read_rope_settings(c),
        "window": _window(c),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
    }


def _window(c: dict[str, Any]) -> int | None:
    if not c["use_sliding_window"] or not c["sliding_window"]:
        return None
    if c["max_window_layers"] or {*(c["layer_types"] or ())} - {"sliding_attention"}:
        raise ValueError(
            "`max_window_layers` or `layer_types` gives only some layers a sliding window, but "
            "only a window in all layers or in none is implemented."
        )
    return c["sliding_window"]


def write(config: LlamaConfig) -> dict[str, Any]:
    c = config
    if c.qkv_bias and c.qk_norm:
        raise ValueError("No published architecture has both `qkv_bias` and `qk_norm`.")
    plain = "Mistral" if c.window else "Llama"
    name = "Qwen2" if c.qkv_bias else "Qwen3" if c.qk_norm else plain
    settings = write_fields(c, _NAMES)
    settings |= {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    settings |= write_rope(c.rope_scaling)
    if name.startswith("Qwen"):
        settings |= {"use_sliding_window": bool(c.window), "max_window_layers": 0}
    if name == "Llama":
        del settings["sliding_window"]
    return settings


def tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    layer = LLAMA_LAYER + "self_attn."
    found = llama_attention() | llama_mlp()
    if config.qkv_bias:
        for letter in "qkv":
            found[f"layers/b{letter}"] = Tensor(f"{layer}{letter}_proj.bias", HEADS_BIAS)
    if config.qk_norm:
        for letter in "qk":
            name = f"{layer}{letter}_norm.weight"
            found[f"layers/{letter}_norm"] = Tensor(name, "head_dim -> head_dim")
    return found | own_head(config)
