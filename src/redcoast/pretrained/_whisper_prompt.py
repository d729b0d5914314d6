"""The tokens between the first one and the text, from the settings in Whisper's files."""

import json
from collections.abc import Sequence
from typing import Any

from ..core._errors import short_repr
from ._settings import Settings, present

# Codes of languages, and their names.
_LANGUAGES = """
    en=english zh=chinese,mandarin de=german es=spanish,castilian ru=russian ko=korean fr=french
    ja=japanese pt=portuguese tr=turkish pl=polish ca=catalan,valencian nl=dutch,flemish
    ar=arabic sv=swedish it=italian id=indonesian hi=hindi fi=finnish vi=vietnamese he=hebrew
    uk=ukrainian el=greek ms=malay cs=czech ro=romanian,moldavian,moldovan da=danish
    hu=hungarian ta=tamil no=norwegian th=thai ur=urdu hr=croatian bg=bulgarian lt=lithuanian
    la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu fa=persian lv=latvian bn=bengali
    sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian br=breton
    eu=basque is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian
    sw=swahili gl=galician mr=marathi pa=punjabi,panjabi si=sinhala,sinhalese km=khmer sn=shona
    yo=yoruba so=somali af=afrikaans oc=occitan ka=georgian be=belarusian tg=tajik sd=sindhi
    gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek fo=faroese ht=haitian_creole,haitian
    ps=pashto,pushto tk=turkmen nn=nynorsk mt=maltese sa=sanskrit lb=luxembourgish,letzeburgesch
    my=myanmar,burmese bo=tibetan tl=tagalog mg=malagasy as=assamese tt=tatar haw=hawaiian
    ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese yue=cantonese
"""
_CODES = {}
for _entry in _LANGUAGES.split():
    _code, _names = _entry.split("=")
    _CODES |= dict.fromkeys(_names.replace("_", " ").split(","), _code)
# Settings that `transformers` reads and `redcoast.generate` does not use, or uses as `prefix`.
_SPEECH_SETTINGS = """
    alignment_heads compression_ratio_threshold condition_on_prev_tokens is_multilingual lang_to_id
    language logprob_threshold max_initial_timestamp_index max_length max_new_tokens
    median_filter_width no_speech_threshold no_timestamps_token_id prev_sot_token_id
    prompt_condition_type return_timestamps task task_to_id
""".split()  # noqa: SIM905
_OF_PREFIX = ("language", "task", "return_timestamps")
_TASKS = ("transcribe", "translate")
# The errors that options of an unexpected type raise.
_ERRORS = (TypeError, ValueError, LookupError, AttributeError)


def read_whisper_prompt(settings: Settings) -> tuple[tuple[int, ...], list[str]]:
    """Returns the tokens of the language, of the task and of the absence of timestamps.

    They are specified by name (`language`, `task`) or by position (`forced_decoder_ids`). Names
    take precedence, as in `transformers`. Returns the tokens, and descriptions of the options that
    are not implemented or invalid. If one of the tokens is unknown, there are none.
    """
    languages, tasks = settings.get("lang_to_id", {}), settings.get("task_to_id", {})
    problems = []
    for name, table in (("lang_to_id", languages), ("task_to_id", tasks)):
        if not isinstance(table, dict):
            problems.append(_show(settings, name))
    if problems:
        return (), problems
    language, task = settings.get("language"), settings.get("task")
    if language is None and task is None:
        tokens, problems = _forced(settings)
    else:
        tokens, problems = _named(settings, languages, tasks)
    if problems:
        return (), problems
    # The token of the language is missing or null: `transformers` then asks the model for it.
    if languages and tokens[:1] in ([], [None]):
        return (), [
            "the detection of the language (pass the tokens of the language, of the task and of "
            "the absence of timestamps as `prefix`)"
        ]
    if None in tokens:
        return (), [f"{_show(settings, 'forced_decoder_ids')} and leaves a token open"]
    # As `transformers` adds it behind the task, if it is not there.
    last = settings.get("no_timestamps_token_id")
    if last is not None and not settings.get("return_timestamps") and tokens[-1:] != [last]:
        tokens = [*tokens, last]
    return tuple(tokens), []


def speech_settings_of(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Returns the settings of a file that `write_whisper_prompt` writes again."""
    texts: list[tuple[str, str]] = []
    for name, value in present(settings, _SPEECH_SETTINGS).items():
        texts.append((name, json.dumps(value, sort_keys=True)))
    return tuple(texts)


def write_whisper_prompt(
    published: Sequence[tuple[str, str]], prefix: Sequence[int], forced: Settings
) -> Settings:
    """Returns the settings of a file, from which `read_whisper_prompt` reads the prefix: those of
    the file that the model was loaded from (`published`), beside `forced_decoder_ids`."""
    settings = {name: json.loads(text) for name, text in published}
    if read_whisper_prompt(settings | forced)[0] != tuple(prefix):
        # The prefix was changed after the model was loaded.
        for name in _OF_PREFIX:
            settings.pop(name, None)
    if read_whisper_prompt(settings | forced)[0] != tuple(prefix):
        settings["return_timestamps"] = True  # the prefix does not disable them
    return settings


def _named(settings: Settings, languages: Settings, tasks: Settings) -> tuple[list[Any], list[str]]:
    """Returns the tokens of the language and of the task that the file names."""
    tokens, odd = [], []
    language = settings.get("language")
    if language is not None:
        # The text of its token, its code or its English name; a list has one for each row.
        token = None
        if isinstance(language, str):
            word = language.lower()
            token = languages.get(word, languages.get(f"<|{_CODES.get(word, word)}|>"))
        tokens.append(token)
        if token is None:
            odd.append(f"{_show(settings, 'language')} and not in `lang_to_id`")
    elif languages:
        return [], []
    task = settings.get("task") or "transcribe"
    if settings.get("task") is not None or tasks:
        if isinstance(task, str) and task in _TASKS and task in tasks:
            tokens.append(tasks[task])
        else:
            odd.append(f"`task`, which is {short_repr(task)} and not in `task_to_id`")
    return tokens, odd


def _forced(settings: Settings) -> tuple[list[Any], list[str]]:
    """Returns the tokens that the file forces at the first positions."""
    tokens: list[Any] = []
    try:
        # Pairs, such as [1, 50259]. The position 0 has `decoder_start`.
        for position, token in sorted(map(tuple, settings["forced_decoder_ids"])):
            tokens.append(token)
            if position != len(tokens):
                raise ValueError
    except KeyError:
        return [], []
    except _ERRORS:
        return [], [f"{_show(settings, 'forced_decoder_ids')} and does not begin at 1"]
    return tokens, []


def _show(settings: Settings, name: str) -> str:
    return f"`{name}`, which is {short_repr(settings.get(name))}"
