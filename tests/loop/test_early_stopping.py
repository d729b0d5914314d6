"""Early stopping, and loggers that look at the state or stop the run."""

import functools as ft
import io
from typing import Any

import jax
import numpy as np
import optax
import pytest
from problem import arrays, collate_fn, loss_fn, make_examples, make_model

import redcoast as rc
from redcoast.loop._early_stopping import complete_early_stopping

OPTIONS: Any = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 8, "epochs": 10}
QUIET = rc.progress_logger(False)


def values(losses):
    """An evaluation after each of 2 steps whose metric `value` takes these values in turn."""
    left = iter(losses)
    rehearsed = []

    def metric_fn(examples, outputs):
        if len(outputs) < len(examples) or not rehearsed:  # before the first step
            rehearsed.append(True)
            return {"value": 0.0}
        return {"value": next(left)}

    predict_fn = lambda model, batch, key: batch["y"]
    examples = make_examples(8)
    return rc.Evaluation(examples, every=2, predict_fn=predict_fn, metric_fn=metric_fn)


def train(losses, patience=2, mode: Any = "min", log: Any = QUIET, mesh=None, **options):
    given: Any = OPTIONS | options
    early = rc.EarlyStopping(patience, metric="value", mode=mode)
    mesh = mesh or rc.make_mesh(devices=jax.devices()[:1])
    given |= {"evaluation": values(losses), "early_stopping": early, "mesh": mesh, "log": log}
    return rc.fit(make_model(), optax.sgd(0.1), make_examples(16), **given)


def plain(steps, **options):
    """The state of a run without early stopping after so many steps."""
    given: Any = {**OPTIONS, "epochs": None, "steps": steps, "log": False, **options}
    given.setdefault("mesh", rc.make_mesh(devices=jax.devices()[:1]))
    return rc.fit(make_model(), optax.sgd(0.1), make_examples(16), **given)


def assert_same(a, b):
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.few("max-losses1")
@pytest.mark.parametrize(
    ("mode", "losses"),
    [("min", [3.0, 1.0, 2.0, 1.0, 0.5]), ("max", [3.0, 5.0, 5.0, 4.0, 9.0])],
)
def test_best_state_is_returned_after_patience_is_over(mode, losses):
    steps = []
    log = [lambda metrics, step: steps.append(step), QUIET]
    state = train(losses, mode=mode, log=log)
    assert max(steps) == 8  # the second evaluation was best, and two more followed it
    assert int(state.step) == 4
    assert_same(state, plain(4))


@pytest.mark.thorough
def test_best_state_is_returned_from_a_checkpoint_and_a_run_that_is_over_stays_so(tmp_path):
    losses = [3.0, 1.0, 2.0, 2.0]
    state = train(losses, checkpoints=tmp_path)
    assert int(state.step) == 4
    assert_same(state, plain(4))
    shown = io.StringIO()
    again = train([], checkpoints=tmp_path, log=rc.progress_logger(True, file=shown))
    assert "compiling" not in shown.getvalue()
    assert_same(again, state)
    more = train([0.5, 2.0, 2.0, 2.0], patience=3, checkpoints=tmp_path)  # it goes on from step 8
    assert int(more.step) == 10


@pytest.mark.thorough
def test_counters_are_those_of_the_checkpoint_after_a_kill(tmp_path):
    """A run that died between evaluations stops where it would have."""

    def die(metrics, step):
        if step == 7 and "loss" in metrics:
            raise RuntimeError("killed")

    checkpoints = rc.Checkpoints(tmp_path, every=100)
    with pytest.raises(RuntimeError, match="killed"):
        train([3.0, 1.0, 2.0], log=[die, QUIET], checkpoints=checkpoints)
    steps = []
    state = train([2.0, 9.0], log=[lambda _, step: steps.append(step), QUIET], checkpoints=tmp_path)
    assert max(steps) == 8
    assert int(state.step) == 4


@pytest.mark.thorough
def test_best_of_a_run_that_is_not_stopped_is_returned_and_nan_is_never_best():
    state = train([float("nan"), 2.0, 3.0], patience=5, epochs=3)
    assert int(state.step) == 4
    assert int(train([float("nan")] * 3, patience=5, epochs=3).step) == 6


@pytest.mark.integration
def test_best_state_of_a_sharded_run_keeps_its_shardings():
    mesh = rc.make_mesh(fsdp=4, model=2)
    state = train([3.0, 1.0, 2.0, 2.0], mesh=mesh)
    wanted = plain(4, mesh=mesh)
    assert_same(state, wanted)
    assert state.model.layers[0].weight.sharding == wanted.model.layers[0].weight.sharding
    rc.fit(state, optax.sgd(0.1), make_examples(16), **(OPTIONS | {"mesh": mesh}), log=False)


def test_early_stopping_that_cannot_work_is_refused(tmp_path):
    fit: Any = ft.partial(
        rc.fit, make_model(), optax.sgd(0.1), make_examples(16), **OPTIONS, log=False
    )
    early = rc.EarlyStopping(2)
    with pytest.raises(ValueError, match="needs a metric of evaluations: pass `evaluation`"):
        fit(early_stopping=early)
    evaluation = rc.Evaluation(make_examples(8))
    with pytest.raises(ValueError, match=r"`EarlyStopping\(metric='f1'\)` is not a metric"):
        fit(early_stopping=rc.EarlyStopping(2, metric="f1", mode="max"), evaluation=evaluation)
    checkpoints = rc.Checkpoints(tmp_path, best="accuracy", mode="max")
    with pytest.raises(ValueError, match="minimum of 'loss', and `checkpoints` keep the maximum"):
        fit(
            early_stopping=rc.EarlyStopping(2, metric="loss"),
            evaluation=evaluation,
            checkpoints=checkpoints,
        )
    with pytest.raises(ValueError, match=r"`EarlyStopping.patience` is 0. It must be at least 1"):
        rc.EarlyStopping(0)


@pytest.mark.thorough
def test_logger_with_a_parameter_state_gets_that_of_its_step():
    seen, evaluated = {}, []

    def look(metrics, step, *, state):
        if "loss" in metrics:
            seen[step] = (metrics["loss"], arrays(state.model))
        else:
            evaluated.append((step, int(state.step), dict(metrics)))

    logged = []
    log = [look, lambda metrics, step: logged.append(metrics), QUIET]
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    options: Any = OPTIONS | {"epochs": 2, "log": log, "mesh": mesh}
    options["evaluation"] = rc.Evaluation(make_examples(8), every=4)
    rc.fit(make_model(), optax.sgd(0.1), make_examples(16), **options)
    losses = [metrics["loss"] for metrics in logged if "loss" in metrics]
    assert [loss for loss, _ in seen.values()] == losses
    for step in (1, 3):
        for x, y in zip(seen[step][1], arrays(plain(step).model), strict=True):
            np.testing.assert_array_equal(x, y)
    ((step, of_state, metrics),) = evaluated
    assert step == of_state == 4
    assert metrics == {k: v for m in logged for k, v in m.items() if k.startswith("eval/")}


@pytest.mark.thorough
@pytest.mark.parametrize("takes_state", [False, pytest.param(True, marks=pytest.mark.integration)])
def test_logger_stops_the_run_with_its_state_saved(tmp_path, takes_state, capsys):
    def plain_logger(metrics, step):
        return rc.STOP if step == 3 else None

    def looking_logger(metrics, step, state):
        return rc.STOP if step == 3 else None

    log = looking_logger if takes_state else plain_logger
    state = plain(8, log=log, checkpoints=tmp_path)
    # Metrics are read when the next step is under way.
    assert int(state.step) == (3 if takes_state else 4)
    assert f"`log` ({log.__name__}) returned `redcoast.STOP`" in capsys.readouterr().out
    assert int(plain(8, checkpoints=tmp_path).step) == 8  # later calls are not refused
    assert_same(plain(8), plain(8, checkpoints=tmp_path))


def test_logger_stops_the_run_at_an_evaluation_and_no_other_loop():
    stop = lambda metrics, step: rc.STOP if "eval/loss" in metrics else None
    evaluation = rc.Evaluation(make_examples(8), every=2)
    with rc.stop_on_signal() as stopping:
        assert int(plain(8, log=[stop, QUIET], evaluation=evaluation).step) == 2
        assert not stopping()
        assert int(plain(4).step) == 4


def test_reader_of_a_custom_loop_has_to_be_given_the_state():
    look = lambda metrics, step, state: rc.STOP
    with rc.metrics_reader([look, QUIET]) as reader:
        reader.push(1, {"loss": np.float32(1.0)}, state={})
        assert reader.stop_reason == "`log` (<lambda>) returned `redcoast.STOP`"
        with pytest.raises(ValueError, match="has a parameter `state`. Pass the state"):
            reader.push(2, {"loss": np.float32(1.0)})


def test_the_mode_is_that_of_checkpoints_of_the_same_metric(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path, best="eval/f1", mode="max")
    evaluation = rc.Evaluation(make_examples(8))
    early, _ = complete_early_stopping(rc.EarlyStopping(2, metric="f1"), evaluation, checkpoints)
    assert early is not None
    assert early.mode == "max"
    early, _ = complete_early_stopping(rc.EarlyStopping(2), evaluation, None)
    assert early is not None
    assert (early.metric, early.mode) == ("loss", "min")
