"""ModernBERT: rows that are padded, packed, long or split, and what published files say of it.
(`test_fixtures.py` has its outputs.)"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_checks import assert_close, check_padding, check_segments, make_tokens
from random_models import random_model
from sharding_helpers import mesh_of

import redcoast as rc
from redcoast.models import ModernBert, ModernBertConfig, with_head
from redcoast.pretrained._registry import find_family, read_config, write_config

CONFIG = ModernBertConfig(
    vocab=16, width=16, layers=2, heads=2, hidden=24, window=5, local=(True, False), head="masked"
)
# As in the published base size.
SETTINGS = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 50368,
}
read = lambda **changes: find_family({**SETTINGS, **changes}, "It")[1]


@pytest.mark.thorough
def test_padding_changes_nothing():
    check_padding(random_model(ModernBert, CONFIG))


@pytest.mark.thorough
def test_packed_texts_do_not_see_each_other():
    check_segments(random_model(ModernBert, CONFIG))


@pytest.mark.thorough
def test_a_window_ends_half_its_size_away():
    """One layer: a token changes the outputs within its window, and no others."""
    config = dataclasses.replace(CONFIG, layers=1, local=(True,))
    model = random_model(ModernBert, config)
    tokens = make_tokens(config, (1, 9))
    changed = tokens.at[0, 4].set((tokens[0, 4] + 1) % config.vocab)
    outputs = eqx.filter_jit(lambda tokens: model(tokens))
    moved = jnp.max(jnp.abs(outputs(tokens) - outputs(changed)), axis=-1)[0] > 1e-6
    assert np.asarray(moved).tolist() == [2 <= i <= 6 for i in range(9)]


@pytest.mark.thorough
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_labels_do_not_depend_on_padding(pooling):
    model = random_model(ModernBert, dataclasses.replace(CONFIG, pooling=pooling))
    model = with_head(model, labels=3, key=jax.random.key(0))
    assert model.config.head == "classification"
    tokens = make_tokens(CONFIG, (2, 5))
    padded = jnp.pad(tokens, ((0, 0), (2, 1)))
    mask = jnp.pad(tokens * 0 + 1, ((0, 0), (2, 1)))
    logits = eqx.filter_jit(lambda model, *args, mask=None: model(*args, mask=mask))
    assert_close(logits(model, padded, mask=mask), logits(model, tokens))
    with pytest.raises(
        ValueError, match=r"cannot hold several `segments`. Put each text into its own row"
    ):
        model(tokens, segments=tokens)


@pytest.mark.thorough
def test_the_plan_is_megatrons():
    """On 2 x 4 devices, heads and hidden features are split, and so is the vocabulary."""
    config = ModernBertConfig(4096, 512, 3, 8, 768, head="masked")
    model: Any = eqx.filter_eval_shape(ModernBert, config, key=jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((16, 128), jnp.int32)
    loss = lambda model, tokens: jnp.mean(jax.nn.logsumexp(model(tokens), axis=-1))
    plan = rc.plan_shardings(model, mesh_of(2, 1, 4), fn=loss, args=(tokens,))
    paths = [row.path for row in plan.report.arrays]
    actual = dict(zip(paths, plan.compute.dims, strict=True))
    split = {path.removeprefix("layers/"): dim for path, dim in actual.items() if dim is not None}
    expected = {"wq": 2, "wk": 2, "wv": 2, "wo": 1, "gate": 2, "up": 2, "down": 1}
    assert split.items() >= (expected | {"embed": 0}).items()
    assert not plan.report.program.unknown


def test_published_settings():
    config = read()
    assert config.has_window[:5] == (False, True, True, False, True)
    assert (config.local, config.head, config.pooling) == ((), "masked", "mean")
    assert (config.rope_base, config.local_rope_base) == (160000.0, 10000.0)
    assert read_config(ModernBertConfig, write_config(config)) == config
    listed = dataclasses.replace(config, layers=2, local=(True, True))
    assert "global_attn_every_n_layers" not in write_config(listed)
    assert read_config(ModernBertConfig, write_config(listed)) == listed


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": 22 * ["linear_attention"]}, "has .'linear_attention'., but only"),
        ({"global_attn_every_n_layers": 0}, "`global_attn_every_n_layers` must be at least 1"),
        ({"architectures": ["ModernBertForMultipleChoice"]}, "`architectures` is"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "only 'default' is"),
        ({"rope_parameters": {"rope_theta": 1.0}}, r"unknown entries \['rope_theta'\]"),
    ],
)
def test_settings_that_are_not_implemented(changes, says):
    with pytest.raises(ValueError, match=says):
        read(**changes)
