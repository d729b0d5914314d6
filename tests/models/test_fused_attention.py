"""cuDNN's attention is followed like the products that it stands for. (Nothing here runs it.)"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flow_helpers import costs, links, unknown

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.core._target import Target, compiling_for
from redcoast.models import Llama, LlamaConfig, _attention
from redcoast.models._scan_layers import default_unroll
from redcoast.models._view import View

# Eight query heads, four key heads.
Q, K = (2, 8, 8, 16), (2, 12, 4, 16)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """As if there were a GPU: the operations can be traced without one, but not run."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


def fused(q, k, v, bias=None):
    half = lambda x: x.astype(jnp.bfloat16)
    bias = None if bias is None else half(bias)
    return jax.nn.dot_product_attention(
        half(q), half(k), half(v), bias=bias, implementation="cudnn"
    )


def gradient(q, k, v):
    summed = lambda *args: jnp.sum(fused(*args).astype(jnp.float32))
    return jax.grad(summed, argnums=(0, 1, 2))(q, k, v)


def test_examples_and_heads_stay_split_and_cost_nothing():
    assert links(fused, Q, K, K) == "abcd,aecf,agch->aicj"
    assert not {name for name in costs(fused, Q, K, K) if name.endswith((" a", " c"))}
    assert not unknown(fused, Q, K, K)


def test_biases_go_with_examples_and_heads():
    assert links(fused, Q, K, K, (2, 8, 8, 12)) == "abcd,aecf,agch,acij->akcl"


def test_the_backward_pass_is_followed_too():
    assert links(gradient, Q, K, K) == "abcd,aecf,agch->aicj,akcl,amcn"
    assert not unknown(gradient, Q, K, K)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [2, 4])
def test_the_plan_is_that_of_the_products(monkeypatch, model):
    config = LlamaConfig(vocab=256, width=128, layers=2, heads=8, kv_heads=4, hidden=256)
    make = lambda: Llama(config, key=jax.random.key(0))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), eqx.filter_eval_shape(make)
    )
    mesh = rc.make_mesh(model=model)
    tokens = jax.ShapeDtypeStruct((8, 32), np.int32)

    def loss_fn(model, tokens):
        return jnp.mean(jax.nn.log_softmax(model(tokens).astype(jnp.float32)))

    def specs():
        actual = rc.infer_shardings(abstract, mesh, fn=loss_fn, args=(tokens,))
        return [sharding.spec for sharding in jax.tree.leaves(actual)]

    expected = specs()
    used = []
    monkeypatch.setattr(_attention, "_has_kernel", lambda q, k, v: used.append(q.shape) or True)
    assert specs() == expected
    assert used


def test_operations_are_chosen_for_the_device_that_is_compiled_for():
    """One jitted function: what was traced for one device is not used for another."""
    config = LlamaConfig(vocab=8, width=16, layers=2, heads=2, kv_heads=1, hidden=8)
    make = lambda: Llama(config, key=jax.random.key(0))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), eqx.filter_eval_shape(make)
    )
    jitted = jax.jit(lambda model, tokens: model(tokens))
    tokens = jax.ShapeDtypeStruct((2, 8), np.int32)

    def chosen(device):
        with compiling_for(device):
            text = str(jitted.trace(abstract, tokens).jaxpr)
        return "dot_product_attention" in text, "unroll=1" in text

    devices = [Target("gpu", 9), Target("cpu", 0), Target("gpu", 7), Target("tpu", 0)]
    expected = [(True, False), (False, False), (False, False), (False, True)]
    assert [chosen(device) for device in devices] == expected


@pytest.mark.parametrize(("remat", "kernels"), [("none", 1), ("dots", 1), ("full", 2)])
def test_fused_attention_runs_once_where_products_are_saved(remat, kernels):
    config = LlamaConfig(
        vocab=8, width=16, layers=2, heads=2, kv_heads=1, hidden=8, unroll=1, remat=remat
    )
    half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    abstract = eqx.filter_eval_shape(
        lambda: jax.tree.map(half, Llama(config, key=jax.random.key(0)))
    )
    loss = lambda model, tokens: jnp.sum(model(tokens).astype(jnp.float32))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    with compiling_for(Target("gpu", 9)):
        text = str(jax.make_jaxpr(jax.grad(loss))(abstract, tokens))
    assert text.count("= dot_product_attention_fwd_wrapper[") == kernels


def test_many_or_large_layers_and_generation_are_loops_on_a_gpu():
    with compiling_for(Target("gpu", 9)):
        layers = jax.ShapeDtypeStruct((32, 2**14, 2**14), jnp.float32)  # of 1 GiB each
        assert default_unroll(layers, 32) == 32
        assert default_unroll(layers, 33) == 1
        assert default_unroll(layers, 2, has_cache=True) == 1
        # Layers that are gathered while others compute take memory.
        assert default_unroll([layers, layers], 32) == 1


def test_long_causal_rows_need_no_array_of_all_pairs(monkeypatch):
    config = LlamaConfig(vocab=64, width=64, layers=1, heads=2, kv_heads=1, hidden=64, window=99)
    half = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    abstract = eqx.filter_eval_shape(
        lambda: jax.tree.map(half, Llama(config, key=jax.random.key(0)))
    )
    run = lambda model, tokens: model.hidden(tokens)
    tokens = jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    with compiling_for(Target("gpu", 8)):
        jaxpr, *_ = eqx.filter_make_jaxpr(run)(abstract, tokens)
    actual = list(iter_equations(jaxpr.jaxpr))
    assert any(one.primitive.name.startswith("dot_product_attention_fwd") for one in actual)
    avals: Any = [var.aval for one in actual for var in one.outvars]
    assert max(aval.size for aval in avals) < 2048 * 2048


@pytest.mark.parametrize(("present", "fused"), [(0, False), (8, False), (9, True)])
def test_wide_heads_take_the_kernel_only_where_jax_lowers_it(monkeypatch, present, fused):
    """JAX asks the first device of the machine, and not the one that a dry run compiles for."""
    monkeypatch.setattr(_attention, "target_of", lambda device: Target("gpu", present))
    half = lambda heads: jnp.zeros((2, 16, heads, 256), jnp.bfloat16)
    attention = lambda *args: _attention.attend(*args, visible=View(causal=True))
    with compiling_for(Target("gpu", 9)):
        program = str(jax.make_jaxpr(attention)(half(4), half(2), half(2)))
    assert ("dot_product_attention" in program) == fused


@pytest.mark.parametrize("lengths", [(33, 33), (33, 34), (34, 33)])
@pytest.mark.parametrize("view", [View(causal=True), View(causal=True, window=9), View()])
def test_odd_lengths_have_gradients(monkeypatch, view, lengths):
    """JAX refuses gradients of the kernel for odd numbers of queries or keys."""
    queries, keys = lengths
    q = jnp.ones((2, queries, 4, 64), jnp.bfloat16)
    k = jnp.ones((2, keys, 2, 64), jnp.bfloat16)
    summed = lambda q, k: jnp.sum(_attention.attend(q, k, k, visible=view).astype(jnp.float32))
    with compiling_for(Target("gpu", 9)):
        program = jax.make_jaxpr(jax.grad(summed, argnums=(0, 1)))(q, k)
    assert "dot_product_attention_bwd" in str(program)
    assert [x.shape for x in program.out_avals] == [q.shape, k.shape]


@pytest.mark.thorough
def test_the_key_that_makes_a_length_even_is_masked(monkeypatch):
    attention = jax.nn.dot_product_attention

    def products(q, k, v, mask=None, *, scale, implementation, is_causal=False):
        return attention(q, k, v, mask=mask, scale=scale, is_causal=is_causal)

    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8))
    for view in (View(causal=True), View()):
        plain = _attention.attend(q, k, v, visible=view)
        with monkeypatch.context() as patch:
            patch.setattr(jax.nn, "dot_product_attention", products)
            even = _attention._attend_in_kernel(q, k, v, view, None, 8**-0.5)
        np.testing.assert_allclose(even, plain, atol=1e-6)
