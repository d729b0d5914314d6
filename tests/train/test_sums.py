"""A loss, or a metric, that is a sum over the examples of a batch is a warning.

Only here: such a loss is another one for each batch size, in training and in an evaluation.
"""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from grids import few_of
from problem import collate_fn, make_examples
from test_coupled import APART, BATCH, COUPLED, MESHES, B, D, W, h

import redcoast as rc
from redcoast.sharding._function_reports import batch_faults

TABLE = jnp.ones((10, D))


def each(w, batch):
    return jnp.sum(jax.nn.softmax(h(w, batch[0]) / 4.0) ** 2, -1)


def tokens(w, batch):
    """The loss of each token, and a mask."""
    ids = jnp.tile(batch[1][:, None], (1, 5))
    logits = TABLE[ids] @ w["a"] @ TABLE.T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    return losses, jnp.tile(batch[2][:, None], (1, 5))


def inner_step(w, batch, key):
    grads = jax.grad(lambda w: jnp.mean(each(w, batch)))(w)
    return jnp.mean(each(jax.tree.map(lambda p, g: p - g, w, grads), batch))


def over_time(w, batch, key):
    step = lambda c, x: (h(w, c) + x, jnp.sum(c) / B)
    carry, losses = jax.lax.scan(step, batch[0], jnp.ones((5, B, D)))
    return jnp.mean(losses) + jnp.mean(carry)


def of_mask(w, batch, key):
    losses, mask = tokens(w, batch)
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)


MEANS = {
    **APART,
    **{name: fn for name, (fn, _) in COUPLED.items()},
    "by the length": lambda w, b, k: each(w, b).sum() / len(b[0]),
    "by an array": lambda w, b, k: each(w, b).sum() / jnp.float32(B),
    "before the sum": lambda w, b, k: jnp.sum(each(w, b) / B),
    "times the inverse": lambda w, b, k: each(w, b).sum() * (1 / B),
    "of a mask": of_mask,
    "with decay": lambda w, b, k: each(w, b).mean() + 0.1 * jnp.sum(w["a"] ** 2),
    "of parameters": lambda w, b, k: jnp.sum(w["a"]),
    "average": lambda w, b, k: jnp.average(each(w, b), weights=b[2]),
    "weights of a mean": lambda w, b, k: jnp.sum(each(w, b) * (b[2] / b[2].sum()[None])),
    "inner step": inner_step,
    "over time": over_time,
    "of parts": lambda w, b, k: each(w, b).reshape(4, B // 4).mean(1).mean(),
    "by an expected number": lambda w, b, k: each(w, b).sum() / 1000.0,
    "by a scaled number": lambda w, b, k: each(w, b).sum() / (B * 0.01),
    "own gradient that is a sum": lambda w, b, k: rc.with_gradient(
        each(w, b).mean(), w, jax.grad(lambda w: each(w, b).sum())(w)
    ),
    "own gradient": lambda w, b, k: rc.with_gradient(
        each(w, b).mean(), w, jax.grad(lambda w: each(w, b).mean())(w)
    ),
}

SUMS = {
    "sum": lambda w, b, k: each(w, b).sum(),
    "of all elements": lambda w, b, k: jnp.sum(h(w, b[0]) ** 2),
    "of means over tokens": lambda w, b, k: tokens(w, b)[0].mean(1).sum(),
    "count": lambda w, b, k: jnp.sum(h(w, b[0]).argmax(-1) == b[1]),
    "with decay": lambda w, b, k: 0.5 * jnp.sum(each(w, b)) + 0.1 * jnp.sum(w["a"] ** 2),
    "of halves": lambda w, b, k: jnp.sum(each(w, b) ** 2) / 2,
    "dot": lambda w, b, k: jnp.vdot(each(w, b), b[2]),
    "where": lambda w, b, k: jnp.sum(jnp.where(b[2] > 0, each(w, b), 0.0)),
    "vmap": lambda w, b, k: jax.vmap(lambda x: jnp.sum(h(w, x)))(b[0]).sum(),
    "compiled inside": lambda w, b, k: jax.jit(lambda w, b: each(w, b).sum())(w, b),
    "rematerialised": lambda w, b, k: jax.checkpoint(lambda w, b: each(w, b).sum())(w, b),
    "einsum": lambda w, b, k: jnp.einsum("bd,bd->", h(w, b[0]), b[0]),
}


def places(fn, mesh):
    def loss(w, batch, key):
        result = fn(w, batch, key)
        value = result[0] if isinstance(result, tuple) else result
        return value.astype(jnp.float32), {}

    return batch_faults(loss, W, (BATCH, jax.random.key(0)), mesh)[0]


@pytest.mark.parametrize("name", few_of(MEANS, *list(MEANS)[::2]))
def test_means_are_no_sums(name):
    assert not places(MEANS[name], MESHES[0])


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_found_with_their_line(name):
    for mesh in MESHES:
        (line,) = places(SUMS[name], mesh).values()
        assert line.startswith("test_sums.py:")


def messages_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        call()
    return [str(warning.message) for warning in caught]


def metric_sum(model, batch, key):
    return jnp.mean((batch["x"] @ model) ** 2), {"total": jnp.sum(batch["x"])}


def loss_sum(model, batch, key):
    return jnp.sum((batch["x"] @ model) ** 2), {"total": jnp.sum(batch["x"])}


DATA = {"collate_fn": collate_fn, "batch_size": 16}
MODEL = jnp.ones(16)


def evaluate(loss_fn, count, **options):
    return rc.evaluate(MODEL, make_examples(count), loss_fn=loss_fn, **DATA, **options)


def fit(loss_fn, **options):
    settings = {"steps": 1, "log": False, **DATA, **options}
    return rc.fit(MODEL, optax.sgd(1e-3), make_examples(32), loss_fn=loss_fn, **settings)


EVALUATION = rc.Evaluation(make_examples(40))
CALLS = {
    "evaluate": (lambda: evaluate(loss_sum, 40), [["`loss`", "`total`"]]),
    "a metric": (lambda: evaluate(metric_sum, 40), [["`total`"]]),
    "one batch": (lambda: evaluate(loss_sum, 16), []),
    "fit": (lambda: fit(loss_sum), [["`loss`"]]),
    "one device": (lambda: fit(loss_sum, mesh=MESHES[1]), [["`loss`"]]),
    "fit and evaluate": (
        lambda: fit(loss_sum, evaluation=EVALUATION),
        [["`loss`"], ["`total`"]],
    ),
    "a metric of a step": (lambda: fit(metric_sum), []),
    "a metric of microbatches": (lambda: fit(metric_sum, accumulate=2), [["`total`"]]),
}


@pytest.mark.few("a metric of microbatches")
@pytest.mark.parametrize("name", CALLS)
def test_each_sum_is_said_once(name):
    call, expected = CALLS[name]
    messages = messages_of(call)
    assert len(messages) == len(expected)
    for text, names in zip(messages, expected, strict=True):
        listed = text.partition(" as ")[2].partition(". ")[0]
        assert all(name in listed for name in names)
        assert listed.count("`") == 2 * len(names)
        assert "test_sums.py:" in text
