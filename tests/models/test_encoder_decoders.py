"""What holds of every encoder-decoder of text: T5 and BART."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pair_helpers import DECODER_TOKENS, TOKENS, VOCAB, gradient_of, logits_of, loss_of, quick_jit
from random_models import cast, random_model

import redcoast as rc
from redcoast.models.bart import Bart, BartConfig
from redcoast.models.t5 import T5, T5Config

SIZES: dict[str, Any] = {
    "vocab": VOCAB,
    "width": 16,
    "layers": 1,
    "decoder_layers": 2,
    "heads": 2,
    "hidden": 24,
}
CLASSES = {
    "t5": (T5, T5Config(**SIZES, buckets=8, distance=5, gated=True, tied=False)),
    "bart": (Bart, BartConfig(**SIZES, positions=12, scale_embedding=True, attention_dropout=0.1)),
}
FAMILIES = list(CLASSES)
MODELS = {family: random_model(*CLASSES[family]) for family in FAMILIES}
pytestmark = pytest.mark.parametrize("family", few_of(FAMILIES, "t5"))


def make(family, **changes):
    model_class, config = CLASSES[family]
    return random_model(model_class, dataclasses.replace(config, **changes))


def padded(tokens, side, count):
    widths = ((0, 0), (count, 0) if side == "left" else (0, count))
    mask = jnp.pad(jnp.ones_like(tokens), widths)
    return jnp.pad(tokens, widths, constant_values=9), mask


def masks_of(like):
    return {"mask": like(TOKENS), "decoder_mask": like(DECODER_TOKENS)}


@pytest.mark.thorough
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family, side):
    tokens, mask = padded(TOKENS, side, 4)
    decoder_tokens, decoder_mask = padded(DECODER_TOKENS, side, 4)
    masks = {"mask": mask, "decoder_mask": decoder_mask.astype(bool)}
    logits = logits_of(MODELS[family], tokens, decoder_tokens, **masks)
    real = logits[:, 4:] if side == "left" else logits[:, :5]
    np.testing.assert_allclose(real, logits_of(MODELS[family]), rtol=1e-4, atol=1e-5)
    assert jnp.all(jnp.isfinite(logits))


@pytest.mark.thorough
def test_ragged_batch_equals_each_text_alone(family):
    model = MODELS[family]
    mask = jnp.arange(7)[None] >= jnp.array([[0], [3], [0]])
    decoder_mask = jnp.arange(5)[None] < jnp.array([[5], [5], [2]])
    logits = logits_of(model, TOKENS, DECODER_TOKENS, mask=mask, decoder_mask=decoder_mask)
    shorter = logits_of(model, TOKENS[1:2, 3:], DECODER_TOKENS[1:2])
    np.testing.assert_allclose(logits[1:2], shorter, rtol=1e-4, atol=1e-5)
    whole = logits_of(model)
    np.testing.assert_allclose(logits[0], whole[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits[2, :2], whole[2, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_packed_texts_equal_each_alone(family):
    model = MODELS[family]
    tokens, decoder_tokens = TOKENS[:2].reshape(1, 14), DECODER_TOKENS[:2].reshape(1, 10)
    # Numbers in any order; the row ends with padding, which is of no text.
    tokens, mask = padded(tokens, "right", 2)
    decoder_tokens, decoder_mask = padded(decoder_tokens, "right", 3)
    segments = jnp.repeat(jnp.array([[5, 3, 0]]), jnp.array([7, 7, 2]), axis=1)
    decoder_segments = jnp.repeat(jnp.array([[5, 3, 0]]), jnp.array([5, 5, 3]), axis=1)
    masks = {"mask": mask, "decoder_mask": decoder_mask}
    masks |= {"segments": segments, "decoder_segments": decoder_segments}
    logits = logits_of(model, tokens, decoder_tokens, **masks)[0, :10].reshape(2, 5, VOCAB)
    np.testing.assert_allclose(logits, logits_of(model)[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_later_tokens_of_the_decoder_change_nothing_before_them(family):
    model = MODELS[family]
    changed = DECODER_TOKENS.at[:, 3].set((DECODER_TOKENS[:, 3] + 1) % VOCAB)
    before, after = logits_of(model), logits_of(model, TOKENS, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert jnp.all(jnp.any(before[:, 3:] != after[:, 3:], axis=-1))


@pytest.mark.thorough
def test_every_token_of_the_encoder_changes_every_logit(family):
    model = MODELS[family]
    for at in (0, 6):
        changed = TOKENS.at[:, at].set((TOKENS[:, at] + 1) % VOCAB)
        before, after = logits_of(model), logits_of(model, changed)
        assert jnp.all(jnp.any(before != after, axis=-1))


@quick_jit
def decode(model, tokens, mask, decoder_tokens, decoder_mask):
    """A prompt of the first three tokens in one pass, and the others one by one."""
    memory = model.encode(tokens, mask=mask)
    cache = model.init_cache(
        len(tokens), decoder_tokens.shape[1] + 2, memory=memory, memory_mask=mask
    )
    hidden, cache = model.decode(decoder_tokens[:, :3], cache, mask=decoder_mask[:, :3])
    parts = [hidden]
    for at in range(3, decoder_tokens.shape[1]):
        # Rows change places and back: all of a row is in the cache.
        cache = cache.take(jnp.array([2, 0, 1]))
        rows = decoder_tokens[jnp.array([2, 0, 1]), at : at + 1]
        hidden, cache = model.decode(rows, cache)
        cache = cache.take(jnp.array([1, 2, 0]))
        parts.append(hidden[jnp.array([1, 2, 0])])
    return model.unembed(jnp.concatenate(parts, axis=1)), cache


@pytest.mark.thorough
def test_decoding_with_a_cache_equals_all_at_once(family):
    model = MODELS[family]
    mask = jnp.arange(7)[None] < jnp.array([[7], [4], [6]])
    decoder_mask = jnp.arange(5)[None] >= jnp.array([[0], [2], [1]])
    logits, cache = decode(model, TOKENS, mask, DECODER_TOKENS, decoder_mask)
    masks = {"mask": mask, "decoder_mask": decoder_mask}
    expected = logits_of(model, TOKENS, DECODER_TOKENS, **masks)
    real = decoder_mask[:, :, None]
    np.testing.assert_allclose(
        jnp.where(real, logits, 0), jnp.where(real, expected, 0), rtol=1e-4, atol=1e-5
    )
    assert int(cache.own.filled) == 5


@pytest.mark.thorough
def test_padding_behind_a_prompt_changes_nothing(family):
    tokens = jnp.asarray(np.insert(np.asarray(DECODER_TOKENS)[:, :4], 2, 9, axis=1))
    gap, mask = np.tile(np.arange(5) != 2, (3, 1)), np.ones((3, 7), bool)
    logits, _ = decode(MODELS[family], TOKENS, jnp.asarray(mask), tokens, jnp.asarray(gap))
    expected = np.asarray(logits_of(MODELS[family]))[:, :4]
    np.testing.assert_allclose(np.asarray(logits)[:, [0, 1, 3, 4]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_dropout_needs_a_key(family):
    plain = logits_of(MODELS[family])
    one, again, other = (logits_of(MODELS[family], key=jax.random.key(n)) for n in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    for different in (other, plain):
        assert jnp.mean(jnp.isclose(one, different, rtol=1e-3)) < 0.1


@pytest.mark.thorough
def test_remat_saves_less_and_changes_no_gradient(family):
    full = make(family, remat="full")
    plain, again = (
        gradient_of(model, **masks_of(jnp.ones_like)) for model in (MODELS[family], full)
    )
    for expected, got in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)

    def saved(model):
        forward = lambda model: model(TOKENS, DECODER_TOKENS)
        _, pullback = eqx.filter_eval_shape(eqx.filter_vjp, forward, model)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "size"))

    dots = make(family, remat="dots")
    assert saved(full) < saved(dots) < 0.9 * saved(MODELS[family])


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    few_of([(jnp.bfloat16, 0.06), (jnp.float16, 0.008)], (jnp.bfloat16, 0.06), several=True),
)
@pytest.mark.thorough
def test_half_precision_is_close_to_float32(family, dtype, tolerance):
    half = cast(MODELS[family], dtype)
    logits, exact = logits_of(half), logits_of(cast(half, jnp.float32))
    assert logits.dtype == dtype
    assert jnp.max(jnp.abs(logits.astype(jnp.float32) - exact)) < tolerance * jnp.max(exact)


@pytest.mark.thorough
def test_gradient_at_all_padding_is_finite(family):
    gradient = gradient_of(MODELS[family], **masks_of(jnp.zeros_like))
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.thorough
def test_token_outside_the_vocabulary_gives_nan(family):
    logits = logits_of(MODELS[family], TOKENS, DECODER_TOKENS.at[1, 3].set(VOCAB))
    assert jnp.all(jnp.isnan(logits[1, 3:]))
    assert jnp.all(jnp.isfinite(logits[jnp.array([0, 2])]))
    logits = logits_of(MODELS[family], TOKENS.at[1, 3].set(VOCAB))
    assert jnp.all(jnp.isnan(logits[1]))
    assert jnp.all(jnp.isfinite(logits[0]))


def test_rows_that_do_not_fit_are_refused(family):
    model = MODELS[family]
    with pytest.raises(ValueError, match="Only one of `segments` and `decoder_segments`"):
        model(TOKENS, DECODER_TOKENS, segments=TOKENS)
    with pytest.raises(ValueError, match="memory has 3 rows, but there are 2 rows"):
        model.init_cache(2, 5, memory=jnp.zeros((3, 7, 16)))
    # The tests' type checker would refuse it first.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(
            ValueError, match="encoder.s tokens have 2 rows, but the decoder.s have 3"
        ):
            model(TOKENS[:2], DECODER_TOKENS)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.thorough
def test_is_split_over_a_mesh(family):
    model = make(family, vocab=64, heads=4, width=32, hidden=64, layers=2)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 8)))
    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_shardings(model, mesh, fn=loss_of, args=(tokens, tokens))
    split = [
        leaf.size
        for leaf, sharding in zip(
            jax.tree.leaves(model), jax.tree.leaves(plan.shardings), strict=True
        )
        if "model" in jax.tree.leaves(tuple(sharding.spec))
    ]
    assert sum(split) >= 0.9 * sum(leaf.size for leaf in jax.tree.leaves(model))
    placed = jax.tree.map(jax.device_put, model, plan.shardings)
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    loss = quick_jit(plan.constrain(loss_of))(placed, batch, batch)
    expected = quick_jit(loss_of)(model, tokens, tokens)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
