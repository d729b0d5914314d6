"""The logger for trackio, with a module that has trackio's interface, and with trackio itself."""

import importlib
import inspect
import json
import math
import sys
import types
from typing import Any

import pytest

import redcoast as rc


class Run:
    def __init__(self, **arguments):
        self.arguments, self.logged, self.finished = arguments, [], 0

    def log(self, metrics, step=None):
        assert not self.finished
        self.logged.append((metrics, step))

    def finish(self):
        self.finished += 1


@pytest.fixture
def runs(monkeypatch):
    made = []

    def init(**arguments):
        made.append(Run(**arguments))
        return made[-1]

    module: Any = types.ModuleType("trackio")
    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    return made


def test_a_run_and_its_resumption_have_one_name(runs, tmp_path):
    for resumed in (False, True):
        log = rc.trackio_logger(project="lm", config={"dim": 256}, group="a")
        run = rc.RunInfo(tmp_path / "first", resumed=resumed, plan="1 device", config={"rows": 32})
        with rc.metrics_reader([rc.progress_logger(False), log], run) as reader:
            reader.write({"eval/accuracy": 0.5}, 3)
        log.close()
    first, second = runs
    assert first.logged == second.logged == [({"eval/accuracy": 0.5}, 3)]
    assert first.finished == second.finished == 1
    config = {"dim": 256, "run": {"rows": 32}, "plan": "1 device"}
    shared = {"project": "lm", "name": "first", "group": "a", "config": config}
    assert first.arguments == shared
    assert second.arguments == shared | {"resume": "allow"}
    kept = json.loads((tmp_path / "first" / "trackio.json").read_text())
    assert kept == {"name": "first", "project": "lm"}


def test_metrics_without_a_run(runs):
    log = rc.trackio_logger(project="lm", name="mine")
    log({"loss": math.nan}, 1)
    log.close()
    assert runs[0].arguments["name"] == "mine"
    assert math.isnan(runs[0].logged[0][0]["loss"])


def test_bad_arguments(runs):
    with pytest.raises(TypeError, match="`config` is of type int"):
        rc.trackio_logger(project="lm", config=3)


def test_without_trackio_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "redcoast\[trackio\]"'):
        rc.trackio_logger(project="lm")


@pytest.mark.integration
def test_trackio_reads_what_was_logged(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert "resume" in inspect.signature(trackio.init).parameters
    log = rc.trackio_logger(project="lm", name="mine", auto_log_cpu=False)
    log({"loss": 2.5}, 7)
    log.close()
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    (entry,) = storage.get_logs("lm", "mine")
    assert (entry["loss"], entry["step"]) == (2.5, 7)
