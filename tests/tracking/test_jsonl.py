import functools
import inspect
import json
import math
import resource

import jax.numpy as jnp
import numpy as np
import pytest
from counting import count_calls

from redcoast import jsonl_logger, read_metrics
from redcoast.tracking._jsonl import JsonlLogger


def test_each_call_is_a_line_on_disk(tmp_path):
    path = tmp_path / "runs" / "lm" / "metrics.jsonl"
    log = jsonl_logger(path)
    log({"loss": 2.5, "skipped": 0}, 1)
    # Before the file is closed, so a kill loses nothing.
    entry = json.loads(path.read_text())
    assert abs(entry.pop("time") - path.stat().st_mtime) < 5
    assert entry == {"step": 1, "loss": 2.5, "skipped": 0}
    log({"eval/loss": 0.1}, 1)
    log.close()
    assert path.read_text().count("\n") == 2


def test_reads_back_what_was_written(tmp_path):
    log = jsonl_logger(tmp_path / "metrics.jsonl")
    log({"loss": np.float32(0.5), "norm": jnp.float32(0.25)}, 1)
    log({"loss": float("nan"), "norm": float("inf")}, 2)
    log({"loss": 1 / 3}, 3)
    log.close()
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["loss"], first["norm"]) == (0.5, 0.25)
    assert math.isnan(second["loss"])
    assert second["norm"] == math.inf
    assert third["loss"] == 1 / 3


def test_appends_after_an_incomplete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = jsonl_logger(path)
    for step in (1, 2, 3):
        log({"loss": float(step), "norm": 1.0}, step)
    log({"eval/loss": 7.0}, 2)
    log.close()
    path.write_bytes(path.read_bytes() + b'{"step": 4, "ti')

    # The run resumes at step 1, and repeats the others.
    log = jsonl_logger(path)
    for step in (2, 3, 4):
        log({"loss": step / 10}, step)
    log.close()
    entries = read_metrics(path)
    for entry in entries:
        del entry["time"]
    assert entries == [
        {"step": 1, "loss": 1.0, "norm": 1.0},
        {"step": 2, "loss": 0.2, "norm": 1.0, "eval/loss": 7.0},
        {"step": 3, "loss": 0.3, "norm": 1.0},
        {"step": 4, "loss": 0.4},
    ]
    assert path.read_text().splitlines()[4] == '{"step": 4, "ti'


def test_reopening_a_complete_file_adds_no_empty_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        log = jsonl_logger(path)
        log({"loss": 1.0}, step)
        log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_logger_is_used_again_after_it_was_closed(tmp_path, monkeypatch):
    """As for a second run, after `fit` has closed the loggers of the first."""
    monkeypatch.chdir(tmp_path)
    log = jsonl_logger("metrics.jsonl")
    log({"loss": 1.0}, 1)
    log.close()
    monkeypatch.chdir("/")
    log({"loss": 2.0}, 2)
    log.close()
    log.close()
    assert [entry["loss"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0]


def test_sorts_by_step_and_skips_invalid_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10}\n[1]\n{"loss": 1}\n\xff\xfe{\n\n{"step": 9}\n')
    assert read_metrics(path) == [{"step": 9}, {"step": 10}]


def test_a_full_disk_is_one_warning(caplog):
    log = jsonl_logger("/dev/full")
    for step in (1, 2, 3):
        log({"loss": 1.0}, step)
    log.close()
    (record,) = caplog.records
    assert "The metrics of step 1 could not be written to /dev/full" in record.getMessage()
    assert "No space left" in record.getMessage()


def test_logging_resumes_after_a_full_disk(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    log = jsonl_logger(path)
    log({"loss": 1.0}, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # There is space for a part of the next line.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        for step in (2, 3):
            log({"loss": 1.0}, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for step in (4, 5):
        log({"loss": 1.0}, step)
    log.close()
    assert [entry["step"] for entry in read_metrics(path)] == [1, 4, 5]
    assert len(caplog.records) == 1


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises((FileExistsError, NotADirectoryError), match="runs"):
        jsonl_logger(tmp_path / "runs" / "metrics.jsonl")


def test_overhead_of_a_line(tmp_path):
    log = jsonl_logger(tmp_path / "metrics.jsonl")
    metrics = {"loss": 1.2345678, "grad_norm": 0.7654321, "learning_rate": 3e-4, "skipped": 0.0}
    # Without the runtime type checker, as for users.
    call = functools.partial(inspect.unwrap(JsonlLogger.__call__), log, metrics, 1000)
    calls = count_calls(lambda: [call() for _ in range(100)])
    log.close()
    # Eleven calls, most of them in the encoder; none flushes, seeks or opens.
    assert calls < 15 * 100
