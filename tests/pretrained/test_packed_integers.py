"""Files of bitsandbytes, GPTQ and AWQ: every number, also in parts, and what is refused."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import formula, uniform
from raw_files import write_raw

import redcoast as rc
from redcoast.core._pytree import leaf_paths
from redcoast.models import Llama, LlamaConfig
from redcoast.models._quantised_weight import NF4
from redcoast.pretrained._lazy_tensor import Source, Stored
from redcoast.pretrained._match import layout_of, needed_shapes
from redcoast.pretrained._quantised import dequantised
from redcoast.pretrained._registry import write_config

CONFIG = LlamaConfig(vocab=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96)
GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def integers_of(name, shape, count):
    """Integers from 0 to `count - 1`."""
    values = (uniform(name, int(np.prod(shape))) + 1) / 2 * count
    return values.astype(np.int64).clip(0, count - 1).reshape(shape)


def positive(name, shape):
    return (1.5 + uniform(name, int(np.prod(shape)))).reshape(shape).astype(np.float32)


def in_nf4(name, shape, nested):
    """Tensors of a 4-bit weight, and what they stand for."""
    codes = integers_of(name, shape, 16)
    raw = codes.reshape(-1, 2)
    blocks = codes.size // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {f"{name}.quant_map": NF4, name: (raw[:, :1] << 4 | raw[:, 1:]).astype(np.uint8)}
    scales = positive(name + "scales", (blocks,))
    tensors[f"{name}.absmax"] = scales
    if nested:
        small = integers_of(name + "absmax", (blocks,), 256).astype(np.uint8)
        values = np.linspace(-1, 1, 256, dtype=np.float32)
        of_small = positive(name + "nested", (-(-blocks // 16),))
        tensors[f"{name}.absmax"] = small
        tensors |= {f"{name}.nested_absmax": of_small, f"{name}.nested_quant_map": values}
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = values[small] * of_small[np.arange(blocks) // 16] + np.float32(0.25)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = text
    return tensors, NF4[codes] * np.repeat(scales, 64).reshape(shape)


def in_int8(name, shape):
    codes = (integers_of(name, shape, 255) - 127).astype(np.int8)
    scales, module = positive(name + "scales", shape[:1]), name.removesuffix(".weight")
    tensors = {
        name: codes,
        f"{module}.SCB": scales,
        f"{module}.weight_format": np.array([0], np.uint8),
    }
    return tensors, codes * (scales / np.float32(127))[:, None]


def packed(x, bits, axis, order=None):
    """Packs integers into int32 along an axis."""
    count = 32 // bits
    parts = np.moveaxis(x, axis, -1).reshape(*np.moveaxis(x, axis, -1).shape[:-1], -1, count)
    order = range(count) if order is None else order
    total = np.zeros(parts.shape[:-1], np.uint64)
    for i, place in enumerate(order):
        total |= parts[..., place].astype(np.uint64) << (bits * i)
    return np.moveaxis(total.astype(np.uint32).view(np.int32), -1, axis)


def in_groups(name, shape, method, bits=4, first=True, shuffled=False):
    outputs, inputs = shape
    module, groups = name.removesuffix(".weight"), inputs // GROUP
    codes = integers_of(name, (inputs, outputs), 2**bits)
    zeros = integers_of(name + "zeros", (groups, outputs), 2**bits - 1)
    scales = positive(name + "scales", (groups, outputs)).astype(np.float16)
    of_inputs = np.arange(inputs, dtype=np.int32) // GROUP
    if shuffled:
        of_inputs = np.random.default_rng(0).permutation(of_inputs)
    axis, order = (1, AWQ_ORDER) if method == "awq" else (0, None)
    tensors = {
        f"{module}.qweight": packed(codes, bits, axis, order),
        f"{module}.qzeros": packed(zeros, bits, 1, order),
        f"{module}.scales": scales,
    }
    if method == "gptq":
        tensors[f"{module}.g_idx"] = of_inputs
    offset = int(method == "gptq" and first)
    values = (codes - zeros[of_inputs] - offset) * scales.astype(np.float32)[of_inputs]
    return tensors, values.T.astype(np.float32)


FORMS = {
    "nf4": (lambda n, s: in_nf4(n, s, False), {"quant_method": "bitsandbytes"}),
    "nf4 nested": (lambda n, s: in_nf4(n, s, True), {"load_in_4bit": True}),
    "int8": (in_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "gptq": (
        lambda n, s: in_groups(n, s, "gptq", shuffled=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
    ),
    "gptq 8 bits, second format": (
        lambda n, s: in_groups(n, s, "gptq", 8, first=False),
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (
        lambda n, s: in_groups(n, s, "awq"),
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
    ),
}


def save(place, form):
    """Saves a model with quantised linear layers, and returns the values of all tensors."""
    make, quantisation = FORMS[form]
    abstract = eqx.filter_eval_shape(Llama, CONFIG, key=jax.random.key(0))
    shapes = needed_shapes(layout_of(CONFIG), leaf_paths(abstract, jax.ShapeDtypeStruct))
    tensors, values = {}, {}
    for name, shape in shapes.items():
        if "_proj" in name:
            own, values[name] = make(name, shape)
            tensors |= own
        else:
            tensors[name] = values[name] = formula(name, shape).astype(jnp.bfloat16)
    place.mkdir(parents=True)
    write_raw(place / "model.safetensors", tensors)
    settings = write_config(CONFIG) | {"quantization_config": quantisation}
    (place / "config.json").write_text(json.dumps(settings))
    return values


@pytest.mark.few("gptq")
@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_read_also_in_parts(form, tmp_path):
    values = save(tmp_path / "quantised", form)
    plain = {name: x.astype(jnp.bfloat16) for name, x in values.items()}
    (tmp_path / "plain").mkdir()
    write_raw(tmp_path / "plain/model.safetensors", plain)
    (tmp_path / "plain/config.json").write_text(json.dumps(write_config(CONFIG)))
    loaded, expected = (rc.load_pretrained(tmp_path / name) for name in ("quantised", "plain"))
    assert loaded.layers.gate.dtype == jnp.bfloat16  # that of the other tensors
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    sharded = rc.load_pretrained(tmp_path / "quantised", mesh=rc.make_mesh(fsdp=2, model=4))
    jax.tree.map(np.testing.assert_array_equal, sharded, expected)


def stored(tensors):
    def make(x):
        def read(box, out):
            out[...] = x[box]

        return Stored(x.shape, x.dtype, read)

    return {name: make(np.asarray(x)) for name, x in tensors.items()}


@pytest.mark.parametrize("form", FORMS)
def test_any_part_of_a_weight_is_read(form):
    make, quantisation = FORMS[form]
    tensors, values = make("a.weight", (64, 96))
    source = Source({"quantization_config": quantisation}, stored(tensors))
    read = dequantised(source, np.dtype(np.float32), "here").stored
    assert read.keys() == {"a.weight"}
    weight = read["a.weight"]
    for box in ((slice(0, 64), slice(0, 96)), (slice(3, 42), slice(7, 58))):
        np.testing.assert_array_equal(weight.take(box), values[box])


@pytest.mark.parametrize(
    ("form", "name", "change", "words"),
    [
        ("nf4", ".absmax", lambda x: x[:-1], "has 95 scales, but 96 blocks"),
        ("nf4", ".quant_map", lambda x: None, "a.weight.quant_map is missing"),
        ("nf4", "__nf4", lambda x: x[:9], "does not describe a weight"),
        ("nf4 nested", ".nested_absmax", lambda x: x[:1], "does not match its own scales"),
        ("int8", ".SCB", lambda x: x[:3], r"has scales of shape \(3,\)"),
        ("gptq", ".g_idx", lambda x: x + 2, "g_idx does not give each of 96 inputs one of 3"),
        ("gptq", ".qzeros", lambda x: x[:, :1], r"has zeros of shape \(3, 1\)"),
        ("awq", ".scales", lambda x: None, "a.scales is missing"),
    ],
)
def test_tensors_that_do_not_match_are_refused(form, name, change, words):
    make, quantisation = FORMS[form]
    tensors = {
        key: change(x) if key.endswith(name) else x
        for key, x in make("a.weight", (64, 96))[0].items()
    }
    tensors = {key: x for key, x in tensors.items() if x is not None}
    with pytest.raises(ValueError, match=f"^here has weights .*cannot be read: .*{words}"):
        dequantised(Source({"quantization_config": quantisation}, stored(tensors)), None, "here")
