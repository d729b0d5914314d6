"""Trains a small convolutional network on images, and reports its accuracy for each class."""

from dataclasses import dataclass, field

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import end_training, make_optimizer, print_once, report, start
from _images import read_images
from _plots import save_predictions
from scipy import ndimage
from sklearn import metrics
from sklearn.model_selection import train_test_split

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: str = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of class folders
    size: int = 32  # height and width to which the images of a folder are resized, in pixels
    shift: int = 1  # data augmentation: maximum random shift in pixels
    channels: int = 32  # number of channels in the first convolutions
    batch_size: int = 64  # global batch size in images
    steps: int = 600  # number of training steps
    learning_rate: float = 3e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "image_classification")
    images, labels, names = read_images(c.data, c.size)
    examples = [*zip(images, labels, strict=True)]
    split = {"random_state": c.run.seed, "stratify": labels}
    train, test = train_test_split(examples, test_size=0.2, **split)

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
        return {"accuracy": metrics.accuracy_score([label for _, label in examples], outputs)}

    functions = {"collate_fn": collate_fn, "batch_size": c.batch_size}
    state = rc.fit(
        lambda key: make_network(images.shape[1], c.channels, len(names), key),
        # With a smaller `eps`, Adam amplifies the rounding of gradients that are almost 0.
        make_optimizer(c, len(train), eps=1e-6),
        train,
        **functions,
        loss_fn=loss_fn,
        steps=c.steps,
        evaluation=rc.Evaluation(test, predict_fn=predict_fn, metric_fn=metric_fn),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    predicted = rc.predict_examples(state.model, test, **functions, predict_fn=predict_fn)
    shown = {"target_names": names, "zero_division": 0}  # also of classes that are never predicted
    table = metrics.classification_report([y for _, y in test], predicted, **shown)
    print_once(str(table))
    pictures, classes = zip(*((x.transpose(1, 2, 0), names[y]) for x, y in test[:32]), strict=True)
    guesses = [names[y] for y in predicted[:32]]
    save_predictions(run.directory / "predictions.png", pictures, classes, guesses)
    report(run.directory, accuracy=metric_fn(test, predicted)["accuracy"])


def make_network(inputs: int, n: int, classes: int, key: jax.Array) -> eqx.nn.Sequential:
    a, b, c, d = jax.random.split(key, 4)
    conv, relu = eqx.Partial(eqx.nn.Conv2d, kernel_size=3, padding=1), eqx.nn.Lambda(jax.nn.relu)
    fine = [conv(inputs, n, key=a), relu, conv(n, n, key=b), relu, eqx.nn.MaxPool2d(2, 2)]
    coarse = [conv(n, 2 * n, key=c), relu, eqx.nn.AdaptiveAvgPool2d(4), eqx.nn.Lambda(jnp.ravel)]
    return eqx.nn.Sequential([*fine, *coarse, eqx.nn.Linear(32 * n, classes, key=d)])


if __name__ == "__main__":
    main(_options.parse(Config, __doc__))
