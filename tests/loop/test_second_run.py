"""A later run compiles nothing if its programs are those of an earlier run."""

import functools as ft
import gc
import types
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from counting import compilations
from problem import arrays, collate_fn, fit_quietly, make_examples, make_model, predict_fn
from problem import loss_fn as plain_loss

import redcoast as rc
from redcoast.train._programs import _PROGRAMS

EXAMPLES = make_examples(80)
OPTIMIZER = optax.adam(1e-2)
MESH = rc.make_mesh(data=2, fsdp=2, model=2)


def counting():
    """A loss, and a list that grows whenever the loss is traced."""
    traces = []

    def loss(model, batch, key):
        traces.append(batch["x"].shape)
        return plain_loss(model, batch, key)

    return loss, traces


def fit(model=None, optimizer=OPTIMIZER, examples=EXAMPLES, **options):
    given: dict[str, Any] = {"batch_size": 16, "steps": 3, "mesh": MESH, "loss_fn": plain_loss}
    model = make_model() if model is None else model
    return fit_quietly(model, optimizer, examples, collate_fn=collate_fn, **given | options)


def assert_equal(one, other):
    for x, y in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.thorough
def test_a_loop_over_rollouts_compiles_once():
    loss, traces = counting()
    state = fit(loss_fn=loss)
    assert len(traces) == 1  # for the plan and the step
    with compilations() as compiled:
        for i in range(1, 3):
            state = fit(state, examples=make_examples(80, seed=i), loss_fn=loss, steps=3 * (i + 1))
    assert len(traces) == 3  # so that no change of what the loss reads is missed
    assert not compiled
    # The numbers are those of steps that are compiled for each call.
    other = fit(loss_fn=lambda *args: plain_loss(*args))
    for i in range(1, 3):
        fresh = lambda *args: plain_loss(*args)
        other = fit(other, examples=make_examples(80, seed=i), loss_fn=fresh, steps=3 * (i + 1))
    assert_equal(state, other)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"compute_dtype": jnp.bfloat16}])
def test_a_short_last_batch_and_an_evaluation_are_compiled_once(options):
    loss, traces = counting()
    evaluation = rc.Evaluation(
        EXAMPLES[:24],
        predict_fn=predict_fn,
        metric_fn=lambda examples, outputs: {"count": float(len(outputs))},
    )
    logs = []
    run = ft.partial(
        fit,
        loss_fn=loss,
        examples=EXAMPLES[:72],
        steps=None,
        epochs=1,
        evaluation=evaluation,
        log=lambda metrics, step: logs.append((step, metrics)),
        **options,
    )
    first, before = run(), len(traces)
    assert before
    # Parts of JAX that the first run of a process imports make it compile the initialisation again.
    make_model()
    with compilations() as compiled:
        second = run()
    assert len(traces) == 2 * before
    assert not compiled
    assert_equal(first, second)
    half = len(logs) // 2
    assert logs[:half] == logs[half:]


def test_a_state_is_created_by_an_earlier_program_if_it_is_the_same():
    weights = np.ones((16, 8), np.float32)

    def create(scale, seed=0):
        init_fn = lambda key: {"w": scale * weights, "b": jax.random.normal(key, (8,))}
        options: dict[str, Any] = {"key": jax.random.key(seed)}
        abstract = eqx.filter_eval_shape(rc.init_state, init_fn, OPTIMIZER, **options)
        shardings = rc.infer_shardings(abstract, MESH)
        return rc.init_state(init_fn, OPTIMIZER, shardings=shardings, **options)

    first = create(2)
    with compilations() as compiled:
        again, seeded = create(2), create(2, seed=1)
    assert not compiled
    assert_equal(first, again)
    assert not np.array_equal(first.model["b"], seeded.model["b"])
    # What `init_fn` reads is noticed, and an array that changes in place, too.
    np.testing.assert_array_equal(create(3).model["w"], 3)
    weights[:] = 5
    np.testing.assert_array_equal(create(2).model["w"], 10)


def other_loss(model, batch, key):
    loss, aux = plain_loss(model, batch, key)
    return 2 * loss, aux


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": optax.sgd(0.1)},
        {"loss_fn": other_loss},
        {"mesh": rc.make_mesh(fsdp=4, model=2)},
        {"mesh": rc.make_mesh(devices=jax.devices()[:1])},
        {"batch_size": 24},
        {"accumulate": 2},
        {"compute_dtype": jnp.bfloat16},
        {"trainable": lambda x: eqx.is_inexact_array(x) and x.ndim == 2},
        {"overrides": [("weight", None)]},
        {"width": 48},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_what_is_changed_is_compiled_again(changed):
    fit()
    width = changed.get("width", 32)
    options = {name: value for name, value in changed.items() if name != "width"}
    with compilations() as compiled:
        actual = fit(make_model(width=width), **options)
    assert compiled
    _PROGRAMS.clear()
    assert_equal(actual, fit(make_model(width=width), **options))


@pytest.mark.thorough
def test_a_given_plan_has_its_own_step():
    loss, traces = counting()
    fit(loss_fn=loss)
    state = eqx.filter_eval_shape(
        rc.init_state, lambda key: make_model(), OPTIMIZER, key=jax.random.key(0)
    )
    plan = rc.plan_shardings(state, rc.make_mesh(fsdp=8))
    options = {"loss_fn": loss, "plan": plan, "mesh": None}
    actual = fit(**options)
    assert len(traces) == 2
    assert actual.model.layers[0].weight.sharding == plan.shardings.model.layers[0].weight
    make_model()
    with compilations() as compiled:
        fit(**options)
    assert len(compiled) <= 1  # the initial state


@pytest.mark.thorough
def test_verify_compares_in_each_run():
    loss, traces = counting()
    fit(loss_fn=loss, plan="verify")
    before = len(traces)
    fit(loss_fn=loss, plan="verify")
    assert len(traces) > before


@pytest.mark.thorough
def test_a_name_that_is_bound_to_another_object_compiles_again():
    target = make_model(1)

    def loss(model, batch, key):
        away = jax.tree.map(jnp.subtract, *(eqx.filter(x, eqx.is_array) for x in (model, target)))
        return plain_loss(model, batch, key)[0] + scale * optax.tree.norm(away)

    scale, actual = 0.1, []
    for scale, seed in ((0.1, 1), (0.2, 1), (0.2, 2)):  # noqa: B007  # the loss reads it
        target = make_model(seed)
        state = fit(loss_fn=loss)
        _PROGRAMS.clear()
        assert_equal(state, fit(loss_fn=loss))
        actual.append(float(jnp.sum(state.model.layers[0].weight)))
    assert len(set(actual)) == 3


@pytest.mark.seconds(8)
@pytest.mark.thorough
def test_a_hundred_runs_keep_nothing():
    loss, _ = counting()
    evaluation = rc.Evaluation(EXAMPLES[:8], batch_size=8)
    run = ft.partial(
        fit_quietly,
        optimizer=OPTIMIZER,
        collate_fn=collate_fn,
        loss_fn=loss,
        batch_size=8,
        mesh=rc.make_mesh(devices=jax.devices()[:2]),
        evaluation=evaluation,
    )
    counts = []
    state = run(make_model(), examples=EXAMPLES, steps=1)
    for i in range(2, 101):
        state = run(state, examples=EXAMPLES[: 40 + i % 2], steps=i)
        if i in (10, 100):
            gc.collect()
            counts.append((len(jax.live_arrays()), len(_PROGRAMS)))
    assert counts[0] == counts[1]
    assert int(state.step) == 100


@pytest.mark.thorough
def test_models_that_a_dead_loss_refers_to_are_freed():
    def run():
        frozen = make_model(7)
        bare = {"scale": jnp.full((), 3.0)}

        def loss(model, batch, key):
            shift = jax.vmap(frozen)(batch["x"])
            value, aux = plain_loss(lambda x: bare["scale"] * model(x), batch, key)
            return value + jnp.mean(shift), aux

        chosen = jax.tree.map(eqx.is_inexact_array, make_model())
        optimizer = optax.chain(optax.masked(optax.scale(0.5), chosen), optax.sgd(0.1))
        evaluation = rc.Evaluation(
            EXAMPLES[:24],
            predict_fn=lambda model, batch, key: jax.vmap(frozen)(batch["x"]),
            metric_fn=lambda examples, outputs: {},
        )
        state = fit(loss_fn=loss, optimizer=optimizer, evaluation=evaluation)
        dead = [loss, frozen, frozen.layers[0].weight, bare["scale"], state.model.layers[0].weight]
        return list(map(weakref.ref, dead))

    _PROGRAMS.clear()
    dead = run()
    gc.collect()
    assert [reference() for reference in dead] == [None] * len(dead)


@pytest.mark.thorough
def test_methods_and_callable_objects_are_reused():
    class Task:
        scale = 2.0

        def loss(self, model, batch, key):
            value, aux = plain_loss(model, batch, key)
            return self.scale * value, aux

        __call__ = loss

    task, state = Task(), fit(steps=1)
    state = fit(state, loss_fn=task.loss, steps=3)
    with compilations() as compiled:
        state = fit(state, loss_fn=task.loss, steps=6)
        fit(state, loss_fn=task, steps=9)
    assert not compiled
    task.scale = 0.0
    assert_equal(fit(loss_fn=task.loss).model, make_model())
    dead = weakref.ref(task)
    del task
    gc.collect()
    assert dead() is None


def second_fit(loss, change):
    """The loss of a step before and after a change, and what it is in a process of its own."""
    losses = []
    log = lambda metrics, step: losses.append(metrics["loss"])
    options = {"mesh": rc.make_mesh(devices=jax.devices()[:1]), "steps": 1, "log": log}
    fit(loss_fn=loss, **options)
    change()
    fit(loss_fn=loss, **options)
    fit(loss_fn=lambda *args: loss(*args), **options)
    return losses


SETTINGS = types.SimpleNamespace(scale=1.0)  # such as a module of settings
TABLE = np.ones(3, np.float32)


def scaled_loss(model, batch, key):
    return SETTINGS.scale * plain_loss(model, batch, key)[0]


def table_loss(model, batch, key):
    return jnp.asarray(TABLE).sum() * plain_loss(model, batch, key)[0]


def double_table():
    TABLE[:] *= 2


@pytest.mark.parametrize(
    ("loss", "change"),
    [(scaled_loss, lambda: setattr(SETTINGS, "scale", 2.0)), (table_loss, double_table)],
    ids=["attribute", "in place"],
)
@pytest.mark.few("in place")
def test_a_change_of_what_the_loss_reads_is_never_missed(loss, change):
    """A function that is the same object is traced again: `jax.jit` would use its old program."""
    before, after, expected = second_fit(loss, change)
    assert after == expected == pytest.approx(2 * before)


@pytest.mark.thorough
def test_a_function_of_the_host_is_the_one_of_its_run():
    """Callbacks are compared by identity: their variables may change after the comparison."""

    def run():
        count = 0

        def loss(model, batch, key):
            def bump(_):
                nonlocal count
                count += 1

            value = plain_loss(model, batch, key)[0]
            jax.debug.callback(bump, value)
            return value

        fit(loss_fn=loss, steps=2, mesh=rc.make_mesh(devices=jax.devices()[:1]))
        jax.effects_barrier()
        return count

    assert run() == run() == 2


@pytest.mark.thorough
def test_a_new_function_with_the_same_program_compiles_nothing():
    """A `lambda` and an optimizer in each call; one that calls a function on the host, too."""
    seen = []

    def loss(model, batch, key):
        value, aux = plain_loss(model, batch, key)
        jax.debug.print("loss {}", value)
        jax.debug.callback(lambda x: seen.append(x), value)
        return value, aux

    state = fit(loss_fn=lambda *args: loss(*args), optimizer=optax.adam(1e-2))
    with compilations() as compiled:
        fit(state, loss_fn=lambda *args: loss(*args), optimizer=optax.adam(1e-2), steps=6)
    assert not compiled
    jax.effects_barrier()
    assert len(seen) == 6


@pytest.mark.thorough
def test_a_state_whose_arrays_the_loss_closes_over_can_be_trained_again():
    start = fit(steps=1)
    anchor = start.model

    def loss(model, batch, key):
        pairs = zip(arrays_of(model), arrays_of(anchor), strict=True)
        return plain_loss(model, batch, key)[0] + sum(jnp.sum((x - y) ** 2) for x, y in pairs)

    arrays_of = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    # Only the model is not a copy: its memory is that of the loss, which must not be donated.
    duplicate = ft.partial(jax.tree.map, lambda x: jnp.copy(x) if eqx.is_array(x) else x)
    starts = [eqx.tree_at(lambda s: s.model, duplicate(start), anchor) for _ in range(2)]
    first, second = (fit(state, loss_fn=loss, steps=3) for state in starts)
    assert_equal(first, second)
    assert np.isfinite(arrays(anchor)[0]).all()
