import json
import math

import numpy as np
import pytest
from PIL import Image

import redcoast as rc


@pytest.fixture
def clip(script):
    return script("contrastive")


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", "2x4"])
def test_names_and_images_are_matched(mesh, clip, script, monkeypatch, tmp_path):
    run = script("_options").Run(mesh=mesh, directory=tmp_path)
    # Ten names in two fonts, of which two are held out.
    few = lambda size, first_words, fonts: script("_glyphs").read_glyphs(
        size, first_words=["digit"], fonts=fonts[:2]
    )
    monkeypatch.setattr(clip, "read_glyphs", few)
    small = {"size": 8, "width": 16, "layers": 1, "batch_size": 8, "steps": 2}
    clip.main(clip.Config(**small, run=run))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    assert results.pop("chance_at_1") == 0.5
    assert len(results) == 4
    assert all(0 <= x <= 1 for x in results.values())
    # There are only two held-out names to choose five from.
    assert results["image_to_text_recall_at_5"] == results["text_to_image_recall_at_5"] == 1
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [entry["step"] for entry in history] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in history)
    assert math.isfinite(history[-1]["eval/loss"])
    for name in ("loss.png", "nearest_names.png"):
        with Image.open(directory / name) as picture:
            picture.verify()


@pytest.mark.thorough
def test_recall_is_the_fraction_of_rows_with_a_right_one_among_the_best(clip):
    rng = np.random.default_rng(0)
    scores, right = rng.normal(size=(40, 9)), rng.random((40, 9)) < 0.2
    for k in (1, 3, 9):
        actual = 0
        for row, good in zip(scores, right, strict=True):
            best = sorted(range(9), key=lambda i: -row[i])[:k]
            actual += any(good[i] for i in best)
        assert clip.recall(scores, right, k) == actual / 40
