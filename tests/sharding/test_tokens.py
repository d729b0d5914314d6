"""Sequences of a batch with fewer rows than devices are split over them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import redcoast as rc
from redcoast.losses import chunked_cross_entropy, cross_entropy
from redcoast.models import (
    Gemma,
    GemmaConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    _blockwise,
    _parts,
    _view,
)

# Arithmetic so slow that it pays to divide it.
SLOW = rc.Hardware(flops=1e8, memory=1e9)
SIZES: dict[str, Any] = {
    "vocab": 64,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "unroll": 1,
}
CONFIG = LlamaConfig(**SIZES, hidden=64)


@pytest.fixture
def blocks(monkeypatch):
    """Attention is computed in blocks of 16 tokens."""
    monkeypatch.setattr(_blockwise, "_BLOCK_OF_CPU", 16)
    monkeypatch.setattr(_view, "MANY_PAIRS", 1)


def batch(rows, tokens=65):
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (rows, tokens)), axis=1)
    return {
        "tokens": jnp.asarray(rng.integers(0, 64, (rows, tokens))),
        "segments": jnp.asarray(segments),
    }


def chunked(model, batch, key):
    tokens, segments = batch["tokens"], batch["segments"]
    same = segments[:, 1:] == segments[:, :-1]
    hidden = model.hidden(tokens[:, :-1], segments=segments[:, :-1], key=key)
    return chunked_cross_entropy(hidden, model.unembed, tokens[:, 1:], mask=same, chunk=4)


def whole(model, batch, key):
    logits = model(batch["tokens"][:, :-1], mask=batch["tokens"][:, :-1] > 3)
    return cross_entropy(logits, batch["tokens"][:, 1:])


def planned(fn, mesh, rows, model=None):
    model = Llama(CONFIG, key=jax.random.key(0)) if model is None else model
    args = (batch(rows), jax.random.key(1))
    return rc.plan_shardings(model, mesh, fn=fn, args=args, hardware=SLOW)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 1, 2), (2, 2, 2), (1, 8, 1)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("fn", [chunked, whole])
@pytest.mark.thorough
def test_losses_and_gradients_are_those_of_one_device(blocks, fn, rows, sizes):
    mesh = rc.make_mesh(**dict(zip(("data", "fsdp", "model"), sizes, strict=True)))
    model = Llama(CONFIG, key=jax.random.key(0))
    plan = planned(fn, mesh, rows, model)
    assert plan.compute.splits_examples == (rows < sizes[0] * sizes[1])
    plan.verify(fn, model, batch(rows), tolerance=1e-5)


def gemma():
    near: dict[str, Any] = {"local": (True, False), "window": 8, "score_cap": 5.0}
    return Gemma(GemmaConfig(**SIZES, hidden=64, **near), key=jax.random.key(0))


def gpt_oss():
    near: dict[str, Any] = {"local": (True, False), "window": 8, "remat": "full"}
    config = GptOssConfig(**SIZES, hidden=16, experts=4, chosen=2, **near)
    return GptOss(config, key=jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("make", [gemma, gpt_oss])
def test_layers_with_and_without_a_window_are_split(blocks, make):
    """They are a scan in which each layer chooses one of two attentions."""
    mesh, model = rc.make_mesh(data=2, fsdp=2, model=2), make()
    plan = planned(chunked, mesh, 1, model)
    assert plan.compute.splits_examples
    plan.verify(chunked, model, batch(1), tolerance=1e-5)


@pytest.mark.thorough
def test_a_row_of_packed_texts_is_split_and_exact(blocks):
    mesh, model = rc.make_mesh(data=2, fsdp=2, model=2), Llama(CONFIG, key=jax.random.key(0))
    plan = planned(chunked, mesh, 1, model)
    assert plan.compute.splits_examples
    lowered = jax.jit(plan.constrain(chunked)).lower(model, batch(1), None)
    compiled = lowered.compile()
    actual = compiled(jax.device_put(model, plan.shardings), batch(1), None)
    np.testing.assert_allclose(actual, chunked(model, batch(1), None), rtol=1e-5)
    assert "all-to-all" not in str(compiled.as_text())


@pytest.mark.thorough
def test_keys_and_values_of_some_heads_are_gathered_at_a_time(blocks, monkeypatch):
    """Where those of all heads would be many bytes."""
    mesh, model = rc.make_mesh(fsdp=8), Llama(CONFIG, key=jax.random.key(0))
    monkeypatch.setattr(_parts, "MOST_GATHERED", 1)
    monkeypatch.setattr(_parts, "MOST_OF_GROUP", 1)
    plan = planned(chunked, mesh, 1, model)
    assert plan.compute.splits_examples
    plan.verify(chunked, model, batch(1), tolerance=1e-5)
    compiled = jax.jit(jax.grad(plan.constrain(chunked))).lower(model, batch(1), None).compile()
    assert "all-to-all" not in str(compiled.as_text())


@pytest.mark.thorough
def test_the_plan_says_so():
    mesh = AbstractMesh((1, 8, 1), ("data", "fsdp", "model"))
    plan = planned(whole, mesh, 1)
    assert plan.report.program.sequences
    assert plan.report.program.batch_sizes == (1,)
    assert "so its sequences are split over fsdp" in plan.report.program.batch
    assert "Batch" in str(plan)
    causes = {line.cause for line in plan.report.program.traffic}
    assert "all-gathers of keys and values" in causes
    # All products of the model are divided.
    arithmetic = plan.report.program.arithmetic
    assert arithmetic.per_device == pytest.approx(arithmetic.flops / 8)


@pytest.mark.thorough
def test_rows_are_split_if_they_divide():
    plan = planned(whole, AbstractMesh((1, 8, 1), ("data", "fsdp", "model")), 8)
    assert not plan.compute.splits_examples
    assert not plan.report.program.sequences


@pytest.mark.thorough
def test_programs_that_iterate_over_the_sequence_are_not_split():
    def recurrent(model, batch, key):
        x = jnp.take(model.embed, batch["tokens"][:, 1:], axis=0)

        def step(state, token):
            state = jnp.tanh(state + token * model.norm[None])
            return state, state

        return jnp.mean(jax.lax.scan(step, x[:, 0], jnp.moveaxis(x, 1, 0))[1])

    plan = planned(recurrent, AbstractMesh((1, 8, 1), ("data", "fsdp", "model")), 1)
    assert not plan.compute.splits_examples
    assert "iterates over the sequence" in plan.report.program.batch


def test_lengths_that_do_not_divide_are_not_split():
    mesh = AbstractMesh((1, 8, 1), ("data", "fsdp", "model"))
    model = Llama(CONFIG, key=jax.random.key(0))
    args = (batch(1, 60), None)
    plan = rc.plan_shardings(model, mesh, fn=whole, args=args, hardware=SLOW)
    assert not plan.compute.splits_examples
    assert "tokens do not divide either" in plan.report.program.batch
