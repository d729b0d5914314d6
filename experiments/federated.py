"""Federated learning of non-iid clients: FedAvg, FedAdam and SCAFFOLD, against central training.

McMahan et al. (2017), arXiv:1602.05629; Reddi et al. (2021), arXiv:2003.00295; Karimireddy et al.
(2020), arXiv:1910.06378. The clients of a round are the batch of a step, and are split over the
mesh. Their mean update is the gradient of the step, so any optax optimizer is a server's.
"""

from dataclasses import dataclass, field
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Run, exit_if_stopped, report, start
from _images import read_images
from _plots import plot_metric, plt
from jax.flatten_util import ravel_pytree

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: str = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of class folders
    method: Literal["fedavg", "fedadam", "scaffold"] = "fedavg"  # the algorithm
    clients: int = 64  # number of clients, each with its own part of the training images
    per_round: int = 16  # number of clients that take part in a round
    alpha: float = 0.1  # clients differ more in their classes if this is lower (Dirichlet)
    local_steps: int = 10  # number of gradient steps of a client in a round
    local_batch: int = 16  # number of images in each of them
    local_rate: float = 0.1  # learning rate of the clients
    server_rate: float = 1.0  # learning rate of the server (0.01 for fedadam)
    stragglers: float = 0.0  # fraction of clients that do only some of the local steps
    width: int = 64  # width of the hidden layer
    steps: int = 100  # number of rounds
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    run = start(c, "federated")
    images, labels, names = read_images(c.data, size=32)
    images, held_out = images.reshape(len(images), -1), np.arange(len(images)) % 5 == 0
    test = [*zip(images[held_out], labels[held_out], strict=True)]
    clients = split_by_class(labels, np.flatnonzero(~held_out), c)

    def make_network(key):
        return eqx.nn.MLP(images.shape[1], len(names), c.width, depth=1, key=key)

    def init_fn(key):
        network = make_network(key)
        # SCAFFOLD's control variates estimate the gradient of each client.
        shape = (c.clients if c.method == "scaffold" else 0, flatten(network)[0].size)
        return {"network": network, "controls": jnp.zeros(shape)}

    def choose_clients(round_number):
        rng = np.random.default_rng([c.run.seed, round_number])
        return rng.choice(c.clients, c.per_round, replace=False).tolist()

    def collate_fn(chosen, rngs):
        size = (c.local_steps, c.local_batch)
        rows = [rng.choice(clients[i], size) for i, rng in zip(chosen, rngs, strict=True)]
        least = [1 if rng.random() < c.stragglers else c.local_steps for rng in rngs]
        steps = [rng.integers(x, c.local_steps + 1) for x, rng in zip(least, rngs, strict=True)]
        return {
            "client": np.array(chosen, np.int32),
            "weight": np.array([len(clients[i]) for i in chosen], np.float32),
            "active": np.arange(c.local_steps) < np.array(steps)[:, None],
            "x": images[rows],
            "y": labels[rows],
        }

    def loss_fn(model, batch, key):
        start, unflatten = flatten(model["network"])
        controls = model["controls"]

        def train_client(control, correction, batch):
            def step(weights, inputs):
                x, y, active = inputs
                loss = lambda weights: mean_loss(unflatten(weights), (x, y), key)
                value, gradient = jax.value_and_grad(loss)(weights)
                return weights - c.local_rate * active * (gradient + correction), value

            inputs = batch["x"], batch["y"], batch["active"]
            end, losses = jax.lax.scan(step, start, inputs)
            steps = jnp.maximum(jnp.sum(batch["active"]), 1)
            return (
                end - start,
                jnp.mean(losses),
                (start - end) / (steps * c.local_rate) - correction,
            )

        own = controls[batch["client"]] if c.method == "scaffold" else jnp.zeros((c.per_round, 1))
        correction = jnp.mean(controls, axis=0) - own if c.method == "scaffold" else own
        updates, losses, new = jax.vmap(train_client)(own, correction, batch)
        # All that is summed over clients is one array, so a round has one all-reduce.
        sums = batch["weight"] @ jnp.column_stack([updates, losses, jnp.ones(c.per_round)])
        update, loss = sums[:-2] / sums[-1], sums[-2] / sums[-1]
        if c.method == "scaffold":
            controls = controls.at[batch["client"]].set(new)
        gradient = {"network": unflatten(-update), "controls": None}
        after = {"network": model["network"], "controls": controls}
        return rc.with_gradient(loss, model, gradient), {}, after

    def predict_fn(model, batch, key):
        return jnp.argmax(jax.vmap(model["network"])(batch[0]), axis=1)

    def metric_fn(examples, outputs):
        return {"accuracy": np.mean(np.array(outputs) == [label for _, label in examples])}

    evaluation = rc.Evaluation(
        test,
        every=max(1, c.steps // 20),
        loss_fn=lambda model, batch, key: mean_loss(model["network"], batch, key),
        collate_fn=collate_pairs,
        predict_fn=predict_fn,
        metric_fn=metric_fn,
    )
    state = rc.fit(
        init_fn,
        server_optimizer(c),
        choose_clients,  # called with the number of the epoch, which is one round
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.per_round,
        steps=c.steps,
        trainable={"network": eqx.is_inexact_array, "controls": False},
        evaluation=evaluation,
        # An epoch is one round, and not every round is saved.
        **dict(run.fit_arguments, checkpoints=rc.Checkpoints(run.directory, every=50)),
    )

    exit_if_stopped(int(state.step), c.steps)
    plot_metric(run.directory, "loss")
    train = [*zip(images[~held_out], labels[~held_out], strict=True)]
    central = {"network": train_centrally(make_network, train, run, c)}
    predict = {"collate_fn": collate_pairs, "predict_fn": predict_fn, "batch_size": c.local_batch}
    found = [
        metric_fn(test, rc.predict_examples(m, test, **predict))["accuracy"]
        for m in (state.model, central)
    ]
    if jax.process_index() == 0:  # which has the metrics
        history = rc.read_metrics(run.directory / "metrics.jsonl")
        points = [(x["step"], x["eval/accuracy"]) for x in history if "eval/accuracy" in x]
        axes = plt.figure().add_subplot(xlabel="round", ylabel="test accuracy")
        axes.plot(*zip(*points, strict=True), "o-", label=c.method)
        axes.axhline(found[1], linestyle="--", color="gray", label="central training")
        axes.legend()
        plt.savefig(run.directory / "accuracy.png", dpi=150)
    report(run.directory, accuracy=found[0], central_accuracy=found[1])


def flatten(network):
    """Returns the weights as one array, and a function that makes a network of such an array."""
    weights, static = eqx.partition(network, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(weights)
    return flat, lambda flat: eqx.combine(unravel(flat), static)


def mean_loss(network, batch, key):
    x, y = batch
    logits = jax.vmap(network)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def collate_pairs(examples):
    return tuple(map(np.stack, zip(*examples, strict=True)))


def split_by_class(labels, rows, c):
    """Splits the rows of each class over the clients, in shares of a Dirichlet distribution."""
    rng = np.random.default_rng(c.run.seed)
    parts = [[] for _ in range(c.clients)]
    for label in np.unique(labels):
        of_class = rng.permutation(rows[labels[rows] == label])
        ends = np.cumsum(rng.dirichlet(np.full(c.clients, c.alpha)))[:-1] * len(of_class)
        for part, found in zip(parts, np.split(of_class, ends.astype(int)), strict=True):
            part.extend(found.tolist())
    # A client without images gets one, so that each can take part.
    return [part or [int(rng.choice(rows))] for part in parts]


def server_optimizer(c):
    if c.method == "fedadam":
        return optax.adam(c.server_rate, b1=0.9, b2=0.99, eps=1e-3)
    return optax.sgd(c.server_rate)


def train_centrally(make_network, train, run, c):
    """Trains the same network on all images, for as many gradient steps of as many images."""
    return rc.fit(
        make_network,
        optax.sgd(c.local_rate),
        train,
        collate_fn=collate_pairs,
        loss_fn=mean_loss,
        batch_size=c.per_round * c.local_batch,
        steps=c.steps * c.local_steps,
        mesh=run.mesh,
        key=run.key,
        log=False,
    ).model


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
