"""The throughput and other figures of steps, with a clock of the test's own."""

import dataclasses

import jax
import pytest

import redcoast as rc
from redcoast.tracking._rates import Rates

RUN = rc.RunInfo(config={"batch_size": 32, "examples": 64})


@dataclasses.dataclass
class Clock:
    now: float = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_throughput_and_epoch_of_each_step_but_the_first(clock):
    rates = Rates(RUN, clock)
    clock.now += 60  # compilation
    assert rates(1, {"loss": 1.0}) == {"epoch": 0.5}
    clock.now += 0.5
    actual = {"epoch": 1.0, "step_seconds": 0.5, "examples_per_second": 64.0}
    assert rates(2, {"loss": 1.0}) == actual
    clock.now += 0.5
    assert rates(3, {"weight": 100.0})["tokens_per_second"] == 200
    assert rates(3, {})["epoch"] == 1.5  # no time passed


def test_evaluations_do_not_count(clock):
    rates = Rates(RUN, clock)
    rates.pause()
    rates.resume()
    rates(1, {})
    clock.now += 0.25
    rates.pause()
    clock.now += 100
    rates.resume()
    clock.now += 0.25
    assert rates(2, {})["step_seconds"] == 0.5


def test_memory_and_utilisation_where_they_are_known(clock, monkeypatch):
    class Device:
        def memory_stats(self):
            return {"peak_bytes_in_use": 5_000_000_000}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    rates = Rates(rc.RunInfo(config={"seconds_at_peak": 0.3}), clock)
    rates(1, {})
    clock.now += 0.5
    actual = {"peak_memory_gb": 5.0, "step_seconds": 0.5, "mfu": 0.6}
    assert rates(2, {}) == pytest.approx(actual)


def test_only_loggers_that_want_them_get_them(tmp_path):
    seen = []
    with rc.metrics_reader(
        [rc.progress_logger(False), lambda metrics, step: seen.append(metrics)],
        dataclasses.replace(RUN, directory=tmp_path),
    ) as reader:
        for step in (1, 2, 3):
            reader.push(step, {"loss": jax.numpy.float32(1.0)})
    assert seen == [{"loss": 1.0}] * 3
    rows = rc.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0.5, 1.0, 1.5]
    assert "step_seconds" not in rows[0]
    assert rows[2]["examples_per_second"] > 0
