"""Models with weights by a formula give what `transformers` gave; `parity/make_fixtures.py` made
the figures."""

import gzip
import itertools as it
import json
from pathlib import Path

import equinox as eqx
import numpy as np
import pytest
from published import apply, make_batch, rows_of, sample, write_weights

import redcoast as rc

FILES = sorted((Path(__file__).parent / "fixtures").glob("*.json.gz"))
FIXTURES = dict(
    it.chain(*(json.loads(gzip.decompress(file.read_bytes())).items() for file in FILES))
)


@pytest.mark.parametrize("name", FIXTURES)
def test_outputs_are_those_of_transformers(name, tmp_path):
    case = FIXTURES[name]
    (tmp_path / "config.json").write_text(json.dumps(case["settings"]))
    write_weights(tmp_path, case["tensors"])
    model = rc.load_pretrained(tmp_path)
    batch = make_batch(case["settings"], pixels=case["pixels"], text=case["text"])
    rows = rows_of(eqx.filter_jit(apply)(model, batch), batch)
    assert len(rows) == len(case["outputs"]) == 4
    for row, expected in zip(rows, case["outputs"], strict=True):
        np.testing.assert_allclose(sample(row), expected, rtol=0, atol=1e-4)
