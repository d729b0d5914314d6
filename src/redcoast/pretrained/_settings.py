"""Strict reading of `config.json` files."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..core._read_json import JSONObject
from ..models._base_config import TextConfig
from ._neutral import is_neutral, is_off

# A parsed `config.json`, or a part of it.
Settings = JSONObject
# The values of fields of a configuration, by name.
Fields = dict[str, Any]
# For each field of a configuration, the name of its setting; or this name and the default value of
# the setting, which otherwise must be in a file.
FieldNames = Mapping[str, str | tuple[str, object]]
# Settings of which only some values are implemented, with those values.
Implemented = Mapping[str, tuple[object, ...]]
REQUIRED = object()
NOTHING: Mapping[str, Any] = MappingProxyType({})

# Settings that do not change the results, in addition to those that `_neutral.py` describes: names,
# defaults for text generation, and choices between equivalent implementations.
_HARMLESS = frozenset(
    """
    architectures model_type auto_map prefix id2label label2id num_labels pretraining_tp
    chunk_size_feed_forward transformers.js_config is_llama_config do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
    """.split()  # noqa: SIM905
)
# Features of any architecture that no model here implements, with the values that disable them.
_OFF: Implemented = {
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "is_encoder_decoder": (False,),
}


# Two names of one activation function.
_SAME = {"swish": "silu"}


def read_settings(
    settings: Settings,
    fields: FieldNames,
    defaults: Mapping[str, object] = NOTHING,
    *,
    only: Implemented = NOTHING,
    ignored: str = "",
    renamed: Mapping[str, str] = NOTHING,
) -> tuple[Settings, Fields]:
    """Reads the values of a `config.json`, and rejects unknown settings that might change results.

    Settings that are disabled, or do not concern the model's arithmetic, are ignored
    (`_neutral.py`).

    - `settings`: the parsed file.
    - `fields`: the fields of the configuration that are settings of the file.
    - `defaults`: further settings that the family reads, and default values that differ from those
        of `fields`; `REQUIRED` for those that must be in a file.
    - `only`: settings of which only some values are implemented, with those values.
    - `ignored`: the names of settings of this family that do not change the results.
    - `renamed`: maps other names of settings to the names that are read.

    Returns the values of the settings, by their names in the file; and the values of `fields`, and
    `eos`. Raises `ValueError` that names every setting that is missing, unknown or not implemented.
    """
    # A family's own values replace the general ones, as `is_encoder_decoder` of BART.
    only = {**_OFF, **only}
    defaults = dict(map(_with_default, fields.values())) | dict(defaults)
    values = {}
    for name, value in rename(settings, renamed).items():
        values[name] = value
        if isinstance(value, str):
            values[name] = _SAME.get(value, value)
    problems = []
    for name, implemented in only.items():
        value = values.get(name)
        if name in values and value not in implemented and not is_off(value, implemented):
            listed = " or ".join(map(repr, implemented))
            problems.append(f"`{name}` is {value!r}, but only {listed} is implemented")
    known = {*defaults, *only, *ignored.split(), *_HARMLESS}
    for name, value in values.items():
        if name not in known and not is_neutral(name, value):
            problems.append(
                f"`{name}`, which is {value!r}, is unknown and might change the results (remove it "
                "from the file if it does not)"
            )
    for name in defaults:
        value = values.get(name)
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"`{name}` is {value}, and must be a finite number")
    for name, default in defaults.items():
        if default is REQUIRED and name not in values:
            problems.append(f"`{name}` is missing")
    if problems:
        raise ValueError(
            f"The settings of this {settings.get('model_type', 'model')} are not supported: "
            f"{'; '.join(problems)}."
        )
    c = {name: _value(values, name, default) for name, default in defaults.items()}
    return c, read_fields(c, fields)


def _value(settings: Settings, name: str, default: object) -> Any:
    """Returns the value of a setting. Null is false, or a dropout rate of 0."""
    value = settings.get(name, default)
    if value is None and isinstance(default, bool):
        return False
    if value is None and isinstance(default, float) and "drop" in name:
        return 0.0
    return value


def rename(settings: Settings, names: Mapping[str, str]) -> Settings:
    """Renames settings for which a family has two names: `names` maps the alternative name to the
    one that is read."""
    for other, name in names.items():
        if {other, name} <= settings.keys() and settings[other] != settings[name]:
            raise ValueError(
                f"`{other}` and `{name}` are two names of one setting, but they are "
                f"{settings[other]!r} and {settings[name]!r}."
            )
    return {names.get(name, name): value for name, value in settings.items()}


def present(settings: Settings, names: Iterable[str]) -> Settings:
    """The settings of these names that are there and not null."""
    values: Settings = {}
    for name in names:
        if settings.get(name) is not None:
            values[name] = settings[name]
    return values


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns the token ids of a setting that may have none, one or several."""
    if value is None:
        return ()
    ids = value
    if not isinstance(ids, list):
        ids = [ids]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"A setting of token ids is {value!r}. It must be an integer or a list of integers."
        )
    return tuple(ids)


def published_ids(*, eos: tuple[int, ...], bos: int | None, pad: int | None) -> Settings:
    """Returns the settings of a `config.json` for token ids."""
    ends = list(eos) or None
    if len(eos) == 1:
        ends = eos[0]
    return {"eos_token_id": ends, "bos_token_id": bos, "pad_token_id": pad}


def _with_default(setting: str | tuple[str, object]) -> tuple[str, object]:
    if isinstance(setting, str):
        return setting, REQUIRED
    return setting


def names_of(fields: FieldNames) -> dict[str, str]:
    names = {}
    for field, setting in fields.items():
        names[field], _ = _with_default(setting)
    return names


def read_fields(c: Settings, fields: FieldNames) -> Fields:
    """Returns the values of fields, and `eos`."""
    values: Fields = {field: c[name] for field, name in names_of(fields).items()}
    if "eos_token_id" in c:
        # Files have one number, a list, or null; configurations have a tuple.
        values["eos"] = token_ids(c["eos_token_id"])
    return values


def write_fields(config: object, fields: FieldNames) -> Settings:
    """The inverse of `read_fields`: the settings of a `config.json`."""
    settings: Settings = {name: getattr(config, field) for field, name in names_of(fields).items()}
    if isinstance(config, TextConfig):
        settings |= published_ids(eos=config.eos, bos=config.bos, pad=config.pad)
    return settings
