"""Models of users, whose methods may return anything: a recurrent one, whose cache has no slots."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import prompts

from redcoast.generate import generate, log_probabilities

ROWS, (LEFT, LEFT_MASK), (RIGHT, RIGHT_MASK) = prompts([3, 7, 1, 5])


class Config(eqx.Module):
    vocab: int = 11


class Recurrent(eqx.Module):
    """Its cache is one array, or a tuple of it."""

    embed: jax.Array
    cell: eqx.nn.GRUCell
    config: Config = eqx.field(static=True)

    def __init__(self):
        self.embed = jax.random.normal(jax.random.key(0), (11, 8))
        self.cell = eqx.nn.GRUCell(8, 8, key=jax.random.key(1))
        self.config = Config()

    def init_cache(self, batch, length) -> Any:
        return (jnp.zeros((batch, 8)),)

    def decode(self, tokens, cache, mask=None) -> Any:
        if mask is None:
            mask = jnp.ones(tokens.shape, bool)

        def step(state, inputs):
            token, is_real = inputs
            new = jax.vmap(self.cell)(self.embed[token], state)
            state = jnp.where(is_real[:, None], new, state)
            return state, state

        state, states = jax.lax.scan(step, cache[0], (tokens.T, mask.T))
        return jnp.swapaxes(states, 0, 1), (state,)

    def hidden(self, tokens, mask=None):
        return self.decode(tokens, self.init_cache(len(tokens), 0), mask)[0]

    def unembed(self, hidden):
        return hidden @ self.embed.T


def new(kind: Any) -> Any:
    """A model of a subclass, which has the initialisation of `Recurrent`."""
    return kind()


def expected(rows, count):
    """Greedy tokens of all of a row, computed anew for each token."""
    all_tokens = []
    model = Recurrent()
    for row in rows:
        tokens = list(row)
        for _ in range(count):
            logits = model.unembed(model.hidden(jnp.array([tokens])))[0, -1]
            tokens.append(int(jnp.argmax(logits)))
        all_tokens.append(tokens[len(row) :])
    return np.array(all_tokens)


def test_a_recurrent_model_continues_padded_prompts_in_lists_of_rows():
    greedy = expected(ROWS, 2)
    lists = RIGHT.tolist(), [row.astype(bool) for row in RIGHT_MASK]
    for tokens, mask in ((LEFT, LEFT_MASK), lists):
        np.testing.assert_array_equal(generate(Recurrent(), tokens, 2, mask=mask), greedy)
        scores = log_probabilities(Recurrent(), tokens, mask=mask)
        assert np.count_nonzero(scores) == LEFT_MASK.sum() - len(ROWS)


@pytest.mark.parametrize(
    "options",
    [
        {"beams": 2},
        {"rows": 2},
        {"temperature": 1.0, "num_return_sequences": 2, "key": jax.random.key(0)},
    ],
)
@pytest.mark.parametrize("is_array", [True, False])
def test_rows_of_a_cache_are_gathered_by_its_take_alone(options, is_array):
    class Other(Recurrent):
        # An array has a `take` of its own, which would gather layers here.
        def init_cache(self, batch, length) -> Any:
            cache = super().init_cache(batch, length)
            if is_array:
                return cache[0][None]
            return cache

        def decode(self, tokens, cache, mask=None) -> Any:
            hidden, cache = super().decode(tokens, (cache[0],), mask)
            if is_array:
                return hidden, cache[0][None]
            return hidden, cache

    with pytest.raises(TypeError, match=r"rows cannot be gathered.* a method `take\(rows\)`"):
        generate(new(Other), LEFT, 3, mask=LEFT_MASK, **options)


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda hidden, cache: hidden, "returned one .* the hidden states and the updated cache"),
        (lambda hidden, cache: (hidden[:, -1], cache), r"hidden states of shape \(4, 8\) for"),
        (
            lambda hidden, cache: (hidden, (cache[0].astype(jnp.bfloat16),)),
            r"got float32\[4, 8\] as `cache\[0\]`, and returned bfloat16\[4, 8\]",
        ),
        (lambda hidden, cache: (hidden, (*cache, cache[0])), r"got nothing as `cache\[1\]`"),
    ],
)
@pytest.mark.parametrize("traced", [True, False])
def test_what_decode_returns_is_checked(returns, says, traced):
    class Wrong(Recurrent):
        def decode(self, tokens, cache, mask=None):
            return returns(*super().decode(tokens, cache, mask))

    run = lambda tokens: generate(new(Wrong), tokens, 3)
    if traced:
        run = jax.jit(run)
    with pytest.raises((TypeError, ValueError), match=f"`decode` of a Wrong .*{says}"):
        run(LEFT)


def test_what_unembed_returns_is_checked():
    class OfLast(Recurrent):
        def unembed(self, hidden):
            return hidden[:, -1] @ self.embed.T

    with pytest.raises(ValueError, match=r"`unembed` of a OfLast returned .* shape \(4, 11\)"):
        generate(new(OfLast), LEFT, 3)


def test_any_temperature_that_is_not_refused_is_a_temperature():
    greedy = expected(ROWS, 4)
    cold = {"mask": LEFT_MASK, "key": jax.random.key(0)}
    # Logits divided by it would be infinite.
    np.testing.assert_array_equal(generate(Recurrent(), LEFT, 4, temperature=1e-30, **cold), greedy)
    shifted = {"logits_fn": lambda logits: logits * 1e20, "temperature": 1e-30}
    np.testing.assert_array_equal(generate(Recurrent(), LEFT, 4, **cold, **shifted), greedy)
    for temperature in (1e-60, 1e39):
        with pytest.raises(ValueError, match="must be positive, from 1e-30"):
            generate(Recurrent(), LEFT, 4, temperature=temperature, **cold)
    with pytest.raises(TypeError, match="`temperature` is traced, and options of decoding"):
        jax.jit(lambda x: generate(Recurrent(), LEFT, 4, temperature=x, **cold))(1.0)


def test_lists_of_other_shapes_are_refused():
    for tokens, says in [
        ([], "so it is empty"),
        ([[]], "so it is empty"),
        ([1, 2], r"For one prompt, pass `\[tokens\]`"),
        ([[1], np.array([1, 2])], "The rows of `tokens` have from 1 to 2 tokens"),
        ([["a"]], "or a list of rows of integers. Encode text"),
    ]:
        with pytest.raises((TypeError, ValueError), match=says):
            generate(Recurrent(), tokens, 3)
    with pytest.raises(ValueError, match="The rows of `mask` have from 1 to 7 tokens"):
        generate(Recurrent(), LEFT, 3, mask=[[1], [1] * 7])
