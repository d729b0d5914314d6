"""`generation_config.json`: what a model's files say of decoding is used, kept, and warned of."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import pytest
from grids import few_of

import redcoast as rc
from redcoast.models import Bart, BartConfig, Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=40, width=16, layers=1, heads=2, kv_heads=1, hidden=32, eos=(3,))
SUMMARY = {
    "num_beams": 4,
    "early_stopping": True,
    "length_penalty": 2.0,
    "min_length": 5,
    "no_repeat_ngram_size": 3,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "max_length": 142,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    bart = BartConfig(vocab=40, width=16, layers=1, decoder_layers=1, heads=2, hidden=32)
    rc.save_pretrained(Llama(CONFIG, key=jax.random.key(0)), place / "llama")
    rc.save_pretrained(Bart(bart, key=jax.random.key(0)), place / "bart")
    return place


def config_of(directory, generation: dict[str, Any] | None, **settings):
    """The configuration that is loaded with this `generation_config.json`, and these additions to
    `config.json`."""
    own = json.loads((directory / "config.json").read_text()) | settings
    file = directory / "generation_config.json"
    before = (directory / "config.json").read_text(), file.read_text()
    try:
        (directory / "config.json").write_text(json.dumps(own))
        file.write_text(json.dumps(generation)) if generation is not None else file.unlink()
        return rc.load_pretrained(directory).config
    finally:
        (directory / "config.json").write_text(before[0])
        file.write_text(before[1])


@pytest.mark.parametrize(
    "decoding",
    [
        rc.Decoding(),
        rc.Decoding(temperature=0.7, top_p=0.8, min_p=0.05, repetition_penalty=1.1),
        rc.Decoding(beams=4, length_penalty=2.0, early_stopping="never", num_return_sequences=2),
        rc.Decoding(suppress=[4], bad_words=[[1, 2]], forced_eos=3, min_new_tokens=2),
    ],
)
def test_what_is_saved_is_loaded(decoding, tmp_path):
    config = dataclasses.replace(CONFIG, decoding=decoding, pad=7)
    rc.save_pretrained(Llama(config, key=jax.random.key(0)), tmp_path / "model")
    assert rc.load_pretrained(tmp_path / "model").config == config


@pytest.mark.thorough
def test_token_ids_of_the_file_count_more_than_those_of_the_configuration(saved):
    config = config_of(saved / "llama", {"eos_token_id": [5, 6], "pad_token_id": 9})
    assert (config.eos, config.pad) == ((5, 6), 9)
    silent = config_of(saved / "llama", {"eos_token_id": None})
    assert silent == CONFIG


def test_sampling_has_the_defaults_of_transformers(saved):
    sampled = config_of(saved / "llama", {"do_sample": True}).decoding
    assert (sampled.temperature, sampled.top_k) == (1.0, 50)
    assert config_of(saved / "llama", {"do_sample": True, "min_p": 0.0}).decoding == sampled
    # Without `do_sample` these have no effect.
    assert config_of(saved / "llama", {"temperature": 0.6, "top_p": 0.9}).decoding == rc.Decoding()


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_summarising_models_keep_their_options_in_either_file(saved, where):
    older = where == "config.json"
    config = config_of(saved / "bart", None if older else SUMMARY, **(SUMMARY if older else {}))
    assert config.decoding == rc.Decoding(
        beams=4,
        early_stopping=True,
        length_penalty=2.0,
        min_length=5,
        no_repeat_ngram_size=3,
        forced_bos=0,
        forced_eos=2,
    )


SAMPLED = {"temperature": 1.0, "top_k": 50}
# Each with the option that is left out, if any, and the others.
ODD = {
    "no temperature": ({"do_sample": True, "temperature": 0.0}, "temperature", {}),
    "top_p without": (
        {"do_sample": True, "temperature": 0.0, "top_p": 0.9},
        "temperature.*`top_p`, which is 0.9",
        {},
    ),
    "top_p of 0": ({"do_sample": True, "top_p": 0.0}, "top_p", SAMPLED),
    "top_p above 1": (
        {"do_sample": True, "top_p": 1.5},
        "top_p",
        {"temperature": 1.0, "top_k": 50},
    ),
    "top_k below 0": ({"do_sample": True, "top_k": -1}, "top_k", {"temperature": 1.0}),
    "top_k as a float": ({"do_sample": True, "top_k": 20.0}, "", {"temperature": 1.0, "top_k": 20}),
    "words": ({"do_sample": True, "temperature": "hot"}, "temperature", {}),
    "penalty": (
        {"repetition_penalty": 0.0, "min_length": 3},
        "repetition_penalty",
        {"min_length": 3},
    ),
    "several": ({"num_return_sequences": 3}, "num_return_sequences", {}),
    "beams": ({"num_beams": "x", "min_length": 3}, "num_beams", {"min_length": 3}),
    "tokens": ({"suppress_tokens": "x"}, "suppress_tokens", {}),
    "floats as tokens": (
        {"suppress_tokens": [3.0], "forced_eos_token_id": 2.0},
        "",
        {"suppress": [3], "forced_eos": 2},
    ),
    "forced": ({"forced_decoder_ids": 3}, "forced_decoder_ids", {}),
    "nothing": ({"length_penalty": None, "num_beams": None}, "", {}),
    "bad words": ({"bad_words_ids": [3]}, "bad_words_ids", {}),
}


@pytest.mark.parametrize("name", few_of(ODD, *list(ODD)[::3]))
def test_odd_options_leave_the_others_and_the_weights(name, saved):
    """The weights do not need them, and `transformers` loads such files. The warning says what the
    file says, and no default."""
    given, left_out, expected = ODD[name]
    if not left_out:
        assert config_of(saved / "llama", given).decoding == rc.Decoding(**expected)
        return
    with pytest.warns(UserWarning, match=f"generation_config.json .*`{left_out}") as warnings:
        actual = config_of(saved / "llama", given)
    assert actual.decoding == rc.Decoding(**expected)
    # The path of the file may have any number in it.
    assert "50" not in str(warnings[0].message).replace(str(saved), "")
    # They do not matter if the caller says how to decode.
    own = rc.Decoding(min_new_tokens=2)
    assert rc.load_pretrained(saved / "llama", decoding=own).config.decoding == own


def test_odd_tokens_and_files_leave_those_of_the_config(saved, tmp_path):
    with pytest.warns(UserWarning, match="`pad_token_id`.*`eos_token_id`, which is 'x'"):
        actual = config_of(saved / "llama", {"eos_token_id": "x", "pad_token_id": [1]})
    assert (actual.eos, actual.pad) == (CONFIG.eos, CONFIG.pad)
    assert config_of(saved / "llama", {"eos_token_id": 2.0}).eos == (2,)
    damaged = shutil.copytree(saved / "llama", tmp_path / "llama")
    (damaged / "generation_config.json").write_text("{")
    with pytest.warns(UserWarning, match=r"are ignored.*generation_config.json is damaged"):
        assert rc.load_pretrained(damaged).config.eos == CONFIG.eos


def test_options_that_are_not_implemented_are_warned_of(saved):
    with pytest.warns(UserWarning, match=r"generation_config.json .*`typical_p`, which is 0.9"):
        actual = config_of(saved / "llama", {"typical_p": 0.9, "repetition_penalty": 1.2})
    assert actual.decoding == rc.Decoding(repetition_penalty=1.2)
    for given in ({"token_healing": True}, {"forced_decoder_ids": [[2, 7], [3, 8]]}):
        with pytest.warns(UserWarning, match=next(iter(given))):
            assert config_of(saved / "llama", given).decoding == rc.Decoding()
    config = dataclasses.replace(CONFIG, decoding=rc.Decoding(logits_fn=abs))
    with pytest.raises(ValueError, match="`logits_fn`, which cannot be saved"):
        rc.save_pretrained(Llama(config, key=jax.random.key(0)), saved / "none")
    config = dataclasses.replace(CONFIG, decoding=rc.Decoding(eos=()))
    with pytest.raises(ValueError, match="but a file cannot specify that no token ends"):
        rc.save_pretrained(Llama(config, key=jax.random.key(0)), saved / "none")
    assert not [*saved.glob("*none*")]


def test_options_that_are_not_known_are_warned_of_by_name(saved):
    """Except those that change no token: of Whisper's longer recordings, here, and of caches."""
    known = {
        "_from_model_config": True,
        "transformers_version": "5.24.0",
        "cache_implementation": "hybrid",
        "max_length": 448,
        "num_assistant_tokens": 20,
        "alignment_heads": [[3, 1]],
        "is_multilingual": False,
        "max_initial_timestamp_index": 50,
        "prev_sot_token_id": 7,
        "logit_magic": None,
    }
    assert config_of(saved / "llama", known).decoding == rc.Decoding()
    odd = {"logprob_threshold": -1.0, "logit_magic": 2, "min_length": 3}
    with pytest.warns(UserWarning, match="`logprob_threshold`, which is -1.0; `logit_magic`"):
        assert config_of(saved / "llama", odd).decoding == rc.Decoding(min_length=3)


def test_the_files_of_a_tokenizer_are_copied(saved, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"]
    for name in [*names, "README.md", "model.safetensors"]:
        (theirs / name).write_text(name)
    model = Llama(CONFIG, key=jax.random.key(0))
    rc.save_pretrained(model, tmp_path / "ours", tokenizer=theirs)
    own = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(x.name for x in (tmp_path / "ours").iterdir()) == sorted([*own, *names])
    assert (tmp_path / "ours" / "merges.txt").read_text() == "merges.txt"
    with pytest.raises(ValueError, match="contains no file of a tokenizer"):
        rc.save_pretrained(model, tmp_path / "other", tokenizer=saved / "llama")
    with pytest.raises(FileNotFoundError, match="no directory .*missing"):
        rc.save_pretrained(model, tmp_path / "other", tokenizer=tmp_path / "missing")


def test_equal_models_have_equal_configurations():
    assert dataclasses.replace(CONFIG, head_size=8) == CONFIG
    assert dataclasses.replace(CONFIG, head_size=16).head_dim == 16
