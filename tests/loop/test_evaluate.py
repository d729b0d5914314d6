import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import compilations
from grids import few_of
from problem import collate_fn, loss_fn, make_examples, make_model, predict_fn

import redcoast as rc

EXAMPLES = make_examples(53)
MODEL = make_model()
MESH = rc.make_mesh(model=2, fsdp=2)
evaluate = ft.partial(rc.evaluate, MODEL, collate_fn=collate_fn, loss_fn=loss_fn)
predict = ft.partial(rc.predict_examples, MODEL, collate_fn=collate_fn, predict_fn=predict_fn)


@pytest.mark.parametrize("batch_size", few_of([1, 7, 16, 53, 64], 7))
def test_every_example_counts_once_whatever_the_batch_size(batch_size):
    expected, aux = loss_fn(MODEL, collate_fn(EXAMPLES), None)
    actual = evaluate(EXAMPLES, batch_size=batch_size, mesh=MESH)
    np.testing.assert_allclose(actual["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(actual["accuracy"], aux["accuracy"], rtol=1e-6)


def test_means_are_weighted_by_weight():
    weights = np.random.default_rng(0).integers(0, 5, 53).astype(np.float32)

    def loss(model, batch, key):
        total = jnp.sum(batch["w"])
        return jnp.sum(batch["w"] * batch["y"]) / total, {"weight": total}

    examples = [{"w": w, "y": np.float32(i)} for i, w in enumerate(weights)]
    collate = lambda e: {n: np.array([x[n] for x in e]) for n in ("w", "y")}
    actual = rc.evaluate(MODEL, examples, collate_fn=collate, loss_fn=loss, batch_size=8)
    np.testing.assert_allclose(
        actual["loss"], np.average(np.arange(53), weights=weights), rtol=1e-6
    )
    assert actual["weight"] == weights.sum()
    nothing = [{"w": np.float32(0), "y": np.float32(0)}]
    with pytest.raises(ValueError, match="weight"):
        rc.evaluate(MODEL, nothing, collate_fn=collate, loss_fn=loss, batch_size=8)


@pytest.mark.parametrize("mesh", [MESH, rc.make_mesh(devices=jax.devices()[:1])])
def test_counts_beyond_32_bits_keep_their_value(mesh):
    """JAX would cast them to int32 in the trace of a plan, and report 0."""
    loss = lambda model, batch, key: (loss_fn(model, batch, key)[0], {"seen": np.int64(2**40)})
    actual = rc.evaluate(
        MODEL, EXAMPLES[:8], collate_fn=collate_fn, loss_fn=loss, batch_size=8, mesh=mesh
    )
    assert actual["seen"] == 2**40


def test_one_process_gets_all_columns_of_its_predictions():
    """The predictions are sharded over `model`, and each device has some of the columns."""
    weight = {"w": np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)}
    examples = [np.full(64, i, np.float32) for i in range(9)]
    options = {"collate_fn": np.stack, "predict_fn": lambda model, batch, key: batch @ model["w"]}
    options |= {"batch_size": 4, "mesh": rc.make_mesh(data=2, model=4)}
    expected = rc.predict_examples(weight, examples, **options)
    actual = rc.predict_examples(weight, examples, **options, gather="none")
    assert [i for i, _ in actual] == list(range(9))
    np.testing.assert_array_equal([row for _, row in actual], expected)


@pytest.mark.few("7")
@pytest.mark.parametrize("batch_size", [1, 7, 16, 64])
def test_predictions_come_in_order(batch_size):
    expected = np.asarray(predict_fn(MODEL, collate_fn(EXAMPLES), None)).tolist()
    actual = predict(EXAMPLES, batch_size=batch_size, mesh=MESH)
    assert [int(x) for x in actual] == expected


@pytest.mark.thorough
def test_outputs_and_trees_of_predictions():
    tree = lambda m, b, k: {"label": predict_fn(m, b, k), "index": b["y"]}
    rows = rc.predict_examples(
        MODEL, EXAMPLES, collate_fn=collate_fn, predict_fn=tree, batch_size=16
    )
    assert [int(r["index"]) for r in rows] == [int(e["y"]) for e in EXAMPLES]
    words = predict(EXAMPLES, batch_size=16, output_fn=lambda p: [f"class {x}" for x in p])
    assert len(words) == 53
    assert words[0].startswith("class ")
    wrong: Any
    # Its keys, and the letters of a text, were taken for the outputs.
    by_index = lambda p: dict(enumerate(p))
    for wrong in (lambda p: ["one"], lambda p: 3, by_index, lambda p: "x" * len(p)):
        with pytest.raises(ValueError, match="one entry for each example"):
            predict(EXAMPLES, batch_size=16, output_fn=wrong)


@pytest.mark.thorough
def test_one_compilation_for_each_shape():
    traces = []

    def counted(model, batch, key):
        traces.append(jax.tree.leaves(batch)[0].shape)
        return loss_fn(model, batch, key)

    rc.evaluate(MODEL, make_examples(203), collate_fn=collate_fn, loss_fn=counted, batch_size=16)
    assert len(traces) - 1 == len(set(traces)) <= 4  # the plan traces the first batch as well


@pytest.mark.thorough
def test_the_callers_model_stays():
    before = np.array(MODEL.layers[0].weight)
    evaluate(EXAMPLES, batch_size=16)
    np.testing.assert_array_equal(MODEL.layers[0].weight, before)


@pytest.mark.parametrize("run", [evaluate, predict])
def test_bad_input(run):
    with pytest.raises(ValueError, match="empty"):
        run([], batch_size=4)
    with pytest.raises(ValueError, match="batch_size` is 0"):
        run(EXAMPLES, batch_size=0)
    with pytest.raises(TypeError, match="of type int"):
        run(5, batch_size=4)


def test_evaluating_again_compiles_nothing():
    run = ft.partial(rc.evaluate, MODEL, EXAMPLES, collate_fn=collate_fn, batch_size=53)
    first = run(loss_fn=loss_fn)
    with compilations() as compiled:
        assert run(loss_fn=loss_fn) == first
        assert run(loss_fn=lambda *args: loss_fn(*args)) == first
    assert not compiled


@pytest.mark.thorough
def test_callables_without_a_hash():
    class Loss(eqx.Module):
        scale: jax.Array

        def __call__(self, model, batch, key):
            return self.scale * loss_fn(model, batch, key)[0]

    double = rc.evaluate(
        MODEL, EXAMPLES, collate_fn=collate_fn, loss_fn=Loss(jnp.asarray(2.0)), batch_size=16
    )
    assert double["loss"] == pytest.approx(2 * evaluate(EXAMPLES, batch_size=16)["loss"])
