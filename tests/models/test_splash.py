"""Splash attention, interpreted on CPUs, against attention with the scores of all pairs."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_helpers import costs, links, unknown
from jax.sharding import PartitionSpec as P
from random_models import to_device

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.core._target import Target, compiling_for
from redcoast.losses import cross_entropy
from redcoast.models import Llama, LlamaConfig
from redcoast.models._attention import attend
from redcoast.models._tpu_attention import (
    FEWEST,
    SplashOptions,
    _forward_in_blocks,
    _run_forward,
    attend_in_splash,
)
from redcoast.models._view import View

BATCH, SEQ, HEADS, KV_HEADS, SIZE = 2, FEWEST + 8, 4, 2, 8
RNG = np.random.default_rng(0)
normal = lambda *shape: to_device(RNG.normal(size=shape), np.float32)
Q, K, V = (normal(BATCH, SEQ, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
WEIGHTS = normal(BATCH, SEQ, HEADS, SIZE)
REAL = to_device(np.arange(SEQ)[None] < np.array([[SEQ], [400]]))
SEGMENTS = to_device(np.sort(RNG.integers(0, 4, (BATCH, SEQ)), axis=1))
CASES = {
    "all": (View(), None),
    "causal, soft cap": (View(causal=True), 2.0),
    "window": (View(causal=True, window=200), None),
    "window on both sides": (View(REAL, window=120), None),
    "padding, segments": (View(REAL, segments=(SEGMENTS, SEGMENTS), causal=True), None),
}
TPU = Target("tpu", 0)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_scores_of_all_pairs(case):
    view, softcap = CASES[case]
    visible = jnp.broadcast_to(view.visible(SEQ, SEQ), (BATCH, SEQ, SEQ))
    weights = jnp.where(REAL[..., None, None], WEIGHTS, 0)
    whole = partial(attend, visible=visible, softcap=softcap)
    kernel = partial(attend_in_splash, view=view, softcap=softcap, scale=SIZE**-0.5)

    def value_and_grad(fn):
        summed = lambda q, k, v: jnp.sum(fn(q, k, v) * weights)
        return jax.jit(jax.value_and_grad(summed, (0, 1, 2)))(Q, K, V)

    pairs = zip(*map(jax.tree.leaves, map(value_and_grad, (kernel, whole))), strict=True)
    for actual, expected in pairs:
        largest = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(actual, expected, atol=1e-5 * largest)


def run_causal(q, k, v):
    return attend_in_splash(q, k, v, View(causal=True), scale=1.0)


def gradient(q, k, v):
    return jax.grad(lambda *args: jnp.sum(run_causal(*args)), argnums=(0, 1, 2))(q, k, v)


def test_examples_and_heads_stay_split_and_cost_nothing():
    """Planned like cuDNN's kernel: an operation that is not in the table is gathered."""
    q, k = (2, 512, 8, 16), (2, 512, 4, 16)
    assert links(run_causal, q, k, k) == "abcd,aecf,agch->aicj"
    assert not {name for name in costs(run_causal, q, k, k) if name.endswith((" a", " c"))}
    assert not unknown(gradient, q, k, k)


def llama(**options):
    config = LlamaConfig(
        vocab=64, width=32, layers=2, heads=8, kv_heads=4, hidden=64, unroll=1, **options
    )
    return Llama(config, key=jax.random.key(0))


def loss_fn(model, tokens, key=None):
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


def kernels(fn, *args):
    actual = iter_equations(eqx.filter_make_jaxpr(fn)(*args)[0].jaxpr)
    return sum(one.primitive.name.endswith("_splash") for one in actual)


def test_it_is_chosen_for_long_sequences_on_tpus():
    model = eqx.filter_eval_shape(llama)
    run = lambda length: kernels(loss_fn, model, jax.ShapeDtypeStruct((2, length), jnp.int32))
    with compiling_for(TPU):
        assert run(FEWEST) == 1
        assert run(FEWEST - 1) == 0
    assert run(FEWEST) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"fsdp": 4, "model": 2}, {"data": 2, "model": 4}], ids=str)
def test_a_planned_model_runs_it_on_each_device(sizes):
    model, mesh = llama(), rc.make_mesh(**sizes)
    tokens = to_device(RNG.integers(0, 64, (8, FEWEST)))
    with compiling_for(TPU):
        plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(tokens,))
        grad = eqx.filter_value_and_grad(plan.constrain(loss_fn))
        inside = [len(one) for one in local_kernels(grad, model, tokens)]
        actual = eqx.filter_jit(grad)(jax.device_put(model, plan.shardings), tokens)
    assert inside == [1, 1]  # forward and backward
    expected = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(model, tokens)
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def local_kernels(fn, *args):
    """The kernels in each `jax.shard_map`."""
    for equation in iter_equations(eqx.filter_make_jaxpr(fn)(*args)[0].jaxpr):
        if equation.primitive.name == "shard_map":
            inside = iter_equations(equation.params["jaxpr"])
            actual = [x for x in inside if x.primitive.name.endswith("_splash")]
            if actual:  # lookups of tokens may run in one too
                yield actual


def attention_loss(scale, q, k, v, segments):
    view = View(segments=(segments, segments), causal=True)
    return jnp.sum(scale * attend(scale * q, k, v, visible=view) ** 2)


@pytest.mark.thorough
def test_each_device_runs_the_kernel_for_its_own_rows_and_heads():
    mesh, scale = rc.make_mesh(data=2, fsdp=2, model=2), jnp.ones((1, 1, 4, 1))
    q, k, v, segments = (jnp.concatenate([x] * 2) for x in (Q, K, V, SEGMENTS))
    with compiling_for(TPU):
        plan = rc.plan_shardings(scale, mesh, fn=attention_loss, args=(q, k, v, segments))
        grad = jax.jit(jax.value_and_grad(plan.constrain(attention_loss)))
        shapes = [
            [x.invars[0].aval.shape for x in one]  # pyright: ignore[reportAttributeAccessIssue]
            for one in local_kernels(grad, scale, q, k, v, segments)
        ]
        partitioned = grad(scale, q, k, v, segments)
    assert shapes == [[(1, 640, 2, SIZE)]] * 2
    for x, y in zip(partitioned, whole_rows(scale, q, k, v, segments), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)


def whole_rows(*args):
    return jax.jit(jax.value_and_grad(attention_loss))(*args)


@pytest.mark.thorough
def test_other_programs_for_several_devices_compute_it_in_blocks():
    """A kernel in them would be an error on TPUs, and its sums are those of the blocks."""
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    scale = jax.device_put(jnp.ones((1, 1, 4, 1)), jax.NamedSharding(mesh, P()))
    args = [jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in (Q, K, V, SEGMENTS)]
    with compiling_for(TPU):
        sharded = jax.jit(jax.value_and_grad(attention_loss)).lower(scale, *args).as_text()
    assert "while" in sharded
    arrays = Q, K[..., :SIZE], V
    options = SplashOptions(128, 128, True, None, None)
    padded = [jnp.pad(x, [(0, 0), (0, -SEQ % 128), (0, 0), (0, 0)]) for x in arrays]
    kernel = _run_forward(options, True, *padded)
    for x, y in zip(kernel, _forward_in_blocks(options, *padded), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.thorough
def test_mapped_rows_are_more_rows():
    """`jax.vmap`, as in the stages of a pipeline."""
    stages: Any = jnp.stack([Q, 2 * Q])
    mapped = jax.vmap(run_causal, (0, None, None))(stages[..., :4], K[..., :4], V[..., :4])
    one = run_causal(2 * Q[..., :4], K[..., :4], V[..., :4])
    np.testing.assert_allclose(mapped[1], one, atol=1e-5)
