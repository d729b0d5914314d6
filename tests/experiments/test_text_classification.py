"""`experiments/text_classification.py` and its tokenizer."""

import json
import math
from itertools import product

import pytest
from PIL import Image


@pytest.fixture
def module(script):
    return script("text_classification")


TEXTS = {f"{a} {b} text about {c}": k % 2 for k, (a, b, c) in enumerate(product("abcd", repeat=3))}


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("task", "figures"),
    [
        ("classification", {"accuracy", "f1"}),
        ("regression", {"spearman"}),
    ],
)
@pytest.mark.parametrize("mesh", ["1", "2x4"])
def test_texts_are_classified_and_rated(mesh, task, figures, module, script, monkeypatch, tmp_path):
    options = script("_options")
    rating = task == "regression"
    data = {text: float(y) if rating else y for text, y in TEXTS.items()}
    names = ["rating"] if rating else ["even", "odd"]
    monkeypatch.setattr(module, "read_data", lambda c: (data, names))
    run = options.Run(mesh=mesh, directory=tmp_path)
    sizes = {"seq": 8, "width": 32, "layers": 1, "batch_size": 8}
    module.main(module.Config(task=task, steps=2, run=run, **sizes))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    assert {*results} == figures | {f"tfidf_{name}" for name in figures}
    assert all(map(math.isfinite, results.values()))
    header, *samples = (directory / "samples.txt").read_text().splitlines()
    assert header == "target | predicted | text"
    for sample in samples:
        target, _, text = sample.split(" | ")
        assert TEXTS[text] == (float(target) if rating else names.index(target))
    for name in ("loss.png", "samples.png"):
        with Image.open(directory / name) as picture:
            picture.verify()


def test_operators_are_masked(module, monkeypatch):
    text = """
    if x is not None and y == 3:
        return a < b
    elif 'a b' not in names:
        if any(x in y for x in z):
            while c < d:
    """
    monkeypatch.setattr(module, "read_texts", lambda path: ([text], ["if a >= 2:"]))
    data, names = module.read_operators()
    actual = {"None and y == 3 [MASK] x": "is not", "names [MASK] 'a b'": "not in"}
    assert {x: names[y] for x, y in data.items()} == actual | {"2 [MASK] a": ">="}


def test_tokens_of_texts_are_padded_and_truncated(script):
    module = script("_tokenizers")
    tokenizer = module.train_tokenizer(["a [MASK] b", "some more text"] * 5, 280)
    start, end = module.START, module.END
    tokens, mask = module.encode(tokenizer, ["a[MASK]é", "x" * 50], 8)
    assert tokens.shape == mask.shape == (2, 8)
    assert tokens[0, 0] == tokens[1, 0] == start
    assert tokens[1, -1] == end
    assert mask[0].sum() == list(tokens[0]).index(end) + 1
    assert tokenizer.decode(tokens[0].tolist()).strip() == "a é"
