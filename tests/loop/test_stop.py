"""What stops a run: signals, sent to real processes, and the time."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import optax
import pytest
from paths import HELPERS
from problem import collate_fn, fit_quietly, loss_fn, make_examples, make_model

import redcoast as rc
from redcoast.loop import _stop as _signals
from redcoast.loop._stop import STOPPED, stop_signals

SCRIPT = """
import sys, time
import optax
import redcoast as rc
from problem import collate_fn, loss_fn, make_examples, make_model

def slow(examples):
    time.sleep(float(sys.argv[2]))
    return collate_fn(examples)

def log(metrics, step):
    print(step, flush=True)
    if step == int(sys.argv[4]):
        time.sleep(1000)

print("ready", flush=True)
state = rc.fit(
    make_model(), optax.sgd(0.1), make_examples(64), collate_fn=slow, loss_fn=loss_fn,
    batch_size=8, steps=int(sys.argv[3]),
    checkpoints=rc.Checkpoints(sys.argv[1], every=1000),
    log=[rc.progress_logger(False), log],
)
sys.exit(75 if state.step < int(sys.argv[3]) else 0)
"""


def start(directory, slow=0.05, steps=1000, hang_at=0):
    command = [sys.executable, "-c", SCRIPT, *map(str, (directory, slow, steps, hang_at))]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        command,
        cwd=HELPERS,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process, step):
    for line in process.stdout:
        if line.strip() == str(step):
            return
    raise AssertionError(process.stderr.read())


def last_checkpoint(directory):
    return max(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdigit())


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.faults),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.integration),
        pytest.param(signal.SIGHUP, marks=pytest.mark.faults),
    ],
)
def test_a_signal_ends_a_process_with_a_checkpoint_and_the_code_to_run_it_again(tmp_path, number):
    process = start(tmp_path)
    wait_for_step(process, 3)
    # As `timeout` does, which sends to the process and to its group.
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=900)
    assert process.returncode == STOPPED == 75
    assert f"{number.name} was received: training stops" in err
    step = last_checkpoint(tmp_path)
    # Every step that is in the checkpoint was logged before the process ended.
    assert step >= 4
    assert str(step) in out.split()

    again = start(tmp_path, slow=0.0, steps=step + 3)
    out, err = again.communicate(timeout=900)
    assert (again.returncode, out.split()) == (0, ["ready", *map(str, range(step + 1, step + 4))])


@pytest.mark.integration
def test_a_second_signal_stops_at_once(tmp_path):
    process = start(tmp_path, hang_at=3)
    wait_for_step(process, 3)
    # The step does not end. Signals that come right after the first are the same, sent twice.
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.25)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


def fit(**options):
    return fit_quietly(
        make_model(),
        optax.sgd(0.1),
        make_examples(64),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=8,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        **options,
    )


def test_time_is_up(tmp_path, caplog):
    begin = time.monotonic()
    state = fit(steps=10**6, max_seconds=1.5, checkpoints=rc.Checkpoints(tmp_path))
    assert time.monotonic() - begin >= 1.5
    assert 1 <= state.step < 10**6
    assert last_checkpoint(tmp_path) == state.step
    assert "`max_seconds=1.5` have passed: training stops" in caplog.text
    # However little time there is, a run gets on.
    again = fit(steps=10**6, max_seconds=1e-9, checkpoints=rc.Checkpoints(tmp_path))
    assert again.step == state.step + 1


def test_time_that_ends_with_the_last_step_is_no_stop(caplog):
    assert fit(steps=1, max_seconds=1e-9).step == 1
    assert "Training stopped" not in caplog.text


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_at_all(seconds):
    with pytest.raises(ValueError, match="`max_seconds` is"):
        fit(steps=1, max_seconds=seconds)


def test_a_signal_that_the_script_handles_stays_its_own():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        with stop_signals() as stopping:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not stopping()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1]


def test_a_hangup_is_heard_once_and_then_ignored(monkeypatch):
    """The shell and the kernel each send one, which is not a request to end at once."""
    monkeypatch.setattr(_signals, "TWICE", 0.0)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with stop_signals() as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert stopping()
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert not stopping()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    before = list(map(signal.getsignal, numbers))
    with stop_signals() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stopping()
        assert list(map(signal.getsignal, numbers[:3])) == before[:3]
    with stop_signals() as stopping:
        assert not stopping()
    assert list(map(signal.getsignal, numbers)) == before


def test_a_second_interrupt_is_an_exception(monkeypatch):
    monkeypatch.setattr(_signals, "TWICE", 0.0)
    # A shell lets what it runs in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop_signals() as stopping:
            signal.raise_signal(signal.SIGINT)
            assert stopping()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_there_is_the_time(monkeypatch):
    found = []

    def work():
        with stop_signals(3600) as stopping:
            found.append(stopping())
        with stop_signals(0.001) as stopping:
            time.sleep(0.01)
            found.append(stopping())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, True]


def test_a_notice_of_jax_is_heard(monkeypatch, caplog):
    from jax.experimental import multihost_utils

    asked = []

    def notice(step):
        asked.append(step)
        return step == 3

    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", notice)
    assert fit(steps=9).step == 3
    assert asked == [1, 2, 3]
    assert "JAX received a preemption notice" in caplog.text

    def off(step):
        asked.append(step)
        raise RuntimeError("not initialized")

    asked.clear()
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", off)
    assert fit(steps=3).step == 3
    assert asked == [1]
