"""Graphs whose labels are predicted, in flat batches of all nodes and edges."""

import jax
import jax.numpy as jnp
import numpy as np

import redcoast as rc

SIZES = [5, 3, 6, 2, 4]


def make_graph(seed):
    rng = np.random.default_rng(seed)
    nodes = SIZES[seed % len(SIZES)]
    return {
        "nodes": rng.normal(size=(nodes, 4)).astype(np.float32),
        "edges": rng.integers(0, nodes, (2 * nodes, 2)).astype(np.int32),
        "label": np.float32(rng.normal()),
    }


GRAPHS = [make_graph(seed) for seed in range(10)]


def flat_batch(graphs):
    """All nodes and edges, as PyG and jraph have them."""
    sizes = [len(graph["nodes"]) for graph in graphs]
    starts = np.cumsum([0, *sizes[:-1]])
    edges = [graph["edges"] + start for graph, start in zip(graphs, starts, strict=True)]
    senders, receivers = np.concatenate(edges).astype(np.int32).T
    return {
        "nodes": np.concatenate([graph["nodes"] for graph in graphs]),
        "senders": senders,
        "receivers": receivers,
        "graph": np.repeat(np.arange(len(graphs), dtype=np.int32), sizes),
    }


def collate_fn(graphs):
    labels = np.stack([graph["label"] for graph in graphs])
    return {"graphs": rc.per_batch(flat_batch(graphs)), "label": labels}


def init_fn(key):
    return {"w": 0.3 * jax.random.normal(key, (4, 4)), "v": jnp.ones(4) / 4}


def node_values(model, graphs):
    x = graphs["nodes"] @ model["w"]
    sent = jax.ops.segment_sum(x[graphs["senders"]], graphs["receivers"], len(x))
    return jax.nn.tanh(x + sent) @ model["v"]


def predict_fn(model, batch, key):
    values = node_values(model, batch["graphs"])
    return jax.ops.segment_sum(values, batch["graphs"]["graph"], len(batch["label"]))


def loss_fn(model, batch, key):
    return jnp.mean((predict_fn(model, batch, key) - batch["label"]) ** 2)
