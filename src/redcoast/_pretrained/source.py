"""What stands at a path: settings, and tensors in files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models._tensors import Tensor
from .safetensors_file import read_safetensors
from .stored import Stored

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SETTINGS = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Source:
    """A published model.

    - `settings`: of a `config.json`, or what corresponds to it.
    - `stored`: the tensors, by name.
    - `table`: what the arrays of the model are made of, if not what the model itself says.
    """

    settings: dict[str, Any]
    stored: dict[str, Stored]
    table: dict[str, Tensor] | None = None


def open_source(path: Path) -> Source:
    """Reads settings and the headers of files, and no tensor."""
    if not path.exists():
        raise ValueError(
            f"There is nothing at {path}. `load_pretrained` reads a directory of this machine, "
            "such as `huggingface-cli download` makes with `--local-dir`, or a `.gguf` file."
        )
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in PICKLES:
        raise ValueError(_pickled([path]))
    raise ValueError(f"{path} is neither a directory with a {SETTINGS} nor a `.gguf` file.")


def _open_directory(path: Path) -> Source:
    files = tensor_files(path)
    ggufs = sorted(path.glob("*.gguf"))
    if not files and len(ggufs) == 1:
        return _open_gguf(ggufs[0])
    if not files:
        pickles = [file for file in sorted(path.iterdir()) if file.suffix in PICKLES]
        several = ", but several `.gguf` files, of which one has to be named" if ggufs else ""
        raise ValueError(
            _pickled(pickles)
            if pickles and not ggufs
            else f"{path} holds neither {SINGLE} nor {INDEX}{several}."
        )
    if not (path / SETTINGS).is_file():
        raise ValueError(f"{path} holds tensors, but no {SETTINGS} that says of which model.")
    stored = {}
    for file in files:
        stored |= read_safetensors(file)
    return Source(json.loads((path / SETTINGS).read_text()), stored)


def tensor_files(path: Path) -> list[Path]:
    """The files of a directory that hold the tensors of its model."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not (path / INDEX).is_file():
        return []
    names = sorted({*json.loads((path / INDEX).read_text())["weight_map"].values()})
    if missing := [name for name in names if not (path / name).is_file()]:
        raise ValueError(f"{path} lacks files that its {INDEX} names: {', '.join(missing)}.")
    return [path / name for name in names]


def _open_gguf(path: Path) -> Source:
    from .gguf_llama import open_gguf

    return open_gguf(path)


def _pickled(files: list[Path]) -> str:
    return (
        f"{', '.join(map(str, files))}: the weights are pickled, and opening a pickle runs "
        "whatever code it holds. If you trust it, load it once with `transformers` and write it "
        "with `model.save_pretrained(directory)`, which makes files of safetensors."
    )
