"""A run that an earlier version saved is resumed.

`tests/fixtures/run_of_0.1.0.zip` holds a run directory after three steps of seven, written before
modules lay in folders; the arrays of its state; and the metrics that the same version logged for
the steps after it.
"""

import json
import zipfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from paths import FIXTURES
from problem import collate_fn, loss_fn, make_examples, make_model, quiet

import redcoast as rc


def collate(examples):
    return collate_fn(examples) | {"index": np.array([e["index"] for e in examples])}


def loss(model, batch, key):
    value, aux = loss_fn(model, batch, key)
    return value, {**aux, "sum": jnp.sum(batch["index"]).astype(jnp.float32)}


def test_a_run_of_an_earlier_version_is_restored_bit_for_bit_and_resumed(tmp_path):
    with zipfile.ZipFile(FIXTURES / "run_of_0.1.0.zip") as archive:
        archive.extractall(tmp_path)
    optimizer = optax.adamw(1e-2)
    create = lambda: rc.init_state(
        lambda key: make_model(width=8), optimizer, key=jax.random.key(9)
    )
    state = rc.load_checkpoint(tmp_path / "run" / "checkpoints" / "3", create())
    with np.load(tmp_path / "at3.npz") as file:
        saved = dict(file)
    actual = eqx.filter((state.model, state.opt_state), eqx.is_array)
    for path, x in jax.tree_util.tree_leaves_with_path(actual):
        name = jax.tree_util.keystr(path, simple=True, separator="|")
        np.testing.assert_array_equal(np.asarray(x), saved[name], err_msg=name)
    lines = []
    rc.fit(
        make_model(width=8),
        optimizer,
        make_examples(40),
        collate_fn=collate,
        loss_fn=loss,
        batch_size=16,
        steps=7,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        evaluation=rc.Evaluation(make_examples(8, seed=2), every=2),
        checkpoints=rc.Checkpoints(tmp_path / "run"),
        log=quiet(lambda metrics, step: lines.append({"step": step, **metrics})),
    )
    then = json.loads((tmp_path / "after.json").read_text())
    assert [line["step"] for line in lines] == [line["step"] for line in then]
    for now, before in zip(lines, then, strict=True):
        # The order of the data is the same; processors may round differently.
        assert now.get("sum") == before.get("sum")
        for name in before:
            np.testing.assert_allclose(now[name], before[name], rtol=1e-5)
