"""Explains which part of an architecture is not implemented, for types that cannot be loaded."""

from collections.abc import Iterable
from typing import Any

from ..core._errors import short_repr

# Features that are not implemented, and the types that have them: one feature for each type.
_FEATURES: dict[str, str] = {
    # Layers in place of attention.
    "layers of Gated DeltaNet (linear attention) in this form": """
        lara_mini olmo_hybrid qwen3_next qwen4_exp qwen4_exp_text""",
    "layers of Kimi Delta Attention (linear attention)": "bailing_hybrid kimi_linear",
    "layers of lightning attention (linear attention)": "minimax",
    "layers of Mamba-1 (state spaces with a decay of each feature)": """
        falcon_mamba jamba mamba zamba""",
    "attention layers between or beside Mamba-2 layers": "bamba falcon_h1 nemotron_h zamba2",
    "recurrences (RWKV)": "rwkv",
    "recurrences (RG-LRU)": "recurrent_gemma",
    "recurrences (xLSTM)": "xlstm",
    "short convolutions between or within layers": """
        inkling2_loop_text inkling2_text inkling_text lfm2 lfm2_moe lfm3 zaya""",
    # Attention.
    "attention to tokens that an indexer or a router chooses (sparse attention)": """
        axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4
        minimax_m3_vl_text""",
    "sparse attention in blocks": "big_bird bigbird_pegasus led longt5",
    "attention within hashes, and reversible layers": "reformer",
    "attention of permuted tokens with relative positions": "xlnet",
    "causal attention in the layers of an encoder": "modernbert-decoder",
    "differential attention": "diffllama",
    "attention with masks that are computed from the values": "doge",
    "experts of attention": "jetmoe",
    "gates of the outputs of attention": "afmoe beam dory hrm_text laguna",
    "sinks of attention in layers with experts that are chosen by sigmoids": "flint mimo_v2_flash",
    "sinks of attention, and multipliers of embeddings, residuals, scores and logits": """
        granite_swa granitemoe_swa""",
    "biases of positions (ALiBi)": "bloom mpt",
    "relative biases of positions": "beit cpmant mpnet",
    "attention with separate contents and positions": "deberta deberta-v2",
    "attention within windows that are shifted and merged": "swin",
    "windows of attention in every other layer, without a scale of the scores": "gpt_neo",
    "windows of attention in some layers": "cwm mellum ministral",
    "one head of keys and values for all queries": "falcon gpt_bigcode",
    "norms of queries and keys after their rotation": "hunyuan_v1_dense hunyuan_v1_moe",
    "norms of all queries and keys in layers of experts": "flex_olmo minimax_m2 olmoe",
    "layers without rotation of positions, with norms after each sublayer": "exaone4 exaone_moe",
    "rotation of neighbouring features of queries and keys": "ernie4_5 helium",
    "rotation of a part of each head in this order, and fused projections": "chatglm glm glm4",
    "rotation of a part of each head in layers with biases": "persimmon phi stablelm",
    "rotation of queries and keys in layers of an encoder with norms after them": "roformer",
    "queries, keys and values that are fused in blocks": "codegen",
    "latent attention in layers without experts": "minicpm3 youtu",
    "heads of another size, or keys that are also values, in some layers": """
        gemma4_assistant gemma4_unified gemma4_unified_assistant gemma4_unified_text""",
    # Experts.
    "experts that are shared by all tokens": """
        aria_text deepseek_v2 dots1 ernie4_5_moe hy_v3 kolibri1 llama4 llama4_text
        qwen2_moe sarvam_moe solar_open""",
    "a norm of the outputs of experts": "axk1",
    "experts that compute nothing, and two sublayers of attention in each layer": "longcat_flash",
    "experts that are chosen by sparse mixing": "phimoe",
    "experts with clipped queries, keys and values": "dbrx",
    # Norms, activations and multipliers.
    "attention beside the feed-forward network, with scaled logits": """
        cohere cohere2 cohere2_moe cohere_compass_text""",
    "biases of attention in the last layer only": "gpt_neox_japanese",
    "multipliers of embeddings, residuals, scores and logits": """
        granitemoe granitemoeshared hyperclovax""",
    "LayerNorm without weights": "olmo",
    "a layer without norms after its sublayers": "vaultgemma",
    "norms after each sublayer of a decoder with learned positions": "openai-gpt",
    "norms within sublayers, and ternary weights": "bitnet",
    "norms before each sublayer": """
        blenderbot m2m_100 mbart megatron-bert roberta-prelayernorm xlm-roberta-xl""",
    "squared ReLU without a gate": "arcee jais2 nanochat nemotron",
    "a feed-forward network without a gate": "starcoder2",
    "an activation with learned numbers (xIELU)": "apertus apertus1p5_text",
    # Embeddings.
    "embeddings for each layer beside several residual streams": "gemma3n gemma3n_text",
    "embeddings that are narrower than the layers": "albert electra rembert",
    "embeddings of tasks, languages, shapes or sounds": "ernie roc_bert xlm xmod",
    "embeddings of patches of bytes": "blt",
    "sinusoidal positions": "ctrl marian pegasus trocr xglm",
    "biases of positions in each layer": "umt5",
    "embeddings that are scaled": "biogpt plbart",
    "embeddings without types of tokens": "bert-generation",
    "prompts in each layer": "mvp",
    "streams that predict several tokens": "prophetnet",
    "a token for distillation": "deit",
    "convolutions in place of attention": "dinov3_convnext",
    "images of any shape, with a mask of their patches": "siglip2",
    "encoder of images without one of texts": "siglip_vision_model",
    # Other inputs.
    "parts for images": """
        emu3 fuyu git got_ocr2 mllama paligemma phi4_multimodal""",
    "parts for sounds": "moshi moss_transcribe_diarize musicgen musicgen_melody",
}
# Types with the same arithmetic as another type.
OTHER_NAMES = frozenset(
    """
    blenderbot-small data2vec-text exaone glm4_moe_lite gpt-sw3 internlm3 iquestcoder sarvam_mla
    seed_oss
    """.split()  # noqa: SIM905
)
FEATURE_OF = {kind: feature for feature, kinds in _FEATURES.items() for kind in kinds.split()}


def refuse_type(kind: Any, supported: Iterable[str], where: Any) -> ValueError:
    """The error for a type of model that no family supports."""
    reason = ""
    if isinstance(kind, str) and kind in FEATURE_OF:
        reason = f" redcoast has no implementation of its {FEATURE_OF[kind]}."
    elif isinstance(kind, str) and kind in OTHER_NAMES:
        reason = " Its settings and tensors have names that redcoast does not read."
    return ValueError(
        f"{where} holds a model of type {short_repr(kind)}, which is not supported.{reason} "
        f"Supported types: {', '.join(sorted(supported))}."
    )
