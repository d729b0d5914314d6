"""What processes compare: equal programs are equal in all of them, and different ones are named."""

import functools as ft
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.core import _program_lines
from redcoast.core._program_lines import program_lines
from redcoast.distributed import _kv_store
from redcoast.distributed._agreement import Listing, agree, program_listing, tree_listing
from redcoast.loop import _first_examples

BANK = np.arange(6.0, dtype=np.float32)


def compare(together, *listings):
    first, second = together(*(ft.partial(agree, {}, {"the program": x}) for x in listings))
    assert first == second
    return first


def texts(fn, *args):
    return [text for text, _ in program_lines(jax.make_jaxpr(fn)(*args))]


def step_with(rate, *, weight=1.0, bank: Any = BANK, callback: Any = False):
    """A training step; all of the arguments are read from its closure."""
    state = rc.init_state(lambda key: {"w": jnp.ones(6)}, optax.adam(rate), key=jax.random.key(0))

    def loss_fn(model, batch, key):
        if callback:
            jax.debug.callback(lambda x: None, batch)
        noise = jax.random.normal(key, (6,))
        body = lambda x, row: (x + jnp.tanh(row * model["w"]).sum(), None)
        total, _ = jax.lax.scan(body, jnp.zeros(()), batch)
        return weight * total + (noise * bank * jax.nn.relu(model["w"])).sum()

    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optax.adam(rate))
    return jax.make_jaxpr(step)(state, jnp.ones((2, 6)))


@pytest.mark.thorough
def test_the_same_program_has_the_same_lines():
    # It protects from refusing a run whose processes agree: addresses, and what caches share.
    first = [text for text, _ in program_lines(step_with(0.1))]
    jax.clear_caches()
    assert [text for text, _ in program_lines(step_with(0.1))] == first
    assert not any(" at 0x" in text for text in first)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rate": 0.2}, "0.2"),
        ({"weight": 2.0}, "2.0:float32"),
        ({"bank": BANK[::-1].copy()}, "constant float32[6]"),
        ({"callback": True}, "debug_callback"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_step_closes_over_is_compared(together, options, named):
    changed: dict[str, Any] = {"rate": 0.1} | options
    listings = [program_listing(x) for x in (step_with(0.1), step_with(**changed))]
    error = compare(together, *listings)
    assert error.startswith("The processes of this run disagree. the program: ")
    assert named in error.partition(" on process 0; ")[2]


def test_the_line_of_an_equation_is_named(together):
    listings = [program_listing(jax.make_jaxpr(lambda x, y=y: x * y)(1.0)) for y in (2.0, 3.0)]
    assert "(test_agreement.py:" in compare(together, *listings)
    assert compare(together, listings[0], listings[0]) == ""


def test_values_that_only_one_process_has_differ(together):
    # An evaluation in one process only has names that the others lack.
    errors = together(lambda: agree({"a": 1}), lambda: agree({"a": 1, "b": 2}))
    assert errors[0] == errors[1]
    assert "b: null on process 0; 2 on process 1." in errors[0]


def test_numbers_of_numpy_are_exchanged(monkeypatch):
    """JSON has none, and a batch size or the decay of an average may be one."""
    texts: dict[str, str] = {}
    store = SimpleNamespace(key_value_set=texts.__setitem__, key_value_delete=texts.pop)
    monkeypatch.setattr(_kv_store, "key_value_store", lambda: store)
    monkeypatch.setattr(_kv_store, "_wait", lambda *_: next(iter(texts.values())))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    values = _kv_store.exchange("numbers of NumPy", [np.int64(4), {"average": np.float32(0.5)}])
    assert values == [[4, {"average": 0.5}]] * 2


def test_a_longer_listing_and_long_lines(together):
    error = compare(together, Listing(["a"]), Listing(["a", "b" * 10_000]))
    assert "nothing on process 0; bbb" in error
    assert len(error) < 1000


def test_a_difference_at_the_end_of_a_long_line_is_shown(together):
    error = compare(together, Listing(["a" * 5000 + "b"]), Listing(["a" * 5000 + "c"]))
    assert "aab on process 0; ..." in error
    assert "aac on process 1." in error


def test_a_leaf_of_the_model_is_named(together):
    model = {"a": np.ones(9), "b": {"c": jnp.zeros((3, 3))}}
    other = {"a": np.ones(9), "b": {"c": jnp.ones((3, 3))}}
    error = compare(together, tree_listing(model), tree_listing(other))
    assert "the program: b/c: float32[3, 3] with checksum" in error


def _examples(seed, collate_fn=np.stack):
    examples = np.random.default_rng(seed).normal(size=(100, 3))
    return _first_examples.first_examples(examples, collate_fn, batch_size=16, mesh=rc.make_mesh())


def test_examples_are_compared_unless_they_are_random(together):
    assert compare(together, _examples(0), _examples(0)) == ""
    assert "the program: example 0, the batch: [" in compare(together, _examples(0), _examples(1))
    rng = np.random.default_rng(0)
    flipped = lambda rows: np.stack(rows) * rng.choice([-1, 1])
    assert compare(together, _examples(0, flipped), _examples(0, flipped)) == ""


def test_an_example_anywhere_may_differ(together):
    def last(rows):
        batch = np.stack(rows)
        return np.where(batch == 99, -1, batch)

    of = lambda fn: _first_examples.first_examples(
        np.arange(100), fn, batch_size=64, mesh=rc.make_mesh()
    )
    assert "example 99, the batch: 99:int" in compare(together, of(np.stack), of(last))


def test_arrays_of_all_kinds_are_described():
    describe = _program_lines.describe_array
    assert describe(jax.random.key(3)).endswith("[0, 3]:key<fry>")
    assert describe(np.float32(0.1)) == "0.10000000149011612:float32"
    assert describe(jnp.zeros((), jnp.bfloat16)).startswith("bfloat16")
    assert describe(np.zeros((0, 2))).startswith("float64[0, 2] with")
    assert describe(np.zeros(9)[::2]) != describe(np.ones(9)[::2])
