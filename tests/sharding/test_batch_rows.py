"""Which rows are split with the batch: of its own arrays, and of those that a program makes."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, mesh_of, real_mesh

import redcoast as rc
from redcoast.sharding.program._program import follow_program
from redcoast.sharding.program._trace import trace

ROWS, WIDTH, HIDDEN = 64, 24, 48
KEY = jax.eval_shape(lambda: jax.random.key(0))
WEIGHTS = {
    "up": array(WIDTH, HIDDEN),
    "down": array(HIDDEN, WIDTH),
    "loop": array(WIDTH, WIDTH),
    "query": array(WIDTH),
    "table": array(40, WIDTH),
    "square": array(WIDTH, ROWS),  # its outputs are as many as there are examples
}
BATCH = array(ROWS, WIDTH)


def network(p, x):
    return jnp.tanh(x @ p["up"]) @ p["down"]


def size(x):
    return jnp.mean(jnp.square(x))


def normal(key, *shape):
    return jax.random.normal(key, shape)


def steps(p, start, xs):
    step = lambda h, x: (jnp.tanh(h @ p["loop"] + x), None)
    return jax.lax.scan(step, start, xs)[0]


def of_key(key):
    return normal(key, WIDTH)


# Rows that have nothing to do with the batch, which is `x`, but for their number.
MADE = {
    "noise": lambda p, x, key: network(p, normal(key, len(x), WIDTH)),
    "noise from an old key": lambda p, x, key: network(
        p, normal(jax.random.PRNGKey(0), len(x), WIDTH)
    ),
    "a key for each": lambda p, x, key: network(p, jax.vmap(of_key)(jax.random.split(key, len(x)))),
    "a number folded in for each": lambda p, x, key: network(
        p, jax.vmap(lambda i: of_key(jax.random.fold_in(key, i)))(jnp.arange(len(x)))
    ),
    "bits in one row": lambda p, x, key: network(
        p, normal(key, len(x) * WIDTH).reshape(len(x), WIDTH)
    ),
    "labels as numbers": lambda p, x, key: network(
        p, jax.nn.one_hot(jax.random.randint(key, (len(x),), 0, 9), WIDTH)
    ),
    "tokens": lambda p, x, key: network(
        p, jnp.mean(p["table"][jax.random.randint(key, (len(x), 5), 0, 40)], 1)
    ),
    "constants": lambda p, x, key: network(p, jnp.full((len(x), WIDTH), 0.5)),
    "a query for each": lambda p, x, key: network(p, jnp.tile(p["query"][None], (len(x), 1))),
    "a query broadcast": lambda p, x, key: network(
        p, jnp.broadcast_to(p["query"], (len(x), WIDTH))
    ),
    "the start of a recurrence": lambda p, x, key: steps(
        p, jnp.zeros((len(x), WIDTH)), normal(key, 3, len(x), WIDTH)
    ),
    "a loop": lambda p, x, key: jax.lax.fori_loop(
        0, 3, lambda i, z: network(p, z), normal(key, len(x), WIDTH)
    ),
    "spectra": lambda p, x, key: jnp.real(
        jnp.fft.ifft(jnp.fft.fft(network(p, normal(key, len(x), WIDTH))))
    ),
    "a permutation of the batch": lambda p, x, key: network(
        p, x[jax.random.permutation(key, len(x))]
    ),
    "a sample of the batch": lambda p, x, key: network(
        p, x[jax.random.randint(key, (len(x),), 0, len(x))]
    ),
    "compared in pairs": lambda p, x, key: jnp.exp(
        -network(p, normal(key, len(x), WIDTH)) @ network(p, x).T
    ),
}


@pytest.mark.parametrize("name", few_of(MADE, *list(MADE)[::3]))
def test_rows_that_are_made_are_split_with_the_batch(name):
    """Otherwise each of eight devices computes all of them."""
    fn = lambda p, x, key: size(MADE[name](p, x, key)) + size(network(p, x))
    plan = rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(BATCH, KEY))
    actual = plan.report.program.arithmetic
    assert actual.flops == 8 * actual.per_device
    assert plan.report.program.repeated == ()


def test_rows_of_another_argument_are_split_with_the_batch():
    fn = lambda p, x, noise: size(network(p, x)) + size(network(p, noise))
    plan = rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(BATCH, BATCH))
    actual = plan.report.program.arithmetic
    assert actual.flops == 8 * actual.per_device


CONSTANT = np.ones((ROWS, WIDTH), np.float32)
# What has the size of the batch and is no rows.
OTHERS = {
    "outputs of a matrix": lambda p, x, key: size(x @ p["square"] + normal(key, ROWS)[None]),
    "noise on weights": lambda p, x, key: size(x @ (p["square"] + normal(key, WIDTH, ROWS))),
    "a direction in weights": lambda p, x, key: size(x) + size(p["square"] @ normal(key, ROWS)),
    "inputs of the batch": lambda p, x, key: size(normal(key, 7, WIDTH) @ x.T),
    "random features": lambda p, x, key: size(jnp.tanh(x @ p["up"]) @ normal(key, HIDDEN, ROWS)),
    "positions": lambda p, x, key: size(
        network(p, x[:, None] + normal(key, ROWS, WIDTH)[None])
        @ jnp.swapaxes(x[:, None] + normal(key, ROWS, WIDTH)[None], 1, 2)
    ),
    "classes": lambda p, x, key: size(jax.nn.one_hot(jnp.argmax(x, 1), ROWS) @ p["square"].T),
    "iterations": lambda p, x, key: size(
        steps(p, x, jax.vmap(of_key)(jax.random.split(key, ROWS))[:, None])
    ),
    "a table that is closed over": lambda p, x, key: size(x) + size(network(p, CONSTANT)),
    "an identity": lambda p, x, key: size(x @ x.T + 2 * jnp.eye(ROWS)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_has_the_size_of_the_batch_is_no_rows(name):
    traced, _ = trace(OTHERS[name], WEIGHTS, (BATCH, KEY))
    assert follow_program(traced, [True] * len(WEIGHTS)).batch.of_created == ()


def values(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape, scale=0.2).astype(x.dtype), tree)


def compiled_flops(fn, plan, key):
    """Of one device, for a loss and its gradient."""
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    weights = jax.tree.map(place, WEIGHTS, plan.shardings)
    rows = place(BATCH, NamedSharding(plan.mesh, P(tuple(plan.report.program.batch_axes))))
    lowered = jax.jit(jax.value_and_grad(fn)).lower(weights, rows, key)
    return (lowered.compile().cost_analysis() or {})["flops"]


def gan(p, real, key):
    fake = network(p, normal(key, len(real), WIDTH))
    judge = lambda x: jax.nn.softplus(x @ p["square"] @ p["square"].T @ p["up"])
    return jnp.mean(judge(real)) - jnp.mean(judge(fake))


@pytest.mark.thorough
def test_noise_through_two_networks_is_divided():
    """The program that a compiler makes of a GAN computes what the plan says."""
    plan = rc.plan_shardings(WEIGHTS, real_mesh(8, 1, 1), fn=gan, args=(BATCH, KEY))
    actual = compiled_flops(plan.constrain(gan), plan, jax.random.key(1))
    assert actual < 1.2 * plan.report.program.arithmetic.flops / 8


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_random_bits_are_those_of_one_device(sizes):
    mesh = real_mesh(*sizes)
    plan = rc.plan_shardings(WEIGHTS, mesh, fn=gan, args=(BATCH, KEY))
    assert max(plan.verify(gan, values(WEIGHTS), values(BATCH), jax.random.key(1)).values()) < 1e-5


def test_gradients_of_all_rows_are_summed_together():
    """A compiler that adds first sends a gradient once, for real and for made rows."""
    hardware = rc.Hardware(adds_first=True)
    both = lambda p, x, key: size(network(p, x)) + size(network(p, normal(key, ROWS, WIDTH)))
    one = lambda p, x, key: size(network(p, x))
    sent = [
        sum(entry.bytes for entry in plan.report.program.traffic if "grad" in entry.cause)
        for plan in (
            rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(BATCH, KEY), hardware=hardware)
            for fn in (both, one)
        )
    ]
    assert sent[0] == sent[1] > 0


def more_rows(p, x, key, *, mesh):
    """Four times as many rows as the batch has, which the program itself splits."""
    noise = normal(key, 4 * len(x), WIDTH)
    if mesh is not None:
        noise = jax.lax.with_sharding_constraint(noise, NamedSharding(mesh, P("data")))
    return size(network(p, noise)) + size(network(p, x))


@pytest.mark.thorough
def test_a_constraint_of_the_program_is_kept():
    mesh = real_mesh(8, 1, 1)
    fn = ft.partial(more_rows, mesh=mesh)
    plan = rc.plan_shardings(WEIGHTS, mesh, fn=fn, args=(BATCH, KEY))
    actual = plan.report.program.arithmetic
    assert actual.flops == 8 * actual.per_device
    key = jax.random.key(1)
    assert compiled_flops(plan.constrain(fn), plan, key) < 1.2 * actual.per_device


@pytest.mark.thorough
def test_a_constraint_of_the_program_over_model_is_kept():
    """Products are not replicated where the program splits what comes of them."""
    mesh = real_mesh(2, 1, 4)
    over_model = NamedSharding(mesh, P(P.UNCONSTRAINED, "model"))

    def fn(p, x, key):
        hidden = jax.lax.with_sharding_constraint(x @ p["up"], over_model)
        return size(jnp.tanh(hidden) @ p["down"])

    # Where arithmetic costs nothing, the plan itself computes nothing of many rows split.
    hardware, many = rc.Hardware(flops=1e30, memory_bandwidth=1e30), array(64 * ROWS, WIDTH)
    plan = rc.plan_shardings(WEIGHTS, mesh, fn=fn, args=(many, KEY), hardware=hardware)
    assert not any(place.spec for place in jax.tree.leaves(plan.shardings))
    actual = plan.report.program.arithmetic
    assert actual.flops == 8 * actual.per_device
    key = jax.random.key(1)
    constrained = plan.constrain(fn)
    assert compiled_flops(constrained, plan, key) < 1.3 * actual.per_device / 64
    weights, rows = jax.device_put(values(WEIGHTS), plan.shardings), values(BATCH)
    expected = size(network(values(WEIGHTS), rows))
    np.testing.assert_allclose(jax.jit(constrained)(weights, rows, key), expected, rtol=1e-5)


def test_rows_that_the_program_replicates_stay_so():
    mesh = real_mesh(8, 1, 1)

    def fn(p, x, key):
        noise = jax.lax.with_sharding_constraint(
            normal(key, ROWS, WIDTH), NamedSharding(mesh, P(None, P.UNCONSTRAINED))
        )
        return size(network(p, noise)) + size(network(p, x))

    plan = rc.plan_shardings(WEIGHTS, mesh, fn=fn, args=(BATCH, KEY))
    (entry,) = plan.report.program.repeated
    assert "constrains the 64 rows that the program makes to be replicated" in entry.why


def words(plan):
    return " ".join(plan.table().split())


@pytest.mark.parametrize(
    ("fn", "part", "why"),
    [
        (
            lambda p, x, key: size(network(p, normal(key, 400, WIDTH))) + size(network(p, x)),
            400 / 464,
            "the 400 rows that the program makes differ in number from the batch (64); "
            "`jax.lax.with_sharding_constraint` on them splits them too",
        ),
        (
            lambda p, x, key: size(network(p, normal(key, 99, WIDTH))) + size(network(p, x)),
            99 / 163,
            "the 99 rows that the program makes differ in number from the batch (64), and do "
            "not divide over 8 devices",
        ),
        (
            lambda p, x, key: size(network(p, CONSTANT)) + size(network(p, x)),
            1 / 2,
            "none of its dimensions is linked to the batch",
        ),
    ],
)
def test_what_every_device_computes_is_said(fn, part, why):
    plan = rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(BATCH, KEY))
    (entry,) = plan.report.program.repeated
    flops = plan.report.program.arithmetic.flops
    assert entry.why == why
    # Of the gradient of a network's input there is none, for either kind of rows.
    assert entry.flops == pytest.approx(part * flops)
    said = f"{part * flops / 1e6:.3g} of {flops / 1e6:.3g} MFLOP are computed by every device: "
    assert said + "products with {down,up}, because " + why + "." in words(plan)


def test_a_batch_that_is_not_split_is_computed_by_every_device():
    fn = lambda p, x, key: size(network(p, x))
    plan = rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(array(63, WIDTH), KEY))
    assert "products with {down,up}, because the batch is not split." in words(plan)
    alone = rc.plan_shardings(WEIGHTS, mesh_of(), fn=fn, args=(array(63, WIDTH), KEY))
    assert alone.report.program.repeated == ()


def test_without_a_batch_every_device_computes_everything():
    fn = lambda p, x, key: size(network(p, normal(key, ROWS, WIDTH)))
    plan = rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(None, KEY))
    assert "products with {down,up}, because there is no batch." in words(plan)


def with_averages(p, batch, key):
    """Normalisation by running averages that come with the batch, as some pass them."""
    hidden = batch["x"] @ p["up"]
    mean = 0.9 * batch["state"]["mean"] + 0.1 * jnp.mean(hidden, 0)
    out = ((hidden - mean[None]) / batch["state"]["scale"][None]) @ p["down"]
    return size(out) + jnp.mean(batch["y"]), mean


@pytest.mark.thorough
def test_running_averages_in_the_batch_are_no_rows():
    """Channels that were taken as rows were split over the batch's axes, and the batch was not."""
    state = {"mean": array(HIDDEN), "scale": array(HIDDEN)}
    batch = {"state": state, "x": array(16, WIDTH), "y": array(16)}
    plan = rc.plan_shardings(WEIGHTS, real_mesh(2, 1, 4), fn=with_averages, args=(batch, None))
    assert plan.report.program.not_rows == {"state/mean": HIDDEN, "state/scale": HIDDEN}
    said = "It has 16 rows. Arrays in it that are not split with them: state/{mean,scale} (48)."
    assert said in words(plan)
    actual = plan.report.program.arithmetic
    assert actual.flops == 8 * actual.per_device
    other = ft.partial(lambda p, x, key, state: with_averages(p, {**x, "state": state}, key))
    rows = {"x": batch["x"], "y": batch["y"]}
    expected = rc.plan_shardings(
        WEIGHTS, real_mesh(2, 1, 4), fn=other, args=(rows, None, batch["state"])
    )
    assert plan.compute == expected.compute
    assert plan.report.program.traffic == expected.report.program.traffic
    options = {**values(batch), "state": {"mean": np.zeros(48, "f"), "scale": np.ones(48, "f")}}
    assert max(plan.verify(with_averages, values(WEIGHTS), options).values()) < 1e-5


def messages(p, batch, key):
    sent = network(p, batch["nodes"])[batch["edges"]]
    return size(jax.ops.segment_sum(sent, batch["edges"], len(batch["nodes"])))


# Batches of arrays that differ in their first dimension, and those that are no rows.
MIXED = {
    "as many, and one for all": (
        lambda p, b, key: size(network(p, b["x"]) * b["weight"]),
        {"x": array(16, WIDTH), "weight": array(1, WIDTH)},
        [],
    ),
    "positions": (
        lambda p, b, key: size(network(p, b["x"] + b["position"][None])),
        {"position": array(32, WIDTH), "x": array(16, 32, WIDTH)},
        ["position"],
    ),
    "a mask": (
        lambda p, b, key: size(
            jnp.where(b["mask"][None] > 0, network(p, b["x"]) @ jnp.swapaxes(b["x"], 1, 2), 0)
        ),
        {"mask": array(32, 32), "x": array(16, 32, WIDTH)},
        ["mask"],
    ),
    "weights of classes": (
        lambda p, b, key: size(network(p, b["x"]) * b["classes"][None]),
        {"classes": array(WIDTH), "x": array(16, WIDTH)},
        ["classes"],
    ),
    "as many classes as rows": (
        lambda p, b, key: size(network(p, b["x"]) * b["classes"][None]) + size(b["more"]),
        {"classes": array(WIDTH), "more": array(8), "x": array(WIDTH, WIDTH)},
        ["classes", "more"],
    ),
    "several negatives for each": (
        lambda p, b, key: size(network(p, b["query"]) @ network(p, b["other"]).T),
        {"other": array(64, WIDTH), "query": array(16, WIDTH)},
        [],
    ),
    "targets to choose from": (
        lambda p, b, key: size(network(p, b["x"]) @ b["targets"].T),
        {"targets": array(64, WIDTH), "x": array(16, WIDTH)},
        ["targets"],
    ),
    "rows that parameters belong to": (
        lambda p, b, key: size(network(p, (b["x"] + p["square"].T) * b["scale"][None]) * b["y"]),
        {"scale": array(WIDTH), "x": array(ROWS, WIDTH), "y": array(ROWS, 1)},
        ["scale"],
    ),
    "a graph": (
        messages,
        {"edges": jax.ShapeDtypeStruct((64,), jnp.int32), "nodes": array(16, WIDTH)},
        [],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_has_the_size_of_the_batch_is_rows(name):
    fn, batch, others = MIXED[name]
    plan = rc.plan_shardings(WEIGHTS, mesh_of(data=8), fn=fn, args=(batch, None))
    assert list(plan.report.program.not_rows) == others
    assert plan.report.program.repeated == ()
    assert str(plan)
