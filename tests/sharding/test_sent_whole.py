"""What plans say of operations that move rows, call the host or reshard, against programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, real_mesh

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes

MODEL = {"up": array(64, 256), "down": array(256, 64)}


def compiled(change, mesh):
    """The plan for a loss in which `change` is applied to activations, and its collectives."""

    def loss(model, batch, key):
        hidden = change(jnp.tanh(batch @ model["up"]))
        return jnp.mean((hidden @ model["down"]) ** 2)

    batch = array(32, 16, 64)
    plan = rc.plan_shardings(MODEL, mesh, fn=loss, args=(batch, None))
    step = jax.jit(
        jax.value_and_grad(plan.constrain(loss)),
        in_shardings=(plan.shardings, rc.batch_shardings(batch, mesh), None),
        out_shardings=(None, plan.shardings),
    )
    text = step.lower(MODEL, batch, None).compile().as_text()
    return plan.report.program, collectives(text, mesh)


def planned_and_sent(change, mesh):
    program, sent = compiled(change, mesh)
    return sum(one.bytes for one in program.traffic), sent_bytes(sent), program


def whitened(h):
    """A decomposition of a matrix of all pairs of rows, as of a Gaussian process."""
    rows = jnp.mean(h, 1)
    distances = jnp.mean((rows[:, None] - rows[None]) ** 2, -1)
    root = jnp.linalg.cholesky(jnp.exp(-distances) + jnp.eye(len(rows)))
    return h + jax.scipy.linalg.solve_triangular(root, rows, lower=True)[:, None]


def shuffled(h):
    """The numbers of all rows, in an order that the program draws."""
    return jax.random.permutation(jax.random.key(0), len(h))


def covariances(h):
    """A table of all pairs of rows and its transpose."""
    rows = jnp.mean(h, 1)
    pairs = jnp.tanh(rows[:, None] - rows[None])  # (rows, rows, width)
    return h + jnp.mean(jnp.tanh(pairs + jnp.swapaxes(pairs, 0, 1) ** 2), 1)[:, None]


MOVES = {
    "halves": lambda h: h[:16] * h[16:],
    "concatenated": lambda h: jnp.concatenate([h, jnp.sin(h)]),
    "rolled": lambda h: h + jnp.roll(h, 1, axis=0),
    "rolled along time": lambda h: h + jnp.roll(h, 1, axis=1),
    "reversed": lambda h: h + h[::-1],
    "every second": lambda h: h[::2] * h[1::2],
    "cumulative": lambda h: jnp.cumsum(h, axis=0),
    "permuted": lambda h: h[jax.random.permutation(jax.random.key(0), len(h))],
    "transformed": lambda h: jnp.abs(jnp.fft.fft(h, axis=0)),
    "the first": lambda h: h + h[:1],
    "whitened": whitened,
    "added to others": lambda h: h.at[shuffled(h)].add(h),
    "a little added to others": lambda h: h.at[shuffled(h), 0].add(h[:, 1]),
    "a little of others": lambda h: h + h[shuffled(h), 0][:, None],
    "written over others": lambda h: h.at[shuffled(h)].set(jnp.sin(h)),
    "a little written over others": lambda h: h.at[shuffled(h), 0].set(h[:, 1]),
    "all pairs both ways": covariances,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", few_of(MOVES, "halves"))
def test_rows_that_other_devices_need_are_priced_as_compiled(name):
    """No other test has an operation that moves rows of the batch without comparing them."""
    planned, sent, _ = planned_and_sent(MOVES[name], real_mesh(8, 1, 1))
    assert planned == pytest.approx(sent, rel=0.1)


def doubled(h):
    shape = jax.ShapeDtypeStruct(h.shape, h.dtype)
    return h + jax.pure_callback(lambda h: 2 * np.asarray(h), shape, jax.lax.stop_gradient(h))


def watched(h):
    jax.debug.callback(lambda h: None, h)
    return h


def checked(h):
    return eqx.error_if(h, jnp.any(jnp.isnan(h)), "A value is not a number.")


CALLS = [(doubled, 8), (doubled, 2), (watched, 8), (watched, 2)]


@pytest.mark.parametrize(("call", "data"), few_of(CALLS, (doubled, 8), several=True))
def test_functions_on_the_host_are_priced_and_their_lines_named(call, data):
    """Their operands are gathered on one device, and their results are sent to all."""
    planned, sent, program = planned_and_sent(call, real_mesh(data, 1, 8 // data))
    assert planned == pytest.approx(sent, rel=0.02)
    (sentence,) = program.gathered_whole
    file, line = sentence.split()[0].split(":")
    first = call.__code__.co_firstlineno
    assert file == "test_sent_whole.py"
    assert first < int(line) <= first + 2


@pytest.mark.few("4")
@pytest.mark.parametrize("model", [1, 4])
def test_error_if_of_rows_is_free(model):
    """Each device checks its own rows, and its part of them with tensor parallelism."""
    planned, sent, program = planned_and_sent(checked, real_mesh(8 // model, 1, model))
    assert planned == pytest.approx(sent, rel=0.02)
    assert not program.gathered_whole


@pytest.mark.thorough
def test_a_sharding_that_the_compiler_cannot_reach_is_said_beforehand():
    """XLA calls it an involuntary full rematerialization, and only when it compiles."""
    mesh = real_mesh(2, 2, 2)
    rows = NamedSharding(mesh, P(("data", "fsdp"), "model"))
    all_rows = NamedSharding(mesh, P(("data", "fsdp", "model")))
    other = NamedSharding(mesh, P("model", None, "data"))

    def reached(h):
        return jax.lax.with_sharding_constraint(h, rows)

    def unreachable(h):
        h = jnp.sin(jax.lax.with_sharding_constraint(h, all_rows))
        return jax.lax.with_sharding_constraint(h, other)

    gathers_all = lambda sent: any(one.kind == "all-gather" and len(one.axes) == 3 for one in sent)
    program, sent = compiled(reached, mesh)
    assert not program.gathered_whole
    assert not gathers_all(sent)
    program, sent = compiled(unreachable, mesh)
    assert gathers_all(sent)
    (sentence,) = program.gathered_whole
    line = unreachable.__code__.co_firstlineno + 2
    assert sentence.startswith(f"test_sent_whole.py:{line} asks for a sharding")


def test_gathers_in_rematerialised_layers_count_again():
    """A layer that is computed again gathers again what it cannot keep sharded."""

    def loss(model, x, key, *, remat):
        def layer(x, p):
            hidden = jnp.cumsum(jnp.tanh(x @ p["up"]), axis=-1)
            return x + jnp.tanh(hidden) @ p["down"]

        if remat:
            layer = jax.checkpoint(layer)
        step = lambda x, p: (layer(x, p), None)
        return jnp.mean(jax.lax.scan(step, x, model)[0] ** 2)

    model = {"up": array(4, 64, 256), "down": array(4, 256, 64)}
    overrides = [("up", P(None, None, "model")), ("down", P(None, "model"))]
    gathered = []
    for remat in (False, True):
        fn = lambda *args, remat=remat: loss(*args, remat=remat)
        args = (array(32, 64), None)
        mesh = real_mesh(2, 1, 4)
        plan = rc.plan_shardings(model, mesh, fn=fn, args=args, overrides=overrides)
        traffic = plan.report.program.traffic
        gathered.append(sum(one.bytes for one in traffic if "all-gathers after" in one.cause))
    assert gathered[1] == 1.5 * gathered[0] > 0


TRANSFORMS = {
    "along rows": (lambda h: jnp.abs(jnp.fft.fft(h, axis=0)), (32, 16)),
    "nothing else divides": (lambda h: jnp.abs(jnp.fft.fft(h, axis=0)), (32, 3)),
    "of two dimensions": (lambda h: jnp.abs(jnp.fft.rfft2(h, axes=(1, 0))), (32, 16)),
    "to real numbers": (lambda h: jnp.fft.irfft(h, axis=0), (32, 3)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", few_of(TRANSFORMS, "nothing else divides"))
def test_fourier_transforms_along_the_batch_run(name):
    """XLA's partitioning of a transform along a split dimension can end the process."""
    transform, shape = TRANSFORMS[name]
    loss = lambda w, x, key: jnp.mean(transform(jnp.tanh(x * w[None])) ** 2)
    numbers = np.random.default_rng(0).normal(size=shape)
    x, w = jnp.asarray(numbers, jnp.float32), jnp.ones(shape[1])
    plan = rc.plan_shardings(w, real_mesh(8, 1, 1), fn=loss, args=(x, None))
    assert plan.report.program.batch_axes == ("data",)
    errors = plan.verify(loss, w, x, tolerance=1e-5)
    assert max(errors.values()) < 1e-5
