"""Bad inputs to what trains, evaluates and predicts."""

# pyright: reportArgumentType=false, reportCallIssue=false

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from bad_helpers import (
    ABSTRACT,
    EXAMPLES,
    KEY,
    SGD,
    deleted,
    deleted_key,
    evaluate,
    fit,
    other_mesh,
    predict,
    state,
    step,
    written,
)
from problem import Stream, batch_of, collate_fn, loss_fn, make_model

import redcoast as rc

LOSSES = {
    "not scalar": (lambda m, b, k: jnp.zeros(3), ValueError, r"`loss_fn`.*shape \(3,\)"),
    "integer": (lambda m, b, k: jnp.int32(1), ValueError, "`loss_fn`.*int32"),
    "Python's": (lambda m, b, k: 1.0, TypeError, "`loss_fn`.*type float"),
    "nothing": (lambda m, b, k: None, TypeError, "`loss_fn`.*NoneType"),
    "four": (lambda m, b, k: (1, 2, 3, 4), ValueError, "`loss_fn`.*tuple of length 4"),
    "aux": (lambda m, b, k: (jnp.sum(b["x"]), 3), TypeError, "second.*type int"),
    "reserved": (lambda m, b, k: (jnp.sum(b["x"]), {"loss": 1}), ValueError, "'loss'"),
    "key": (lambda m, b, k: (jnp.sum(b["x"]), {"a": k}), TypeError, r"key in aux\['a'\]"),
    "text": (lambda m, b, k: (jnp.sum(b["x"]), {"a": "b"}), TypeError, r"aux\['a'\].*str"),
    "text of NumPy": (
        lambda m, b, k: (jnp.sum(b["x"]), {"a": np.str_("b")}),
        TypeError,
        r"aux\['a'\].*<U1",
    ),
    "date": (
        lambda m, b, k: (jnp.sum(b["x"]), {"a": np.datetime64("2020-01-01")}),
        TypeError,
        r"aux\['a'\] of the dtype datetime64\[D\].*timedelta64",
    ),
    "other model": (lambda m, b, k: (jnp.sum(b["x"]), {}, 3), ValueError, "different structure"),
}


def loss_with_array(model, batch, key):
    return loss_fn(model, batch, key)[0], {"a": batch["x"]}


def loop_batches(**options):
    settings = {"batch_size": 4, "key": KEY, "steps": 2, **options}
    return rc.batches(EXAMPLES, collate_fn, **settings)


def reader(*args, **options):
    return rc.metrics_reader(*args, **options).__enter__()


def muon(dimensions=None, **options):
    dimensions = dimensions or {"w": optax.contrib.MuonDimensionNumbers(0, 1)}
    return rc.muon(0.1, dimensions, others=SGD, **options)


def soap(**options):
    numbers = {"w": optax.contrib.MuonDimensionNumbers(0, 1)}
    return rc.soap(0.1, options.pop("dimensions", numbers), others=SGD, **options)


def shampoo(**options):
    numbers = {"w": optax.contrib.MuonDimensionNumbers(0, 1)}
    return rc.shampoo(0.1, options.pop("dimensions", numbers), others=SGD, **options)


def low_precision(size=64, **options):
    low = rc.low_precision(lambda params, x: x @ params["w"], "float8", **options)
    return low({"w": jnp.ones((size, size))}, jnp.ones((2, size)))


def update_with_one_side():
    params = {"w": jnp.ones((4, 4))}
    optimizer = muon({"w": optax.contrib.MuonDimensionNumbers(0, 0)})
    optimizer.update(params, optimizer.init(params), params)


def other_plan():
    return rc.plan_shardings({"w": jnp.zeros(8)}, rc.make_mesh(devices=jax.devices()[:1]))


def shardings_of(tree):
    return rc.infer_shardings(tree, rc.make_mesh())


def compiled_alone():
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=SGD)
    return rc.compile_step(step, shardings_of(state()))


def after_deletion(state):
    jax.tree.map(lambda x: x.delete(), eqx.filter(state.model, eqx.is_array))
    return state


def no_rows():
    return jax.tree.map(lambda x: x[:0], batch_of(8))


ROWS = {
    "LossScale": [
        (lambda d: rc.LossScale("big"), TypeError, "`value` is 'big'"),
        (lambda d: rc.LossScale(0.5), ValueError, r"`value` is 0\.5.*between 1 and 2\^24"),
        (lambda d: rc.LossScale(float("nan")), ValueError, "`value` is nan"),
        (lambda d: rc.LossScale(period=0), ValueError, "`period` is 0"),
        (lambda d: rc.LossScale(period=2.5), TypeError, r"`period` is 2\.5"),
    ],
    "init_state": [
        (
            lambda d: rc.init_state(lambda k: {"w": jnp.zeros(3, jnp.int32)}, SGD, key=KEY),
            ValueError,
            "no trainable leaves",
        ),
        (lambda d: rc.init_state(lambda k: make_model(), None, key=KEY), TypeError, "`optimizer`"),
        (
            lambda d: rc.init_state(lambda k: make_model(), optax.sgd, key=KEY),
            TypeError,
            "`optimizer`",
        ),
        (lambda d: rc.init_state({}, SGD, key=KEY), ValueError, "it is empty"),
        (lambda d: rc.init_state(3, SGD, key=KEY), TypeError, "`init_fn` is 3"),
        (
            lambda d: rc.init_state({"w": deleted()}, SGD, key=KEY),
            ValueError,
            "`init_state` was given was donated .*at w",
        ),
        (
            lambda d: rc.init_state(make_model(), SGD, key=KEY, shardings=other_plan()),
            TypeError,
            r"`shardings` is of type Plan.*`plan\.shardings`",
        ),
        (
            lambda d: rc.init_state(
                lambda k: make_model(), optax.adam(1.0), key=KEY, shardings=shardings_of(state())
            ),
            ValueError,
            "`shardings` does not match the state. It has no sharding for opt_state/0/count",
        ),
        (
            lambda d: rc.init_state(
                {"w": jnp.ones(2)}, SGD, key=KEY, shardings=shardings_of(state())
            ),
            ValueError,
            "`shardings` does not match the state. It has no sharding for w",
        ),
        (
            lambda d: rc.init_state(lambda k: make_model(), SGD, key=KEY, compute_dtype=jnp.int8),
            ValueError,
            "`compute_dtype` must be a floating dtype",
        ),
        (lambda d: rc.init_state(lambda k: make_model(), SGD, key=0), TypeError, "`key`"),
    ],
    "train_step": [
        *[(lambda d, f=f: step(f), error, words) for f, error, words in LOSSES.values()],
        (lambda d: step(loss_with_array, accumulate=2), ValueError, r"aux\['a'\] of shape"),
        (lambda d: step(accumulate=0), ValueError, "`accumulate` is 0"),
        (lambda d: step(accumulate=3), ValueError, "accumulate=3.*does not divide"),
        (lambda d: step(accumulate=2.0), TypeError, r"`accumulate` is 2\.0"),
        (lambda d: step(compute_dtype=jnp.int32), ValueError, "int32"),
        (lambda d: step(compute_dtype="low"), TypeError, "low"),
        (lambda d: step(loss=3), TypeError, "`loss_fn`"),
        (lambda d: step(optimizer=optax.adam(1e-3)), ValueError, "optimizer"),
        (lambda d: step(optimizer=None), TypeError, "`optimizer`"),
        # Without a state of its own, it would return the other's as it is.
        (
            lambda d: rc.train_step(
                rc.init_state(make_model(), optax.adam(1.0), key=KEY),
                batch_of(8),
                loss_fn=loss_fn,
                optimizer=SGD,
            ),
            ValueError,
            "not the one that the state was created with.*also has 0/count, 0/mu",
        ),
        (
            lambda d: step(lambda m, b, k: (jnp.sum(b["x"]), m, {"a": 1})),
            TypeError,
            "order is `return loss, aux, model`",
        ),
        (
            lambda d: rc.train_step(
                after_deletion(state()), batch_of(8), loss_fn=loss_fn, optimizer=SGD
            ),
            ValueError,
            "`train_step` was called with was donated .*at model/layers/0/weight",
        ),
        (
            lambda d: rc.train_step(make_model(), batch_of(8), loss_fn=loss_fn, optimizer=SGD),
            TypeError,
            "TrainState",
        ),
    ],
    "compile_step": [
        (lambda d: rc.compile_step(rc.train_step, {}), ValueError, "has no leaves"),
        (
            lambda d: rc.compile_step(3, rc.infer_shardings(ABSTRACT, rc.make_mesh())),
            TypeError,
            "`step`",
        ),
        (
            lambda d: rc.compile_step(
                lambda s: (s, 0), rc.infer_shardings(ABSTRACT, rc.make_mesh())
            )(state()),
            ValueError,
            "no sharding for model/layers/0/weight, .*The state has nothing at w",
        ),
        (
            lambda d: rc.compile_step(rc.train_step, other_plan()),
            TypeError,
            r"`state_shardings` is of type Plan.*`plan\.shardings`",
        ),
        (
            lambda d: eqx.filter_eval_shape(compiled_alone(), state(), batch_of(8)),
            TypeError,
            "`step` was called inside `jax.vmap`.*`plan.constrain",
        ),
    ],
    "predict": [
        (
            lambda d: rc.predict(make_model(), "text", predict_fn=lambda m, b, k: b),
            TypeError,
            "text at the batch",
        ),
        (
            lambda d: rc.predict(
                make_model(), batch_of(4), predict_fn=lambda m, b, k: jnp.zeros(3)
            ),
            ValueError,
            r"`predict_fn`.*\(3,\)",
        ),
        (
            lambda d: rc.predict(make_model(), batch_of(4), predict_fn=lambda m, b, k: {}),
            ValueError,
            "`predict_fn` returned no array",
        ),
        (
            lambda d: rc.predict(make_model(), batch_of(4), 0, predict_fn=lambda m, b, k: b),
            TypeError,
            "`key` is 0",
        ),
        (
            lambda d: rc.predict(make_model(), batch_of(4), predict_fn=None),
            TypeError,
            "`predict_fn`",
        ),
    ],
    "per_batch": [
        (lambda d: rc.per_batch({"a": [1.0]}), TypeError, "float at a/0"),
        (lambda d: rc.per_batch({}), ValueError, "no arrays"),
        (lambda d: rc.per_batch([rc.per_batch(np.ones(3))]), ValueError, "already"),
    ],
    "token_windows": [
        (lambda d: rc.token_windows(np.zeros(9), 4), TypeError, "array float64.*integers"),
        (lambda d: rc.token_windows(deleted(), 4), ValueError, "`tokens` has an array .* deleted"),
        (lambda d: rc.token_windows(np.zeros((9, 2), int), 4), TypeError, "one dimension"),
        (lambda d: rc.token_windows("train.bin", 4), TypeError, "`tokens` has str"),
        (lambda d: rc.token_windows(np.arange(9), 10), ValueError, "fewer than a window of 10"),
        (lambda d: rc.token_windows(np.arange(9), 4, stride=0), ValueError, "`stride` is 0"),
        (lambda d: rc.token_windows([], 4), ValueError, "at most 0 tokens"),
    ],
    "split_by_host": [
        (lambda d: rc.split_by_host([1, 2]), TypeError, "`make`.*a function"),
        (
            lambda d: fit(examples=rc.split_by_host(lambda i, n: EXAMPLES)),
            TypeError,
            "has a length and an index",
        ),
    ],
    "batches": [
        (lambda d: loop_batches(batch_size=0), ValueError, "`batch_size` is 0"),
        (lambda d: loop_batches(steps=None), ValueError, "how long"),
        (lambda d: loop_batches(epochs=1), ValueError, "epochs=1.*steps=2"),
        (lambda d: loop_batches(key=3), TypeError, "`key` is 3"),
        (lambda d: loop_batches().set_state({"step": 1, "length": None}), ValueError, "a stream"),
    ],
    "plan_step": [
        (
            lambda d: rc.plan_step(state(), loss_fn, batch_of(8), rc.make_mesh(), accumulate=0),
            ValueError,
            "`accumulate` is 0",
        ),
        (lambda d: rc.plan_step(state(), None, batch_of(8)), TypeError, "`loss_fn`"),
        (lambda d: rc.plan_step(state(), loss_fn, no_rows()), ValueError, r"no rows.*\(0, 16\)"),
        (
            lambda d: rc.plan_step(make_model(), loss_fn, batch_of(8), optimizer=SGD),
            TypeError,
            "`state` is of type MLP",
        ),
        (
            lambda d: rc.plan_step(state(), loss_fn, {"a": "text"}),
            TypeError,
            "text at a",
        ),
        (
            lambda d: rc.plan_step(state(), loss_fn, batch_of(8), microbatches=2),
            ValueError,
            "`microbatches=2` needs a pipeline",
        ),
        (
            lambda d: rc.plan_step(state(), loss_fn, batch_of(8), compute_dtype=jnp.int8),
            ValueError,
            "`compute_dtype` must be a floating dtype",
        ),
    ],
    "Checkpointer": [
        (lambda d: rc.Checkpointer(7), TypeError, "`checkpoints` is 7.*redcoast.Checkpoints"),
        (lambda d: rc.Checkpointer("s3://runs/a"), ValueError, "an address"),
    ],
    "training_steps": [
        (lambda d: next(rc.training_steps(state(), [], None)), TypeError, "`step`"),
    ],
    "prepare": [
        (
            lambda d: rc.prepare(make_model, None, loss_fn, batch_of(8), key=KEY),
            TypeError,
            "`optimizer`",
        ),
        (
            lambda d: rc.prepare(None, SGD, loss_fn, batch_of(8), key=KEY),
            TypeError,
            "that `prepare` was given is None",
        ),
        (
            lambda d: rc.prepare(make_model, SGD, loss_fn, batch_of(8), key=KEY, steps_per_call=0),
            ValueError,
            "`steps_per_call` is 0",
        ),
        (
            lambda d: rc.prepare(make_model, SGD, None, batch_of(8), key=KEY),
            TypeError,
            "`loss_fn` is None",
        ),
    ],
    "train_steps": [
        (lambda d: rc.train_steps(None, batch_of(8)), TypeError, "`state` is None.*TrainState"),
        (
            lambda d: rc.train_steps(state(), {"a": jnp.ones(2), "b": jnp.ones((3, 1))}),
            ValueError,
            "number of steps",
        ),
    ],
    "batch_shardings": [
        (
            lambda d: rc.batch_shardings({"reward": jnp.ones((6, 2))}, rc.make_mesh(data=8)),
            ValueError,
            r"reward has shape \(6, 2\), .*a multiple of 8",
        ),
    ],
    "with_gradient": [
        (
            lambda d: rc.with_gradient(jnp.float32(0), {"a": jnp.ones(2)}, {"b": jnp.ones(2)}),
            ValueError,
            "has b, which is not a floating array",
        ),
        (
            lambda d: rc.with_gradient(make_model(), jnp.float32(0), make_model()),
            TypeError,
            "`loss` is of type MLP.*second argument",
        ),
    ],
    "moving_average": [
        (lambda d: rc.moving_average({}, {}, 1.5), ValueError, "`decay` is 1.5"),
        (lambda d: rc.moving_average({}, {}, True), TypeError, "`decay` is True"),
    ],
    "stop_on_signal": [
        (lambda d: rc.stop_on_signal(0).__enter__(), ValueError, "`max_seconds` is 0"),
        (lambda d: rc.stop_on_signal(mesh=8).__enter__(), TypeError, "`mesh` is 8"),
        (lambda d: rc.stop_on_signal("1h").__enter__(), TypeError, "`max_seconds` is '1h'"),
    ],
    "metrics_reader": [
        (lambda d: reader(max_skipped=0), ValueError, "`max_skipped` is 0"),
        (lambda d: reader(max_skipped=1.5), TypeError, r"`max_skipped` is 1\.5"),
        (lambda d: reader(3), TypeError, "`log` is of type int"),
        (lambda d: reader(run=[]), TypeError, "`run` is of type list.*redcoast.run_info"),
    ],
    "run_info": [
        (lambda d: rc.run_info(None, None), TypeError, "`plan` is None.*redcoast.Plan"),
        (lambda d: rc.run_info(other_plan(), []), TypeError, "`data` is of type list"),
    ],
    "EarlyStopping": [
        (lambda d: rc.EarlyStopping(0), ValueError, "`EarlyStopping.patience` is 0"),
        (lambda d: rc.EarlyStopping(2.5), TypeError, r"`EarlyStopping.patience` is 2\.5"),
        (lambda d: rc.EarlyStopping(2, metric=3), TypeError, "name of a metric"),
        (lambda d: rc.EarlyStopping(2, mode="least"), ValueError, "'min' or 'max'"),
    ],
    "Evaluation": [
        (lambda d: rc.Evaluation(EXAMPLES, every=0), ValueError, "`every` is 0"),
        (lambda d: rc.Evaluation(EXAMPLES, loss_fn=3), TypeError, "`loss_fn` is 3"),
        (lambda d: rc.Evaluation(EXAMPLES, metric_fn=len), ValueError, "pass `predict_fn` too"),
        (lambda d: rc.Evaluation(EXAMPLES, predict_fn=len), ValueError, "pass `metric_fn` too"),
        (lambda d: rc.Evaluation(EXAMPLES, output_fn=len), ValueError, "pass `metric_fn` too"),
    ],
    "compile_evaluation": [
        (lambda d: rc.compile_evaluation(EXAMPLES, other_plan()), TypeError, "`evaluation`"),
        (lambda d: rc.compile_evaluation(rc.Evaluation(EXAMPLES), None), TypeError, "`plan`"),
        (
            lambda d: rc.compile_evaluation(rc.Evaluation(EXAMPLES, loss_fn=len), other_plan()),
            ValueError,
            "needs batches: pass `batch_size`",
        ),
        (
            lambda d: rc.compile_evaluation(
                rc.Evaluation(EXAMPLES, collate_fn=collate_fn, batch_size=4), other_plan()
            ),
            ValueError,
            "needs a `loss_fn`, or",
        ),
    ],
    "fit": [
        (lambda d: fit(batch_size=0), ValueError, "`batch_size` is 0"),
        (lambda d: fit(batch_size=8.0), TypeError, r"`batch_size` is 8\.0"),
        (lambda d: fit(steps=0), ValueError, "`steps` is 0"),
        (lambda d: fit(steps=True), TypeError, "`steps` is True"),
        (lambda d: fit(steps=10**30), ValueError, "`steps` is 1,000.* at most 2,147,483,647"),
        (lambda d: fit(epochs=10**30, steps=None), ValueError, "`epochs` is 1,000.* at most 2,147"),
        (lambda d: fit(batch_size=10**30), ValueError, "`batch_size` is 1,000.* at most 9,223"),
        (lambda d: fit(examples=deleted()), ValueError, "`examples` has an array .* deleted"),
        (lambda d: fit(examples=(deleted(), EXAMPLES)), ValueError, "`examples` has an array"),
        (lambda d: fit(key=deleted_key()), ValueError, "`key` has an array .* deleted"),
        (lambda d: fit(batch_size=10**10), MemoryError, "batch of 10,000,000,000 examples"),
        (lambda d: fit(steps_per_call=0), ValueError, "`steps_per_call` is 0"),
        (lambda d: fit(steps_per_call="4"), TypeError, "`steps_per_call` is '4'"),
        (lambda d: fit(steps=2.5), TypeError, r"`steps` is 2\.5"),
        (lambda d: fit(loss_fn=loss_with_array), ValueError, r"aux\['a'\] of shape"),
        (
            lambda d: fit(loss_fn=LOSSES["date"][0]),
            TypeError,
            r"aux\['a'\] of the dtype datetime64",
        ),
        (lambda d: fit(epochs=-1, steps=None), ValueError, "`epochs` is -1"),
        (lambda d: fit(epochs=1), ValueError, "epochs=1.*steps=2"),
        (lambda d: fit(steps=None), ValueError, "how long"),
        (lambda d: fit(examples=[]), ValueError, "`examples` is empty"),
        (lambda d: fit(examples=None), TypeError, "`examples`"),
        (lambda d: fit(examples=7), TypeError, "`examples`.*int"),
        (
            lambda d: fit(examples=iter(EXAMPLES), checkpoints=rc.Checkpoints(d)),
            TypeError,
            "`examples`.*iterator without a state.*generator function",
        ),
        (lambda d: fit(examples=iter([])), ValueError, "no example"),
        (lambda d: fit(examples=set()), TypeError, "is a set"),
        (lambda d: fit(examples=iter(EXAMPLES), steps=None, epochs=1), ValueError, "no epochs"),
        (lambda d: fit(examples=lambda: 7), TypeError, r"`examples\(\)` is of type int"),
        (lambda d: fit(examples="data/train"), TypeError, "`examples` is a string, 'data/train'"),
        (
            lambda d: fit(batch_size=None, collate_fn=None),
            TypeError,
            "An item of `examples` at index is of type int. .*PyTrees of numeric arrays",
        ),
        (lambda d: fit(workers=-1), ValueError, "`workers` is -1"),
        (lambda d: fit(ahead=1.5), TypeError, "`ahead`.*integer"),
        (lambda d: fit(examples={"x": np.zeros(9)}), TypeError, "columns"),
        (lambda d: fit(examples=Stream([])), ValueError, "no example"),
        (lambda d: fit(examples=Stream(EXAMPLES), steps=None, epochs=1), ValueError, "no epochs"),
        (lambda d: fit(accumulate=0), ValueError, "`accumulate` is 0"),
        (lambda d: fit(accumulate="2"), TypeError, "`accumulate` is '2'"),
        (lambda d: fit(overrides=None), TypeError, "`overrides` is None.*a list of pairs"),
        (lambda d: fit(overrides={"w": None}), TypeError, "`overrides` is of type dict"),
        (lambda d: fit(overrides=[7]), ValueError, "The override 7 is not a pair"),
        (lambda d: fit(memory=np.ones(2)), TypeError, "`memory` is of type ndarray"),
        (lambda d: fit(plan=np.ones(2)), TypeError, "`plan` is of type ndarray"),
        (lambda d: fit(mesh=deleted()), TypeError, "`mesh` is of type jax.Array"),
        (
            lambda d: fit(evaluation=rc.Evaluation([])),
            ValueError,
            "`Evaluation.examples` is empty",
        ),
        (lambda d: fit(log=[print, 3]), TypeError, r"`log\[2\]`.*int.*list"),
        (lambda d: fit(evaluation=EXAMPLES), TypeError, "`evaluation`.*redcoast.Evaluation"),
        (lambda d: fit(plan="plan.json"), TypeError, '`plan`.*load_plan.*"verify"'),
        (
            lambda d: fit(plan=other_plan(), overrides=[("w", None)]),
            ValueError,
            "leave `overrides`",
        ),
        (lambda d: fit(plan=other_plan()), ValueError, "not for this state.*layers/0/bias"),
        (lambda d: fit(plan=other_plan(), mesh=other_mesh()), ValueError, "leave `mesh` out"),
        (lambda d: fit(checkpoints=3), TypeError, "`checkpoints` is .*redcoast.Checkpoints"),
        (lambda d: fit(early_stopping=3), TypeError, "`early_stopping` is 3.*EarlyStopping"),
        (lambda d: fit(early_stopping=rc.EarlyStopping(3)), ValueError, "pass `evaluation` too"),
        (lambda d: fit(average=2.0), ValueError, r"`average` is 2\.0.*between 0 and 1"),
        (lambda d: fit(average="ema"), TypeError, "`average` is 'ema'. It must be a number"),
        (lambda d: fit(optimizer=None), TypeError, "`optimizer`"),
        (lambda d: fit(optimizer=optax.adam), TypeError, "`optimizer`"),
        (lambda d: fit(loss_fn=None), TypeError, "`loss_fn`"),
        (lambda d: fit(collate_fn=3), TypeError, "`collate_fn`"),
        (
            lambda d: fit(evaluation=rc.Evaluation(EXAMPLES, predict_fn=3, metric_fn=len)),
            TypeError,
            "`predict_fn`",
        ),
        (lambda d: fit(mesh="cpu"), TypeError, "`mesh`"),
        (lambda d: fit(mesh=other_mesh()), ValueError, "axes|axis"),
        (lambda d: fit(key=0), TypeError, "`key`"),
        (lambda d: fit(key=jnp.zeros(4, jnp.uint32)), ValueError, "`key` has 4 numbers.*have 2"),
        (lambda d: fit(model_or_state=state(), key=KEY), ValueError, "leave `key` out"),
        (lambda d: fit(model_or_state={"w": 3}), ValueError, "no trainable leaves"),
        (lambda d: fit(collate_fn=lambda e: e), TypeError, "`collate_fn` returned"),
        (
            lambda d: fit(collate_fn=lambda e: {"x": np.zeros((3, 2))}),
            ValueError,
            r"8 examples.*\(3, 2\)",
        ),
        (lambda d: fit(collate_fn=lambda e: {"x": np.array(["a"] * 8)}), TypeError, "<U1"),
        (
            lambda d: fit(checkpoints=rc.Checkpoints(d / "b", best="loss")),
            ValueError,
            "best='loss'",
        ),
        (
            lambda d: fit(checkpoints=rc.Checkpoints(written(d / "f" / "x", "") / "x")),
            (ValueError, OSError),
            "f/x",
        ),
    ],
    "soap": [
        (lambda d: soap(b1=1.0), ValueError, "`b1`.*1.0"),
        (lambda d: soap(b2=-0.1), ValueError, "`b2`.*-0.1"),
        (lambda d: soap(statistics=2.0), ValueError, "`statistics`.*2.0"),
        (lambda d: soap(eps=0.0), ValueError, "`eps`.*0.0"),
        (lambda d: soap(eps="1e-8"), TypeError, "`eps` is '1e-8'.*a number"),
        (lambda d: soap(frequency=0), ValueError, "`frequency`.*0"),
        (lambda d: soap(frequency=2.5), TypeError, "`frequency` is 2.5.*integer"),
        (lambda d: rc.soap(None, None, others=SGD), TypeError, "`learning_rate` is None"),
        (lambda d: soap(weight_decay="no"), TypeError, "`weight_decay` is 'no'"),
        (lambda d: soap(dimensions={"w": None}), ValueError, "`dimensions` has no matrix"),
        (lambda d: soap().init({"v": jnp.zeros((4, 4))}), ValueError, "`rc.soap` is not shaped"),
    ],
    "shampoo": [
        (lambda d: shampoo(b1=1.0), ValueError, "`b1`.*1.0"),
        (lambda d: shampoo(b2=-0.1), ValueError, "`b2`.*-0.1"),
        (lambda d: shampoo(statistics=2.0), ValueError, "`statistics`.*2.0"),
        (lambda d: shampoo(eps=0.0), ValueError, "`eps`.*0.0"),
        (lambda d: shampoo(frequency=0), ValueError, "`frequency`.*0"),
        (lambda d: shampoo(frequency=2.5), TypeError, "`frequency` is 2.5.*integer"),
        (lambda d: rc.shampoo(None, None, others=SGD), TypeError, "`learning_rate` is None"),
        (lambda d: shampoo(weight_decay="no"), TypeError, "`weight_decay` is 'no'"),
        (lambda d: shampoo(dimensions={"w": None}), ValueError, "`dimensions` has no matrix"),
        (lambda d: shampoo().init({"v": jnp.zeros((4, 4))}), ValueError, "`rc.shampoo` is not"),
    ],
    "low_precision": [
        (lambda d: rc.low_precision(3, "int8"), TypeError, "`fn` is 3"),
        (lambda d: rc.low_precision(len, "int4"), ValueError, "`numbers` is 'int4'.*'float8' or"),
        (lambda d: rc.low_precision(len, "int8", exclude="("), ValueError, r"'\('.*not a reg"),
        (lambda d: rc.low_precision(len, "int8", exclude=[3]), TypeError, "`exclude` is 3"),
        (lambda d: low_precision(exclude="head"), ValueError, "'head'.*matches none.*w"),
        (lambda d: low_precision(), ValueError, "No product.*float8.*leaves out the last"),
        (lambda d: low_precision(size=8, exclude=()), ValueError, "No product.*at least 32"),
    ],
    "muon": [
        (lambda d: muon(momentum=1.0), ValueError, "`momentum`.*1.0"),
        (lambda d: muon(iterations=0), ValueError, "`iterations`.*0"),
        (lambda d: muon(momentum=None), TypeError, "`momentum` is None.*a number"),
        (lambda d: muon(iterations=2.5), TypeError, "`iterations` is 2.5.*integer"),
        (
            lambda d: rc.muon(0.1, {"w": None}, others=optax.sgd),
            TypeError,
            "`others` is .*optimizer",
        ),
        (lambda d: muon(rms=0.0), ValueError, "`rms`.*0.0"),
        (lambda d: muon({"w": None}), ValueError, "`dimensions` has no matrix"),
        (lambda d: muon().init({"v": jnp.zeros((4, 4))}), ValueError, "not shaped like the par"),
        (lambda d: update_with_one_side(), ValueError, r"both sides of a matrix of shape \(4, 4\)"),
    ],
    "evaluate": [
        (lambda d: evaluate(examples=[]), ValueError, "`examples` is empty"),
        (lambda d: evaluate(batch_size=-1), ValueError, "`batch_size` is -1"),
        (lambda d: evaluate(loss_fn=None), TypeError, "`loss_fn`"),
        (lambda d: evaluate(collate_fn=3), TypeError, "`collate_fn`"),
        (lambda d: evaluate(examples=Stream(EXAMPLES)), TypeError, "`examples`.*Stream"),
        (lambda d: evaluate(mesh=3), TypeError, "`mesh`"),
        (
            lambda d: jax.jit(lambda key: evaluate(key=key))(KEY),
            TypeError,
            "`evaluate` was called inside.*`loss_fn` there",
        ),
    ],
    "predict_examples": [
        (lambda d: predict(output_fn=lambda p: [1]), ValueError, "`output_fn`.*8 examples.*1"),
        (lambda d: predict(output_fn=lambda p: 3), ValueError, "`output_fn`.*int"),
        (lambda d: predict(predict_fn=None), TypeError, "`predict_fn`"),
        (lambda d: predict(output_fn=3), TypeError, "`output_fn` is 3"),
        (lambda d: predict(gather=0), TypeError, "`gather` is 0.*'all' or 'first' or 'none'"),
        (lambda d: predict(gather="one"), ValueError, "`gather` is 'one'"),
        (lambda d: predict(batch_size="8"), TypeError, "`batch_size` is '8'"),
    ],
}
