"""TensorBoard and trackio that raise, hang or are slow, as modules that have their interfaces."""

import sys
import threading
import time
import types
from typing import Any

import pytest

import redcoast as rc


class Service:
    """The writer of tensorboardX, and the run of trackio, whose methods do as a test specifies."""

    def __init__(self, **faults):
        self.faults, self.logged, self.closed = faults, [], False

    def begin(self, *_, **__):
        self.faults.get("begin", lambda: None)()
        return self

    def log(self, metrics, step):
        self.faults.get("log", lambda: None)()
        self.logged.append((metrics, step))

    def add_scalar(self, tag, scalar_value, global_step):
        self.log({tag: scalar_value}, global_step)

    def add_text(self, tag, text_string, global_step):
        pass

    def close(self):
        self.faults.get("close", lambda: None)()
        self.closed = True

    finish = close


@pytest.fixture(params=["TensorBoard", "trackio"])
def service_and_logger(request, monkeypatch, tmp_path):
    """The name of a service, and a function that returns its logger."""

    def install(service):
        module: Any = types.ModuleType("service")
        module.SummaryWriter = module.init = service.begin
        monkeypatch.setitem(sys.modules, "tensorboardX", module)
        monkeypatch.setitem(sys.modules, "trackio", module)
        if request.param == "trackio":
            return rc.trackio_logger(project="lm")
        return rc.tensorboard_logger(tmp_path)

    return request.param, install


def log_run(log):
    """As `fit` does."""
    run = rc.RunInfo(plan="1 device", config={"batch_size": 32})
    with rc.metrics_reader([rc.progress_logger(False), log], run) as reader:
        for step in range(1, 51):
            reader.write({"eval/loss": float(step)}, step)


@pytest.mark.parametrize("name", ["begin", "log", "close"])
def test_an_error_is_one_warning(service_and_logger, caplog, name):
    service_name, logger_of = service_and_logger

    def fail():
        raise OSError("no space left on device")

    service = Service(**{name: fail})
    log = logger_of(service)
    log_run(log)
    log({"loss": 1.0}, 51)
    log.close()
    (record,) = caplog.records
    assert f"{service_name} failed (OSError: no space left on device)" in record.message
    logged = {"begin": 0, "log": 0, "close": 50}
    assert len(service.logged) == logged[name]


@pytest.mark.parametrize("name", ["begin", "log", "close"])
def test_no_step_waits_and_the_end_waits_for_a_limited_time(service_and_logger, caplog, name):
    """tensorboardX waits forever for its thread, which has ended if the disk is full."""
    service_name, logger_of = service_and_logger
    over = threading.Event()
    log = logger_of(Service(**{name: over.wait}))
    log._thread._close_timeout = 0.2
    log_run(log)  # it would not return if a step waited
    over.set()
    (record,) = caplog.records
    assert f"{service_name} did not finish within 0.2 seconds" in record.message


def test_all_metrics_arrive_in_order_however_slow_it_is(service_and_logger, caplog):
    _, logger_of = service_and_logger
    service = Service(log=lambda: time.sleep(0.002))
    log_run(logger_of(service))
    assert service.logged == [({"eval/loss": float(step)}, step) for step in range(1, 51)]
    assert service.closed
    assert not caplog.records
