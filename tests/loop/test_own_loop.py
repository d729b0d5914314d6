"""A loop of the public pieces, as docs/loops.md shows it, is the loop of `fit`."""

import functools as ft
import json
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.core import Tracer
from problem import Stream, collate_fn, loss_fn, make_examples, make_model

import redcoast as rc

EXAMPLES = make_examples(40)
OPTIMIZER = optax.adam(1e-2)
KEY = jax.random.key(3)
MESH = rc.make_mesh(model=2)


def train(directory, *, steps, stop_at=None):
    """The loop of the docs, which may be killed after a step, without a save."""
    create = ft.partial(rc.init_state, lambda key: make_model(), OPTIMIZER, key=KEY)
    abstract = eqx.filter_eval_shape(create)
    options = {"batch_size": 16, "key": KEY, "mesh": MESH, "steps": steps}
    data = rc.batches(EXAMPLES, collate_fn, **options)
    plan = rc.plan_step(abstract, loss_fn, data.spec, MESH)
    step = ft.partial(rc.train_step, loss_fn=plan.constrain(loss_fn), optimizer=OPTIMIZER)
    step = rc.compile_step(step, plan.shardings)
    with rc.Checkpointer(rc.Checkpoints(directory, every=3)) as checkpointer:
        restored = checkpointer.restore(abstract, plan.shardings)
        state = restored.state if restored else create(shardings=plan.shardings)
        data.set_state(restored.data if restored else {"step": 0}, key=state.key)
        done = None
        for done in rc.training_steps(state, data, step):
            if done.number == stop_at:
                raise KeyboardInterrupt
            if done.batch.last or checkpointer.wants(done.number):
                checkpointer.save(done.number, done.state, done.batch.state)
    assert done is not None
    return done.state, restored


def test_a_loop_of_the_pieces_is_fit_bit_for_bit_also_resumed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "own", steps=7, stop_at=5)
    state, restored = train(tmp_path / "own", steps=7)
    assert restored is not None
    assert (restored.step, restored.data["position"]) == (3, 48)
    fitted = rc.fit(
        lambda key: make_model(),
        OPTIMIZER,
        EXAMPLES,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        steps=7,
        key=KEY,
        mesh=MESH,
        progress=False,
    )
    for a, b in zip(*map(arrays, (state, fitted)), strict=True):
        np.testing.assert_array_equal(a, b)


def arrays(state):
    return [
        np.asarray(x)
        for x in jax.tree.leaves(eqx.filter((state.model, state.opt_state), eqx.is_array))
    ]


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
        progress=False,
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
    make = lambda: Stream(EXAMPLES) if stream else EXAMPLES
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


def test_state_of_another_kind_of_examples():
    data = rc.batches(EXAMPLES, index_collate, batch_size=4, key=KEY, steps=2)
    with pytest.raises(ValueError, match="started with a stream and cannot be resumed"):
        data.set_state({"step": 1, "position": 4, "length": None})


def test_nothing_is_saved_without_checkpoints():
    with rc.Checkpointer(None) as checkpointer:
        assert checkpointer.restore({}, {}) is None
        assert not checkpointer.wants(1, epoch_end=True)
        checkpointer.save(1, {})


def test_only_one_checkpointer_at_a_time_has_a_directory(tmp_path):
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
