"""Models with weights by a formula give what `transformers` gave; `parity/make_fixtures.py` made
the figures."""

import json

import equinox as eqx
import numpy as np
import pytest
from published import apply, make_batch, rows_of, sample, write_weights
from stored_outputs import STORED_OUTPUTS

import redcoast as rc

# One of most families; OPT, Mixtral and the captioner have tests of their own against NumPy.
FEW = ["bart", "bert labels", "gemma2 capped low", "gpt2", "gptj", "llama", "olmo2"]
FEW += ["modernbert biases", "dinov2 registers", "dinov2 gated", "siglip unequal"]
FEW += ["dinov3 gated"]
FEW += ["smollm3 listed", "qwen3 moe", "phi3 short", "gpt oss rounded", "t5", "vit labels"]
FEW += ["deepseek v3 yarn", "mamba2", "whisper"]


@pytest.mark.parametrize("name", STORED_OUTPUTS)
@pytest.mark.few(*FEW)
def test_outputs_are_those_of_transformers(name, tmp_path):
    case = STORED_OUTPUTS[name]
    (tmp_path / "config.json").write_text(json.dumps(case["settings"]))
    write_weights(tmp_path, case["tensors"])
    model = rc.load_pretrained(tmp_path)
    batch = make_batch(case["settings"], pixels=case["pixels"], text=case["text"])
    rows = rows_of(eqx.filter_jit(apply)(model, batch), batch)
    assert len(rows) == len(case["outputs"]) == 4
    for row, expected in zip(rows, case["outputs"], strict=True):
        np.testing.assert_allclose(sample(row), expected, rtol=0, atol=1e-4)
