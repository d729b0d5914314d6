"""Trains CLIP: an image and a text encoder that match images of characters with their names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import end_training, make_optimizer, report, start
from _glyphs import read_glyphs
from _options import Even, Positive
from _plots import save_pictures

import redcoast as rc
from redcoast.models import ViT, ViTConfig


@dataclass(frozen=True)
class Config:
    size: int = 32  # height and width of the images, in pixels
    width: Even = 64  # size of the residual streams and of the space that images and names share
    layers: int = 2  # number of layers of the image encoder
    batch_size: int = 64  # global batch size in pairs, whose images and names are all compared
    steps: int = 1200  # number of training steps
    learning_rate: Positive = 2e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "contrastive")
    fonts = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
    glyphs = read_glyphs(c.size, first_words=["latin"], fonts=fonts)
    # An eighth of the names is held out, with all their images. They come first.
    all_names = sorted({x.name for x in glyphs})
    held_out = all_names[::8]
    names = held_out + [name for name in all_names if name not in held_out]
    train = [x for x in glyphs if x.name not in held_out]
    test = [x for x in glyphs if x.name in held_out]
    train_images = np.stack([x.image for x in train])
    mean, std = np.mean(train_images), np.std(train_images)
    # Each name is a bag of words, (names, words).
    words = sorted({*" ".join(names).split()})
    texts = np.zeros((len(names), len(words)), np.float32)
    for text, name in zip(texts, names, strict=True):
        text[np.isin(words, name.split())] = 1

    def collate_fn(glyphs):
        images, glyph_names, _ = zip(*glyphs, strict=True)
        pixels = (np.stack(images)[:, None] - mean) / std  # (batch, 1, size, size)
        ids = np.array([*map(names.index, glyph_names)], np.int32)
        return {"images": pixels, "texts": texts[ids], "ids": ids}

    def loss_fn(model, batch, key):
        # The loss of the global batch, though its rows are on several devices: each image is
        # compared with the names of all devices. With `accumulate=k` in `rc.fit`, negatives would
        # come only from the microbatch, a k-th of the batch, so it would be another loss.
        logits = compare(model, batch["images"], batch["texts"], key)
        return symmetric_loss(logits, batch["ids"])

    def predict_fn(model, batch, key):
        return compare(model, batch["images"], texts[: len(held_out)])

    def test_loss_fn(model, batch, key):
        # Compares with all held-out names, so that it does not depend on the batch size.
        logits = predict_fn(model, batch, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"]).mean()

    def metric_fn(glyphs, rows):
        scores = np.stack(rows)  # of all test images (rows) and all held-out names (columns)
        _, glyph_names, _ = zip(*glyphs, strict=True)
        right = np.array(glyph_names)[:, None] == np.array(held_out)[None]
        return recalls(scores, right)

    state = rc.fit(
        lambda key: make_model(c, len(words), key),
        make_optimizer(c, len(train)),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        evaluation=rc.Evaluation(
            test,
            every=c.steps // 4 or 1,
            loss_fn=test_loss_fn,
            predict_fn=predict_fn,
            metric_fn=metric_fn,
        ),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    rows = rc.predict_examples(
        state.model, test, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=c.batch_size
    )
    save_nearest(run.directory / "nearest_names.png", held_out, test[::25], rows[::25])
    report(run.directory, **metric_fn(test, rows), chance_at_1=1 / len(held_out))


def make_model(c: Config, words: int, key: jax.Array) -> dict[str, Any]:
    """Makes the two encoders and their scale."""
    a, b = jax.random.split(key)
    sizes: Any = {"width": c.width, "layers": c.layers, "heads": 2, "hidden": 4 * c.width}
    sizes |= {"head": "classification", "labels": c.width}  # projects to the shared space
    square, patch = (c.size, c.size), (c.size // 4, c.size // 4)
    images = ViT(ViTConfig(**sizes, image=square, patch=patch, channels=1), key=a)
    texts = eqx.nn.MLP(words, c.width, 4 * c.width, depth=1, key=b)  # of bags of words
    scale = jnp.float32(np.log(1 / 0.07))  # the inverse of the temperature
    return {"images": images, "texts": texts, "log_scale": scale}


def compare(model, images, texts, key=None):
    """Returns the scaled cosines of all images (rows) and all names (columns)."""
    x = unit_rows(model["images"](images, key=key))
    y = unit_rows(jax.vmap(model["texts"])(texts))
    return jnp.minimum(jnp.exp(model["log_scale"]), 100.0) * (x @ y.T)


def unit_rows(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def symmetric_loss(logits, ids):
    """The mean of the losses of both directions."""
    # A name may be in the batch in several fonts: all are positives, equally likely.
    positive = (ids[:, None] == ids[None]).astype(logits.dtype)
    targets = positive / jnp.sum(positive, axis=1, keepdims=True)
    of_images = optax.softmax_cross_entropy(logits, targets)
    of_names = optax.softmax_cross_entropy(logits.T, targets)
    return jnp.mean(jnp.stack([of_images, of_names]))


def recalls(scores: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """Returns the recall at 1 and 5 in both directions."""
    return {
        "image_to_text_recall_at_1": recall(scores, right, 1),
        "image_to_text_recall_at_5": recall(scores, right, 5),
        "text_to_image_recall_at_1": recall(scores.T, right.T, 1),
        "text_to_image_recall_at_5": recall(scores.T, right.T, 5),
    }


def recall(scores: np.ndarray, right: np.ndarray, k: int) -> float:
    """Returns the fraction of rows in which one of the k highest scores is right."""
    best = np.argsort(-scores, axis=1)[:, :k]
    return float(np.take_along_axis(right, best, axis=1).any(axis=1).mean())


def save_nearest(file: Path, names, glyphs, rows) -> None:
    """Saves a picture of characters with the three nearest names."""
    titles = []
    for row in rows:
        nearest = np.take(names, np.argsort(-row)[:3])
        titles.append("\n".join(f"{place}. {name}" for place, name in enumerate(nearest, 1)))
    save_pictures(file, [x.image for x in glyphs], titles)


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
