"""The defaults of decoding in `generation_config.json`, or in older `config.json` files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core._decoding import GREEDY, Decoding, as_tuple
from ..core._errors import check_integer, several, short_repr
from ..core._frames import warn
from ._neutral import is_neutral
from ._settings import Implemented, Settings, present, published_ids
from ._source import GENERATION, SETTINGS
from ._whisper_prompt import read_whisper_prompt, speech_settings_of, write_whisper_prompt

# The name of an option in a file, and its value.
NamedOption = tuple[str, Any]
# Options with the same meaning, and their names in the file.
_NAMES = {
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "beams": "num_beams",
    "num_return_sequences": "num_return_sequences",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "min_length": "min_length",
    "min_new_tokens": "min_new_tokens",
    "forced_bos": "forced_bos_token_id",
    "suppress": "suppress_tokens",
    "begin_suppress": "begin_suppress_tokens",
    "forced_eos": "forced_eos_token_id",
    "bad_words": "bad_words_ids",
}
_FORCED = "forced_decoder_ids"
_FILTERS = ("top_k", "top_p", "min_p")
_OF_SAMPLING = ("temperature", *_FILTERS)
_SAMPLING = dict(zip(_OF_SAMPLING, _OF_SAMPLING, strict=True))
_READ = frozenset((*_NAMES.values(), *_OF_SAMPLING))
# The options of sampling, and their defaults in `transformers`.
_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": None, "min_p": None}
# The errors that options of an unexpected type raise.
_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
# Options that are not implemented, with the values that disable them.
_OFF: Implemented = {
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "num_beam_groups": (1,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "dola_layers": (),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({},),
    "renormalize_logits": (False,),
    "return_timestamps": (False,),
    "force_words_ids": ([],),
    "constraints": ([],),
    "stop_strings": ([], ""),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
}
# Other settings in files, in addition to those that `_neutral.py` describes, such as lengths, since
# `generate` has the argument `max_new_tokens`. Faster methods do not change the tokens.
_OTHERS = frozenset(
    """
    do_sample num_beams remove_invalid_values low_memory prefill_chunk_size max_matching_ngram_size
    assistant_lookbehind target_lookbehind num_assistant_tokens_schedule is_assistant use_mtp
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight speculation_type
    continuous_batching_config forced_decoder_ids lang_to_id is_multilingual alignment_heads
    median_filter_width
    """.split()  # noqa: SIM905
)


def read_decoding(settings: Settings, where: object, *, alone: bool = True) -> Decoding:
    """Returns the options that a parsed file sets.

    Warns of options that are not implemented or invalid; the others are used. With `alone`, the
    file only has settings of decoding, and unknown settings cause a warning too.
    """
    settings = present(settings, settings)
    ignored = []
    for name, off in _OFF.items():
        if name in settings and settings[name] not in off:
            ignored.append(f"`{name}`, which is {short_repr(settings[name])}")
    known = {*_OFF, *_READ, *_OTHERS}
    for name, value in settings.items():
        if alone and name not in known and not is_neutral(name, value):
            ignored.append(f"`{short_repr(name)[1:-1]}`, which is {short_repr(value)}")
    options: dict[str, NamedOption] = {}
    for field, name in _NAMES.items():
        if name in settings:
            options[field] = name, settings[name]
    prefix, problems = read_whisper_prompt(settings)
    options["prefix"] = ("forced_decoder_ids", prefix)
    ignored += problems
    # As in `transformers`, options of beam search are ignored without beams, and those of sampling
    # without `do_sample`.
    if settings.get("num_beams", 1) == 1:
        for name in ("length_penalty", "early_stopping"):
            options.pop(name, None)  # has no effect
        if settings.get("do_sample"):
            for name, default in _DEFAULTS.items():
                value = settings.get(name, default)
                if name in ("top_k", "min_p") and value == 0:  # excludes nothing
                    value = None
                options[name] = name, value
    elif settings.get("do_sample"):
        ignored.append("beam search that samples (`do_sample`)")
    decoding, invalid = _valid(options)
    if ignored:
        warn(
            f"{where} sets options of decoding that `redcoast.generate` does not implement, and "
            f"that are ignored: {several(ignored, separator='; ')}."
        )
    if invalid:
        warn(
            f"{where} sets invalid options of decoding, which are ignored: "
            f"{'; '.join(invalid)}. Pass `decoding` to `load_pretrained`, or options to `generate`."
        )
    return decoding


def _valid(options: Mapping[str, NamedOption]) -> tuple[Decoding, list[str]]:
    """Adds options one by one, each with its name in the file and its value. Returns the decoding
    with the valid options, and what is wrong with the others."""
    decoding, invalid = GREEDY, []
    # `Decoding` rejects options of sampling while the temperature is 0, and those of beam search
    # while there is one beam, so these two come first.
    first = sorted(options, key=lambda field: field not in ("temperature", "beams"))
    for field in first:
        name, value = options[field]
        if field in _FILTERS and decoding.temperature == 0:
            if value != _DEFAULTS.get(name):
                invalid.append(f"`{name}`, which is {short_repr(value)} (decoding is greedy)")
            continue
        try:
            decoding = dataclasses.replace(decoding, **{field: _number(value)})
        except _ERRORS as error:
            invalid.append(f"`{name}`, which is {short_repr(value)} ({error})")
        else:
            if field == "temperature" and value == 0:
                invalid.append(f"`{name}`, which is {short_repr(value)} (decoding is greedy)")
    return decoding, invalid


def _number(value: Any) -> Any:
    """Converts numbers such as 20.0, as some JSON writers store integers, to integers, also in
    lists."""
    if isinstance(value, list):
        return list(map(_number, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def with_generation(
    config: Any,
    settings: Settings,
    generation: Settings | None,
    path: Path,
    *,
    decoding: Decoding | None,
) -> Any:
    """Returns a configuration with the decoding and the token ids of a model's files.

    `generation` is the parsed `generation_config.json`. If it is missing, the options are read from
    `config.json`, as in older files. `decoding` replaces the options of the files.
    """
    if not hasattr(config, "decoding"):
        return config
    if generation is None:
        older = dict(settings)
        if isinstance(settings.get("decoder"), dict):
            # An encoder-decoder of two families has the options of its decoder there.
            older = settings["decoder"] | older
        if older.get("force_bos_token_to_be_generated"):
            # The name of this option in the first files of BART.
            older["forced_bos_token_id"] = older.get("bos_token_id")
        decoding = decoding or read_decoding(older, path / SETTINGS, alone=False)
        return dataclasses.replace(config, decoding=decoding)
    if settings.get("model_type") == "whisper" and generation.get(_FORCED) is None:
        # Whisper's first files have the tokens of the language and the task in `config.json` only.
        generation = {**generation, _FORCED: settings.get(_FORCED)}
    decoding = decoding or read_decoding(generation, path / GENERATION)
    config, invalid = dataclasses.replace(config, decoding=decoding), []
    if hasattr(config, "speech_settings"):
        config = dataclasses.replace(config, speech_settings=speech_settings_of(generation))
    ids = {"pad": "pad_token_id", "decoder_start": "decoder_start_token_id", "eos": "eos_token_id"}
    for field, name in ids.items():
        value = _number(generation.get(name))
        if value is None or not hasattr(config, field):
            continue
        try:
            if field == "eos":
                value = as_tuple(value, name)
            else:
                value = check_integer(name, value, least=None)
            config = dataclasses.replace(config, **{field: value})
        except _ERRORS as error:
            invalid.append(f"`{name}`, which is {short_repr(value)} ({error})")
    if invalid:
        warn(
            f"{path / GENERATION} has invalid tokens, so the tokens of {SETTINGS} are used: "
            f"{'; '.join(invalid)}."
        )
    return config


def write_decoding(config: Any) -> Settings:
    """Returns the contents of a `generation_config.json` for a configuration."""
    d: Decoding = config.decoding
    if d.logits_fn is not None:
        raise ValueError(
            "The configuration's `decoding` has a `logits_fn`, which cannot be saved. Remove it "
            "from the configuration, and pass it to `generate`."
        )
    if d.eos == () and config.eos:
        raise ValueError(
            "The configuration's `decoding` has `eos=()`, but a file cannot specify that no token "
            "ends a row. Pass `eos=()` to `generate`, or save a configuration without `eos`."
        )
    options: Settings = {}
    for field, name in (_NAMES | _SAMPLING).items():
        if getattr(d, field) != getattr(GREEDY, field):
            options[name] = getattr(d, field)
    forced = {}
    if d.prefix:
        # Position 0 is `decoder_start`.
        forced[_FORCED] = list(map(list, enumerate(d.prefix, 1)))
    options |= forced
    if speech_settings := getattr(config, "speech_settings", ()):
        options |= write_whisper_prompt(speech_settings, d.prefix, forced)
    if d.temperature > 0:
        # Without `top_k`, `transformers` would sample from the 50 most likely tokens.
        options |= {"do_sample": True, "top_k": d.top_k or 0}
    if getattr(config, "decoder_start", None) is not None:
        options["decoder_start_token_id"] = config.decoder_start
    eos, pad = config.eos, d.pad
    if d.eos is not None:
        eos = as_tuple(d.eos)
    if pad is None:
        pad = config.pad
    return options | published_ids(eos=eos, bos=config.bos, pad=pad)
