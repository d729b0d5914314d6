"""A run of several processes, for tests: what it is told on the command line, it prints at the end.

run.py '{"mesh": {"data": 2}, "directory": "...", "fault": "kill", "who": 1, "at": 5}'
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redcoast as rc

sys.path.insert(0, str(Path(__file__).parents[1]))
from problem import fit_quietly, stops_after_skipping

ROWS = 50
asked = json.loads(sys.argv[1])
rc.initialize()
faulty = jax.process_index() == asked.get("who")
fault = asked.get("fault") if faulty else None
collated: list[int] = []
# What a function reads by name is not part of its code.
SCALE = 2.0 if fault == "other constant" else 1.0
OTHER = 0.5
TEMPERATURE = 2.0 if fault == "other prediction" else 1.0


def make_fault() -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "raise":
        raise KeyError("no such image")
    if fault == "hang":
        time.sleep(asked["seconds"])


def examples() -> list[tuple[np.ndarray, int, int]]:
    rng = np.random.default_rng(5 if fault == "other data" else 0)
    rows = ROWS - 1 if fault == "fewer examples" else ROWS
    return [(rng.normal(size=8).astype(np.float32), i % 3, i) for i in range(rows)]


def collate_fn(rows, rngs=None):
    if rngs is not None:  # in training
        collated.extend(int(i) for _, _, i in rows)
    if len(collated) > asked.get("at", 10**9):
        asked["at"] = 10**9
        make_fault()
    x = np.stack([np.full(8, np.nan) if i in asked.get("nan", []) else x for x, _, i in rows])
    if fault == "other collate":
        x = x * OTHER
    if rngs is not None:
        x = x + 0.1 * np.stack([rng.normal(size=8) for rng in rngs])
    return x.astype(np.float32), np.array([y for _, y, _ in rows], np.int32)


def loss_fn(model, batch, key):
    x, y = batch
    x = eqx.nn.Dropout(0.1, inference=False)(x, key=key)
    losses = optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y)
    if fault == "callback":
        jax.debug.callback(lambda x: None, losses)
    return SCALE * jnp.mean(losses), {"largest": jnp.max(losses)}


def predict_fn(model, batch, key):
    return jax.nn.softmax(TEMPERATURE * jax.vmap(model)(batch[0]))


def metric_fn(rows, outputs):
    return {
        "right": float(
            np.mean([np.argmax(p) == y for (_, y, _), p in zip(rows, outputs, strict=True)])
        )
    }


mesh = rc.make_mesh(**asked["mesh"])
model = eqx.nn.MLP(8, 3, 32, 2, key=jax.random.key(2 if fault == "other values" else 1))
directory = asked.get("directory")
metrics: list[tuple[int, dict[str, float]]] = []
data = examples()
if asked.get("twice"):  # a first run that ends with an error on all of them
    with contextlib.suppress(ValueError):
        rc.fit(
            model,
            optax.sgd(0.1),
            data,
            collate_fn=collate_fn,
            loss_fn=lambda model, batch, key: jnp.log(-1.0) * jnp.sum(model(batch[0][0])),
            batch_size=16,
            steps=2,
            log=False,
        )
common = {"collate_fn": collate_fn, "mesh": mesh, "batch_size": 8 if fault == "batch" else 16}
validation = data[1:22] if fault == "other evaluation" else data[:21]
with contextlib.ExitStack() as limits:
    if "max_seconds" in asked:
        limits.enter_context(rc.stop_on_signal(asked["max_seconds"]))
    if "max_skipped" in asked:
        limits.enter_context(stops_after_skipping(asked["max_skipped"]))
    state = fit_quietly(
        model,
        optax.adamw(0.1 if fault == "learning rate" else 0.01),
        data,
        **common,
        loss_fn=(lambda *args: loss_fn(*args)) if fault == "other code" else loss_fn,
        evaluation=rc.Evaluation(validation, predict_fn=predict_fn, metric_fn=metric_fn),
        steps=asked.get("steps", 12),
        checkpoints=rc.Checkpoints(directory, every=3, keep=2) if directory else None,
        log=lambda values, step: metrics.append((step, values)),
    )
trained = list(collated)


def decode(path):
    """What a language model goes on with, greedily and with two beams."""
    decoder = rc.load_pretrained(path, mesh=mesh)
    prompts = np.random.default_rng(0).integers(1, 64, (16, 6))
    return [
        np.asarray(rc.generate(decoder, prompts, max_new_tokens=4, beams=beams)).tolist()
        for beams in (1, 2)
    ]


predict = {**common, "predict_fn": predict_fn, "output_fn": lambda p: p.tolist()}
with rc.stop_on_signal(mesh=mesh):  # also where a signal stopped the run
    actual = {
        "process": jax.process_index(),
        "step": int(state.step),
        "metrics": metrics,
        "collated": trained,
        "decoded": decode(asked["weights"]) if "weights" in asked else None,
        "evaluation": rc.evaluate(state.model, data, loss_fn=loss_fn, **common),
        **{
            x: rc.predict_examples(state.model, data, gather=x, **predict)
            for x in asked.get("gather", [])
        },
    }
print("RESULT " + json.dumps(actual), flush=True)
