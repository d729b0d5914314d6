"""The evaluation inside a run: what is found out before the first step, and what it cannot cost."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from problem import collate_fn, fit_quietly, loss_fn, make_examples, make_model, predict_fn

import redcoast as rc

EXAMPLES = make_examples(64)
MESH = rc.make_mesh(devices=jax.devices()[:1])


def fit(**options):
    settings = {"examples": EXAMPLES, "collate_fn": collate_fn, "loss_fn": loss_fn, "steps": 4}
    settings |= {"batch_size": 16, "mesh": MESH, **options}
    return fit_quietly(make_model(), optax.sgd(0.1), **settings)


def known(*flags):
    """Examples of which some have no label, so that they have no weight."""
    return [{**example, "known": flag} for example, flag in zip(EXAMPLES, flags, strict=False)]


def collate_known(examples):
    return {**collate_fn(examples), "known": np.stack([e["known"] for e in examples])}


def masked_loss(model, batch, key):
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weight = jnp.sum(batch["known"].astype(jnp.float32))
    return jnp.sum(losses, where=batch["known"]) / jnp.maximum(weight, 1), {"weight": weight}


MASKED = {
    "examples": known(*[True] * 64),
    "collate_fn": collate_known,
    "loss_fn": masked_loss,
}


@pytest.mark.parametrize("mesh", [MESH, rc.make_mesh()], ids=["one device", "eight"])
@pytest.mark.few("eight")
def test_no_weight_at_all_is_found_before_the_first_step(mesh):
    steps = []
    with pytest.raises(
        ValueError, match="40 examples of the evaluation have a total `weight` of 0"
    ):
        fit(
            **MASKED,
            evaluation=rc.Evaluation(known(*[False] * 40)),
            log=lambda metrics, step: steps.append(step),
            mesh=mesh,
        )
    assert steps == []


@pytest.mark.thorough
def test_the_rehearsal_goes_on_to_the_first_batch_with_weight():
    """And no further, so that not everything is evaluated twice."""
    seen, log = [], {}

    def loss(model, batch, key):
        jax.debug.callback(lambda known: seen.append(int(known.sum())), batch["known"])
        return masked_loss(model, batch, key)

    validation = known(*[False] * 32, *[True] * 4, *[False] * 28)
    fit(
        **{**MASKED, "loss_fn": loss},
        evaluation=rc.Evaluation(validation),
        steps=1,
        log=lambda metrics, step: log.update(metrics),
    )
    jax.effects_barrier()
    assert seen == [0, 0, 4, 16, 0, 0, 4, 0]
    assert log["eval/weight"] == 4
    assert math.isfinite(log["eval/loss"])


@pytest.mark.thorough
def test_only_weights_are_computed_before_the_first_step_and_one_batch_after_it():
    seen = []

    def noting(name):
        def loss(model, batch, key):
            mean = jax.lax.stop_gradient(jnp.mean(jax.vmap(model)(batch["x"])))
            note = lambda x: seen.append(name) or x
            mean = jax.pure_callback(note, jax.ShapeDtypeStruct((), mean.dtype), mean)
            loss, aux = masked_loss(model, batch, key)
            return loss + 0 * mean, aux

        return loss

    evaluation = rc.Evaluation(known(*[True] * 64), loss_fn=noting("eval"), every=4)
    fit(**{**MASKED, "loss_fn": noting("train")}, evaluation=evaluation)
    assert seen == ["train", "eval", *["train"] * 3, *["eval"] * 4]


@pytest.mark.thorough
def test_an_evaluation_that_loses_its_weight_later_does_not_end_the_run(caplog):
    """Where the weight depends on the model, no rehearsal can know."""

    def loss(model, batch, key):
        loss, _ = masked_loss(model, batch, key)
        start = jnp.asarray(make_model().layers[0].weight)
        same = jnp.all(model.layers[0].weight == start)
        return loss, {"weight": jnp.where(batch["known"][0], 1.0, jnp.where(same, 1.0, 0.0))}

    log = {}
    evaluation = rc.Evaluation(known(*[False] * 16))
    options = {**MASKED, "loss_fn": loss}
    state = fit(**options, evaluation=evaluation, log=lambda metrics, step: log.update(metrics))
    assert int(state.step) == 4
    assert log["eval/weight"] == 0
    assert math.isnan(log["eval/loss"])
    assert "have a total `weight` of 0" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("best", [None, "loss"])
@pytest.mark.parametrize("error", few_of([FloatingPointError, MemoryError, KeyError], MemoryError))
def test_whatever_an_evaluation_raises_the_state_is_saved(tmp_path, error, best):
    """It cannot have harmed the state, whatever it is."""
    calls = []

    def metric(examples, outputs):
        calls.append(1)
        if len(calls) > 1:
            raise error("in the evaluation")
        return {"calls": 1.0}

    evaluation = rc.Evaluation(EXAMPLES[:8], every=3, predict_fn=predict_fn, metric_fn=metric)
    checkpoints = rc.Checkpoints(tmp_path, every=1000, best=best)
    with pytest.raises(error, match="in the evaluation"):
        fit(steps=8, evaluation=evaluation, checkpoints=checkpoints)
    assert [p.name for p in checkpoints.path.iterdir()] == ["3"]
    lines = []
    no_calls = lambda examples, outputs: {"calls": 0.0}
    evaluation = dataclasses.replace(evaluation, every=1000, metric_fn=no_calls)
    log = lambda metrics, step: lines.append((step, *metrics))
    fit(steps=4, evaluation=evaluation, checkpoints=checkpoints, log=log)
    assert "eval/loss" in lines[0]
    assert [step for step, *_ in lines] == [3, 4, 4]


def test_metrics_may_be_scalars_of_any_dtype_and_have_names():
    """A mean of predictions in bfloat16 is a number, too."""
    seen = {}

    def evaluated(metrics):
        evaluation = rc.Evaluation(
            EXAMPLES[:8], predict_fn=predict_fn, metric_fn=lambda examples, outputs: metrics
        )
        fit(steps=1, evaluation=evaluation, log=lambda metrics, step: seen.update(metrics))

    evaluated({"half": jnp.ones((), jnp.bfloat16), "count": np.int64(3)})
    assert (seen["eval/half"], seen["eval/count"]) == (1.0, 3.0)
    with pytest.raises(TypeError, match="a metric named 1. Names are strings"):
        evaluated({1: 2.0})
