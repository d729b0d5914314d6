"""What people pass by mistake is named, with what would work."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_model
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast.generate._check_arguments import check_prompt
from redcoast.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=16, width=16, layers=1, heads=2, kv_heads=1, hidden=16)
MODEL = random_model(Llama, CONFIG)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "llama"
    rc.save_pretrained(MODEL, place)
    return place


def says(path, message, **options):
    with pytest.raises(ValueError, match=message):
        rc.load_pretrained(path, **options)


def changed(saved, place, change, **settings):
    """A copy with other tensors and settings."""
    shutil.copytree(saved, place)
    save_file(change(load_file(place / "model.safetensors")), place / "model.safetensors")
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return place


def test_directories_without_a_model_are_named(saved, tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/adapter_config.json").write_text("{}")
    says(tmp_path / "adapters", r"but adapters.*`lora.load_adapters\(model, '.*adapters'\)`")
    cache = tmp_path / "models--a--b"
    shutil.copytree(saved, cache / "snapshots/abc")
    says(cache, "snapshots of a model.*Pass .*snapshots/abc")
    shutil.copytree(saved, tmp_path / "shard")
    file = tmp_path / "shard/model.safetensors"
    file.rename(file.with_name("model-00001-of-00002.safetensors"))
    says(tmp_path / "shard", "but model-00001-of-00002.safetensors. Rename it")
    says(saved / "model.safetensors", "Pass the directory that holds both it and config.json")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_prefixes_of_wrappers_are_named(prefix, saved, tmp_path):
    wrap = lambda tensors: {prefix + name: x for name, x in tensors.items()}
    says(changed(saved, tmp_path / "wrapped", wrap), f"prefix `{prefix}`.*save the model that it")


def test_heads_that_differ_from_the_settings_name_the_option_that_reads_them(saved, tmp_path):
    same = lambda tensors: tensors
    tied = changed(saved, tmp_path / "tied", same, tie_word_embeddings=True)
    says(tied, "lm_head.weight as a separate head, pass `tied=False`")
    loaded = rc.load_pretrained(tied, tied=False)
    np.testing.assert_array_equal(loaded.head, MODEL.head)
    without = lambda tensors: {k: x for k, x in tensors.items() if k != "lm_head.weight"}
    untied = changed(saved, tmp_path / "untied", without)
    says(untied, "shares the weights of the embedding, pass `tied=True`")
    assert rc.load_pretrained(untied, tied=True).head is None


def test_other_heads_are_named(saved, tmp_path):
    score = lambda tensors: {
        k.replace("lm_head", "score"): x[:2].copy() if "lm_head" in k else x
        for k, x in tensors.items()
    }
    names = {"architectures": ["LlamaForSequenceClassification"]}
    says(changed(saved, tmp_path / "labels", score, **names), "LlamaForSequenceClassification")


@pytest.mark.parametrize("dtype", ["auto", "int8", object()])
def test_other_dtypes_are_named(dtype, saved):
    says(saved, "`dtype` must be a floating type .*such as 'bfloat16'", dtype=dtype)


class Foreign:
    """An array of another library."""

    shape, ndim, dtype = (1, 3), 2, "other.int64"

    def __array__(self, dtype=None, copy=None):
        return np.ones((1, 3), np.int32)


def test_arrays_of_other_libraries_are_named():
    for given in (Foreign(), [[1, 2]]):
        with pytest.raises(TypeError, match="`tokens` is of type .*NumPy or JAX array"):
            check_prompt(MODEL, given, None)
    with pytest.raises(TypeError, match=r"`mask` is of type .*Foreign.*`np.asarray\(mask\)`"):
        check_prompt(MODEL, jnp.ones((1, 3), jnp.int32), Foreign())


def test_arguments_of_transformers_are_named():
    tokens = np.ones((1, 3), np.int32)
    options = {"do_sample": True, "num_beams": 2, "attention_mask": tokens, "eos_token_id": 2}
    with pytest.raises(TypeError, match=r"num_beams: `beams`") as error:
        rc.generate(MODEL, tokens, max_new_tokens=1, **options)
    for way in ("a `temperature` to sample", "attention_mask: `mask`", "eos_token_id: `eos`"):
        assert way in str(error.value)
