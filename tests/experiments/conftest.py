"""What tests of the experiments share."""

import importlib

import pytest
from paths import EXPERIMENTS


@pytest.fixture
def script(monkeypatch):
    """Imports a script."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module
