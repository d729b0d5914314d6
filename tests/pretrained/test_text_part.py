"""The language model within a model of images, in each layout of names that files have."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast.models import Llama, LlamaConfig
from redcoast.pretrained._registry import find_family
from redcoast.pretrained._text_part import text_settings

CONFIG = LlamaConfig(vocab=24, width=16, layers=2, heads=2, kv_heads=1, hidden=20, eos=(2,))
LAYOUTS = {
    "older": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "newer": {"model.": "model.language_model."},
    "text model": {"model.": "model.text_model."},
    "side by side": {},
}
VISION = {"visual.patch": np.ones((2, 2), np.float32)}


def save_wrapped(model, directory, prefixes, *, others=VISION, **settings):
    """A LLaVA around a model, whose tensors have other prefixes."""
    rc.save_pretrained(model, directory)
    tensors = load_file(directory / "model.safetensors")
    for old, new in prefixes.items():
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: x
            for name, x in tensors.items()
        }
    save_file({**tensors, **others}, directory / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    wrapped = {"model_type": "llava", "text_config": text, "vision_config": {"width": 4}}
    (directory / "config.json").write_text(json.dumps(wrapped | settings))


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, key=jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_model_by_itself(model, layout, tmp_path):
    save_wrapped(model, tmp_path, LAYOUTS[layout])
    with pytest.warns(UserWarning, match="contains a llava.*Left out: 1 tensors, 1 of visual"):
        loaded = rc.load_pretrained(tmp_path)
    assert loaded.config == model.config
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded, model))


@pytest.mark.thorough
def test_a_tensor_of_the_language_model_is_never_left_out(model, tmp_path):
    more = {"language_model.model.layers.0.self_attn.sinks": np.ones(2, np.float32)}
    save_wrapped(model, tmp_path, LAYOUTS["older"], others=more)
    with pytest.raises(ValueError, match="Unexpected: model.layers.0.self_attn.sinks"):
        rc.load_pretrained(tmp_path)


def test_a_file_without_a_head_and_without_a_word_about_it_is_tied(model, tmp_path):
    save_wrapped(model, tmp_path, LAYOUTS["newer"])
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="only the language model"):
        loaded = rc.load_pretrained(tmp_path)
    assert loaded.config.tied
    assert loaded.head is None


def test_sizes_that_a_file_leaves_out_are_those_of_transformers():
    """The file of Gemma 3 of 4 billion parameters, as it was published."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    settings |= {"text_config": text, "vision_config": {"hidden_size": 1152}}
    settings |= {"eos_token_id": [1, 106], "boi_token_index": 255999, "torch_dtype": "bfloat16"}
    _, config = find_family(settings, "gemma")
    sizes = (config.vocab, config.width, config.layers, config.heads, config.kv_heads)
    assert sizes == (262208, 2560, 34, 8, 4)
    assert (config.eos, config.window, config.local_rope_base) == ((1, 106), 1024, 1e4)
    assert config.tied


def test_first_files_of_qwen_have_both_kinds_of_settings_side_by_side():
    settings = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "vision_start_token_id": 151652,
        "image_token_id": 151655,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "hidden_size": 3584},
        "tie_word_embeddings": False,
    }
    _, config = find_family(settings, "qwen")
    assert config.qkv_bias
    assert (config.rope_base, config.rope_scaling, config.window) == (1e6, None, None)


def test_other_models_are_as_they_are():
    settings = {"model_type": "siglip", "text_config": {"hidden_size": 3}}
    assert text_settings(settings) is settings
    assert text_settings({"model_type": None}) == {"model_type": None}
