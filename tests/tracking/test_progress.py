import contextlib
import functools
import inspect
import io
import logging
import os
import sys
import time

import pytest
from counting import count_calls

from redcoast.tracking import _progress
from redcoast.tracking._progress import ProgressLogger


class Terminal(io.StringIO):
    """A terminal that stores the last version of each line."""

    def isatty(self):
        return True

    def screen(self):
        rows = [""]
        for part in self.getvalue().replace("\n", "\n\r").split("\r"):
            row = rows[-1]
            rows[-1] = part.rstrip("\n") + row[len(part.rstrip("\n")) :]
            if part.endswith("\n"):
                rows.append("")
        return [row.rstrip() for row in rows if row.strip()]


def progress(total, *, start=0, enabled=None, file=None, steps_per_epoch=None):
    bar = ProgressLogger(enabled, file)
    bar.begin(total, start, steps_per_epoch=steps_per_epoch)
    return bar


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only when a test sets it."""
    now = [1000.0]
    monkeypatch.setattr(_progress, "perf_counter", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    return sleep


def test_lines_off_a_terminal(clock):
    file = io.StringIO()
    bar = progress(1000, file=file)
    clock(60.0)  # compilation
    for step in range(1, 81):
        bar.update(step, {"loss": 2 / step}, 32)
        clock(1.0)
    bar.close()
    lines = file.getvalue().splitlines()
    assert lines[0] == "step 20/1,000  loss 0.1  32 examples/s  16:20 left"
    assert lines[-1].startswith("step 80/1,000  loss 0.025  ")
    assert len(lines) == 4


@pytest.mark.parametrize("seconds", [0.001, 7.0])
def test_lines_of_a_run_are_at_equal_steps(clock, seconds):
    file = io.StringIO()
    bar = progress(200, file=file)
    for step in range(1, 201):
        bar.update(step, {"loss": 2 / step}, 32)
        clock(seconds)
    bar.close()
    steps = [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]
    assert steps == [*range(5, 201, 5)]


def test_run_of_long_steps_is_not_silent(clock):
    file = io.StringIO()
    bar = progress(20_000, file=file)
    for step in range(1, 12):
        bar.update(step, {}, 32)
        clock(100.0)
    assert [line.split("/")[0] for line in file.getvalue().splitlines()] == [
        f"step {step}" for step in (4, 7, 10)
    ]


def test_throughput_excludes_pauses_and_compilation(clock):
    file = io.StringIO()
    bar = progress(None, file=file)
    clock(100.0)
    for step in range(1, 11):
        bar.update(step, {}, 1000)
        bar.pause()
        clock(50.0)
        bar.pause()  # for example a save during an evaluation
        bar.resume()
        clock(0.5)
    bar.close()
    rates = [line.split("  ")[1] for line in file.getvalue().splitlines()]
    assert set(rates) <= {"2,000 examples/s", "1,800 examples/s"}
    assert len(rates) > 2


def test_throughput_is_averaged_over_half_a_minute(clock):
    file = Terminal()
    bar = progress(None, file=file)
    for step in range(1, 121):
        bar.update(step, {}, 10)
        clock(1.0 if step < 60 else 0.1)
    bar.close()
    assert "10 examples/s" in file.getvalue()
    # 85 steps in 31 seconds; over the entire run it would be 18 per second.
    rate = float(file.screen()[-1].split()[2])
    assert rate == pytest.approx(27.7, abs=0.5)


def test_weights_count_tokens(clock):
    file = io.StringIO()
    with contextlib.closing(progress(20, file=file)) as bar:
        for step in range(1, 11):
            bar.update(step, {"loss": 1.0, "weight": 4096.0}, 4)
            clock(0.25)
    assert file.getvalue().splitlines()[-1] == "step 10/20  loss 1  16,384 tokens/s  0:02 left"


def test_bar_on_a_terminal(clock):
    file = Terminal()
    bar = progress(100, start=40, file=file)
    assert "step 40/100" in file.getvalue()
    for step in range(41, 99):
        bar.update(step, {"loss": 0.5}, 8)
        clock(0.5)
    bar.close()
    bar.close()
    (line,) = file.screen()
    assert line.startswith("step 98/100 |")
    assert line.endswith("| 98%, loss 0.5, 16 examples/s, 0:01 left")


def test_epoch_is_shown_where_there_is_room(clock, monkeypatch):
    for columns, shown in ((80, True), (66, False)):
        monkeypatch.setattr(sys, "stderr", file := Terminal())
        monkeypatch.setenv("COLUMNS", str(columns))
        bar = progress(1000, enabled=True, steps_per_epoch=250)
        assert bar._bar is not None
        bar._bar.ncols, bar._bar.dynamic_ncols = columns, None
        for step in range(1, 600):
            bar.update(step, {"loss": 0.5}, 8)
            clock(0.5)
        bar.close()
        assert ("epoch 2.4" in file.screen()[-1]) == shown
        assert "loss 0.5" in file.screen()[-1]
        assert max(map(len, file.screen())) <= columns


def test_bar_on_a_terminal_that_reports_no_width():
    reader, writer = os.openpty()  # 0 rows and 0 columns
    with os.fdopen(writer, "w") as file, contextlib.closing(progress(10, file=file)) as bar:
        bar.evaluating(4)
        bar.advance()
        bar.update(10, {"loss": 0.5}, 8)
    text = b""
    with os.fdopen(reader, "rb", buffering=0) as screen, contextlib.suppress(OSError):
        while part := screen.read(10_000):  # Linux raises an error at the end
            text += part
    lines = text.decode().split("\r")
    assert any(line.startswith("evaluating 0/4 |") for line in lines)
    assert any(line.startswith("step 10/10 |") and "loss 0.5" in line for line in lines)
    assert max(map(len, map(str.strip, lines))) == 79


def test_evaluation_has_its_own_bar(clock):
    file = Terminal()
    with contextlib.closing(progress(100, file=file)) as bar:
        bar.update(1, {"loss": 0.5}, 8)
        bar.pause()
        bar.evaluating(20)
        for _ in range(20):
            bar.advance()
        bar.resume()
        clock(1.0)
        bar.update(2, {"loss": 0.25}, 8)
    assert "evaluating 0/20" in file.getvalue()
    (line,) = file.screen()
    assert line.startswith("step 2/100")


def test_warnings_have_lines_of_their_own(clock):
    file = Terminal()
    handler = logging.StreamHandler(file)
    _progress.logger.addHandler(handler)
    try:
        with contextlib.closing(progress(100, file=file)) as bar:
            bar.update(1, {"loss": 0.5}, 8)
            _progress.logger.warning("Careful.")
            clock(1.0)
            bar.update(2, {"loss": 0.25}, 8)
        filters = list(_progress.logger.filters)
    finally:
        _progress.logger.removeHandler(handler)
    assert file.screen()[0] == "Careful."
    assert file.screen()[1].startswith("step 2/100")
    assert filters == []


def test_bar_is_drawn_at_most_every_tenth_of_a_second(clock):
    file = Terminal()
    bar = progress(None, file=file)
    for step in range(1, 1001):
        bar.update(step, {}, 1)
        clock(0.001)
    drawn = file.getvalue().count("step")
    bar.close()
    assert 5 < drawn < 25


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_nothing_when_off(kind, clock):
    file = kind()
    with contextlib.closing(progress(10, enabled=False, file=file)) as bar:
        for step in range(1, 11):
            bar.update(step, {"loss": 1.0}, 1)
            clock(10.0)
    assert file.getvalue() == ""


def test_enabled_always_draws_a_bar(clock):
    file = io.StringIO()
    with contextlib.closing(progress(10, enabled=True, file=file)) as bar:
        bar.update(1, {"loss": 1.0}, 1)
    assert "10%" in file.getvalue()


def test_error_in_the_loop_shows_the_last_step(clock):
    file = io.StringIO()

    def loop():
        with contextlib.closing(progress(10, file=file)) as bar:
            bar.update(3, {"loss": float("nan")}, 1)
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        loop()
    assert file.getvalue() == "step 3/10  loss nan\n"


def test_prints_nothing_without_a_step():
    file = io.StringIO()
    progress(10, file=file).close()
    assert file.getvalue() == ""


def test_writes_to_standard_error_by_default(capsys):
    with contextlib.closing(progress(10)) as bar:
        bar.update(1, {}, 1)
    assert capsys.readouterr() == ("", "step 1/10\n")


def test_overhead_of_a_step_without_output(clock):
    bar = progress(10**9, enabled=True, file=io.StringIO())
    metrics = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, "weight": 100.0}
    bar.update(1, metrics, 32)
    # Without the runtime type checker, as for users.
    update = functools.partial(inspect.unwrap(ProgressLogger.update), bar, 2, metrics, 32)
    calls = count_calls(lambda: [update() for _ in range(100)])
    bar.close()
    # `update`, the lookup of the weight, and the clock, which is a Python function here.
    assert calls < 5 * 100


def test_real_time():
    file = io.StringIO()
    begin = time.perf_counter()
    with contextlib.closing(progress(5, file=file)) as bar:
        for step in range(1, 6):
            time.sleep(0.02)
            bar.update(step, {}, 1)
    most = time.perf_counter() - begin
    rate = float(file.getvalue().splitlines()[-1].split("  ")[1].split()[0])
    # Four steps after the first, of at least 0.02 s each, within the measured time.
    assert 0.99 * 4 / most < rate < 51
