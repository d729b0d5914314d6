import dataclasses
import functools as ft
import operator as op
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from pair_helpers import quick_jit
from problem import (
    arrays,
    batch_of,
    collate_fn,
    fit_quietly,
    loss_fn,
    make_examples,
    make_model,
    stops_after_skipping,
)

import redcoast as rc
from redcoast import losses
from redcoast.dryrun.hlo import collectives
from redcoast.models import GPT2, GPT2Config

KEY = jax.random.key(0)
BATCH = batch_of(24)
KEEPS_GRADIENT = optax.trace(1.0)  # its state after one step is the gradient
TINY: dict[str, Any] = {
    "vocab": 64,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "hidden": 128,
    "positions": 16,
}
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16))


def start(optimizer=None, scale=None, init_fn=None):
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    init_fn = (lambda key: make_model()) if init_fn is None else init_fn
    state = rc.init_state(init_fn, optimizer, key=KEY)
    return dataclasses.replace(state, loss_scale=scale)


def stepper(optimizer=None, loss=loss_fn, dtype=jnp.float16, **options):
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    options = {"loss_fn": loss, "optimizer": optimizer, "compute_dtype": dtype, **options}
    return ft.partial(rc.train_step, **options)


def scale_of(state):
    assert state.loss_scale is not None
    return state.loss_scale


def small_lm_loss(model, tokens, key):
    """A loss as small as that of one token among many, so that its gradient vanishes in float16."""
    logits = model(tokens[:, :-1])
    return losses.cross_entropy(logits, tokens[:, 1:]) * 2.0**-14


@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", few_of([1, 2], 1))
def test_gradients_of_gpt2_equal_float32_up_to_the_rounding_of_float16(accumulate):
    make = lambda key: GPT2(GPT2Config(**TINY), key=key)
    step = ft.partial(stepper, KEEPS_GRADIENT, small_lm_loss, accumulate=accumulate)
    steps = {dtype: quick_jit(step(dtype)) for dtype in (None, jnp.float16)}

    def gradient(dtype, scale=None):
        state, metrics = steps[dtype](start(KEEPS_GRADIENT, scale, make), TOKENS)
        assert not metrics["skipped"]
        return metrics["loss"], arrays(state.opt_state)

    def worst(found):
        # The gradient of the biases of keys is zero up to rounding.
        sizes = [max(np.linalg.norm(x), 1e-2 * whole) for x in exact]
        pairs = zip(found, exact, sizes, strict=True)
        return max(np.linalg.norm(x - y) / size for x, y, size in pairs)

    expected, exact = gradient(None)
    loss, scaled = gradient(jnp.float16, rc.LossScale())
    _, plain = gradient(jnp.float16, rc.LossScale(1.0))
    whole = np.sqrt(sum(np.sum(x**2) for x in exact))
    np.testing.assert_allclose(loss, expected, rtol=2e-3)
    assert worst(scaled) < 8 * 2.0**-11  # the unit roundoff is 2^-11
    assert worst(plain) > 0.1  # most of it vanished


@pytest.mark.thorough
def test_a_power_of_two_changes_nothing_in_float32():
    optimizer = optax.sgd(1.0)
    step = quick_jit(stepper(optimizer, dtype=None, accumulate=3))
    scales = (None, rc.LossScale())
    (plain, a), (scaled, b) = (step(start(optimizer, scale), BATCH) for scale in scales)
    for x, y in zip(arrays(plain.model), arrays(scaled.model), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-6)
    assert set(b) - set(a) == {"loss_scale", "skipped_total"}


def test_an_overflow_is_skipped_and_counted_and_halves_the_scale():
    state, step = start(scale=rc.LossScale(2.0**24)), eqx.filter_jit(stepper())
    skipped = 0
    while True:
        after, metrics = step(state, BATCH)
        assert np.isfinite(metrics["loss"])
        if not metrics["skipped"]:
            break
        skipped += 1
        assert not np.isfinite(metrics["grad_norm"])
        assert eqx.tree_equal(after.model, state.model)
        assert eqx.tree_equal(after.opt_state, state.opt_state)
        assert float(metrics["loss_scale"]) == 2.0 ** (25 - skipped)
        assert float(scale_of(after).value) == 2.0 ** (24 - skipped)
        assert float(metrics["skipped_total"]) == int(scale_of(after).skipped) == skipped
        state = after
    assert 3 < skipped < 12
    assert not eqx.tree_equal(after.model, state.model)
    assert int(after.step) == skipped + 1


def test_the_scale_doubles_after_good_steps_up_to_a_limit():
    scale, values = rc.LossScale(2.0**21, period=3), []
    good = [True] * 5 + [False] + [True] * 16
    for each in good:
        scale = scale.adjust(jnp.asarray(each))
        values.append(int(np.log2(scale.value)))
    assert values == [21, 21, 22, 22, 22, 21, 21, 21, 22, 22, 22, 23, 23, 23] + [24] * 8
    assert int(scale.skipped) == 1


def test_the_scale_halves_down_to_one():
    scale = rc.LossScale(3.0)
    for expected in (1.5, 1.0, 1.0):
        scale = scale.adjust(jnp.asarray(False))
        assert float(scale.value) == expected


@pytest.mark.thorough
def test_fit_survives_overflows(caplog):
    logged = []
    with stops_after_skipping(1):
        state = fit_quietly(
            start(scale=rc.LossScale(2.0**24)),
            optax.adam(1e-2),
            make_examples(256),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=8,
            steps=16,
            compute_dtype=jnp.float16,
            log=lambda metrics, step: logged.append(metrics),
        )
    skipped = int(sum(m["skipped"] for m in logged))
    assert 1 < skipped < 16
    assert logged[-1]["skipped_total"] == int(scale_of(state).skipped) == skipped
    halved = [r.message for r in caplog.records if "The loss scale" in r.message]
    assert len(halved) == skipped
    assert halved[0].endswith("The loss scale 1.67772e+07 is halved.")


@pytest.mark.thorough
def test_a_divergence_ends_the_run_when_the_scale_is_least():
    def diverges(model, batch, key):
        # The square root has an infinite gradient at 0.
        return loss_fn(model, batch, key)[0] + jnp.sqrt(model.layers[0].bias[0] * 0.0)

    logged = []
    words = "at 3 steps in a row, up to step 5 .*bias"
    with pytest.raises(FloatingPointError, match=words), stops_after_skipping(3):
        fit_quietly(
            start(scale=rc.LossScale(4.0)),
            optax.adam(1e-2),
            make_examples(64),
            collate_fn=collate_fn,
            loss_fn=diverges,
            batch_size=8,
            epochs=9,
            compute_dtype=jnp.float16,
            log=lambda metrics, step: logged.append(metrics["loss_scale"]),
        )
    assert logged == [4.0, 2.0, 1.0, 1.0, 1.0]


@pytest.mark.thorough
def test_a_resumed_run_is_the_same_bit_by_bit(tmp_path):
    def run(directory, steps):
        checkpoints = rc.Checkpoints(tmp_path / directory)
        return fit_quietly(
            start(scale=rc.LossScale(2.0**17, period=3)),
            optax.adam(1e-2),
            make_examples(64),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=8,
            steps=steps,
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
            compute_dtype=jnp.float16,
            checkpoints=checkpoints,
        )

    run("resumed", 4)
    resumed, whole = run("resumed", 8), run("whole", 8)
    assert int(scale_of(whole).skipped) > 1
    assert eqx.tree_equal(resumed, whole)
    saved = rc.load_checkpoint(tmp_path / "whole" / "checkpoints" / "8")
    assert int(saved["loss_scale"]["skipped"]) == int(scale_of(whole).skipped)


@pytest.mark.thorough
def test_a_run_resumed_with_float16_or_without_says_what_to_pass(tmp_path):
    """Both ways out work: the precision that the run had, and its state in another directory."""

    def train(model, steps, directory, compute_dtype):
        return fit_quietly(
            model,
            optax.sgd(0.1),
            make_examples(16),
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=8,
            steps=steps,
            checkpoints=directory,
            compute_dtype=compute_dtype,
        )

    for name, before, after in (("on", None, "float16"), ("off", "float16", None)):
        directory = tmp_path / name
        state = train(make_model(), 1, directory, before)
        with pytest.raises(rc.CheckpointMismatch, match="compute_dtype"):
            train(make_model(), 2, directory, after)
        loaded = rc.load_checkpoint(directory / "checkpoints" / "1", state)
        assert int(train(loaded, 2, tmp_path / f"other_{name}", after).step) == 2
        assert int(train(make_model(), 2, directory, before).step) == 2


def test_states_of_other_dtypes_have_no_scale():
    make = ft.partial(rc.init_state, lambda key: make_model(), optax.sgd(0.1), key=KEY)
    paths = lambda **options: [
        jax.tree_util.keystr(path, simple=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(make(**options))
        if "scale" in jax.tree_util.keystr(path)
    ]
    assert paths() == paths(compute_dtype=jnp.bfloat16) == []
    assert len(paths(compute_dtype=jnp.float16)) == 3


@pytest.mark.thorough
def test_scaling_communicates_nothing():
    mesh = rc.make_mesh(data=2, model=4)

    def sent(scale):
        state = eqx.filter_eval_shape(lambda: start(scale=scale() if scale else None))
        plan = rc.plan_step(state, loss_fn, BATCH, mesh)
        step = stepper(loss=plan.constrain(loss_fn), dtype=None)
        program = rc.compile_step(step, plan.shardings).lower(state, BATCH).compile()
        return sorted(map(str, collectives(program.as_text(), mesh)))

    plain = sent(None)
    assert plain
    assert sent(rc.LossScale) == plain


@pytest.mark.thorough
def test_float16_on_a_mesh_equals_one_device():
    def losses_on(mesh):
        make, optimizer = (lambda key: make_model()), optax.adam(1e-2)
        options = {"key": KEY, "mesh": mesh, "compute_dtype": jnp.float16}
        state, step, _ = rc.prepare(make, optimizer, loss_fn, BATCH, **options)
        found = []
        for _ in range(4):
            state, metrics = step(state, BATCH)
            found.append(float(metrics["loss"]))
        assert int(scale_of(state).good) == 4
        return found

    one = losses_on(rc.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(losses_on(rc.make_mesh(data=2, model=4)), one, rtol=4e-3)


@pytest.mark.thorough
def test_several_steps_in_a_scan():
    batches = jax.tree.map(lambda x: x.reshape(3, 8, *x.shape[1:]), BATCH)
    options = stepper().keywords
    scanned, metrics = eqx.filter_jit(rc.train_steps)(start(), batches, **options)
    state, step = start(), eqx.filter_jit(stepper())
    for i in range(3):
        state, _ = step(state, jax.tree.map(op.itemgetter(i), batches))
    for a, b in zip(arrays(scanned.model), arrays(state.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    assert metrics["loss_scale"].tolist() == [2.0**15] * 3
    assert int(scale_of(scanned).good) == 3


@pytest.mark.thorough
def test_a_step_with_its_own_gradient():
    model, optimizer = make_model(), optax.sgd(0.1)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def step(state, batch):
        scale = state["scale"]

        def loss(params):
            half = jax.tree.map(lambda x: x.astype(jnp.float16), (params, batch["x"]))
            model = eqx.combine(half[0], static)
            return scale.scale(loss_fn(model, {**batch, "x": half[1]}, None)[0])

        grads = scale.unscale(jax.grad(loss)(state["params"]))
        finite = jnp.isfinite(optax.tree.norm(grads))
        updates, _ = optimizer.update(grads, optimizer.init(params))
        after = optax.apply_updates(state["params"], updates)
        after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state["params"])
        return {"params": after, "scale": scale.adjust(finite)}

    ours, plain = {"params": params, "scale": rc.LossScale(2.0**24)}, start(optimizer)
    plain = dataclasses.replace(plain, loss_scale=rc.LossScale(2.0**24))
    expected = eqx.filter_jit(stepper(optimizer))
    for _ in range(14):
        ours, (plain, _) = step(ours, BATCH), expected(plain, BATCH)
    assert int(ours["scale"].skipped) == int(scale_of(plain).skipped) > 1
    for a, b in zip(arrays(ours["params"]), arrays(plain.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_state_without_a_scale_in_a_compiled_step_is_named():
    state, mesh = start(), rc.make_mesh(devices=jax.devices()[:1])
    step = rc.compile_step(stepper(), rc.infer_shardings(state, mesh))
    with pytest.raises(ValueError, match="returned.*loss_scale/value"):
        step(state, BATCH)
