"""Files of a directory that a stranger may have made."""

from pathlib import Path


def file_inside(directory: Path, name: str) -> Path:
    """A file of a directory by its name there, wherever the links on the way lead.

    They may lead inside the directory, and to where Hugging Face's cache keeps the contents of
    the files of `<model>/snapshots/<revision>`, which is `<model>/blobs`.

    **Raises:**

    `ValueError` if it is a file of somewhere else.
    """
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute():
        raise ValueError(f"{directory} names a file {name!r}, which is no name of a file in it.")
    inside = directory.resolve()
    places = [inside]
    if inside.parent.name == "snapshots":
        places.append(inside.parent.parent / "blobs")
    path = directory / name
    if not any(path.resolve().is_relative_to(place) for place in places) or ".." in path.parts:
        raise ValueError(
            f"{path} leads out of its directory, to {path.resolve()}, and only what is in a "
            "directory is read with it. If you trust it, copy the file to its place."
        )
    return path
