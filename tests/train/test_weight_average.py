"""Averaged weights: what `average` computes, where it is used, and how it is saved."""

import dataclasses
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import arrays, batch_of, collate_fn, loss_fn, make_examples, make_model

import redcoast as rc

OPTIONS: Any = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 8, "log": False}
DECAY = 0.7


def averaged_by_hand(weights, decay):
    """The weights of each step, averaged in float64."""
    factors = decay ** np.arange(len(weights))[::-1].astype(np.float64)
    return [
        np.tensordot(factors / factors.sum(), np.stack(x), 1) for x in zip(*weights, strict=True)
    ]


def models_of(steps, average, trainable=eqx.is_inexact_array, **options):
    """The model after each step, and the last state."""
    optimizer = optax.sgd(0.1)
    given: Any = {"trainable": trainable, **options}
    state = rc.init_state(make_model(), optimizer, key=jax.random.key(0), average=average, **given)
    step: Any = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer, **given)
    step, models = eqx.filter_jit(step), []
    for i in range(steps):
        state, _ = step(state, batch_of(8, seed=i))
        models.append(state.model)
    return models, state


def test_average_is_the_debiased_exponential_mean_of_the_weights():
    models, state = models_of(5, DECAY)
    wanted = averaged_by_hand([arrays(model) for model in models], DECAY)
    for got, want in zip(arrays(state.averaged_model), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    ema = optax.ema(DECAY, debias=True)
    kept = actual = ema.init(eqx.filter(models[0], eqx.is_inexact_array))
    with jax.numpy_dtype_promotion("standard"):
        for model in models:
            actual, kept = ema.update(eqx.filter(model, eqx.is_inexact_array), kept)
    for got, want in zip(arrays(state.averaged_model), arrays(actual), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.integration
def test_average_does_not_change_the_training():
    _, with_average = models_of(3, DECAY)
    _, without = models_of(3, None)
    assert without.average is None
    with pytest.warns(UserWarning, match="so `averaged_model` is `model`"):
        assert without.averaged_model is without.model
    for a, b in zip(arrays(with_average.model), arrays(without.model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_average_of_frozen_leaves_is_not_kept():
    first = lambda model: eqx.tree_at(
        lambda m: m.layers[0], jax.tree.map(lambda _: False, model), True
    )
    model = make_model()
    _, state = models_of(2, DECAY, trainable=first(model))
    assert state.average is not None
    assert len(jax.tree.leaves(state.average.weights)) == 2
    averaged = state.averaged_model
    np.testing.assert_array_equal(averaged.layers[1].weight, model.layers[1].weight)
    assert np.any(averaged.layers[0].weight != state.model.layers[0].weight)


def test_average_of_half_precision_is_kept_in_float32_and_of_a_skipped_step_left_out():
    optimizer = optax.sgd(0.1)
    loss = lambda model, batch, key: jnp.mean((model["w"][None] - batch) ** 2)
    model = {"w": jnp.ones(4, jnp.bfloat16)}
    state: Any = rc.init_state(model, optimizer, key=jax.random.key(0), average=0.5)
    assert state.average.weights["w"].dtype == jnp.float32
    step = eqx.filter_jit(ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer))
    state, _ = step(state, jnp.zeros((2, 4), jnp.bfloat16))
    before = state.average
    state, metrics = step(state, jnp.full((2, 4), jnp.nan, jnp.bfloat16))
    assert metrics["skipped"] == 1
    assert int(state.average.steps) == int(before.steps) == 1
    np.testing.assert_array_equal(state.average.weights["w"], before.weights["w"])
    assert state.averaged_model["w"].dtype == jnp.bfloat16


@pytest.mark.integration
def test_average_with_float16_and_microbatches_is_of_the_same_weights():
    _, state = models_of(3, DECAY)
    _, parts = models_of(3, DECAY, compute_dtype=jnp.float16)
    assert parts.loss_scale is not None
    for a, b in zip(arrays(parts.averaged_model), arrays(state.averaged_model), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)


@pytest.mark.integration
def test_fit_evaluates_saves_and_resumes_the_average_on_a_mesh(tmp_path):
    examples, validation = make_examples(64), make_examples(16, seed=5)
    mesh, seen = rc.make_mesh(fsdp=2, model=2, devices=jax.devices()[:4]), []
    note = lambda metrics, step: seen.append((step, metrics))
    options: Any = OPTIONS | {
        "mesh": mesh,
        "average": DECAY,
        "log": [note, rc.progress_logger(False)],
    }
    options["evaluation"] = rc.Evaluation(validation, every=4)
    checkpoints = rc.Checkpoints(tmp_path / "a", every=4, best="loss")
    train: Any = ft.partial(rc.fit, make_model(), optax.adam(1e-2), examples, **options)
    train(steps=4, checkpoints=checkpoints)
    state = train(steps=8, checkpoints=checkpoints)
    for w, x in zip(
        jax.tree.leaves(state.average.weights),
        jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array)),
        strict=True,
    ):
        assert w.sharding.is_equivalent_to(x.sharding, w.ndim)
    logged = [metrics["eval/loss"] for step, metrics in seen if "eval/loss" in metrics]
    again = rc.evaluate(
        state.averaged_model, validation, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=8
    )
    raw = rc.evaluate(state.model, validation, collate_fn=collate_fn, loss_fn=loss_fn, batch_size=8)
    assert logged[-1] == pytest.approx(again["loss"], rel=1e-5)
    assert abs(logged[-1] - raw["loss"]) > 1e-4
    whole = rc.fit(make_model(), optax.adam(1e-2), examples, **(options | {"log": False}), steps=8)
    for a, b in zip(arrays(whole), arrays(state), strict=True):
        np.testing.assert_array_equal(a, b)
    like = eqx.filter(make_model(), eqx.is_inexact_array)
    path = tmp_path / "a/checkpoints/8"
    loaded = rc.load_checkpoint(path, like, subtree="average/weights")
    for a, b in zip(arrays(loaded), arrays(state.average.weights), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_fit_evaluates_the_averaged_model():
    seen, validation = [], make_examples(8, seed=5)
    note = lambda metrics, step: seen.append(metrics)
    options: Any = OPTIONS | {"log": [note, rc.progress_logger(False)]}
    options["mesh"] = rc.make_mesh(devices=jax.devices()[:1])
    options["evaluation"] = rc.Evaluation(validation)
    state = rc.fit(
        make_model(), optax.sgd(0.5), make_examples(16), **options, epochs=2, average=0.9
    )
    losses = [
        float(loss_fn(model, collate_fn(validation), None)[0])
        for model in (state.averaged_model, state.model)
    ]
    assert seen[-1]["eval/loss"] == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.thorough
def test_average_turned_on_or_off_between_save_and_resume_is_refused(tmp_path):
    train: Any = ft.partial(rc.fit, make_model(), optax.sgd(0.1), make_examples(16), **OPTIONS)
    for name, before, after in (("on", None, 0.9), ("off", 0.9, None)):
        checkpoints = rc.Checkpoints(tmp_path / name)
        train(steps=1, checkpoints=checkpoints, average=before)
        with pytest.raises(rc.CheckpointMismatch, match="average of the weights, and this run has"):
            train(steps=2, checkpoints=checkpoints, average=after)


@pytest.mark.thorough
def test_state_goes_on_with_its_average_or_begins_one():
    train: Any = ft.partial(rc.fit, optimizer=optax.sgd(0.1), examples=make_examples(16), **OPTIONS)
    state = train(make_model(), steps=1)
    state = train(state, steps=2, average=0.9)
    assert (int(state.average.steps), state.average.decay) == (1, 0.9)
    state = train(state, steps=3)
    assert (int(state.average.steps), state.average.decay) == (2, 0.9)
    state = train(dataclasses.replace(state, average=None), steps=4)
    assert state.average is None


@pytest.mark.thorough
def test_average_counts_in_the_plan_and_the_dry_run():
    create = ft.partial(rc.init_state, make_model(), optax.sgd(0.1), key=jax.random.key(0))
    mesh = rc.make_mesh(fsdp=8)
    plans = [
        rc.plan_step(
            eqx.filter_eval_shape(ft.partial(create, average=x)), loss_fn, batch_of(8), mesh
        )
        for x in (None, 0.9)
    ]
    without, with_average = (plan.report.totals for plan in plans)
    assert with_average.other.bytes - without.other.bytes == without.parameters.bytes + 4
    args = (lambda key: make_model(), loss_fn, batch_of(8), optax.sgd(0.1))
    dry = rc.dry_run(*args, target="cpu:2", mesh={"fsdp": 2}, average=0.9)
    assert dry.memory["other"] >= dry.memory["parameters"]


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.1, float("nan")])
def test_average_that_is_no_decay_is_refused(value):
    with pytest.raises(ValueError, match="`average` is .* between 0 and 1"):
        rc.init_state(make_model(), optax.sgd(0.1), key=jax.random.key(0), average=value)


def test_average_of_other_leaves_than_are_trained_is_refused():
    _, state = models_of(1, DECAY)
    first = eqx.tree_at(lambda m: m.layers[0], jax.tree.map(lambda _: False, make_model()), True)
    state = dataclasses.replace(state, opt_state=optax.sgd(0.1).init({}))
    with pytest.raises(ValueError, match="do not match the leaves that `trainable` selects"):
        rc.train_step(
            state, batch_of(8), loss_fn=loss_fn, optimizer=optax.sgd(0.1), trainable=first
        )
