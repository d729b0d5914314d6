"""Reads dataclasses from what a JSON file contains, by the types of their fields."""

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class WrongEntries(ValueError):
    """Raised if entries are missing, unknown, or of another type; `names` are those of fields."""

    def __init__(self, *names: str):
        super().__init__(", ".join(map(repr, sorted(names))))
        self.names = frozenset(names)


def from_json(kind: type[T], entries: object, *, exact: bool = True) -> T:
    """A dataclass from a JSON object; fields with a default may be missing.

    Lists become tuples, and objects become dataclasses, where the type of a field says so. Raises
    `WrongEntries` with the names of the fields that are wrong, and, if it is `exact`, of entries
    that are no fields.
    """
    if not isinstance(entries, dict):
        raise WrongEntries
    types = get_type_hints(kind)
    wrong: set[str] = set()
    if exact:
        wrong.update(entries.keys() - types.keys())
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        if field.name in entries:
            try:
                values[field.name] = _read(types[field.name], entries[field.name], exact)
            except WrongEntries as error:
                wrong |= error.names or {field.name}
        elif field.default is field.default_factory is dataclasses.MISSING:
            wrong.add(field.name)
    if wrong:
        raise WrongEntries(*wrong)
    return kind(**values)


def _read(kind: Any, value: object, exact: bool) -> object:
    """A value as a type. Raises `WrongEntries` if it is of another type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return from_json(kind, value, exact=exact)  # pyright: ignore[reportArgumentType]
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _read_one_of(arguments, value, exact)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        types = arguments
        if arguments[-1] is Ellipsis:
            types = arguments[:1] * len(value)
        if len(types) == len(value):
            items = []
            for of, item in zip(types, value, strict=True):
                items.append(_read(of, item, exact))
            return tuple(items)
    if origin in (dict, Mapping) and isinstance(value, dict):  # keys of JSON are text
        entries = {}
        for key, item in value.items():
            entries[key] = _read(arguments[1], item, exact)
        return entries
    # A bool is not an integer here, and a whole number may be a float.
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise WrongEntries


def _read_one_of(kinds: tuple[Any, ...], value: object, exact: bool) -> object:
    if value is None and type(None) in kinds:
        return None
    wrong: set[str] = set()
    for kind in kinds:
        try:
            return _read(kind, value, exact)
        except WrongEntries as error:
            wrong |= error.names
    raise WrongEntries(*wrong)
