"""The defaults of decoding in `generation_config.json`, or in older `config.json` files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core._decoding import GREEDY, Decoding, as_tuple
from ..core._errors import shortened
from ..core._frames import warn
from ._settings import published_ids, token_ids
from ._source import GENERATION, SETTINGS

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
}
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
# Options that are not implemented, with the values that disable them.
_OFF: dict[str, tuple[Any, ...]] = {
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
}


def read_decoding(settings: Mapping[str, Any], where: Any) -> Decoding:
    """Returns the options that a parsed file sets.

    Warns of options that are not implemented; the others are used. Lengths are no options: those of
    a file are defaults of `transformers`, and `generate` is given `max_new_tokens`.
    """
    try:
        options, unserved = _options(settings)
        if unserved:
            warn(
                f"{where} sets options of decoding that `redcoast.generate` does not implement, "
                f"and that are left out: {'; '.join(unserved)}."
            )
        return Decoding(**options)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{where} has an invalid option of decoding. {error}") from error


def _options(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of a `Decoding`, and what is not implemented."""
    given = {name: value for name, value in settings.items() if value is not None}
    for name in ("lang_to_id", "task_to_id"):
        if not isinstance(given.get(name, {}), dict):
            raise TypeError(f"`{name}` must map names to tokens, but is {shortened(given[name])}.")
    forced = given.get("forced_decoder_ids", [])
    if not _are_pairs(forced):
        raise TypeError(
            "`forced_decoder_ids` must be a list of pairs of a position and a token, but is "
            f"{shortened(forced)}."
        )
    unserved = [
        f"`{name}`, which is {shortened(given[name])}"
        for name, off in _OFF.items()
        if name in given and given[name] not in off
    ]
    options = {field: given[name] for field, name in _NAMES.items() if name in given}
    options["forced_eos"] = token_ids(given.get("forced_eos_token_id"))
    options["bad_words"] = given.get("bad_words_ids", ())
    forced = sorted(forced, key=lambda pair: pair[0])
    if [position for position, _ in forced] != list(range(1, len(forced) + 1)):
        unserved.append(
            f"`forced_decoder_ids`, which is {shortened(forced)} and does not begin at 1"
        )
        forced = []
    options["prefix"], unknown = _prefix(given, [token for _, token in forced])
    if unknown:
        unserved.append(
            "the detection of the language (pass those of the language, of the task and of the "
            "absence of timestamps as `prefix`)"
        )
    if options.get("beams", 1) == 1:
        for name in ("length_penalty", "early_stopping"):
            options.pop(name, None)  # has no effect
        options |= _sampling(given)
    elif given.get("do_sample"):
        unserved.append("beam search that samples (`do_sample`)")
    return options, unserved


def _are_pairs(found: Any) -> bool:
    """Whether a list has only pairs, of a position and of a token or `None`."""
    is_pair = lambda x: isinstance(x, list) and len(x) == 2 and type(x[0]) is int
    return isinstance(found, list) and all(map(is_pair, found))


def _prefix(given: Mapping[str, Any], forced: list[Any]) -> tuple[tuple[int, ...], bool]:
    """Returns the tokens before the first new one that Whisper's files describe, and whether they
    leave the language open, which `transformers` then detects."""
    languages, tasks = given.get("lang_to_id", {}), given.get("task_to_id", {})
    language, task = given.get("language"), given.get("task")
    found = []
    if language is None and task is None:
        found = [*forced]
    elif language is not None:
        token = language if language in languages else f"<|{language}|>"
        found = [languages.get(token), tasks.get(task or "transcribe")]
    if languages and (not found or found[0] is None):
        return (), True
    last = given.get("no_timestamps_token_id")
    silent = last is not None and not given.get("return_timestamps")
    found += [last] if silent and found[-1:] != [last] else []
    return tuple(token for token in found if token is not None), False


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given.get("do_sample"):
        return {}
    # The defaults of `transformers`.
    found = {"temperature": 1.0, "top_k": 50}
    found |= {field: given[name] for field, name in _SAMPLING.items() if name in given}
    return found | {name: found.get(name) or None for name in ("top_k", "min_p")}


def with_generation(
    config: Any, settings: Mapping[str, Any], generation: Mapping[str, Any] | None, path: Path
) -> Any:
    """Returns a configuration with the decoding and the token ids of a model's files.

    `generation` is the parsed `generation_config.json`. In its absence, the options are those of
    `config.json`, where older files have them.
    """
    if not hasattr(config, "decoding"):
        return config
    if generation is None:
        decoder = settings.get("decoder")
        older = {**(decoder if isinstance(decoder, dict) else {}), **settings}
        if older.get("force_bos_token_to_be_generated"):
            older["forced_bos_token_id"] = older.get("bos_token_id")
        return dataclasses.replace(config, decoding=read_decoding(older, path / SETTINGS))
    ids = {"pad": "pad_token_id", "decoder_start": "decoder_start_token_id"}
    given = {
        field: generation[name]
        for field, name in ids.items()
        if generation.get(name) is not None and hasattr(config, field)
    }
    given["decoding"] = read_decoding(generation, path / GENERATION)
    try:
        if generation.get("eos_token_id") is not None:
            given["eos"] = token_ids(generation["eos_token_id"])
        return dataclasses.replace(config, **given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / GENERATION} cannot be read. {error}") from error


def write_decoding(config: Any) -> dict[str, Any]:
    """Returns the contents of a `generation_config.json` for a configuration."""
    d: Decoding = config.decoding
    if d.logits_fn is not None:
        raise ValueError(
            "The configuration's `decoding` has a `logits_fn`, which cannot be saved. Remove it "
            "from the configuration, and pass it to `generate`."
        )
    if d.eos == () and config.eos:
        raise ValueError(
            "The configuration's `decoding` has `eos=()`, but a file cannot say that no token ends "
            "a row. Pass `eos=()` to `generate`, or save a configuration without `eos`."
        )
    fields = {**_NAMES, "forced_eos": "forced_eos_token_id", "bad_words": "bad_words_ids"}
    fields |= _SAMPLING
    options = {
        name: getattr(d, field)
        for field, name in fields.items()
        if getattr(d, field) != getattr(GREEDY, field)
    }
    if d.prefix:
        options["forced_decoder_ids"] = [[i, token] for i, token in enumerate(d.prefix, 1)]
    if d.temperature > 0:
        options |= {"do_sample": True, "top_k": d.top_k or 0}
    if getattr(config, "decoder_start", None) is not None:
        options["decoder_start_token_id"] = config.decoder_start
    return options | published_ids(
        eos=config.eos if d.eos is None else as_tuple(d.eos),
        bos=config.bos,
        pad=config.pad if d.pad is None else d.pad,
    )
