"""Cross-entropy against NumPy, and chunked against unchunked: values, gradients, memory, meshes."""

import contextlib
import dataclasses
import functools as ft
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from grids import few_of
from random_models import to_device

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.core._tracing import traced_over
from redcoast.dryrun.hlo import collectives
from redcoast.losses import (
    _cross_entropy,
    chunked_cross_entropy,
    cross_entropy,
    token_log_probabilities,
)
from redcoast.models import Llama, LlamaConfig

RNG = np.random.default_rng(0)
BATCH, SEQ, WIDTH, VOCAB = 4, 13, 8, 29
HIDDEN = to_device(RNG.normal(size=(BATCH, SEQ, WIDTH)), np.float32)
HEAD = {
    "weight": to_device(RNG.normal(size=(WIDTH, VOCAB)), np.float32),
    "bias": to_device(RNG.normal(size=(1, 1, VOCAB)), np.float32),
}
TARGETS = to_device(RNG.integers(0, VOCAB, (BATCH, SEQ)))
WEIGHTS = to_device(RNG.uniform(0, 0.01, (BATCH, SEQ)), np.float32)
RAGGED = jnp.arange(SEQ)[None] < jnp.array([[13], [4], [0], [9]])


def unembed(head, hidden):
    return hidden @ head["weight"] + head["bias"]


def full(hidden, head, mask=None):
    return cross_entropy(unembed(head, hidden), TARGETS, mask=mask)


def chunked(hidden, head, mask=None, *, chunk):
    return chunked_cross_entropy(hidden, ft.partial(unembed, head), TARGETS, mask=mask, chunk=chunk)


def numpy_losses(logits, targets):
    """In float64, token by token."""
    actual = np.zeros(targets.shape)
    for at, target in np.ndenumerate(targets):
        row = [float(x) for x in logits[at]]
        largest = max(row)
        actual[at] = largest + math.log(sum(math.exp(x - largest) for x in row)) - row[target]
    return actual


def test_is_the_mean_over_tokens():
    logits = 30 * unembed(HEAD, HIDDEN)
    losses = numpy_losses(np.asarray(logits, np.float64), np.asarray(TARGETS))
    np.testing.assert_allclose(cross_entropy(logits, TARGETS), losses.mean(), rtol=1e-6)
    got = cross_entropy(logits, TARGETS, mask=RAGGED)
    np.testing.assert_allclose(got, losses[np.asarray(RAGGED)].mean(), rtol=1e-6)
    got = cross_entropy(logits, TARGETS, mask=WEIGHTS)
    np.testing.assert_allclose(got, np.average(losses, weights=WEIGHTS), rtol=1e-6)


def test_takes_any_shape():
    logits = unembed(HEAD, HIDDEN)[0]
    losses = np.asarray(jax.jit(jax.vmap(cross_entropy))(logits, TARGETS[0]))
    actual = jax.jit(cross_entropy)(logits, TARGETS[0])
    np.testing.assert_allclose(actual, losses.mean(), rtol=1e-6)


@pytest.mark.few("64-None")
@pytest.mark.parametrize(
    ("chunk", "mask"), [(1, None), (5, RAGGED), (5, WEIGHTS), (13, RAGGED), (64, None)]
)
def test_chunked_loss_equals_the_full_loss(chunk, mask):
    both = [full, ft.partial(chunked, chunk=chunk)]
    (expected, right), (loss, gradient) = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(HIDDEN, HEAD, mask) for fn in both
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(gradient, right)


def assert_close(gradient, right):
    for got, there in zip(jax.tree.leaves(gradient), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(got, there, atol=1e-5 * float(jnp.max(jnp.abs(there))))


def test_log_probabilities_of_tokens_equal_numpys_and_have_gradients():
    fn = ft.partial(unembed, HEAD)
    want = -numpy_losses(np.asarray(fn(HIDDEN), np.float64), np.asarray(TARGETS))
    for chunk in (5, 128):
        actual = token_log_probabilities(HIDDEN, fn, TARGETS, chunk=chunk)
        np.testing.assert_allclose(actual, want, rtol=1e-5)
    of_chunks = lambda x: -jnp.mean(token_log_probabilities(x, fn, TARGETS, chunk=4))
    of_loss = lambda x: cross_entropy(fn(x), TARGETS)
    gradients = jax.jit(lambda x: (jax.grad(of_chunks)(x), jax.grad(of_loss)(x)))
    np.testing.assert_allclose(*gradients(HIDDEN), atol=1e-6)


@pytest.mark.few("full")
@pytest.mark.parametrize("fn", [full, ft.partial(chunked, chunk=4)], ids=["full", "chunked"])
def test_a_mask_of_zeros_gives_zero(fn):
    nothing = jnp.zeros_like(RAGGED)
    loss, gradient = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(HIDDEN, HEAD, nothing)
    assert loss == 0
    assert all(jnp.all(x == 0) for x in jax.tree.leaves(gradient))


def test_targets_outside_the_vocabulary_count_only_if_masked():
    logits, counted = unembed(HEAD, HIDDEN), jnp.ones_like(RAGGED).at[1, 2].set(False)
    expected = cross_entropy(logits, TARGETS, mask=counted)
    for wrong in (-100, VOCAB):
        targets = TARGETS.at[1, 2].set(wrong)
        assert jnp.isnan(cross_entropy(logits, targets))
        np.testing.assert_array_equal(cross_entropy(logits, targets, mask=counted), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.few("bfloat16")
def test_half_precision_is_summed_in_float32(dtype):
    hidden, head = jax.tree.map(lambda x: x.astype(dtype), (HIDDEN, HEAD))
    logits = np.asarray(unembed(head, hidden), np.float64)
    expected = numpy_losses(logits, np.asarray(TARGETS)).mean()
    loss = full(hidden, head)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    in_chunks = chunked(hidden, head, chunk=5)
    assert in_chunks.dtype == jnp.float32
    # If both are compiled together, the logits may be rounded differently.
    np.testing.assert_allclose(in_chunks, expected, rtol=2e-3)


@pytest.mark.thorough
def test_float64_stays_float64():
    with jax.enable_x64(True):
        logits = unembed(HEAD, HIDDEN).astype(jnp.float64)
        expected = numpy_losses(np.asarray(logits), np.asarray(TARGETS)).mean()
        np.testing.assert_allclose(cross_entropy(logits, TARGETS), expected, rtol=1e-14)


@pytest.mark.thorough
def test_microbatches_have_the_loss_of_the_batch():
    def loss_fn(head, batch, key):
        fn = ft.partial(chunked_cross_entropy, mask=batch["mask"], chunk=5)
        loss = fn(batch["hidden"], ft.partial(unembed, head), batch["targets"])
        return loss, {"weight": jnp.sum(batch["mask"])}

    optimizer, batch = optax.sgd(0.1), {"hidden": HIDDEN, "targets": TARGETS, "mask": RAGGED}
    state = rc.init_state(lambda _: HEAD, optimizer, key=jax.random.key(0))
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer)
    one, metrics = eqx.filter_jit(step)(state, batch)
    parts, in_parts = eqx.filter_jit(ft.partial(step, accumulate=2))(state, batch)
    np.testing.assert_allclose(in_parts["loss"], metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], full(HIDDEN, HEAD, RAGGED), rtol=1e-6)
    for got, right in zip(*map(jax.tree.leaves, (parts.model, one.model)), strict=True):
        np.testing.assert_allclose(got, right, atol=1e-6)


@pytest.mark.thorough
def test_memory_of_the_chunked_loss():
    batch, seq, width, vocab = 2, 2048, 16, 50_000
    logits = 4 * batch * seq * vocab
    shapes = [(batch, seq, width), (width, vocab)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    targets = jax.ShapeDtypeStruct((batch, seq), jnp.int32)

    def temporaries(fn):
        step = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))
        memory: Any = step.lower(*arrays, targets).compile().memory_analysis()
        return memory.temp_size_in_bytes

    def in_chunks(hidden, head, targets):
        return chunked_cross_entropy(hidden, lambda x: x @ head, targets, chunk=32)

    assert temporaries(lambda hidden, head, targets: cross_entropy(hidden @ head, targets)) > logits
    assert temporaries(in_chunks) < logits / 10


@pytest.mark.parametrize("mesh", [None, {"fsdp": 8}, {"fsdp": 4, "model": 2}], ids=str)
def test_large_logits_are_computed_in_chunks_by_default(mesh):
    """Chunks are chosen by the bytes of logits on a device, so a mesh has larger ones."""
    batch, seq, width, vocab = 8, 4096, 4, 131_072
    devices = 1 if mesh is None else 8
    shapes = [(batch * devices, seq, width), (width, vocab)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    targets = jax.ShapeDtypeStruct(shapes[0][:2], jnp.int32)

    def loss(hidden, head, targets):
        return chunked_cross_entropy(hidden, lambda x: x @ head, targets)

    def positions():
        with trace_context(mesh):
            jaxpr = jax.make_jaxpr(loss)(*arrays, targets)
        avals: Any = [
            var.aval for equation in iter_equations(jaxpr.jaxpr) for var in equation.outvars
        ]
        return max(aval.shape[1] for aval in avals if aval.shape[-1:] == (vocab,))

    assert positions() == 256  # 2**30 bytes of float32 on each device
    arrays[0] = jax.ShapeDtypeStruct((devices, seq, width), jnp.float32)
    targets = jax.ShapeDtypeStruct((devices, seq), jnp.int32)
    assert positions() == seq  # 2 GiB on each device are whole


def trace_context(mesh):
    if mesh is None:
        return contextlib.nullcontext()
    return traced_over(rc.make_mesh(**mesh))


@pytest.mark.thorough
def test_chunks_by_size_have_the_loss_and_gradients_of_whole_logits(monkeypatch):
    monkeypatch.setattr(_cross_entropy, "MOST_WHOLE", 64)
    monkeypatch.setattr(_cross_entropy, "_BYTES_OF_CHUNK", 4 * BATCH * VOCAB * 3)
    whole = jax.value_and_grad(full, argnums=(0, 1))(HIDDEN, HEAD, RAGGED)
    by_size = lambda hidden, head, mask: chunked_cross_entropy(
        hidden, ft.partial(unembed, head), TARGETS, mask=mask
    )
    text = str(jax.make_jaxpr(by_size)(HIDDEN, HEAD, RAGGED))
    assert "scan" in text
    actual = jax.value_and_grad(by_size, argnums=(0, 1))(HIDDEN, HEAD, RAGGED)
    for x, y in zip(*map(jax.tree.leaves, (actual, whole)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


CONFIG = LlamaConfig(vocab=4096, width=64, layers=1, heads=4, kv_heads=4, hidden=96)
TOKENS = to_device(RNG.integers(0, CONFIG.vocab, (8, 61)))


def of_a_model(model, tokens, key):
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


def of_a_model_in_chunks(model, tokens, key):
    hidden = model.hidden(tokens)[:, :-1]
    return chunked_cross_entropy(hidden, model.unembed, tokens[:, 1:], chunk=16)


@pytest.mark.thorough
@pytest.mark.parametrize("tied", few_of([False, True], True))
def test_vocabulary_may_be_sharded(tied):
    model = eqx.filter_jit(Llama)(dataclasses.replace(CONFIG, tied=tied), key=jax.random.key(0))
    expected, right = jax.jit(jax.value_and_grad(of_a_model))(model, TOKENS, None)
    mesh = rc.make_mesh(model=4)
    plan = rc.plan_shardings(model, mesh, fn=of_a_model_in_chunks, args=(TOKENS, None))
    assert "model" in (plan.shardings.embed if tied else plan.shardings.head).spec
    step = jax.value_and_grad(plan.constrain(of_a_model_in_chunks))
    step = jax.jit(step, out_shardings=(None, plan.shardings))
    tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
    compiled = step.lower(jax.device_put(model, plan.shardings), tokens, None).compile()
    loss, gradient = compiled(jax.device_put(model, plan.shardings), tokens, None)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_close(gradient, right)
    sent, traffic = collectives(compiled.as_text(), mesh), plan.report.program.traffic
    for axis in ("data", "model"):
        priced = sum(entry.bytes for entry in traffic if entry.axis == axis)
        assert (
            sum(each.count * each.sent_bytes for each in sent if axis in each.axes) < 1.1 * priced
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "`chunk` is 0"),
        ({"targets": TARGETS[:, 1:]}, r"`targets` has shape \(4, 12\)"),
        (
            {"targets": TARGETS.astype(jnp.float32)},
            "`targets` must be integers .* but have dtype float32",
        ),
        ({"mask": RAGGED[:, 1:]}, r"`mask` has shape \(4, 12\)"),
    ],
)
def test_mismatched_shapes_raise(change, message):
    options = {"targets": TARGETS, "mask": None, "chunk": 4} | change
    targets, mask, chunk = options.values()
    # The tests' runtime type checker would reject some of these first.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=message):
            chunked_cross_entropy(
                HIDDEN, ft.partial(unembed, HEAD), targets, mask=mask, chunk=chunk
            )
        if "chunk" not in change:
            with pytest.raises(ValueError, match=message):
                cross_entropy(unembed(HEAD, HIDDEN), targets, mask=mask)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
