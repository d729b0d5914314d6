"""Files of FP8 and MXFP4: every number, only the bytes of each part, and what is refused."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from published import formula, uniform
from raw_files import write_raw
from safetensors.numpy import load_file

import redcoast as rc
from redcoast.core._pytree import leaf_paths
from redcoast.models import GptOss, GptOssConfig, Llama, LlamaConfig
from redcoast.pretrained import _load as loading
from redcoast.pretrained._lazy_tensor import Source, Stored
from redcoast.pretrained._match import layout_of, needed_shapes
from redcoast.pretrained._quantised import dequantised
from redcoast.pretrained._read_to_device import fill_device, fill_host
from redcoast.pretrained._registry import find_family, write_config
from redcoast.pretrained._safetensors import read_safetensors
from redcoast.pretrained._source import open_source

LLAMA = LlamaConfig(vocab=32, width=48, layers=2, heads=4, kv_heads=2, hidden=80)
GPT_OSS = GptOssConfig(
    vocab=32, width=64, layers=2, heads=4, kv_heads=2, hidden=32, experts=3, chosen=2
)
E4M3, E5M2, E8M0 = (np.dtype(x) for x in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu))
SIXTEEN = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
GROUP = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of models in bfloat16."""
    place = tmp_path_factory.mktemp("models")
    for name, kind, config in (("llama", Llama, LLAMA), ("gpt_oss", GptOss, GPT_OSS)):
        (place / name).mkdir()
        abstract = eqx.filter_eval_shape(kind, config, key=jax.random.key(0))
        leaves = leaf_paths(abstract, jax.ShapeDtypeStruct)
        shapes = needed_shapes(layout_of(config), leaves)
        tensors = {name: formula(name, x).astype(jnp.bfloat16) for name, x in shapes.items()}
        write_raw(place / name / "model.safetensors", tensors)
        (place / name / "config.json").write_text(json.dumps(write_config(config)))
    return place


def requantised(directory, place, change, **quantisation):
    """A copy of a directory in which `change` makes several tensors of some."""
    place.mkdir()
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = quantisation
    (place / "config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, x in load_file(directory / "model.safetensors").items():
        tensors |= change(name, x) or {name: x}
    write_raw(place / "model.safetensors", tensors)
    return tensors


def bytes_of(name, shape):
    """Bytes of numbers in FP8, none of which is infinite or no number."""
    return (np.abs(uniform(name, int(np.prod(shape)))) * 119).astype(np.uint8).reshape(shape)


def scales_of(name, shape):
    return (1 + uniform(name, max(1, int(np.prod(shape)))).reshape(shape)).astype(np.float32)


def ceil(n, size):
    return -(-n // size)


# The names and the shapes of the scales of a weight (rows, columns), their dtype, and settings.
FORMS = {
    "blocks": (
        "{}_scale_inv",
        lambda n, m: (ceil(n, 32), ceil(m, 32)),
        np.float32,
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    ),
    "one number": (
        "{}_scale_inv",
        lambda n, m: (),
        jnp.bfloat16,
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    ),
    "one number of shape 1": ("{}_scale", lambda n, m: (1,), np.float32, {"quant_method": "fp8"}),
    "rows": (
        "{}_scale",
        lambda n, m: (n, 1),
        np.float32,
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}},
    ),
    "rows without columns": (
        "{}_scale",
        lambda n, m: (n,),
        np.float32,
        {"quant_method": "fbgemm_fp8"},
    ),
    "exponents of groups": (
        "{}_scale_inv",
        lambda n, m: (n, m // 16),
        np.uint8,
        {"quant_method": "mxfp8", "weight_block_size": [1, 16]},
    ),
    "exponents of blocks": (
        "{}_scale_inv",
        lambda n, m: (ceil(n, 32), ceil(m, 32)),
        E8M0,
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    ),
    "of nvidia": (
        "{}_scale",
        lambda n, m: (),
        np.float32,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
}


def in_fp8(form, dtype=E4M3):
    """Changes linear layers: makes numbers of bytes, with scales, and scales of activations."""
    pattern, grid, kind, _ = FORMS[form]

    def change(name, x):
        if "_proj" not in name:
            return {}
        scale = scales_of(name, grid(*x.shape))
        scale = (125 + 4 * scale).astype(np.uint8) if np.dtype(kind).itemsize == 1 else scale
        scale = scale.view(kind) if np.dtype(kind) == E8M0 else scale.astype(kind)
        weight = bytes_of(name, x.shape).view(dtype)
        others = {name.replace("weight", "input_scale"): np.ones((), np.float32)}
        return {name: weight, pattern.format(name): scale} | others

    return change


def expected_fp8(form, tensors, name, shape, dtype):
    """Numbers times scales that are repeated to the size of the weight."""
    pattern, grid, _, settings = FORMS[form]
    scale = tensors[pattern.format(name)]
    if scale.dtype in (np.uint8, E8M0):
        scale = 2.0 ** (scale.view(np.uint8).astype(np.float64) - 127)
    scale = scale.astype(np.float64).reshape(grid(*shape) or (1, 1))
    if scale.ndim == 1:
        scale = scale[:, None]
    sizes = settings.get("weight_block_size") or [
        n // count for n, count in zip(shape, scale.shape, strict=True)
    ]
    for axis, size in enumerate(sizes):
        scale = scale.repeat(size, axis).take(range(shape[axis]), axis)
    return (tensors[name].astype(np.float64) * scale).astype(np.float32).astype(dtype)


def saved_tensors(model, place):
    rc.save_pretrained(model, place)
    settings = json.loads((place / "config.json").read_text())
    assert "quantization_config" not in settings
    return load_file(place / "model.safetensors")


@pytest.mark.few("blocks")
@pytest.mark.parametrize("form", FORMS)
def test_fp8_is_numbers_times_scales(form, saved, tmp_path):
    """And what is loaded is saved as an ordinary model."""
    tensors = requantised(saved / "llama", tmp_path / "fp8", in_fp8(form), **FORMS[form][-1])
    model = rc.load_pretrained(tmp_path / "fp8")
    assert model.config == LLAMA
    saved_again = saved_tensors(model, tmp_path / "again")
    plain = load_file(saved / "llama/model.safetensors")
    assert saved_again.keys() == plain.keys()
    for name, x in plain.items():
        if "_proj" in name:
            x = expected_fp8(form, tensors, name, x.shape, jnp.bfloat16)
        assert saved_again[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(saved_again[name].view(np.uint16), x.view(np.uint16))


def test_products_are_rounded_once_to_the_dtype_that_is_asked_for(saved, tmp_path):
    form = "blocks"
    tensors = requantised(saved / "llama", tmp_path / "fp8", in_fp8(form, E5M2), **FORMS[form][-1])
    name = "model.layers.1.mlp.up_proj.weight"
    for dtype in (np.float32, np.float16):
        loaded = rc.load_pretrained(tmp_path / "fp8", dtype=dtype).layers.up[1].T
        with np.errstate(over="ignore"):
            expected = expected_fp8(form, tensors, name, loaded.shape, dtype)
        np.testing.assert_array_equal(loaded, expected)


def test_scales_do_not_choose_the_dtype():
    """It is the one of the tensors that are not quantised, of however few bytes."""

    def stored(x):
        return Stored(x.shape, x.dtype, lambda box, out: np.copyto(out, x[box]))

    tensors = {
        "a.weight": stored(np.ones((8, 8), E4M3)),
        "a.weight_scale": stored(np.ones((8, 8), np.float32)),
        "a.input_scale": stored(np.ones(8, np.float32)),
        "norm.weight": stored(np.ones(8, np.float16)),
    }
    source = Source({"quantization_config": {"quant_method": "fbgemm_fp8"}}, tensors)
    read = dequantised(source, None, "here").stored
    assert {name: x.dtype for name, x in read.items()} == {
        "a.weight": np.float16,
        "norm.weight": np.float16,
    }


def in_mxfp4(name, x):
    """Changes the weights of experts (experts, inputs, outputs)."""
    if x.ndim != 3:
        return {}
    experts, inputs, outputs = x.shape
    shape = (experts, outputs, inputs // 32, 16)
    blocks = ((uniform(name, int(np.prod(shape))) + 1) * 127.9).astype(np.uint8).reshape(shape)
    scales = (125 + 4 * scales_of(name, shape[:-1])).astype(np.uint8)
    scales[0, 0, 0], scales[0, 1, 0] = 0, 254  # the ends of the range
    return {name + "_blocks": blocks, name + "_scales": scales}


def expected_mxfp4(tensors, name):
    blocks, scales = (tensors[f"{name}_{part}"] for part in ("blocks", "scales"))
    numbers = np.array(SIXTEEN)[np.stack([blocks % 16, blocks // 16], axis=-1)]
    powers = 2.0 ** (scales.astype(np.float64) - 127)
    values = numbers.reshape(*scales.shape, 32) * powers[..., None]
    values = values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)
    with np.errstate(over="ignore"):
        return values.astype(jnp.bfloat16)


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@pytest.mark.thorough
@pytest.mark.parametrize(("fill", "most"), [(fill_host, 700), (fill_device, 3000)])
def test_mxfp4_on_a_mesh_and_in_pieces(fill, most, saved, tmp_path, monkeypatch):
    """Pieces begin and end inside of groups, and each device has a part of them."""
    tensors = requantised(saved / "gpt_oss", tmp_path / "mxfp4", in_mxfp4, **MXFP4)
    monkeypatch.setattr(loading, "fill_host", fill)
    monkeypatch.setattr(loading, "_piece_elements", lambda *_: most)
    mesh = rc.make_mesh(model=4)
    abstract = jax.eval_shape(lambda: GptOss(GPT_OSS, key=jax.random.key(0)))
    specs = {(2, 3, 64, 32): P(None, None, "data", "model"), (2, 3, 32, 64): P(None, None, "model")}
    place = lambda x: NamedSharding(mesh, specs.get(x.shape, P()))
    model = rc.load_pretrained(tmp_path / "mxfp4", shardings=jax.tree.map(place, abstract))
    saved_again = saved_tensors(model, tmp_path / "again")
    for i in range(2):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{i}.mlp.experts.{part}"
            expected = expected_mxfp4(tensors, name).view(np.uint16)
            np.testing.assert_array_equal(saved_again[name].view(np.uint16), expected)


class Counted:
    """Tensors in files, and how many of their bytes were read."""

    def __init__(self, stored):
        self.bytes = 0
        self.stored = {
            name: dataclasses.replace(x, read=self.read(x)) for name, x in stored.items()
        }

    def read(self, x: Stored):
        def read(box, out):
            self.bytes += out.nbytes
            x.read(box, out)

        return read


def test_only_the_bytes_of_a_part_are_read(saved, tmp_path):
    requantised(saved / "gpt_oss", tmp_path / "mxfp4", in_mxfp4, **MXFP4)
    counted = Counted(open_source(tmp_path / "mxfp4").stored)
    source = dequantised(Source({"quantization_config": MXFP4}, counted.stored), None, "here")
    down = source.stored["model.layers.0.mlp.experts.gate_up_proj"]  # 64 inputs are 2 groups
    down.take(np.s_[1:2, 32:64, 8:16])
    assert counted.bytes == 8 * (16 + 1)

    requantised(saved / "llama", tmp_path / "fp8", in_fp8("blocks"), **FORMS["blocks"][-1])
    counted = Counted(open_source(tmp_path / "fp8").stored)
    settings = {"quantization_config": FORMS["blocks"][-1]}
    source = dequantised(Source(settings, counted.stored), None, "here")
    source.stored["model.layers.0.mlp.up_proj.weight"].take(np.s_[40:60, 16:48])
    assert counted.bytes == 20 * 32 + 4 * 1 * 2


def test_bytes_of_a_file_are_read_in_any_part(tmp_path):
    x = bytes_of("x", (5, 7, 3)).view(E4M3)
    exponents = np.arange(4, dtype=np.uint8).view(E8M0)
    write_raw(tmp_path / "x.safetensors", {"x": x, "e": exponents, "none": x[:0]})
    stored = read_safetensors(tmp_path / "x.safetensors")
    for box in (np.s_[0:5, 0:7, 0:3], np.s_[2:4, 1:6, 1:2]):
        np.testing.assert_array_equal(stored["x"].take(box).view(np.uint8), x[box].view(np.uint8))
    np.testing.assert_array_equal(stored["e"].take(np.s_[1:3,]).view(np.uint8), [1, 2])
    assert stored["none"].shape == (0, 7, 3)


def test_tensors_that_do_not_match_are_named(saved, tmp_path):
    def without_scales(name, x):
        return {k: v for k, v in in_fp8("rows")(name, x).items() if not k.endswith("_scale")}

    requantised(saved / "llama", tmp_path / "a", without_scales, quant_method="fp8")
    with pytest.raises(ValueError, match=r"a has weights in FP8.*down_proj.weight of float8_e"):
        rc.load_pretrained(tmp_path / "a")

    def other_scales(name, x):
        return in_fp8("rows")(name, x) | (
            {name + "_scale": np.ones((7, 3), np.float32)} if "_proj" in name else {}
        )

    requantised(saved / "llama", tmp_path / "b", other_scales, quant_method="fp8")
    with pytest.raises(ValueError, match=r"of shape \(48, 80\) has scales of shape \(7, 3\) o"):
        rc.load_pretrained(tmp_path / "b")

    def without_exponents(name, x):
        return {k: v for k, v in in_mxfp4(name, x).items() if "scales" not in k}

    requantised(saved / "gpt_oss", tmp_path / "c", without_exponents, **MXFP4)
    with pytest.raises(ValueError, match=r"down_proj_blocks needs scales of shape \(3, 64, 1\)"):
        rc.load_pretrained(tmp_path / "c")


INT4 = {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq .`bits` is 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq .*'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq .`version` is 'gemv'"),
        ({"quant_method": "hqq"}, "hqq. This is not supported"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": INT4}},
            "compressed-tensors .the weights of `group_0` are int of 4 bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": GROUP},
                "transform_config": {"R1": 1},
            },
            "compressed-tensors .`transform_config` is",
        ),
        (
            {"quant_method": "compressed-tensors"},
            ".without `config_groups`",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "modelopt .`quant_algo` is 'NVFP4'",
        ),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8 .`expert_dtype` is 'fp4'"),
        ({"quant_method": ["fp8"]}, ".'fp8'.. This is not"),
        ("?", "an unnamed method. This is not"),
    ],
)
def test_other_methods_are_refused_with_what_to_do(quantisation, words):
    settings = write_config(LLAMA) | {"quantization_config": quantisation}
    with pytest.raises(ValueError, match=f"^here .* quantised with .*{words}.*made from, or a"):
        find_family(settings, "here")


@pytest.mark.parametrize("part", [True, False])
def test_language_models_in_others_are_dequantised(part, saved, tmp_path):
    """Whether the quantisation is described for all of the file, or for this part."""
    form = FORMS["one number"]
    wrapped = lambda name: "model.language_model." + name.removeprefix("model.")

    def change(name, x):
        own = in_fp8("one number")(name, x) or {name: x}
        return {wrapped(name) if "lm_head" not in name else name: x for name, x in own.items()}

    requantised(saved / "llama", tmp_path / "fp8", change, **form[-1])
    requantised(saved / "llama", tmp_path / "plain", in_fp8("one number"), **form[-1])
    file = tmp_path / "fp8/config.json"
    text = json.loads(file.read_text())
    outer = {"quantization_config": text["quantization_config"], "model_type": "llava"}
    if not part:
        del text["quantization_config"]
    settings = {"model_type": "llava"} if part else outer
    file.write_text(json.dumps(settings | {"text_config": text}))
    loaded, expected = (rc.load_pretrained(tmp_path / name) for name in ("fp8", "plain"))
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
