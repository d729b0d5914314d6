"""How much memory the host needs to load a model, measured in a process of its own."""

import json
import shutil
import subprocess
import sys
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from raw_files import write_raw

from redcoast.core._pytree import leaf_paths
from redcoast.models import Llama, LlamaConfig
from redcoast.pretrained._match import layout_of, needed_shapes
from redcoast.pretrained._registry import write_config
from redcoast.pretrained._safetensors import write_safetensors

LARGEST = 10_000 * 2048 * 4
MEMORY = """
import json, sys
from pathlib import Path
import jax, numpy as np
import redcoast as rc
from redcoast.pretrained import _load as load, _read_to_device as fill_device

# What goes to an accelerator in pieces stays in the host's memory here, too.
if sys.argv[3] == "as accelerators":
    load.fill_host = fill_device.fill_device

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

path, mesh = sys.argv[1], json.loads(sys.argv[2])
mesh = rc.make_mesh(**mesh) if mesh else None
jax.numpy.zeros(()).block_until_ready()
before = status("VmRSS")
options = {"quantise": sys.argv[4]} if sys.argv[4] else {}
model = jax.block_until_ready(rc.load_pretrained(path, mesh=mesh, **options))
show = lambda p: jax.tree_util.keystr(p, simple=True, separator="/")
leaves = [(show(p), x) for p, x in jax.tree_util.tree_leaves_with_path(model)]
# Devices of this kind may share memory: each address counts once.
shards = [s.data for x in jax.tree.leaves(model) for s in x.addressable_shards]
sizes = {s.unsafe_buffer_pointer(): s.nbytes for s in shards}
above = status("VmHWM") - before - sum(sizes.values())
corners = {p: np.asarray(x[..., -3:]).reshape(-1, 3)[-1].tolist() for p, x in leaves}
print(json.dumps({"above": above, "held": sum(sizes.values()), "corners": corners}))
"""


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory):
    """A checkpoint of a gigabyte, of which the largest tensor has 82 MB, written as it is made."""
    path = tmp_path_factory.mktemp("large") / "model"
    path.mkdir()
    config = LlamaConfig(
        vocab=10_000, width=2048, layers=5, heads=16, kv_heads=16, hidden=5504, tied=True
    )
    abstract = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))
    shapes = needed_shapes(layout_of(config), leaf_paths(abstract, jax.ShapeDtypeStruct))
    kinds = {name: (shape, np.dtype(np.float32)) for name, shape in shapes.items()}
    arrays = (ramp(name, shape) for name, shape in shapes.items())
    write_safetensors(path / "model.safetensors", kinds, arrays)
    (path / "config.json").write_text(json.dumps(write_config(config)))
    yield path
    shutil.rmtree(path)


def ramp(name, shape):
    """Numbers that tell tensors, rows and columns apart, and take no time to make."""
    rows = np.arange(shape[0], dtype=np.float32) + zlib.crc32(name.encode()) % 997
    columns = np.linspace(0, 1, shape[-1], dtype=np.float32)
    return rows if len(shape) == 1 else rows[:, None] + columns


def measure(path, mesh, how, quantise=""):
    arguments = [str(path), json.dumps(mesh), how, quantise]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("mesh", "how"),
    [({}, "as CPU devices"), ({"model": 4}, "as CPU devices"), ({}, "as accelerators")],
)
@pytest.mark.integration
def test_the_host_needs_little_more_than_the_devices_hold(gigabyte, mesh, how):
    assert (gigabyte / "model.safetensors").stat().st_size > 1e9
    actual = measure(gigabyte, mesh, how)
    assert actual["held"] > 0.99e9
    assert actual["above"] < 1.5 * LARGEST
    corner = lambda name, *shape: ramp(f"model.{name}.weight", shape)[-3:, -3:]
    up, wo = "layers.4.mlp.up_proj", "layers.4.self_attn.o_proj"
    assert actual["corners"]["layers/up"] == corner(up, 5504, 2048)[:, -1].tolist()
    assert actual["corners"]["layers/wo"] == corner(wo, 2048, 2048)[:, -1].tolist()
    assert actual["corners"]["embed"] == corner("embed_tokens", 10_000, 2048)[-1].tolist()


@pytest.mark.integration
def test_a_model_that_is_quantised_while_it_is_read_never_exists_whole(gigabyte):
    actual = measure(gigabyte, {}, "as accelerators", "nf4")
    print({name: actual[name] / 1e6 for name in ("held", "above")})
    assert actual["held"] < 0.25e9  # of a gigabyte
    assert actual["held"] + actual["above"] < 0.8e9


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A checkpoint of 405 million numbers in FP8, and an embedding in bfloat16 of 82 MB."""
    path = tmp_path_factory.mktemp("large") / "model"
    path.mkdir()
    config = LlamaConfig(
        vocab=20_000, width=2048, layers=8, heads=16, kv_heads=16, hidden=5504, tied=True
    )
    abstract = eqx.filter_eval_shape(Llama, config, key=jax.random.key(0))
    shapes = needed_shapes(layout_of(config), leaf_paths(abstract, jax.ShapeDtypeStruct))
    tensors = {}
    for name, shape in shapes.items():
        if "_proj" not in name:
            tensors[name] = np.ones(shape, jnp.bfloat16)
            continue
        tensors[name] = np.full(shape, 0x38, np.uint8).view(jnp.float8_e4m3fn)  # ones
        tensors[name + "_scale_inv"] = ramp(name, (shape[0] // 128, shape[1] // 128))
    write_raw(path / "model.safetensors", tensors)
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    settings = write_config(config) | {"quantization_config": fp8}
    (path / "config.json").write_text(json.dumps(settings))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(
    ("mesh", "how"),
    [({}, "as CPU devices"), ({"model": 4}, "as CPU devices"), ({}, "as accelerators")],
)
@pytest.mark.integration
def test_dequantising_needs_little_more_than_the_devices_hold(quantised, mesh, how):
    actual = measure(quantised, mesh, how)
    assert actual["held"] > 0.84e9  # in bfloat16
    assert actual["above"] < 1.5 * 20_000 * 2048 * 2
    scale = ramp("model.layers.7.mlp.up_proj.weight", (43, 16))[-1, -1]
    assert actual["corners"]["layers/up"] == [float(np.asarray(scale, jnp.bfloat16))] * 3
