"""The LLaMA decoder against NumPy, and what padding, grouping and remat must leave unchanged."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from grids import few_of
from random_models import cast, random_model, to_device

from redcoast.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=13, width=16, layers=2, heads=4, kv_heads=2, hidden=24)
TOKENS = to_device(np.random.default_rng(0).integers(0, CONFIG.vocab, (3, 7)))


def make(**changes):
    return random_model(Llama, dataclasses.replace(CONFIG, **changes))


MODEL = make()


@eqx.filter_jit
def logits_of(model, tokens, mask=None):
    return model(tokens, mask=mask)


@eqx.filter_jit
def gradient_of(model, tokens):
    return eqx.filter_grad(lambda model: jnp.mean(jnp.sin(model(tokens))))(model)


def numpy_logits(model, tokens):
    """One sequence through the equations of the papers, in float64, one position at a time."""
    config = model.config
    model = jax.tree.map(lambda x: np.asarray(x, np.float64), model)
    per_layer = vars(model.layers)

    def norm(vector, scale):
        return vector / np.sqrt(np.mean(vector**2) + config.norm_eps) * scale

    def rotate(vector, position):
        half = len(vector) // 2
        turned = np.zeros_like(vector)
        for i in range(half):
            angle = position * config.rope_base ** (-2 * i / len(vector))
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            turned[[i, i + half]] = turn @ vector[[i, i + half]]
        return turned

    stream = [model.embed[token] for token in np.asarray(tokens)]
    for index in range(config.layers):
        w = {name: value[index] for name, value in per_layer.items() if value is not None}
        normed = [norm(x, w["attention_norm"]) for x in stream]
        for position in range(len(stream)):
            for head in range(config.heads):
                group = head // (config.heads // config.kv_heads)
                query = rotate(normed[position] @ w["wq"][:, head], position)
                scores, values = [], []
                for earlier in range(position + 1):
                    key = rotate(normed[earlier] @ w["wk"][:, group], earlier)
                    scores.append(query @ key / np.sqrt(len(query)))
                    values.append(normed[earlier] @ w["wv"][:, group])
                weights = np.exp(scores) / np.sum(np.exp(scores))
                stream[position] = stream[position] + (weights @ values) @ w["wo"][head]
        for position, x in enumerate(stream):
            h = norm(x, w["mlp_norm"])
            gate = h @ w["gate"]
            stream[position] = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    head = model.embed.T if model.head is None else model.head
    return np.stack([norm(x, model.norm) @ head for x in stream])


@pytest.mark.few("False-2")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_matches_numpy(kv_heads, tied):
    model = make(kv_heads=kv_heads, tied=tied, rope_base=100.0)
    logits = logits_of(model, TOKENS)
    for sequence, got in zip(TOKENS, logits, strict=True):
        np.testing.assert_allclose(got, numpy_logits(model, sequence), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_float64_matches_numpy():
    with jax.enable_x64(True):
        model = cast(MODEL, jnp.float64)
        logits = logits_of(model, TOKENS)
        assert logits.dtype == jnp.float64
        np.testing.assert_allclose(logits[0], numpy_logits(model, TOKENS[0]), atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    few_of([(jnp.bfloat16, 0.03), (jnp.float16, 0.004)], (jnp.float16, 0.004), several=True),
)
def test_half_precision_is_close_to_float32(dtype, tolerance):
    half = cast(MODEL, dtype)
    logits, exact = logits_of(half, TOKENS), logits_of(cast(half, jnp.float32), TOKENS)
    assert logits.dtype == dtype
    assert jnp.max(jnp.abs(logits.astype(jnp.float32) - exact)) < tolerance * jnp.max(exact)
    gradient, expected = gradient_of(half, TOKENS), gradient_of(cast(half, jnp.float32), TOKENS)
    for got, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert got.dtype == dtype
        error = np.linalg.norm(np.asarray(got, np.float32) - np.asarray(right))
        assert error < 3 * tolerance * np.linalg.norm(np.asarray(right))


@pytest.mark.thorough
def test_bfloat16_keeps_far_positions_apart():
    # Rounded to bfloat16, position 257 is 256, and who is near whom would change.
    model = cast(make(rope_base=2.0), jnp.bfloat16)
    tokens = to_device(np.random.default_rng(1).integers(0, CONFIG.vocab, (1, 300)))
    exact = logits_of(cast(model, jnp.float32), tokens)
    error = jnp.abs(logits_of(model, tokens).astype(jnp.float32) - exact)[0]
    assert jnp.max(error[256:]) < 2 * jnp.max(error[:256])


@pytest.mark.thorough
@pytest.mark.few("3")
@pytest.mark.parametrize("position", [0, 3, 6])
def test_later_tokens_do_not_change_earlier_logits(position):
    changed = TOKENS.at[:, position].set((TOKENS[:, position] + 1) % CONFIG.vocab)
    before, after = logits_of(MODEL, TOKENS), logits_of(MODEL, changed)
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert jnp.all(jnp.any(before[:, position:] != after[:, position:], axis=-1))


@pytest.mark.few("bool-left")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [bool, jnp.int32])
def test_padding_changes_nothing(side, dtype):
    widths = ((0, 0), (4, 0) if side == "left" else (0, 4))
    padded = jnp.pad(TOKENS, widths, constant_values=9)
    mask = jnp.pad(jnp.ones_like(TOKENS), widths).astype(dtype)
    logits = logits_of(MODEL, padded, mask)
    real = logits[:, 4:] if side == "left" else logits[:, :7]
    np.testing.assert_allclose(real, logits_of(MODEL, TOKENS), rtol=1e-4, atol=1e-5)
    assert jnp.all(jnp.isfinite(logits))


@pytest.mark.thorough
def test_ragged_batch_equals_each_sequence_alone():
    mask = jnp.arange(7)[None] >= jnp.array([[0], [3], [3]])
    logits = logits_of(MODEL, TOKENS, mask)
    for row, first in enumerate([0, 3, 3]):
        alone = logits_of(MODEL, TOKENS[:, first:])
        np.testing.assert_allclose(logits[row, first:], alone[row], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_gradient_at_all_padding_is_finite():
    mask = jnp.zeros_like(TOKENS)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(m(TOKENS, mask=mask))))(MODEL)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.thorough
def test_grouped_heads_equal_repeated_heads():
    repeats = CONFIG.heads // CONFIG.kv_heads
    full = eqx.tree_at(
        lambda model: (model.layers.wk, model.layers.wv),
        make(kv_heads=CONFIG.heads),
        [jnp.repeat(w, repeats, axis=2) for w in (MODEL.layers.wk, MODEL.layers.wv)],
    )
    np.testing.assert_allclose(
        logits_of(MODEL, TOKENS), logits_of(full, TOKENS), rtol=1e-5, atol=1e-6
    )


@pytest.mark.thorough
@pytest.mark.parametrize("remat", few_of(["dots", "full"], "full"))
def test_remat_saves_less_and_changes_no_gradient(remat):
    model = make(remat=remat)
    plain, again = gradient_of(MODEL, TOKENS), gradient_of(model, TOKENS)
    for expected, got in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-7)

    def saved(model):
        _, pullback = eqx.filter_eval_shape(eqx.filter_vjp, lambda m: m(TOKENS), model)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "size"))

    assert saved(model) < 0.7 * saved(MODEL)


@pytest.mark.thorough
def test_tied_head_is_the_embedding():
    tied = make(tied=True)
    assert tied.head is None
    untied = eqx.tree_at(lambda model: model.head, MODEL, tied.embed.T)
    np.testing.assert_allclose(logits_of(tied, TOKENS), logits_of(untied, TOKENS), rtol=1e-5)


def test_token_outside_the_vocabulary_gives_nan():
    logits = logits_of(MODEL, TOKENS.at[1, 3].set(CONFIG.vocab))
    assert jnp.all(jnp.isnan(logits[1, 3:]))
    assert jnp.all(jnp.isfinite(logits[jnp.array([0, 2])]))


@pytest.mark.thorough
def test_bytes_are_tokens():
    model = make(vocab=256)
    tokens = jnp.array([[0, 127, 128, 255]])
    np.testing.assert_array_equal(
        logits_of(model, tokens.astype(jnp.uint8)), logits_of(model, tokens)
    )


def test_is_made_abstractly():
    config = LlamaConfig(
        vocab=32000, width=4096, layers=32, heads=32, kv_heads=8, hidden=14336, tied=False
    )
    model = eqx.filter_eval_shape(lambda key: Llama(config, key=key), jax.random.key(0))
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    assert shapes == {
        "embed": (32000, 4096),
        "layers/attention_norm": (32, 4096),
        "layers/wq": (32, 4096, 32, 128),
        "layers/wk": (32, 4096, 8, 128),
        "layers/wv": (32, 4096, 8, 128),
        "layers/wo": (32, 32, 128, 4096),
        "layers/mlp_norm": (32, 4096),
        "layers/gate": (32, 4096, 14336),
        "layers/up": (32, 4096, 14336),
        "layers/down": (32, 14336, 4096),
        "norm": (4096,),
        "head": (4096, 32000),
    }


@pytest.mark.thorough
def test_initial_logits_are_of_order_one():
    config = LlamaConfig(vocab=256, width=64, layers=12, heads=4, kv_heads=2, hidden=172)
    model = eqx.filter_jit(Llama)(config, key=jax.random.key(0))
    np.testing.assert_allclose(jnp.std(model.layers.wq), 1 / 8, rtol=0.03)
    np.testing.assert_allclose(jnp.std(model.layers.down), 1 / np.sqrt(172 * 24), rtol=0.03)
    tokens = to_device(np.random.default_rng(1).integers(0, 256, (2, 32)))
    assert 0.8 < jnp.std(logits_of(model, tokens)) < 1.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "kv_heads": 3}, "16 is not a multiple of 3"),
        ({"heads": 16, "kv_heads": 16}, "must be even, but is 1"),
        ({"kv_heads": 3}, "4 is not a multiple of 3"),
        ({"layers": 0}, "`layers` must be at least 1, but is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_unknown_remat_is_refused():
    # The tests' type checker would refuse it first.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(
            ValueError, match="must be 'none', 'dots', 'full' or 'auto', but is 'all'"
        ):
            dataclasses.replace(CONFIG, remat="all")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
