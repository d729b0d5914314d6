"""A loop of the public pieces, as docs/loops.md shows it, is the loop of `fit`."""

import functools as ft
import json
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.core import Tracer
from problem import Stream, collate_fn, loss_fn, make_examples, make_model, quiet

import redcoast as rc
from redcoast.loop import _setup

ROOT = Path(__file__).parents[2]
EXAMPLES = make_examples(72)
OPTIONS = {"collate_fn": collate_fn, "batch_size": 16}
OPTIMIZER = optax.adam(1e-2)
KEY = jax.random.key(0)
MESH = rc.make_mesh(model=2)


def docs_loop(stop_at=None):
    """The function of docs/loops.md, on this problem; it may be killed after a step."""
    text = (ROOT / "docs" / "loops.md").read_text()
    begin = text.index("def train(directory, steps):")
    source = text[begin : text.index("\n\n\n", begin)]
    assert source.count("\n") < 40

    def killed(*args):
        for done in rc.training_steps(*args):
            yield done
            if done.number == stop_at:
                raise KeyboardInterrupt

    create = ft.partial(rc.init_state, lambda key: make_model(), OPTIMIZER, key=KEY)
    abstract = eqx.filter_eval_shape(create)
    names = {"mesh": MESH, "optimizer": OPTIMIZER, "loss_fn": loss_fn, "ft": ft, "jax": jax}
    names |= {"examples": EXAMPLES, "options": OPTIONS, "create": create, "abstract": abstract}
    names["rc"] = types.SimpleNamespace(**{**vars(rc), "training_steps": killed})
    exec(source, names)
    return names["train"]


@pytest.mark.thorough
def test_the_loop_of_the_docs_is_fit_bit_for_bit_also_killed_and_resumed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        docs_loop(stop_at=14)(tmp_path / "own", 23)
    state = docs_loop()(tmp_path / "own", 23)
    fitted = rc.fit(
        lambda key: make_model(),
        OPTIMIZER,
        EXAMPLES[32:],
        **OPTIONS,
        loss_fn=loss_fn,
        evaluation=rc.Evaluation(EXAMPLES[:32], every=10),
        steps=23,
        key=KEY,
        mesh=MESH,
        checkpoints=rc.Checkpoints(tmp_path / "fit"),
        log=False,
    )
    for a, b in zip(*map(arrays, (state, fitted)), strict=True):
        np.testing.assert_array_equal(a, b)
    own, theirs = (rc.read_metrics(tmp_path / name / "metrics.jsonl") for name in ("own", "fit"))
    times = {"time", "step_seconds", "examples_per_second"}
    drop = lambda rows: [{k: v for k, v in row.items() if k not in times} for row in rows]
    assert drop(own) == drop(theirs)
    assert [row["step"] for row in own if "eval/loss" in row] == [10, 20, 23]


def arrays(state):
    return [
        np.asarray(x)
        for x in jax.tree.leaves(eqx.filter((state.model, state.opt_state), eqx.is_array))
    ]


@pytest.mark.thorough
def test_a_model_is_given_as_a_function_of_a_key(tmp_path):
    """It is made sharded: no array of it is ever on one device as a whole."""
    made = []

    def init_fn(key):
        made.append(isinstance(key, Tracer))
        return make_model(width=64)

    state = rc.fit(
        init_fn,
        OPTIMIZER,
        EXAMPLES,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        steps=1,
        mesh=rc.make_mesh(model=8),
        log=False,
    )
    assert made
    assert all(made)
    assert not state.model.layers[0].weight.is_fully_replicated


def index_collate(examples):
    return {"index": np.array([e["index"] for e in examples])}


def drawn(data):
    return [(b.step, np.asarray(b.arrays["index"]).tolist(), b.epoch_end, b.last) for b in data]


@pytest.mark.parametrize("stream", [False, True])
def test_batches_resume_after_any_of_them(stream):
    make = lambda: Stream(EXAMPLES[:40]) if stream else EXAMPLES[:40]
    length = {"steps": None} if stream else {"epochs": 2}
    options: dict[str, Any] = {"batch_size": 16, "key": KEY, "mesh": MESH, **length}
    data = rc.batches(make(), index_collate, **options)
    assert jax.tree.leaves(data.spec)[0].shape == (16,)
    whole = drawn(data)
    assert [last for *_, last in whole] == [False] * (len(whole) - 1) + [True]
    if not stream:
        assert [end for _, _, end, _ in whole] == [False, False, True, False, True]
    first = rc.batches(make(), index_collate, **options)
    states = [batch.state for batch in first]
    for i, state in enumerate(states[:-1]):
        again = rc.batches(make(), index_collate, **{**options, "key": jax.random.key(9)})
        again.set_state(json.loads(json.dumps(state)))
        assert drawn(again) == whole[i + 1 :]


def test_a_closed_stream_continues_after_the_last_returned_batch():
    """Batches prepared ahead are read again, also from the state before the first batch."""
    slow = lambda examples: time.sleep(0.02) or index_collate(examples)
    data = rc.batches(Stream(EXAMPLES[:24]), slow, batch_size=2, key=KEY, mesh=MESH)
    begin = data.get_state()
    actual = [index for _ in range(5) for index in next(data).arrays["index"].tolist()]
    data.close()
    actual += [index for batch in data for index in np.asarray(batch.arrays["index"]).tolist()]
    assert actual == list(range(24))
    data.set_state(begin)
    assert np.asarray(next(data).arrays["index"]).tolist() == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_batch_that_failed_is_made_again(error, stream):
    failures = [error]

    def flaky(examples):
        if len(failures) == 1 and examples[0]["index"] == expected[2][1][0]:
            raise failures.pop()
        return index_collate(examples)

    examples = lambda: Stream(EXAMPLES[:24]) if stream else EXAMPLES[:24]
    options: dict[str, Any] = {"batch_size": 4, "key": KEY, "mesh": MESH}
    options["steps"] = 6
    expected = drawn(rc.batches(examples(), index_collate, **options))
    data = rc.batches(examples(), flaky, **options)
    actual = []
    with pytest.raises(error):
        actual.extend(entry for batch in data for entry in drawn([batch]))
    assert actual + drawn(data) == expected


def test_state_of_another_kind_of_examples():
    data = rc.batches(EXAMPLES, index_collate, batch_size=4, key=KEY, steps=2)
    with pytest.raises(ValueError, match="started with a stream and cannot be resumed"):
        data.set_state({"step": 1, "position": 4, "length": None})


def test_nothing_is_saved_without_checkpoints():
    with rc.Checkpointer(None) as checkpointer:
        assert checkpointer.restore({}, {}) is None
        assert not checkpointer.wants(1, epoch_end=True)
        checkpointer.save(1, {})


def test_a_checkpointer_saves_only_inside_of_with(tmp_path):
    checkpointer = rc.Checkpointer(rc.Checkpoints(tmp_path, every=1))
    for call in (lambda: checkpointer.save(1, {}), lambda: checkpointer.wants(1)):
        with pytest.raises(ValueError, match="only inside its `with` statement"):
            call()


def test_only_one_checkpointer_at_a_time_has_a_directory(tmp_path):
    """Which may be given by its path, as `fit` takes it."""
    again = rc.Checkpointer(tmp_path)
    assert again.directory == rc.Checkpointer(str(tmp_path)).directory == tmp_path
    with pytest.raises(ZeroDivisionError), again:
        raise ZeroDivisionError
    with (
        again,
        pytest.raises(ValueError, match="is in use by another run"),
        rc.Checkpointer(rc.Checkpoints(tmp_path)),
    ):
        pass
    with (
        rc.Checkpointer(rc.Checkpoints(tmp_path)),
        pytest.raises(ValueError, match="is in use by another run"),
        rc.Checkpointer(rc.Checkpoints(tmp_path)),
    ):
        pass


def test_what_a_step_raises_names_it():
    data = rc.batches(EXAMPLES, index_collate, batch_size=4, key=KEY, steps=2)

    def step(state, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as error:
        next(iter(rc.training_steps({}, data, step)))
    assert error.value.__notes__ == ["Raised by step 1."]


@pytest.mark.thorough  # tests/sharding/test_saved_plan.py reads plans
def test_a_saved_plan_trains(tmp_path):
    """Nothing is planned again, and the result is that of the plan's own run."""
    options = {**OPTIONS, "loss_fn": loss_fn, "steps": 3, "log": False, "key": KEY}
    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY)
    data = rc.batches(EXAMPLES, collate_fn, batch_size=16, key=KEY, mesh=MESH, steps=3)
    plan = rc.plan_step(state, loss_fn, data.spec, MESH, overrides=[("layers/1/weight", None)])
    rc.save_plan(plan, tmp_path / "plan.json")
    expected = rc.fit(
        make_model(),
        OPTIMIZER,
        EXAMPLES,
        mesh=MESH,
        overrides=[("layers/1/weight", None)],
        **options,
    )
    saved = rc.load_plan(tmp_path / "plan.json", state, MESH)
    with mock.patch.object(_setup, "plan_training", side_effect=AssertionError):
        actual = rc.fit(make_model(), OPTIMIZER, EXAMPLES, plan=saved, **options)
    assert actual.model.layers[1].weight.is_fully_replicated
    for a, b in zip(*map(arrays, (actual, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_plan_for_other_shapes_is_refused():
    state = rc.init_state(lambda key: make_model(), OPTIMIZER, key=KEY)
    plan = rc.plan_shardings(state, rc.make_mesh(model=8))
    with pytest.raises(ValueError, match="`plan` does not fit model/layers/0/weight"):
        rc.fit(
            make_model(width=12),
            OPTIMIZER,
            EXAMPLES,
            **OPTIONS,
            loss_fn=loss_fn,
            steps=1,
            plan=plan,
            log=False,
        )


@pytest.mark.thorough
def test_an_evaluation_of_its_own():
    """It is made of the functions that it is given, and changes no step."""
    lines = {}
    halves = lambda examples: {k: v[: len(v)] for k, v in collate_fn(examples).items()}
    own = rc.Evaluation(
        EXAMPLES[:20],
        every=2,
        collate_fn=halves,
        loss_fn=lambda model, batch, key: (
            jnp.float32(7.0),
            {"size": jnp.float32(len(batch["y"]))},
        ),
        batch_size=5,
    )
    options: dict[str, Any] = {**OPTIONS, "loss_fn": loss_fn, "steps": 2, "mesh": MESH}
    log = lambda metrics, step: lines.setdefault(step, {}).update(metrics)
    state = rc.fit(make_model(), OPTIMIZER, EXAMPLES, evaluation=own, log=quiet(log), **options)
    assert (lines[2]["eval/loss"], lines[2]["eval/size"]) == (7.0, 5.0)
    plain = rc.fit(make_model(), OPTIMIZER, EXAMPLES, log=False, **options)
    for a, b in zip(*map(arrays, (state, plain)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_a_target_and_an_average_are_sharded_saved_and_restored_as_their_model(tmp_path):
    create = ft.partial(rc.init_state, lambda key: make_model(), OPTIMIZER, key=KEY)
    data = rc.batches(EXAMPLES, **OPTIONS, key=KEY, mesh=MESH, steps=4)
    plan = rc.plan_step(eqx.filter_eval_shape(create), loss_fn, data.spec, MESH)
    shardings = {"train": plan.shardings, "target": plan.shardings.model}

    def step(state, batch):
        def against(model, batch, key):
            loss, aux = loss_fn(model, batch, key)
            gap = jax.vmap(model)(batch["x"]) - jax.vmap(state["target"])(batch["x"])
            return loss + jnp.mean(gap**2), aux

        trained, metrics = rc.train_step(
            state["train"], batch, loss_fn=against, optimizer=OPTIMIZER
        )
        mix = lambda old, new: 0.9 * old + 0.1 * new if eqx.is_inexact_array(old) else old
        target = jax.tree.map(mix, state["target"], trained.model)
        return {"train": trained, "target": target}, metrics

    compiled = rc.compile_step(step, shardings)
    make = lambda: {"train": create(shardings=plan.shardings), "target": create().model}
    abstract = eqx.filter_eval_shape(make)

    def train(steps, directory):
        data = rc.batches(EXAMPLES, **OPTIONS, key=KEY, mesh=MESH, steps=steps)
        with rc.Checkpointer(rc.Checkpoints(directory)) as checkpointer:
            restored = checkpointer.restore(abstract, shardings)
            state = restored.state if restored else make()
            data.set_state(restored.data if restored else {"step": 0})
            for done in rc.training_steps(state, data, compiled):
                state = done.state
            checkpointer.save(steps, state, data.get_state())
        return state

    train(2, tmp_path / "parts")
    parts, entire = train(4, tmp_path / "parts"), train(4, tmp_path / "entire")
    assert [x.sharding for x in jax.tree.leaves(eqx.filter(parts["target"], eqx.is_array))] == [
        x.sharding for x in jax.tree.leaves(eqx.filter(parts["train"].model, eqx.is_array))
    ]
    leaves = lambda s: [
        *arrays(s["train"]),
        *jax.tree.leaves(eqx.filter(s["target"], eqx.is_array)),
    ]
    for a, b in zip(leaves(parts), leaves(entire), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_an_enclosing_time_limit_stops_the_loops_inside(caplog):
    options: dict[str, Any] = {**OPTIONS, "loss_fn": loss_fn, "mesh": MESH, "log": False}
    with rc.stop_on_signal(1e-9) as outer:
        state = rc.fit(make_model(), OPTIMIZER, EXAMPLES, steps=50, **options)
        assert outer()
        with rc.stop_on_signal() as inner, rc.stop_on_signal(3600) as longer:
            assert inner()
            assert longer()
    assert int(state.step) == 1
    with rc.stop_on_signal() as later:
        assert not later()


def test_the_reader_logs_each_step_and_ends_a_run_of_nan(tmp_path):
    lines = []
    log = lambda metrics, step: lines.append((step, metrics["loss"]))
    row = lambda loss: {"loss": loss, "grad_norm": 1.0, "skipped": float(loss != loss)}
    run = rc.RunInfo(directory=tmp_path)

    def push_all():
        with rc.metrics_reader(quiet(log), run, max_skipped=2) as reader:
            for step, loss in enumerate([1.0, 2.0, np.nan, np.nan, 3.0], 1):
                reader.push(step, row(loss), explain=lambda trained: f"Trained: {trained}.")

    with pytest.raises(FloatingPointError, match="2 steps in a row, up to step 4.*Trained: True"):
        push_all()
    assert [step for step, _ in lines] == [1, 2, 3, 4]
    assert [row["step"] for row in rc.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
