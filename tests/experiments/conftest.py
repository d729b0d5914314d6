"""Fixtures for the tests of the experiments."""

import contextlib
import importlib
import re

import pytest
from paths import EXPERIMENTS

import redcoast as rc


@pytest.fixture
def script(monkeypatch):
    """Imports a script."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module


@pytest.fixture
def experiment(script, request):
    """The script that the test module names as `NAME`."""
    return script(request.module.NAME)


@pytest.fixture
def config(experiment, script, request, tmp_path):
    """Makes configurations with the options `SMALL` of the test module, and others."""

    def make(mesh="2x4", **options):
        run = script("_options").Run(mesh=mesh, directory=tmp_path)
        return experiment.Config(**request.module.SMALL | options, run=run)

    return make


@pytest.fixture
def refused(capsys):
    """A context in which a script ends with a message that fits, and the code of wrong options."""

    @contextlib.contextmanager
    def context(words):
        with pytest.raises(SystemExit) as stopped:
            yield
        assert stopped.value.code == 2
        assert re.search(words, capsys.readouterr().err)

    return context


@pytest.fixture
def short(script, monkeypatch):
    """For whole runs of few steps: not drawn is `run.png`, which has a test of its own."""
    monkeypatch.setattr(script("_plots"), "plot_run", lambda directory: None)


@pytest.fixture
def collectives(monkeypatch):
    """The kinds of collectives in the compiled step of an experiment with a loop of its own."""
    kinds = ("all-gather", "all-to-all", "collective-permute", "all-reduce")

    def sent(experiment, config):
        text = ""

        def run_learner(c, run, step, state, shardings, **options):
            nonlocal text
            text = rc.compile_step(step, shardings).lower(state).compile().as_text()
            raise KeyboardInterrupt

        monkeypatch.setattr(experiment, "run_learner", run_learner)
        with pytest.raises(KeyboardInterrupt):
            experiment.main(config)
        return [kind for kind in kinds if f" {kind}" in text]

    return sent
