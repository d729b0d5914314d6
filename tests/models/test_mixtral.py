"""Mixtral's experts against all experts for all tokens, and what holds for every decoder."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import (
    assert_close,
    check_cache,
    check_padding,
    check_remat,
    check_segments,
    check_split,
    logits_of,
    make_tokens,
)
from jax.sharding import PartitionSpec as P
from random_models import random_model, to_device

import redcoast as rc
from redcoast.models._moe import mix_experts, router_loss
from redcoast.models.mixtral import Mixtral, MixtralConfig
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained.hf import mixtral as hf_mixtral

CONFIG = MixtralConfig(
    vocab=16, width=16, layers=2, heads=4, kv_heads=4, hidden=24, experts=4, chosen=1
)
SETTINGS = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-05,
    "router_aux_loss_coef": 0.02,
    "max_position_embeddings": 32768,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def make(**changes):
    return random_model(Mixtral, dataclasses.replace(CONFIG, **changes))


MODEL = make()


def expert_fn(weights, x):
    return jnp.tanh(jnp.einsum("betd,edf->betf", x, weights))


def by_hand(weights, x, scores, chosen):
    """Each token by itself, in NumPy."""
    out, count, probability = np.zeros_like(x), np.zeros(scores.shape[-1]), 0
    for at in np.ndindex(x.shape[:2]):
        p = np.exp(scores[at]) / np.exp(scores[at]).sum()
        best = np.argsort(-p)[:chosen]
        for expert in best:
            out[at] += p[expert] / p[best].sum() * np.tanh(x[at] @ weights[expert])
        count[best] += 1
        probability = probability + p
    return out, count, probability


@pytest.mark.few("0.0-2")
@pytest.mark.parametrize("chosen", [1, 2, 5])
@pytest.mark.parametrize("favourite", [0.0, 2.0, 30.0])
def test_experts_equal_each_token_by_itself(chosen, favourite):
    # With a favourite that sees all tokens, those that find no room at first come later.
    rng = np.random.default_rng(chosen)
    x, weights = rng.normal(size=(2, 21, 6)), rng.normal(size=(5, 6, 6))
    scores = rng.normal(size=(2, 21, 5)) + favourite * np.array([1, 0, 0, 0, 0])
    expected = by_hand(weights, x, scores, chosen)
    args = [to_device(a, np.float32) for a in (x, scores)]
    run = lambda w, x, s: mix_experts(
        ft.partial(expert_fn, w), x, s, jnp.ones((1, 21), bool), chosen=chosen
    )
    out, use = jax.jit(run)(to_device(weights, np.float32), *args)
    assert_close(out, expected[0], 1e-5)
    for actual, right in zip(use, expected[1:], strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("favourite", [0.0, 30.0])
def test_gradients_equal_those_of_all_experts(favourite):
    rng = np.random.default_rng(1)
    random = lambda *shape: to_device(rng.normal(size=shape), np.float32)
    weights, x, real = random(4, 6, 6), random(2, 16, 6), jnp.ones((1, 16), bool)
    scores = random(2, 16, 4) + favourite * jnp.array([1.0, 0, 0, 0])[None, None]

    def sparse(weights, x, scores):
        return mix_experts(ft.partial(expert_fn, weights), x, scores, real, chosen=1)[0]

    def dense(weights, x, scores):
        p = jax.nn.softmax(scores)
        p = jnp.where(p == jnp.max(p, axis=-1, keepdims=True), p, 0)
        p = p / jnp.sum(p, axis=-1, keepdims=True)
        every = jnp.broadcast_to(x[:, None], (2, 4, 16, 6))
        return jnp.einsum("bse,besd->bsd", p, expert_fn(weights, every))

    grads = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2)))(
            weights, x, scores
        )
        for f in (sparse, dense)
    ]
    for actual, right in zip(*grads, strict=True):
        assert_close(actual, right, 1e-5)


def test_even_use_runs_half_of_all_products():
    # Each of 8 experts has room for twice its even share, of which one part in two is run.
    x, real = jnp.zeros((1, 32, 4)), jnp.ones((1, 32), bool)
    seen = []
    run = lambda scores: mix_experts(lambda x: seen.append(x.shape) or x, x, scores, real, chosen=2)
    jax.eval_shape(run, jnp.zeros((1, 32, 8)))
    assert {*seen} == {(1, 8, 16, 4)}


def test_router_loss_is_least_where_use_is_even():
    even, odd = jnp.full(4, 8.0), jnp.array([14.0, 6, 6, 6])
    assert router_loss(even, even / 2, 2) == 2
    np.testing.assert_allclose(router_loss(odd, odd / 2, 2), 4 * (14**2 + 3 * 36) / 2 / 16**2)
    assert router_loss(jnp.zeros(4), jnp.zeros(4), 2) == 0


@pytest.mark.thorough
def test_router_loss_does_not_see_padding():
    tokens = make_tokens(CONFIG)
    loss = eqx.filter_jit(lambda model, *args, **o: model.hidden_and_router_loss(*args, **o))
    hidden, alone = loss(MODEL, tokens)
    widths = ((0, 0), (4, 0))
    mask = jnp.pad(jnp.ones_like(tokens), widths)
    _, padded = loss(MODEL, jnp.pad(tokens, widths), mask=mask)
    np.testing.assert_allclose(padded, alone, rtol=1e-5)
    assert_close(MODEL.unembed(hidden), logits_of(MODEL, tokens))


@pytest.mark.thorough
def test_padding_changes_nothing():
    check_padding(MODEL)


@pytest.mark.thorough
def test_segments_are_as_rows_of_their_own():
    check_segments(MODEL)


@pytest.mark.thorough
def test_cache_is_as_all_at_once():
    check_cache(make(window=3))


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
def test_experts_are_split():
    plan = check_split(make(vocab=256, width=64, hidden=64, chosen=2))
    specs = plan.shardings.layers
    assert all("model" in specs_of.spec for specs_of in (specs.gate, specs.up, specs.down))


def test_a_router_is_whole_where_experts_are_split():
    """Also if it is trained with the loss that combines counts of experts with its scores."""
    shapes = {"router": (256, 8), "up": (8, 256, 512), "down": (8, 512, 256)}
    model = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def loss(model, x):
        run = lambda x: jnp.tanh(x @ model["up"]) @ model["down"]
        y, use = mix_experts(run, x, x @ model["router"], jnp.ones((1, 64), bool), chosen=2)
        return jnp.mean(y**2) + router_loss(*use, 2)

    x = jax.ShapeDtypeStruct((16, 64, 256), jnp.float32)
    plan = rc.plan_shardings(model, rc.make_mesh(data=2, model=4), fn=loss, args=(x,))
    assert {name: one.spec for name, one in plan.shardings.items()} == {
        "router": P(), "up": P("model"), "down": P("model")
    }  # fmt: skip


@pytest.mark.thorough
def test_token_outside_the_vocabulary_gives_nan():
    tokens = make_tokens(CONFIG)
    logits = logits_of(MODEL, tokens.at[1, 3].set(CONFIG.vocab))
    assert jnp.all(jnp.isnan(logits[1, 3:]))
    assert jnp.all(jnp.isfinite(logits[jnp.array([0, 2])]))


@pytest.mark.thorough
def test_dropout_needs_a_key():
    model, tokens = make(attention_dropout=0.5), make_tokens(CONFIG)
    assert_close(logits_of(model, tokens), logits_of(MODEL, tokens))
    dropped = logits_of(model, tokens, key=jax.random.key(0))
    assert jnp.max(jnp.abs(dropped - logits_of(MODEL, tokens))) > 1e-3


@pytest.mark.thorough
def test_bfloat16_is_close():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODEL)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    tokens = make_tokens(CONFIG)
    logits, expected = logits_of(half, tokens), logits_of(exact, tokens)
    assert logits.dtype == jnp.bfloat16
    # A token whose two best experts are nearly alike may go through the other one.
    error = jnp.max(jnp.abs(logits.astype(jnp.float32) - expected), axis=-1)
    assert jnp.median(error) < 0.03 * jnp.max(expected)


@pytest.mark.thorough
def test_initial_parameters_have_the_variance_of_their_fan_in():
    config = dataclasses.replace(CONFIG, vocab=64, hidden=48, layers=3)
    model = eqx.filter_jit(Mixtral)(config, key=jax.random.key(0))
    np.testing.assert_allclose(jnp.std(model.layers.gate), 1 / 4, rtol=0.05)
    np.testing.assert_allclose(jnp.std(model.layers.down), 1 / np.sqrt(48 * 6), rtol=0.05)


def test_settings_are_read_and_written():
    config = read_config(MixtralConfig, SETTINGS)
    assert config == MixtralConfig(
        vocab=32000,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        hidden=14336,
        router_loss_weight=0.02,
        eos=(2,),
        bos=1,
    )
    assert read_config(MixtralConfig, write_config(config)) == dataclasses.replace(
        config, head_size=128
    )


@pytest.mark.parametrize(
    "change", [{"router_jitter_noise": 0.1}, {"hidden_act": "gelu"}, {"shared_experts": 1}]
)
def test_settings_that_are_not_implemented_are_refused(change):
    with pytest.raises(ValueError, match=f"`{next(iter(change))}`"):
        read_config(MixtralConfig, SETTINGS | change)


def test_tables_name_every_array():
    for tied in (False, True):
        config = dataclasses.replace(CONFIG, tied=tied)
        model = eqx.filter_eval_shape(Mixtral, config, key=jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(model)
        paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
        assert paths == hf_mixtral.tensors(config).keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": 5}, "`chosen` must be at most `experts`, but they are 5 and 4"),
        ({"chosen": 0}, "`chosen` must be at least 1"),
        ({"heads": 3, "kv_heads": 3}, "16 is not a multiple of 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
