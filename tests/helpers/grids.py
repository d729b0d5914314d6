"""Cases of which the default suite takes a few, and `nox -s thorough` the others."""

import itertools as it
from collections.abc import Iterable
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks `thorough` the cases of a test that its marker `few` does not name."""
    for test, cases in it.groupby(items, key=lambda item: (item.path, item.originalname)):
        cases = list(cases)
        marker = cases[0].get_closest_marker("few")
        if marker is None:
            continue
        ids = {item.callspec.id for item in cases}
        if missing := set(marker.args) - ids:
            raise pytest.UsageError(f"{test[1]} has no case {missing}. It has {sorted(ids)}.")
        for item in cases:
            if item.callspec.id not in marker.args:
                item.add_marker(pytest.mark.thorough)


def few_of(values: Iterable[Any], *default: Any, several: bool = False) -> list[Any]:
    """The values for `pytest.mark.parametrize`, all but `default` marked `thorough`.

    Where there are `several` arguments, each value is a tuple of them.
    """
    values = list(values)
    missing = [name for name in default if name not in values]
    assert not missing, f"There is no such case: {missing}"
    return [
        value
        if value in default
        else pytest.param(*(value if several else (value,)), marks=pytest.mark.thorough)
        for value in values
    ]
