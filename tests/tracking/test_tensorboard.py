"""Event files for TensorBoard."""

import struct
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import redcoast as rc


def read_values(file: Path) -> dict[tuple[str, int], Any]:
    """Reads an event file as TensorBoard does: the length, a checksum, an event, a checksum."""
    events: Any = import_module("tensorboardX.proto.event_pb2")
    content, values = file.read_bytes(), {}
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event: Any = events.Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]
        values |= {(value.tag, event.step): value for value in event.summary.value}
    return values


def test_metrics_and_the_plan_are_read_back_from_the_event_file(tmp_path):
    log = rc.tensorboard_logger(tmp_path / "events")
    run = rc.RunInfo(plan="1 device", config={"batch_size": 32})
    with rc.metrics_reader([rc.progress_logger(False), log], run) as reader:
        reader.write({"eval/accuracy": 0.5}, 3)
        reader.write({"eval/accuracy": 0.75}, 6)
    (file,) = (tmp_path / "events").iterdir()
    values = read_values(file)
    assert [values["eval/accuracy", step].simple_value for step in (3, 6)] == [0.5, 0.75]
    texts = {tag: value.tensor.string_val for (tag, _), value in values.items()}
    assert any(b"1 device" in text for texts in texts.values() for text in texts)
    assert any(tag.startswith("config/batch_size") for tag in texts)


def test_without_the_package_the_error_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "redcoast\[tensorboard\]"'):
        rc.tensorboard_logger(tmp_path)
