"""Reads LLaMA models in GGUF files, where settings and tensors have different names."""

from pathlib import Path
from typing import Any

import numpy as np

from .._lazy_tensor import Source
from .._settings import Settings
from .._tensors import Tensor
from ..hf._tables import EMBED, INTO_HEADS, OUT_OF_HEADS, TURNED, VECTOR
from ._file import GGUF, read_gguf

# The names of metadata behind `llama.`, and the settings of a `config.json` that they are.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_ROPE = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_NEEDED = {"none": set(), "linear": {"factor"}}
_NEEDED["yarn"] = {"factor", "original_max_position_embeddings"}
# The factors that frequencies of rotary embeddings are divided by.
_FACTORS = "rope_freqs.weight"
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def open_gguf(path: Path) -> Source:
    """Opens the model of a file.

    Raises `ValueError` if its architecture is not LLaMA, or if it has settings that are not
    implemented.
    """
    file = read_gguf(path)
    if (kind := file.metadata.get("general.architecture")) != "llama":
        raise ValueError(
            f"{path} has the architecture {kind!r}, but for GGUF files only 'llama' is "
            "implemented. Load the model from a directory in Hugging Face's layout."
        )
    settings = _settings(path, file)
    block = "blk.{layer}."
    # Features that are rotated together are adjacent in GGUF files, and half a head apart in the
    # model.
    pairs = "(heads half 2) width -> width heads (2 half)"
    table = {
        "embed": Tensor("token_embd.weight", EMBED),
        "layers/attention_norm": Tensor(block + "attn_norm.weight", VECTOR),
        "layers/wq": Tensor(block + "attn_q.weight", pairs),
        "layers/wk": Tensor(block + "attn_k.weight", pairs),
        "layers/wv": Tensor(block + "attn_v.weight", INTO_HEADS),
        "layers/wo": Tensor(block + "attn_output.weight", OUT_OF_HEADS),
        "layers/mlp_norm": Tensor(block + "ffn_norm.weight", VECTOR),
        "layers/gate": Tensor(block + "ffn_gate.weight", TURNED),
        "layers/up": Tensor(block + "ffn_up.weight", TURNED),
        "layers/down": Tensor(block + "ffn_down.weight", TURNED),
        "norm": Tensor("output_norm.weight", VECTOR),
    }
    if not settings["tie_word_embeddings"]:
        table["head"] = Tensor("output.weight", TURNED)
    return Source(settings, file.stored, table)


def _settings(path: Path, file: GGUF) -> Settings:
    """Converts the metadata to the settings of a `config.json`."""
    metadata, settings = {}, {}
    for name, value in file.metadata.items():
        kind, _, rest = name.partition(".")
        if kind == "llama":
            metadata[rest] = value
    for old, new in _SETTINGS.items():
        if old in metadata:
            settings[new] = _shortest(metadata[old])
    for old, new in _TOKENS.items():
        if (token := file.metadata.get(f"tokenizer.ggml.{old}_token_id")) is not None:
            settings[new] = token
    heads = metadata.get("attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(
            f"{path} has `llama.attention.head_count` {heads!r}, but only the same number of heads "
            "in all layers, at least 1, is implemented."
        )
    head_dim = metadata.get("attention.key_length") or metadata.get("embedding_length", 0) // heads
    # Of these, only the values that say nothing new are implemented.
    only = {"rope.dimension_count": head_dim, "attention.value_length": head_dim, "expert_count": 0}
    if scaling := _scaling(path, file, metadata, head_dim):
        settings["rope_scaling"] = scaling
    odd = []
    for name, value in metadata.items():
        if isinstance(value, list) or (name not in _SETTINGS and only.get(name) != value):
            odd.append(f"`llama.{name}` is {value!r}")
    if odd:
        raise ValueError(f"{path} has settings that are not implemented: {', '.join(odd)}.")
    # Files may omit it; then the embedding says it. It is (vocab, width).
    settings.setdefault("vocab_size", 0)
    if "vocab_size" not in metadata and (embed := file.stored.get("token_embd.weight")):
        settings["vocab_size"] = embed.shape[0]
    tied = "output.weight" not in file.stored
    return settings | {"model_type": "llama", "tie_word_embeddings": tied}


def _scaling(path: Path, file: GGUF, metadata: Settings, head_dim: int) -> Settings | None:
    """Returns the scaling of rotary embeddings, from the metadata and from the tensor of factors in
    files of Llama 3.1 and later. Removes what it reads from both."""
    kind, rope = metadata.pop("rope.scaling.type", "none"), {}
    for old, new in _ROPE.items():
        if old in metadata:
            rope[new] = _shortest(metadata.pop(old))
    metadata.pop("rope.scaling.finetuned", None)
    linear = metadata.pop("rope.scale_linear", 1.0)  # of older files
    if kind == "none" and linear != 1:
        kind, rope = "linear", {"factor": _shortest(linear)}
    missing = sorted(_NEEDED.get(kind, set()) - rope.keys())
    if kind not in _NEEDED or missing:
        without = ""
        if missing:
            without = f", without {', '.join(missing)}"
        raise ValueError(
            f"{path} has settings that are not implemented: `llama.rope.scaling.type` is {kind!r}"
            f"{without}."
        )
    factors = file.stored.get(_FACTORS)
    if factors is not None and factors.shape == (head_dim // 2,):
        file.stored.pop(_FACTORS)
    else:
        factors = None  # it is listed as unexpected
    if kind != "none" and factors is not None:
        raise ValueError(f"{path} has both `llama.rope.scaling.type` {kind!r} and {_FACTORS}.")
    if factors is not None:
        values = factors.take_whole().astype(np.float64)
        return fit_llama3(path, values, metadata.get("rope.freq_base", 10000.0))
    if kind == "none":
        return None
    return {"rope_type": kind, **rope}


def fit_llama3(path: Path, factors: np.ndarray, base: float) -> Settings | None:
    """Returns the settings of Llama 3's scaling that divides frequencies by these factors.

    High frequencies are kept, and low ones divided by the largest factor. In between, the share
    that is kept is linear in the frequency. `low_freq_factor` may be any number, since only its
    ratios to the others matter; it is 1, as in all published models.
    """
    frequencies = base ** -(np.arange(len(factors)) / len(factors))
    largest = float(np.max(factors, initial=1.0))
    if largest == 1:
        return None
    # 1 / factor = share + (1 - share) / largest, for each frequency.
    share = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = (share > 1e-6) & (share < 1 - 1e-6)
    # share = (turns - 1) / (high - 1), with turns = original * frequency / (2 pi). The line through
    # the points in between thus is -1 / (high - 1) at frequency zero, and its slope gives
    # `original`. One point leaves `high` open, which is 4 in all published models.
    high, slope = 4.0, 0.0
    if between.sum() > 1:
        slope, shift = np.polyfit(frequencies[between], share[between], 1)
        if shift < 0:
            high = round(float(1 - 1 / shift), 3)
    elif between.any():
        slope = ((high - 1) * share[between] + 1)[0] / frequencies[between][0] / (high - 1)
    original = round(float(slope * (high - 1) * 2 * np.pi))
    scaling = {"rope_type": "llama3", "factor": round(largest, 4), "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    turns = original * frequencies / (2 * np.pi)
    rounded_share = np.clip((turns - 1) / (high - 1), 0, 1)
    # The rounded numbers must give the file's factors again.
    if not np.allclose(1 / factors, rounded_share + (1 - rounded_share) / largest, rtol=1e-4):
        raise ValueError(
            f"{path} has factors of rotary embeddings ({_FACTORS}) that differ from Llama 3's "
            "scaling, which is not implemented. Load the model from a directory in Hugging Face's "
            "layout."
        )
    return scaling


def _shortest(value: Any) -> Any:
    # Values are stored in float32, in which 1e-5 is 9.999999747378752e-06.
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return value
