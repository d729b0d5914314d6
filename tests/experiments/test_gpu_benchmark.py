"""`experiments/benchmarks/gpu.py`, whose smallest setting runs on a CPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import EXPERIMENTS

import redcoast as rc


@pytest.fixture
def gpu(script, monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "benchmarks"))
    return script("gpu")


@pytest.mark.seconds(10)  # a whole run
@pytest.mark.integration
def test_the_smallest_setting(gpu, tmp_path, capsys):
    rows = gpu.main(gpu.Config(size="tiny", steps=3, out=tmp_path))
    actual = json.loads((tmp_path / "gpu.json").read_text())
    assert not actual["failed"]
    assert actual["rows"] == json.loads(json.dumps(rows))
    measured = {row["what"]: row["measured"] for row in rows}
    names = ("fit, ", "MFU, fit", "time to the first step", "bare jit", "bandwidth", "generation")
    assert all(any(what.startswith(name) for what in measured) for name in names)
    table = capsys.readouterr().out
    assert all(what in table for what in measured)


@pytest.mark.thorough
def test_a_part_that_fails_or_is_late_is_reported(gpu, tmp_path, capsys, monkeypatch):
    def fails(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "foretell", fails)
    gpu.main(gpu.Config(size="tiny", out=tmp_path, seconds=-1))
    assert "generation failed: not begun within -1 s" in capsys.readouterr().out
    for part in ("train_rows", "bare_rows", "generation_rows", "loop_rows"):
        monkeypatch.setattr(gpu, part, lambda *args: [])
    gpu.main(gpu.Config(size="tiny", out=tmp_path))
    assert "dry run failed: Traceback" in (shown := capsys.readouterr().out)
    assert "out of memory" in shown


@pytest.mark.thorough
def test_model_operations_are_those_of_the_program(gpu):
    size = gpu.SIZES["tiny"]
    batch = jax.ShapeDtypeStruct((size.batch, size.seq + 1), jnp.int32)
    options = {"target": "cpu:1", "compute_dtype": jnp.bfloat16}
    make = gpu.init_fn(size.model, "none")
    run = rc.dry_run(make, gpu.make_loss(), batch, gpu.OPTIMIZER, **options)
    counted = sum(run.arithmetic.values()) / (size.batch * size.seq)
    np.testing.assert_allclose(gpu.model_flops(size.model, size.seq), counted, rtol=0.03)


def test_sizes_and_limits(gpu):
    size = gpu.SIZES["1b"]
    half = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    model = jax.tree.map(half, gpu.abstract(size.model))
    assert 1.0e9 < gpu.parameters(model) < 1.2e9
    # 1,034 million parameters without the embedding, and 264 cached tokens of 22 layers and 4 heads
    # of size 64, keys and values.
    assert gpu.bytes_read(model, batch=1, length=264) == pytest.approx(
        2 * (1.0345e9 + 264 * 11264), rel=1e-3
    )
    peaks = {"True none": 9, "True dots": 5, "True full": 3}
    chosen = [gpu.least_remat(peaks, True, usable) for usable in (9, 8, 4, 2)]
    assert chosen == ["none", "dots", "full", "full"]
