"""What comes out when the user's functions raise, a worker dies, or a device has no memory left."""

import dataclasses
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import (
    Stream,
    arrays,
    collate_fn,
    fit_quietly,
    loss_fn,
    make_examples,
    make_model,
    metric_fn,
    predict_fn,
)

import redcoast as rc

EXAMPLES = make_examples(64)
ONE: dict[str, Any] = {"devices": jax.devices()[:1]}


class Broken(Exception):
    """An error of the user's own."""


def fit(**options):
    options = {
        "examples": EXAMPLES,
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": 8,
        "steps": 16,
        "mesh": rc.make_mesh(**ONE),
    } | options
    return fit_quietly(make_model(), optax.sgd(0.1), **options)


def failing(fn, when):
    """The function, raising at the call that `when` names."""
    calls = iter(range(1, 10**6))

    def call(*args, **kwargs):
        if next(calls) == when:
            raise Broken("no such file")
        return fn(*args, **kwargs)

    return call


def notes(error):
    return "\n".join(getattr(error, "__notes__", []))


def saved(directory):
    path = directory / "checkpoints"
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit()) if path.exists() else []


def data_threads():
    """Those that are there after a moment: they end without being waited for."""
    deadline = time.monotonic() + 300
    find = lambda: [t for t in threading.enumerate() if t.name.startswith("redcoast-data")]
    while find() and time.monotonic() < deadline:
        time.sleep(0.01)
    return find()


@pytest.fixture
def costly_batches(monkeypatch):
    """To be called while a batch is made: nothing else takes any time, so threads are worth it."""
    now = [0.0]
    monkeypatch.setattr("redcoast.data._loading.perf_counter", lambda: now[0])

    def work():
        now[0] += 1.0

    return work


FUNCTIONS = {"predict_fn": predict_fn, "metric_fn": metric_fn, "output_fn": list}
EVALUATION = rc.Evaluation(EXAMPLES[:16], every=12, **FUNCTIONS)


def log(metrics, step):
    pass


# The function, at which of its calls it raises, what the notes say, and the last step saved.
# Before the first step, the loss is traced for the plan and the step, for sums and for its
# evaluation, a batch is made for its shapes, and evaluation is tried on one batch of eight. The
# metrics of a step are logged when the next is under way.
@pytest.mark.few(
    "loss_fn-1-`loss_fn`.*before the first step-None",
    "metric_fn-1-`metric_fn`.*before the first step-None",
    "log-11-`log` \\\\(call\\\\) for the metrics of step 11-12",
)
@pytest.mark.parametrize(
    ("name", "when", "words", "last"),
    [
        ("loss_fn", 1, "`loss_fn`.*before the first step", None),
        ("loss_fn", 2, "`loss_fn`.*before the first step", None),
        ("loss_fn", 3, "`loss_fn`.*before the first step", None),
        ("loss_fn", 4, "`loss_fn`.*before the first step", None),
        ("predict_fn", 1, "`predict_fn`.*before the first step", None),
        ("output_fn", 1, "`output_fn`.*indices 0 to 7.*before the first step", None),
        ("output_fn", 3, "`output_fn`.*indices 8 to 15.*in the evaluation after step 12", 12),
        ("metric_fn", 1, "`metric_fn`.*before the first step", None),
        ("metric_fn", 2, "`metric_fn`.*in the evaluation after step 12", 12),
        ("log", 1, r"`log` \(call\) for the metrics of step 1", 1),
        ("log", 11, r"`log` \(call\) for the metrics of step 11", 12),
        ("log", 13, r"`log` \(call\) for the metrics of step 12", 12),
    ],
)
def test_errors_of_the_users_functions_say_whose_and_where(tmp_path, name, when, words, last):
    functions = {"collate_fn": collate_fn, "loss_fn": loss_fn, "log": log}
    options = {**functions, "evaluation": EVALUATION}
    if name in FUNCTIONS:
        changes = {name: failing(FUNCTIONS[name], when)}
        options["evaluation"] = dataclasses.replace(EVALUATION, **changes)
    else:
        options[name] = failing(functions[name], when)
    with pytest.raises(Broken) as error:
        fit(checkpoints=rc.Checkpoints(tmp_path, every=100), **options)
    assert str(error.value) == "no such file"
    assert words_in_order(words, notes(error.value))
    # The last whole state is saved, and named.
    assert saved(tmp_path) == ([] if last is None else [last])
    if last is not None:
        assert f"The last good checkpoint is {tmp_path}/checkpoints/{last}." in notes(error.value)
        rows = rc.read_metrics(tmp_path / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert not data_threads()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["collate_fn", "log"])
def test_after_a_hundred_steps(tmp_path, name):
    functions = {"collate_fn": collate_fn, "log": log}
    with pytest.raises(Broken) as error:
        fit(
            **{**functions, name: failing(functions[name], 101 if name == "collate_fn" else 100)},
            steps=110,
            steps_per_call=1,
            checkpoints=rc.Checkpoints(tmp_path, every=1000),
        )
    assert re.search("batch of step 100|metrics of step 100", notes(error.value))
    (last,) = saved(tmp_path)
    assert last in (99, 100, 101)


def raising_on_the_device(when):
    """A loss whose step raises on the device, at the one that `when` says."""
    steps = iter(range(1, 10**6))

    def check(x):
        if next(steps) == when:
            raise Broken("seen too much")
        return np.float32(0)

    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        shape = jax.ShapeDtypeStruct((), np.float32)
        return value + jax.pure_callback(check, shape, batch["x"]), aux

    return loss


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["predict_fn", "output_fn", "metric_fn"])
def test_in_the_evaluation_after_a_hundred_steps(tmp_path, name):
    # Before that one there were the trial on one batch, and 50 steps before, two batches.
    when = {"output_fn": 5, "metric_fn": 3}

    on_device = failing(np.asarray, 5)

    def predict(model, batch, key):
        actual = predict_fn(model, batch, key)
        return jax.pure_callback(on_device, jax.typeof(actual), actual)

    changes = {name: failing(FUNCTIONS[name], when[name])} if name in when else {name: predict}
    evaluation = dataclasses.replace(EVALUATION, every=50, **changes)
    with pytest.raises(Exception, match="no such file") as error:
        fit(
            evaluation=evaluation,
            steps=110,
            checkpoints=rc.Checkpoints(tmp_path, every=1000),
        )
    assert "Raised in the evaluation after step 100." in notes(error.value)
    assert saved(tmp_path) == [100]


@pytest.mark.few("False-3")
@pytest.mark.parametrize(
    ("augmented", "when"), [(True, 1), (True, 9), (False, 1), (False, 3), (False, 4)]
)
def test_errors_of_collate_fn_say_for_which_examples_and_where(tmp_path, augmented, when):
    """Raised by a call in training, where examples are augmented, or in evaluation."""
    calls = iter(range(1, 10**6))

    def collate(examples, rngs):
        if (rngs is not None) == augmented and next(calls) == when:
            raise Broken(str([e["index"] for e in examples]))
        return collate_fn(examples)

    checkpoints = rc.Checkpoints(tmp_path, every=100)
    with pytest.raises(Broken) as error:
        fit(collate_fn=collate, checkpoints=checkpoints, evaluation=EVALUATION)
    actual = notes(error.value)
    assert f"Raised by `collate_fn` for the examples with indices {error.value}." in actual
    if augmented and when == 1:
        assert "planned, before the first step" in actual
        assert not saved(tmp_path)
    elif augmented:
        # Threads may be ahead by some batches, which does not matter to those before.
        (step,) = map(int, re.findall(r"while the batch of step (\d+) was made", actual))
        assert step >= when - 1
        assert saved(tmp_path) == ([step - 1] if step > 1 else [])
    elif when == 1:
        assert "before the first step" in actual
        assert not saved(tmp_path)
    elif when == 3:
        assert "in the evaluation of one batch after the first step" in actual
        assert saved(tmp_path) == [1]
    else:
        assert "in the evaluation after step 12" in actual
        assert saved(tmp_path) == [12]
    assert not data_threads()


def words_in_order(pattern, text):
    at = 0
    for part in pattern.replace("\\", "").split(".*"):
        assert part in text[at:], (part, text)
        at = text.index(part, at) + len(part)
    return True


@pytest.mark.thorough
def test_what_was_saved_goes_on_as_if_nothing_had_been(tmp_path):
    losses = {}
    record = lambda metrics, step: losses.setdefault(step, []).append(metrics["loss"])
    whole = fit(log=record)
    with pytest.raises(Broken):
        fit(
            collate_fn=failing(collate_fn, 10),
            log=record,
            checkpoints=rc.Checkpoints(tmp_path, every=100),
        )
    again = fit(log=record, checkpoints=rc.Checkpoints(tmp_path, every=100))
    assert all(len(set(actual)) == 1 and len(actual) == 2 for actual in losses.values())
    assert len(losses) == 16
    for a, b in zip(arrays(whole), arrays(again), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("when", "before"), [(6, 4), (100, 96)])
@pytest.mark.few("6-4")
def test_an_error_while_a_step_is_computed_saves_nothing(tmp_path, when, before):
    """Its state may be wrong."""
    with pytest.raises(Exception, match="seen too much") as error:
        fit(
            loss_fn=raising_on_the_device(when),
            steps=110,
            checkpoints=rc.Checkpoints(tmp_path, every=before),
        )
    assert saved(tmp_path) == [before]
    assert re.search(f"Raised (by step {when}|while step {when} was computed)", notes(error.value))
    assert f"The last good checkpoint is {tmp_path}/checkpoints/{before}." in notes(error.value)


def averaging(loss_fn):
    """A loss that takes a training step itself, as federated averaging does."""
    optimizer = optax.sgd(0.1)

    def loss(model, batch, key):
        state = rc.TrainState(model, optimizer.init(params(model)), jax.numpy.zeros((), "i4"), key)
        state, metrics = rc.train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer)
        return metrics["loss"] + 0 * jax.numpy.sum(state.model.layers[0].weight)

    return loss


def params(model):
    return eqx.filter(model, eqx.is_inexact_array)


@pytest.mark.few("1")
@pytest.mark.parametrize("devices", [1, 8])
def test_each_note_appears_once_and_each_error_too(devices):
    """Also where a loss takes steps of its own, and where it is traced twice."""

    def broken(model, batch, key):
        raise Broken("no such file")

    mesh = rc.make_mesh(devices=jax.devices()[:devices])
    plan = rc.plan_shardings(make_model(), mesh, fn=loss_fn, args=(collate_fn(EXAMPLES), None))
    state = rc.init_state(lambda key: make_model(), optax.sgd(0.1), key=jax.random.key(0))
    with pytest.raises(Broken) as error:
        rc.train_step(
            state,
            collate_fn(EXAMPLES),
            loss_fn=plan.constrain(averaging(broken)),
            optimizer=optax.sgd(0.1),
        )
    text = "".join(traceback.format_exception(error.value))
    assert text.count("Raised by `loss_fn`") == 1
    assert text.count("Broken: no such file") == 1


def test_examples_that_cannot_be_read_are_named():
    class Files:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            if index == 17:
                raise OSError("stale file handle")
            return EXAMPLES[index]

    with pytest.raises(OSError, match="stale") as error:
        fit(examples=Files())
    assert "Raised by the examples with indices [" in notes(error.value)
    assert "17" in notes(error.value)


def test_a_stream_that_raises_says_at_which_step():
    class Torn(Stream):
        def __next__(self):
            if self.next == 40:
                raise OSError("connection lost")
            return super().__next__()

    with pytest.raises(OSError, match="lost") as error:
        fit(examples=Torn(EXAMPLES))
    assert "Raised while the batch of step 6 was made." in notes(error.value)


@pytest.mark.parametrize("fatal", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
@pytest.mark.few("SystemExit")
def test_a_worker_that_dies_is_not_waited_for(fatal, costly_batches):
    workers = set()

    def collate(examples):
        costly_batches()
        workers.add(threading.current_thread().name)
        if len(workers) > 1 and len(seen) > 8:
            raise fatal("gone")
        seen.append(1)
        return collate_fn(examples)

    seen = []
    with pytest.raises(fatal, match="gone") as error:
        fit(collate_fn=collate, steps=1000)
    assert any(name.startswith("redcoast-data") for name in workers)
    assert "Raised by `collate_fn` for the examples with indices" in notes(error.value)
    assert not data_threads()


@pytest.mark.parametrize("name", ["loss_fn", "collate_fn", "output_fn", "log", "examples"])
@pytest.mark.few("loss_fn", "log")
def test_an_exit_with_the_status_of_success_is_an_error(name):
    """It ended the process as if the run were finished; other statuses end it as they say."""

    def leave(*_):
        sys.exit(status)

    def examples():
        yield EXAMPLES[0]
        leave()

    changes = {name: examples if name == "examples" else leave}
    if name == "output_fn":
        changes = {"evaluation": dataclasses.replace(EVALUATION, output_fn=leave)}
    status = 0
    called = "fit" if name == "examples" else name
    with pytest.raises(RuntimeError, match=rf"`sys.exit` was called inside `{called}`"):
        fit(**changes)
    status = 3
    with pytest.raises(SystemExit, match="3"):
        fit(**changes)


def test_a_handler_of_signals_may_end_the_program():
    """As services do on SIGTERM, or scripts after a time."""

    def log(metrics, step):
        signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(0))
    try:
        with pytest.raises(SystemExit, match="0"):
            fit(log=log)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_exit_of_a_logger_saves_the_last_step(tmp_path):
    def log(metrics, step):
        if step == 3:
            sys.exit()

    with pytest.raises(RuntimeError, match="The last good checkpoint|`sys.exit`"):
        fit(log=log, checkpoints=tmp_path, steps=100)
    assert (tmp_path / "checkpoints" / "4").is_dir()


@pytest.mark.thorough
def test_threads_end_whoever_raises(costly_batches):
    def slow(examples):
        costly_batches()
        return collate_fn(examples)

    with pytest.raises(Broken) as error:
        fit(collate_fn=slow, log=failing(log, 12))
    changes = {"output_fn": failing(list, 2), "examples": EXAMPLES}
    evaluation = dataclasses.replace(EVALUATION, **changes)
    with pytest.raises(Broken) as another:
        fit(collate_fn=slow, evaluation=evaluation)
    assert not data_threads()
    assert error  # and it holds on to all that it came through
    assert another


def test_the_bar_ends_its_line(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(Broken):
        fit(log=[rc.progress_logger(True), failing(log, 4)])
    assert terminal.getvalue().endswith("\n")


@pytest.mark.thorough
def test_output_that_nobody_reads_does_not_end_a_run(monkeypatch, caplog):
    """Neither what is printed here nor what functions of the user print."""
    reader, writer = os.pipe()
    os.close(reader)

    def loss(model, batch, key):
        jax.debug.print("a line")
        return loss_fn(model, batch, key)

    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        patch.setattr(sys, "stderr", pipe)
        log = [rc.progress_logger(True), rc.console_logger(every=0), lambda m, s: print(s)]
        assert fit(steps=3, loss_fn=loss, log=log).step == 3
    assert "cannot be written to" in caplog.text


def test_a_logger_is_told_of_a_failure():
    class Log:
        def __init__(self, error=None):
            self.events, self.error = [], error

        def __call__(self, metrics, step):
            if self.error and step == 2:
                raise self.error

        def fail(self, error):
            self.events.append(error)

        def close(self):
            self.events.append("closed")

    fine, broken = Log(), Log(Broken("disk"))
    fit(steps=2, log=fine)
    assert fine.events == ["closed"]
    with pytest.raises(Broken) as error:
        fit(steps=3, log=broken)
    assert broken.events == [error.value, "closed"]


def test_errors_of_evaluate_and_predict_examples_are_noted_too():
    options = {"batch_size": 8, "mesh": rc.make_mesh(**ONE)}
    model = make_model()
    with pytest.raises(Broken) as error:
        rc.evaluate(model, EXAMPLES, collate_fn=failing(collate_fn, 2), loss_fn=loss_fn, **options)
    assert "[8, 9, 10, 11, 12, 13, 14, 15]" in notes(error.value)
    with pytest.raises(Broken) as error:
        rc.predict_examples(
            model,
            EXAMPLES,
            collate_fn=collate_fn,
            predict_fn=predict_fn,
            output_fn=failing(list, 3),
            **options,
        )
    assert "`output_fn`" in notes(error.value)
    assert "indices 16 to 23" in notes(error.value)


@pytest.mark.thorough
@pytest.mark.few("axis0")
@pytest.mark.parametrize("axis", [{}, {"axis_name": "devices"}])
def test_pmap_in_a_loss_gives_the_same_loss(axis):
    def loss_of(each_device):
        def loss_fn(model, batch, key):
            rows = batch["x"].reshape(8, 1, -1)
            return jnp.mean(each_device(jax.vmap(model))(rows))

        return loss_fn

    options = {"collate_fn": collate_fn, "batch_size": 8}
    evaluate = lambda loss_fn: rc.evaluate(make_model(), EXAMPLES[:8], loss_fn=loss_fn, **options)
    mapped = evaluate(loss_of(lambda fn: jax.pmap(fn, **axis)))
    assert mapped["loss"] == pytest.approx(evaluate(loss_of(jax.vmap))["loss"], rel=1e-6)


def test_an_error_of_equinox_in_a_compiled_function_is_its_message_alone():
    """As `eqx.filter_jit` raises it. JAX's has pages, which end in advice to use `filter_jit`."""
    message = "The loss is too large:\nlower the rate."

    def checked(model, batch, key):
        loss, _ = loss_fn(model, batch, key)
        return eqx.error_if(loss, loss < limit, message)

    def predict_checked(model, batch, key):
        return eqx.error_if(predict_fn(model, batch, key), batch["x"][0, 0] < limit, message)

    options = {"collate_fn": collate_fn, "batch_size": 8, "mesh": rc.make_mesh(**ONE)}
    limit = 1e9
    with pytest.raises(eqx.EquinoxRuntimeError) as error:
        fit(loss_fn=checked)
    assert str(error.value) == message
    assert notes(error.value) == "Raised by step 1."
    with pytest.raises(eqx.EquinoxRuntimeError, match="lower the rate.$"):
        rc.evaluate(make_model(), EXAMPLES, loss_fn=checked, **options)
    with pytest.raises(eqx.EquinoxRuntimeError, match="lower the rate.$"):
        rc.predict_examples(make_model(), EXAMPLES, predict_fn=predict_checked, **options)
    limit = -1e9
    assert fit(loss_fn=checked).step == 16


def test_a_run_whose_output_is_closed_goes_on(monkeypatch, tmp_path):
    """The warning of it goes to Python's last handler, whose stream is closed as well."""
    logger, handler = logging.getLogger("redcoast"), logging.lastResort
    assert handler is not None
    for name in ("stdout", "stderr"):
        stream = (tmp_path / name).open("w")
        stream.close()
        monkeypatch.setattr(sys, name, stream)
    logger.addHandler(handler)
    try:
        state = rc.fit(
            make_model(),
            optax.sgd(0.1),
            EXAMPLES,
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=8,
            steps=2,
            log=rc.console_logger(every=0),
            mesh=rc.make_mesh(**ONE),
        )
    finally:
        logger.removeHandler(handler)
    assert state.step == 2
