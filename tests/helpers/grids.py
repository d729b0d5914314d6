"""Cases of which the default suite takes a few, and `nox -s thorough` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(values: Iterable[Any], *default: Any, several: bool = False) -> list[Any]:
    """The values for `pytest.mark.parametrize`, all but `default` marked `thorough`.

    Where there are `several` arguments, each value is a tuple of them.
    """
    values = list(values)
    missing = [one for one in default if one not in values]
    assert not missing, f"There is no such case: {missing}"
    return [
        one
        if one in default
        else pytest.param(*(one if several else (one,)), marks=pytest.mark.thorough)
        for one in values
    ]
