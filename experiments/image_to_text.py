"""Trains an image captioner, a ViT and a GPT-2, to write the names of characters or of emoji."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import _options
import jax.numpy as jnp
import numpy as np
from _common import end_training, make_optimizer, report, start
from _extras import from_extra
from _glyphs import read_glyphs
from _options import Even, Existing, Maybe, Positive
from _packages import fetch_npm
from _plots import save_pictures
from _published import read_model, read_tokenizer
from PIL import Image
from sklearn.metrics import pairwise_distances_argmin
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import redcoast as rc
from redcoast import losses
from redcoast.models import Captioner, CaptionerConfig, GPT2Config, ViTConfig

with from_extra("text"):
    from rouge_score.rouge_scorer import RougeScorer


@dataclass(frozen=True)
class Config:
    data: Literal["characters", "emoji"] = "characters"  # of matplotlib's fonts, or of npm (62 MB)
    weights: Maybe[Existing] = None  # Hugging Face directory of a ViT and GPT-2 captioner
    size: int = 32  # height and width of the images, in pixels (that of the weights, if given)
    width: Even = 64  # size of the residual streams of a new model
    layers: int = 2  # number of layers of the encoder and of the decoder of a new model
    beams: int = 1  # number of beams of beam search (1: greedy decoding)
    batch_size: int = 32  # global batch size in images
    steps: int = 2000  # number of training steps
    learning_rate: Positive = 3e-3  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "image_to_text")
    pretrained: Any = None
    size = c.size
    if c.weights is not None:
        pretrained = read_model(c.weights)
        size = pretrained.config.encoder.image[0]
    train, test = split(read_pairs(c.data, size))
    images, names = zip(*test, strict=True)
    train_images, train_names = zip(*train, strict=True)
    if c.weights is None:
        tokenizer = make_tokenizer(train_names)
        config = make_config(c, tokenizer.get_vocab_size())
        model = lambda key: Captioner(config, key=key)
        mean, std = np.mean(train_images), np.std(train_images)
    else:
        tokenizer, config, model = read_tokenizer(c.weights), pretrained.config, pretrained
        mean, std = 0.5, 0.5  # published captioners take pixels from -1 to 1
    captions = {}
    for name in train_names + names:
        captions[name] = [config.decoder_start, *tokenizer.encode(name).ids, config.eos[0]]
    length = max(map(len, captions.values())) - 1  # without the token that captions start with

    def collate_fn(pairs):
        images, names = zip(*pairs, strict=True)
        pixels = (np.stack(images).transpose(0, 3, 1, 2) - np.float32(mean)) / np.float32(std)
        tokens = np.full((len(names), length + 1), -1, np.int32)
        for row, name in zip(tokens, names, strict=True):
            row[: len(captions[name])] = captions[name]
        return {"pixels": pixels, "tokens": tokens}

    def loss_fn(model, batch, key):
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]  # (batch, length)
        logits = model(batch["pixels"], jnp.maximum(inputs, 0), key=key)
        loss = losses.cross_entropy(logits, targets, mask=targets >= 0)
        return loss, {"weight": jnp.sum(targets >= 0)}

    def predict_fn(model, batch, key):
        return rc.generate(model, batch["pixels"], max_new_tokens=length, beams=c.beams)

    functions = {"predict_fn": predict_fn, "output_fn": tokenizer.decode_batch}
    state = rc.fit(
        model,
        make_optimizer(c, len(train)),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        evaluation=rc.Evaluation(test, every=c.steps // 4 or 1, metric_fn=metric_fn, **functions),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    written = rc.predict_examples(
        state.model, test, collate_fn=collate_fn, batch_size=c.batch_size, **functions
    )
    titles = [f"{text}\n(is {name})" for text, name in zip(written, names, strict=True)]
    every = -(-len(test) // 32)
    save_pictures(run.directory / "captions.png", images[::every], titles[::every])
    # The baseline: the name of the most similar image of the training set.
    pixels = np.reshape(images, (len(images), -1))
    train_pixels = np.reshape(train_images, (len(train_images), -1))
    nearest = np.take(train_names, pairwise_distances_argmin(pixels, train_pixels))
    baseline = metric_fn(test, nearest)["rouge_l"]
    report(run.directory, **metric_fn(test, written), rouge_l_of_the_nearest_image=baseline)


def read_pairs(data: str, size: int) -> list[tuple[np.ndarray, str]]:
    """Returns pairs of an image, (size, size, 3) from 0 to 1, and its name."""
    if data == "characters":
        fonts = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold")
        glyphs = read_glyphs(size, first_words=["latin"], fonts=fonts)
        return [(np.repeat(x.image[..., None], 3, axis=2), x.name) for x in glyphs]
    folder, pairs = fetch_npm("emoji-datasource-twitter@16.0.0") / "package", []
    for entry in json.loads((folder / "emoji.json").read_text("utf-8")):
        image = Image.open(folder / "img/twitter/64" / entry["image"]).convert("RGBA")
        image = image.convert("RGBa").resize((size, size))  # transparent pixels become black
        pairs.append((np.asarray(image, np.float32)[..., :3] / 255, entry["name"].lower()))
    return pairs


def metric_fn(pairs, captions) -> dict[str, float]:
    scorer, exact, rouge_l = RougeScorer(["rougeL"]), [], []
    for (_, name), caption in zip(pairs, captions, strict=True):
        exact.append(name == caption)
        rouge_l.append(scorer.score(name, caption)["rougeL"].fmeasure)
    return {"exact_match": float(np.mean(exact)), "rouge_l": float(np.mean(rouge_l))}


def split(pairs):
    """Holds out an eighth of the names with all their images, so captions have to be composed."""
    held_out = sorted({name for _, name in pairs})[::8]
    train, test, words = [], [], set()
    for image, name in pairs:
        if name not in held_out:
            train.append((image, name))
            words.update(name.split())
    # No model could write a word that is in no name of the training set.
    for image, name in pairs:
        if name in held_out and words.issuperset(name.split()):
            test.append((image, name))
    return train, test


def make_tokenizer(names: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=["<end>"], show_progress=False)  # token 0
    tokenizer.train_from_iterator(names, trainer)
    return tokenizer


def make_config(c: Config, vocab: int) -> CaptionerConfig:
    sizes: Any = {"width": c.width, "layers": c.layers, "heads": 2, "hidden": 4 * c.width}
    encoder = ViTConfig(**sizes, image=(c.size, c.size), patch=(c.size // 4, c.size // 4))
    decoder = GPT2Config(vocab, **sizes, positions=32, cross_attention=True)
    return CaptionerConfig(encoder, decoder, decoder_start=0, eos=(0,))


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
