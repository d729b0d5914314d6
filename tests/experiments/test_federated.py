"""Rounds of federated learning against the papers, and what devices exchange in a round."""

import collections
import dataclasses
import json
import types

import equinox as eqx
import jax
import numpy as np
import pytest
from grids import few_of
from PIL import Image
from scipy.special import softmax

import redcoast as rc
from redcoast.dryrun.hlo import collectives

NAME = "federated"
SMALL = {"clients": 12, "per_round": 8, "local_steps": 4, "local_batch": 6, "width": 8}
SMALL |= {"steps": 2}
METHODS = ("fedavg", "fedadam", "scaffold")
FEATURES, CLASSES = 5, 3


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", "2x4"])
def test_a_run_is_compared_with_centralised_training(mesh, experiment, config, tmp_path):
    experiment.main(config(mesh, method="scaffold", stragglers=0.5))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    assert results.keys() == {"accuracy", "centralised_accuracy"}
    for name, folder, steps in (("accuracy", ".", 2), ("centralised_accuracy", "centralised", 8)):
        history = rc.read_metrics(directory / folder / "metrics.jsonl")
        assert history[-1]["step"] == steps
        assert history[-1]["eval/accuracy"] == results[name]
        assert len([x for x in history if "eval/accuracy" in x]) == 2
    for path in ("loss.png", "accuracy.png", "clients.png", "predictions.png"):
        with Image.open(directory / path) as picture:
            picture.verify()


@pytest.fixture
def start(experiment, config):
    """The start of training of a linear model on random images, and three rounds of batches."""

    def start(method, **options):
        c = config(method=method, **options)
        rng = np.random.default_rng(0)
        images = rng.normal(size=(100, FEATURES)).astype(np.float32)
        labels = rng.integers(CLASSES, size=100)
        clients = np.split(np.arange(100), np.sort(rng.choice(np.arange(5, 95), 11, False)))
        collate_fn = experiment.collate_clients(c, images, labels, clients)
        chosen = [experiment.choose_clients(c, i) for i in range(3)]
        batches = [collate_fn(x, [*rng.spawn(c.per_round)]) for x in chosen]
        init_fn = lambda key: eqx.nn.Linear(FEATURES, CLASSES, key=key)
        prepared = rc.prepare(
            lambda key: experiment.with_controls(c, init_fn(key)),
            experiment.server_optimizer(c),
            experiment.round_loss(c),
            batches[0],
            key=jax.random.key(0),
            mesh=rc.make_mesh(data=8),
            trainable={"network": eqx.is_inexact_array, "controls": False},
        )
        return types.SimpleNamespace(c=c, clients=clients, batches=batches, prepared=prepared)

    return start


def slope(weights, images, labels):
    """The gradient of the cross-entropy of a linear model, whose last column is the bias."""
    ones = np.ones((len(images), 1))
    inputs = np.hstack([images, ones])
    errors = softmax(inputs @ weights.T, axis=1) - np.eye(CLASSES)[labels]
    return errors.T @ inputs / len(images)


def client_of_paper(c, weights, batch, k, correction):
    """The local steps of client k of a batch; returns the new weights and the number of steps."""
    images, labels = batch["x"][k], batch["y"][k]
    count = int(batch["active"][k].sum())
    for i in range(count):
        weights = weights - c.local_rate * (slope(weights, images[i], labels[i]) + correction)
    return weights, count


def fedavg(c, weights, batches, clients):
    """McMahan et al., algorithm 1."""
    for batch in batches:
        sizes = np.array([len(clients[i]) for i in batch["client"]])
        ends = [client_of_paper(c, weights, batch, k, 0)[0] for k in range(c.per_round)]
        weights = sum(n * w for n, w in zip(sizes, ends, strict=True)) / sizes.sum()
        yield weights, None


def fedadam(c, weights, batches, clients):
    """Reddi et al., algorithm 2, with the moments divided as in Adam by 1 - beta ** t."""
    first = second = 0
    for t, batch in enumerate(batches, 1):
        ends = [client_of_paper(c, weights, batch, k, 0)[0] for k in range(c.per_round)]
        delta = np.mean([w - weights for w in ends], axis=0)
        first = 0.9 * first + 0.1 * delta
        second = 0.99 * second + 0.01 * delta**2
        unbiased = first / (1 - 0.9**t), second / (1 - 0.99**t)
        weights = weights + 0.01 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-3)
        yield weights, None


def scaffold(c, weights, batches, clients):
    """Karimireddy et al., algorithm 1 with option II and a server rate of 1."""
    of_clients, of_server = np.zeros((c.clients, *weights.shape)), np.zeros(weights.shape)
    for batch in batches:
        steps, changes = [], []
        for k, i in enumerate(batch["client"]):
            end, count = client_of_paper(c, weights, batch, k, of_server - of_clients[i])
            new = of_clients[i] - of_server + (weights - end) / (count * c.local_rate)
            steps.append(end - weights)
            changes.append(new - of_clients[i])
        for i, change in zip(batch["client"], changes, strict=True):
            of_clients[i] = of_clients[i] + change
        weights = weights + np.mean(steps, axis=0)
        of_server = of_server + c.per_round / c.clients * np.mean(changes, axis=0)
        yield weights, of_clients.copy()


@pytest.mark.thorough
@pytest.mark.parametrize("method", few_of(METHODS, "scaffold"))
def test_rounds_are_those_of_the_paper(start, method):
    actual = start(method, stragglers=0.5)
    state, step, _ = actual.prepared
    assert {int(x) for batch in actual.batches for x in batch["active"].sum(axis=1)} == {1, 2, 3, 4}
    joined = lambda x: np.hstack([x["network"].weight, x["network"].bias[:, None]])
    weights = joined(state.model).astype(np.float64)
    reference = globals()[method](actual.c, weights, actual.batches, actual.clients)
    for batch, (weights, controls) in zip(actual.batches, reference, strict=True):
        state, _ = step(state, batch)
        np.testing.assert_allclose(joined(state.model), weights, rtol=1e-4, atol=1e-5)
        if controls is not None:  # the weights of a client's row are flat, then come the biases
            flat = [[*x[:, :-1].ravel(), *x[:, -1]] for x in controls]
            np.testing.assert_allclose(state.model["controls"], flat, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("method", few_of(METHODS, "scaffold"))
def test_a_round_has_one_all_reduce(start, method):
    actual = start(method)
    state, step, plan = actual.prepared
    program = step.lower(state, actual.batches[0]).compile()
    actual = collectives(program.as_text(), plan.mesh)
    counts = collections.Counter({one.kind: 0 for one in actual})
    for one in actual:
        counts[one.kind] += one.count
    # The clients of a round and their control variates go to all devices.
    gathered = {"all-gather": 2} if method == "scaffold" else {}
    assert counts == {"all-reduce": 1} | gathered
    estimated = sum(line.bytes for line in plan.report.program.traffic)
    assert estimated == sum(one.count * one.sent_bytes for one in actual)


@pytest.mark.parametrize(("alpha", "least", "most"), [(0.05, 0.6, 1), (100.0, 0.1, 0.25)])
def test_a_lower_alpha_makes_clients_differ_more(experiment, config, alpha, least, most):
    labels = np.repeat(np.arange(10), 120)
    clients = experiment.split_by_class(labels, config(alpha=alpha))
    assert len(clients) == 12
    rows = np.concatenate(clients)
    if alpha > 1:  # at a low alpha, clients without images get one that another has too
        assert sorted(rows) == [*range(1200)]
    assert {*rows} == {*range(1200)}
    largest = [np.bincount(labels[x]).max() / len(x) for x in clients]
    assert least < np.mean(largest) <= most


def test_the_split_and_each_round_have_random_numbers_of_their_own(experiment, config, monkeypatch):
    real, first = np.random.default_rng, []

    def default_rng(seed):
        first.append(real(seed).random())
        return real(seed)

    monkeypatch.setattr(np.random, "default_rng", default_rng)
    for seed in (0, 1):
        c = config()
        c = dataclasses.replace(c, run=dataclasses.replace(c.run, seed=seed))
        experiment.split_by_class(np.arange(100) % 10, c)
        for i in range(3):
            experiment.choose_clients(c, i)
    assert len({*first}) == len(first) == 8


def test_stragglers_and_clients_are_drawn_as_asked(experiment, config):
    c = config(stragglers=0.25, local_steps=10)
    images, labels = np.zeros((12, 1), np.float32), np.zeros(12, int)
    collate_fn = experiment.collate_clients(c, images, labels, [[i] for i in range(12)])
    rng, counts, seen = np.random.default_rng(0), [], []
    for i in range(100):
        chosen = experiment.choose_clients(c, i)
        assert len({*chosen}) == 8
        seen += chosen
        active = collate_fn(chosen, rng.spawn(8))["active"]
        np.testing.assert_array_equal(active, np.sort(active, axis=1)[:, ::-1])  # the first steps
        counts += active.sum(axis=1).tolist()
    assert np.ptp(np.bincount(seen)) < 30
    # A straggler does 1 to 10 steps, so one in ten does all.
    assert np.mean(np.array(counts) < 10) == pytest.approx(0.25 * 0.9, abs=0.05)
    assert min(counts) == 1


def test_more_clients_in_a_round_than_there_are_are_refused(experiment, config, refused):
    with refused("--per-round must be at most --clients"):
        experiment.main(config(per_round=13))
