"""LLaMA models in GGUF files, whose settings and tensors have different names."""

from pathlib import Path
from typing import Any

import numpy as np

from .._lazy_tensor import Source
from .._tensors import Tensor
from ..hf._tables import EMBED, INTO_HEADS, OUT_OF_HEADS, TURNED, VECTOR
from ._file import GGUF, read_gguf

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
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def open_gguf(path: Path) -> Source:
    """Opens the model of a file.

    **Raises:**

    `ValueError` if its architecture is not LLaMA, or if it has settings that are not implemented.
    """
    file = read_gguf(path)
    if (kind := file.metadata.get("general.architecture")) != "llama":
        raise ValueError(
            f"{path} has the architecture {kind!r}, but for GGUF files only 'llama' is "
            "implemented. Load the model from a directory in Hugging Face's layout."
        )
    settings = _settings(path, file)
    return Source(settings, file.stored, _table(settings))


def _settings(path: Path, file: GGUF) -> dict[str, Any]:
    """Converts the metadata to the settings of a `config.json`."""
    given = {
        name.removeprefix("llama."): value
        for name, value in file.metadata.items()
        if name.startswith("llama.")
    }
    settings = {new: _shortest(given[old]) for old, new in _SETTINGS.items() if old in given}
    settings |= {
        new: file.metadata[f"tokenizer.ggml.{old}_token_id"]
        for old, new in _TOKENS.items()
        if f"tokenizer.ggml.{old}_token_id" in file.metadata
    }
    heads = given.get("attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(
            f"{path} has `llama.attention.head_count` {heads!r}, but only the same number of heads "
            "in all layers, at least 1, is implemented."
        )
    head_dim = given.get("attention.key_length") or given.get("embedding_length", 0) // heads
    only = {
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "rope.scaling.type": "none",
        "expert_count": 0,
    }
    odd = [
        f"`llama.{name}` is {value!r}"
        for name, value in given.items()
        if (name not in _SETTINGS and only.get(name) != value) or isinstance(value, list)
    ]
    if (parts := file.metadata.get("split.count", 1)) > 1:
        odd.append(f"`split.count` is {parts}")
    if odd:
        raise ValueError(f"{path} has settings that are not implemented: {', '.join(odd)}.")
    vocab = file.stored.get("token_embd.weight")
    settings.setdefault("vocab_size", vocab.shape[0] if vocab else 0)
    tied = "output.weight" not in file.stored
    return settings | {"model_type": "llama", "tie_word_embeddings": tied}


def _shortest(value: Any) -> Any:
    # Values were stored in float32: 1e-5 would be read as 9.999999747378752e-06.
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _table(settings: dict[str, Any]) -> dict[str, Tensor]:
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
    return table
