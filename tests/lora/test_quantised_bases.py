"""Adapters of quantised matrices: memory, values and gradients, sharding, checkpoints, files."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoder_checks import make_tokens
from random_models import random_model

import redcoast as rc
from redcoast import lora
from redcoast.core._jaxpr import iter_equations
from redcoast.losses import cross_entropy
from redcoast.models import Llama, LlamaConfig
from redcoast.models._quantised_weight import NF4, quantised_weight
from redcoast.pretrained import _load, _read_to_device

CONFIG = LlamaConfig(vocab=16, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
KEY = jax.random.key(0)
TOKENS = make_tokens(CONFIG)


@ft.cache
def base():
    return random_model(Llama, CONFIG)


def adapted(numbers):
    model = lora.add_adapters(lora.quantise(base(), numbers), 4, targets="layers", key=KEY)
    return lora.with_adapters(model, jax.tree.map(lambda x: x + 0.05, lora.adapters(model)))


def loss_fn(model, tokens, key=None):
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


def gradients(model):
    params, rest = eqx.partition(model, lora.trainable(model))
    fn = lambda params: loss_fn(eqx.combine(params, rest), TOKENS)
    return jax.jit(jax.value_and_grad(fn))(params)


def assert_equal(found, expected):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.thorough
@pytest.mark.parametrize("numbers", ["nf4", "int8"])
def test_gradients_of_adapters_are_those_of_the_dequantised_model(numbers):
    model = adapted(numbers)
    plain = lora.dequantise(model)
    assert jax.tree.structure(lora.without_adapters(plain)) == jax.tree.structure(base())
    for x, y in zip(*map(jax.tree.leaves, map(gradients, (model, plain))), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.few("int8-8.5-0.008")
@pytest.mark.parametrize(("numbers", "bits", "error"), [("nf4", 4.5, 0.1), ("int8", 8.5, 0.008)])
def test_arrays_have_the_bytes_of_their_bits(numbers, bits, error):
    matrix = jax.random.normal(KEY, (2, 128, 4, 32))
    found = quantised_weight(matrix, numbers, -3)
    size = sum(x.nbytes for x in jax.tree.leaves(found))
    assert found.shape == matrix.shape
    assert 8 * size / matrix.size <= bits
    difference = np.asarray(found.dequantised() - matrix)
    assert difference.std() < error
    again = quantised_weight(found.dequantised(), numbers, -3)
    np.testing.assert_allclose(again.dequantised(), found.dequantised(), rtol=1e-6)


@pytest.mark.thorough
def test_nf4_codes_are_the_nearest_values_and_pairs_share_a_byte():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(64, 3)).astype(np.float32)
    found = quantised_weight(jnp.asarray(matrix), "nf4", -2)
    largest = np.abs(matrix).max(0)
    codes = np.abs(matrix[..., None] / largest[:, None] - NF4).argmin(-1).astype(np.uint8)
    np.testing.assert_array_equal(found.codes, codes[::2] << 4 | codes[1::2])
    np.testing.assert_array_equal(np.asarray(found.scales).view(np.float32)[0], largest)
    np.testing.assert_array_equal(found.dequantised(), NF4[codes] * largest)


@pytest.mark.thorough
def test_no_dequantised_matrix_is_kept_for_the_backward_pass():
    model = lora.quantise(base(), targets="gate")

    def run(model, x):
        return jnp.sum(model.layers.gate.multiply(lambda weight, x: x @ weight[0], x) ** 2)

    _, pull = jax.vjp(lambda x: run(model, x), jnp.ones((8, CONFIG.width)))
    matrix = CONFIG.width * CONFIG.hidden
    floating = [x.size for x in jax.tree.leaves(pull) if eqx.is_inexact_array(x)]
    assert max(floating) < matrix
    text = iter_equations(jax.make_jaxpr(run)(model, jnp.ones((8, CONFIG.width))).jaxpr)
    assert any(equation.primitive.name in ("remat2", "checkpoint", "remat") for equation in text)


@pytest.mark.thorough
def test_adapters_are_saved_and_loaded_into_a_quantised_model(tmp_path):
    model = adapted("int8")
    lora.save_adapters(model, tmp_path / "adapters", modules_to_save=["norm"])
    loaded = lora.load_adapters(lora.quantise(base(), "int8"), tmp_path / "adapters")
    assert_equal(loaded, model)


@pytest.mark.parametrize("numbers", ["nf4", "int8"])
@pytest.mark.parametrize("how", ["as CPU devices", "as accelerators"])
@pytest.mark.few("as accelerators-nf4")
@pytest.mark.thorough
def test_a_model_that_is_quantised_while_it_is_read(tmp_path, monkeypatch, numbers, how):
    """It is that of `lora.quantise`, and no matrix exists with all of its layers."""
    rc.save_pretrained(base(), tmp_path / "model")
    if how == "as accelerators":
        monkeypatch.setattr(_load, "fill_host", _read_to_device.fill_device)
    mesh = rc.make_mesh(fsdp=4, model=2)
    loaded = rc.load_pretrained(tmp_path / "model", mesh=mesh)
    whole = lora.quantise(loaded, numbers)
    sizes = []
    of_layer = lambda weight, **options: (
        sizes.append(weight.shape),
        quantised_weight(weight, **options),
    )[1]
    monkeypatch.setattr(_load, "quantised_weight", of_layer)
    monkeypatch.setattr(_load, "_MOST", 1)
    read = rc.load_pretrained(tmp_path / "model", mesh=mesh, quantise=numbers)
    assert jax.tree.structure(read) == jax.tree.structure(whole)
    assert_equal(read, whole)
    assert {shape[0] for shape in sizes} == {1}  # a layer at a time
    embed = read.embed
    assert embed.sharding == loaded.embed.sharding


def test_what_is_not_a_model_is_not_quantised():
    with pytest.raises(ValueError, match="contains no matrix.*Pass the model, and not its param"):
        lora.quantise({"w": jnp.ones((4, 4))})
    with pytest.raises(ValueError, match="'layers' matches none.*weight.*as `targets`"):
        lora.quantise(eqx.nn.Linear(4, 4, key=KEY))


@pytest.mark.integration
def test_training_is_sharded_saved_and_resumed(tmp_path):
    model = adapted("nf4")
    mesh = rc.make_mesh(fsdp=4, model=2)
    examples = list(np.tile(np.asarray(TOKENS), (8, 1)))
    run = ft.partial(
        rc.fit, optimizer=optax.sgd(0.1), collate_fn=np.stack, loss_fn=loss_fn, batch_size=8
    )
    options = {"trainable": lora.trainable(model), "compute_dtype": "bfloat16", "log": None}
    whole = run(model, examples=examples, steps=2, mesh=mesh, **options)
    place = rc.Checkpoints(tmp_path / "run", every=1)
    run(model, examples=examples, steps=1, mesh=mesh, checkpoints=place, **options)
    resumed = run(model, examples=examples, steps=2, mesh=mesh, checkpoints=place, **options)
    assert_equal(resumed.model, whole.model)
    assert_equal(lora.without_adapters(whole.model), lora.without_adapters(model))
    gate = whole.model.layers.gate.weight
    assert gate.codes.sharding.shard_shape(gate.codes.shape) != gate.codes.shape
    assert (gate.codes.dtype, gate.scales.dtype) == (jnp.uint8, jnp.uint32)


@pytest.mark.thorough
def test_structural_rules_shard_numbers_like_the_weight():
    mesh = rc.make_mesh(model=2, fsdp=4)
    of_weights = rc.infer_shardings(base(), mesh).layers
    found = rc.infer_shardings(adapted("nf4"), mesh).layers
    for name in ("gate", "down", "wq"):
        split = tuple(getattr(of_weights, name).spec).index("model")
        for part in ("codes", "scales"):
            assert getattr(getattr(found, name).weight, part).spec[split] == "model"


@pytest.mark.thorough
def test_a_dry_run_counts_the_bits():
    sizes = LlamaConfig(vocab=16, width=512, layers=8, heads=4, kv_heads=4, hidden=2048)
    batch = jax.ShapeDtypeStruct((8, 16), jnp.int32)

    def bytes_of(quantises):
        def make(key):
            model = Llama(sizes, key=key)
            if quantises:
                model = lora.quantise(model)
            return lora.add_adapters(model, 2, targets="wq", key=key)

        abstract = eqx.filter_eval_shape(make, KEY)
        plan = rc.plan_shardings(abstract, rc.make_mesh(fsdp=8), fn=loss_fn, args=(batch,))
        return sum(x.bytes_per_device for x in plan.report.arrays)

    assert bytes_of(True) < bytes_of(False) / 6


class Stranger(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


@pytest.mark.thorough
def test_linear_layers_of_other_models_are_quantised():
    model = Stranger(eqx.nn.Linear(8, 64, key=KEY), eqx.nn.Linear(64, 2, key=KEY))
    found = lora.quantise(model, targets="second")
    x = jnp.arange(8.0)
    np.testing.assert_allclose(found(x), lora.dequantise(found)(x), rtol=1e-5)
    assert found.second.weight.codes.shape == (2, 32)


def test_what_cannot_be_quantised_is_refused(tmp_path):
    model = lora.quantise(base())
    with pytest.raises(ValueError, match="layers/down is quantised already. Dequantise it first"):
        lora.quantise(model, targets="down")
    with pytest.raises(ValueError, match="`numbers` must be 'nf4' or 'int8', but is 'int4'"):
        lora.quantise(base(), "int4")
    with pytest.raises(ValueError, match="two numbers share a byte, but dimension 1 has 7"):
        lora.quantise(eqx.nn.Linear(7, 2, key=KEY), targets=".")
    with pytest.raises(ValueError, match="are quantised, .*lora.dequantise"):
        rc.save_pretrained(model, tmp_path / "saved")
