"""Each process reads the parts of a large example that its own devices have."""

import json

import numpy as np
import pytest
from paths import HELPERS
from processes import run_processes

LONG, WIDE = 64, 8


def run(folder, processes, **asked):
    text = json.dumps({"folder": str(folder), "zarr": False} | asked)
    program = HELPERS / "hosts" / "large_example.py"
    finished = run_processes(program, text, processes=processes, devices=8 // processes)
    assert all(x.returncode == 0 for x in finished), "\n".join(x.output for x in finished)
    lines = [line for x in finished for line in x.output.splitlines()]
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]


def save(folder, write):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(4):
        write(folder / str(number), rng.normal(size=(LONG, WIDE)).astype(np.float32))


def check(split, alone):
    for part in split:
        half = LONG // 2
        assert part["read"] == list(range(half * part["process"], half * (part["process"] + 1)))
    assert alone["read"] == list(range(LONG))
    np.testing.assert_allclose(split[0]["losses"], alone["losses"], rtol=1e-5)  # 0 alone logs


@pytest.mark.integration
def test_processes_read_their_parts_of_memory_maps(tmp_path):
    folder = tmp_path / "fields"
    save(folder, lambda file, field: np.save(file.with_suffix(".npy"), field))
    check(run(folder, 2), *run(folder, 1))


@pytest.mark.integration
def test_processes_read_their_chunks_of_zarr(tmp_path):
    zarr = pytest.importorskip("zarr")
    folder = tmp_path / "fields"

    def write(file, field):
        chunks = (LONG // 8, WIDE)
        array = zarr.create_array(file, shape=field.shape, chunks=chunks, dtype=field.dtype)
        array[:] = field

    save(folder, write)
    check(run(folder, 2, zarr=True), *run(folder, 1, zarr=True))
