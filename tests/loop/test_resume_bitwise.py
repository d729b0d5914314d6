"""A run that is stopped anywhere goes on bit by bit as if it never had been, on the same mesh."""

import dataclasses
import time
from typing import Any

import equinox as eqx
import grain
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
    make_examples,
    make_model,
    metric_fn,
    predict_fn,
)

import redcoast as rc

EXAMPLES = make_examples(44)
STEPS = 16  # 44 examples in batches of 8: an epoch ends in the middle of every sixth batch or so


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __call__(self, x, key=None):
        return self.mlp(self.dropout(x, key=key))


def loss_fn(model, batch, key):
    keys = jax.random.split(key, batch["x"].shape[0])
    logits = jax.vmap(model)(batch["x"], keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weights = (batch["y"] + 1).astype(losses.dtype)  # so that microbatches weigh differently
    return jnp.sum(losses * weights) / jnp.sum(weights), {"weight": jnp.sum(weights)}


def augment(examples, rngs):
    batch = collate_fn(examples)
    if rngs is not None:
        batch["x"] += np.stack([r.normal(size=16) for r in rngs]).astype(np.float32)
    return batch


def slowly(examples, rngs):
    time.sleep(0.004)  # batches are made ahead, in threads
    return augment(examples, rngs)


def schedule():
    rate = rc.learning_rate_schedule(1e-2, examples=44, batch_size=8, steps=STEPS)
    return optax.inject_hyperparams(optax.adamw)(rate)


def grain_stream():
    source = grain.MapDataset.source(EXAMPLES).seed(3).shuffle().repeat()
    return iter(source.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


CASES = {
    "prefetch in flight": {"collate_fn": slowly},
    "accumulation and a schedule on a mesh": {
        "accumulate": 2,
        "mesh": {"fsdp": 2, "model": 2},
        "collate_fn": augment,
        "optimizer": schedule,
    },
    "evaluation and the best": {"evaluated": True, "compute_dtype": jnp.bfloat16},
    "stream": {"examples": lambda: Stream(EXAMPLES * 4)},
    "Grain": {"examples": grain_stream, "collate_fn": augment},
    "examples by epoch": {"examples": lambda: lambda epoch: EXAMPLES[epoch:] + EXAMPLES[:epoch]},
}


def evaluation(calls):
    """Evaluates every third step, on dropout's inference mode too, and keeps the best."""

    def metric(examples, outputs):
        actual = metric_fn(examples, outputs)["right"]
        calls.append(actual)
        return {"right": actual}

    predict = lambda m, b, k: predict_fn(m.mlp, b, k)
    return rc.Evaluation(EXAMPLES[:20], every=3, predict_fn=predict, metric_fn=metric)


def train(case, directory, log):
    options = CASES[case] | {}
    sizes = options.pop("mesh", {"devices": jax.devices()[:1]})
    examples = options.pop("examples", lambda: EXAMPLES)()
    optimizer = options.pop("optimizer", lambda: optax.adamw(1e-2))()
    policy: dict[str, Any] = {}
    if options.pop("evaluated", False):
        options["evaluation"] = evaluation([])
        policy = {"best": "right", "mode": "max"}
    checkpoints = rc.Checkpoints(directory, every=100, **policy)
    return fit_quietly(
        Net(make_model(), eqx.nn.Dropout(0.2)),
        optimizer,
        examples,
        loss_fn=loss_fn,
        batch_size=8,
        steps=STEPS,
        mesh=rc.make_mesh(**sizes),
        checkpoints=checkpoints,
        log=log,
        steps_per_call=1,  # an error in `log` stops the run after this step
        **({"collate_fn": collate_fn} | options),
    )


class Stop(Exception):
    pass


def recorded(case, directory, stop=None):
    """All that is logged, by step, and the state at the end; ended by an error after `stop`."""
    lines = {}

    def log(metrics, step):
        lines.setdefault(step, {}).update(metrics)
        # What is logged is a step behind.
        if step == stop and "loss" in metrics:
            raise Stop

    try:
        state = train(case, directory, log)
    except Stop:
        state = None
    return lines, state


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    few_of(CASES, "accumulation and a schedule on a mesh", "Grain"),
)
def test_resume_is_bitwise(case, tmp_path):
    expected, whole = recorded(case, tmp_path / "whole")
    # Stopped in the middle of the second epoch, where an evaluation is due.
    parts = tmp_path / "parts"
    recorded(case, parts, 8)
    last = max(saved(parts))
    assert 8 <= last <= 10
    lines, state = recorded(case, parts)
    assert min(lines) == last + ("eval/loss" not in lines[min(lines)])
    by_step = {row["step"]: row for row in rc.read_metrics(parts / "metrics.jsonl")}
    assert sorted(expected) == sorted(by_step) == list(range(1, STEPS + 1))
    for step, line in expected.items():
        assert by_step[step] | line == by_step[step], step
    for a, b in zip(arrays(state), arrays(whole), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {*saved(tmp_path / "whole"), last} == {*saved(parts), last}


def saved(directory):
    names = (p.name for p in (directory / "checkpoints").iterdir())
    return sorted(int(name) for name in names if name.isdigit())


@pytest.mark.thorough
def test_a_signal_does_not_wait_for_an_evaluation(tmp_path):
    """It may take longer than a scheduler waits; the run begins with it when it goes on."""
    calls, lines = [], {}

    def metric(examples, outputs):
        calls.append(1)
        return {"calls": len(calls)}

    each_step = dataclasses.replace(evaluation([]), metric_fn=metric, every=1)
    log = lambda metrics, step: lines.setdefault(step, {}).update(metrics)
    run = lambda: fit_quietly(
        Net(make_model(), eqx.nn.Dropout(0.2)),
        optax.adamw(1e-2),
        EXAMPLES,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=8,
        steps=3,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        checkpoints=rc.Checkpoints(tmp_path),
        log=log,
        evaluation=each_step,
    )
    for _ in range(2):
        with rc.stop_on_signal(1e-9):
            run()
    state = run()
    assert state.step == 3
    # A rehearsal for each run, and an evaluation after each step.
    assert len(calls) == 6
    assert [lines[step]["eval/calls"] for step in (1, 2, 3)] == [3, 5, 6]
