"""Whisper: its convolutions and positions against NumPy, its cache, and its `config.json` files."""

import dataclasses
import json
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_model, to_device

import redcoast as rc
from redcoast.models import sizes
from redcoast.models.whisper import Whisper, WhisperConfig, _convolve, sinusoids
from redcoast.pretrained._generation import read_decoding, write_decoding
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained._whisper_prompt import speech_settings_of
from redcoast.pretrained.hf import whisper as hf_whisper

CONFIG = WhisperConfig(
    vocab=13, width=16, layers=1, decoder_layers=2, heads=2, hidden=24, mels=3, frames=8,
    positions=9, decoder_start=1,
)  # fmt: skip
FEATURES = to_device(np.random.default_rng(0).normal(size=(3, 3, 8)), np.float32)
TOKENS = to_device(np.random.default_rng(1).integers(0, 13, (3, 5)))
# What the published file of the largest one says.
SETTINGS = {
    "_name_or_path": "openai/whisper-large-v3",
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "apply_spec_augment": False,
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [220, 50257],
    "bos_token_id": 50257,
    "classifier_proj_size": 256,
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 32,
    "decoder_start_token_id": 50258,
    "dropout": 0.0,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 32,
    "eos_token_id": 50257,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "mask_feature_length": 10,
    "mask_feature_min_masks": 0,
    "mask_feature_prob": 0.0,
    "mask_time_length": 10,
    "mask_time_min_masks": 2,
    "mask_time_prob": 0.05,
    "max_length": 448,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "median_filter_width": 7,
    "model_type": "whisper",
    "num_hidden_layers": 32,
    "num_mel_bins": 128,
    "pad_token_id": 50256,
    "scale_embedding": False,
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "use_weighted_layer_sum": False,
    "vocab_size": 51866,
}
FILE = {
    "forced_decoder_ids": [[1, None], [2, 50359]],
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
    "no_timestamps_token_id": 50363,
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [220, 50257],
}


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_see_a_frame_on_either_side(stride):
    rng = np.random.default_rng(0)
    x, kernel, bias = (rng.normal(size=shape) for shape in ((1, 6, 3), (3, 3, 4), (4,)))
    padded = np.pad(x[0], ((1, 1), (0, 0)))
    inner = [
        sum(padded[at + tap] @ kernel[tap] for tap in range(3)) + bias for at in range(0, 6, stride)
    ]
    args = [to_device(a, np.float32) for a in (x, kernel, bias)]
    expected = jax.nn.gelu(to_device(inner, np.float32), approximate=False)
    np.testing.assert_allclose(_convolve(*args, stride=stride)[0], expected, atol=1e-5)


@pytest.mark.thorough
def test_positions_of_the_encoder_are_sinusoids_and_are_not_trained():
    table = sinusoids(5, 6)
    rates = [1, 0.01, 0.0001]
    for at in range(5):
        angles = np.array(rates) * at
        np.testing.assert_allclose(table[at], [*np.sin(angles), *np.cos(angles)], atol=1e-12)
    model = random_model(Whisper, CONFIG)
    loss = lambda model: jnp.sum(jnp.sin(model.encode(FEATURES)))
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(model)
    assert not jnp.any(gradient.encoder.position_embed)
    assert jnp.any(gradient.encoder.first)


@pytest.mark.thorough
def test_cache_and_padding_are_as_all_at_once():
    model = random_model(Whisper, CONFIG)
    logits = eqx.filter_jit(lambda model, *args, **more: model(*args, **more))
    expected = logits(model, FEATURES, TOKENS)
    padded = jnp.pad(TOKENS, ((0, 0), (3, 0)))
    actual = logits(model, FEATURES, padded, decoder_mask=jnp.pad(TOKENS * 0 + 1, ((0, 0), (3, 0))))
    np.testing.assert_allclose(actual[:, 3:], expected, atol=1e-4)

    @eqx.filter_jit
    def in_steps(model):
        cache = model.init_cache(3, 6, memory=model.encode(FEATURES))
        first, cache = model.decode(TOKENS[:, :3], cache)
        others = []
        for at in (3, 4):
            hidden, cache = model.decode(TOKENS[:, at : at + 1], cache)
            others.append(hidden)
        return model.unembed(jnp.concatenate([first, *others], axis=1))

    np.testing.assert_allclose(in_steps(model), expected, atol=1e-4)


@pytest.mark.thorough
def test_prefix_stands_before_the_text_and_what_must_not_begin_it_does_not():
    model = random_model(Whisper, CONFIG)
    find = lambda **options: np.asarray(
        rc.generate(model, FEATURES, max_new_tokens=3, eos=(), **options)
    )
    first = lambda *prefix: np.asarray(
        jnp.argsort(-model(FEATURES, jnp.array([[1, *prefix]] * 3))[:, -1], axis=1)
    )
    best = first(4, 7)
    np.testing.assert_array_equal(find(prefix=(4, 7))[:, 0], best[:, 0])
    banned = tuple({int(token) for token in best[:, 0]})
    expected = [next(t for t in row if t not in banned) for row in best]
    np.testing.assert_array_equal(find(prefix=(4, 7), begin_suppress=banned)[:, 0], expected)
    with pytest.raises(ValueError, match=r"`prefix`, of 2 tokens, and .* need 12 positions"):
        rc.generate(model, FEATURES, max_new_tokens=10, prefix=(4, 7))
    with pytest.raises(ValueError, match="`prefix` has 99"):
        find(prefix=(99,))


def test_published_settings_are_read_and_written():
    config = read_config(WhisperConfig, SETTINGS)
    assert config == WhisperConfig(
        vocab=51866, width=1280, layers=32, decoder_layers=32, heads=20, hidden=5120, mels=128,
        bos=50257, eos=(50257,), pad=50256,
    )  # fmt: skip
    written = write_config(config)
    assert read_config(WhisperConfig, written) == config
    names = written.keys() & SETTINGS.keys()
    assert {name: written[name] for name in names} == {name: SETTINGS[name] for name in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"apply_spec_augment": True}, "`apply_spec_augment` is True"),
        ({"decoder_ffn_dim": 64}, "`decoder_ffn_dim` is 64, but only 5120"),
        ({"architectures": ["WhisperForAudioClassification"]}, "WhisperForAudioClassification"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings` is False"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(WhisperConfig, SETTINGS | change)


SILENT: dict[str, Any] = {"suppress": [1, 2], "begin_suppress": [220, 50257]}
WITHOUT = {name: x for name, x in FILE.items() if not name.endswith("_to_id")}
FORCED = {"forced_decoder_ids": [[2, 50358], [1, 50261]]}


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        (FILE | {"language": "de", "task": "translate"}, (50261, 50358, 50363)),
        (FILE | {"language": "German"}, (50261, 50359, 50363)),
        (FILE | {"language": "<|de|>"}, (50261, 50359, 50363)),
        (FILE | {"language": "de", "return_timestamps": False} | FORCED, (50261, 50359, 50363)),
        (FILE | FORCED, (50261, 50358, 50363)),
        (WITHOUT | {"forced_decoder_ids": [[1, 50362]]}, (50362, 50363)),
        (WITHOUT | {"forced_decoder_ids": None}, (50363,)),
        (
            {**WITHOUT, "task_to_id": FILE["task_to_id"], "task": "translate"},
            (50358, 50363),
        ),
    ],
)
def test_the_language_and_the_task_are_those_of_the_file(given, prefix):
    assert read_decoding(given, "there") == rc.Decoding(**SILENT, prefix=prefix)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (FILE, "the detection of the language"),
        (FILE | {"task": "translate"}, "the detection of the language"),
        (FILE | {"language": "xx"}, "`language`, which is 'xx' and not in `lang_to_id`"),
        (FILE | {"language": ["de", "en"]}, "`language`, which is .'de', 'en'. and not in"),
        (FILE | {"language": "de", "task": "sing"}, "`task`, which is 'sing' and not in"),
        (WITHOUT | {"language": "de"}, "`language`, which is 'de' and not in `lang_to_id`"),
        (WITHOUT, "`forced_decoder_ids`, .* and leaves a token open"),
        (WITHOUT | {"forced_decoder_ids": [[2, 7]]}, "`forced_decoder_ids`, .* not begin at 1"),
    ],
)
def test_what_is_open_or_unknown_is_warned_of_by_name(given, words):
    """And no part of the tokens is used: the others would be at wrong positions."""
    with pytest.warns(UserWarning, match=words):
        decoding = read_decoding(given, "there")
    assert decoding == rc.Decoding(**SILENT)


OF_TRANSFORMERS = {"alignment_heads": [[1, 0], [1, 1]], "is_multilingual": True, "max_length": 448}


@pytest.mark.thorough
def test_what_transformers_needs_of_a_file_is_saved_with_the_model(tmp_path):
    """Without `lang_to_id`, it refuses `language=`; without `max_length`, it stops at 20 tokens."""
    rc.save_pretrained(random_model(Whisper, CONFIG), tmp_path / "model")
    given = FILE | FORCED | OF_TRANSFORMERS | {"language": "de", "task": "translate"}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(given))
    model = rc.load_pretrained(tmp_path / "model")
    rc.save_pretrained(model, tmp_path / "again")
    saved = json.loads((tmp_path / "again/generation_config.json").read_text())
    forced = [[1, 50261], [2, 50358], [3, 50363]]
    assert saved.items() >= (given | {"forced_decoder_ids": forced}).items()
    assert rc.load_pretrained(tmp_path / "again").config == model.config


@pytest.mark.parametrize(
    ("prefix", "left_out", "added"),
    [
        # Another language; and one after which there are timestamps.
        ((50259, 50359, 50363), {"language", "task"}, {}),
        ((50259, 50359), {"language", "task"}, {"return_timestamps": True}),
        ((), {"language", "task"}, {}),  # which `transformers` detects
    ],
)
def test_a_prefix_that_was_chosen_after_loading_is_what_a_file_says(prefix, left_out, added):
    given = FILE | {"language": "de", "task": "translate"}
    decoding = rc.Decoding(prefix=prefix)
    config = dataclasses.replace(
        CONFIG, decoding=decoding, speech_settings=speech_settings_of(given)
    )
    saved = write_decoding(config)
    assert not saved.keys() & left_out
    assert saved.items() >= added.items()
    assert ("return_timestamps" in saved) == bool(added)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timestamps and detection are warned of
        assert read_decoding(saved, "there").prefix == prefix


@pytest.mark.thorough
def test_files_of_whisper_may_have_the_forced_tokens_in_either_file(tmp_path):
    rc.save_pretrained(random_model(Whisper, CONFIG), tmp_path / "model")
    settings = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(
        json.dumps(settings | {"forced_decoder_ids": [[1, 4], [2, 7]]})
    )
    file = tmp_path / "model/generation_config.json"
    for own, prefix in (({}, (4, 7)), ({"forced_decoder_ids": [[1, 5]]}, (5,))):
        file.write_text(json.dumps(own))
        assert rc.load_pretrained(tmp_path / "model").config.decoding.prefix == prefix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": 7}, "`frames` must be even and at least 2, but is 7"),
        ({"width": 2}, "`width` must be even and at least 4, but is 2"),
        ({"mels": 0}, "`mels` must be at least 1"),
        ({"speech_settings": (("task", "sing"),)}, "values in JSON, but `task` is 'sing'"),
    ],
)
def test_values_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_features_and_texts_of_another_size_are_refused():
    model = random_model(Whisper, CONFIG)
    with pytest.raises(ValueError, match=r"features have shape \(3, 6\), but the model takes"):
        model(FEATURES[:, :, :6], TOKENS)
    with pytest.raises(ValueError, match="10 tokens in a row, but the model has 9 positions"):
        model(FEATURES, jnp.zeros((3, 10), jnp.int32))


def test_tables_name_every_array():
    model = eqx.filter_eval_shape(Whisper, CONFIG, key=jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(model)
    paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    assert paths == hf_whisper.tensors(CONFIG).keys()


@pytest.mark.thorough
def test_the_planner_splits_the_published_sizes():
    model = eqx.filter_eval_shape(sizes.whisper_tiny, key=jax.random.key(0))
    args = hf_whisper.example_inputs(model.config, 8)
    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_shardings(model, mesh, fn=lambda model, *args: model(*args), args=args)
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(plan.shardings), strict=True)
    split = sum(leaf.size for leaf, sharding in pairs if "model" in str(sharding.spec))
    assert split > 0.99 * sum(leaf.size for leaf in jax.tree.leaves(model))
