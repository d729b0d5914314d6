"""Opens a pretrained model: its settings, and its tensors in files."""

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import jax

from ..core._errors import several
from ..core._frames import warn
from ..core._read_json import read_json
from ._files import file_inside
from ._lazy_tensor import Source, Stored
from ._safetensors import read_safetensors
from ._settings import Settings

# The names of settings that count layers, in all families.
COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers")
COUNTS += ("decoder_layers", "vision_layers")
# A tensor may be used several times, and may be omitted if it is zero.
MOST_TIMES, SPARE_ELEMENTS = 4, 2**16


def check_layers(settings: Settings, tensors: int, path: Path) -> None:
    """Raises if the settings claim more layers than there are tensors."""
    # The encoder and the decoder of some models have settings of their own, in objects.
    for name, value in settings.items():
        if isinstance(value, dict):
            check_layers(value, tensors, path)
        elif name in COUNTS and isinstance(value, int) and value > tensors:
            raise ValueError(
                f"{path} has settings and tensors of different models: `{name}` is {value}, but "
                f"there are only {tensors} tensors."
            )


def check_elements(
    arrays: Iterable[jax.ShapeDtypeStruct], stored: Mapping[str, Stored], path: Path
) -> None:
    """Raises if the model has many more parameters than the files, or arrays without elements."""
    # Before memory is allocated: an array of wrong settings may be larger than any device.
    sizes = [prod(x.shape) for x in arrays]
    in_files = sum(prod(x.shape) for x in stored.values())
    if 0 in sizes or sum(sizes) > MOST_TIMES * in_files + SPARE_ELEMENTS:
        raise ValueError(
            f"{path} has settings and tensors of different models: according to the settings there "
            f"are {sum(sizes)} parameters{', and arrays without any' * (0 in sizes)}; the files "
            f"hold {in_files}."
        )


def check_computed(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], path: Path
) -> None:
    """Raises if an array that a model computes when it is created is larger than in the files.

    Such arrays take memory even if only the shapes of the model are needed. An array that the files
    omit must not be larger than their largest tensor.
    """
    largest = max((x.shape for x in stored.values()), key=prod, default=())
    for name, shape in shapes.items():
        # Names in files may have the prefix of the base model.
        in_file = largest
        for key, x in stored.items():
            if key.endswith(name):
                in_file = x.shape
                break
        if prod(shape) > prod(in_file):
            raise ValueError(
                f"{path} has settings and tensors of different models: according to the settings "
                f"{name} has the shape {shape}, but the files hold {in_file}."
            )


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SETTINGS = "config.json"
GENERATION = "generation_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_source(path: Path) -> Source:
    """Reads the settings and the headers of the files, but no tensors."""
    if not path.exists():
        raise FileNotFoundError(
            f"There is nothing at {path}. `load_pretrained` reads a directory on this machine, or "
            "a `.gguf` file. First download a model of Hugging Face, for example with "
            "`hf download NAME --local-dir DIRECTORY`."
        )
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    _refuse_pickles([path])
    if path.suffix == ".safetensors":
        raise ValueError(
            f"{path} contains tensors, but not the settings of their model. Pass the directory "
            f"that holds both it and {SETTINGS}."
        )
    raise ValueError(f"{path} is neither a directory with a {SETTINGS} nor a `.gguf` file.")


def _open_directory(path: Path) -> Source:
    files = tensor_files(path)
    # Only if there are no tensors in safetensors files, which `find_gguf` looks for itself.
    if gguf := find_gguf(path):
        return _open_gguf(gguf)
    if not files:
        raise ValueError(f"{path} holds neither {SINGLE} nor {INDEX}{_instead(path)}.")
    if not (path / SETTINGS).is_file():
        raise ValueError(f"{path} contains tensors, but no {SETTINGS} that describes the model.")
    stored: dict[str, Stored] = {}
    for file in files:
        tensors = read_safetensors(file)
        if twice := stored.keys() & tensors.keys():
            raise ValueError(f"{file} holds {min(twice)}, but so does another file in {path}.")
        stored |= tensors
    return Source(read_json(file_inside(path, SETTINGS)), stored, generation=_generation(path))


def _instead(path: Path) -> str:
    """Returns what a directory without a model contains, and what to do with it."""
    if any(path.glob("*.gguf")):
        return ", but several `.gguf` files: pass the path of one of them"
    _refuse_pickles(sorted(path.iterdir()))
    if (path / "adapter_config.json").is_file():
        return (
            ", but adapters. Load the model that they were trained for, and then the adapters: "
            f"`lora.load_adapters(model, {str(path)!r})`"
        )
    snapshots = sorted(filter(Path.is_dir, path.glob("snapshots/*")))
    if snapshots:
        listed = " or ".join(map(str, snapshots))
        return f", but snapshots of a model, as in the hub's cache. Pass {listed}"
    if shards := sorted(file.name for file in path.glob("*.safetensors")):
        remedy = f"Download {INDEX}, too"
        if len(shards) == 1:
            remedy = f"Rename it to {SINGLE}"
        return f", but {', '.join(shards)}. {remedy}"
    return ""


def _generation(path: Path) -> Settings | None:
    """Reads the options of decoding, which are not needed to load the weights."""
    if not (path / GENERATION).is_file():
        return None
    file = file_inside(path, GENERATION)
    try:
        return read_json(file)
    except ValueError as error:
        warn(f"The options of decoding are ignored, because they cannot be read. {error}")
        return None


def tensor_files(path: Path) -> list[Path]:
    """Returns the files of a directory that contain the tensors of its model."""
    if (path / SINGLE).is_file():
        return [file_inside(path, SINGLE)]
    if not (path / INDEX).is_file():
        return []
    index = file_inside(path, INDEX)
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ValueError(f"{index} has no `weight_map` from tensors to files.")
    files = [file_inside(path, name) for name in sorted({*named.values()})]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} lacks files that its {INDEX} names: {several(missing)}.")
    _refuse_pickles(files)
    return files


def find_gguf(path: Path) -> Path | None:
    """Returns the `.gguf` file of a model: the path itself; or the file, or the first file, of the
    only model in a directory without other tensors. None if there is none."""
    from .gguf._file import first_part

    if path.suffix == ".gguf" and not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if not files or tensor_files(path):
        return None
    file = files[0]
    if len(files) > 1:
        file = first_part(files)
    if file is None:
        return None
    return file_inside(path, file.name)


def _open_gguf(path: Path) -> Source:
    from .gguf._llama import open_gguf

    return open_gguf(path)


def _refuse_pickles(files: list[Path]) -> None:
    if pickles := [str(file) for file in files if file.suffix in PICKLES]:
        raise ValueError(
            f"{several(pickles)}: the weights are pickled, and unpickling runs any code in the "
            "file. If you trust it, load it once with `transformers` and save it with "
            "`model.save_pretrained(directory)`, which writes safetensors files."
        )
