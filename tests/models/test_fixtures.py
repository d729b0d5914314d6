"""Models with weights by a formula give what `transformers` gave; `parity/make_fixtures.py` made
the figures."""

import json

import equinox as eqx
import numpy as np
import pytest
from published import apply, make_batch, rows_of, sample, write_weights
from stored_outputs import STORED_OUTPUTS

import redcoast as rc


@pytest.mark.few("bert labels", "t5")
@pytest.mark.parametrize("name", STORED_OUTPUTS)
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


# One of each way in which a family uses a mask, on which padding would have an effect.
MASKED = ["bart", "bert labels", "deepseek v3", "gemma2 capped low", "gpt2", "gpt oss", "gptj"]
MASKED += [
    "llama",
    "olmo3",
    "mamba2",
    "gemma4 moe",
    "qwen3.5",
    "qwen3 moe",
    "modernbert mean",
    "opt",
    "phi3 short",
    "t5",
    "whisper",
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKED)
def test_masks_of_numpy_count_where_a_program_has_them_as_constants(name, tmp_path):
    """Tokenizers return NumPy arrays. Those that are arguments of a program are traced, and so are
    not NumPy's there; a program that closes over them sees them as they are."""
    case = STORED_OUTPUTS[name]
    (tmp_path / "config.json").write_text(json.dumps(case["settings"]))
    write_weights(tmp_path, case["tensors"])
    model = rc.load_pretrained(tmp_path)
    batch = make_batch(case["settings"], pixels=case["pixels"], text=case["text"])
    rows = rows_of(eqx.filter_jit(lambda model: apply(model, batch))(model), batch)
    for row, expected in zip(rows, case["outputs"], strict=True):
        np.testing.assert_allclose(sample(row), expected, rtol=0, atol=1e-4)
