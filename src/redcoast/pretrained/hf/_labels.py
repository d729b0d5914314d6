"""The settings of encoders for heads, labels and images, and abstract images."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._settings import Fields, Settings

T = TypeVar("T")
LABELLED = ("classification", "tokens")  # the heads with labels


def read_architecture(settings: Settings, known: Mapping[str, T], default: str) -> T:
    """Looks up the setting `architectures` in `known`; `default` is used if there is none."""
    # A file of a model without a head often has no such setting.
    names = settings.get("architectures") or [default]
    if len(names) > 1 or names[0] not in known:
        raise ValueError(
            f"The setting `architectures` is {names}, but only {' or '.join(known)} is implemented."
        )
    return known[names[0]]


def architecture_of(head: str | None, known: Mapping[str, str | None]) -> str:
    """Returns the architecture with this head: the inverse of `read_architecture`."""
    return next(name for name, other in known.items() if other == head)


def read_labels(settings: Settings) -> Fields:
    """Returns the number of labels, and their names unless they are the default names."""
    # Keys of JSON objects are text, so labels have their numbers as text.
    names_by_text = settings.get("id2label")
    if not names_by_text:
        labels = settings.get("num_labels")
        if labels is None:
            labels = 2
        return {"labels": labels, "label_names": None}
    by_number = {int(number): name for number, name in names_by_text.items()}
    if sorted(by_number) != list(range(len(by_number))):
        raise ValueError(
            f"The setting `id2label` numbers its labels {sorted(by_number)}, but must count from 0."
        )
    names = tuple(by_number[i] for i in range(len(by_number)))
    fields: Fields = {"labels": len(names), "label_names": names}
    if names == tuple(_numbered(len(names))):
        fields["label_names"] = None
    return fields


def write_labels(config: Any) -> Settings:
    if config.head not in LABELLED:
        return {}
    # `transformers` shows these names, and takes their number for the size of the head.
    names = config.label_names or _numbered(config.labels)
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _numbered(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]


def read_sides(c: Settings) -> Fields:
    """Returns the sides of images and of patches, which must be squares."""
    fields = {}
    for field in ("image", "patch"):
        size = c[f"{field}_size"]
        if not isinstance(size, list):
            size = [size]
        if len({*size}) > 1:
            raise ValueError(f"`{field}_size` is {size}, but only squares are implemented.")
        fields[field] = size[0]
    return fields


def image_inputs(config: Any, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    # One number is the side of a square.
    sides = config.image
    if isinstance(sides, int):
        sides = (sides, sides)
    return (jax.ShapeDtypeStruct((rows, config.channels, *sides), jnp.float32),)
