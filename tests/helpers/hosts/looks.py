"""A run of several processes whose loggers look at the state or stop it, or which stops early.

looks.py '{"directory": "...", "stop": "state"}'
"""

import json
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redcoast as rc

asked = json.loads(sys.argv[1])
rc.initialize()
rows = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
model = eqx.nn.MLP(8, 8, 16, depth=1, key=jax.random.key(0))
seen: list[int] = []


def loss_fn(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)


@jax.jit
def norm(weight):
    return jnp.linalg.norm(weight)


def look(metrics, step, state):
    """Computes with the whole state, which takes all processes; one of them asks to stop."""
    assert float(norm(state.model.layers[0].weight)) > 0
    assert "loss" in metrics or "eval/loss" in metrics
    seen.append(step)
    if asked["stop"] == "state" and step == 3 and jax.process_index() == 1:
        return rc.STOP
    return None


def plain(metrics, step):  # called in process 0
    return rc.STOP if asked["stop"] == "plain" and step == 3 else None


def metric_fn(examples, outputs):
    return {"value": values.pop(0)}


values = [0.0, 3.0, 1.0, 2.0, 2.0, 2.0]  # the first is before the first step
early = asked["stop"] == "early"
evaluation = rc.Evaluation(rows[:8], every=100)
if early:
    same = lambda model, batch, key: batch
    evaluation = rc.Evaluation(rows[:8], every=2, predict_fn=same, metric_fn=metric_fn)
state = rc.fit(
    model,
    optax.adam(1e-2),
    rows,
    loss_fn=loss_fn,
    batch_size=8,
    steps=12,
    mesh=rc.make_mesh(fsdp=2),
    average=0.9,
    evaluation=evaluation,
    early_stopping=rc.EarlyStopping(2, metric="value", mode="min") if early else None,
    checkpoints=asked["directory"],
    log=[look, plain, rc.progress_logger(False)],
)
sums = jax.jit(lambda arrays: [x.sum() for x in arrays])
arrays = jax.tree.leaves(eqx.filter((state.model, state.averaged_model), eqx.is_array))
total = [float(x) for x in sums(arrays)]
print("RESULT", json.dumps({"step": int(state.step), "seen": max(seen), "total": total}))
