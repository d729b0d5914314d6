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
from _options import FromZero, Images, Positive
from _plots import save_predictions
from scipy import ndimage
from sklearn import metrics
from sklearn.model_selection import train_test_split

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: Images = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of folders
    size: int = 32  # height and width to which the images of a folder are resized, in pixels
    shift: FromZero = 1  # data augmentation: maximum random shift in pixels
    channels: int = 32  # number of channels in the first convolutions
    batch_size: int = 64  # global batch size in images
    steps: int = 600  # number of training steps
    learning_rate: Positive = 3e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "image_classification")
    images, labels, names = read_images(c.data, c.size)
    examples = [*zip(images, labels, strict=True)]
    train, test = train_test_split(
        examples, test_size=0.2, random_state=c.run.seed, stratify=labels
    )

    def collate_fn(examples, rngs=None):
        images, labels = map(np.stack, zip(*examples, strict=True))
        if rngs is not None:  # it is None in evaluation
            for i, rng in enumerate(rngs):
                down, right = rng.integers(-c.shift, c.shift + 1, size=2)
                images[i] = ndimage.shift(images[i], (0, down, right), order=0)
        return {"images": images, "labels": labels}  # (batch, channels, height, width), (batch,)

    def loss_fn(model, batch, key):
        logits = jax.vmap(model)(batch["images"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def predict_fn(model, batch, key):
        return jnp.argmax(jax.vmap(model)(batch["images"]), axis=1)

    def metric_fn(examples, outputs):
        _, labels = zip(*examples, strict=True)
        return {"accuracy": metrics.accuracy_score(labels, outputs)}

    state = rc.fit(
        lambda key: make_network(images.shape[1], c.channels, len(names), key),
        # With a smaller `eps`, Adam amplifies the rounding of gradients that are almost 0.
        make_optimizer(c, len(train), eps=1e-6),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        evaluation=rc.Evaluation(test, predict_fn=predict_fn, metric_fn=metric_fn),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    predicted = rc.predict_examples(
        state.model, test, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=c.batch_size
    )
    test_images, test_labels = map(np.stack, zip(*test, strict=True))
    table = metrics.classification_report(
        test_labels,
        predicted,
        target_names=names,
        zero_division=0,  # pyright: ignore[reportArgumentType]  # of classes never predicted
    )
    print_once(str(table))
    save_predictions(
        run.directory / "predictions.png",
        test_images[:32].transpose(0, 2, 3, 1),  # (images, height, width, channels)
        np.take(names, test_labels[:32]),
        np.take(names, predicted[:32]),
    )
    report(run.directory, **metric_fn(test, predicted))


def make_network(inputs: int, n: int, classes: int, key: jax.Array) -> eqx.nn.Sequential:
    """Three convolutions with `n`, `n` and `2 n` channels, and a linear layer."""
    keys = jax.random.split(key, 4)
    conv = eqx.Partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
    relu = eqx.nn.Lambda(jax.nn.relu)
    fine = [conv(inputs, n, key=keys[0]), relu, conv(n, n, key=keys[1]), relu]
    coarse = [eqx.nn.MaxPool2d(2, 2), conv(n, 2 * n, key=keys[2]), relu]
    pool = [eqx.nn.AdaptiveAvgPool2d(4), eqx.nn.Lambda(jnp.ravel)]  # 32 n, of images of any size
    return eqx.nn.Sequential([*fine, *coarse, *pool, eqx.nn.Linear(32 * n, classes, key=keys[3])])


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
