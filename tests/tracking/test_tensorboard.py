"""Event files for TensorBoard."""

import sys

import pytest

import redcoast as rc


def test_metrics_and_the_plan_are_in_the_event_file(tmp_path):
    pytest.importorskip("tensorboardX")
    log = rc.tensorboard_logger(tmp_path / "events")
    run = rc.RunInfo(plan="1 device", config={"batch_size": 32})
    with rc.metrics_reader([rc.progress_logger(False), log], run) as reader:
        reader.write({"eval/accuracy": 0.5}, 3)
    (file,) = (tmp_path / "events").iterdir()
    content = file.read_bytes()
    for text in (b"eval/accuracy", b"1 device", b"config/batch_size"):
        assert text in content


def test_without_the_package_the_error_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "redcoast\[tensorboard\]"'):
        rc.tensorboard_logger(tmp_path)
