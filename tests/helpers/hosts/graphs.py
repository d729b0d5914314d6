"""Training on graphs, and predictions with a key for each, in several processes, for tests."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import redcoast as rc

sys.path.append(str(Path(__file__).parents[1]))
from graph_problem import GRAPHS, collate_fn, init_fn, loss_fn, node_values, predict_fn

rc.initialize()
run: dict[str, Any] = {"collate_fn": collate_fn, "batch_size": 8, "mesh": rc.make_mesh()}
state = rc.fit(init_fn, optax.sgd(0.05), GRAPHS, loss_fn=loss_fn, steps=3, log=False, **run)
outputs = rc.predict_examples(state.model, GRAPHS, predict_fn=predict_fn, **run)
of_nodes = lambda model, batch, key: node_values(model, batch["graphs"])
try:
    refused = rc.predict_examples(
        state.model, GRAPHS, predict_fn=of_nodes, output_fn=list, gather="none", **run
    )
except ValueError as error:
    refused = str(error)
actual = {
    "w": np.asarray(state.model["w"]).tolist(),
    "loss": rc.evaluate(state.model, GRAPHS, loss_fn=loss_fn, **run)["loss"],
    "outputs": [float(x) for x in outputs],
    "refused": refused,
}


# Each process makes the keys of its own rows.
def with_keys(examples):
    numbers = np.array([example["label"] for example in examples]).view(np.uint32)
    return {"key": jax.vmap(jax.random.key)(numbers)}


def drawn(model, batch, key):
    return jax.vmap(jax.random.uniform)(batch["key"])


keyed = rc.predict_examples(
    state.model,
    GRAPHS,
    collate_fn=with_keys,
    predict_fn=drawn,
    batch_size=8,
    mesh=run["mesh"],
)
labels = np.array([graph["label"] for graph in GRAPHS]).view(np.uint32)
expected = jax.vmap(jax.random.uniform)(jax.vmap(jax.random.key)(labels))
np.testing.assert_allclose(keyed, expected)
print("RESULT " + json.dumps(actual), flush=True)
