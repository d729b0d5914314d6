"""The settings and tensors of LLaMA, Mistral, Qwen2 and Qwen3 in Hugging Face's format."""

from typing import Any

from ...models.llama import LlamaConfig
from .._settings import REQUIRED, published_ids, read_settings, token_ids
from .._tensors import Tensor
from ._rope import read_rope, write_rope

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
    rope = c["rope_parameters"] or c["rope_scaling"] or {}
    fields = {field: c[name] for field, name in _NAMES.items()}
    return fields | {
        "kv_heads": c["num_attention_heads"] if kv_heads is None else kv_heads,
        "rope_base": rope.get("rope_theta", c["rope_theta"]),
        "rope_scaling": read_rope(rope),
        "window": _window(c),
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "eos": token_ids(c["eos_token_id"]),
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
    settings = {name: getattr(c, field) for field, name in _NAMES.items()}
    settings |= published_ids(eos=c.eos, bos=c.bos, pad=c.pad)
    settings |= {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    if c.rope_scaling:
        settings["rope_scaling"] = write_rope(c.rope_scaling)
    if name.startswith("Qwen"):
        settings |= {"use_sliding_window": bool(c.window), "max_window_layers": 0}
    if name == "Llama":
        del settings["sliding_window"]
    return settings


def tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    layer = "model.layers.{layer}."
    attention = layer + "self_attn."
    into = "(heads head_dim) width -> width heads head_dim"
    out = "width (heads head_dim) -> heads head_dim width"
    turned = "outputs inputs -> inputs outputs"
    found = {
        "embed": Tensor("model.embed_tokens.weight", "vocab width -> vocab width"),
        "layers/attention_norm": Tensor(layer + "input_layernorm.weight", "width -> width"),
        "layers/wq": Tensor(attention + "q_proj.weight", into),
        "layers/wk": Tensor(attention + "k_proj.weight", into),
        "layers/wv": Tensor(attention + "v_proj.weight", into),
        "layers/wo": Tensor(attention + "o_proj.weight", out),
        "layers/mlp_norm": Tensor(layer + "post_attention_layernorm.weight", "width -> width"),
        "layers/gate": Tensor(layer + "mlp.gate_proj.weight", turned),
        "layers/up": Tensor(layer + "mlp.up_proj.weight", turned),
        "layers/down": Tensor(layer + "mlp.down_proj.weight", turned),
        "norm": Tensor("model.norm.weight", "width -> width"),
    }
    if config.qkv_bias:
        for letter in "qkv":
            name = f"{attention}{letter}_proj.bias"
            found[f"layers/b{letter}"] = Tensor(name, "(heads head_dim) -> heads head_dim")
    if config.qk_norm:
        for letter in "qk":
            name = f"{attention}{letter}_norm.weight"
            found[f"layers/{letter}_norm"] = Tensor(name, "head_dim -> head_dim")
    if not config.tied:
        found["head"] = Tensor("lm_head.weight", turned)
    return found
