"""The settings and tensors of Gemma 1, 2 and 3 in Hugging Face's format."""

from ...models.gemma import GemmaConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._rope import ROPE, read_rope, write_rope
from ._tables import (
    LLAMA_FIELDS,
    LLAMA_LAYER,
    VECTOR,
    llama_attention,
    llama_ends,
    llama_mlp,
    qk_norms,
    under,
    weights,
)
from ._windows import GLOBAL, LOCAL, local_layers, write_windows

BASE_PREFIX = "model."

_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": "num_key_value_heads",
    "head_dim": ("head_dim", 256),
    "tied": ("tie_word_embeddings", True),
    "bos": ("bos_token_id", 2),
    "pad": ("pad_token_id", 0),
}
# Settings since Gemma 2.
_LATER = {
    "score_scale": ("query_pre_attn_scalar", 256),
    "score_cap": ("attn_logit_softcapping", None),
    "logit_cap": ("final_logit_softcapping", None),
    "window": ("sliding_window", 4096),
}
_GELU = "gelu_pytorch_tanh"


def read(settings: Settings) -> Fields:
    kind = settings.get("model_type", "gemma")
    second, third = kind == "gemma2", kind == "gemma3_text"
    table = _FIELDS
    if second or third:
        table = _FIELDS | _LATER
    defaults = {"max_position_embeddings": 8192, "eos_token_id": 1, "rope_theta": 1e4, **ROPE}
    only: dict[str, tuple[object, ...]] = {
        "model_type": ("gemma", "gemma2", "gemma3_text"),
        # The first files have "gelu", but their models were trained with the tanh approximation.
        "hidden_act": ("gelu", _GELU),
        "hidden_activation": (_GELU, None),
        "attention_bias": (False,),
        "use_bidirectional_attention": (False, None),
    }
    renamed = {}
    if second or third:
        # The last of two layers has no window in Gemma 2, and the last of six in Gemma 3.
        defaults |= {"layer_types": None, "sliding_window_pattern": 2}
        renamed = {"_sliding_window_pattern": "sliding_window_pattern"}
    if second:
        defaults |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if third:
        defaults |= {"sliding_window_pattern": 6, "max_position_embeddings": 131072}
        defaults |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
        only["attn_logit_softcapping"] = (None,)
    c, fields = read_settings(settings, table, defaults, only=only, renamed=renamed)
    fields |= {"post_norms": second or third, "qk_norm": third}
    # Which layers have a sliding window.
    if "layer_types" not in c or not c["sliding_window"]:
        fields["window"] = None
    else:
        fields["local"] = local_layers(c, c["sliding_window_pattern"])
    return fields | _rope(c)


def _rope(c: Settings) -> Fields:
    """Reads the rotary embeddings. Layers with a window may have a separate base."""
    rope = c["rope_parameters"] or {}
    by_kind, everywhere, near = {LOCAL, GLOBAL} & rope.keys(), rope, {}
    if by_kind:
        everywhere, near = rope.get(GLOBAL) or {}, rope.get(LOCAL) or {}
    everywhere = everywhere | (c["rope_scaling"] or {})
    fields = {
        "rope_base": everywhere.get("rope_theta", c["rope_theta"]),
        "rope_scaling": read_rope(everywhere),
    }
    if "rope_local_base_freq" not in c:
        if by_kind:
            raise ValueError(
                "`rope_parameters` has an entry for each layer type, which only Gemma 3 supports."
            )
        return fields
    if read_rope(near):
        raise ValueError(
            f"`rope_parameters` scales the layers with {LOCAL!r}, which is not implemented."
        )
    return fields | {"local_rope_base": near.get("rope_theta", c["rope_local_base_freq"])}


def write(config: GemmaConfig) -> Settings:
    c = config
    kind = _kind(c)
    name = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3"}[kind]
    settings = write_fields(c, _FIELDS) | write_rope(c.rope_scaling, c.context)
    settings |= {"architectures": [f"{name}ForCausalLM"], "model_type": kind}
    settings |= {"rope_theta": c.rope_base}
    if kind == "gemma":
        return settings | {"hidden_act": _GELU}
    settings |= write_fields(c, _LATER) | {"hidden_activation": _GELU}
    settings["layer_types"] = write_windows(c.local or (False,) * c.layers)
    settings["query_pre_attn_scalar"] = c.score_scale or c.head_dim
    if kind == "gemma3_text":
        settings["rope_local_base_freq"] = c.local_rope_base or c.rope_base
    return settings


def _kind(c: GemmaConfig) -> str:
    """Returns the `model_type` of the generation of Gemma that has these features."""
    if not c.post_norms and not c.qk_norm:
        odd = [c.score_scale not in (None, c.head_dim), c.score_cap, c.logit_cap, any(c.local)]
        kind = "gemma"
    elif c.post_norms and not c.qk_norm:
        # The rotary embeddings of layers with a window, which have no scaling, and of the others.
        local_rope, global_rope = (c.local_rope_base, None), (c.rope_base, c.rope_scaling)
        odd, kind = [c.local_rope_base is not None and local_rope != global_rope], "gemma2"
    else:
        shared = any(c.local) and c.local_rope_base is None and c.rope_scaling is not None
        odd, kind = [not c.post_norms, c.score_cap, shared], "gemma3_text"
    if any(odd):
        raise ValueError(
            "No generation of Gemma has this combination of settings. The first has no "
            "`post_norms`, `qk_norm`, windows, caps or `score_scale`; the second has `post_norms` "
            "and the same rotary embeddings in all layers; the third has `post_norms` and "
            "`qk_norm`, but no `score_cap`, and scales rotary embeddings only in global layers."
        )
    return kind


def tensors(config: GemmaConfig) -> dict[str, Tensor]:
    table = llama_attention() | llama_mlp()
    if config.post_norms:
        norms = {
            "mlp_norm": "pre_feedforward_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        }
        table |= under("layers/", weights(LLAMA_LAYER, norms, VECTOR))
    table |= qk_norms("layers/", LLAMA_LAYER + "self_attn.", "qk" * config.qk_norm)
    return table | llama_ends(config)
