"""Published weights to models: every number where it belongs, and every mismatch named."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from published import formula, write_weights
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast.models import GPT2, GPT2Config, Llama, LlamaConfig
from redcoast.pretrained import _load as loading
from redcoast.pretrained._match import Layout, layout_of, match, needed_shapes
from redcoast.pretrained._read_to_device import fill_device, fill_host
from redcoast.pretrained._registry import find_family, read_config, write_config
from redcoast.pretrained._safetensors import read_safetensors

SETTINGS = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SHAPES = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,)}
SHAPES |= {"lm_head.weight": (96, 64)}
LAYER = {
    **{f"self_attn.{x}_proj.weight": (64, 64) for x in "qo"},
    **{f"self_attn.{x}_proj.weight": (32, 64) for x in "kv"},
    **{f"mlp.{x}_proj.weight": (128, 64) for x in ("gate", "up")},
    "mlp.down_proj.weight": (64, 128),
    **{f"{x}_layernorm.weight": (64,) for x in ("input", "post_attention")},
}
SHAPES |= {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in LAYER.items()}


def expected():
    """The arrays of the model, transposed as its equations have them."""
    one = lambda name: formula(name, SHAPES[name])
    stack = lambda name: np.stack([one(f"model.layers.{i}.{name}") for i in range(3)])
    into = lambda x: stack(f"self_attn.{x}_proj.weight").reshape(3, -1, 8, 64)
    turned = lambda x: stack(f"mlp.{x}_proj.weight").swapaxes(1, 2)
    return {
        "embed": one("model.embed_tokens.weight"),
        "layers/attention_norm": stack("input_layernorm.weight"),
        "layers/wq": into("q").transpose(0, 3, 1, 2),
        "layers/wk": into("k").transpose(0, 3, 1, 2),
        "layers/wv": into("v").transpose(0, 3, 1, 2),
        "layers/wo": stack("self_attn.o_proj.weight").swapaxes(1, 2).reshape(3, 8, 8, 64),
        "layers/mlp_norm": stack("post_attention_layernorm.weight"),
        "layers/gate": turned("gate"),
        "layers/up": turned("up"),
        "layers/down": turned("down"),
        "norm": one("model.norm.weight"),
        "head": one("lm_head.weight").T,
    }


@pytest.fixture
def directory(tmp_path):
    return write(tmp_path / "model")


def write(path, shapes=SHAPES, settings=SETTINGS):
    path.mkdir()
    write_weights(path, shapes)
    (path / "config.json").write_text(json.dumps(settings))
    return path


def rewrite(path, **changes):
    """Changes tensors of a directory; `None` removes one."""
    tensors = load_file(path / "model.safetensors") | changes
    tensors = {name: x for name, x in tensors.items() if x is not None}
    save_file(tensors, path / "model.safetensors")


def show(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_of(tree):
    return {show(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def abstract_model():
    config = read_config(LlamaConfig, SETTINGS)
    return eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))


def check(model, dtype=np.float32):
    leaves = leaves_of(model)
    for path, x in expected().items():
        assert leaves[path].dtype == dtype
        np.testing.assert_array_equal(np.asarray(leaves[path]), x.astype(dtype), err_msg=path)
    assert leaves.keys() == expected().keys()


@pytest.mark.thorough
def test_a_directory_on_one_device(directory):
    model = rc.load_pretrained(directory)
    check(model)
    assert isinstance(model, Llama)
    assert model.config == read_config(LlamaConfig, SETTINGS)
    assert {x.sharding for x in jax.tree.leaves(model)} == {jnp.zeros(()).sharding}
    assert model(jnp.zeros((2, 3), jnp.int32)).shape == (2, 3, 96)


@pytest.mark.few("sizes0")
@pytest.mark.parametrize("sizes", [{"model": 4}, {"fsdp": 8}, {"fsdp": 2, "model": 2}])
def test_a_mesh_gets_the_plan_of_the_forward_pass(directory, sizes):
    mesh = rc.make_mesh(**sizes)
    model = rc.load_pretrained(directory, mesh=mesh)
    check(model)
    tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    plan = rc.infer_shardings(abstract_model(), mesh, fn=lambda m, x: m(x), args=(tokens,))
    assert [x.sharding for x in jax.tree.leaves(model)] == jax.tree.leaves(plan)
    assert not model.layers.gate.sharding.is_fully_replicated


def test_a_mesh_of_one_device(directory):
    mesh = rc.make_mesh(devices=jax.devices()[3:4])
    model = rc.load_pretrained(directory, mesh=mesh)
    check(model)
    assert {x.sharding for x in jax.tree.leaves(model)} == {NamedSharding(mesh, P())}


# What is split, however it lies in its tensor: whole heads, parts of them, rows and columns.
SPECS = {
    "layers/wq": P(None, None, "model"),
    "layers/wk": P(None, ("data", "model")),
    "layers/wv": P(None, "data", None, "model"),
    "layers/wo": P(None, None, "model"),
    "layers/gate": P(None, "model", "data"),
    "layers/up": P(None, None, ("model", "data")),
    "embed": P("model", "data"),
}


@pytest.mark.parametrize(
    ("fill", "most"),
    [(fill_host, n) for n in (60, 999, 10**6)] + [(fill_device, n) for n in (4000, 10**6)],
)
@pytest.mark.few("fill_host-999", "fill_device-4000")
def test_shardings_as_they_are_given_and_pieces_of_any_size(directory, monkeypatch, fill, most):
    monkeypatch.setattr(loading, "fill_host", fill)
    monkeypatch.setattr(loading, "_piece_elements", lambda *_: most)
    mesh = rc.make_mesh(model=4)
    place = lambda path, x: NamedSharding(mesh, SPECS.get(show(path), P()))
    shardings = jax.tree_util.tree_map_with_path(place, abstract_model())
    model = rc.load_pretrained(directory, shardings=shardings)
    check(model)
    assert [x.sharding for x in jax.tree.leaves(model)] == jax.tree.leaves(shardings)


def test_files_of_several_parts(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {f"model-{k + 1:05}-of-00003.safetensors": names[k::3] for k in range(3)}
    for file, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, directory / file)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    check(rc.load_pretrained(directory, mesh=rc.make_mesh(model=4)))
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks files.*model-00002-of-00003"):
        rc.load_pretrained(directory)


def cast(directory, dtype, **others):
    """Changes the dtype of all tensors, and of some to others."""
    tensors = load_file(directory / "model.safetensors")
    kinds = {name: others.get(name.split(".")[-2], dtype) for name in tensors}
    rewrite(directory, **{name: x.astype(kinds[name]) for name, x in tensors.items()})


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", few_of([jnp.bfloat16, jnp.float16], jnp.bfloat16))
@pytest.mark.parametrize("fill", [fill_host, fill_device])
def test_half_precision_stays_what_it_is(directory, monkeypatch, dtype, fill):
    monkeypatch.setattr(loading, "fill_host", fill)
    monkeypatch.setattr(loading, "_piece_elements", lambda *_: 2000)
    cast(directory, dtype)
    check(rc.load_pretrained(directory, mesh=rc.make_mesh(model=4)), dtype)


@pytest.mark.parametrize("fill", [fill_host, fill_device])
def test_a_dtype_that_is_asked_for(directory, monkeypatch, fill):
    monkeypatch.setattr(loading, "fill_host", fill)
    monkeypatch.setattr(loading, "_piece_elements", lambda *_: 2000)
    check(rc.load_pretrained(directory, dtype="bfloat16"), jnp.bfloat16)
    with pytest.raises(ValueError, match="floating type.*int32"):
        rc.load_pretrained(directory, dtype=jnp.int32)


def test_options_are_those_of_the_configuration(directory):
    plain, other = rc.load_pretrained(directory), rc.load_pretrained(directory, remat="full")
    assert (plain.config.remat, other.config.remat) == ("none", "full")
    assert other.config == dataclasses.replace(plain.config, remat="full")
    assert eqx.tree_equal(jax.tree.leaves(plain), jax.tree.leaves(other))
    words = r"LlamaConfig has no field rematerialise\. It has: remat, .* vocab"
    with pytest.raises(TypeError, match=words):
        rc.load_pretrained(directory, rematerialise=True)
    with pytest.raises(ValueError, match="does not hold the tensors of the model"):
        rc.load_pretrained(directory, width=48)


def test_float64_is_what_jax_makes_of_it(directory):
    cast(directory, np.float64)
    check(rc.load_pretrained(directory))


def test_of_several_dtypes_the_one_of_most_bytes(directory):
    cast(directory, jnp.bfloat16, norm=np.float32, input_layernorm=np.float32)
    model = rc.load_pretrained(directory)
    assert {x.dtype for x in jax.tree.leaves(model)} == {np.dtype(jnp.bfloat16)}
    # Layers of one array may differ, too.
    first = "model.layers.0.mlp.up_proj.weight"
    up = load_file(directory / "model.safetensors")[first]
    rewrite(directory, **{first: up.astype(np.float32)})
    check(rc.load_pretrained(directory), jnp.bfloat16)


def test_all_that_does_not_fit_is_listed_at_once(directory):
    tensors = load_file(directory / "model.safetensors")
    rewrite(
        directory,
        **{"model.layers.2.self_attn.v_proj.weight": None, "model.norm.weight": None},
        **{"lm_head.bias": np.zeros(96, np.float32), "score.weight": np.zeros(3, np.float32)},
        **{"model.layers.0.mlp.up_proj.weight": np.zeros((64, 128), np.float32)},
        **{"lm_head.weight": tensors["lm_head.weight"].astype(np.int8)},
    )
    with pytest.raises(ValueError, match="does not hold the tensors of the model") as caught:
        rc.load_pretrained(directory)
    message = str(caught.value)
    assert str(directory) in message
    missing, unexpected, misshapen = (
        message.index(word) for word in ("Missing: ", "Unexpected: ", "Misshapen: ")
    )
    assert missing < message.index("model.layers.2.self_attn.v_proj.weight") < unexpected
    assert missing < message.index("model.norm.weight") < unexpected
    assert unexpected < message.index("lm_head.bias") < message.index("score.weight") < misshapen
    assert "model.layers.0.mlp.up_proj.weight ((64, 128) of float32, expected (128, 64))" in message
    assert "lm_head.weight ((96, 64) of int8" in message
    assert message.count("model.layers.") == 2


def test_a_base_alone_with_buffers_and_a_head_that_is_tied(tmp_path):
    config = GPT2Config(vocab=24, width=16, layers=2, heads=4, hidden=32, positions=8)
    abstract = eqx.filter_eval_shape(GPT2, config, key=jax.random.key(0))
    shapes = needed_shapes(layout_of(config), leaves_of(abstract))
    write(tmp_path / "whole", shapes, write_config(config))
    model = rc.load_pretrained(tmp_path / "whole")
    file = tmp_path / "whole" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    assert tensors.keys().isdisjoint(shapes)
    tensors |= {f"h.{i}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for i in range(2)}
    tensors |= {"h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    save_file(tensors, file)
    same = lambda: jax.tree.map(
        np.testing.assert_array_equal, rc.load_pretrained(tmp_path / "whole"), model
    )
    same()
    save_file(tensors | {"lm_head.weight": tensors["wte.weight"]}, file)
    same()
    other = tensors["wte.weight"].copy()
    other[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": other}, file)
    with pytest.raises(ValueError, match="duplicate: lm_head.weight .of transformer.wte.weight"):
        rc.load_pretrained(tmp_path / "whole")
    del tensors["wte.weight"]
    save_file(tensors | {"lm_head.weight": other}, file)
    embed = rc.load_pretrained(tmp_path / "whole").embed
    np.testing.assert_array_equal(np.asarray(embed), other)


def test_files_of_a_llama_may_lack_the_prefix_and_hold_copies_and_frequencies(tmp_path):
    """As the files of embedding models, of tied heads, and of the first models are."""
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    path = write(tmp_path / "model", shapes, SETTINGS | {"tie_word_embeddings": True})
    model = rc.load_pretrained(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    frequencies = {f"layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(3)}
    base = {name.removeprefix("model."): x for name, x in tensors.items()}
    again = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    for found in (base | frequencies, tensors | again):
        save_file(found, file)
        jax.tree.map(np.testing.assert_array_equal, rc.load_pretrained(path), model)
    (path / "config.json").write_text(json.dumps(SETTINGS))
    save_file(base, file)
    with pytest.raises(ValueError, match="Missing: lm_head.weight"):
        rc.load_pretrained(path)


BASE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("scaling", "parameters", "found"),
    [
        (None, BASE | {"rope_type": "linear", "factor": 4.0}, ("linear", 4.0)),
        ({"type": "linear", "factor": 2.0}, BASE, ("linear", 2.0)),
        ({"rope_type": "linear", "factor": 2.0}, BASE, ("linear", 2.0)),
    ],
)
def test_rotary_embeddings_are_scaled_whichever_setting_says_so(scaling, parameters, found):
    """`transformers` prefers the older name if a file has both."""
    options = {"rope_scaling": scaling, "rope_parameters": parameters}
    config = read_config(LlamaConfig, SETTINGS | options)
    assert config.rope_base == 500.0
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == found


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"sliding_window": 8}, None),
        ({"sliding_window": 8, "use_sliding_window": True}, None),  # from layer 28 on
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096),
    ],
)
def test_windows_of_qwen_begin_after_some_layers(settings, window):
    config = read_config(LlamaConfig, SETTINGS | {"model_type": "qwen2", **settings})
    assert config.window == window
    partial = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}
    with pytest.raises(ValueError, match="gives only some layers a sliding window"):
        read_config(LlamaConfig, SETTINGS | partial)


def test_tokens_that_a_file_leaves_out_are_those_of_transformers():
    config = read_config(LlamaConfig, SETTINGS)
    assert (config.bos, config.eos) == (1, (2,))
    config = read_config(LlamaConfig, SETTINGS | {"bos_token_id": None, "eos_token_id": None})
    assert (config.bos, config.eos) == (None, ())


def test_tensors_that_a_file_may_lack_are_zero(directory):
    stored = read_safetensors(directory / "model.safetensors")
    layout = Layout({}, zeros=("bias",))
    needed = {"model.norm.weight": (64,), "bias": (3, 4)}
    found = match(layout, needed, {"model.norm.weight": stored["model.norm.weight"]}, directory)
    zeros = found["bias"].take((slice(0, 2), slice(1, 4)))
    np.testing.assert_array_equal(zeros, np.zeros((2, 3), np.float32))


def test_settings_that_are_not_known(tmp_path):
    path = write(tmp_path / "model", settings=SETTINGS | {"logit_magic": 2})
    with pytest.raises(ValueError, match=f"{path}.*logit_magic"):
        rc.load_pretrained(path)
    (path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="type 'mamba', .* not supported. .* llama,"):
        rc.load_pretrained(path)


@pytest.mark.parametrize("kind", ["bloom", "lama", None, ["bloom"]])
def test_types_are_refused_with_those_that_are_supported(kind):
    """And with no type whose name is similar: its arithmetic may be another one."""
    words = f"type {re.escape(repr(kind))}, which is not supported. Supported types: bart, bert, "
    with pytest.raises(ValueError, match=f"^here holds a model of {words}"):
        find_family({"model_type": kind}, "here")


def test_pickles_are_not_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ValueError, match="pytorch_model.bin.*runs.*save_pretrained"):
            rc.load_pretrained(path)


def test_places_without_a_model(tmp_path, directory):
    with pytest.raises(FileNotFoundError, match="nothing at .*no-such.*on this machine"):
        rc.load_pretrained(tmp_path / "no-such")
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        rc.load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a directory .* nor a `.gguf` file"):
        rc.load_pretrained(directory / "config.json")
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        rc.load_pretrained(directory)


@pytest.mark.parametrize("kept", [3, 40, 900, -4])
def test_files_that_are_cut_short(directory, kept):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        rc.load_pretrained(directory)


def test_shardings_that_do_not_fit(directory):
    mesh = rc.make_mesh(model=4)
    shardings = rc.infer_shardings(abstract_model(), mesh)
    with pytest.raises(ValueError, match="another mesh"):
        rc.load_pretrained(directory, mesh=rc.make_mesh(fsdp=8), shardings=shardings)
    with pytest.raises(ValueError, match="one sharding for each.*norm.*is in only one of the two"):
        rc.load_pretrained(directory, shardings=eqx.tree_at(lambda m: m.norm, shardings, None))
    half = NamedSharding(rc.make_mesh(devices=jax.devices()[:4], model=4), P())
    with pytest.raises(ValueError, match="several sets of devices"):
        rc.load_pretrained(directory, shardings=eqx.tree_at(lambda m: m.norm, shardings, half))
