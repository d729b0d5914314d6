"""Decoding reads each layer's weights where they are, on CPUs, or from copies of the layers."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import redcoast as rc
from redcoast import models
from redcoast.core._target import Target, compiling_for
from redcoast.models._by_layer import ByLayer, by_layer

SIZES: dict[str, Any] = {"vocab": 32, "width": 16, "layers": 3, "heads": 2, "hidden": 32}
LLAMA = models.LlamaConfig(**SIZES, kv_heads=2)
BART = models.BartConfig(**SIZES, decoder_layers=2, positions=32)


def make(config: Any = LLAMA) -> Any:
    kind = models.Llama if config is LLAMA else models.Bart
    return kind(config, key=jax.random.key(0))


@pytest.mark.thorough
def test_layers_are_the_memory_of_the_stack():
    model = make()
    actual: Any = by_layer(model)
    assert isinstance(actual.layers.up, ByLayer)
    assert actual.embed is model.embed
    begin, size = model.layers.up.unsafe_buffer_pointer(), model.layers.up.nbytes // 3
    pointers = [x.unsafe_buffer_pointer() for x in actual.layers.up.arrays]
    assert pointers == [begin, begin + size, begin + 2 * size]
    with compiling_for(Target("tpu", 0)):
        assert by_layer(model) is model


@pytest.mark.thorough
def test_layers_are_copied_for_a_gpu_if_they_take_at_most_a_quarter_of_its_memory(monkeypatch):
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    model = jax.device_put(make(), rc.infer_shardings(make(), mesh))
    arrays = jax.tree.leaves(model.layers)
    of_device = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    monkeypatch.setattr("redcoast.models._by_layer._memory", lambda _: 4 * of_device)
    with compiling_for(Target("gpu", 9)):
        copied: Any = by_layer(model)
        monkeypatch.setattr("redcoast.models._by_layer._memory", lambda _: 4 * of_device - 1)
        assert by_layer(model) is model
    assert copied.embed is model.embed
    layers = jax.tree.leaves(copied.layers, is_leaf=lambda x: isinstance(x, ByLayer))
    for stack, copies in zip(arrays, layers, strict=True):
        for i, layer in enumerate(copies.arrays):
            assert layer.sharding.is_equivalent_to(stack[i].sharding, layer.ndim)
            np.testing.assert_array_equal(layer, stack[i])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "beams"), [(LLAMA, 1), pytest.param(BART, 2, marks=pytest.mark.thorough)]
)
def test_tokens_are_those_of_the_stack(config, beams, monkeypatch):
    model, tokens = make(config), np.arange(2 * 16).reshape(2, 16)
    call = lambda model: rc.generate(model, tokens, max_new_tokens=8, beams=beams, eos=())
    separate, stacked = call(model), jax.jit(call)(model)
    monkeypatch.setattr("redcoast.models._by_layer._memory", lambda _: 10**9)
    with compiling_for(Target("gpu", 9)):
        traced = jax.jit(lambda model: call(model))(model)
    np.testing.assert_array_equal(separate, stacked)
    np.testing.assert_array_equal(traced, stacked)


@pytest.mark.thorough
def test_models_under_vmap_generate_without_jit():
    keys = jax.random.split(jax.random.key(0), 2)
    several = eqx.filter_vmap(lambda key: models.Llama(LLAMA, key=key))(keys)
    call = lambda model: rc.generate(model, np.ones((1, 4), int), max_new_tokens=4, eos=())
    first = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, several)
    np.testing.assert_array_equal(eqx.filter_vmap(call)(several)[0], call(first))


@pytest.mark.thorough
def test_a_traced_call_takes_layers_apart_before_its_loop_if_a_gpu_has_room(monkeypatch):
    """Otherwise each token copies the weights of all layers out of their stacks."""
    model = make()
    size = sum(x.nbytes for x in jax.tree.leaves(model.layers))

    def reads_stack(memory: int) -> bool:
        """Whether the loop over tokens has the stack of a weight as an input."""
        monkeypatch.setattr("redcoast.models._by_layer._memory", lambda _: memory)
        call = lambda model: rc.generate(model, np.ones((1, 4), int), max_new_tokens=8, eos=())
        inputs = []
        with compiling_for(Target("gpu", 9)):
            program = jax.make_jaxpr(call)(model)
        for equation in program.eqns:
            if equation.primitive.name == "while":
                inputs += [x.aval.shape for x in equation.invars]
        assert (16, 32) in inputs or model.layers.up.shape in inputs
        return model.layers.up.shape in inputs

    assert reads_stack(4 * size - 1)
    assert not reads_stack(4 * size)


@pytest.mark.thorough
def test_layers_stay_sharded():
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    model = jax.device_put(make(), rc.infer_shardings(make(), mesh))
    actual: Any = by_layer(model).layers
    for stack, layers in zip(
        jax.tree.leaves(model.layers),
        jax.tree.leaves(actual, is_leaf=lambda x: isinstance(x, ByLayer)),
        strict=True,
    ):
        for i, layer in enumerate(layers.arrays):
            assert layer.sharding.is_equivalent_to(stack[i].sharding, layer.ndim)
            np.testing.assert_array_equal(layer, stack[i])
    split_by_layer = jax.NamedSharding(mesh, jax.P("model"))
    stack = jax.device_put(jnp.zeros((4, 8)), split_by_layer)
    assert by_layer(stack) is stack
