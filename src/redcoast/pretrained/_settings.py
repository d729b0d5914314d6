"""Strict reading of `config.json` files."""

import math
from collections.abc import Mapping
from typing import Any

from ._neutral import is_neutral, is_off

REQUIRED: Any = object()

# Settings that do not change the results, in addition to those that `_neutral.py` describes: names,
# defaults for text generation, and choices between equivalent implementations.
_HARMLESS = frozenset(
    """
    architectures model_type transformers_version _name_or_path name_or_path auto_map dtype
    torch_dtype tokenizer_class task_specific_params finetuning_task prefix id2label label2id
    num_labels problem_type initializer_range initializer_factor init_std use_cache
    gradient_checkpointing pretraining_tp chunk_size_feed_forward return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores torchscript
    use_bfloat16 tf_legacy_loss attn_implementation _attn_implementation
    _attn_implementation_autoset transformers.js_config is_llama_config cache_implementation
    sep_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    remove_invalid_values exponential_decay_length_penalty
    """.split()  # noqa: SIM905
)
# Features of any architecture that no model here implements, with the values that disable them.
_OFF: dict[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "is_encoder_decoder": (False,),
}


# Two names of one activation function.
_SAME = {"swish": "silu"}


def read_settings(
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    only: Mapping[str, tuple[Any, ...]] | None = None,
    ignored: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Reads the values of a `config.json`, and rejects unknown settings that might change results.

    Settings that are disabled, or do not concern the model's arithmetic, are ignored
    (`_neutral.py`).

    **Arguments:**

    - `settings`: the parsed file.
    - `defaults`: the settings that the family reads, with their default values, or `REQUIRED`.
    - `only`: settings of which only some values are implemented, with those values.
    - `ignored`: settings of this family that do not change the results.

    **Returns:**

    A value for each key of `defaults`.

    **Raises:**

    `ValueError` that names every setting that is missing, unknown or not implemented.
    """
    only = {**_OFF, **(only or {})}
    settings = {name: _SAME.get(x, x) if isinstance(x, str) else x for name, x in settings.items()}
    known = {*defaults, *only, *ignored, *_HARMLESS}
    problems = [
        f"`{name}` is {settings[name]!r}, but only {' or '.join(map(repr, values))} is implemented"
        for name, values in only.items()
        if name in settings and settings[name] not in values and not is_off(settings[name], values)
    ]
    problems += [
        f"`{name}`, which is {value!r}, is unknown and might change the results (remove it from "
        "the file if it does not)"
        for name, value in settings.items()
        if name not in known and not is_neutral(name, value)
    ]
    problems += [
        f"`{name}` is {settings[name]}, and must be a finite number"
        for name in defaults
        if isinstance(settings.get(name), float) and not math.isfinite(settings[name])
    ]
    problems += [
        f"`{name}` is missing"
        for name, value in defaults.items()
        if value is REQUIRED and name not in settings
    ]
    if problems:
        raise ValueError(
            f"The settings of this {settings.get('model_type', 'model')} are not supported: "
            f"{'; '.join(problems)}."
        )
    return {name: _value(settings, name, value) for name, value in defaults.items()}


def _value(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of a setting. Null is false, or a dropout rate of 0."""
    value = settings.get(name, default)
    if value is None and isinstance(default, bool):
        return False
    no_dropout = value is None and isinstance(default, float) and "drop" in name
    return 0.0 if no_dropout else value


def rename(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Renames settings for which a family has two names: `names` maps the alternative name to the
    one that is read."""
    for other, name in names.items():
        if {other, name} <= settings.keys() and settings[other] != settings[name]:
            raise ValueError(
                f"`{other}` and `{name}` are two names of one setting, but they are "
                f"{settings[other]!r} and {settings[name]!r}."
            )
    return {names.get(name, name): value for name, value in settings.items()}


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the token ids of a setting that may have none, one or several."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"A setting of token ids is {value!r}. It must be an integer or a list of integers."
        )
    return tuple(ids)


def published_ids(
    *, eos: tuple[int, ...], bos: int | None = None, pad: int | None = None
) -> dict[str, Any]:
    """Returns the settings of a `config.json` for token ids."""
    ends = eos[0] if len(eos) == 1 else list(eos) or None
    return {"eos_token_id": ends, "bos_token_id": bos, "pad_token_id": pad}


def defaults_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default values of the settings in a table of fields, or `REQUIRED`.

    Such a table has, for each field of a configuration, the name of its setting; or this name and
    the default value of the setting.
    """
    return dict((x, REQUIRED) if isinstance(x, str) else x for x in fields.values())


def names_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of the settings in a table of fields."""
    return {field: x if isinstance(x, str) else x[0] for field, x in fields.items()}


def read_fields(c: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration in a table of fields, and `eos`."""
    found = {field: c[name] for field, name in names_of(fields).items()}
    return found | ({"eos": token_ids(c["eos_token_id"])} if "eos_token_id" in c else {})


def write_fields(config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `read_fields`: the settings of a `config.json`."""
    settings = {name: getattr(config, field) for field, name in names_of(fields).items()}
    if not hasattr(config, "eos"):
        return settings
    return settings | published_ids(eos=config.eos, bos=config.bos, pad=config.pad)
