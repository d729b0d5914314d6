"""The settings of models that are others with options, as their files say them."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from redcoast.models import (
    Bert,
    BertConfig,
    ClipConfig,
    DeepseekV3Config,
    GPTNeoXConfig,
    LlamaConfig,
    LongRope,
    Phi3Config,
    Yarn,
)
from redcoast.pretrained._registry import find_family, read_config, write_config
from redcoast.pretrained._safetensors import read_safetensors, write_safetensors

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = LlamaConfig(48, 32, 4, 4, 2, 40)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


def read(kind, **settings):
    return read_config(LlamaConfig, SIZES | {"model_type": kind, **settings})


def test_olmo3_scales_the_rotary_embeddings_of_layers_without_a_window_alone():
    """As its files were published, before there was one setting for each type of layer."""
    config = read("olmo3", rope_theta=500000, rope_scaling=YARN, sliding_window=4096)
    assert config.local == (True, True, True, False)
    assert (config.rope_base, config.local_rope_base, config.window) == (500000, 500000, 4096)
    assert isinstance(config.rope_scaling, Yarn)
    everywhere, near = {**YARN, "rope_theta": 9e5}, {"rope_type": "default", "rope_theta": 7e5}
    rope = {"full_attention": everywhere, "sliding_attention": near}
    config = read("olmo3", rope_parameters=rope)
    assert (config.rope_base, config.local_rope_base) == (9e5, 7e5)
    with pytest.raises(ValueError, match="scales the layers with 'sliding_attention'"):
        read("olmo3", rope_parameters=rope | {"sliding_attention": YARN})


def test_a_granite_4_with_states_or_experts_is_refused():
    plain = {"layer_types": 4 * ["attention"], "num_local_experts": 0}
    config = read("granitemoehybrid", **plain, shared_intermediate_size=24)
    assert (config.hidden, config.rope_layers) == (24, (False,) * 4)
    assert read("granitemoehybrid", **plain, position_embedding_type="rope").rope_layers == ()
    with pytest.raises(ValueError, match="layers of states"):
        read("granitemoehybrid", **plain | {"layer_types": ["mamba", *3 * ["attention"]]})
    with pytest.raises(ValueError, match="`num_local_experts` is 8"):
        read("granitemoehybrid", **plain | {"num_local_experts": 8})


def test_kimi_k2_is_a_deepseek_v3():
    config = DeepseekV3Config(
        48, 32, 3, 4, 40, 12, dense_layers=1, experts=8, chosen=2, groups=1, chosen_groups=1
    )
    config = dataclasses.replace(config, rope_scaling=Yarn(32, 4096, fast=1, slow=1))
    settings = write_config(config) | {"model_type": "kimi_k2"}
    assert find_family(settings, "kimi")[1] == read_config(DeepseekV3Config, write_config(config))


GROWN = Yarn(16.0, 16384)
KEPT = {
    "llama": {},
    "mistral": {"window": 3},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "window": 3},
    "olmo2": {"qk_norm": True, "output_norms": True},
    "smollm3": {"rope_layers": (True, False, True, True)},
    "olmo3": {"qk_norm": True, "output_norms": True, "local": (True, False) * 2, "window": 3}
    | {"local_rope_base": 300.0, "rope_scaling": Yarn(8.0, 32)},
    "ministral3": {"query_growth": 0.2, "rope_scaling": GROWN, "head_size": 16},
    "granite": {"embed_scale": 3.0, "score_factor": 0.25, "logit_divisor": 2.0},
    "granitemoehybrid": {"kind": "granitemoehybrid", "residual_scale": 0.5, "score_factor": 0.2}
    | {"rope_layers": (False,) * 4},
}


@pytest.mark.parametrize("kind", KEPT)
def test_options_go_to_files_and_back(kind):
    config = dataclasses.replace(LLAMA, eos=(2,), bos=1, pad=0, **KEPT[kind])
    settings = write_config(config)
    assert settings["model_type"] == kind
    assert read_config(LlamaConfig, settings) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "granitemoehybrid", "qkv_bias": True}, "combination of options: `qkv_bias=True`"),
        ({"kind": "gpt"}, "`kind` must be one of llama, mistral"),
        ({"embed_scale": 2.0, "window": 3}, "Granite has none of them, and may have"),
        ({"rope_layers": (False,) * 4, "embed_scale": 2.0}, "No published architecture"),
        ({"experts": 4}, "combination of options: `experts=4`"),
        ({"rope_scaling": LongRope((1.0,) * 4, (2.0,) * 4, 8)}, "only files of Phi-3 support"),
    ],
)
def test_options_of_no_type_are_not_saved(options, message):
    with pytest.raises(ValueError, match=message):
        write_config(dataclasses.replace(LLAMA, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_growth": 0.1}, "`query_growth` needs a `rope_scaling` with an `original`"),
        ({"local": (True, False)}, "`local` must have one entry for each of the 4 layers"),
        ({"embed_scale": 0}, "`embed_scale` must be positive, but is 0"),
        ({"rotary_dim": 10}, "`rotary_dim` must be even, positive and at most the head size 8"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LLAMA, **options)


def test_what_a_file_of_phi3_cannot_say_is_refused():
    config = Phi3Config(48, 32, 2, 4, 2, 40)
    with pytest.raises(ValueError, match="combination of options: `qkv_bias=True`"):
        write_config(dataclasses.replace(config, qkv_bias=True))
    with pytest.raises(ValueError, match="must be a `LongRope`"):
        write_config(dataclasses.replace(config, rope_scaling=Yarn(2.0, 8)))


def test_what_a_file_of_gpt_neox_cannot_say_is_refused():
    config = GPTNeoXConfig(48, 88, 2, 2, 40, rotary_dim=22)
    assert read_config(GPTNeoXConfig, write_config(config)).rotary_dim == 22
    for options, message in (
        ({"rotary_dim": 30}, "`rotary_dim` of 30 cannot be saved"),
        ({"embed_dropout": 0.1}, "are one setting of the file"),
        ({"head_bias": True}, "neither `rope_pairs` nor `head_bias`"),
    ):
        with pytest.raises(ValueError, match=message):
            write_config(dataclasses.replace(config, **options))
    with pytest.raises(ValueError, match="needs its `mlp_norm`"):
        dataclasses.replace(config, parallel=False, mlp_norm=False)


def test_distilbert_has_no_token_types_and_pools_for_a_classifier_alone():
    config = BertConfig(16, 8, 1, 2, 12, kind="distilbert", types=1, head="classification")
    for options, message in (
        ({"types": 2}, "1 token type, but `types` is 2"),
        ({"head": None, "pooler": True}, "only with the head 'classification'"),
        ({"head": "pretraining"}, "DistilBERT has no head 'pretraining'"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **options)
    settings = write_config(config)
    assert read_config(BertConfig, settings).head_dropout == 0.1
    tokens = jnp.zeros((1, 3), jnp.int32)
    model = eqx.filter_eval_shape(Bert, config, key=jax.random.key(0))
    with pytest.raises(ValueError, match="no token types, but `types` are given"):
        eqx.filter_eval_shape(lambda model: model(tokens, types=tokens), model)


def test_camembert_is_a_roberta():
    config = BertConfig(16, 8, 1, 2, 12, kind="roberta", types=1, pad=1, head="masked")
    settings = write_config(config)
    names = {"model_type": "camembert", "architectures": ["CamembertForMaskedLM"]}
    assert read_config(BertConfig, settings | names) == read_config(BertConfig, settings)


def test_what_the_first_files_of_clip_have_twice_is_that_of_the_second():
    settings = {
        "model_type": "clip",
        "architectures": ["CLIPModel"],
        "projection_dim": 768,
        "text_config": {"hidden_size": 512, "eos_token_id": 2},
        "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12},
        "vision_config": {"patch_size": 14, "image_size": 336},
        "vision_config_dict": None,
    }
    config = read_config(ClipConfig, settings)
    assert (config.text.width, config.text.heads, config.text.eos) == (768, 12, (2,))
    assert (config.image.patch, config.image.image, config.outputs) == (14, 336, 768)
    assert read_config(ClipConfig, write_config(config)) == config
    with pytest.raises(ValueError, match="`eos` must be one token"):
        dataclasses.replace(config.text, eos=())
    with pytest.raises(ValueError, match="`outputs` must be positive"):
        dataclasses.replace(config, outputs=0)


def test_a_tensor_that_is_a_single_number_keeps_its_shape(tmp_path):
    path = tmp_path / "one.safetensors"
    number = np.asarray(2.5, np.float32)
    write_safetensors(path, {"x": ((), number.dtype)}, iter([number]))
    assert read_safetensors(path)["x"].shape == ()
    assert load_file(path)["x"] == number
