import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problem import arrays, batch_of, loss_fn, make_model

import redcoast as rc

KEY = jax.random.key(0)
BATCH = batch_of(24)


def start(optimizer=None, model=None, **kwargs):
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    init_fn = (lambda key: make_model()) if model is None else (lambda key: model)
    return rc.init_state(init_fn, optimizer, key=KEY, **kwargs)


def stepper(optimizer=None, loss=loss_fn, **kwargs):
    optimizer = optax.adam(1e-2) if optimizer is None else optimizer
    return ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer, **kwargs)


def by_hand(model, optimizer, batch, steps):
    """Trains with JAX and optax only."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    opt_state, losses = optimizer.init(params), []

    @jax.jit
    def step(params, opt_state):
        value = lambda p: loss_fn(eqx.combine(p, static), batch, None)[0]
        loss, grads = jax.value_and_grad(value)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    for _ in range(steps):
        params, opt_state, loss, norm = step(params, opt_state)
        losses.append((float(loss), float(norm)))
    return params, losses


def test_equals_a_loop_by_hand():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    params, losses = by_hand(make_model(), optimizer, BATCH, 5)
    state, step = start(optimizer), eqx.filter_jit(stepper(optimizer))
    for loss, norm in losses:
        state, metrics = step(state, BATCH)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        assert set(metrics) == {"loss", "grad_norm", "skipped", "accuracy"}
    for ours, theirs in zip(arrays(state.model), arrays(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    assert int(state.step) == 5


def masked_loss(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weight = jnp.sum(batch["mask"].astype(jnp.float32))
    loss = jnp.sum(jnp.where(batch["mask"], losses, 0.0)) / weight
    return loss, {
        "weight": weight,
        "mean_logit": jnp.sum(jnp.where(batch["mask"], logits[:, 0], 0.0)) / weight,
    }


@pytest.mark.parametrize("count", few_of([2, 3, 6, 24], 3, 24))
@pytest.mark.few("3")
def test_ragged_microbatches_equal_the_full_batch(count):
    mask = np.random.default_rng(0).random(24) < 0.4
    batch = {**BATCH, "mask": mask}
    full, expected = eqx.filter_jit(stepper(loss=masked_loss))(start(), batch)
    parts, actual = eqx.filter_jit(stepper(loss=masked_loss, accumulate=count))(start(), batch)
    assert float(actual["weight"]) == mask.sum()
    for name in ("loss", "grad_norm", "mean_logit"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6)
    # Adam's first update is the sign of the gradient, so its moments are compared.
    for a, b in zip(arrays(full.opt_state), arrays(parts.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_a_batch_of_padding_alone_is_the_same_with_microbatches():
    """The mean over no tokens was 0 / 0, where a loss that guards against it returns 0."""

    def guarded(model, batch, key):
        losses = jnp.sum(jax.vmap(model)(batch["x"]) ** 2, axis=-1)
        weight = jnp.sum(batch["mask"].astype(jnp.float32))
        loss = jnp.sum(jnp.where(batch["mask"], losses, 0.0)) / jnp.maximum(weight, 1)
        return loss, {"weight": weight}

    batch = {"x": BATCH["x"], "mask": np.zeros(len(BATCH["x"]), bool)}
    whole, metrics = eqx.filter_jit(stepper(loss=guarded))(start(), batch)
    parts, of_parts = eqx.filter_jit(stepper(loss=guarded, accumulate=4))(start(), batch)
    assert metrics["loss"] == of_parts["loss"] == 0
    assert of_parts["skipped"] == of_parts["weight"] == 0
    for ours, theirs in zip(arrays(parts.model), arrays(whole.model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_accumulate_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"accumulate=5.*\(24"):
        stepper(accumulate=5)(start(), BATCH)


def contrastive(model, batch, key):
    logits = batch["x"] @ model["w"] @ batch["others"].T
    return jnp.mean(jax.nn.logsumexp(logits, -1))


@pytest.mark.parametrize(
    ("others", "words"),
    [((48, 16), r"others of size 48; x of size 24"), ((), "which others does not have")],
)
def test_accumulate_refuses_arrays_of_other_sizes(others, words):
    # Each microbatch would have a part of the negatives, and another loss.
    batch = {"x": BATCH["x"], "others": np.ones(others, np.float32)}
    init_fn, optimizer = lambda key: {"w": jnp.eye(16)}, optax.sgd(0.1)
    prepare = ft.partial(rc.prepare, init_fn, optimizer, contrastive, batch, key=KEY)
    state = rc.init_state(init_fn, optimizer, key=KEY)
    with pytest.raises(ValueError, match=f"`accumulate=2` splits.*{words}"):
        rc.train_step(state, batch, loss_fn=contrastive, optimizer=optimizer, accumulate=2)
    with pytest.raises(ValueError, match=f"`accumulate=2` splits.*{words}"):
        prepare(accumulate=2)
    if len(others) > 1:  # without `accumulate`, the loss is that of all rows
        state, step, _ = prepare()
        want = contrastive({"w": jnp.eye(16)}, batch, None)
        np.testing.assert_allclose(step(state, batch)[1]["loss"], want, rtol=1e-5)


def test_bfloat16_compute_keeps_float32_state():
    step = eqx.filter_jit(stepper(compute_dtype=jnp.bfloat16))
    state, metrics = step(start(), BATCH)
    _, exact = eqx.filter_jit(stepper())(start(), BATCH)
    assert {x.dtype for x in arrays(state) if x.dtype.kind == "f"} == {np.dtype("float32")}
    assert metrics["loss"].dtype == jnp.float32
    assert metrics["loss"] != exact["loss"]
    np.testing.assert_allclose(metrics["loss"], exact["loss"], rtol=2e-2)

    seen = []

    def loss(model, batch, key):
        seen.extend([model.layers[0].weight.dtype, batch["x"].dtype, batch["y"].dtype])
        return loss_fn(model, batch, key)[0]

    eqx.filter_eval_shape(stepper(loss=loss, compute_dtype=jnp.bfloat16), start(), BATCH)
    assert seen[:3] == [jnp.bfloat16, jnp.bfloat16, jnp.int32]


@pytest.mark.parametrize(("dtype", "words"), [(jnp.bool_, "floating"), (jnp.int8, "floating")])
def test_other_compute_dtypes_raise(dtype, words):
    with pytest.raises(ValueError, match=words):
        stepper(compute_dtype=dtype)(start(), BATCH)


def test_frozen_leaves_take_no_optimizer_state():
    spec = jax.tree.map(lambda _: False, make_model())
    spec = eqx.tree_at(lambda m: m.layers[-1], spec, replace=True)
    state = start(trainable=spec)
    assert len(arrays(state.opt_state)) == 1 + 2 * 2
    after, _ = eqx.filter_jit(stepper(trainable=spec))(state, BATCH)
    assert eqx.tree_equal(after.model.layers[:-1], state.model.layers[:-1])
    assert (after.model.layers[-1].weight != state.model.layers[-1].weight).any()


@pytest.mark.thorough
def test_frozen_leaves_take_no_gradient_memory():
    model = make_model(width=512)
    frozen = eqx.tree_at(lambda m: m.layers[-1], jax.tree.map(lambda _: False, model), True)

    def temporaries(trainable):
        state = start(optax.sgd(1e-2), model, trainable=trainable)
        sharding = NamedSharding(rc.make_mesh(devices=jax.devices()[:1]), P())
        shardings = jax.tree.map(lambda x: sharding if eqx.is_array(x) else None, state)
        step = rc.compile_step(stepper(optax.sgd(1e-2), trainable=trainable), shardings)
        memory: Any = step.lower(state, BATCH).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(frozen) < temporaries(eqx.is_inexact_array) - 4 * 512 * 512 // 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spec",
    [
        {"teacher": False, "student": True},
        {"teacher": False, "student": eqx.is_inexact_array},
        {"teacher": lambda _: False, "student": True},
    ],
)
def test_trainable_may_be_a_prefix_of_the_model(spec):
    """A boolean or a function for a subtree, in the state, the step and the plan."""
    model = {"teacher": make_model(1), "student": make_model(2)}
    loss = lambda m, b, k: loss_fn(m["student"], b, k)
    state = start(model=model, trainable=spec)
    assert len(arrays(state.opt_state)) == 1 + 2 * 6
    after, _ = eqx.filter_jit(stepper(loss=loss, trainable=spec))(state, BATCH)
    assert eqx.tree_equal(after.model["teacher"], model["teacher"])
    assert (after.model["student"].layers[0].weight != model["student"].layers[0].weight).any()
    mesh = rc.make_mesh(model=4)
    settings = {"fn": loss, "args": (BATCH, None)}
    plan = rc.plan_shardings(model, mesh, trainable=spec, **settings)
    whole = jax.tree.map(lambda _: False, model) | {
        "student": jax.tree.map(eqx.is_inexact_array, model["student"])
    }
    assert plan.report == rc.plan_shardings(model, mesh, trainable=whole, **settings).report


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"techer": False, "student": True},
            "nothing for teacher/.*something at techer, where",
        ),
        ({"student": True}, "nothing for teacher/activation, .*, teacher/layers/2/weight. It must"),
        ({"teacher": None, "student": True}, "neither a boolean nor a function at teacher"),
        (3, "neither a boolean nor a function at its root"),
        ([False, True], "nothing for student/.*something at 0, 1, where the model has nothing"),
    ],
)
def test_trainable_that_does_not_fit_is_described(spec, words):
    model = {"teacher": make_model(1), "student": make_model(2)}
    with pytest.raises(ValueError, match=f"`trainable` does not fit the model: it has {words}"):
        start(model=model, trainable=spec)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no trainable leaves"):
        start(trainable=lambda _: False)


@pytest.mark.few("nan")
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_step_with_a_nonfinite_loss_is_skipped(bad):
    def loss(model, batch, key):
        return loss_fn(model, batch, key)[0] * jnp.where(batch["bad"][0], bad, 1.0)

    step = eqx.filter_jit(stepper(loss=loss))
    good = {**BATCH, "bad": np.zeros(24, bool)}
    state, metrics = step(start(), good)
    assert float(metrics["skipped"]) == 0
    after, metrics = step(state, {**BATCH, "bad": np.ones(24, bool)})
    assert float(metrics["skipped"]) == 1
    assert eqx.tree_equal(after.model, state.model)
    assert eqx.tree_equal(after.opt_state, state.opt_state)
    assert int(after.step) == 2


@pytest.mark.thorough
def test_a_step_with_an_infinite_gradient_is_skipped():
    def loss(model, batch, key):
        x = model.layers[0].bias[0] * 0.0
        return jnp.sqrt(x) + loss_fn(model, batch, key)[0]

    state = start()
    after, metrics = eqx.filter_jit(stepper(loss=loss))(state, BATCH)
    assert np.isfinite(metrics["loss"])
    assert float(metrics["skipped"]) == 1
    assert eqx.tree_equal(after.model, state.model)


@pytest.mark.thorough
def test_keys_differ_by_step_and_microbatch_and_are_deterministic():
    losses = []

    def loss(model, batch, key):
        return jax.random.uniform(key) + 0.0 * loss_fn(model, batch, key)[0]

    for accumulate in (1, 2):
        step = eqx.filter_jit(stepper(loss=loss, accumulate=accumulate))
        state, again = start(), start()
        for _ in range(3):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        assert float(step(again, BATCH)[1]["loss"]) == losses[-3]
    assert len(set(losses)) == 6


@pytest.mark.thorough
def test_composes_with_jit_vmap_and_scan():
    # `jax.jit`, `vmap` and `scan` accept only models whose leaves are arrays.
    def init_fn(key):
        keys = jax.random.split(key)
        return {"w": jax.random.normal(keys[0], (16, 8)), "b": jnp.zeros(8)}

    def loss(model, batch, key):
        logits = batch["x"] @ model["w"] + model["b"][None]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    optimizer = optax.adam(1e-2)
    init = lambda key: rc.init_state(init_fn, optimizer, key=key)
    step = stepper(optimizer, loss)
    expected, losses = init(KEY), []
    for _ in range(3):
        expected, metrics = step(expected, BATCH)
        losses.append(float(metrics["loss"]))

    state = init(KEY)
    for loss_of_step in losses:
        state, metrics = jax.jit(step)(state, BATCH)
        np.testing.assert_allclose(metrics["loss"], loss_of_step, rtol=1e-5)

    _, metrics = jax.lax.scan(lambda s, _: step(s, BATCH), init(KEY), None, length=3)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)

    states = jax.jit(jax.vmap(init))(jax.random.split(KEY, 4))
    after, metrics = jax.jit(jax.vmap(step, in_axes=(0, None)))(states, BATCH)
    first = init(jax.random.split(KEY, 4)[0])
    assert metrics["loss"].shape == (4,)
    np.testing.assert_allclose(metrics["loss"][0], step(first, BATCH)[1]["loss"], rtol=1e-5)
    assert after.step.tolist() == [1, 1, 1, 1]


@pytest.mark.thorough
def test_filter_vmap_over_seeds_of_an_equinox_model():
    init = lambda key: rc.init_state(
        lambda k: eqx.nn.MLP(16, 8, 32, 2, key=k), optax.sgd(0.1), key=key
    )
    states = eqx.filter_vmap(init)(jax.random.split(KEY, 2))
    step = stepper(optax.sgd(0.1))
    _, metrics = eqx.filter_vmap(lambda s: step(s, BATCH))(states)
    assert metrics["loss"].shape == (2,)
    assert metrics["loss"][0] != metrics["loss"][1]


class Tied(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self, key):
        embedding = eqx.nn.Embedding(8, 16, key=key)
        head = eqx.nn.Linear(16, 8, use_bias=False, key=key)
        self.shared = eqx.nn.Shared((embedding, head), lambda p: p[1].weight, lambda p: p[0].weight)

    def __call__(self, token):
        embedding, head = self.shared()
        return head(embedding(token))


def token_loss(model, batch, key):
    logits = jax.vmap(model)(batch["y"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


@pytest.mark.thorough
def test_shared_weights_stay_one_parameter():
    model = Tied(jax.random.key(1))
    state = rc.fit(
        model,
        optax.adam(1e-2),
        list(BATCH["y"]),
        collate_fn=lambda e: {"y": np.stack(e)},
        loss_fn=token_loss,
        batch_size=8,
        steps=5,
        log=False,
    )
    embedding, head = state.model.shared()
    assert head.weight is embedding.weight
    assert len(arrays(state.model)) == 1
    assert not np.allclose(embedding.weight, model.shared()[0].weight)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The model has the same arrays at several places")
def test_the_same_array_twice_trains_as_two_parameters():
    # As in all of Equinox, PyTrees do not represent shared leaves. Donation must support them.
    def init_fn(key):
        linear = eqx.nn.Linear(16, 16, key=key)
        return [linear, linear, eqx.nn.Linear(16, 8, key=key)]

    def loss(model, batch, key):
        apply = lambda x: model[2](jnp.tanh(model[1](jnp.tanh(model[0](x)))))
        return loss_fn(apply, batch, key)[0]

    optimizer = optax.sgd(0.1)
    state = rc.init_state(init_fn, optimizer, key=KEY)
    shardings = rc.infer_shardings(state, rc.make_mesh())
    step = rc.compile_step(stepper(optimizer, loss), shardings)
    after, _ = step(state, BATCH)
    assert not np.allclose(after.model[0].weight, after.model[1].weight)
    model = init_fn(KEY)
    assert (
        rc.fit(
            model,
            optimizer,
            [0] * 8,
            collate_fn=lambda e: batch_of(len(e)),
            loss_fn=loss,
            batch_size=8,
            steps=2,
            log=False,
        ).step
        == 2
    )
    assert np.isfinite(model[0].weight).all()  # the caller's model is not donated


@pytest.mark.thorough
def test_learning_rate_of_the_optimizer_state_is_reported():
    schedule = optax.linear_schedule(1e-2, 0.0, 10)
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)
    step, state = eqx.filter_jit(stepper(optimizer)), start(optimizer)
    rates = []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [1e-2, 9e-3, 8e-3], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lbfgs", "polyak_sgd"])
def test_optimizers_that_use_the_loss(name):
    optimizer = {"lbfgs": optax.lbfgs(), "polyak_sgd": optax.polyak_sgd(1.0)}[name]
    step, state = eqx.filter_jit(stepper(optimizer)), start(optimizer)
    losses = []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1


def sharpness_aware(**options):
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), adversary, **options)


def clipped(*rest):
    return optax.chain(optax.clip_by_global_norm(0.5), *rest)


# Optimizers, and the extra arguments that their updates accept.
TAKE = {
    "sam": (sharpness_aware, ()),
    "sam in a chain": (lambda: clipped(sharpness_aware()), ()),
    "momo": (lambda: optax.contrib.momo(0.1), ("value",)),
    "plateau": (lambda: clipped(optax.contrib.reduce_on_plateau()), ("value",)),
    "line search": (
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
        ("value", "grad", "value_fn"),
    ),
    "sam that computes gradients": (lambda: sharpness_aware(opaque_mode=True), ("grad_fn",)),
    "sophia": (lambda: optax.contrib.sophia(0.1, update_interval=2), ("obj_fn",)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", TAKE)
def test_updates_receive_the_extra_arguments_that_they_accept(name):
    """As in a training loop with optax only."""
    make, takes = TAKE[name]
    optimizer = make()
    params, static = eqx.partition(make_model(), eqx.is_inexact_array)
    value_fn = lambda p: loss_fn(eqx.combine(p, static), BATCH, None)[0]

    @jax.jit
    def by_hand(params, opt_state):
        loss, grads = jax.value_and_grad(value_fn)(params)
        extras = {"value": loss, "grad": grads, "value_fn": value_fn, "obj_fn": value_fn}
        extras["grad_fn"] = lambda p, i: jax.grad(value_fn)(p)
        extras = {name: extras[name] for name in takes}
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params, **extras)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    step, state = eqx.filter_jit(stepper(optimizer)), start(optimizer)
    for _ in range(4):
        params, opt_state = by_hand(params, opt_state)
        state, _ = step(state, BATCH)
    assert int(state.step) == 4
    for x, y in zip(arrays(state.model), arrays(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_a_chain_of_which_one_part_rejects_extra_arguments():
    """optax passes the same arguments to all parts of a chain; the advice in the error works."""
    sam = sharpness_aware()
    mixed = optax.chain(sam, optax.contrib.reduce_on_plateau())
    with pytest.raises(TypeError, match="not accept `value`.*another part raised.*GradientTransf"):
        eqx.filter_eval_shape(stepper(mixed), start(mixed), BATCH)
    plain = optax.GradientTransformation(sam.init, sam.update)
    mixed = optax.chain(plain, optax.contrib.reduce_on_plateau())
    after = eqx.filter_eval_shape(stepper(mixed), start(mixed), BATCH)
    assert set(after[1]) == {"loss", "grad_norm", "skipped", "accuracy"}


def of_least_loss() -> Any:
    """A plain transformation with a number in its state, and an argument that optax has not."""

    def update(updates, state, params=None, *, value):
        least = jnp.minimum(state["least"], value)
        return jax.tree.map(lambda g: -least * g, updates), {"least": least}

    # Typed as optax calls it: with the three arguments of every transformation.
    as_optax: Any = update
    return optax.GradientTransformation(lambda params: {"least": jnp.inf}, as_optax)


@pytest.mark.parametrize("from_state", [False, True])
def test_an_own_optimizer_is_called_as_a_loop_by_hand_would(from_state):
    """Only here: numbers of Python in a state, and extra arguments of a plain transformation."""
    optimizer, model = of_least_loss(), make_model()
    params, static = eqx.partition(model, eqx.is_inexact_array)
    init = model
    if from_state:
        init = rc.TrainState(model, optimizer.init(params), jnp.zeros((), jnp.int32), KEY)
    state, step, _ = rc.prepare(
        init, optimizer, loss_fn, BATCH, mesh=rc.make_mesh(data=2, fsdp=2, model=2)
    )
    value = lambda p: loss_fn(eqx.combine(p, static), BATCH, None)[0]
    opt_state = optimizer.init(params)
    for _ in range(2):
        loss, grads = jax.value_and_grad(value)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(state.opt_state["least"], opt_state["least"], rtol=1e-6)
    for ours, theirs in zip(arrays(state.model), arrays(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_an_own_update_gets_no_argument_twice_and_none_that_it_has_refused():
    """Their names are those of extra arguments; and a wrapped update asks for what it refuses."""

    def plain(grad, value, params):
        return jax.tree.map(jnp.negative, grad), value

    make: Any = optax.GradientTransformation
    own = make(lambda params: (), plain)
    state, _ = stepper(own)(start(own), BATCH)
    assert state.step == 1

    def wrapped(grads, state, params):
        raise ValueError("obj_fn must be provided")

    asking = make(lambda params: (), wrapped)
    with pytest.raises((TypeError, ValueError), match="obj_fn must be provided"):
        eqx.filter_eval_shape(stepper(asking), start(asking), BATCH)


def test_a_type_error_in_the_loss_is_not_attributed_to_the_optimizer():
    """A similar error in the user's code is not changed."""

    def update(updates, state, params=None, *, value, **others):
        raise TypeError("f() got an unexpected keyword argument 'color'")

    optimizer: Any = optax.GradientTransformationExtraArgs(lambda params: (), update)  # pyright: ignore
    with pytest.raises(TypeError, match="argument 'color'"):
        eqx.filter_eval_shape(stepper(optimizer), start(optimizer), BATCH)


PRIVATE = optax.chain(
    optax.contrib.differentially_private_aggregate(1.0, 0.0, key=0), optax.sgd(0.1)
)


class Square(eqx.Module):
    """A model whose arrays have the same first dimension, like gradients of 16 examples."""

    a: jax.Array
    b: jax.Array

    def __call__(self, x):
        return self.b * jnp.tanh(self.a @ x)


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: optax.masked(o, True)])
def test_optimizers_of_per_example_gradients_raise(wrap):
    """They would treat the rows of the mean gradient as gradients of examples."""
    model = Square(jnp.ones((16, 16)), jnp.ones(16))
    words = "differentially_private_aggregate.*each example.*custom step.*compile_step"
    with pytest.raises(ValueError, match=words):
        start(wrap(PRIVATE), model)
    state = start(optax.sgd(0.1), model)
    opt_state = wrap(PRIVATE).init(eqx.filter(model, eqx.is_array))
    state = eqx.tree_at(lambda s: s.opt_state, state, opt_state)
    with pytest.raises(ValueError, match=words):
        stepper(wrap(PRIVATE), lambda m, b, k: jnp.sum(m(b["x"][0])))(state, BATCH)
    for given in (model, state):
        with pytest.raises(ValueError, match=words):
            rc.fit(
                given,
                wrap(PRIVATE),
                [0] * 8,
                collate_fn=lambda e: batch_of(len(e)),
                loss_fn=lambda m, b, k: jnp.mean(jax.vmap(m)(b["x"])),
                batch_size=8,
                steps=1,
                log=False,
            )


@pytest.mark.thorough
def test_optimizers_of_per_example_gradients_work_in_a_custom_step():
    """The advice in the error gives the mean of clipped gradients."""
    model = eqx.nn.Linear(16, 1, key=KEY)
    params, static = eqx.partition(model, eqx.is_array)
    x, y = BATCH["x"], BATCH["x"][:, 0]

    def loss(params, x, y):
        return jnp.sum((eqx.combine(params, static)(x) - y) ** 2)

    def step(state, x, y):
        params, opt_state = state
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
        updates, opt_state = PRIVATE.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    state = params, PRIVATE.init(params)
    compiled = rc.compile_step(step, rc.infer_shardings(state, rc.make_mesh()))
    (after, _), _ = compiled(jax.tree.map(jnp.copy, state), x, y)
    grads = [np.append(2 * x[i], 2.0) * float(loss_root(model, x[i], y[i])) for i in range(24)]
    mean = np.mean([g / max(1.0, np.linalg.norm(g)) for g in grads], 0)
    np.testing.assert_allclose(after.weight[0], model.weight[0] - 0.1 * mean[:16], rtol=1e-4)


def loss_root(model, x, y):
    return (model(x) - y)[0]


def test_an_update_of_another_shape_is_not_broadcast():
    update = lambda updates, state, params=None: (jax.tree.map(jnp.sum, updates), state)
    optimizer = optax.GradientTransformation(lambda params: (), update)
    with pytest.raises(ValueError, match=r"of shape \(\) for the parameter at layers/0/weight, of"):
        eqx.filter_eval_shape(stepper(optimizer), start(optimizer), BATCH)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (lambda g, state: (None, state), "no update for .* layers/0/weight.*set_to_zero"),
        (lambda g, state: (g, jnp.ones(2)), "shapes of the one before.*its root.*optimizer.init"),
    ],
)
def test_updates_that_would_be_lost_raise(new, words):
    """Only here: an array of another shape was broadcast to that of the state."""
    update = lambda updates, state, params=None: new(updates, state)
    optimizer = optax.GradientTransformation(lambda params: jnp.ones(1), update)
    with pytest.raises(ValueError, match=words):
        eqx.filter_eval_shape(stepper(optimizer), start(optimizer), BATCH)


@pytest.mark.parametrize(
    "model",
    [
        lambda model, opt: {"a": start(opt), "b": start(opt)},
        lambda model, opt: {"model": model, "opt": opt.init(eqx.filter(model, eqx.is_array))},
    ],
)
def test_an_optimizer_state_in_the_model_raises(model):
    """Adam's moments would be trained like parameters."""
    optimizer = optax.adamw(1e-2)
    model = model(make_model(), optimizer)
    with pytest.raises(TypeError, match="optimizer state at (a, b|opt/0).*`state.model`"):
        start(optimizer, model)
    with pytest.raises(TypeError, match="contains an optimizer state"):
        rc.fit(
            model,
            optimizer,
            [0] * 8,
            collate_fn=lambda e: batch_of(len(e)),
            loss_fn=loss_fn,
            batch_size=8,
            steps=1,
            log=False,
        )


@pytest.mark.thorough
def test_a_train_state_whose_optimizer_state_is_frozen():
    """`trainable` may be a prefix of the tree."""
    inner = start()
    nothing = jax.tree.map(lambda _: False, inner)
    spec = eqx.tree_at(lambda s: s.model, nothing, True)
    state = start(model={"a": inner}, trainable={"a": spec})
    step = stepper(loss=lambda m, b, k: loss_fn(m["a"].model, b, k), trainable={"a": spec})
    after, _ = eqx.filter_jit(step)(state, BATCH)
    assert eqx.tree_equal(after.model["a"].opt_state, inner.opt_state)
    assert (after.model["a"].model.layers[0].weight != inner.model.layers[0].weight).any()


@pytest.mark.thorough
def test_an_optimizer_state_of_other_leaves_raises():
    spec = jax.tree.map(lambda _: False, make_model())
    spec = eqx.tree_at(lambda m: m.layers[-1], spec, replace=True)
    words = "lacks 0/mu/layers/0/weight, .*`init_state`"
    with pytest.raises(ValueError, match=words):
        stepper()(start(trainable=spec), BATCH)
    with pytest.raises(ValueError, match="also has 0/mu/layers/0/weight"):
        stepper(trainable=spec)(start(), BATCH)
    wide = start(model=make_model(width=64)).opt_state
    with pytest.raises(ValueError, match="has other shapes at 0/mu/layers/0/weight"):
        stepper()(eqx.tree_at(lambda s: s.opt_state, start(), wide), BATCH)


@pytest.mark.few(
    "<lambda>-ValueError-shape \\\\(2,\\\\).*mean",
    "<lambda>-ValueError-int32",
    "<lambda>-TypeError-float",
    "<lambda>-TypeError-dict of scalar",
    "<lambda>-ValueError-tuple of length 4",
)
@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (lambda l: jnp.stack([l, l]), ValueError, r"shape \(2,\).*mean"),
        (lambda l: jnp.int32(1), ValueError, "int32"),
        (lambda l: 1.0, TypeError, "float"),
        (lambda l: (l, {"loss": l}), ValueError, "Use another name"),
        (lambda l: (l, {"time": l}), ValueError, "in each line of a log"),
        (lambda l: (l, l), TypeError, "dict of scalar"),
        (lambda l: (l, {"parts": {"a": l}}), TypeError, "each number in it a name.*parts/first"),
        (lambda l: (l, {"parts": {"a": l, "b": "x"}}), TypeError, r"aux\['parts'\] of type dict"),
        (lambda l: (l, {}, 1, 2), ValueError, "tuple of length 4"),
        (lambda l: (l, {}, "model"), ValueError, "different structure"),
    ],
)
def test_what_loss_fn_must_not_return(out, error, words):
    with pytest.raises(error, match=words):
        stepper(loss=lambda m, b, k: out(loss_fn(m, b, k)[0]))(start(), BATCH)


@pytest.mark.thorough
def test_a_custom_loop_gets_arrays_of_the_loss():
    """Such as the errors of the examples, for prioritised replay."""

    def loss(model, batch, key):
        value = loss_fn(model, batch, key)[0]
        indices = 2**24 + jnp.arange(3)
        return value, {"errors": jnp.full((4, 2), value), "indices": indices, "mask": indices > 2}

    _, metrics = eqx.filter_jit(stepper(loss=loss))(start(), BATCH)
    assert metrics["errors"].shape == (4, 2)
    assert metrics["indices"].tolist() == [2**24, 2**24 + 1, 2**24 + 2]
    assert metrics["mask"].dtype == bool
    assert (metrics["errors"] == metrics["loss"]).all()
    # The mean over microbatches would not be the errors of the batch.
    with pytest.raises(ValueError, match=r"aux\['errors'\] of shape .*without `accumulate`"):
        stepper(loss=loss, accumulate=2)(start(), BATCH)


@pytest.mark.parametrize("dtype", few_of([jnp.bfloat16, jnp.float16], jnp.bfloat16))
def test_a_returned_model_keeps_the_digits_of_its_frozen_weights(dtype):
    """Only here: they were rounded to `compute_dtype` in the first step."""
    model = {"net": make_model(), "frozen": make_model(1), "moved": jnp.full(3, 1.001)}

    def loss(model, batch, key):
        value, aux = loss_fn(model["net"], batch, key)
        return value, aux, {**model, "moved": model["moved"] + 1}

    state, step, _ = rc.prepare(
        model,
        optax.sgd(0.1),
        loss,
        BATCH,
        mesh=rc.make_mesh(data=2, fsdp=2, model=2),
        trainable="^net",
        compute_dtype=dtype,
    )
    state, _ = step(state, BATCH)
    for ours, theirs in zip(arrays(state.model["frozen"]), arrays(model["frozen"]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(state.model["moved"], np.full(3, dtype(1.001) + dtype(1)))


def test_the_returned_model_must_keep_its_shapes():
    def loss(model, batch, key):
        wide = eqx.tree_at(lambda m: m.layers[0].bias, model, jnp.zeros(33))
        return loss_fn(model, batch, key)[0], {}, wide

    with pytest.raises(ValueError, match=r"float32\[33\] at layers/0/bias"):
        stepper(loss=loss)(start(), BATCH)


def test_a_number_of_the_model_that_the_loss_changes_raises():
    """Only here: the step returned the number that it had been given."""
    model = {"net": make_model(), "count": 0}

    def loss(model, batch, key):
        value, aux = loss_fn(model["net"], batch, key)
        return value, aux, {**model, "count": model["count"] + 1}

    with pytest.raises(ValueError, match=r"has 1 at count, and was given 0.*`jnp.asarray\(0\)`"):
        stepper(loss=loss)(start(model=model), BATCH)


def test_state_is_created_sharded():
    mesh = rc.make_mesh(data=1, fsdp=8)
    optimizer = optax.adam(1e-3)
    init_fn = lambda key: eqx.nn.MLP(256, 256, 1024, 1, key=key)
    abstract = eqx.filter_eval_shape(rc.init_state, init_fn, optimizer, key=KEY)
    shardings = rc.infer_shardings(abstract, mesh)

    # Each device computes only its shards: no array in the program is as large as a full matrix.
    flat = jax.jit(
        lambda key: jax.tree.leaves(
            eqx.filter(rc.init_state(init_fn, optimizer, key=key), eqx.is_array)
        ),
        out_shardings=jax.tree.leaves(shardings),
    )
    memory: Any = flat.lower(KEY).compile().memory_analysis()
    whole = sum(x.size * 4 for x in jax.tree.leaves(abstract) if hasattr(x, "size"))
    assert memory.output_size_in_bytes < whole / 7
    assert memory.temp_size_in_bytes < whole / 4

    state = rc.init_state(init_fn, optimizer, key=KEY, shardings=shardings)
    alone = rc.init_state(init_fn, optimizer, key=KEY)
    for ours, theirs, sharding in zip(
        jax.tree.leaves(eqx.filter(state, eqx.is_array)),
        jax.tree.leaves(eqx.filter(alone, eqx.is_array)),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        assert ours.sharding == sharding
        if ours.ndim == 2:
            assert ours.addressable_shards[0].data.size == ours.size // 8
        if not jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6, atol=1e-7)


def test_complex_parameters_descend():
    def loss(model, batch, key):
        return jnp.abs(model["z"] - (1 + 1j)) ** 2

    state = rc.init_state(lambda key: {"z": jnp.zeros((), jnp.complex64)}, optax.sgd(0.1), key=KEY)
    step = eqx.filter_jit(stepper(optax.sgd(0.1), loss))
    for _ in range(30):
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(np.asarray(state.model["z"]), 1 + 1j, atol=0.01)


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    scale: np.floating  # as returned by `np.sqrt(width)`

    def __init__(self, key):
        self.linear = eqx.nn.Linear(16, 8, key=key)
        self.scale = np.float32(np.sqrt(16))

    def __call__(self, x):
        return self.linear(x) / self.scale


@pytest.mark.thorough
def test_numpy_scalars_are_arrays():
    mesh = rc.make_mesh()
    abstract = eqx.filter_eval_shape(rc.init_state, Scaled, optax.adam(1e-2), key=KEY)
    shardings = rc.infer_shardings(abstract, mesh)
    state = rc.init_state(Scaled, optax.adam(1e-2), key=KEY, shardings=shardings)
    after, _ = rc.compile_step(stepper(), shardings)(state, BATCH)
    assert int(after.step) == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"accumulate": 0}, ValueError, "`accumulate` is 0"),
        ({"loss": lambda m, b, k: (loss_fn(m, b, k)[0], {"n": None})}, TypeError, r"aux\['n'\]"),
    ],
)
def test_other_invalid_arguments_raise(options, error, words):
    with pytest.raises(error, match=words):
        stepper(**options)(start(), BATCH)


def test_running_averages_in_half_precision_warn(caplog):
    def init_fn(key):
        return eqx.nn.make_with_state(eqx.nn.BatchNorm)(16, axis_name="batch", mode="ema")

    def loss(model, batch, key):
        norm, state = model
        apply = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = apply(batch["x"], state)
        return jnp.mean(out**2), {}, (norm, state)

    state = rc.init_state(init_fn, optax.sgd(0.1), key=KEY)
    for dtype in (None, jnp.float32):
        step = stepper(optax.sgd(0.1), loss, compute_dtype=dtype)
        eqx.filter_eval_shape(step, state, BATCH)
    assert caplog.text == ""
    step = stepper(optax.sgd(0.1), loss, compute_dtype=jnp.bfloat16)
    eqx.filter_eval_shape(step, state, BATCH)
    assert "Running averages" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2**40, np.int64(2**40), np.array(2**40)])
def test_large_counts_in_aux_do_not_wrap_around(count):
    """JAX would convert them to int32, and report 0 or raise an error."""
    loss = lambda model, batch, key: (loss_fn(model, batch, key)[0], {"seen": count})
    _, metrics = eqx.filter_jit(stepper(loss=loss))(start(), BATCH)
    assert float(metrics["seen"]) == 2**40


@pytest.mark.thorough
@pytest.mark.few("nan")
@pytest.mark.parametrize("weight", [-1.0, math.nan])
def test_no_weight_but_zero_leaves_a_microbatch_out(weight):
    """A negative weight counts as any other, and the step of a weight that is NaN is skipped."""
    loss = lambda model, batch, key: (loss_fn(model, batch, key)[0], {"weight": weight})
    state, metrics = eqx.filter_jit(stepper(loss=loss, accumulate=2))(start(), BATCH)
    plain, expected = eqx.filter_jit(stepper(accumulate=2))(start(), BATCH)
    if math.isnan(weight):
        assert math.isnan(metrics["loss"])
        assert metrics["skipped"] == 1
    else:
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
        for a, b in zip(arrays(state.opt_state), arrays(plain.opt_state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_names_of_metrics_are_strings():
    loss = lambda model, batch, key: (loss_fn(model, batch, key)[0], {1: 2.0})
    with pytest.raises(TypeError, match="a metric named 1 in `aux`. Names are strings"):
        stepper(loss=loss)(start(), BATCH)
