import itertools as it
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import redcoast as rc

NAMES = [f"letter {x} with {y}" for x, y in it.product("abcd", ["acute", "bar", "dot", "hook"])]


@pytest.fixture
def captions(script):
    return script("image_to_text")


def read_few(size, **options):
    rng = np.random.default_rng(0)
    images = rng.random((2 * len(NAMES), size, size), np.float32)
    return [Glyph(x, name) for x, name in zip(images, 2 * NAMES, strict=True)]


class Glyph:
    def __init__(self, image, name):
        self.image, self.name = image, name


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", "2x4"])
def test_captions_are_trained_and_shown(mesh, captions, script, monkeypatch, tmp_path):
    run = script("_options").Run(mesh=mesh, directory=tmp_path)
    monkeypatch.setattr(captions, "read_glyphs", read_few)
    if mesh == "1":  # generation takes long to compile, so a caption of one word is written
        some = lambda model, pixels, **options: jnp.ones((len(pixels), 1), int)
        monkeypatch.setattr(captions.rc, "generate", some)
    small = {"size": 8, "width": 16, "layers": 1, "batch_size": 8, "steps": 2}
    captions.main(captions.Config(**small, run=run))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    assert results.keys() == {"exact_match", "rouge_l", "rouge_l_of_the_nearest_image"}
    # Names have words in common, but no name of the test is in the training set.
    assert 0 < results["rouge_l_of_the_nearest_image"] < 1
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [entry["step"] for entry in history] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in history)
    assert history[-1]["eval/exact_match"] == results["exact_match"]
    for name in ("loss.png", "captions.png"):
        with Image.open(directory / name) as picture:
            picture.verify()


def test_test_names_are_new_and_made_of_known_words(captions):
    # Every eighth of the 17 names is held out, from the first on, whose words are not known.
    pairs = [(None, name) for name in [*NAMES, "an unknown"]]
    train, test = captions.split(pairs)
    names = {name for _, name in train}
    assert len(train) == 14
    assert [name for _, name in test] == ["letter b with hook", "letter d with hook"]
    assert not names & {name for _, name in test}


def test_words_are_tokens_and_zero_ends(captions):
    tokenizer = captions.make_tokenizer(NAMES)
    tokens = tokenizer.encode("letter b with dot").ids
    assert len(tokens) == 4
    assert min(tokens) == 1
    assert tokenizer.decode_batch([[*tokens, 0, 0]]) == ["letter b with dot"]
    assert tokenizer.get_vocab_size() == 1 + 2 + 4 + 4


def test_transparent_pixels_of_emoji_become_black(captions, monkeypatch, tmp_path):
    files = tmp_path / "package" / "img" / "twitter" / "64"
    files.mkdir(parents=True)
    pixels = np.full((2, 2, 4), 255, np.uint8)
    pixels[0, 0, 3] = 0
    Image.fromarray(pixels).save(files / "1.png")
    entries = [{"name": "WHITE SQUARE", "image": "1.png"}]
    (tmp_path / "package" / "emoji.json").write_text(json.dumps(entries))
    monkeypatch.setattr(captions, "fetch_npm", lambda package: tmp_path)
    ((image, name),) = captions.read_pairs("emoji", 2)
    assert name == "white square"
    np.testing.assert_array_equal(image[..., 0], [[0, 1], [1, 1]])
    assert image.shape == (2, 2, 3)
