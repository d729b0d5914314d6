"""Trains a text-to-image diffusion model to draw characters in the style that a caption asks for.

The captions of the evaluation, such as "bold italic serif latin capital letter q", are new, though
their words are not. A classifier trained on real images judges the samples. With `--symbol Ж`, the
newest model is fine-tuned on five images of a symbol (DreamBooth), for instance with `--steps 300`.
"""

import json
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Literal

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import end_training, make_optimizer, report, start
from _glyphs import read_glyphs
from _images import read_images
from _options import Pictures, Positive, Regex, refuse
from _plots import save_pictures
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

import redcoast as rc


@dataclass(frozen=True)
class Config:
    data: Pictures = "glyphs"  # glyphs, digits (scikit-learn), mnist (PyPI), or a folder of folders
    names: Regex = r"latin capital letter \w"  # Unicode names of the glyphs, a regular expression
    size: Literal[8, 16, 32] = 16  # height and width of glyphs and of images of a folder, in pixels
    symbol: str = ""  # character to teach to the newest model, such as Ж
    width: int = 128  # size of the residual stream
    guidance: float = 2.0  # guidance weight of the samples (1: no guidance)
    batch_size: int = 32  # global batch size in images
    steps: int = 2000  # number of training steps
    learning_rate: Positive = 3e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if c.symbol and (len(c.symbol) > 1 or not unicodedata.name(c.symbol, "")):
        refuse(f"--symbol must be one character with a name in Unicode, but is {c.symbol!r}.")
    run = start(c, "text_to_image")
    examples = read_examples(c)
    shape = examples[0][0].shape  # (channels, height, width)
    train, test = train_test_split(
        examples, test_size=0.2, random_state=c.run.seed, stratify=classes_of(examples)
    )
    words_of_captions = {"symbol"}
    for _, caption in examples:
        words_of_captions.update(caption.split())
    vocabulary = ["", *sorted(words_of_captions)]  # 0 is no word

    def init_fn(key):
        net = Denoiser(c.width, shape, len(vocabulary), key)
        return net, net  # the network, and the moving average of its weights

    model, known, test = init_fn, train[:5000], test[:128]
    if c.symbol:
        model = load_model(run.directory.parent, eqx.filter_eval_shape(init_fn, run.key))
        symbols = draw(unicodedata.name(c.symbol).lower(), shape, "symbol")
        shown, unseen = train_test_split(symbols, train_size=5, random_state=c.run.seed)
        known, test = known + shown, unseen + test
        train = train + shown * (len(train) // 5)  # half of the batch preserves what was learned
    known_images, _ = zip(*known, strict=True)
    judge = SVC(C=10).fit([*map(np.ravel, known_images)], classes_of(known))

    def collate_fn(examples):
        images, captions = zip(*examples, strict=True)
        words = np.zeros((len(captions), 8), np.int32)
        for row, caption in zip(words, captions, strict=True):
            ids = [vocabulary.index(word) for word in caption.split() if word in vocabulary]
            row[: len(ids)] = ids[:8]
        return {"images": 2 * np.stack(images) - 1, "words": words}  # pixels from -1 to 1

    def loss_fn(model, batch, key):
        net, average = model
        loss = velocity_loss(net, batch["images"], batch["words"], key)
        return loss, {}, (net, rc.moving_average(average, net, 0.995))

    def predict_fn(model, batch, key):
        _, average = model
        noise = jax.random.normal(key, batch["images"].shape)
        images = ddim(average, noise, batch["words"], c.guidance, 25)
        return jnp.clip(images / 2 + 0.5, 0, 1)

    def metric_fn(examples, images):
        classes = np.array(classes_of(examples))
        is_right = judge.predict([*map(np.ravel, images)]) == classes
        is_symbol = classes == "symbol"
        accuracy = {"accuracy": is_right[~is_symbol].mean()}
        if c.symbol:
            accuracy["symbol_accuracy"] = is_right[is_symbol].mean()
        return accuracy

    state = rc.fit(
        model,
        make_optimizer(c, len(train)),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        trainable=(True, False),
        evaluation=rc.Evaluation(test, every=c.steps),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    images = rc.predict_examples(
        state.model,
        test,
        collate_fn=collate_fn,
        predict_fn=predict_fn,
        batch_size=c.batch_size,
        key=run.key,
    )
    real_images, captions = zip(*test, strict=True)
    pictures = np.stack(images[:48]).transpose(0, 2, 3, 1)  # (images, height, width, channels)
    save_pictures(run.directory / "samples.png", pictures, captions)
    real = metric_fn(test, real_images)["accuracy"]
    report(run.directory, **metric_fn(test, images), accuracy_of_real_images=real)


def classes_of(examples) -> list[str]:
    """The last word of each caption."""
    return [caption.split()[-1] for _, caption in examples]


def velocity_loss(net, images, words, key):
    """By an angle from 0 to a right angle, images turn to noise; the velocity is predicted."""
    keys = jax.random.split(key, 3)
    angle = jax.random.uniform(keys[0], (len(images),), maxval=jnp.pi / 2)
    of_images = angle[:, None, None, None]  # (images, 1, 1, 1)
    cos, sin = jnp.cos(of_images), jnp.sin(of_images)
    noise = jax.random.normal(keys[1], images.shape)
    # A tenth of the captions is dropped, because guidance needs predictions without caption.
    words = jnp.where(jax.random.bernoulli(keys[2], 0.9, (len(images), 1)), words, 0)
    velocity = jax.vmap(net)(cos * images + sin * noise, angle, words)
    return jnp.mean((velocity - (cos * noise - sin * images)) ** 2)


def ddim(net, noise, words, guidance, steps):
    """Turns noise back to images, with classifier-free guidance."""
    turn = jnp.pi / 2 / steps

    def body(x, angle):
        predict = jax.vmap(net, (0, None, 0))
        conditioned = predict(x, angle, words)
        unconditioned = predict(x, angle, jnp.zeros_like(words))
        velocity = unconditioned + guidance * (conditioned - unconditioned)
        return jnp.cos(turn) * x - jnp.sin(turn) * velocity, None

    return jax.lax.scan(body, noise, turn * jnp.arange(steps, 0.0, -1))[0]


class Denoiser(eqx.Module):
    """A transformer: 4 x 4 patches attend to one another and to the words of the caption."""

    layers: dict

    def __init__(self, width: int, shape: tuple[int, ...], words: int, key: jax.Array):
        keys = jax.random.split(key, 6)
        attention = lambda key: eqx.nn.MultiheadAttention(4, width, key=key)
        mlp = lambda size, key: eqx.nn.MLP(size, width, 2 * width, 1, jax.nn.silu, key=key)
        patch = shape[1] // 4
        blocks = []
        for self_key, cross_key, mlp_key in jax.random.split(keys[5], (2, 3)):
            blocks.append((attention(self_key), attention(cross_key), mlp(width, mlp_key)))
        self.layers = {
            "positions": 0.1 * jax.random.normal(keys[0], (16 + 8, width)),  # of patches and words
            "words": eqx.nn.Embedding(words, width, key=keys[1]),
            "time": mlp(32, keys[2]),
            "first": eqx.nn.Conv2d(shape[0], width, patch, patch, key=keys[3]),
            "last": eqx.nn.ConvTranspose2d(width, shape[0], patch, patch, key=keys[4]),
            "blocks": blocks,
        }

    def __call__(self, image, angle, words):
        waves = angle * jnp.geomspace(1, 100, 16)
        time = self.layers["time"](jnp.concatenate([jnp.sin(waves), jnp.cos(waves)]))  # (width,)
        words = jax.vmap(self.layers["words"])(words) + self.layers["positions"][16:]  # (8, width)
        patches = self.layers["first"](image)  # (width, 4, 4)
        x = patches.reshape(-1, 16).T + self.layers["positions"][:16] + time[None]  # (16, width)
        for self_attention, cross_attention, mlp in self.layers["blocks"]:
            normed = jax.nn.standardize(x)
            x = x + self_attention(normed, normed, normed)
            x = x + cross_attention(jax.nn.standardize(x), words, words)
            x = x + jax.vmap(mlp)(jax.nn.standardize(x))
        return self.layers["last"](x.T.reshape(patches.shape))


def read_examples(c: Config):
    """Returns pairs of an image and a caption."""
    if c.data == "glyphs":
        return draw(c.names, (1, c.size, c.size))
    images, labels, names = read_images(c.data, c.size)
    return [(x, f"an image of {names[y]}") for x, y in zip(images, labels, strict=True)]


def draw(names: str, shape: tuple[int, ...], called: str = ""):
    """Draws the characters of these names in all fonts, with captions of style and name."""
    pairs = []
    for glyph in read_glyphs(shape[1], first_words=names.split()[:1]):
        if re.fullmatch(names, glyph.name):
            caption = " ".join([*styles_of(glyph.font), called or glyph.name])
            pairs.append((np.broadcast_to(glyph.image, shape), caption))
    if len(pairs) < 10:
        refuse(f"Only {len(pairs)} images are named {names!r}. Use others as --names.")
    return pairs


def styles_of(font: str) -> list[str]:
    """The words for the style of a font, such as "bold" and "sans" of DejaVuSans-Bold."""
    words = ("bold", "italic", "oblique", "sans", "serif", "mono")
    return [word for word in words if word[:3].title() in font]


def load_model(root, like):
    """Loads the model of the newest run without a symbol."""
    checkpoints = []
    for config in root.glob("*/config.json"):
        if json.loads(config.read_text())["symbol"] == "":
            checkpoints += config.parent.glob("checkpoints/[0-9]*")
    if not checkpoints:
        refuse(f"There is no model in {root}. Train one without --symbol first.")
    return rc.load_checkpoint(max(checkpoints), like, subtree="model")


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
