"""The CUDA compiler without a GPU: `nox -s dryrun-cuda`."""

import importlib
import os
import re
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from odd_vocabulary import check_sent, check_tied, check_uses
from paths import EXPERIMENTS

import redcoast as rc
from redcoast import CHIPS
from redcoast.core._target import compiling_for, target_of
from redcoast.dryrun._devices import place_of
from redcoast.dryrun._target_name import parse_target
from redcoast.losses import cross_entropy

KEY = jax.random.key(0)
CARDS = [chip.name for chip in CHIPS.values() if chip.kind == "gpu"]


def compiled(fn, devices, *shapes, dtype=jnp.float32) -> Any:
    mesh = rc.make_mesh(model=2, devices=devices)
    sharding = NamedSharding(mesh, P(("data", "fsdp"), "model"))
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    return jax.jit(fn).lower(*args).compile()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CARDS)
def test_a_small_program(name, dtype):
    """In a process that uses JAX on the CPU; its devices do not change."""
    assert jnp.ones(3).sum() == 3
    before = jax.devices()
    target = parse_target(f"{name}:2x4")
    actual = place_of(target)
    assert (actual.compiler, len(actual.devices)) == ("cuda", 8)
    assert {device.device_kind for device in actual.devices} == {target.chip.device_kind}
    assert [device.process_index for device in actual.devices] == [0] * 4 + [1] * 4
    program = compiled(lambda x, w: jnp.tanh(x @ w), actual.devices, *[(256, 256)] * 2, dtype=dtype)
    held = 2 * 256 * 256 * jnp.dtype(dtype).itemsize // 8
    assert program.memory_analysis().argument_size_in_bytes == held
    assert "all-gather" in program.as_text()
    assert jax.devices() == before


def test_notes_on_an_old_card():
    (note,) = place_of(parse_target("1080ti:2")).notes
    assert "not `jax.nn.dot_product_attention` in 16 bits" in note
    shape = (2, 128, 4, 64)

    def attention(q):
        with jax.numpy_dtype_promotion("standard"):
            return jax.nn.dot_product_attention(q, q, q)

    old, new = (place_of(parse_target(name)).devices for name in ("1080ti:2", "l4:2"))
    compiled(attention, old, shape)
    compiled(attention, new, shape, dtype=jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Unsupported algorithm"):
        compiled(attention, old, shape, dtype=jnp.bfloat16)


def test_programs_are_never_rejected_on_gpus():
    """Unlike the TPU compiler, it accepts any size, so `fits` is a comparison."""
    target = parse_target("l4:2")
    rows = target.chip.memory // 2**18
    program = compiled(lambda x: x + 1, place_of(target).devices, (4 * rows, 2**18))
    assert program.memory_analysis().argument_size_in_bytes > target.chip.memory


COMPILER = """
import jax
{first}
from redcoast.dryrun._devices import place_of
from redcoast.dryrun._target_name import parse_target
print(place_of(parse_target("h100:2x8")).compiler, jax.devices()[0].platform)
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
@pytest.mark.parametrize("first", ["", "jax.numpy.ones(3).sum()"])
def test_without_jax_platforms(first):
    """Without a GPU, JAX does not load its plugin when it is first used."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER.format(first=first)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert re.search("^cuda cpu$", done.stdout, re.M), done.stderr


def test_a_vocabulary_that_does_not_divide_costs_nothing():
    check_sent("a100-40gb:2", 2)


def test_the_gradient_of_a_tied_table_is_summed_once():
    check_tied("a100-40gb:2", 2)


def test_what_uses_of_a_tied_table_send_is_planned():
    check_uses("a100-40gb:2")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_reduce_scattered_to_the_parts_that_are_updated(dtype):
    """Also those of the first and of the last array, which no layer's loop has."""
    model = {
        "embed": jax.ShapeDtypeStruct((1024, 256), dtype),
        "head": jax.ShapeDtypeStruct((256, 1024), dtype),
    }

    def loss_fn(model, tokens, key):
        logits = jnp.tanh(model["embed"][tokens]) @ model["head"]
        return cross_entropy(logits, tokens)

    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    mesh = {"data": 8}
    run = rc.dry_run(model, loss_fn, tokens, optax.adamw(1e-3), target="h100:8", mesh=mesh)
    program = run.plan.report.program
    assert program is not None
    planned = sum(line.bytes for line in program.traffic)
    assert run.sent_bytes == pytest.approx(planned, rel=0.01)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "benchmarks"))
    return importlib.import_module("gpu")


def test_the_benchmark_of_a_gpu_fits_on_an_h100(gpu):
    """The programs of `experiments/benchmarks/gpu.py`."""
    target = parse_target("h100:1")
    size, usable = gpu.SIZES["1b"], target.chip.usable
    peaks = gpu.foretold(size, target.name)
    remats = [gpu.least_remat(peaks, kernel, usable) for kernel in (True, False)]
    assert peaks[f"True {remats[0]}"] < usable
    assert peaks[f"False {remats[1]}"] < usable

    place = SingleDeviceSharding(place_of(target).devices[0])
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    model = jax.tree.map(placed, eqx.filter_eval_shape(gpu.init_fn(size.model, remats[0]), KEY))
    opt_state = jax.tree.map(placed, jax.eval_shape(gpu.OPTIMIZER.init, model))
    tokens = placed(jnp.zeros((size.batch, size.seq + 1), jnp.int32))
    with compiling_for(target_of(place_of(target).devices[0])):
        step = gpu.bare_step().lower(model, opt_state, tokens).compile()
    assert "__cudnn$fmha" in step.as_text()


@pytest.mark.parametrize("batch", [1, 64])
def test_the_generation_of_the_benchmark_compiles_for_an_h100(gpu, batch):
    size = gpu.SIZES["1b"]
    place = SingleDeviceSharding(place_of(parse_target("h100:1")).devices[0])
    half = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place)
    model = jax.tree.map(half, gpu.abstract(size.model))
    prompts = jax.ShapeDtypeStruct((batch, size.prompt), jnp.int32, sharding=place)
    generate = lambda m, x: rc.generate(m, x, max_new_tokens=size.new[1], eos=())
    with compiling_for(target_of(place_of(parse_target("h100:1")).devices[0])):
        program: Any = jax.jit(generate).lower(model, prompts).compile()
    weights = 2 * gpu.parameters(model)
    assert weights < program.memory_analysis().argument_size_in_bytes < 1.01 * weights
