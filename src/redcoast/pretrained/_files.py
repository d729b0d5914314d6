"""Files in untrusted directories: their paths, and reads of a limited size."""

from pathlib import Path

from ..core._read_json import open_regular


def file_inside(directory: Path, name: str) -> Path:
    """Returns the path of a file in a directory, after checking that it does not lead outside.

    Symbolic links may lead into the directory itself and, for a directory
    `<model>/snapshots/<revision>` of Hugging Face's cache, into `<model>/blobs`.

    Raises `ValueError` if the file is outside the directory.
    """
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute():
        raise ValueError(f"{directory} refers to {name!r}, which is not the name of a file in it.")
    inside = directory.resolve()
    places = [inside]
    if inside.parent.name == "snapshots":
        places.append(inside.parent.parent / "blobs")
    path = directory / name
    # `..` is rejected also where it comes back: a name must not reach `blobs` without a link.
    if not any(map(path.resolve().is_relative_to, places)) or ".." in path.parts:
        raise ValueError(
            f"{path} leads out of its directory, to {path.resolve()}, but only files inside the "
            "directory are read. If you trust the file, copy it into the directory."
        )
    return path


def read_bounded(path: Path, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises `ValueError` that names the file if it is larger, or is a pipe or a device.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} is larger than {most >> 20} MiB, which is too large for it.")
    return data
