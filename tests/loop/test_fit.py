import functools as ft
import math
import os
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
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
from redcoast.loop import _stop
from redcoast.tracking._loggers import say_once

EXAMPLES = make_examples(200)


def fit(*, steps=None, epochs=None, model=None, optimizer=None, **kwargs):
    if steps is None and epochs is None:
        steps = 4
    options = {
        "examples": EXAMPLES,
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": 16,
    } | kwargs
    model = make_model() if model is None else model
    optimizer = optax.adamw(1e-2) if optimizer is None else optimizer
    return fit_quietly(model, optimizer, epochs=epochs, steps=steps, **options)


def logged(**kwargs):
    """The state at the end, and what was logged by step."""
    lines = {}

    def log(metrics, step):
        lines.setdefault(step, {}).update(metrics)

    return fit(log=log, **kwargs), lines


def losses(lines):
    return [line["loss"] for line in lines.values() if "loss" in line]


def test_learns_and_reports():
    evaluation = rc.Evaluation(EXAMPLES[:50], predict_fn=predict_fn, metric_fn=metric_fn)
    state, lines = logged(epochs=4, evaluation=evaluation)
    assert list(lines) == list(range(1, 51))
    assert {"loss", "grad_norm", "skipped", "accuracy"} <= set(lines[1])
    evaluated = [step for step, line in lines.items() if "eval/loss" in line]
    assert evaluated == [13, 25, 38, 50]
    assert lines[50]["eval/right"] > 0.8
    assert lines[50]["eval/right"] == pytest.approx(lines[50]["eval/accuracy"])
    actual = rc.evaluate(
        state.model, EXAMPLES[:50], collate_fn=collate_fn, loss_fn=loss_fn, batch_size=16
    )
    assert actual["loss"] == pytest.approx(lines[50]["eval/loss"], rel=1e-6)
    assert int(state.step) == 50


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes",
    few_of(
        [{"devices": jax.devices()[:1]}, {"model": 4}, {"fsdp": 2, "model": 2}, {"fsdp": 8}],
        {"fsdp": 2, "model": 2},
    ),
)
def test_the_same_losses_on_any_mesh(sizes):
    train = ft.partial(logged, steps=20, model=make_model(width=64))
    _, expected = train(mesh=rc.make_mesh())
    state, actual = train(mesh=rc.make_mesh(**{"data": -1} | sizes))
    np.testing.assert_allclose(losses(actual), losses(expected), rtol=1e-5)
    assert losses(actual)[-1] < 0.7 * losses(actual)[0]
    if sizes.get("model") == 4:
        assert not state.model.layers[0].weight.is_fully_replicated
        assert not state.opt_state[0].mu.layers[0].weight.is_fully_replicated


def test_equals_a_loop_by_hand():
    seen = []

    def collate(examples):
        seen.append([e["index"] for e in examples])
        return collate_fn(examples)

    _, lines = logged(steps=5, collate_fn=collate, mesh=rc.make_mesh(devices=jax.devices()[:1]))
    optimizer = optax.adamw(1e-2)
    params, static = eqx.partition(make_model(), eqx.is_array)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        value = lambda p: loss_fn(eqx.combine(p, static), batch, None)[0]
        loss, grads = jax.value_and_grad(value)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    by_hand = []
    by_rows = sorted(seen[1:6], key=seen.index)  # the first batch was made for its shapes
    for rows in by_rows:
        batch = collate_fn([EXAMPLES[i] for i in rows])
        params, opt_state, loss = step(params, opt_state, batch)
        by_hand.append(float(loss))
    np.testing.assert_allclose(losses(lines), by_hand, rtol=1e-5)


@pytest.mark.thorough
def test_one_compilation_for_each_shape():
    traces = []

    def loss(model, batch, key):
        traces.append(batch["x"].shape)
        return loss_fn(model, batch, key)

    fit(epochs=3, loss_fn=loss, mesh=rc.make_mesh(fsdp=2, model=2))
    # 600 examples: 37 batches of 16, and one of 8. The plan and the step share their trace.
    assert sorted(traces) == [(8, 16), (16, 16)]


@pytest.mark.thorough
def test_every_example_is_trained_on_once_in_each_epoch():
    seen = []

    def loss(model, batch, key):
        jax.debug.callback(lambda i: seen.append(i), batch["index"])
        return loss_fn(model, batch, key)

    def collate(examples):
        return collate_fn(examples) | {"index": np.array([e["index"] for e in examples])}

    one = rc.make_mesh(devices=jax.devices()[:1])
    fit(epochs=2, examples=EXAMPLES[:70], loss_fn=loss, collate_fn=collate, mesh=one)
    jax.effects_barrier()
    flat = np.concatenate([np.atleast_1d(i) for i in seen])
    assert len(flat) == 140
    assert sorted(flat[:70]) == sorted(flat[70:]) == list(range(70))


@pytest.mark.thorough
@pytest.mark.parametrize("batch_size", few_of([16, 64], 16))
def test_a_short_last_batch_counts_all_of_it(batch_size):
    """5 examples, and 21, trained on as they are by hand, with and without accumulation."""
    for count in (5, 21):
        by_hand = fit(
            examples=EXAMPLES[:count],
            batch_size=count,
            epochs=1,
            accumulate=1,
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
            optimizer=optax.sgd(0.1),
        )
        if count <= batch_size:
            ours = fit(
                examples=EXAMPLES[:count],
                batch_size=batch_size,
                epochs=1,
                accumulate=4,
                optimizer=optax.sgd(0.1),
                mesh=rc.make_mesh(model=2),
            )
            for a, b in zip(arrays(ours.model), arrays(by_hand.model), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_fewer_examples_than_a_batch_train_and_it_says_so(caplog):
    state = fit(examples=EXAMPLES[:5], epochs=10, log=rc.progress_logger())
    assert int(state.step) == 4  # 50 positions in batches of 16
    assert "`batch_size=16` is more than the 5 examples" in caplog.text


@pytest.mark.thorough
def test_a_batch_that_does_not_divide_says_so(capsys):
    fit(batch_size=10, log=rc.progress_logger())
    assert "A multiple of 8 would be sharded" in capsys.readouterr().out


def test_prints_versions_devices_data_the_plan_and_progress(capsys):
    say_once.cache_clear()  # an earlier run may have said it
    fit(log=rc.progress_logger(), mesh=rc.make_mesh(model=4), examples=EXAMPLES[:50], epochs=1)
    out, err = capsys.readouterr()
    assert out.startswith(f"redcoast {rc.__version__}, jax {jax.__version__}, 8 CPU devices\n")
    assert "50 examples, 4 steps of 16 (1 epoch)\n" in out  # the last batch has two
    assert (
        "Precision      float32\nPlanning ...\n8 devices = 2-way data parallel x 4-way tensor"
        in out
    )
    assert "Details: rc.plan_step(...).table()\n" in out  # the caller has no `plan`
    assert out.endswith("Compiling ...\n")
    assert "step 4/4" in err
    fit()
    assert capsys.readouterr() == ("", "")


def test_the_callers_model_is_copied_and_a_state_is_donated():
    model = make_model()
    state = fit(model=model)
    assert np.isfinite(model.layers[0].weight).all()
    again = fit(model=state, steps=8)
    assert int(again.step) == 8
    assert state.model.layers[0].weight.is_deleted()


@pytest.mark.thorough
def test_going_on_from_a_state_equals_never_having_stopped():
    whole, expected = logged(steps=8)
    _, later = logged(model=fit(steps=3), steps=8)
    assert losses(later) == losses(expected)[3:]
    assert whole.step == 8


@pytest.mark.thorough
def test_another_key_is_another_order():
    first, second, again = (
        losses(logged(key=key)[1])
        for key in (jax.random.key(1), jax.random.key(2), jax.random.key(1))
    )
    assert first == again
    assert first != second


@pytest.mark.thorough
def test_accumulation_and_half_precision():
    _, exact = logged(optimizer=optax.sgd(0.1))
    _, accumulated = logged(accumulate=4, optimizer=optax.sgd(0.1))
    np.testing.assert_allclose(losses(accumulated), losses(exact), rtol=1e-5)
    state, half = logged(compute_dtype=jnp.bfloat16)
    np.testing.assert_allclose(losses(half), losses(exact), rtol=0.3)
    assert state.model.layers[0].weight.dtype == jnp.float32


@pytest.mark.thorough
def test_overrides_reach_the_state():
    state = fit(mesh=rc.make_mesh(model=4), overrides=[("layers/1/weight", None)])
    assert state.model.layers[1].weight.is_fully_replicated
    assert state.opt_state[0].mu.layers[1].weight.is_fully_replicated


@pytest.mark.thorough
def test_streams_end_and_resume(tmp_path):
    train = ft.partial(
        rc.fit,
        make_model(),
        optax.adamw(1e-2),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        log=False,
    )
    state = train(Stream(EXAMPLES[:70]))
    assert int(state.step) == 5
    train(Stream(EXAMPLES[:70]), steps=2, checkpoints=rc.Checkpoints(tmp_path))
    resumed = train(Stream(EXAMPLES[:70]), checkpoints=rc.Checkpoints(tmp_path))
    for a, b in zip(arrays(resumed), arrays(state), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="no epochs"):
        train(Stream(EXAMPLES[:70]), epochs=1)
    with pytest.raises(ValueError, match="started with a stream and cannot be resumed"):
        train(EXAMPLES, steps=9, checkpoints=rc.Checkpoints(tmp_path))
    with pytest.raises(ValueError, match="gave no example"):
        train(Stream([]), steps=3)


@pytest.mark.thorough
def test_a_stream_that_ends_early_says_so(caplog):
    assert int(fit(examples=Stream(EXAMPLES[:40]), steps=9).step) == 3
    assert "ended after 3 of 9 steps" in caplog.text


@pytest.mark.thorough
def test_checkpoints_by_policy(tmp_path):
    fit(steps=7, checkpoints=rc.Checkpoints(tmp_path / "a", every=3, keep=5))
    assert steps_in(tmp_path / "a") == [3, 6, 7]
    fit(epochs=2, checkpoints=rc.Checkpoints(tmp_path / "b", keep=5))
    assert steps_in(tmp_path / "b") == [13, 25]
    metrics = rc.read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 8))


def steps_in(directory):
    return sorted(int(p.name) for p in (directory / "checkpoints").iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("removed", [False, True])
def test_files_stay_together_if_the_working_directory_changes(tmp_path, monkeypatch, removed):
    start, other = tmp_path / "start", tmp_path / "other"
    start.mkdir()
    other.mkdir()
    monkeypatch.chdir(start)

    def log(metrics, step):
        if step == 3:
            os.chdir(other)
        if step == 5 and removed:
            other.rmdir()

    fit(
        steps=8,
        log=[rc.progress_logger(), log],
        checkpoints=rc.Checkpoints("runs/one", every=2, keep=9),
    )
    monkeypatch.chdir(start)
    assert steps_in(start / "runs" / "one") == [2, 4, 6, 8]
    logged = [entry["step"] for entry in rc.read_metrics("runs/one/metrics.jsonl")]
    assert logged == [*range(1, 9)]
    assert removed or not list(other.iterdir())


@pytest.mark.thorough
def test_the_best_is_kept(tmp_path):
    checkpoints = rc.Checkpoints(tmp_path, every=2, keep=1, best="target", mode="max")
    targets = iter([0.0, 1.0, 5.0, 3.0, 2.0])  # the first is the rehearsal's
    evaluation = rc.Evaluation(
        EXAMPLES[:20],
        every=2,
        predict_fn=predict_fn,
        metric_fn=lambda examples, outputs: {"target": next(targets)},
    )
    fit(steps=8, checkpoints=checkpoints, evaluation=evaluation)
    assert steps_in(tmp_path) == [4, 8]
    other = rc.Checkpoints(tmp_path / "b", best="rouge", mode="max")
    with pytest.raises(ValueError, match="is not a metric of the evaluation, which has"):
        fit(checkpoints=other, evaluation=rc.Evaluation(EXAMPLES[:9]))
    with pytest.raises(ValueError, match="because there is no `evaluation`"):
        fit(checkpoints=rc.Checkpoints(tmp_path / "b", best="loss"))


@pytest.mark.thorough
def test_resume_is_bitwise_with_dropout_augmentation_schedule_and_accumulation(tmp_path):
    class Net(eqx.Module):
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.mlp(self.dropout(x, key=key))

    def loss(model, batch, key):
        keys = jax.random.split(key, batch["x"].shape[0])
        apply = lambda x: jax.vmap(model)(x, keys)
        logits = apply(batch["x"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    def augment(examples, rngs):
        batch = collate_fn(examples)
        if rngs is not None:
            batch["x"] += np.stack([r.normal(size=16) for r in rngs]).astype(np.float32)
        return batch

    rate = rc.learning_rate_schedule(1e-2, examples=200, batch_size=16, epochs=3)
    train = ft.partial(
        logged,
        model=Net(make_model(), eqx.nn.Dropout(0.2)),
        optimizer=optax.inject_hyperparams(optax.adamw)(rate),
        loss_fn=loss,
        collate_fn=augment,
        accumulate=2,
        evaluation=rc.Evaluation(EXAMPLES[:20], every=5),
    )
    _, expected = train(epochs=3)
    _, first = train(steps=17, checkpoints=rc.Checkpoints(tmp_path))
    _, second = train(epochs=3, checkpoints=rc.Checkpoints(tmp_path))
    assert losses(first) + losses(second) == losses(expected)
    assert [line["learning_rate"] for line in second.values()][-1] == pytest.approx(1e-3)


def test_a_run_that_is_done_is_not_trained_again(tmp_path, capsys):
    fit(steps=3, checkpoints=rc.Checkpoints(tmp_path))
    state = fit(steps=3, checkpoints=rc.Checkpoints(tmp_path), log=rc.progress_logger(True))
    assert int(state.step) == 3
    printed = capsys.readouterr()
    assert printed.out.count("Nothing is left to train") == 1
    assert "or choose another directory for a new run." in printed.out
    assert "compiling" not in printed.err


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_returns(tmp_path, monkeypatch, number):
    monkeypatch.setattr(_stop, "_received", [])  # so that other tests of this process may train

    def log(metrics, step):
        if step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    state = fit(steps=500, log=log, checkpoints=rc.Checkpoints(tmp_path, every=400))
    assert 3 <= int(state.step) <= 6
    assert steps_in(tmp_path) == [int(state.step)]
    assert signal.getsignal(number) is before


def exploding(after):
    def collate(examples):
        batch = collate_fn(examples)
        return batch | {"bad": np.array([e["index"] % 200 >= after for e in examples])}

    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        return jnp.where(jnp.any(batch["bad"]), jnp.nan, value), aux

    return {"collate_fn": collate, "loss_fn": loss}


@pytest.mark.thorough
def test_steps_without_a_finite_loss_are_skipped_and_counted(tmp_path):
    _, lines = logged(epochs=1, **exploding(198))
    skipped = [line["skipped"] for line in lines.values()]
    assert 1 <= sum(skipped) <= 10
    assert all(math.isnan(line["loss"]) == bool(line["skipped"]) for line in lines.values())


@pytest.mark.thorough  # also in test_steps_per_call.py
def test_too_many_in_a_row_end_the_run(tmp_path):
    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        far = jnp.max(jnp.abs(model.layers[0].weight)) > 0.6
        return jnp.where(far, jnp.nan, value), aux

    with pytest.raises(FloatingPointError, match=r"20 steps in a row.*step \d+.*checkpoints/\d+"):
        fit(
            steps=300,
            loss_fn=loss,
            optimizer=optax.sgd(1.0),
            checkpoints=rc.Checkpoints(tmp_path, every=5),
        )


@pytest.mark.few(
    "options0-ValueError-`examples` is empty",
    "options1-ValueError-batch_size",
    "options4-ValueError-shape \\\\(16,\\\\)",
    "options9-TypeError-8.0",
    "options11-ValueError-accumulate=3",
)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"examples": []}, ValueError, "`examples` is empty"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"steps": 2, "epochs": 2}, ValueError, "pass one of them"),
        ({"steps": 0}, ValueError, "`steps` is 0"),
        ({"loss_fn": lambda m, b, k: jax.vmap(m)(b["x"])[:, 0]}, ValueError, r"shape \(16,\)"),
        ({"loss_fn": lambda m, b, k: jnp.int32(1)}, ValueError, "int32"),
        (
            {"loss_fn": lambda m, b, k: jnp.nan * jnp.sum(m.layers[0].weight)},
            ValueError,
            "nan for the first batch",
        ),
        ({"collate_fn": lambda e: {"x": np.zeros((3, 16))}}, ValueError, "16 examples"),
        ({"compute_dtype": jnp.int8}, ValueError, "bfloat16"),
        ({"batch_size": 8.0}, TypeError, "8.0"),
        ({"examples": {"x": np.zeros((9, 16))}}, TypeError, "columns"),
        ({"accumulate": 3}, ValueError, "accumulate=3"),
        ({"overrides": [("nothing", None)]}, ValueError, "nothing"),
    ],
)
def test_mistakes_are_named_before_or_at_the_first_step(options, error, words):
    steps = []
    with pytest.raises(error, match=words):
        fit(log=lambda m, step: steps.append(step), **options)
    assert steps in ([], [1])


@pytest.mark.few(
    "parts0-`every` is 0",
    "parts3-pass `metric_fn`",
    "parts5-`Evaluation.examples` is empty",
    "parts7-'loss'",
)
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"every": 0}, "`every` is 0"),
        ({"metric_fn": metric_fn}, "predict_fn"),
        ({"metric_fn": metric_fn, "predict_fn": predict_fn, "examples": ()}, "is empty"),
        ({"predict_fn": predict_fn}, "pass `metric_fn`"),
        ({"output_fn": list}, "metric_fn"),
        ({"examples": []}, "`Evaluation.examples` is empty"),
        (
            {"predict_fn": lambda m, b, k: jnp.zeros(()), "metric_fn": metric_fn},
            r"shape \(\)",
        ),
        ({"predict_fn": predict_fn, "metric_fn": lambda e, o: {"loss": 1.0}}, "'loss'"),
        ({"predict_fn": predict_fn, "metric_fn": lambda e, o: {"all": o}}, "one number"),
    ],
)
def test_mistakes_in_an_evaluation_are_named_before_or_at_the_first_step(parts, words):
    steps = []
    with pytest.raises(ValueError, match=words):
        fit(
            log=lambda metrics, step: steps.append(step),
            evaluation=rc.Evaluation(**{"examples": EXAMPLES[:9], **parts}),
        )
    assert steps in ([], [1])


def test_a_mistake_in_evaluation_costs_no_training():
    trained = []

    def collate(examples):
        trained.append(1)
        return collate_fn(examples)

    def metric(examples, outputs):
        raise KeyError("label")

    evaluation = rc.Evaluation(EXAMPLES[:40], predict_fn=predict_fn, metric_fn=metric)
    with pytest.raises(KeyError, match="label"):
        fit(collate_fn=collate, evaluation=evaluation)
    assert len(trained) <= 6  # batches of the rehearsal, and none for training


def test_nothing_says_how_long():
    with pytest.raises(ValueError, match="epochs` or `steps"):
        rc.fit(
            make_model(),
            optax.sgd(0.1),
            EXAMPLES,
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=16,
        )


@pytest.mark.thorough
def test_a_key_belongs_to_the_state():
    with pytest.raises(ValueError, match="leave `key` out"):
        fit(model=fit(), steps=8, key=jax.random.key(0))


def test_a_resumed_run_says_that_it_has_other_settings(tmp_path, caplog):
    """Its losses are not those of an uninterrupted run, which nothing else shows."""
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    options = {"mesh": mesh, "checkpoints": tmp_path, "optimizer": optax.sgd(0.1)}
    run = ft.partial(fit, **options, average=0.9)
    run(steps=1)
    run(steps=2)
    assert "where it is resumed" not in caplog.text
    assert "goes on with another" not in caplog.text
    model = eqx.nn.MLP(16, 8, 32, depth=2, activation=jax.nn.tanh, key=jax.random.key(0))
    other = {"loss_fn": lambda *args: loss_fn(*args), "optimizer": optax.sgd(0.2), "model": model}
    run(steps=3, batch_size=8, compute_dtype=jnp.bfloat16, average=0.99, accumulate=2, **other)
    assert "The run has batch_size=8, accumulate=2, compute_dtype=bfloat16" in caplog.text
    assert "had batch_size=16, accumulate=1, compute_dtype=None, average=0.9 up to" in caplog.text
    assert "goes on with another `model`, `optimizer`, `loss_fn` than up to step 2" in caplog.text


@pytest.mark.thorough
@pytest.mark.few("<lambda>")
@pytest.mark.parametrize("model", [make_model(), lambda key: make_model()])
def test_a_resumed_run_says_that_it_has_another_key(tmp_path, caplog, model):
    """A run is not continued with the key of its checkpoint as if it had the new seed."""
    run = ft.partial(fit, model=model, checkpoints=tmp_path)
    run(key=jax.random.key(3), steps=2)
    run(key=jax.random.PRNGKey(3), steps=3)
    assert "with the key" not in caplog.text
    run(key=jax.random.key(4), steps=4)
    assert "with the key of its checkpoint, and not with `key`" in caplog.text
    with pytest.raises(rc.CheckpointMismatch, match="key<fry>, at key, and this run has key<rbg>"):
        run(key=jax.random.key(3, impl="rbg"), steps=5)


@pytest.mark.thorough
def test_loggers_are_told_of_the_run_and_closed(tmp_path):
    class Log:
        runs, closed, steps = [], 0, []

        def __call__(self, metrics, step):
            self.steps.append(step)

        def start(self, run):
            self.runs.append(run)

        def close(self):
            Log.closed += 1

    mesh = rc.make_mesh(model=4)
    for steps in (2, 4):
        fit(steps=steps, log=Log(), mesh=mesh, checkpoints=rc.Checkpoints(tmp_path))
    first, second = Log.runs
    assert (first.resumed, second.resumed) == (False, True)
    assert first.directory == tmp_path
    assert "layers/0/weight" in first.plan
    assert first.config["mesh"] == {"data": 2, "fsdp": 1, "model": 4}
    assert first.config["versions"]["jax"] == jax.__version__
    assert Log.closed == 2
    assert Log.steps == [1, 2, 3, 4]

    calls = []

    def broken(examples):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("broken")
        return collate_fn(examples)

    with pytest.raises(RuntimeError, match="broken"):
        fit(log=Log(), collate_fn=broken)
    assert Log.closed == 3


@pytest.mark.integration
def test_logs_to_wandb_and_resumes_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for steps in (2, 4):
        log = rc.wandb_logger(project="redcoast-tests", config={"width": 32})
        fit(steps=steps, log=log, checkpoints=rc.Checkpoints(tmp_path))
        ids.append((tmp_path / "wandb.json").read_text())
    assert ids[0] == ids[1]
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    assert len(rc.read_metrics(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.thorough
def test_randomness_does_not_depend_on_the_mesh_nor_does_a_short_last_batch():
    def loss(model, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)
        return loss_fn(model, {**batch, "x": batch["x"] + noise}, key)

    actual = [
        losses(logged(examples=EXAMPLES[:23], epochs=1, batch_size=8, loss_fn=loss, mesh=mesh)[1])
        for mesh in (rc.make_mesh(devices=jax.devices()[:1]), rc.make_mesh(model=2))
    ]
    assert len(actual[0]) == 3
    np.testing.assert_allclose(actual[1], actual[0], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "before"), [(10, 1), (9, 2)])
def test_epochs_go_on_where_a_short_batch_ended(count, before):
    seen = []

    def collate(examples):
        seen.append([e["index"] for e in examples])
        return collate_fn(examples)

    examples = EXAMPLES[:count]
    state = fit(examples=examples, epochs=before, batch_size=4, collate_fn=collate)
    # Each run collates a first batch to plan with.
    sizes = [len(rows) for rows in seen[1:]]
    assert sum(sizes) == before * count
    assert sizes[-1] == 2
    fit(model=state, examples=examples, epochs=before + 1, batch_size=4, collate_fn=collate)
    assert sorted(sum(seen[len(sizes) + 2 :], [])) == list(range(count))


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 8])
def test_a_loss_may_close_over_the_state_that_it_trains(devices):
    """A teacher that is at first the model: the state is donated, and a later trace reads it."""
    mesh = rc.make_mesh(devices=jax.devices()[:devices])
    state = rc.init_state(lambda key: make_model(), optax.adam(1e-2), key=jax.random.key(0))
    teacher = state.model

    def loss(model, batch, key):
        there = jax.vmap(teacher)(batch["x"])
        return jnp.mean((jax.vmap(model)(batch["x"]) - there - 1.0) ** 2)

    state = rc.fit(
        state,
        optax.adam(1e-2),
        EXAMPLES[:40],  # of which the last eight are traced anew
        collate_fn=collate_fn,
        loss_fn=loss,
        batch_size=16,
        epochs=1,
        mesh=mesh,
        evaluation=rc.Evaluation(EXAMPLES[:40]),
        log=False,
    )
    assert int(state.step) == 3
    for x, y in zip(arrays(teacher), arrays(make_model()), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.thorough
def test_a_donated_state_is_named():
    state = fit()
    fit(model=state, steps=5)
    with pytest.raises(ValueError, match="was donated to an earlier step.*at model/"):
        fit(model=state, steps=6)
    for call in (
        lambda: fit(model=state.model, steps=6),
        lambda: rc.evaluate(
            state.model, EXAMPLES[:9], collate_fn=collate_fn, loss_fn=loss_fn, batch_size=8
        ),
    ):
        with pytest.raises(ValueError, match="The model.*donated to an earlier step.*can no"):
            call()


@pytest.mark.thorough
def test_first_examples_of_no_weight_do_not_stop_a_run():
    def collate(examples):
        real = np.array([e["index"] >= 16 for e in examples])
        return collate_fn(examples) | {"real": real}

    def loss(model, batch, key):
        total = jnp.sum(batch["real"])
        value, _ = loss_fn(model, batch, key)
        return jnp.where(total > 0, value, jnp.nan), {"weight": total}

    evaluation = rc.Evaluation(EXAMPLES[:32])
    _, lines = logged(
        examples=EXAMPLES[16:], collate_fn=collate, loss_fn=loss, evaluation=evaluation
    )
    assert lines[4]["eval/weight"] == 16
