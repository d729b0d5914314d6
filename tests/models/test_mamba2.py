"""Mamba-2: its states against NumPy, what holds for every decoder, and its files."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import assert_close, check_cache, check_padding, check_remat, check_split
from random_models import random_model, to_device

from redcoast.models.mamba2 import Mamba2, Mamba2Config, scan_states
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained._tensors import tensor_shape
from redcoast.pretrained.hf import mamba2 as hf_mamba2

CONFIG = Mamba2Config(
    vocab=16, width=16, layers=2, heads=4, head_size=8, state=6, groups=2, taps=3, chunk=4
)
# What the published file of Mamba-Codestral says.
SETTINGS = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 0,
    "chunk_size": 256,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.1,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 8,
    "norm_before_gate": True,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "time_step_scale": 1.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 32768,
}


def make(**changes):
    return random_model(Mamba2, dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.few("3")
def test_states_pass_from_token_to_token(chunk):
    """Whatever the chunks, and from a state that is given."""
    rng = np.random.default_rng(0)
    x, b, c = (rng.normal(size=(2, 7, *shape)) for shape in ((4, 3), (2, 5), (2, 5)))
    steps, rates = rng.uniform(0.1, 1, (2, 7, 4)), -rng.uniform(0.1, 2, 4)
    state = first = rng.normal(size=(2, 4, 3, 5))
    expected = []
    for at in range(7):
        kept = np.exp(steps[:, at] * rates)[..., None, None]
        into, out = (np.repeat(y[:, at], 2, axis=1)[:, :, None] for y in (b, c))
        state = kept * state + (steps[:, at][..., None] * x[:, at])[..., None] * into
        expected.append((state * out).sum(axis=-1))
    args = [to_device(y, np.float32) for y in (x, steps, rates, b, c, first)]
    actual, last = jax.jit(scan_states, static_argnames="chunk")(*args, chunk=chunk)
    assert_close(actual, np.stack(expected, axis=1), 1e-5)
    assert_close(last, state, 1e-5)


def test_the_cache_has_one_size_for_any_length():
    caches = [eqx.filter_eval_shape(Mamba2.init_cache, make(), 3, length) for length in (4, 400)]
    assert caches[0].state.shape == caches[1].state.shape == (2, 3, 4, 8, 6)
    assert caches[0].before.shape == (2, 3, 2, 4 * 8 + 2 * 12)


@pytest.mark.thorough
def test_cache_is_as_all_at_once():
    check_cache(make(layers=1))


@pytest.mark.thorough
def test_padding_changes_nothing():
    check_padding(make())


@pytest.mark.thorough
def test_remat_changes_no_gradient():
    check_remat(lambda remat: make(remat=remat))


@pytest.mark.thorough
def test_it_is_split():
    check_split(make(vocab=256, width=64, heads=16, groups=4, state=16))


def test_settings_are_read_and_written():
    config = read_config(Mamba2Config, SETTINGS)
    assert config == Mamba2Config(
        vocab=32768, width=4096, layers=64, heads=128, groups=8, eos=(0,), bos=0, pad=0
    )
    assert read_config(Mamba2Config, write_config(config)) == config
    narrow = dataclasses.replace(CONFIG, heads=2, wide_residual=False, tied=True)
    assert read_config(Mamba2Config, write_config(narrow)) == narrow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bias": True}, "`use_bias` is True"),
        ({"use_conv_bias": False}, "`use_conv_bias` is False"),
        ({"expand": 3}, "`expand` is 3, but only 2"),
        ({"time_step_limit": [0.0, 0.5]}, "`time_step_limit` is"),
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(Mamba2Config, SETTINGS | change)


def test_tables_name_every_array():
    for tied in (False, True):
        config = dataclasses.replace(CONFIG, tied=tied)
        model = eqx.filter_eval_shape(Mamba2, config, key=jax.random.key(0))
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(model)
        }
        table = hf_mamba2.tensors(config)
        assert leaves.keys() == table.keys()
        total = 2 * 32 + 2 * 12 + 4
        for name in ("gate", "x", "b", "c", "steps"):
            path = f"layers/{name}"
            assert tensor_shape(table[path], leaves[path]) == (total, 16)
        assert tensor_shape(table["layers/conv_c"], leaves["layers/conv_c"]) == (56, 1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "must be a multiple of `width`, but 24 is not a multiple of 16"),
        ({"groups": 3}, "`heads` must be a multiple of `groups`"),
        ({"chunk": 0}, "`chunk` must be at least 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize("name", ["segments", "positions"])
def test_texts_in_one_row_are_refused(name):
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=f"does not take `{name}`.*one text into each row"):
        make()(tokens, **{name: tokens})
