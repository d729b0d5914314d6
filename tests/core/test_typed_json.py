"""Dataclasses from JSON: what other tests of saved plans do not reach."""

from dataclasses import dataclass
from typing import Literal

import pytest

from redcoast.sharding._serialization import WrongEntries, from_json


@dataclass(frozen=True)
class Inner:
    pair: tuple[int, str]
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    share: float
    sizes: dict[str, int]
    best: Inner | None = None


def entries(**changed):
    return {"inner": [{"pair": [1, "x"]}], "share": 0.5, "sizes": {"n": 2}} | changed


def test_lists_become_tuples_and_objects_dataclasses():
    expected = Outer((Inner((1, "x")),), 3, {"n": 2}, Inner((2, "y"), "b"))
    assert from_json(Outer, entries(share=3, best={"pair": [2, "y"], "kind": "b"})) == expected


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"sizes": {"n": True}}, {"sizes"}),  # a bool is no number
        ({"share": "0.5", "sizes": []}, {"share", "sizes"}),
        ({"inner": [{"pair": [1]}]}, {"pair"}),
        ({"inner": [{"pair": [1, "x"], "kind": "c"}]}, {"kind"}),
        ({"inner": [{}]}, {"pair"}),
        ({"best": {"pair": 1}}, {"pair"}),
        ({"other": 1}, {"other"}),
    ],
)
def test_the_fields_that_are_wrong_are_named(changed, names):
    with pytest.raises(WrongEntries) as raised:
        from_json(Outer, entries(**changed))
    assert raised.value.names == names
