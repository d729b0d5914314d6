"""Why a type of published models cannot be loaded."""

import difflib
from collections.abc import Iterable
from typing import Any

from ..core._errors import short_repr

# The nearest supported type of well-known types, and what they have beyond it.
_NEAREST: dict[str, tuple[str, str]] = {
    "albert": ("bert", "weights that all layers share and a narrow embedding"),
    "apertus": ("llama", "an activation with learned numbers (xIELU), without a gate"),
    "arcee": ("llama", "a squared ReLU without a gate"),
    "aria_text": ("mixtral", "shared experts"),
    "bamba": ("mamba2", "layers of attention between those of states"),
    "beit": ("vit", "relative biases of positions and a scale of each layer"),
    "blenderbot": ("bart", "normalisation before each sublayer"),
    "bloom": ("gpt2", "biases of positions (ALiBi) and normalised embeddings"),
    "chatglm": ("llama", "rotation of a part of each head, and fused projections"),
    "codegen": ("gptj", "fused projections of queries, keys and values"),
    "cohere": ("llama", "attention and feed-forward in parallel, and scaled logits"),
    "cohere2": ("llama", "attention and feed-forward in parallel, and scaled logits"),
    "dbrx": ("mixtral", "fused projections, and clipped queries, keys and values"),
    "deberta": ("bert", "attention with separate contents and positions"),
    "deberta-v2": ("bert", "attention with separate contents and positions"),
    "deepseek_v2": ("deepseek_v3", "routing by the softmax of the scores"),
    "deepseek_v32": ("deepseek_v3", "attention to tokens that an indexer chooses"),
    "deit": ("vit", "a token for distillation"),
    "dinov3_convnext": ("dinov3_vit", "convolutions in place of attention"),
    "electra": ("bert", "an embedding narrower than the layers"),
    "ernie4_5": ("llama", "rotation of neighbouring pairs of features"),
    "ernie4_5_moe": ("mixtral", "shared experts, and rotation of neighbouring pairs of features"),
    "exaone4": ("llama", "normalisation after each sublayer, and layers without rotation"),
    "falcon": ("gptj", "fused projections with few keys and values, or biases of positions"),
    "falcon_h1": ("mamba2", "attention beside the states of each layer"),
    "falcon_mamba": ("mamba2", "states with a decay of each feature (Mamba-1)"),
    "gemma3n": ("gemma3_text", "encoders of images and sounds, and embeddings for each layer"),
    "gemma3n_text": ("gemma3_text", "embeddings for each layer and alternating updates"),
    "gemma4": ("gemma3_text", "encoders of images and sounds, and embeddings for each layer"),
    "glm": ("llama", "rotation of a part of each head, and fused projections"),
    "glm4": ("llama", "rotation of a part of each head, and normalisation after sublayers"),
    "glm4_moe": ("qwen3_moe", "shared experts, rotation of a part of each head, and its routing"),
    "gpt_bigcode": ("gpt2", "one head of keys and values for all queries"),
    "gpt_neo": ("gpt2", "attention within a window in every other layer, without a scale"),
    "granitemoe": ("mixtral", "multipliers of embeddings, residuals, attention and logits"),
    "hunyuan_v1_dense": ("qwen3", "normalisation of queries and keys after their rotation"),
    "idefics3": ("llama", "the encoder of images before the language model"),
    "internvl": ("qwen2", "the encoder of images before the language model"),
    "led": ("bart", "attention within a window, and global tokens"),
    "lfm2": ("llama", "short convolutions in place of attention in most layers"),
    "llama4": ("mixtral", "the encoder of images, a shared expert, and layers without rotation"),
    "llama4_text": ("mixtral", "a shared expert, and layers without rotation"),
    "longt5": ("t5", "local attention, and global attention of blocks"),
    "m2m_100": ("bart", "sinusoidal positions and normalisation before each sublayer"),
    "mamba": ("mamba2", "states with a decay of each feature (Mamba-1)"),
    "marian": ("bart", "sinusoidal positions"),
    "mbart": ("bart", "normalisation before each sublayer and after the last"),
    "minimax": ("mixtral", "linear attention in most layers"),
    "minimax_m2": ("mixtral", "normalisation of all queries and keys, and routing by sigmoids"),
    "mllama": ("llama", "cross-attention to images"),
    "mpnet": ("bert", "relative biases of positions"),
    "mpt": ("gpt2", "biases of positions (ALiBi), without biases of projections"),
    "nemotron": ("llama", "LayerNorm with biases, and a squared ReLU without a gate"),
    "nemotron_h": ("mamba2", "layers of attention and of feed-forward between those of states"),
    "olmo": ("llama", "LayerNorm without weights, and clipped projections"),
    "olmoe": ("mixtral", "normalisation of all queries and keys"),
    "paligemma": ("gemma", "the encoder of images before the language model"),
    "pegasus": ("bart", "sinusoidal positions and normalisation before each sublayer"),
    "phi": ("gptj", "biases of attention, and rotation of halves of a head"),
    "phi4_multimodal": ("phi3", "encoders of images and sounds, and their adapters"),
    "phimoe": ("mixtral", "its routing, and LayerNorm with biases"),
    "qwen2_moe": ("mixtral", "a shared expert beside the routed ones"),
    "qwen3_5": ("qwen3", "linear attention in most layers, and the encoder of images"),
    "qwen3_next": ("qwen3_moe", "linear attention in most layers, and a shared expert"),
    "qwen3_vl_moe": ("qwen3_moe", "the encoder of images before the language model"),
    "siglip2": ("siglip", "images of any shape, with a mask of their patches"),
    "siglip_vision_model": ("siglip", "its encoder of texts, which this type lacks"),
    "stablelm": ("llama", "rotation of a part of each head, and LayerNorm with biases"),
    "starcoder2": ("llama", "a feed-forward without a gate, and LayerNorm with biases"),
    "swin": ("vit", "attention within windows that are shifted and merged"),
    "umt5": ("t5", "biases of positions in each layer"),
}
# Recurrences that no family has, or that alternate with attention.
_OTHER = ("jamba", "recurrent_gemma", "rwkv", "zamba2")


def refuse_type(kind: Any, supported: Iterable[str], where: Any) -> ValueError:
    """The error for a type of model that no family supports."""
    names = sorted(supported)
    reason = ""
    text = kind if isinstance(kind, str) else ""
    if text in _NEAREST:
        near, missing = _NEAREST[text]
        reason = f" The nearest supported type is {near}; what is missing: {missing}."
    elif text in _OTHER:
        reason = " It has recurrences that no supported type has."
    elif close := difflib.get_close_matches(text, names, n=1):
        reason = f" The supported type with the most similar name is {close[0]}."
    return ValueError(
        f"{where} holds a model of type {short_repr(kind)}, which is not supported.{reason} "
        f"Supported types: {', '.join(names)}."
    )
