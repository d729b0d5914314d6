"""Fixtures for the tests of the experiments."""

import importlib

import pytest
from paths import EXPERIMENTS


@pytest.fixture
def script(monkeypatch):
    """Imports a script."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module
