"""More examples in a batch than there are."""

import jax
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model

import redcoast as rc

EXAMPLES = make_examples(16)


def fit(**options):
    given = {"collate_fn": collate_fn, "loss_fn": loss_fn, "progress": False}
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    return rc.fit(make_model(), optax.sgd(0.1), mesh=mesh, **{**given, **options})


@pytest.mark.parametrize(
    ("count", "length", "warned"),
    [(10, {"steps": 2}, True), (10, {"epochs": 2}, True), (10, {"epochs": 1}, False)],
    ids=["steps", "epochs", "one short batch"],
)
def test_a_batch_that_holds_examples_several_times_is_a_warning(count, length, warned, caplog):
    """A batch of one epoch is short instead, and holds each once."""
    seen = []

    def collate(examples):
        seen.append([example["index"] for example in examples])
        return collate_fn(examples)

    fit(**{"steps": None, **length}, examples=EXAMPLES[:count], collate_fn=collate, batch_size=16)
    words = "`batch_size=16` is more than the 10 examples that there are"
    assert (words in caplog.text) == warned
    trained = seen[1:]  # the first is made for its shapes
    assert any(len(set(batch)) < len(batch) for batch in trained) == warned
    caplog.clear()
    fit(steps=2, examples=EXAMPLES[:16], batch_size=16)
    assert not caplog.text
