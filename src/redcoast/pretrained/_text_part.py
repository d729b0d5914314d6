"""The language model within a model of texts and images, or of texts and sounds.

Such models insert the features of an image between the embeddings of tokens. For texts alone, only
the language model is used, so it is loaded without the rest.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from ..core._frames import warn
from ._lazy_tensor import Source, Stored
from ._quantised import QUANTISATION
from ._settings import Settings, present

# The types of model that contain a language model, and its type if the file does not state it.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
# Other names of the types of language models.
_SAME = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_SAME |= {"qwen3_vl_moe_text": "qwen3_moe"}
_SIZE_NAMES = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads
""".split()  # noqa: SIM905
# Files leave out sizes that are the defaults of `transformers`.
_SIZES = {
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4),
    "gemma4_text": (262144, 2304, 9216, 30, 8, 4),
    "llama": (32000, 4096, 11008, 32, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32, 8),
    "qwen2": (151936, 4096, 22016, 32, 32, 32),
    "qwen3": (151936, 4096, 22016, 32, 32, 32),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16, 2),
}
# Default values of a language model within another one, where they differ from its type's.
_QWEN2_VL = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568}
_QWEN2_VL |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
_QWEN2_VL |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "bos_token_id": 151643}
_QWEN2_VL |= {"eos_token_id": 151645}
_QWEN3_VL = {"rope_theta": 5e5, "max_position_embeddings": 128000}
_DEFAULTS: dict[str, Settings] = {
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": {
        **_QWEN3_VL,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "voxtral": {
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
        "max_position_embeddings": 131072,
    },
}
# Settings that a file may have for the entire model and not again for its language model.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", *QUANTISATION)
_TIED = "tie_word_embeddings"
_HEAD = "lm_head."
# The prefixes of a language model's tensors, and their prefixes in a separate language model.
_PREFIXES = {
    "language_model.model.blocks.": "model.layers.",  # as `transformers` writes Kimi-K2.5
    "language_model.model.": "model.",
    "language_model.lm_head.": _HEAD,
    "language_model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    _HEAD: _HEAD,
}


def text_settings(settings: Settings) -> Settings:
    """Returns the settings of the language model; for other models, the settings unchanged."""
    wrapper = settings.get("model_type")
    if not isinstance(wrapper, str) or wrapper not in WRAPPERS:
        return settings
    text = settings.get("text_config")
    if not isinstance(text, dict):  # the first files have both kinds of settings side by side
        text = {name: x for name, x in settings.items() if not name.endswith("_config")}
        text["model_type"] = WRAPPERS[wrapper]
    kind = text.get("model_type") or WRAPPERS[wrapper]
    kind = _SAME.get(kind, kind)
    sizes = dict(zip(_SIZE_NAMES, _SIZES.get(kind, ()), strict=False))
    # What is more specific counts: the file's settings of the language model above all.
    text = sizes | _DEFAULTS.get(wrapper, {}) | present(settings, _SHARED) | text
    if settings.get(_TIED) is not None:
        text[_TIED] = settings[_TIED]
    return text | {"model_type": kind, "architectures": None}


def text_part(source: Source, where: object) -> Source:
    """Returns the language model of a file, with a warning about omitted tensors; other models are
    returned unchanged."""
    settings = text_settings(source.settings)
    if settings is source.settings:
        return source
    names = _names(source.stored)
    left_out = Counter()
    for name in source.stored.keys() - names.keys():
        left_out[name.removeprefix("model.").split(".")[0]] += 1  # a module, as `vision_tower`
    if left_out:
        parts = " and ".join(f"{count} of {name}" for name, count in sorted(left_out.items()))
        warn(
            f"{where} contains a {source.settings['model_type']}, of which only the language model "
            f"is loaded, for texts alone. Left out: {left_out.total()} tensors, {parts}."
        )
    stored = {new: source.stored[name] for name, new in names.items()}
    # Without the setting, the file shows it: a tied head has no tensor of its own.
    if _TIED not in settings:
        settings[_TIED] = not any(name.startswith(_HEAD) for name in stored)
    return dataclasses.replace(source, settings=settings, stored=stored)


def _names(stored: Mapping[str, Stored]) -> dict[str, str]:
    """Maps the names of the language model's tensors to the names in a separate language model."""
    # A file of the language model alone already has its names.
    own = tuple(_PREFIXES.keys() - {_HEAD})
    if not any(name.startswith(own) for name in stored):
        return {name: name for name in stored if name.startswith(("model.", _HEAD))}
    renamed = {}
    for name in stored:
        for prefix, new in _PREFIXES.items():
            if name.startswith(prefix):
                renamed[name] = new + name.removeprefix(prefix)
                break  # the longest prefixes come first
    return renamed
