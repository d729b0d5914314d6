"""Models at the very end of their positions: every family, every way to decode, and loading."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import make
from generate_helpers import log_softmax
from grids import few_of
from pair_helpers import quick_jit

import redcoast as rc
from redcoast import lora
from redcoast.models import (
    GPT2,
    GPTJ,
    OPT,
    T5,
    Bart,
    BartConfig,
    Bert,
    BertConfig,
    Captioner,
    CaptionerConfig,
    Gemma,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    Llama,
    LlamaConfig,
    OPTConfig,
    T5Config,
    ViTConfig,
)

POSITIONS = 8
SIZES: dict[str, Any] = {"vocab": 11, "width": 16, "layers": 2, "heads": 2, "hidden": 24}
LEARNED: dict[str, Any] = {"positions": POSITIONS}
IMAGES = ViTConfig(width=16, layers=1, heads=2, hidden=24, image=(4, 4), patch=(2, 2))
CAPTIONS = GPT2Config(**SIZES, **LEARNED, cross_attention=True)
WINDOWED = GemmaConfig(**SIZES, kv_heads=1, head_dim=8, local=(True, False), window=3)
DECODERS = {
    "gpt2": (GPT2, GPT2Config(**SIZES, **LEARNED)),
    "opt": (OPT, OPTConfig(**SIZES, **LEARNED)),
    "gptj": (GPTJ, GPTJConfig(**SIZES, rotary_dim=4)),
    "llama with a window": (Llama, LlamaConfig(**SIZES, kv_heads=1, window=3)),
    "gemma with a window": (Gemma, WINDOWED),
}
PAIRS = {
    "bart": (Bart, BartConfig(**SIZES, **LEARNED, decoder_layers=2)),
    "t5": (T5, T5Config(**SIZES, decoder_layers=2, decoder_start=0)),
    "captioner": (Captioner, CaptionerConfig(encoder=IMAGES, decoder=CAPTIONS, decoder_start=3)),
}
KEY = jax.random.key(7)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"key": KEY, "temperature": 0.7},
    "beams": {"beams": 121},
    "streamed": {"stream": lambda tokens: None},
}


@ft.cache
def model_of(family):
    return make(*{**DECODERS, **PAIRS}[family])


def source_of(family) -> tuple[Any, ...]:
    """What the encoder of a pair reads; nothing for a decoder."""
    if family == "captioner":
        return (jax.random.normal(jax.random.key(1), (2, 3, 4, 4)),)
    return (jnp.arange(2 * POSITIONS).reshape(2, POSITIONS) % 11,) if family in PAIRS else ()


@ft.cache
def program(family):
    model, source = model_of(family), source_of(family)
    return quick_jit(lambda tokens: model(*source, tokens))


def last_logits(family, tokens):
    """The logits that follow rows of tokens, computed without a cache. The rows are padded to all
    positions, behind what is looked at, so that there is one program."""
    padded = np.pad(tokens, ((0, 0), (0, POSITIONS - tokens.shape[1])))
    return np.asarray(program(family)(padded)[:, tokens.shape[1] - 1])


def by_hand(family, start, count, way):
    """Token by token, each from all of the row computed anew."""
    tokens = np.asarray(start, np.int32)
    for step in range(count):
        scores = last_logits(family, tokens)
        if way == "drawn":
            step_key = jax.random.fold_in(KEY, step)
            keys = [jax.random.fold_in(step_key, row) for row in range(len(tokens))]
            noise = [jax.random.gumbel(key, scores.shape[1:], jnp.float32) for key in keys]
            scores = scores / np.float32(0.7) + np.stack(noise)
        tokens = np.concatenate([tokens, scores.argmax(1)[:, None].astype(np.int32)], axis=1)
    return tokens[:, -count:]


def likeliest(family, start, count):
    """The likeliest `count` tokens of all that there are, for one row."""
    actual: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(count):
        rows = np.array([[*start, *new] for _, new in actual], np.int32)
        logits = last_logits(family, rows).astype(np.float64)
        actual = [
            (score + p, [*new, token])
            for (score, new), row in zip(actual, logits, strict=True)
            for token, p in enumerate(log_softmax(row))
        ]
    return max(actual)[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "way"),
    few_of(
        [("gpt2", way) for way in ("drawn", "streamed")]
        + [(family, "greedy") for family in DECODERS],
        ("gpt2", "drawn"),
        ("gpt2", "streamed"),
        ("llama with a window", "greedy"),
        several=True,
    ),
)
def test_a_decoder_uses_its_last_position(family, way):
    """The last new token is not fed back, so that 8 positions hold a prompt of 2 and 7 new ones."""
    prompt = np.array([[1, 2], [6, 5]])
    new = rc.generate(model_of(family), prompt, max_new_tokens=7, eos=(), **WAYS[way])
    np.testing.assert_array_equal(new, by_hand(family, prompt, 7, way))


@pytest.mark.thorough
def test_beam_search_uses_the_last_position():
    """With as many beams as there are hypotheses, the best of all is found."""
    prompt = np.array([[1, 2, 3, 4, 5, 6, 7], [6, 5, 4, 3, 2, 1, 0]])
    new = rc.generate(model_of("gpt2"), prompt, max_new_tokens=2, eos=(), beams=121)
    np.testing.assert_array_equal(new, [likeliest("gpt2", row, 2) for row in prompt.tolist()])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "way"),
    few_of(
        [("bart", way) for way in ("drawn", "streamed")] + [(family, "greedy") for family in PAIRS],
        ("bart", "streamed"),
        ("t5", "greedy"),
        several=True,
    ),
)
def test_the_decoder_of_a_pair_uses_its_last_position(family, way):
    """The token that it begins with takes the first position, and the last new one none."""
    model, (source,) = model_of(family), source_of(family)
    new = rc.generate(model, source, max_new_tokens=POSITIONS, eos=(), **WAYS[way])
    start = np.full((2, 1), model.config.decoder_start)
    np.testing.assert_array_equal(new, by_hand(family, start, POSITIONS, way))
    if family != "t5":
        with pytest.raises(ValueError, match=f"9 positions, .* Pass `max_new_tokens={POSITIONS}`"):
            rc.generate(model, source, max_new_tokens=POSITIONS + 1)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, POSITIONS])
def test_prompts_that_leave_one_new_token_and_that_leave_most(count):
    """A prompt of all positions, with its padding wider than these, leaves one new token."""
    prompt = np.arange(POSITIONS + 1 - count)[None] % 11
    padded = np.pad(prompt, ((0, 0), (20, 0)))
    mask = np.pad(np.ones_like(prompt), ((0, 0), (20, 0)))
    new = rc.generate(model_of("gpt2"), padded, mask=mask, max_new_tokens=count, eos=())
    np.testing.assert_array_equal(new, by_hand("gpt2", prompt, count, "greedy"))


BERT = (Bert, BertConfig(**SIZES, positions=POSITIONS))
FAMILIES = {**DECODERS, **PAIRS, "bert": BERT}


@pytest.mark.thorough
@pytest.mark.parametrize("family", few_of(["gpt2", "opt", "bart", "captioner", "bert"], "bart"))
def test_a_model_with_few_positions_is_loaded_on_a_mesh(family, tmp_path):
    """It is planned on no more tokens than it takes, with adapters and saved again, too."""
    model_class, config = FAMILIES[family]
    model = model_class(config, key=jax.random.key(0))
    rc.save_pretrained(model, tmp_path / "model")
    mesh = rc.make_mesh(model=2)
    loaded = rc.load_pretrained(tmp_path / "model", mesh=mesh)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(loaded))
    adapted = lora.add_adapters(loaded, 2, targets="/w[qkv]$", key=jax.random.key(1))
    lora.save_adapters(adapted, tmp_path / "adapters")
    again = lora.load_adapters(loaded, tmp_path / "adapters")
    rc.save_pretrained(lora.merge(again), tmp_path / "merged")
    merged = rc.load_pretrained(tmp_path / "merged", mesh=rc.make_mesh(fsdp=2))
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
