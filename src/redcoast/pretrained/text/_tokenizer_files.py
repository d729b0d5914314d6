"""Tokenizers and chat templates of the files of a model."""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...core._errors import check_kind, local_path
from ...core._packages import require_package
from .._files import file_inside, read_bounded
from .._source import find_gguf
from ..gguf._file import COUNT, check_header, files_of_model
from ._chat_template import named_template, read_template, renderer

MOST_BYTES = 2**27  # four times the size of the largest vocabularies, of 262 thousand tokens
# A .gguf file names its pre-tokenizer but does not contain its rules.
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False}  # the supported pre-tokenizers
_CONTROL = 3  # the type of control tokens
# From a name to a value of the metadata of a .gguf file, or None if it is missing.
Metadata = Callable[[str], Any]


def load_tokenizer(path: str | Path) -> Any:
    """Loads the tokenizer of pretrained weights, as a `tokenizers.Tokenizer`.

    Truncation and padding, which a file may keep from its training, are turned off.

    **Arguments:**

    - `path`: a directory in Hugging Face's format, or a `.gguf` file, as for
        [`redcoast.load_pretrained`][].

    **Returns:**

    The tokenizer. `tokenizer.encode(text).ids` are the tokens of a text, and
    `tokenizer.decode(ids)` is the text of tokens.

    **Raises:**

    `FileNotFoundError` if there is no such path. `ValueError` that names the file if it cannot be
    read, is too large, or leads out of the directory; `ImportError` if the package `tokenizers`
    (or, for a .gguf file, `gguf`) is missing.

    !!! example

        ```python
        from pathlib import Path
        from tokenizers import Tokenizer, models

        Path("tiny-llama").mkdir(exist_ok=True)
        Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save("tiny-llama/tokenizer.json")
        ids = rc.load_tokenizer("tiny-llama").encode("abba").ids
        ```
    """
    require_package("tokenizers", "Reading a tokenizer")
    from tokenizers import Tokenizer

    weights = _existing(path)
    path = weights / "tokenizer.json"
    if not path.exists() and (gguf := find_gguf(weights)):
        with naming_file(gguf, "holds no tokenizer that can be read"):
            return _gguf_tokenizer(gguf)
    if path.exists():
        data = read_bounded(file_inside(weights, path.name), MOST_BYTES)
        with naming_file(path, "is not a tokenizer"):
            tokenizer = Tokenizer.from_buffer(data)
            tokenizer.encode("a")  # some files only fail here
    elif importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{weights} has no tokenizer.json. If it has a tokenizer of another form, install "
            "`transformers`, which converts it."
        )
    else:
        from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

        try:
            converted = AutoTokenizer.from_pretrained(weights, local_files_only=True)
            tokenizer = converted.backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{weights} has no tokenizer that can be read: {error}") from error
        # Without its files, `transformers` makes some tokenizers with hardly any tokens.
        if tokenizer.get_vocab_size(with_added_tokens=False) < 10:
            raise ValueError(f"{weights} has no tokenizer that can be read: it has no vocabulary.")
    # A file may have them from its training.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_chat_template(path: str | Path) -> Callable[..., str] | None:
    """Loads the chat template of pretrained weights, as a function from messages to text.

    The template is a program that came with the weights. It is rendered as `transformers` renders
    it, in a process of its own, which is ended if it takes much memory or time.

    **Arguments:**

    - `path`: a directory in Hugging Face's format, or a `.gguf` file, as for
        [`redcoast.load_pretrained`][].

    **Returns:**

    `render(messages, **variables)`, or `None` if the weights have no chat template. `messages` are
    dicts such as `{"role": "user", "content": "What is a mesh?"}`. `variables` are those of the
    template: with `add_generation_prompt=True`, the text ends where the assistant's answer begins.
    With `mark_answers=True`, what the template has between `{% generation %}` and
    `{% endgeneration %}` is between the characters U+FDD0 and U+FDD1. `render` raises a
    `ValueError` if the template refuses the messages.

    **Raises:**

    `FileNotFoundError` if there is no such path. `ValueError` that names the file if it cannot be
    read, is too large, or leads out of the directory; `ImportError` if the package `jinja2` (or,
    for a .gguf file, `gguf`) is missing.

    !!! example

        ```python
        from pathlib import Path

        Path("tiny-llama").mkdir(exist_ok=True)
        template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        Path("tiny-llama/chat_template.jinja").write_text(template)
        render = rc.load_chat_template("tiny-llama")
        text = render([{"role": "user", "content": "What is a mesh?"}])
        ```
    """
    weights = _existing(path)
    template, settings = None, {}
    if weights.is_dir():
        template, settings = read_template(weights)
    if template is None and (gguf := find_gguf(weights)):
        with naming_file(gguf, "has metadata that cannot be read"):
            read = gguf_metadata(gguf)
            template = named_template(read("tokenizer.chat_template"), gguf)
            settings = gguf_special(read)
    if template is None:
        return None
    return renderer(template, settings, weights)


def gguf_tokenizer_files(path: Path) -> dict[str, str]:
    """The tokenizer, its special tokens and the chat template of a .gguf file, as the names and
    texts of Hugging Face's files."""
    with naming_file(path, "has metadata that cannot be read"):
        read = gguf_metadata(path)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **gguf_special(read)}
        if template := read("tokenizer.chat_template"):
            settings["chat_template"] = template
    return {
        "tokenizer.json": load_tokenizer(path).to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }


def _existing(path: str | Path) -> Path:
    check_kind("path", path, (str, Path), "a path")
    weights = local_path("path", path)
    if not weights.exists():
        raise FileNotFoundError(
            f"There is no {weights}. `path` must be a directory in Hugging Face's format, or a "
            ".gguf file."
        )
    return weights


@contextlib.contextmanager
def naming_file(path: Path, words: str) -> Iterator[None]:
    """Converts errors from a file in another format to one sentence."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} {words}: {text or type(error).__name__}") from error
    except BaseException as error:
        # `tokenizers` panics on some files, with its own class of exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path} {words}.") from error


def gguf_special(read: Metadata) -> dict[str, str]:
    words = read("tokenizer.ggml.tokens") or []
    special = {}
    for name in ("bos", "eos"):
        index = read(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            special[f"{name}_token"] = words[index]
    return special


def _gguf_tokenizer(path: Path) -> Any:
    """Rebuilds a byte-level BPE tokenizer from the metadata of a .gguf file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    read = gguf_metadata(path)
    kind = read("tokenizer.ggml.pre")
    # "gpt2" is llama.cpp's word for byte-level BPE.
    if read("tokenizer.ggml.model") != "gpt2" or kind not in _SPLITS_DIGITS:
        raise ValueError(f"it is of type {kind!r}, which is not supported")
    words = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    # SmolLM splits numbers into digits before anything else.
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if _SPLITS_DIGITS[kind]:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    control: list[AddedToken] = []
    for word, token_type in zip(words, read("tokenizer.ggml.token_type"), strict=True):
        if token_type == _CONTROL:
            control.append(AddedToken(word, normalized=False, special=True))
    tokenizer.add_special_tokens(control)
    begin, end = _added_token(read, "bos"), _added_token(read, "eos")
    # The post-processor puts the tokens at the ends of each text that is encoded.
    special: list[tuple[str, int]] = []
    form = ["$0"]  # the text itself
    if begin is not None:
        special.append((words[begin], begin))
        form = [words[begin], *form]
    if end is not None:
        special.append((words[end], end))
        form = [*form, words[end]]
    if special:
        # One entry where the same token begins and ends a text.
        unique = list(dict.fromkeys(special))
        tokenizer.post_processor = processors.TemplateProcessing(form, special_tokens=unique)
    return tokenizer


def _added_token(read: Metadata, name: str) -> int | None:
    """The token that is added at an end of each text; None if there is none."""
    if not read(f"tokenizer.ggml.add_{name}_token"):
        return None
    return read(f"tokenizer.ggml.{name}_token_id")


def gguf_metadata(path: Path) -> Metadata:
    """Returns a function from a name to a value of the metadata, or None if it is missing.

    If a model has several files, the first one contains the metadata.
    """
    fields = _gguf_fields(path)
    count = 1
    if COUNT in fields:
        count = fields[COUNT].contents()
    if count > 1:
        fields = _gguf_fields(files_of_model(path, count)[0])

    def read(name: str) -> Any:
        if name not in fields:
            return None
        return fields[name].contents()

    return read


def _gguf_fields(path: Path) -> dict[str, Any]:
    check_header(path)
    from gguf import GGUFReader

    return GGUFReader(path).fields
