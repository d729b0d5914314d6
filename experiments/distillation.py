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
from _options import Images, Positive, Share
from _plots import plot_metric, save_pictures
from sklearn.model_selection import train_test_split

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: Images = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of folders
    labels: int = 100  # number of images with a label for the student; the teacher has all labels
    teacher_width: int = 256  # width of the teacher's hidden layer
    width: int = 32  # width of the student's hidden layer
    temperature: Positive = 4.0  # by which logits are divided, to soften the teacher's predictions
    weight: Share = 0.9  # weight of the teacher's predictions; that of the labels is 1 - weight
    batch_size: int = 64  # global batch size in images
    steps: int = 600  # number of training steps of each of the three networks
    learning_rate: Positive = 3e-3  # peak learning rate after the warmup
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
        student = jax.vmap(model["student"])(batch["images"])  # logits, (batch, classes)
        teacher = jax.vmap(model["teacher"])(batch["images"])
        return soft_and_hard_loss(c, student, teacher, batch["labels"])

    def predict_fn(network, batch, key):
        return jax.nn.softmax(jax.vmap(network)(batch["images"]) / c.temperature)

    def predict_student(model, batch, key):
        return predict_fn(model["student"], batch, key)

    def test_outputs(network):
        functions = {"collate_fn": collate_fn, "predict_fn": predict_fn}
        outputs = rc.predict_examples(network, test, batch_size=c.batch_size, **functions)
        return np.stack(outputs)  # (images, classes)

    def fit(model, examples, loss_fn, **options):
        state = rc.fit(
            model,
            make_optimizer(c, len(examples)),
            examples,
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=c.batch_size,
            steps=c.steps,
            **run.fit_arguments | options,
        )
        exit_if_stopped(int(state.step), c.steps)
        return state.model

    # Only the distillation is logged to Weights & Biases.
    apart = lambda name: {"checkpoints": rc.Checkpoints(run.directory / name), "log": None}
    teacher = fit(network(c.teacher_width), train, label_loss, **apart("teacher"))
    repeated = (labelled * len(train))[: len(train)]  # so that an epoch is as long
    plain = fit(network(c.width), repeated, label_loss, **apart("plain"))
    # As a part of the model, the frozen teacher is sharded like the student.
    distilled = fit(
        {"student": network(c.width), "teacher": teacher},
        labelled + unlabelled,
        distillation_loss,
        trainable={"student": True, "teacher": False},
        evaluation=rc.Evaluation(test, predict_fn=predict_student, metric_fn=metric_fn),
    )

    plot_metric(run.directory, "loss")
    student = test_outputs(distilled["student"])
    teacher = test_outputs(distilled["teacher"])
    student_accuracy = metric_fn(test, student)["accuracy"]
    plain_accuracy = metric_fn(test, test_outputs(plain))["accuracy"]
    save_teacher(run.directory / "teacher.png", names, test[:16], teacher[:16])
    report(
        run.directory,
        student_accuracy=student_accuracy,
        teacher_accuracy=metric_fn(test, teacher)["accuracy"],
        plain_accuracy=plain_accuracy,
        gain=student_accuracy - plain_accuracy,
    )


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
    _, labels = zip(*examples, strict=True)
    return {"accuracy": np.mean(np.argmax(outputs, axis=1) == labels)}


def save_teacher(file: Path, names, examples, outputs) -> None:
    """Saves a picture of images with the teacher's two most likely classes."""
    titles = []
    for probabilities in outputs:
        first, second = np.argsort(-probabilities)[:2]
        titles.append(
            f"{names[first]}: {probabilities[first]:.0%}, "
            f"{names[second]}: {probabilities[second]:.0%}"
        )
    save_pictures(file, [image.transpose(1, 2, 0) for image, _ in examples], titles)


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
