"""Distils a teacher into a small student that has few labels (Hinton et al., 2015,
arXiv:1503.02531), and compares it with the same student trained on those labels alone."""

from dataclasses import dataclass, field
from pathlib import Path

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import exit_if_stopped, make_optimizer, report, start
from _images import read_images
from _plots import plot_metric, save_pictures
from sklearn.model_selection import train_test_split

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: str = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of class folders
    labels: int = 100  # number of images with a label for the student; the teacher has all labels
    teacher_width: int = 256  # width of the teacher's hidden layer
    width: int = 32  # width of the student's hidden layer
    temperature: float = 4.0  # by which logits are divided, to soften the teacher's predictions
    weight: float = 0.9  # weight of the teacher's predictions; that of the labels is 1 - weight
    batch_size: int = 64  # global batch size in images
    steps: int = 600  # number of training steps of each of the three networks
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "distillation")
    images, labels, names = read_images(c.data, size=32)
    examples = [*zip(images, labels, strict=True)]
    train, test = train_test_split(examples, test_size=0.2, random_state=c.run.seed)
    labelled, unlabelled = train[: c.labels], [(x, -1) for x, _ in train[c.labels :]]
    make = eqx.filter_jit(eqx.nn.MLP)
    network = lambda width: make(images[0].size, len(names), width, 1, key=run.key)

    def collate_fn(examples):
        images, labels = map(np.stack, zip(*examples, strict=True))
        return {"images": images.reshape(len(images), -1), "labels": labels}

    def distillation_loss(model, batch, key):
        student, teacher = (jax.vmap(model[x])(batch["images"]) for x in ("student", "teacher"))
        return soft_and_hard_loss(c, student, teacher, batch["labels"])

    def predict_fn(model, batch, key):
        model = model["student"] if isinstance(model, dict) else model
        return jax.nn.softmax(jax.vmap(model)(batch["images"]) / c.temperature)

    functions = {"collate_fn": collate_fn, "batch_size": c.batch_size}

    def fit(model, examples, loss_fn, **options):
        arguments = functions | run.fit_arguments | {"loss_fn": loss_fn, "steps": c.steps} | options
        state = rc.fit(model, make_optimizer(c, len(examples)), examples, **arguments)
        exit_if_stopped(int(state.step), c.steps)
        return state.model

    # Only the distillation is logged to Weights & Biases.
    apart = lambda name: {"checkpoints": rc.Checkpoints(run.directory / name), "log": None}
    teacher = fit(network(c.teacher_width), train, label_loss, **apart("teacher"))
    repeated = (labelled * len(train))[: len(train)]  # so that an epoch is as long
    plain = fit(network(c.width), repeated, label_loss, **apart("plain"))
    # As a part of the model, the frozen teacher is sharded like the student.
    both = {"student": network(c.width), "teacher": teacher}
    options = {"trainable": {"student": True, "teacher": False}}
    options |= {"evaluation": rc.Evaluation(test, predict_fn=predict_fn, metric_fn=metric_fn)}
    distilled = fit(both, labelled + unlabelled, distillation_loss, **options)

    plot_metric(run.directory, "loss")
    models = distilled | {"plain": plain}
    predict_all = lambda models, batch, key: {x: predict_fn(models[x], batch, key) for x in models}
    outputs = rc.predict_examples(models, test, **functions, predict_fn=predict_all)
    save_teacher(run.directory / "teacher.png", names, test, outputs)
    accuracy = {x: metric_fn(test, [y[x] for y in outputs])["accuracy"] for x in models}
    gain = accuracy["student"] - accuracy["plain"]
    report(run.directory, **{f"{x}_accuracy": y for x, y in accuracy.items()}, gain=gain)


def label_loss(model, batch, key):
    logits = jax.vmap(model)(batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def soft_and_hard_loss(c: Config, student, teacher, labels):
    """The loss of the teacher's predictions, and that of the labels; -1 is no label."""
    targets = jax.nn.softmax(teacher / c.temperature)
    soft = optax.kl_divergence(jax.nn.log_softmax(student / c.temperature), targets)
    hard = optax.softmax_cross_entropy_with_integer_labels(student, labels)
    hard = jnp.where(labels >= 0, hard, 0)
    # The gradient of the soft loss is smaller by about the square of the temperature.
    return jnp.mean(c.weight * c.temperature**2 * soft + (1 - c.weight) * hard)


def metric_fn(examples, outputs):
    return {"accuracy": np.mean(np.argmax(outputs, axis=1) == [y for _, y in examples])}


def save_teacher(file: Path, names, test, outputs) -> None:
    """Saves a picture of test images with the teacher's two most likely classes."""
    soft = [output["teacher"] for output in outputs[:16]]
    titles = [", ".join(f"{names[k]}: {p[k]:.0%}" for k in np.argsort(-p)[:2]) for p in soft]
    save_pictures(file, [x.transpose(1, 2, 0) for x, _ in test[:16]], titles)


if __name__ == "__main__":
    main(_options.parse(Config, __doc__))
