"""Arrays for which `model` saves nothing but memory are whole where devices have plenty."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.dryrun._devices import planner_hardware, target_place
from redcoast.dryrun.hlo import collectives
from redcoast.sharding.solver._hardware import hardware_of

WIDTH, HIDDEN, VOCAB, PLACES = 64, 256, 1001, 256
TOKENS = jax.ShapeDtypeStruct((4, 64), jnp.int32)  # fewer rows than devices
PLENTY = 1e9


@jax.jit
def make_params():
    """A vocabulary that divides over nothing, and a table of positions that does."""
    shapes = {"embed": (VOCAB, WIDTH), "places": (PLACES, WIDTH), "up": (WIDTH, HIDDEN)}
    shapes |= {"down": (HIDDEN, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: 0.1 * jax.random.normal(key, shape) for key, (name, shape) in pairs}


def loss_fn(params, tokens, key):
    places = params["places"][jnp.arange(tokens.shape[1])]
    x = params["embed"][tokens] + places[None]
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def plan(memory=None, tree=None, mesh=None, **options):
    return rc.plan_shardings(
        make_params() if tree is None else tree,
        rc.make_mesh(data=1, model=8) if mesh is None else mesh,
        fn=loss_fn,
        args=(TOKENS, None),
        hardware=rc.Hardware(memory=memory),
        **options,
    )


def specs(found):
    return {name: sharding.spec for name, sharding in found.shardings.items()}


def reasons(found):
    return {row.path: f"{row.reason.kind}: {row.reason.text}" for row in found.report.arrays}


def compiled_gradient(found):
    params = make_params()
    sharding = jax.NamedSharding(found.mesh, P())
    batch = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype, sharding=sharding)
    step = jax.jit(
        jax.value_and_grad(found.constrain(loss_fn)),
        in_shardings=(found.shardings, sharding, None),
        out_shardings=(None, found.shardings),
    )
    return step.lower(params, batch, None).compile()


def over_model(compiled, mesh):
    found = collectives(compiled.as_text(), mesh)
    return sum(one.count * one.sent_bytes for one in found if "model" in one.axes)


@pytest.mark.thorough
def test_what_costs_and_saves_memory_alone_is_whole():
    unknown, known = plan(), plan(PLENTY)
    assert specs(unknown)["embed"] == P(None, "model")
    assert specs(unknown)["places"] != P()
    assert specs(known)["embed"] == specs(known)["places"] == P()
    for name in ("up", "down"):
        assert "model" in specs(known)[name]
        assert specs(known)[name] == specs(unknown)[name]
    assert reasons(known)["embed"] == (
        "replicated: 1001 does not divide over model=8 (1000 or 1008 would), and tensor "
        "parallelism along 64 would cost more, and the devices have room for it"
    )
    assert "the devices have room for it" in reasons(known)["places"]
    dims = dict(zip(sorted(make_params()), known.compute.dims, strict=True))
    assert dims == {"embed": None, "places": None, "up": 1, "down": 0}


@pytest.mark.thorough
def test_less_is_sent_and_the_result_is_the_same():
    unknown, known = plan(), plan(PLENTY)
    one, other = compiled_gradient(unknown), compiled_gradient(known)
    sent = over_model(one, unknown.mesh), over_model(other, known.mesh)
    # At the least, the embedding is not gathered any more.
    assert sent[1] <= sent[0] - 7 / 8 * VOCAB * WIDTH * 4
    priced = [sum(x.bytes for x in p.report.program.traffic) for p in (known, unknown)]
    assert priced[0] < priced[1]
    tokens = jax.random.randint(jax.random.key(1), TOKENS.shape, 0, VOCAB)
    loss, gradient = jax.jit(jax.value_and_grad(loss_fn))(make_params(), tokens, None)
    for compiled, found in ((one, unknown), (other, known)):
        params = jax.device_put(make_params(), found.shardings)
        place = jax.NamedSharding(found.mesh, P())
        split = compiled(params, jax.device_put(tokens, place), None)
        np.testing.assert_allclose(split[0], loss, rtol=1e-5)
        for name, expected in gradient.items():
            np.testing.assert_allclose(split[1][name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_the_smallest_come_first_and_a_quarter_of_what_is_left_is_taken():
    optimizer = optax.adam(1e-3)
    state = rc.init_state(lambda key: make_params(), optimizer, key=jax.random.key(0))
    found = lambda memory: specs_of_state(plan(memory, tree=state))
    estimated = plan(tree=state).report.program.memory.total
    # Seven more eighths of each, of its gradient, and of Adam's two means.
    sizes = {"places": PLACES * WIDTH, "embed": VOCAB * WIDTH}
    more = {name: 7 / 8 * 4 * size * 4 for name, size in sizes.items()}
    enough = lambda size: (estimated + 4 * size) / 0.85
    assert found(enough(0.99 * more["places"]))["places"] != P()
    one = found(enough(1.01 * more["places"]))
    assert one["places"] == P()
    assert one["embed"] != P()
    both = more["places"] + more["embed"]
    assert found(enough(0.99 * both))["embed"] != P()
    assert found(enough(1.01 * both))["embed"] == P()
    # Where not even the rest fits, everything is split that can be.
    assert found(estimated / 2) == found(None)


def specs_of_state(found):
    return {name: sharding.spec for name, sharding in found.shardings.model.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 1, "fsdp": 2}])
def test_where_the_batch_is_split_gradients_are_summed_in_parts(sizes):
    mesh = rc.make_mesh(**sizes, model=4)
    assert specs(plan(PLENTY, mesh=mesh)) == specs(plan(mesh=mesh))


def test_what_a_user_decides_stays():
    given = [("^embed$", P(None, "model")), ("^places$", P("model"))]
    found = plan(PLENTY, overrides=given)
    assert specs(found)["embed"] == P(None, "model")
    assert specs(found)["places"] == P("model")
    budgeted = plan(PLENTY, budget=10**7)
    assert not re.search("have room", str(budgeted))


def test_a_batch_that_goes_over_model_keeps_parameters_split():
    tree = {"up": jnp.zeros((WIDTH, HIDDEN)), "down": jnp.zeros((HIDDEN, WIDTH))}
    loss = lambda p, x, key: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
    args = (jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32), None)
    for memory in (None, PLENTY):
        hardware = rc.Hardware(memory=memory)
        mesh = rc.make_mesh(data=2, model=4)
        found = rc.plan_shardings(tree, mesh, fn=loss, args=args, hardware=hardware)
        assert found.report.program.batch_axes == ("data", "model")
        assert all("model" in spec for spec in specs(found).values())


def test_emulated_devices_say_nothing_of_their_memory():
    mesh = rc.make_mesh(data=2, model=4)
    assert hardware_of(mesh).memory is None
    place = target_place("cpu:8")
    assert planner_hardware(place, place.mesh({"data": 2, "model": 4})).memory is None
    assert plan().report.program.device_memory == 80e9
    assert plan(2e9).report.program.device_memory == 2e9


@pytest.mark.parametrize("memory", [0, -1.0])
def test_memory_must_be_positive(memory):
    with pytest.raises(ValueError, match=f"`memory` is {memory}. It must be more than 0"):
        rc.Hardware(memory=memory)
