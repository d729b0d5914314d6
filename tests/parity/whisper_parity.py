"""Whisper against `transformers`."""

# pyright: reportMissingImports=false

import json

import numpy as np
import pytest
import torch
from agreement import record
from harness import Case, check_generation, check_outputs, check_training
from transformers import WhisperForConditionalGeneration

import redcoast as rc

SIZES = {
    "vocab_size": 48,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 6,
    "max_source_positions": 9,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

CASES = [
    Case(
        "whisper", WhisperForConditionalGeneration, SIZES | {"vocab_size": 40, "decoder_layers": 3}
    ),
    Case(
        "whisper deep encoder",
        WhisperForConditionalGeneration,
        SIZES | {"encoder_layers": 3, "vocab_size": 57, "max_source_positions": 16},
    ),
    Case(
        "whisper odd vocabulary",
        WhisperForConditionalGeneration,
        SIZES | {"vocab_size": 51, "num_mel_bins": 5, "activation_function": "relu"},
    ),
]


@pytest.mark.parametrize("check", [check_generation, check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whisper(case, check, tmp_path):
    check(case, tmp_path)


# As in files of one language and of several, whose language is given. Whisper's own function takes
# the token of padding for padding, wherever it is.
OPTIONS = [
    {"forced_decoder_ids": [[1, 7]], "suppress_tokens": [0]},
    {"forced_decoder_ids": [[1, 7], [2, 9]], "suppress_tokens": [0, 10, 11]},
    {
        "lang_to_id": {"<|en|>": 7, "<|de|>": 8},
        "task_to_id": {"transcribe": 9, "translate": 10},
        "is_multilingual": True,
        "no_timestamps_token_id": 39,
        "language": "de",
        "suppress_tokens": [0, 1, 7, 8, 9],
        "begin_suppress_tokens": [2, 20, 21, 22, 23, 24, 25],
    },
    {
        "lang_to_id": {"<|en|>": 7, "<|de|>": 8},
        "task_to_id": {"transcribe": 9, "translate": 10},
        "is_multilingual": True,
        "no_timestamps_token_id": 39,
        "language": "German",
        "task": "translate",
        "forced_decoder_ids": [[1, 7], [2, 9]],
        "suppress_tokens": [0],
    },
    {
        "forced_decoder_ids": [[1, 7]],
        "no_timestamps_token_id": 39,
        "min_length": 7,
        "suppress_tokens": [0],
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_file_are_used(options, tmp_path):
    case = CASES[0]
    torch.manual_seed(0)
    reference = case.model(case.model.config_class(**case.settings))
    for weight in reference.parameters():  # so that no text repeats one token
        if weight.ndim > 1:
            weight.data.normal_(0, 0.7)
    reference.eval().save_pretrained(tmp_path)
    ids = {"decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 38, "max_length": 24}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(ids | options))
    features = np.random.default_rng(0).normal(size=(5, 6, 18)).astype(np.float32)
    reference = case.model.from_pretrained(tmp_path).eval()
    expected = reference.generate(torch.tensor(features), max_new_tokens=12).numpy()
    model = rc.load_pretrained(tmp_path)
    actual = np.asarray(rc.generate(model, features, max_new_tokens=12))
    actual = np.where(actual == 38, 0, actual)  # which Whisper's own function leaves out
    width = expected.shape[1]
    np.testing.assert_array_equal(actual[:, :width], expected)
    assert not actual[:, width:].any()
    rc.save_pretrained(model, tmp_path / "again")
    assert rc.load_pretrained(tmp_path / "again").config == model.config
    again = case.model.from_pretrained(tmp_path / "again").eval()
    calls = [{}, {"language": "de"}, {"language": "en", "task": "translate"}]
    for call in calls if "lang_to_id" in options else calls[:1]:
        one, other = (x.generate(torch.tensor(features), **call) for x in (reference, again))
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    record(case, "decoding")
