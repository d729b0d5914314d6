"""Federated learning of non-iid clients: FedAvg, FedAdam and SCAFFOLD, and centralised training.

McMahan et al. (2017), arXiv:1602.05629; Reddi et al. (2021), arXiv:2003.00295; Karimireddy et al.
(2020), arXiv:1910.06378. The clients of a round are the batch of a step, and are split over the
mesh. Their mean update is the gradient of the step, so any optax optimizer can be the server's.

In FedAvg's paper, a client passes over all its images; here, it draws batches with replacement. The
FedAdam of the paper does not correct the bias of the moments; this one does, as Adam.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import exit_if_stopped, report, start
from _images import read_images
from _options import Images, Maybe, Positive, Share, refuse
from _plots import plot_lines, plot_metric, plt, read_metric, save_predictions
from jax.flatten_util import ravel_pytree

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: Images = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of folders
    method: Literal["fedavg", "fedadam", "scaffold"] = "fedavg"  # how updates are combined
    clients: int = 64  # number of clients, each with its own part of the training images
    per_round: int = 16  # number of clients that take part in a round
    alpha: Positive = 0.1  # of the Dirichlet split of each class over clients; lower is less iid
    local_steps: int = 10  # number of gradient steps of a client in a round
    local_batch: int = 16  # number of images in a gradient step of a client, drawn with replacement
    local_rate: Positive = 0.1  # learning rate of the clients
    server_rate: Maybe[float] = None  # learning rate of the server: by default 1, 0.01 for fedadam
    stragglers: Share = 0.0  # probability that a client does only a random number of local steps
    width: int = 64  # width of the hidden layer
    steps: int = 100  # number of rounds
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if c.per_round > c.clients:
        refuse("--per-round must be at most --clients.")
    run = start(c, "federated")
    images, labels, names = read_images(c.data, size=32)
    vectors = images.reshape(len(images), -1)
    held_out = np.arange(len(images)) % 5 == 0
    train = vectors[~held_out], labels[~held_out]
    train_examples = [*zip(*train, strict=True)]
    test = [*zip(vectors[held_out], labels[held_out], strict=True)]
    clients = split_by_class(labels[~held_out], c)
    init_fn = lambda key: eqx.nn.MLP(vectors.shape[1], len(names), c.width, depth=1, key=key)
    functions = {"collate_fn": collate_pairs, "loss_fn": batch_loss}
    functions |= {"predict_fn": predict_fn, "metric_fn": metric_fn}
    every = max(1, c.steps // 20)
    arguments: dict[str, Any] = run.fit_arguments
    arguments |= {"checkpoints": rc.Checkpoints(run.directory, every=5 * every)}
    state = rc.fit(
        lambda key: with_controls(c, init_fn(key)),
        server_optimizer(c),
        lambda epoch: choose_clients(c, epoch),  # an epoch is one round
        collate_fn=collate_clients(c, *train, clients),
        loss_fn=round_loss(c),
        batch_size=c.per_round,
        steps=c.steps,
        trainable={"network": eqx.is_inexact_array, "controls": False},
        evaluation=rc.Evaluation(test, every=every, **functions),
        **arguments,
    )
    exit_if_stopped(int(state.step), c.steps)
    steps, directory = c.steps * c.local_steps, run.directory / "centralised"
    arguments |= {"checkpoints": rc.Checkpoints(directory, every=500), "log": None}
    centralised = rc.fit(  # the same initial network on all images, with as many gradient steps
        lambda key: {"network": init_fn(key)},
        optax.sgd(c.local_rate),
        train_examples,
        loss_fn=batch_loss,
        batch_size=c.per_round * c.local_batch,
        steps=steps,
        evaluation=rc.Evaluation(test, every=every * c.local_steps, **functions),
        **arguments,
    )
    exit_if_stopped(int(centralised.step), steps)
    plot_metric(run.directory, "loss")
    predicted = rc.predict_examples(state.model, test[:16], predict_fn=predict_fn, batch_size=16)
    save_predictions(
        run.directory / "predictions.png",
        images[held_out][:16].transpose(0, 2, 3, 1),  # (images, height, width, channels)
        np.take(names, labels[held_out][:16]),
        np.take(names, predicted),
    )
    if jax.process_index() == 0:  # which has the metrics
        plot_clients(run.directory / "clients.png", labels[~held_out], clients, names)
        report_accuracies(c, run.directory)


def choose_clients(c, round_number):
    # Counted from 1, because [seed, 0] has the same random numbers as [seed], the split by class.
    rng = np.random.default_rng([c.run.seed, round_number + 1])
    return rng.choice(c.clients, c.per_round, replace=False).tolist()


def collate_clients(c, images, labels, clients):
    """Returns a function from clients to the images of their local steps."""
    size = (c.local_steps, c.local_batch)

    def collate_fn(chosen, rngs):
        rows, steps = [], []
        for i, rng in zip(chosen, rngs, strict=True):
            rows.append(rng.choice(clients[i], size))
            least = c.local_steps
            if rng.random() < c.stragglers:
                least = 1
            steps.append(rng.integers(least, c.local_steps + 1))
        # FedAvg weights clients by their images; in the other papers, all count the same.
        weights = [1] * len(chosen)
        if c.method == "fedavg":
            weights = [len(clients[i]) for i in chosen]
        return {
            "client": np.array(chosen, np.int32),
            "weight": np.array(weights, np.float32),
            "active": np.float32(np.arange(c.local_steps) < np.array(steps)[:, None]),
            "x": images[rows],  # (clients, local steps, local batch, pixels)
            "y": labels[rows],
        }

    return collate_fn


def with_controls(c, network):
    """Adds SCAFFOLD's control variates, which estimate the gradient of each client."""
    count = 0
    if c.method == "scaffold":
        count = c.clients
    return {"network": network, "controls": jnp.zeros((count, flatten(network)[0].size))}


def round_loss(c):
    """Returns the loss of a round, whose gradient is minus the mean update of the clients."""

    def train_client(start, unflatten, correction, batch):
        def step(weights, inputs):
            x, y, active = inputs
            value, gradient = jax.value_and_grad(lambda w: mean_loss(unflatten(w), x, y))(weights)
            return weights - c.local_rate * active * (gradient + correction), value

        end, losses = jax.lax.scan(step, start, (batch["x"], batch["y"], batch["active"]))
        count = jnp.sum(batch["active"])
        # Option II of SCAFFOLD: the mean gradient along the way is the new control variate.
        control = (start - end) / (count * c.local_rate) - correction
        return end - start, jnp.sum(losses * batch["active"]) / count, control

    def loss_fn(model, batch, key):
        # The local steps are not differentiated again.
        start, unflatten = flatten(rc.stop_gradient(model["network"]))
        controls, correction = model["controls"], jnp.zeros((c.per_round, 1))
        if c.method == "scaffold":
            correction = jnp.mean(controls, axis=0, keepdims=True) - controls[batch["client"]]
        of_client = lambda correction, batch: train_client(start, unflatten, correction, batch)
        updates, losses, new_controls = jax.vmap(of_client)(correction, batch)
        # All that is summed over clients is one array, so a round has one all-reduce.
        sums = batch["weight"] @ jnp.column_stack([updates, losses, jnp.ones(c.per_round)])
        update, loss = sums[:-2] / sums[-1], sums[-2] / sums[-1]
        if c.method == "scaffold":
            controls = controls.at[batch["client"]].set(new_controls)
        gradient = {"network": unflatten(-update), "controls": None}
        after = {"network": model["network"], "controls": controls}
        return rc.with_gradient(loss, model, gradient), {}, after

    return loss_fn


def server_optimizer(c):
    rate = c.server_rate
    if c.method == "fedadam":
        if rate is None:
            rate = 0.01
        return optax.adam(rate, b1=0.9, b2=0.99, eps=1e-3)
    if rate is None:
        rate = 1.0
    return optax.sgd(rate)


def flatten(network):
    """Returns the weights as one array, and a function that makes a network of such an array."""
    weights, static = eqx.partition(network, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(weights)
    return flat, lambda flat: eqx.combine(unravel(flat), static)


def mean_loss(network, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(network)(x), y).mean()


def collate_pairs(examples):
    return tuple(map(np.stack, zip(*examples, strict=True)))


def batch_loss(model, batch, key):
    x, y = batch
    return mean_loss(model["network"], x, y)


def predict_fn(model, batch, key):
    x, _ = batch
    return jnp.argmax(jax.vmap(model["network"])(x), axis=1)


def metric_fn(examples, outputs):
    _, labels = zip(*examples, strict=True)
    return {"accuracy": np.mean(np.equal(outputs, labels))}


def split_by_class(labels, c):
    """Splits the rows of each class over the clients, in shares of a Dirichlet distribution."""
    rng = np.random.default_rng([c.run.seed])
    clients = [[] for _ in range(c.clients)]
    for label in np.unique(labels):
        of_class = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(c.clients, c.alpha))
        ends = np.cumsum(shares)[:-1] * len(of_class)
        for client, rows in zip(clients, np.split(of_class, ends.astype(int)), strict=True):
            client.extend(rows.tolist())
    # A client without images gets one, so that each can take part.
    for client in clients:
        if not client:
            client.append(int(rng.integers(len(labels))))
    return clients


def plot_clients(file, labels, clients, names):
    """Plots how many images of each class each client has."""
    counts = [np.bincount(labels[rows], minlength=len(names)) for rows in clients]
    figure, axes = plt.subplots(figsize=(10, 3))
    image = axes.imshow(np.transpose(counts), aspect="auto", cmap="Blues")
    axes.set(xlabel="client", ylabel="class", yticks=range(len(names)), yticklabels=names)
    figure.colorbar(image, label="images")
    figure.savefig(file, dpi=150)


def report_accuracies(c, directory):
    """Plots the test accuracy after each round, and that of centralised training."""
    rounds, accuracies = read_metric(directory, "eval/accuracy")
    steps, centralised = read_metric(directory / "centralised", "eval/accuracy")
    lines = {c.method: (rounds, accuracies), "centralised": (steps / c.local_steps, centralised)}
    plot_lines(directory / "accuracy.png", "round", "test accuracy", lines)
    report(directory, accuracy=accuracies[-1], centralised_accuracy=centralised[-1])


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
