"""Finds exactly the losses in which the examples of a batch depend on each other."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from jax import lax
from problem import collate_fn, fit_quietly, loss_fn, make_examples, make_model
from sharding_helpers import real_mesh

import redcoast as rc

B, D = 16, 8
W = {"a": jnp.ones((D, D)), "b": jnp.ones((D,))}
BATCH = jnp.ones((B, D)), jnp.zeros(B, int), jnp.ones(B)
MESHES = [rc.make_mesh(), rc.make_mesh(devices=jax.devices()[:1])]


def h(w, x):
    return jnp.tanh(jnp.dot(x, w["a"]) + jnp.broadcast_to(w["b"], (*x.shape[:-1], D)))


def unit(z):
    return z / jnp.broadcast_to(jnp.linalg.norm(z, axis=-1, keepdims=True), z.shape)


def spread(x, z):
    return jnp.broadcast_to(x, z.shape)


def clip(w, batch, key):
    logits = unit(h(w, batch[0])) @ unit(batch[0]).T
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()


def batch_norm(w, batch, key):
    z = h(w, batch[0])
    return jnp.mean(jnp.square((z - spread(z.mean(0), z)) / spread(jnp.sqrt(z.var(0)), z)))


def adapted(w, batch, key):
    """A gradient step on all examples, then the loss on each; second-order."""
    grads = jax.grad(lambda w: jnp.mean(h(w, batch[0]) ** 2))(w)
    return jnp.mean(h(jax.tree.map(lambda p, g: p - g, w, grads), batch[0]))


def router(w, batch, key):
    """Load balancing as in arXiv:2101.03961: a product of two means."""
    z = jax.nn.softmax(h(w, batch[0]))
    chosen = jax.nn.one_hot(jnp.argmax(z, -1), D)
    return jnp.mean(z) + jnp.sum(z.mean(0) * chosen.mean(0))


def cross_correlation(w, batch, key):
    z = h(w, batch[0])
    return jnp.sum((z.T @ z / B - jnp.eye(D)) ** 2)


def in_a_loop(w, batch, key):
    step = lambda c, _: (h(w, c - spread(c.mean(0), c)), None)
    return lax.scan(step, batch[0], None, length=2)[0].mean()


def delayed(w, batch, key):
    """A mean over all examples, which a loop hands on for three iterations."""
    z = h(w, batch[0])
    step = lambda c, _: ((z.mean(0), c[0], c[1], c[2]), None)
    (*_, mean), _ = lax.scan(step, (jnp.zeros(D),) * 4, None, length=5)
    return jnp.mean((z - spread(mean, z)) ** 2)


def mixed_up(w, batch, key):
    other = batch[0][jax.random.permutation(key, B)]
    return jnp.mean(h(w, 0.5 * batch[0] + 0.5 * other))


def balanced(w, batch, key):
    """Load balancing by counted tokens."""
    z = jax.nn.softmax(h(w, batch[0]))
    sizes = jnp.bincount(jnp.argmax(z, -1), length=D)
    return jnp.sum(z.mean(0) * (sizes / B).astype(z.dtype))


COUPLED = {
    "balanced": (balanced, "mul"),
    "clip": (clip, "dot_general"),
    "pairs": (lambda w, b, k: jnp.mean((h(w, b[0])[:, None] - h(w, b[0])[None]) ** 2), "sub"),
    "batch norm": (batch_norm, "reduce_sum"),
    "adapted": (adapted, "dot_general"),
    "router": (router, "mul"),
    "cross-correlation": (cross_correlation, "integer_pow"),
    "in a loop": (in_a_loop, "reduce_sum"),
    "delayed by a loop": (delayed, "reduce_sum"),
    "mixed up": (mixed_up, "gather"),
    "root of a mean": (lambda w, b, k: jnp.sqrt(jnp.mean(h(w, b[0]) ** 2)), "sqrt"),
    "log of a mean": (lambda w, b, k: jnp.log(jnp.mean(jnp.exp(h(w, b[0])))), "log"),
    "at least": (lambda w, b, k: jnp.maximum(jnp.mean(h(w, b[0])), 0.1), "max"),
    "softmax over examples": (
        lambda w, b, k: jnp.sum(jax.nn.softmax(h(w, b[0]).sum(-1)) * b[2]),
        "reduce_max",
    ),
    "sorted": (lambda w, b, k: jnp.mean(jnp.sort(h(w, b[0]).sum(-1)) * b[2]), "sort"),
    "cumulative": (lambda w, b, k: jnp.mean(jnp.cumsum(h(w, b[0]), 0) * b[0]), "cumsum"),
    "best": (lambda w, b, k: jnp.mean(lax.top_k(h(w, b[0]).sum(-1), 3)[0]), "top_k"),
    "neighbours": (
        lambda w, b, k: jnp.mean((h(w, b[0]) - jnp.roll(h(w, b[0]), 1, 0)) ** 2),
        "slice",
    ),
    "mixed with the reverse": (lambda w, b, k: jnp.mean(h(w, b[0] + b[0][::-1]) ** 2), "rev"),
    "halves": (lambda w, b, k: jnp.mean(jnp.multiply(*jnp.split(h(w, b[0]), 2))), "split"),
    "spectrum": (lambda w, b, k: jnp.mean(jnp.abs(jnp.fft.fft(h(w, b[0]), axis=0))), "fft"),
    "worst": (lambda w, b, k: jnp.max(h(w, b[0])), "reduce_max"),
    "baseline": (
        lambda w, b, k: jnp.mean(h(w, b[0]).sum(-1) * (b[2] - spread(b[2].mean(), b[2]))),
        "reduce_sum",
    ),
    "compiled inside": (
        lambda w, b, k: jax.jit(lambda z: jnp.mean(z @ z.T))(h(w, b[0])),
        "dot_general",
    ),
    "rematerialised": (
        lambda w, b, k: jax.checkpoint(lambda z: jnp.mean((z - spread(z.mean(0), z)) ** 2))(
            h(w, b[0])
        ),
        "reduce_sum",
    ),
}


def found_in(fn):
    plan = rc.plan_shardings(W, MESHES[0], fn=fn, args=(BATCH, jax.random.key(0)))
    return plan.report.program.coupled, plan.table()


@pytest.mark.parametrize("name", few_of(COUPLED, *list(COUPLED)[::2]))
def test_examples_that_depend_on_each_other(name):
    fn, operation = COUPLED[name]
    actual, text = found_in(fn)
    assert actual is not None
    assert actual.operation == operation
    assert actual.where.startswith("test_coupled.py:")
    assert f"depend on each other: {operation}" in " ".join(text.split())


def test_an_array_that_all_examples_share_hides_no_dependence():
    """It comes first, and its only row is not the size of the batch."""
    batch = (jnp.ones((1, D)), *BATCH)
    fn = lambda w, b, k: COUPLED["neighbours"][0](w, (b[1] * spread(b[0], b[1]), *b[2:]), k)
    plan = rc.plan_shardings(W, MESHES[0], fn=fn, args=(batch, jax.random.key(0)))
    assert plan.report.program.coupled is not None


def log_probs(w, b):
    return jax.nn.log_softmax(h(w, b[0]))


def weighted(w, batch, key):
    weight = batch[2].sum()
    loss = jnp.sum(batch[2] * h(w, batch[0]).sum(-1)) / jnp.maximum(weight, 1)
    # Metrics may be any function.
    return loss, {"weight": weight, "perplexity": jnp.exp(jnp.mean(h(w, batch[0])))}


def two_networks(w, batch, key):
    """Real and fake examples, concatenated for one network."""
    both = h(w, jnp.concatenate([batch[0], batch[0] + 1]))
    return jnp.mean(jax.nn.relu(1 - both[:B])) + jnp.mean(jax.nn.relu(1 + both[B:]))


def adapted_each(w, batch, key):
    def one(x):
        grads = jax.grad(lambda w: jnp.mean(h(w, x) ** 2))(w)
        return h(jax.tree.map(lambda p, g: p - g, w, grads), x)

    return jnp.mean(jax.vmap(one)(batch[0]))


def penalty(w, batch, key):
    slopes = jax.vmap(jax.grad(lambda x: h(w, x).sum()))(batch[0])
    return jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def tokens(w, batch, key):
    flat = jnp.tile(batch[0][:, None], (1, 5, 1)).reshape(-1, D)
    return jnp.mean(h(w, flat).reshape(B, 5, D).sum(1))


def routed(w, batch, key):
    """Sorts examples by expert, and back; the examples stay independent."""
    z = h(w, batch[0])
    order = jnp.argsort(jnp.argmax(z, -1))
    return jnp.mean(h(w, z[order])[jnp.argsort(order)] * batch[0])


def experts(w, batch, key):
    """A mixture of experts that drops no token: rows are sorted by expert, and put back."""
    z = h(w, batch[0])
    chosen = jnp.argmax(z[:, :4], -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=4).astype(jnp.int32)
    out = jax.nn.relu(lax.ragged_dot(z[order], spread(w["a"][None], jnp.ones((4, D, D))), sizes))
    return jnp.mean(jnp.zeros_like(z).at[order].set(out) * batch[0])


APART = {
    "experts": experts,
    "squares": lambda w, b, k: jnp.mean((h(w, b[0]) - b[0]) ** 2),
    "cross-entropy": lambda w, b, k: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(h(w, b[0]), b[1])
    ),
    "by indices": lambda w, b, k: -log_probs(w, b)[jnp.arange(B), b[1]].mean(),
    "taken": lambda w, b, k: -jnp.take_along_axis(log_probs(w, b), b[1][:, None], 1).mean(),
    "written": lambda w, b, k: (
        -jnp.mean(jnp.zeros((B, D)).at[jnp.arange(B), b[1]].add(1.0) * log_probs(w, b))
    ),
    "weighted": weighted,
    "weights that sum to one": lambda w, b, k: jnp.sum(
        b[2] / spread(b[2].sum(), b[2]) * h(w, b[0]).sum(-1)
    ),
    "masked": lambda w, b, k: jnp.mean(h(w, b[0]), where=b[2][:, None] > 0),
    "nothing there": lambda w, b, k: jnp.where(b[2].sum() > 0, weighted(w, b, k)[0], 0.0),
    "dropout": lambda w, b, k: jnp.mean(
        jax.vmap(lambda x, k: eqx.nn.Dropout(0.5)(x, key=k))(h(w, b[0]), jax.random.split(k, B))
    ),
    "decay": lambda w, b, k: jnp.mean(h(w, b[0])) + jnp.sqrt(jnp.sum(w["a"] ** 2)),
    "several means": lambda w, b, k: 0.5 * jnp.mean(h(w, b[0])) - 3 * jnp.mean(h(w, b[0]) ** 2),
    "attention": lambda w, b, k: jnp.mean(
        jax.nn.dot_product_attention(*[h(w, b[0]).reshape(B, 4, 1, 2)] * 3)
    ),
    "tokens": tokens,
    "one by one": lambda w, b, k: jnp.mean(lax.map(lambda x: h(w, x), b[0])),
    "carried": lambda w, b, k: lax.scan(lambda c, x: (c + h(w, x).sum(), None), 0.0, b[0])[0],
    "two networks": two_networks,
    "adapted each": adapted_each,
    "penalty": penalty,
    "routed": routed,
}


@pytest.mark.parametrize("name", few_of(APART, *list(APART)[::2]))
def test_means_over_examples(name):
    """Means, weighted means, masks, and operations on single examples."""
    assert found_in(APART[name])[0] is None


def state_of_batch_norm(key):
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(D, "batch", mode="batch")


def normed_loss(model, batch, key):
    norm, state = model
    with jax.numpy_dtype_promotion("standard"):
        out, state = jax.vmap(norm, (0, None), (0, None), axis_name="batch")(batch, state)
    return jnp.mean(out * batch), {}, (norm, state)


def run(fn, model, examples, collate=np.stack, mesh=None, **options):
    return fit_quietly(
        model,
        optax.sgd(0.1),
        examples,
        collate_fn=collate,
        loss_fn=fn,
        batch_size=16,
        steps=1,
        mesh=mesh,
        **options,
    )


def contrastive(model, batch, key):
    z = jax.vmap(model)(batch)
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


ROWS = np.random.default_rng(0).normal(size=(32, D)).astype(np.float32)
MLP = eqx.nn.MLP(D, D, 16, 1, key=jax.random.key(0))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES, ids=["8", "1"])
@pytest.mark.few("8")
def test_accumulation_warns_if_examples_depend_on_each_other(mesh):
    run(contrastive, MLP, ROWS, mesh=mesh)
    run(contrastive, MLP, ROWS, mesh=mesh, evaluation=rc.Evaluation(ROWS[:16]))
    with pytest.warns(UserWarning, match=r"dot_general \(test_coupled.py:\d+\).*`accumulate=2`"):
        run(contrastive, MLP, ROWS, mesh=mesh, accumulate=2)
    with pytest.warns(UserWarning, match="accumulate=16"):
        run(contrastive, MLP, ROWS, mesh=mesh, accumulate=16)
    with pytest.warns(UserWarning, match=r"dot_general.*depends on `batch_size`"):
        run(contrastive, MLP, ROWS, mesh=mesh, evaluation=rc.Evaluation(ROWS))


@pytest.mark.few("1")
@pytest.mark.parametrize("mesh", MESHES, ids=["8", "1"])
def test_own_steps_warn_if_microbatches_have_parts_of_what_is_compared(mesh):
    """A bank of as many negatives as examples is split with them."""

    def of_bank(model, batch, key):
        return jnp.mean(jax.vmap(model)(batch["x"]) @ batch["bank"].T)

    def prepared(loss_fn, **options):
        batch = {"x": ROWS, "bank": ROWS}
        key = jax.random.key(0)
        return rc.prepare(MLP, optax.sgd(0.1), loss_fn, batch, key=key, mesh=mesh, **options)

    prepared(of_bank)
    prepared(lambda model, batch, key: contrastive(model, batch["x"][:, :D], key))
    prepared(lambda model, batch, key: jnp.mean(jax.vmap(model)(batch["x"])), accumulate=2)
    with pytest.warns(UserWarning, match=r"dot_general \(test_coupled.py:\d+\).*`accumulate=2`"):
        prepared(of_bank, accumulate=2)


@pytest.mark.few("1")
@pytest.mark.parametrize("mesh", MESHES, ids=["8", "1"])
def test_evaluation_in_several_batches_warns_if_examples_depend_on_each_other(mesh):
    """The results depend on the batch size, as the warning states."""

    def evaluated(size):
        options = {"collate_fn": np.stack, "loss_fn": contrastive, "mesh": mesh}
        return rc.evaluate(MLP, ROWS, batch_size=size, **options)["loss"]

    full = evaluated(32)
    with pytest.warns(UserWarning, match=r"dot_general \(test_coupled.py:\d+\).*batches of 16"):
        assert evaluated(16) < 0.9 * full


@pytest.mark.thorough
def test_batch_statistics_warn_only_in_training():
    model = state_of_batch_norm(None)
    with pytest.warns(UserWarning, match="accumulate=2"):
        state = run(normed_loss, model, ROWS, accumulate=2)
    run(normed_loss, model, ROWS, evaluation=rc.Evaluation(ROWS))
    rc.evaluate(state.model, ROWS, collate_fn=np.stack, loss_fn=normed_loss, batch_size=16)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MESHES, ids=["8", "1"])
def test_a_mean_over_examples_does_not_warn(mesh):
    with warnings.catch_warnings(action="error"):
        options = {"accumulate": 2, "evaluation": rc.Evaluation(make_examples(40))}
        run(loss_fn, make_model(), make_examples(32), collate_fn, mesh, **options)


def test_a_saved_plan_keeps_the_dependent_operation(tmp_path):
    mesh = real_mesh(8, 1, 1)
    plan = rc.plan_shardings(W, mesh, fn=clip, args=(BATCH, jax.random.key(0)))
    rc.save_plan(plan, tmp_path / "plan.json")
    assert rc.load_plan(tmp_path / "plan.json", W, mesh).report == plan.report
