"""Greedy decoding against all of a sequence computed anew for each token; shapes, stops, errors."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import (
    TRACED,
    Tiny,
    TinySeq2Seq,
    prompts,
    slow_greedy,
    slow_memory,
    tiny,
)
from grids import few_of

from redcoast.generate import generate
from redcoast.generate._prompt import bucket

MODEL = tiny(3)
ROWS, (LEFT, LEFT_MASK), (RIGHT, RIGHT_MASK) = prompts([3, 7, 1, 5])
PROMPT: Any = {"mask": LEFT_MASK, "max_new_tokens": 9}


def expected(model=MODEL, rows=ROWS, count=9, **options):
    return np.array([slow_greedy(model, row, count, **options) for row in rows])


def compiled_programs(fn):
    """How many programs XLA compiles while `fn` runs."""
    events = []
    listener: Any = lambda name, *_, **__: events.append(name)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        fn()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return sum("backend_compile" in name for name in events)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_the_likeliest_token_of_the_whole_sequence(seed):
    model = tiny(seed)
    actual = generate(model, LEFT, **PROMPT)
    assert actual.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected(model))
    assert len(np.unique(actual)) > 3


def test_padding_may_be_on_either_side_and_of_any_amount():
    on_both_sides = [np.pad(x, ((0, 0), (2, 0))) for x in (RIGHT, RIGHT_MASK)]
    # What stands in padding does not matter, not even if it is no token.
    junk = np.where(RIGHT_MASK == 1, RIGHT, -100)
    for tokens, mask in [(RIGHT, RIGHT_MASK), on_both_sides, (junk, RIGHT_MASK.astype(bool))]:
        actual = generate(MODEL, tokens, mask=mask, max_new_tokens=9)
        np.testing.assert_array_equal(actual, expected())


def test_without_a_mask_all_tokens_are_real():
    rows = [row[-1:] * 3 for row in ROWS]
    actual = generate(MODEL, jnp.asarray(rows), max_new_tokens=5)
    np.testing.assert_array_equal(actual, expected(rows=rows, count=5))


def test_a_prompt_may_be_of_small_integers():
    actual = generate(MODEL, LEFT.astype(np.uint8), **PROMPT)
    np.testing.assert_array_equal(actual, expected())


def ending(model, count=9):
    """A token that some rows choose early and others late or never."""
    new = expected(model, count=count)
    when = {t: [list(row).index(t) if t in row else count for row in new] for t in np.unique(new)}
    return int(max(when, key=lambda t: len(set(when[t]))))


def test_a_row_that_ended_is_filled_with_padding():
    eos = ending(MODEL)
    lengths = {list(row).index(eos) if eos in row else 9 for row in expected()}
    assert len(lengths) > 2
    for how, several in ((eos, (eos,)), ([10, eos], (10, eos))):
        actual = generate(MODEL, LEFT, eos=how, **PROMPT)
        np.testing.assert_array_equal(actual, expected(eos=several, pad=several[0]))


@pytest.mark.thorough
def test_the_model_says_what_ends_a_row_and_what_fills_it():
    eos = ending(MODEL)
    for pad, filled in ((7, 7), (None, eos), (-1, eos)):
        model = tiny(3, eos=(eos,), pad=pad)
        actual = generate(model, LEFT, **PROMPT)
        np.testing.assert_array_equal(actual, expected(eos=(eos,), pad=filled))
    never = generate(tiny(3, eos=(eos,)), LEFT, eos=(), **PROMPT)
    np.testing.assert_array_equal(never, expected())


@pytest.mark.thorough
def test_the_loop_stops_when_all_rows_have_ended():
    calls = []

    class Counted(Tiny):
        def unembed(self, hidden):
            jax.debug.callback(lambda: calls.append(1))
            return super().unembed(hidden)

    model = tiny(3, Counted)
    first = generate(model, LEFT[:1], mask=LEFT_MASK[:1], max_new_tokens=3, eos=())
    jax.effects_barrier()
    assert len(calls) == 3
    calls.clear()
    eos = int(first[0, 0])
    actual = generate(model, LEFT[:1], mask=LEFT_MASK[:1], max_new_tokens=500, eos=eos)
    jax.effects_barrier()
    assert actual.shape == (1, 500)
    assert len(calls) == 1


@pytest.mark.thorough
def test_an_encoder_decoder_goes_on_from_its_start():
    model = tiny(5, TinySeq2Seq, decoder_start=4)
    rows = zip(ROWS, strict=True)
    want = [slow_greedy(model, [4], 9, memory=slow_memory(model, row)) for (row,) in rows]
    for tokens, mask in ((LEFT, LEFT_MASK), (RIGHT, RIGHT_MASK)):
        np.testing.assert_array_equal(generate(model, tokens, mask=mask, max_new_tokens=9), want)
    streamed = []
    generate(model, LEFT, mask=LEFT_MASK, max_new_tokens=9, stream=streamed.append)
    np.testing.assert_array_equal(np.stack(streamed, axis=1), want)


@pytest.mark.thorough
def test_an_encoder_may_read_images():
    model = tiny(5, TinySeq2Seq, decoder_start=4)
    images = np.random.default_rng(0).normal(size=(3, 2, 4, 8)).astype(np.float32)
    want = [slow_greedy(model, [4], 6, memory=image.mean((0, 1))) for image in images]
    np.testing.assert_array_equal(generate(model, images, max_new_tokens=6), want)
    with pytest.raises(ValueError, match="Pass no `mask` with images"):
        generate(model, images, max_new_tokens=6, mask=np.ones((3, 2)))


@pytest.mark.thorough
def test_an_encoder_gets_no_more_padding_than_it_has_positions_for():
    class Strict(TinySeq2Seq):
        def encode(self, tokens, *, mask=None):
            assert tokens.shape[1] <= 10
            return super().encode(tokens, mask=mask)

    model = tiny(5, Strict, decoder_start=4, positions=10)
    actual = generate(model, RIGHT, mask=RIGHT_MASK, max_new_tokens=3)
    assert actual.shape == (4, 3)


def test_buckets_waste_at_most_a_quarter():
    sizes = [bucket(n) for n in range(1, 3000)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * n for n, size in enumerate(sizes, 1) if n > 64)
    assert len(set(sizes)) < 35


@pytest.mark.thorough
def test_prompts_limits_and_temperatures_of_a_bucket_share_one_program():
    model = tiny(8, width=4)
    rng = np.random.default_rng(0)
    key = jax.random.key(0)

    def decode(seq, new, temperature, top_p, top_k=5):
        tokens = rng.integers(0, 11, (2, seq))
        options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "key": key}
        assert generate(model, tokens, max_new_tokens=new, **options).shape == (2, new)

    TRACED.clear()
    assert compiled_programs(lambda: decode(3, 5, 0.7, 0.9)) >= 1
    once = TRACED["decode"]
    others = [(1, 2, 1.0, 0.5, 1), (16, 16, 0.1, 0.99, 10**30), (7, 3, 2.0, 0.01, 11)]
    assert compiled_programs(lambda: [decode(*other) for other in others]) == 0
    # A model of the same shapes shares it too.
    again = ft.partial(generate, tiny(9, width=4), max_new_tokens=4, key=key)
    tokens = np.zeros((2, 9), int)
    assert compiled_programs(lambda: again(tokens, temperature=0.3, top_p=0.4, top_k=2)) == 0
    assert TRACED["decode"] == once
    decode(250, 16, 0.7, 0.9)  # in a larger cache
    assert TRACED["decode"] > once


@pytest.mark.few("how2")
@pytest.mark.parametrize("how", [{}, {"beams": 2}, {"stream": id}, {"repetition_penalty": 1.2}])
def test_a_prompt_of_another_length_compiles_nothing(how):
    model = tiny(8, width=5)

    def decode(rows, *lengths):
        for seq in lengths:
            tokens = np.random.default_rng(seq).integers(0, 11, (rows, seq))
            generate(model, tokens, max_new_tokens=9, **how)

    for first, others in ((7, (1, 16, 17, 61, 100, 110)), (130, (121, 150, 200, 230))):
        decode(2, first)
        assert compiled_programs(ft.partial(decode, 2, *others)) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("length", [17, 70, 130, 200])
def test_a_prompt_that_is_read_in_chunks_gives_the_same_tokens(length):
    tokens = np.random.default_rng(length).integers(0, 11, (2, length))
    mask = np.ones((2, length), int)
    mask[1, 9:] = 0
    options: Any = {"max_new_tokens": 9, "mask": mask}
    whole = jax.jit(lambda tokens: generate(MODEL, tokens, **options))(tokens)
    np.testing.assert_array_equal(generate(MODEL, tokens, **options), whole)


@pytest.mark.thorough
def test_inside_of_a_program_it_is_traced_like_any_function():
    decode = ft.partial(generate, **PROMPT)
    np.testing.assert_array_equal(eqx.filter_jit(decode)(MODEL, LEFT), expected())
    closed = jax.jit(lambda tokens: generate(MODEL, tokens, **PROMPT))
    np.testing.assert_array_equal(closed(LEFT), expected())
    nothing_traced = jax.jit(lambda: generate(MODEL, LEFT, **PROMPT))
    np.testing.assert_array_equal(nothing_traced(), expected())


def test_a_stream_gets_each_step_and_stops_with_the_last_row():
    steps = []
    actual = generate(MODEL, LEFT, stream=steps.append, **PROMPT)
    np.testing.assert_array_equal(actual, expected())
    assert all(isinstance(step, np.ndarray) and step.shape == (4,) for step in steps)
    np.testing.assert_array_equal(np.stack(steps, axis=1), expected())
    eos = tuple({int(t) for t in expected()[:, 2]})
    want = expected(eos=eos, pad=eos[0])
    steps.clear()
    actual = generate(MODEL, LEFT, stream=steps.append, eos=eos, **PROMPT)
    np.testing.assert_array_equal(actual, want)
    assert len(steps) <= 3
    np.testing.assert_array_equal(np.stack(steps, axis=1), want[:, : len(steps)])


@pytest.mark.thorough
def test_a_stream_compiles_no_more_for_more_steps():
    model = tiny(1, width=6)
    stream = lambda new: generate(model, LEFT, mask=LEFT_MASK, max_new_tokens=new, stream=id)
    stream(4)
    assert compiled_programs(lambda: [stream(n) for n in (1, 2, 9, 16)]) == 0


@pytest.mark.thorough
def test_a_streams_token_is_read_when_the_next_step_is_under_way():
    order = []

    class Ordered(Tiny):
        def unembed(self, hidden):
            jax.debug.callback(lambda: order.append("step"))
            return super().unembed(hidden)

    def stream(tokens):
        jax.effects_barrier()
        order.append("read")

    decode = lambda: generate(
        tiny(3, Ordered), LEFT, **PROMPT | {"max_new_tokens": 4}, stream=stream
    )
    # In the first call, the first token does not wait for the program of the next.
    decode()
    assert order[:2] == ["step", "read"]
    order.clear()
    decode()
    assert order[:3] == ["step", "step", "read"]
    assert order.count("read") == order.count("step") == 4


def test_the_users_arrays_are_not_donated():
    tokens, mask = jnp.asarray(LEFT), jnp.asarray(LEFT_MASK)
    for _ in range(2):
        actual = generate(MODEL, tokens, mask=mask, max_new_tokens=3, stream=id)
        np.testing.assert_array_equal(actual, expected(count=3))


@pytest.mark.thorough
def test_log_probabilities_are_of_float32_in_half_precision_too():
    # In bfloat16, noise added to numbers near 32 would come in steps of a quarter.
    class Near(Tiny):
        def unembed(self, hidden):
            logits = jnp.full((*hidden.shape[:2], 3), 256, jnp.bfloat16)
            return logits.at[:, :, 1].add(2)

    model = tiny(0, Near, vocab=3, dtype=jnp.bfloat16)
    options: dict[str, Any] = {"temperature": 8.0, "key": jax.random.key(1), "max_new_tokens": 1}
    new = generate(model, np.zeros((10_000, 1), int), **options)
    likely = np.exp([0, 1 / 4, 0])
    counts = np.bincount(new[:, 0], minlength=3) / 10_000
    np.testing.assert_allclose(counts, likely / likely.sum(), atol=0.015)


@pytest.mark.thorough
def test_tokens_beyond_the_positions_are_refused():
    model = tiny(0, positions=10)
    assert generate(model, LEFT, mask=LEFT_MASK, max_new_tokens=4).shape == (4, 4)
    needs = r"of 7 tokens.* all but the last of `max_new_tokens=5` need 11 positions"
    with pytest.raises(ValueError, match=needs):
        generate(model, LEFT, mask=LEFT_MASK, max_new_tokens=5)
    with pytest.raises(ValueError, match="The prompt of 7 tokens and .*or `max_new_tokens=4`"):
        jax.jit(lambda tokens: generate(model, tokens, max_new_tokens=5))(LEFT)
    assert generate(model, np.zeros((1, 10), int), max_new_tokens=1).shape == (1, 1)
    with pytest.raises(ValueError, match="of 12 tokens is longer than the model's 10 positions"):
        generate(model, np.zeros((1, 12), int), max_new_tokens=1)
    pair = tiny(0, TinySeq2Seq, positions=10, decoder_start=1)
    assert generate(pair, LEFT, max_new_tokens=10).shape == (4, 10)
    with pytest.raises(ValueError, match="that the decoder starts with and .* Pass `max_new_tok"):
        generate(pair, LEFT, max_new_tokens=11)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` is 0. It must be at least 1."),
        ({"top_k": 0}, "`top_k` is 0"),
        ({"beams": 0}, "`beams` is 0"),
        ({"top_p": 0.0}, "`top_p` is 0.0. It must be a probability"),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"temperature": -1.0}, "`temperature` is -1.0"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"temperature": 1.0}, "which needs a `key`"),
        ({"length_penalty": 2.0}, "`beams` is 1"),
        ({"length_penalty": float("inf"), "beams": 2}, "`length_penalty` is inf"),
        (
            {"beams": 2, "temperature": 1.0, "key": jax.random.key(0)},
            "Beam search does not sample, but",
        ),
        ({"beams": 2, "top_k": 5}, "Beam search does not sample"),
        ({"beams": 2, "stream": id}, "`stream` and `stop` are not supported for beam search"),
        ({"eos": 11}, "`eos` has 11, but the token ids of the vocabulary are 0 to 10"),
        ({"eos": (3, -1)}, "`eos` has -1"),
        ({"mask": LEFT_MASK[:, 1:]}, r"`mask` has shape \(4, 6\)"),
        ({"mask": LEFT_MASK.astype(float)}, "`mask` has dtype float64"),
        ({"mask": LEFT_MASK * [[1], [0], [0], [1]]}, "no real token in rows 1, 2"),
        ({"tokens": LEFT.astype(float)}, "`tokens` has dtype float64 and shape"),
        ({"tokens": LEFT[0], "mask": None}, "have the shape .batch, seq."),
        ({"tokens": LEFT[:, :0], "mask": None}, "so it is empty"),
        (
            {"tokens": LEFT + 11},
            "`tokens` holds .* but the token ids of the vocabulary are 0 to 10",
        ),
    ],
)
def test_bad_input_is_refused(options, says):
    given: dict[str, Any] = {"tokens": LEFT, "mask": LEFT_MASK, "max_new_tokens": 3, **options}
    with pytest.raises(ValueError, match=says):
        generate(MODEL, given.pop("tokens"), **given)


def test_what_is_no_integer_or_no_generative_model_is_refused():
    with pytest.raises(TypeError):
        generate(MODEL, LEFT, max_new_tokens=2.5)  # pyright: ignore[reportArgumentType]
    mlp = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match="A MLP cannot generate: it has no init_cache and no"):
        generate(mlp, LEFT, max_new_tokens=2)
    with pytest.raises(ValueError, match="has no `decoder_start`"):
        generate(tiny(0, TinySeq2Seq), LEFT, max_new_tokens=2)
    with pytest.raises(ValueError, match="`decoder_start` is 11, but .* 0 to 10 in the `TinyConf"):
        generate(tiny(0, TinySeq2Seq, decoder_start=11), LEFT, max_new_tokens=2)


def test_a_stream_is_refused_while_a_program_is_traced():
    for tokens in (None, LEFT):
        decode = lambda x: generate(MODEL, LEFT if x is None else x, max_new_tokens=2, stream=id)
        with pytest.raises(ValueError, match="all steps are one program"):
            jax.jit(decode)(tokens)


class Broken(Tiny):
    """Its logits are NaN in the row with the least padding, from the third new token on."""

    def decode(self, tokens, cache, *, mask=None):
        hidden, cache = super().decode(tokens, cache, mask=mask)
        broken = (cache.filled > 17) & (cache.filled - jnp.sum(cache.mask, axis=1) < 10)
        return jnp.where(broken[:, None, None], jnp.nan, hidden), cache


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how", few_of([{}, {"beams": 2}, {"temperature": 1.0, "top_k": 3, "top_p": 0.9}], {})
)
def test_logits_that_are_nan_are_refused_or_marked(how):
    model = tiny(3, Broken)
    drawn: dict[str, Any] = {"key": jax.random.key(0)} if "temperature" in how else {}
    options: dict[str, Any] = {"mask": LEFT_MASK, "max_new_tokens": 4, **how, **drawn}
    with pytest.raises(ValueError, match="logits of row 1 hold NaN at new token"):
        generate(model, LEFT, **options)
    tokens, mask = (np.pad(x, ((0, 0), (9, 0))) for x in (LEFT, LEFT_MASK))
    options["mask"] = mask
    actual = np.asarray(jax.jit(lambda tokens: generate(model, tokens, **options))(tokens))
    assert (actual[1] == -1).any()
    assert (actual[[0, 2, 3]] >= 0).all()


@pytest.mark.thorough
def test_a_streams_logits_that_are_nan_are_refused():
    with pytest.raises(ValueError, match="logits of row 1 hold NaN at new token 2"):
        generate(tiny(3, Broken), LEFT, mask=LEFT_MASK, max_new_tokens=4, stream=id)
