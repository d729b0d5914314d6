"""The notebooks of the documentation, and their pages."""

import importlib
import json

import numpy as np
import pytest
from paths import EXPERIMENTS, ROOT

import redcoast as rc

FILES = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


@pytest.fixture
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "benchmarks"))
    return importlib.import_module("notebooks")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_page_is_that_of_the_notebook(file, notebooks):
    text, pictures = notebooks.page(json.loads(file.read_text("utf-8")), file.stem)
    assert file.with_suffix(".md").read_text("utf-8") == text
    assert pictures
    for name, png in pictures.items():
        assert (file.parent / name).read_bytes() == png


def test_outputs_of_a_cell_are_those_of_a_notebook(notebooks):
    namespace = {}
    assert notebooks.outputs("x = 2", namespace) == []
    (printed,) = notebooks.outputs("print(x)\nx + 1", namespace)
    assert printed["text"] == ["2\n", "3\n"]
    plot = "import matplotlib.pyplot as plt\nplt.plot([1, x]);"
    (figure,) = notebooks.outputs(plot, namespace)
    assert list(figure["data"]) == ["image/png"]
    with pytest.raises(ZeroDivisionError):
        notebooks.outputs("x / 0", namespace)


def test_lines_of_a_cell_are_code_of_the_user(notebooks):
    """Reports by line leave out code in no file, such as `<cell>`."""
    namespace = {}
    notebooks.outputs("def loss_fn(w, batch):\n    return (batch @ w).sum()", namespace, 3)
    w, batch = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    plan = rc.plan_shardings(w, rc.make_mesh(), fn=namespace["loss_fn"], args=(batch,))
    assert "cell_3.py:2  return (batch @ w).sum()" in plan.table(by="line")
