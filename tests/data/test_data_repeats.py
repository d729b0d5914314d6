"""Batches that are larger than the dataset."""

import jax
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model

import redcoast as rc

EXAMPLES = make_examples(16)


def fit(**options):
    settings = {"collate_fn": collate_fn, "loss_fn": loss_fn, "log": False}
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    return rc.fit(make_model(), optax.sgd(0.1), mesh=mesh, **{**settings, **options})


@pytest.mark.parametrize(
    ("count", "length", "warned"),
    [(10, {"steps": 2}, True), (10, {"epochs": 2}, True), (10, {"epochs": 1}, False)],
    ids=["steps", "epochs", "one short batch"],
)
@pytest.mark.few("steps")
def test_a_batch_with_repeated_examples_warns(count, length, warned, caplog):
    """With `epochs=1` the batch is short instead, and contains each example once."""
    seen = []

    def collate(examples):
        seen.append([example["index"] for example in examples])
        return collate_fn(examples)

    fit(**{"steps": None, **length}, examples=EXAMPLES[:count], collate_fn=collate, batch_size=16)
    words = "`batch_size=16` is more than the 10 examples: a batch spans"
    assert (words in caplog.text) == warned
    trained = seen[1:]  # the first is collated for its shapes
    assert any(len(set(batch)) < len(batch) for batch in trained) == warned
    caplog.clear()
    fit(steps=2, examples=EXAMPLES[:16], batch_size=16)
    assert not caplog.text
