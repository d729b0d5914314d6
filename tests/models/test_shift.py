import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from redcoast.models import shift_right

LABELS = np.array([[5, 7, 1], [6, 1, -100], [-100, -100, -100]])


@pytest.mark.parametrize("xp", [np, jnp])
def test_each_token_is_followed_by_its_label(xp):
    tokens = shift_right(xp.asarray(LABELS), start=2, pad=3)
    assert isinstance(tokens, np.ndarray if xp is np else jax.Array)
    assert tokens.dtype == xp.asarray(LABELS).dtype
    np.testing.assert_array_equal(tokens, [[2, 5, 7], [2, 6, 1], [2, 3, 3]])


def test_the_start_takes_the_place_of_what_is_no_label():
    tokens = shift_right(LABELS, start=2)
    np.testing.assert_array_equal(tokens, [[2, 5, 7], [2, 6, 1], [2, 2, 2]])


def test_any_shape_and_under_jit():
    labels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    tokens = shift_right(labels, start=255)
    assert tokens.dtype == np.uint8
    np.testing.assert_array_equal(tokens[1, 0], [255, 6, 7])
    np.testing.assert_array_equal(shift_right(labels[0, 0], start=9), [9, 0, 1])
    traced = jax.jit(lambda labels: shift_right(labels, start=2))(jnp.asarray(LABELS))
    np.testing.assert_array_equal(traced, shift_right(LABELS, start=2))


def test_labels_stay_as_they_are():
    labels = LABELS.copy()
    shift_right(labels, start=0)
    np.testing.assert_array_equal(labels, LABELS)


@pytest.mark.parametrize(
    ("labels", "tokens", "message"),
    [
        (LABELS, {"start": -1}, "`start` is -1"),
        (LABELS, {"start": 0, "pad": -100}, "`pad` is -100"),
        (LABELS.astype(np.uint8), {"start": 256}, "`start` is 256, .* the largest uint8"),
        (LABELS[:, :0], {"start": 0}, r"shape \(3, 0\), so there is nothing to shift"),
    ],
)
def test_bad_tokens_are_refused(labels, tokens, message):
    with pytest.raises(ValueError, match=message):
        shift_right(labels, **tokens)


def test_labels_that_are_no_integers_are_refused():
    # The tests' type checker would refuse them first.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(TypeError, match="must be integers, but have dtype float64"):
            shift_right(LABELS.astype(np.float64), start=0)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
