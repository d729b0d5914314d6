"""The loops plan by what the loss computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import fit_quietly

import redcoast as rc

RNG = np.random.default_rng(0)
EXAMPLES = [{"x": RNG.normal(size=64).astype(np.float32)} for _ in range(64)]
KEY = jax.random.key(0)


def collate_fn(examples):
    return np.stack([e["x"] for e in examples])


def make_model():
    """Matrices whose names and order say nothing; two are stored transposed."""
    draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(KEY, i), shape) / 8
    return {
        "q": draw(0, 256, 64),
        "a": draw(1, 64, 256),
        "m": draw(2, 256, 64),
        "z": draw(3, 256, 64),
    }


def apply(model, x):
    x = x + jax.nn.silu(x @ model["a"]) @ model["q"]
    return x + jax.nn.silu(x @ model["m"].T) @ model["z"]


def loss_fn(model, batch, key):
    return jnp.mean((apply(model, batch) - 1) ** 2)


def fit(**options):
    options = {"steps": 3, "mesh": rc.make_mesh(model=4), "batch_size": 32} | options
    return fit_quietly(
        options.pop("model", make_model()),
        optax.adam(1e-3),
        options.pop("examples", EXAMPLES),
        collate_fn=options.pop("collate_fn", collate_fn),
        loss_fn=options.pop("loss_fn", loss_fn),
        **options,
    )


@pytest.mark.thorough
def test_fit_splits_what_is_computed_together():
    model = fit().model
    split = {name: x.sharding.spec.index("model") for name, x in model.items()}
    assert split == {"a": 1, "q": 0, "m": 0, "z": 0}


@pytest.mark.thorough
def test_losses_are_one_devices():
    def losses(mesh):
        actual = []
        fit(mesh=mesh, log=lambda metrics, step: actual.append(metrics["loss"]))
        return actual

    one = losses(rc.make_mesh(devices=jax.devices()[:1]))
    for mesh in (rc.make_mesh(model=4), rc.make_mesh(fsdp=2, model=2), rc.make_mesh(fsdp=8)):
        np.testing.assert_allclose(losses(mesh), one, rtol=1e-5)


@pytest.mark.thorough
def test_evaluate_and_predict_plan_as_well():
    options = {"collate_fn": collate_fn, "batch_size": 24}
    one, many = rc.make_mesh(devices=jax.devices()[:1]), rc.make_mesh(model=4)
    losses, outputs = [], []
    for mesh in (one, many):
        settings = {**options, "mesh": mesh}
        losses.append(rc.evaluate(make_model(), EXAMPLES, loss_fn=loss_fn, **settings)["loss"])
        predict_fn = lambda model, batch, key: apply(model, batch)
        outputs.append(
            rc.predict_examples(make_model(), EXAMPLES, predict_fn=predict_fn, **settings)
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_verify_passes_and_stops_a_run_that_computes_something_else(monkeypatch):
    fit(plan="verify", mesh=rc.make_mesh(fsdp=2, model=2))
    wrong = lambda plan, fn: lambda model, *args: fn({**model, "z": 2 * model["z"]}, *args)
    monkeypatch.setattr(rc.Plan, "constrain", wrong)
    with pytest.raises(ValueError, match="z"):
        fit(plan="verify")


@pytest.mark.thorough
def test_accumulated_microbatches_are_planned_and_constrained():
    def losses(accumulate, mesh):
        actual = []
        log = lambda metrics, step: actual.append(metrics["loss"])
        fit(accumulate=accumulate, mesh=mesh, log=log)
        return actual

    one = losses(1, rc.make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(losses(4, rc.make_mesh(model=4)), one, rtol=1e-5)


@pytest.mark.thorough
def test_planning_leaves_a_stream_where_it_was():
    class Stream:
        position = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.position += 1
            return EXAMPLES[self.position - 1]

        def get_state(self):
            return self.position

        def set_state(self, state):
            self.position = state

    stream, seen = Stream(), []

    def collate(examples):
        seen.append([next(i for i, e in enumerate(EXAMPLES) if e is x) for x in examples])
        return collate_fn(examples)

    fit(examples=stream, steps=2, collate_fn=collate)
    assert seen[0] == seen[1] == list(range(32))
    assert seen[2] == list(range(32, 64))
