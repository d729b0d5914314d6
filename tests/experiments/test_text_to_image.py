"""The text-to-image experiment: a short run, the sampler, the captions."""

import itertools as it
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", "2x4"])
def test_short_run_leaves_samples(mesh, script, tmp_path):
    module, options = script("text_to_image"), script("_options")
    # The batch divides the 16 images of the evaluation, which saves compilations.
    small = {"names": r"digit [oft]\w+", "size": 8, "width": 16, "batch_size": 16, "steps": 2}
    config = module.Config(**small, run=options.Run(mesh=mesh, directory=tmp_path))
    module.main(config)
    (directory,) = tmp_path.iterdir()
    assert {"samples.png", "loss.png", "checkpoints"} <= {x.name for x in directory.iterdir()}
    results = json.loads((directory / "results.json").read_text())
    assert np.isfinite(list(results.values())).all()
    assert results["accuracy_of_real_images"] > 0.7


@pytest.mark.thorough
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_sampler_agrees_with_ddim_on_gaussian_data(script, guidance):
    """Images are normal with a mean that the word gives, so the best network is known."""
    means, spread = jnp.array([0.0, 2.0]), 0.5

    def net(x, angle, words):
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        mean = means[words[0]]
        variance = (cos * spread) ** 2 + sin**2
        image = mean + cos * spread**2 / variance * (x - cos * mean)
        noise = sin / variance * (x - cos * mean)
        return cos * noise - sin * image

    start = jax.random.normal(jax.random.key(0), (6, 1, 2, 2))
    words, steps = jnp.ones((6, 1), jnp.int32), 40
    images = script("text_to_image").ddim(net, start, words, guidance, steps)

    x = np.asarray(start, np.float64)  # DDIM as its paper writes it: image, noise, next level
    angles = np.linspace(np.pi / 2, 0, steps + 1)
    for now, after in it.pairwise(angles):
        cos, sin = np.cos(now), np.sin(now)
        slope = lambda mean, x=x, cos=cos, sin=sin: (
            sin * (x - cos * mean) / ((cos * spread) ** 2 + sin**2)
        )
        noise = slope(0.0) + guidance * (slope(2.0) - slope(0.0))
        # In pure noise, nothing is known of the image but its mean.
        image = (x - sin * noise) / cos if cos > 1e-6 else guidance * 2.0
        x = np.cos(after) * image + np.sin(after) * noise
    np.testing.assert_allclose(images, x, rtol=1e-3, atol=1e-3)
    if guidance == 1:
        np.testing.assert_allclose(images, 2 + spread * start, atol=0.1)


@pytest.mark.thorough
def test_captions_name_style_and_character(script):
    drawn = script("text_to_image").draw("cyrillic capital letter zhe", (3, 8, 8), "symbol")
    captions = [caption for _, caption in drawn]
    assert len(set(captions)) == len(captions)
    assert {"symbol", "bold symbol", "bold oblique sans mono symbol"} <= set(captions)
    assert {image.shape for image, _ in drawn} == {(3, 8, 8)}


def test_characters_that_no_font_draws_are_refused(script, refused):
    with refused("Only 0 images are named"):
        script("text_to_image").draw("hangul syllable ga", (1, 8, 8))


def test_symbol_without_a_model_is_refused(script, tmp_path, refused):
    with refused("There is no model"):
        script("text_to_image").load_model(tmp_path, None)
