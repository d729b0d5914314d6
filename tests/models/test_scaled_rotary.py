"""Rotary embeddings whose scaling depends on the length of a row, against their definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from redcoast.models import RopeScaling, Yarn
from redcoast.models._rotary import rotary_frequencies, scaled_angles

POSITIONS = np.stack([np.arange(20), np.minimum(np.arange(20), 7)])
BASE, HEAD, FACTOR, ORIGINAL = 100.0, 8, 3.0, 8


@pytest.mark.thorough
def test_the_base_grows_with_the_length_of_each_row():
    """A row that is not longer than the original context is not scaled."""
    scaling = RopeScaling("dynamic", FACTOR, original=ORIGINAL)
    cos, sin = scaled_angles(POSITIONS, HEAD, BASE, scaling, jnp.float32)
    for row, positions in enumerate(POSITIONS):
        length = max(positions.max() + 1, ORIGINAL)
        base = BASE * (FACTOR * length / ORIGINAL - (FACTOR - 1)) ** (HEAD / (HEAD - 2))
        angles = positions[:, None] * base ** -(np.arange(0, HEAD, 2) / HEAD)[None]
        np.testing.assert_allclose(cos[row, :, 0], np.cos(angles), atol=1e-5)
        np.testing.assert_allclose(sin[row, :, 0], np.sin(angles), atol=1e-5)
    plain, _ = scaled_angles(POSITIONS, HEAD, BASE, None, jnp.float32)
    np.testing.assert_allclose(cos[1], plain[1], atol=1e-6)
    assert np.abs(np.asarray(cos[0] - plain[0])).max() > 0.1


def test_yarn_scales_long_wavelengths_and_the_size():
    scaling = Yarn(4.0, 64, amplitude=1.5)
    cos, sin = scaled_angles(np.array([[0, 1]]), HEAD, 1e4, scaling, jnp.float32)
    np.testing.assert_allclose(cos[0, 0, 0], 1.5)
    angles = np.arctan2(np.asarray(sin[0, 1, 0]), np.asarray(cos[0, 1, 0]))
    np.testing.assert_allclose(angles[-1], 1e4 ** (-6 / 8) / 4, rtol=1e-4)


def test_families_without_dynamic_embeddings_refuse_them():
    with pytest.raises(ValueError, match="not implemented for this model"):
        rotary_frequencies(HEAD, BASE, RopeScaling("dynamic", 2.0))
