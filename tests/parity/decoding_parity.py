"""The options of decoding against `transformers`, as `generation_config.json` files set them."""

# pyright: reportMissingImports=false

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    BartForConditionalGeneration,
    GPT2LMHeadModel,
    LogitsProcessorList,
    MinPLogitsWarper,
    Qwen2ForCausalLM,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
)

import redcoast as rc
from redcoast.generate._logits import filter_logits

from agreement import record  # isort: skip
from bart_parity import SIZES as BART  # isort: skip
from gpt2_parity import SIZES as GPT2  # isort: skip
from harness import Case  # isort: skip
from t5_parity import SIZES as T5  # isort: skip

QWEN = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
CASES = [
    Case("gpt2", GPT2LMHeadModel, GPT2),
    Case("qwen2", Qwen2ForCausalLM, QWEN),
    Case("bart", BartForConditionalGeneration, BART),
    Case("t5", T5ForConditionalGeneration, T5),
]
NEW = 12
BEAMS = {"num_beams": 3}
# Each with `eos_token_id`, some tokens that often come first.
OPTIONS = [
    {},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3, "repetition_penalty": 1.2},
    {"min_new_tokens": 7},
    {"min_length": 9},
    {"forced_bos_token_id": 5},
    {"forced_eos_token_id": 3},
    {"suppress_tokens": [1, 7, 8, 9]},
    {"bad_words_ids": [[4], [11, 12], [20, 21, 22]]},
    BEAMS,
    BEAMS | {"early_stopping": True},
    BEAMS | {"early_stopping": "never"},
    BEAMS | {"early_stopping": "never", "length_penalty": -1.0},
    BEAMS | {"length_penalty": 2.0, "early_stopping": True, "min_length": 5},
    BEAMS | {"num_return_sequences": 3},
    BEAMS | {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    BEAMS | {"forced_bos_token_id": 5, "forced_eos_token_id": 3, "no_repeat_ngram_size": 3},
    BEAMS | {"bad_words_ids": [[4], [11, 12]], "suppress_tokens": [6], "min_new_tokens": 6},
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, tmp_path_factory):
    """A directory with a model, prompts of one length, and tokens to end with."""
    directory = tmp_path_factory.mktemp(request.param.name)
    torch.manual_seed(0)
    reference = request.param.model(request.param.model.config_class(**request.param.settings))
    for weight in reference.parameters():  # so that no text repeats one token
        if weight.ndim > 1:
            weight.data.normal_(0, 0.7)
    reference.eval().save_pretrained(directory)
    vocab = reference.config.get_text_config().vocab_size
    prompts = np.random.default_rng(0).integers(4, vocab, (6, 7))
    options = {"max_new_tokens": NEW, "do_sample": False, "no_repeat_ngram_size": 1}
    with torch.no_grad():  # the likeliest tokens, none of them twice
        free = reference.generate(torch.tensor(prompts), **options)
    eos = [int(free[0, -4]), int(free[1, -2])]
    return request.param, directory, prompts, eos


def expected_tokens(case: Case, directory: Path, prompts: np.ndarray) -> np.ndarray:
    reference = case.model.from_pretrained(directory).eval()
    with torch.no_grad():
        ids = reference.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(prompts.shape, dtype=torch.long),
            max_new_tokens=NEW,
        ).numpy()
    decoder = 1 if reference.config.is_encoder_decoder else prompts.shape[1]
    return ids[:, decoder:]


def check(case, directory, prompts):
    expected = expected_tokens(case, directory, prompts)
    actual = np.asarray(rc.generate(rc.load_pretrained(directory), prompts, max_new_tokens=NEW))
    width = expected.shape[1]
    np.testing.assert_array_equal(actual[:, :width], expected)
    assert len(np.unique(actual[:, width:])) <= 1  # padding


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_file_are_used(pair, options):
    case, directory, prompts, eos = pair
    ids = {"eos_token_id": eos, "pad_token_id": 1}
    settings = json.loads((directory / "config.json").read_text())
    if "decoder_start_token_id" in settings or case.name in ("bart", "t5"):
        ids["decoder_start_token_id"] = settings.get("decoder_start_token_id", 0)
    (directory / "generation_config.json").write_text(json.dumps(ids | options))
    check(case, directory, prompts)
    record(case, "decoding")


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(temperature):
    logits = np.random.default_rng(0).normal(0, 3, (64, 50)).astype(np.float32)
    warpers = [TemperatureLogitsWarper(temperature), MinPLogitsWarper(0.1)]
    theirs = LogitsProcessorList(warpers)(None, torch.tensor(logits)).numpy()
    ours = filter_logits(
        jnp.asarray(logits), np.array(temperature, np.float32), min_p=np.array(0.1, np.float32)
    )
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
