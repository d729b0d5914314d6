"""What stops a run: signals, sent to real processes, and the time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from paths import HELPERS
from problem import collate_fn, fit_quietly, loss_fn, make_examples, make_model, predict_fn

import redcoast as rc
from redcoast.loop import _stop as _signals
from redcoast.loop._stop import (
    ASKED,
    GO_ON,
    INTERRUPT,
    STOP,
    STOPPED,
    StopRequest,
    agreed,
    stop_signals,
)

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


IN_NATIVE_CODE = """
import signal
import jax, optax
import redcoast as rc
from problem import collate_fn, loss_fn, make_examples, make_model

# A shell lets what it runs in the background ignore interrupts, which processes inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

def slow_loss(model, batch, key):
    loss, aux = loss_fn(model, batch, key)
    jax.debug.callback(lambda: print("running", flush=True))
    # Minutes of one program, as long to wait for as a compilation.
    start = jax.lax.stop_gradient(loss) + jax.numpy.zeros(1000)
    spun = jax.lax.fori_loop(0, 2**31 - 1, lambda i, x: jax.numpy.sin(x + i), start)
    return loss + 0 * spun.sum(), aux

rc.fit(
    make_model(), optax.sgd(0.1), make_examples(64), collate_fn=collate_fn, loss_fn=slow_loss,
    batch_size=8, steps=3, log=False,
)
"""


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_waits_for_a_program(number):
    """Python's handlers do not run there: neither signal had any effect until the program ended."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    process = subprocess.Popen(
        [sys.executable, "-c", IN_NATIVE_CODE],
        cwd=HELPERS,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    time.sleep(1)  # until it waits
    process.send_signal(number)
    time.sleep(0.5)
    code_after_first = process.poll()
    process.send_signal(number)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert (code_after_first, process.returncode) == (None, 128 + number)


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
    with rc.stop_on_signal(1.5):
        state = fit(steps=10**6, checkpoints=rc.Checkpoints(tmp_path))
    assert time.monotonic() - begin >= 1.5
    assert 1 <= state.step < 10**6
    assert last_checkpoint(tmp_path) == state.step
    assert "`max_seconds=1.5` have passed: training stops" in caplog.text
    # However little time there is, a run gets on.
    with rc.stop_on_signal(1e-9):
        again = fit(steps=10**6, checkpoints=rc.Checkpoints(tmp_path))
    assert again.step == state.step + 1


def test_time_that_ends_with_the_last_step_is_no_stop(caplog):
    with rc.stop_on_signal(1e-9):
        assert fit(steps=1).step == 1
    assert "Training stopped" not in caplog.text


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_at_all(seconds):
    with pytest.raises(ValueError, match="`max_seconds` is"), rc.stop_on_signal(seconds):
        fit(steps=1)


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


def test_a_forked_process_ends_at_its_first_signal():
    """As the processes of `multiprocessing.Pool` do, whose `terminate` waits for them."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with stop_signals() as stopping:
            reading, writing = os.pipe()
            with warnings.catch_warnings(action="ignore"):  # of JAX, whose threads are not forked
                child = os.fork()
            if child == 0:
                os.write(writing, b"ready")
                time.sleep(60)
                os._exit(0)
            os.read(reading, 5)
            os.close(reading)
            os.close(writing)
            os.kill(child, signal.SIGTERM)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
            assert not stopping()
    finally:
        signal.signal(signal.SIGTERM, before)


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
    actual = []

    def work():
        with stop_signals(3600) as stopping:
            actual.append(stopping())
        with stop_signals(0.001) as stopping:
            time.sleep(0.01)
            actual.append(stopping())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert actual == [False, True]


@pytest.mark.thorough
def test_a_notice_of_jax_is_heard(monkeypatch, caplog, received):
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
    received.clear()
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", off)
    assert fit(steps=3).step == 3
    assert asked == [1]


@pytest.fixture
def received(monkeypatch):
    """Signals that earlier runs of this process received."""
    monkeypatch.setattr(_signals, "_received", actual := [])
    monkeypatch.setattr(_signals, "TWICE", 0.0)
    return actual


def signal_at(step, number):
    return lambda metrics, now: signal.raise_signal(number) if now == step else None


def handled(number):
    """Gives a signal the effect that it has at the start of Python."""
    before = signal.getsignal(number)
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL

    @contextlib.contextmanager
    def context():
        signal.signal(number, default)
        try:
            yield
        finally:
            signal.signal(number, before)

    return context()


def evaluate():
    options = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 8}
    return rc.evaluate(make_model(), make_examples(16), **options)


def predict():
    options = {"collate_fn": collate_fn, "predict_fn": predict_fn, "batch_size": 8}
    return rc.predict_examples(make_model(), make_examples(16), **options)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_nothing_begins_after_a_signal_cut_a_run_short(received, caplog, number):
    """A script that goes on would take the model for a trained one."""
    with handled(number):
        state = fit(steps=9, log=signal_at(3, number))
    assert 3 <= state.step < 9
    assert f"Training stopped after step {state.step} of 9: {number.name}" in caplog.text
    others = {"fit": lambda: fit(steps=2), "evaluate": evaluate, "predict": predict}
    for name, begin in others.items():
        with pytest.raises(RuntimeError, match=f"{number.name} was received .* of 9, so `{name}"):
            begin()
    with rc.stop_on_signal():  # the caller handles signals
        assert fit(steps=2).step == 2
        evaluate()


@pytest.mark.thorough
def test_a_caller_who_handles_signals_goes_on(received):
    with handled(signal.SIGTERM), rc.stop_on_signal() as stopping:
        state = fit(steps=9, log=signal_at(3, signal.SIGTERM))
        assert stopping()
    assert state.step < 9
    assert fit(steps=2).step == 2


def test_a_signal_in_an_evaluation_ends_it_and_the_resumed_run_makes_it(received, tmp_path):
    """An evaluation may take longer than the time that a scheduler gives after its signal."""

    def run(**evaluated):
        logged = {}
        evaluation = rc.Evaluation(make_examples(64), every=2, **evaluated)
        state = fit(
            steps=4,
            evaluation=evaluation,
            checkpoints=rc.Checkpoints(tmp_path, every=100),
            log=lambda metrics, step: logged.setdefault(step, {}).update(metrics),
        )
        return state, logged

    seen = []

    def interrupting(examples):
        # The second of eight batches; the first are read by a rehearsal, and after the first step.
        seen.append(examples[0]["index"])
        if seen.count(0) == 3 and seen[-1] == 8:
            signal.raise_signal(signal.SIGTERM)
        return collate_fn(examples)

    state, logged = run(collate_fn=interrupting)
    assert int(state.step) == last_checkpoint(tmp_path) == 2
    assert "eval/loss" not in logged[2]
    assert seen[-1] < 56
    received.clear()
    state, logged = run()
    assert int(state.step) == 4
    assert [step for step in logged if "eval/loss" in logged[step]] == [2, 4]


@pytest.mark.thorough
def test_a_signal_in_the_last_step_lets_that_run_end_and_no_other_begin(received):
    with handled(signal.SIGTERM):
        assert fit(steps=3, log=signal_at(3, signal.SIGTERM)).step == 3
    evaluate()  # the model is fully trained
    with pytest.raises(RuntimeError, match="SIGTERM was received during an earlier `fit`"):
        fit(steps=2)


@pytest.mark.parametrize("level", [ASKED, STOP, INTERRUPT])
def test_processes_agree_on_the_level_one_call_later(level):
    """As several processes do; here one process fills all parts."""
    levels = iter([GO_ON, level, GO_ON])
    request = agreed(rc.make_mesh(), StopRequest(lambda _: next(levels), []))
    assert [request(), request(), request()] == [False, False, True]
    assert request.level == level


def test_processes_agree_only_after_the_step():
    """After a failed step, Gloo would pair an all-reduce with the step's in other processes."""
    mesh = rc.make_mesh()
    request = agreed(mesh, StopRequest(lambda _: GO_ON, []))
    of_step = jax.device_put(1.0, NamedSharding(mesh, P()))
    assert not request(of_step)
    of_step.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        request(of_step)


@pytest.mark.thorough
@pytest.mark.parametrize("at", [3, 9])
def test_an_interrupt_saves_and_is_raised(received, tmp_path, at):
    with handled(signal.SIGINT), pytest.raises(KeyboardInterrupt, match="after step") as error:
        fit(
            steps=9,
            log=signal_at(at, signal.SIGINT),
            checkpoints=rc.Checkpoints(tmp_path, every=100),
        )
    saved = last_checkpoint(tmp_path)
    assert saved in ((9,) if at == 9 else (4, 5))
    assert str(tmp_path / "checkpoints" / str(saved)) in str(error.value)
    # A notebook goes on after it, with the same run or another one.
    assert fit(steps=9, checkpoints=rc.Checkpoints(tmp_path)).step == 9


def test_a_caller_who_handles_an_interrupt_gets_the_state(received):
    with handled(signal.SIGINT), rc.stop_on_signal():
        state = fit(steps=9, log=signal_at(3, signal.SIGINT))
    assert 3 <= state.step < 9
