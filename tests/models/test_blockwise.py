"""Attention in blocks against attention with the scores of all pairs."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import to_device

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.losses import cross_entropy
from redcoast.models import (
    T5,
    Gemma,
    GemmaConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    ModernBert,
    ModernBertConfig,
    T5Config,
    _blockwise,
    _view,
)
from redcoast.models._attention import attend
from redcoast.models._blockwise import attend_in_blocks
from redcoast.models._relative import RelativeBias
from redcoast.models._view import View

BATCH, SEQ, HEADS, KV_HEADS, SIZE = 2, 61, 4, 2, 8
RNG = np.random.default_rng(0)
normal = lambda *shape: to_device(RNG.normal(size=shape), np.float32)
Q, K, V = (normal(BATCH, SEQ, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
WEIGHTS = normal(BATCH, SEQ, HEADS, SIZE)
REAL = to_device(np.arange(SEQ)[None] < np.array([[SEQ], [40]]))
SEGMENTS = to_device(np.sort(RNG.integers(0, 4, (BATCH, SEQ)), axis=1))
DISTANCES = RelativeBias(normal(19, HEADS), jnp.arange(SEQ)[None], jnp.arange(SEQ)[None])
CASES = {
    "all": (View(), None, None),
    "causal, soft cap": (View(causal=True), None, 2.0),
    "window": (View(causal=True, window=20), None, None),
    "window on both sides": (View(REAL, window=12), None, None),
    "padding, segments": (View(REAL, segments=(SEGMENTS, SEGMENTS), causal=True), None, None),
    "slots": (View(causal=True, slots=jnp.arange(SEQ) - 7), None, None),
    "relative bias": (View(causal=True), DISTANCES, None),
    "bias": (View(REAL), normal(1, HEADS, SEQ, SEQ), None),
}


@pytest.mark.thorough
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_all_pairs(case, size):
    view, bias, softcap = CASES[case]
    visible = jnp.broadcast_to(view.visible(SEQ, SEQ), (BATCH, SEQ, SEQ))
    # A query that sees no key has a meaningless output.
    weights = jnp.where(visible.any(-1)[..., None, None], WEIGHTS, 0)
    whole = partial(attend, visible=visible, softcap=softcap)
    blocks = partial(attend_in_blocks, view=view, softcap=softcap, scale=SIZE**-0.5, block=size)
    parts, rest = eqx.partition((Q, K, V, bias), eqx.is_inexact_array)

    def value_and_grad(fn):
        def summed(parts):
            q, k, v, bias = eqx.combine(parts, rest)
            return jnp.sum(fn(q, k, v, bias=bias) * weights)

        return jax.jit(jax.value_and_grad(summed))(parts)

    for actual, expected in zip(
        *map(jax.tree.leaves, map(value_and_grad, (blocks, whole))), strict=True
    ):
        largest = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(actual, expected, atol=1e-5 * largest)


def test_blocks_in_which_nothing_is_visible_are_left_out():
    count = lambda view: len(_blockwise._visible_blocks(view, 64, 64, 16, 16))
    assert count(View()) == 16
    assert count(View(causal=True)) == 10
    assert count(View(causal=True, window=17)) == 7
    assert count(View(causal=True, window=18)) == 9  # the first query of a block sees the one
    assert count(View(window=17)) == 10  # the first key of a block is seen by the one before
    assert count(View(window=18)) == 14
    assert count(View(causal=True, slots=jnp.arange(64))) == 16  # before the last


@pytest.mark.thorough
def test_dropout_is_the_same_forward_and_backward_and_for_parts_of_the_queries():
    keys, rate = 48, 0.25
    q, k, v, weights = (normal(1, keys, 2, keys) for _ in range(4))
    seen = jnp.broadcast_to(jnp.eye(keys)[None, :, None], (1, keys, 2, keys))
    run = partial(attend_in_blocks, scale=0.1, rate=rate, key=jax.random.key(1), block=16)
    # With these values, the output is the weights after dropout.
    actual = jnp.moveaxis(run(q, k, seen, View(causal=True)), 2, 1)
    scores = jnp.einsum("bsnk,btnk->bnst", q, k) * 0.1
    lower = jnp.tril(jnp.ones((keys, keys), bool))[None, None]
    softmax = lambda scores: jax.nn.softmax(jnp.where(lower, scores, -jnp.inf))
    kept = actual != 0
    np.testing.assert_allclose(actual, jnp.where(kept, softmax(scores) / (1 - rate), 0), atol=1e-6)
    share = jnp.sum(kept) / jnp.sum(jnp.broadcast_to(lower, kept.shape))
    assert abs(share - (1 - rate)) < 0.05

    def expected(q, k, v):
        chosen = (
            softmax(jnp.einsum("bsnk,btnk->bnst", q, k) * 0.1)
            * kept.astype(jnp.float32)
            / (1 - rate)
        )
        return jnp.sum(jnp.einsum("bnst,btnk->bsnk", chosen, v) * weights)

    summed = lambda q, k, v: jnp.sum(run(q, k, v, View(causal=True)) * weights)
    for one, other in zip(
        *(jax.grad(fn, (0, 1, 2))(q, k, v) for fn in (summed, expected)), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)
    later = run(q[:, 24:], k, v, View(causal=True, slots=jnp.arange(24, keys)))
    np.testing.assert_allclose(later, run(q, k, v, View(causal=True))[:, 24:], atol=1e-6)


def loss_fn(model, batch, key):
    tokens, segments = batch["tokens"], batch["segments"]
    if isinstance(model, T5):
        logits = model(tokens, tokens, segments=segments, decoder_segments=segments)
    else:
        logits = model(tokens, segments=segments, mask=tokens > 3)
    return cross_entropy(logits[:, :-1], tokens[:, 1:], mask=tokens[:, 1:] > 3)


def llama(layers=2, **options):
    config = LlamaConfig(
        vocab=64, width=32, layers=layers, heads=4, kv_heads=2, hidden=64, unroll=1, **options
    )
    return Llama(config, key=jax.random.key(0))


def t5():
    sizes: Any = {
        "vocab": 64,
        "width": 32,
        "heads": 4,
        "hidden": 64,
        "layers": 1,
        "decoder_layers": 1,
    }
    return T5(T5Config(**sizes, head_size=8), key=jax.random.key(0))


def modernbert():
    config = ModernBertConfig(
        vocab=64, width=32, layers=2, heads=4, hidden=64, window=8, head="masked", unroll=1
    )
    return ModernBert(config, key=jax.random.key(0))


def gemma():
    config = GemmaConfig(
        vocab=64,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=64,
        score_cap=5.0,
        window=8,
        local=(True, False),
        unroll=1,
    )
    return Gemma(config, key=jax.random.key(0))


def gpt_oss():
    """With sinks of different sizes."""
    config = GptOssConfig(
        vocab=64,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=16,
        experts=2,
        chosen=1,
        window=8,
        local=(True, False),
        unroll=1,
    )
    model = GptOss(config, key=jax.random.key(0))
    return eqx.tree_at(lambda m: m.layers.sinks, model, jnp.arange(8.0).reshape(2, 4) - 3)


@pytest.fixture
def many(monkeypatch):
    """Sets how many pairs are many; blocks have 16 tokens."""
    monkeypatch.setattr(_blockwise, "_BLOCK_OF_CPU", 16)
    return partial(monkeypatch.setattr, _view, "MANY_PAIRS")


def batch(rows=2, seq=61):
    rng = np.random.default_rng(1)
    tokens, segments = rng.integers(0, 64, (rows, seq)), np.sort(rng.integers(0, 3, (rows, seq)))
    return {"tokens": to_device(tokens), "segments": to_device(segments)}


@pytest.mark.thorough
@pytest.mark.parametrize("make", [llama, gemma, gpt_oss, modernbert, t5])
def test_models_use_it_if_there_are_many_pairs(many, make):
    model, actual = make(), []
    for count in (1, 10**9):
        many(count)
        fn = lambda model, batch: loss_fn(model, batch, None)  # traced anew
        actual.append(eqx.filter_jit(eqx.filter_value_and_grad(fn))(model, batch()))
    for one, other in zip(*map(jax.tree.leaves, actual), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_array_of_all_pairs_is_made(many, remat):
    many(1)
    seq = 512
    model = llama(layers=3, remat=remat)
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    summed = lambda params, batch: loss_fn(eqx.combine(params, rest), batch, None)
    jaxpr = jax.make_jaxpr(jax.grad(summed))(params, batch(1, seq))
    avals: Any = [var.aval for equation in iter_equations(jaxpr.jaxpr) for var in equation.outvars]
    # The largest are the logits and the hidden layers, which JAX keeps for all layers.
    assert max(aval.size for aval in avals) <= seq * 64 * 3 < seq * seq


@pytest.mark.thorough
def test_forward_mode_says_why_not(many):
    many(1)
    model, tokens = llama(), batch()["tokens"]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda embed: eqx.tree_at(lambda m: m.embed, model, embed)(tokens),
                (model.embed,), (model.embed,))  # fmt: skip


@pytest.mark.thorough
def test_plans_are_those_of_all_pairs(many):
    mesh, model, actual = rc.make_mesh(data=2, fsdp=2, model=2), llama(), []
    for count in (1, 10**9):
        many(count)
        fn = lambda model, batch, key: loss_fn(model, batch, key)
        actual.append(rc.plan_shardings(model, mesh, fn=fn, args=(batch(8), None)))
    blocks, pairs = actual
    assert blocks.compute == pairs.compute
    assert jax.tree.leaves(blocks.shardings) == jax.tree.leaves(pairs.shardings)
    figures = [plan.report.program for plan in actual]
    assert figures[0].memory.activations < figures[1].memory.activations
    assert not figures[0].unknown


@pytest.mark.thorough
@pytest.mark.parametrize("make", [llama, modernbert, t5])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 1, 8), (2, 2, 2)])
def test_planned_programs_compute_what_one_device_does(many, make, sizes):
    many(1)
    mesh, model = rc.make_mesh(**dict(zip(("data", "fsdp", "model"), sizes, strict=True))), make()
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(batch(8), None))
    plan.verify(loss_fn, model, batch(8), tolerance=1e-5)
