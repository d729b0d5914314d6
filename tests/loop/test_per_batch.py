"""Batches with arrays that do not have one row for each example: graphs, and banks of negatives."""

import json

import jax
import numpy as np
import optax
import pytest
from graph_problem import GRAPHS, collate_fn, flat_batch, init_fn, loss_fn, node_values, predict_fn
from paths import HELPERS
from processes import run_processes

import redcoast as rc

SGD, KEY = optax.sgd(0.05), jax.random.key(0)
MESHES = {"1 device": 1, "8 devices": 8}


def by_hand(model, graph):
    """The prediction of one graph, with NumPy."""
    x = graph["nodes"] @ np.asarray(model["w"])
    sent = np.zeros_like(x)
    senders, receivers = graph["edges"].T
    np.add.at(sent, receivers, x[senders])
    return float(np.sum(np.tanh(x + sent) @ np.asarray(model["v"])))


def mesh_of(devices):
    return rc.make_mesh(devices=jax.devices()[:devices])


@pytest.mark.thorough
@pytest.mark.parametrize("devices", MESHES.values(), ids=MESHES)
def test_graphs_are_evaluated_and_predicted_as_one_by_one(devices):
    model = init_fn(KEY)
    want = np.array([by_hand(model, graph) for graph in GRAPHS])
    settings = {"collate_fn": collate_fn, "batch_size": 8, "mesh": mesh_of(devices)}
    # The number of examples is the weight, and graphs do not depend on each other: no warning.
    actual = rc.evaluate(model, GRAPHS, loss_fn=loss_fn, **settings)
    errors = want - [graph["label"] for graph in GRAPHS]
    np.testing.assert_allclose(actual["loss"], np.mean(errors**2), rtol=1e-5)
    outputs = rc.predict_examples(model, GRAPHS, predict_fn=predict_fn, **settings)
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", MESHES.values(), ids=MESHES)
@pytest.mark.few("8 devices")
def test_graphs_train_as_by_hand(devices):
    run = {"collate_fn": collate_fn, "batch_size": 8, "steps": 2}
    state = rc.fit(init_fn, SGD, GRAPHS, loss_fn=loss_fn, mesh=mesh_of(devices), log=False, **run)
    model = rc.init_state(init_fn, SGD, key=KEY).model
    grad = jax.jit(jax.grad(loss_fn))
    data = rc.batches(GRAPHS, collate_fn, batch_size=8, key=state.key, steps=2, mesh=mesh_of(1))
    assert data.per_batch
    for batch in data:  # the arrays come without marks
        graphs = [GRAPHS[i] for i in data.examples_of(batch)[0]]
        np.testing.assert_array_equal(batch.arrays["graphs"]["nodes"], flat_batch(graphs)["nodes"])
        model = jax.tree.map(lambda p, g: p - 0.05 * g, model, grad(model, batch.arrays, KEY))
    for name, x in model.items():
        np.testing.assert_allclose(state.model[name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.integration
def test_graphs_in_a_verified_run_with_evaluations():
    run = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 8, "epochs": 3}
    logged = []
    state = rc.fit(
        init_fn,
        SGD,
        GRAPHS,
        plan="verify",
        evaluation=rc.Evaluation(GRAPHS[3:]),
        log=[rc.progress_logger(False), lambda metrics, step: logged.append(metrics)],
        **run,
    )
    errors = [by_hand(state.model, graph) - graph["label"] for graph in GRAPHS[3:]]
    np.testing.assert_allclose(logged[-1]["eval/loss"], np.mean(np.square(errors)), rtol=1e-4)


@pytest.mark.thorough
def test_marked_batches_in_own_loops():
    batch = collate_fn(GRAPHS[:8])
    plain = {"graphs": batch["graphs"].arrays, "label": batch["label"]}
    state, step, _ = rc.prepare(init_fn, SGD, loss_fn, batch, key=KEY)
    want = loss_fn(state.model, plain, None)
    np.testing.assert_allclose(step(state, batch)[1]["loss"], want, rtol=1e-5)
    assert rc.dry_run(init_fn, loss_fn, batch, SGD, target="cpu:8").fits


@pytest.mark.thorough
def test_predictions_of_nodes_need_an_output_fn():
    model = init_fn(KEY)
    settings = {"collate_fn": collate_fn, "batch_size": 8, "mesh": mesh_of(8)}
    of_nodes = lambda model, batch, key: node_values(model, batch["graphs"])
    with pytest.raises(ValueError, match=r"shape \(34,\) for 8 examples.*`output_fn`"):
        rc.predict_examples(model, GRAPHS, predict_fn=of_nodes, **settings)

    def split(predictions):
        ends = np.searchsorted(predictions["graph"], np.arange(1, predictions["graph"][-1] + 1))
        return np.split(predictions["values"], ends)

    both = lambda model, batch, key: {
        "values": node_values(model, batch["graphs"]),
        "graph": batch["graphs"]["graph"],
    }
    outputs = rc.predict_examples(model, GRAPHS, predict_fn=both, output_fn=split, **settings)
    assert [len(x) for x in outputs] == [len(graph["nodes"]) for graph in GRAPHS]
    np.testing.assert_allclose(outputs[9].sum(), by_hand(model, GRAPHS[9]), rtol=1e-5, atol=1e-6)


def unmarked(graphs):
    return {**flat_batch(graphs), "label": np.stack([graph["label"] for graph in graphs])}


@pytest.mark.thorough
def test_what_cannot_be_done_is_said():
    data = rc.batches(GRAPHS, unmarked, batch_size=8, key=KEY, steps=1)
    with pytest.raises(ValueError, match=r"8 examples.* at graph.*`redcoast.per_batch`"):
        next(data)
    options = {"loss_fn": loss_fn, "steps": 2, "batch_size": 8, "accumulate": 2}
    with pytest.raises(ValueError, match=r"`accumulate=2`.*`per_batch`"):
        rc.fit(init_fn, SGD, GRAPHS, collate_fn=collate_fn, **options)
    with pytest.raises(ValueError, match=r"`accumulate=2`.*`per_batch`"):
        rc.prepare(init_fn, SGD, loss_fn, collate_fn(GRAPHS[:8]), key=KEY, accumulate=2)
    # Arrays without a mark still need one row for each example.
    wrong = lambda graphs: collate_fn(graphs) | {"label": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match=r"\(3,\) at label"):
        next(rc.batches(GRAPHS, wrong, batch_size=8, key=KEY, steps=1))
    broken = [graph | {"nodes": np.full_like(graph["nodes"], np.nan)} for graph in GRAPHS]
    options = {"loss_fn": loss_fn, "steps": 2, "batch_size": 8, "log": False, "mesh": mesh_of(1)}
    with pytest.raises(ValueError, match=r"graphs/nodes holds NaN .* in the rows \[0, 1, 2"):
        rc.fit(init_fn, SGD, broken, collate_fn=collate_fn, **options)


@pytest.mark.integration
def test_each_process_has_all_graphs_of_a_batch():
    program = HELPERS / "hosts" / "graphs.py"
    finished = run_processes(program, processes=2, devices=2)
    assert all(x.returncode == 0 for x in finished), "\n".join(x.output for x in finished)
    run = {"collate_fn": collate_fn, "batch_size": 8, "mesh": mesh_of(4)}
    state = rc.fit(init_fn, SGD, GRAPHS, loss_fn=loss_fn, steps=3, log=False, **run)
    loss = rc.evaluate(state.model, GRAPHS, loss_fn=loss_fn, **run)["loss"]
    outputs = rc.predict_examples(state.model, GRAPHS, predict_fn=predict_fn, **run)
    for x in finished:
        line = next(line for line in x.output.splitlines() if line.startswith("RESULT "))
        actual = json.loads(line[7:])
        np.testing.assert_allclose(actual["w"], state.model["w"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(actual["loss"], loss, rtol=1e-4)
        np.testing.assert_allclose(actual["outputs"], outputs, rtol=1e-4, atol=1e-6)
        assert "one row for each example" in actual["refused"]
