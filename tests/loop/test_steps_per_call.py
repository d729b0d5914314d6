"""Several steps in a call give the bits of steps taken one at a time, whatever ends the call."""

import functools as ft
import itertools as it
import os
import signal
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from problem import (
    Stream,
    arrays,
    collate_fn,
    fit_quietly,
    loss_fn,
    make_examples,
    make_model,
    stops_after_skipping,
)

import redcoast as rc
from redcoast.distributed._mesh import batch_shards
from redcoast.loop import _calls, _stop
from redcoast.loop._calls import Pace

EXAMPLES = make_examples(72)
OPTIMIZER = optax.adam(1e-2)
ONE = rc.make_mesh(devices=jax.devices()[:1])
PLANNED = rc.make_mesh(data=2, fsdp=2, model=2)


def logged(*, steps_per_call, model=None, **options):
    """The state, and the metrics of each step and evaluation in the order of the calls of `log`."""
    lines = []
    given: dict[str, Any] = {"batch_size": 16, "mesh": ONE, "loss_fn": loss_fn}
    given |= {"collate_fn": collate_fn, "examples": EXAMPLES}
    given |= {"log": lambda metrics, step: lines.append((step, metrics))} | options
    if not {"steps", "epochs"} & given.keys():
        given["epochs"] = 3  # 13 batches, and one of 8
    examples, optimizer = given.pop("examples"), given.pop("optimizer", OPTIMIZER)
    model = make_model() if model is None else model
    state = fit_quietly(model, optimizer, examples, steps_per_call=steps_per_call, **given)
    return state, lines


def assert_same(one, other):
    for x, y in zip(arrays(one[0]), arrays(other[0]), strict=True):
        np.testing.assert_array_equal(x, y)
    assert str(one[1]) == str(other[1])  # NaN is not equal to itself


class Dropped(eqx.Module):
    """A network with dropout."""

    net: eqx.nn.MLP
    drop: eqx.nn.Dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, key):
        return self.net(self.drop(x, key=key))


def dropped_loss(model, batch, key):
    keys = jax.random.split(key, len(batch["x"]))
    logits = jax.vmap(model)(batch["x"], keys)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


def many_rows(loss):
    """A loss that is finite in float16 only for a small loss scale."""
    return lambda *args: jax.tree.map(lambda x: 1e3 * x, loss(*args))


CASES: dict[str, Any] = {
    "epochs": {},
    "planned": {"mesh": PLANNED},
    "accumulated": {"accumulate": 2, "mesh": rc.make_mesh(data=4, model=2)},
    "evaluated": {"evaluation": rc.Evaluation(EXAMPLES[:20], every=5)},
    "dropout": {"model": lambda: Dropped(make_model()), "loss_fn": dropped_loss},
    "float16": {"compute_dtype": jnp.float16, "loss_fn": many_rows(loss_fn), "average": 0.9},
    "schedule": {"optimizer": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1, 0, 9))},
    "stream": {"examples": lambda: Stream(EXAMPLES), "steps": None},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", few_of(CASES, "planned"))
def test_state_and_metrics_are_those_of_single_steps(case):
    options = dict(CASES[case])
    make = {
        name: options.pop(name) for name in ("model", "examples") if callable(options.get(name))
    }
    run = lambda count: logged(
        steps_per_call=count, **{name: fn() for name, fn in make.items()}, **options
    )
    assert_same(run(1), run(4))


@pytest.mark.thorough
def test_a_run_that_is_resumed_or_interrupted_has_the_same_bits(tmp_path, monkeypatch):
    """Also if it goes on with calls of another length, and a checkpoint cuts them."""
    monkeypatch.setattr(_stop, "_received", [])
    whole, lines = logged(steps_per_call=1)
    checkpoints = rc.Checkpoints(tmp_path, every=5)
    seen = []

    def log(metrics, step):
        seen.append((step, metrics))
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    first, _ = logged(steps_per_call=3, checkpoints=checkpoints, log=log)
    assert 6 < int(first.step) < 14
    assert [step for step, _ in seen] == list(range(1, int(first.step) + 1))
    monkeypatch.setattr(_stop, "_received", [])
    second, rest = logged(steps_per_call=4, checkpoints=checkpoints)
    assert_same((whole, lines), (second, seen + rest))
    rows = rc.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert all(row["step_seconds"] > 0 for row in rows[1:] if "step_seconds" in row)


def saved_in(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("at", few_of([1, 2, 4, 5, 6, 9, 13], 6))
def test_stop_ends_the_run_one_step_later_in_the_middle_of_a_call(at, tmp_path):
    def run(count):
        lines = []

        def log(metrics, step):
            lines.append((step, metrics))
            return rc.STOP if step == at else None

        directory = tmp_path / str(count)
        evaluation = rc.Evaluation(EXAMPLES[:20], every=6)
        state, _ = logged(
            steps_per_call=count, log=log, checkpoints=directory, evaluation=evaluation
        )
        assert saved_in(directory)[-1] == int(state.step) == lines[-1][0]
        return state, lines

    single, together = run(1), run(4)
    # The first step is read at once, and the others when they are evaluated.
    assert int(single[0].step) == {1: 1, 6: 6}.get(at, at + 1)
    assert_same(single, together)


def exploding(after):
    def collate(examples):
        bad = [e["index"] >= after for e in examples]
        return collate_fn(examples) | {"bad": np.array(bad)}

    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        return jnp.where(jnp.any(batch["bad"]), jnp.nan, value), aux

    return {"collate_fn": collate, "loss_fn": loss}


@pytest.mark.thorough
def test_skipped_steps_end_the_run_after_the_same_step_with_the_same_words(caplog):
    """The cause is sought in the state after that step, with its batch, and not at the call's end.

    Each example of the last epoch is NaN, and a call has more steps than are allowed in a row.
    """

    def run(count):
        caplog.clear()
        lines = []
        with stops_after_skipping(4), pytest.raises(FloatingPointError) as error:
            logged(
                steps_per_call=count,
                batch_size=8,
                log=lambda metrics, step: lines.append((step, metrics)),
                examples=lambda epoch: (
                    {**e, "index": e["index"] + 100 * (epoch == 1)} for e in EXAMPLES
                ),
                **exploding(100),
            )
        return str(error.value), str(lines), caplog.text.count("was skipped")

    single, together = run(1), run(7)
    assert "4 steps in a row, up to step 13" in single[0]
    assert single == together


@pytest.mark.thorough
def test_an_error_of_the_data_comes_after_the_steps_before_it(tmp_path):
    def collate(examples):
        if any(e["index"] == 40 for e in examples):
            raise OSError("no such image")
        return collate_fn(examples)

    in_order = lambda: iter(EXAMPLES)
    with pytest.raises(OSError, match="no such image"):
        logged(
            steps_per_call=8,
            batch_size=8,
            examples=in_order,
            collate_fn=collate,
            checkpoints=tmp_path,
        )
    assert saved_in(tmp_path) == [5]


class Clock:
    """A clock that advances by the seconds of a step."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def __call__(self):
        return self.now

    def run(self, pace, calls):
        counts = []
        for _ in range(calls):
            counts.append(pace.count)
            self.now += pace.count * self.seconds
            pace.see(pace.count)
        return counts


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [
        (1e-4, [1, 1, 1, 1, 2, 4, 8, 16, 32, 32]),
        (6e-4, [1, 1, 1, 1, 2, 4, 8, 8, 8, 8]),
        (4e-2, [1] * 10),
    ],
)
def test_a_call_takes_at_most_5_ms_and_calls_grow(seconds, counts):
    clock = Clock(seconds)
    assert clock.run(Pace(32, fixed=False, clock=clock), 10) == counts


def test_a_pause_between_calls_does_not_count():
    clock = Clock(1e-4)
    pace = Pace(32, fixed=False, clock=clock)
    clock.run(pace, 3)
    clock.now += 60  # an evaluation
    assert clock.run(pace, 6) == [1, 2, 4, 8, 16, 32]


def numbers_of_calls(monkeypatch, **options):
    """The numbers of steps of the calls of a run."""
    counts = []
    take = _calls.take_together

    def counted(together, state, group, stacked):
        counts.append(len(group))
        return take(together, state, group, stacked)

    monkeypatch.setattr(_calls, "take_together", counted)
    monkeypatch.setattr(_calls, "Pace", ft.partial(Pace, clock=it.count(0, 1e-5).__next__))
    logged(batch_size=4, **options)
    return counts


def test_by_default_short_steps_are_taken_together(monkeypatch):
    """Those of an epoch, of which an evaluation and the end cut the last calls."""
    evaluation = rc.Evaluation(EXAMPLES[:8], every=20)
    counts = numbers_of_calls(
        monkeypatch, steps_per_call=None, steps=40, evaluation=evaluation, mesh=PLANNED
    )
    assert counts == [1, 1, 1, 1, 2, 4, 8, 2, 20]


def printing_loss(model, batch, key):
    jax.debug.callback(lambda: None)
    return loss_fn(model, batch, key)


def waiting_loss(model, batch, key):
    rows = batch["x"]
    far = jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: 0.1 * x @ jnp.eye(16), rows)
    return loss_fn(model, batch | {"x": jax.lax.stop_gradient(far)}, key)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_call": 1},
        {"log": lambda metrics, step, state: None},  # needs each state
        {"loss_fn": printing_loss},
        {"loss_fn": waiting_loss},  # may take any time
        {"model": make_model(width=1024)},
    ],
    ids=["forbidden", "state", "effects", "open loop", "large"],
)
def test_other_steps_are_taken_alone(options, monkeypatch):
    assert not numbers_of_calls(monkeypatch, **{"steps_per_call": None, "steps": 3, **options})


@pytest.mark.thorough
def test_a_call_needs_no_more_memory_than_the_batches_of_the_run():
    """Room for the batches of a call is made before its first."""
    assert_same(logged(steps_per_call=10**12, steps=3), logged(steps_per_call=3, steps=3))


@pytest.mark.thorough
def test_a_guard_against_transfers_does_not_end_a_run():
    """It is for the user's own transfers, and not for those of the key, of the batches of several
    steps and of an evaluation."""
    options = {"model": make_model(), "steps": 3, "evaluation": rc.Evaluation(EXAMPLES[:4])}
    expected = logged(steps_per_call=None, **options)
    with jax.transfer_guard("disallow"):
        guarded = logged(steps_per_call=None, **options)
    assert_same(expected, guarded)


@pytest.mark.thorough
def test_keys_are_not_reported_as_reused():
    """JAX's check takes a key that a loop hands on for one that the loop has used up."""
    with jax.debug_key_reuse(True):
        _, metrics = logged(steps_per_call=None, steps=3)
    assert len(metrics) == 3


@pytest.mark.thorough
def test_a_state_that_changes_its_types_is_taken_alone():
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: -0.1 * g, updates), state.astype(jnp.float32)

    wide = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.bfloat16), update)
    single = logged(steps_per_call=1, steps=3, optimizer=wide)
    assert_same(single, logged(steps_per_call=None, steps=3, optimizer=wide))
    with pytest.raises(ValueError, match=r"from bfloat16\[\] to float32\[\].*`steps_per_call=1`"):
        logged(steps_per_call=3, steps=3, optimizer=wide)


def test_what_cannot_be_taken_together_says_so():
    keyed = lambda examples: collate_fn(examples) | {"key": jax.random.split(jax.random.key(0), 16)}
    loss = lambda model, batch, key: loss_fn(model, batch, batch["key"][0])
    for options, words in (
        ({"log": lambda metrics, step, state: None}, "`log` has a parameter `state`"),
        ({"collate_fn": keyed, "loss_fn": loss}, "typed keys"),
    ):
        with pytest.raises(ValueError, match=f"`steps_per_call=4` does not work.*{words}"):
            logged(steps_per_call=4, steps=2, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [ONE, PLANNED], ids=["one device", "planned"])
def test_prepare_gives_loops_of_ones_own_several_steps_in_a_call(mesh):
    """Each batch of a call is on the devices that it would be on alone."""
    batches = [collate_fn(EXAMPLES[8 * i : 8 * i + 8]) for i in range(4)]
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
    prepare = ft.partial(
        rc.prepare, make_model(), OPTIMIZER, loss_fn, batches[0], mesh=mesh, key=jax.random.key(0)
    )
    state, step, _ = prepare()
    rows = []
    for batch in batches:
        state, metrics = step(state, batch)
        rows.append(jax.device_get(metrics))
    together, steps, _ = prepare(steps_per_call=4)
    lowered = steps.lower(together, stacked)
    together, metrics = steps(together, stacked)
    assert_same((state, []), (together, []))
    for name, values in metrics.items():
        assert values.tolist() == [row[name] for row in rows]
    devices = batch_shards(mesh)
    place = lowered.compile().input_shardings[0][1][0]
    assert place.shard_shape((4, 8, 16)) == (4, 8 // devices, 16)
    with pytest.raises(
        ValueError, match=r"`batches`, x, has shape \(8, 16\).*it must be 4 batches"
    ):
        steps(together, batches[0])
