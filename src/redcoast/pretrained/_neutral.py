"""Settings of published files that do not change results, for any model.

A setting that no family reads is ignored if its value disables it, if it is a factor of 1, or if
its name shows that it does not concern the model's arithmetic: lengths that are not enforced,
tokens, losses, initialisation, the file's origin, tools, hardware. All others are rejected by name,
because they might change results.
"""

import re

# Settings that are enabled in the models that have them, so that a value of false changes results.
_ON = frozenset(
    """
    do_layer_norm_before elementwise_affine is_causal layer_norm_elementwise_affine norm_topk_prob
    pre_norm relative_attention rotary scale_attn_weights scale_embedding use_gated_mlp use_rope
    use_rotary_embedding
    """.split()  # noqa: SIM905
)
_FACTOR = re.compile(r"(^|_)(multipliers?|scale|scaling|scalar|factor|pct)(_|$)")
# Parts of names: whole words between underscores, or several words.
_OTHER_MATTERS = (
    # Lengths that are not enforced.
    "(max|min|model|context|train|training|image|prompt)_(seq|sequence|context|model)?_?len(gth)?",
    "model_max_length|max_(target|source|new|model)_(length|len|tokens|positions)",
    "(seq|sequence|context)_(len|length)|seqlen|max_seqlen|max_seq_len|n_ctx|n_positions",
    # Tokens and the tokenizer.
    "tokens?$|token_ids?$|(bos|eos|pad|unk|sep|cls|mask)_(id|index|idx)$",
    "tokenizer|padding_side|vocab_file|chat_template|special_tokens_map",
    # Training: losses, dropout, initialisation, optimisation.
    "loss|loss_coef|aux_loss_alpha|label_smoothing|dropout|dropout_prob|droprate|pdrop",
    "init|initializer|initialization|std$|layerdrop|neftune|noise|warmup|learning_rate|lr|seed",
    "optimizer|lora_dropout|train|training|trainer|epochs?|batch_size|dataset|datasets",
    "gradient_checkpointing|gradient_accumulation|reentrant|freeze|frozen",
    # Programs, hardware, precision of the file.
    "flash|flash2|sdpa|xformers|triton|liger|deepspeed|megatron|onnx|torchscript|compile|compiled",
    "(attn|attention)_(implementation|impl|backend)|fused|kernels|backend|backends|device|devices",
    "(tp|pp|ep|dp|cp)_size|(tensor|pipeline|expert|data|context)_(model_)?parallel_(size|degree)",
    "(tp|pp|ep)_plan|dtype|fp16|bf16|fp32|float16|bfloat16|float32|precision",
    "cache|offload|quantize|low_cpu_mem_usage|xla|tpu|cuda|cpu|gpu",
    # Outputs other than the logits.
    "^(output|return)|output_past|summary|problem_type",
    # Where the file comes from.
    "version|versions|unsloth|mergekit|axolotl|wandb|git|commit|hash|revision|url|path|paths|source",
    "license|author|authors|description|tags|language|languages|library_name|pipeline_tag|name",
    "base_model|created|date|timestamp|task|task_specific|trust_remote_code|custom_code|transformers",
    # Numbers of shards, and of groups that follow from the heads.
    "num_key_value_groups|num_shards|shards",
)
_OTHER = re.compile("|".join(f"(^|_)({part})(_|$)" for part in _OTHER_MATTERS))
# Names that contain such words, but concern the arithmetic.
_ARITHMETIC = re.compile(
    r"register|mask_token_|compress|chunk|window|sparse|rope|rotary|experts?(_|$)|layers?(_|$)"
)


def is_neutral(name: str, value: object) -> bool:
    """Whether a setting that is not read cannot change a result."""
    if name.startswith("_"):  # a program's private settings
        return True
    if not isinstance(value, bool) and value == 1 and _FACTOR.search(name):
        return True
    if not value and value is not False:
        return True
    if value is False:
        return name not in _ON
    return bool(_OTHER.search(name)) and not _ARITHMETIC.search(name)


def is_off(value: object, values: tuple[object, ...]) -> bool:
    """Whether a value disables a feature that one of the implemented `values` disables too."""
    return not value and any(not other for other in values)
