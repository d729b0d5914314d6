"""The versions that redcoast was tested with, and where they are written."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.core._versions import TESTED, installed_versions, untested, versions_tested
from redcoast.tracking._loggers import say_once

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("package", [name for name in TESTED[0] if name != "Python"])
def test_the_oldest_versions_are_the_lower_bounds_of_the_project(package):
    (requirement,) = [x for x in PROJECT["dependencies"] if re.match(rf"{package}\W", x)]
    assert requirement == f"{package}>={TESTED[0][package]}"


def test_the_classifiers_name_the_tested_pythons():
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    named = [x[1] for text in PROJECT["classifiers"] if (x := re.fullmatch(pattern, text))]
    assert named == sorted({environment["Python"] for environment in TESTED})
    assert PROJECT["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("page", ["README.md", "docs/upgrading.md"])
def test_pages_name_the_tested_versions(page):
    text = " ".join((ROOT / page).read_text().split())
    for environment in TESTED[1:]:
        assert f"Python {environment['Python']} with JAX {environment['jax']}" in text


def test_untested_versions_are_named():
    installed = dict(TESTED[1])
    assert untested(installed) == []
    assert untested(installed | {"optax": "9.9"}) == [f"optax 9.9 (tested: {TESTED[1]['optax']})"]
    assert installed_versions().keys() == installed.keys()
    assert versions_tested("jax").endswith(f" and {TESTED[-1]['jax']}")


def test_a_run_from_the_source_needs_no_installation(monkeypatch, tmp_path, capsys):
    version = metadata.version

    def of_others(package):
        if package == "redcoast":
            raise metadata.PackageNotFoundError(package)
        return version(package)

    say_once.cache_clear()
    monkeypatch.setattr(metadata, "version", of_others)
    loss_fn = lambda model, batch, key: jnp.mean(jnp.square(batch - model[None]))
    rows = np.ones((8, 2), np.float32)
    options = {"loss_fn": loss_fn, "batch_size": 8, "epochs": 1, "checkpoints": tmp_path}
    rc.fit(jnp.zeros(2), optax.sgd(0.1), rows, log=rc.progress_logger(), **options)
    assert "redcoast (not installed)" in capsys.readouterr().out
    assert rc.__version__ == "(not installed)"
    assert (tmp_path / "checkpoints" / "1").is_dir()
