"""A mesh with Explicit axes, as `jax.make_mesh` makes it, gives the results of one with Auto axes.

Only here: every public function that takes a mesh, or arrays on one, with both types of axes.
"""

import contextlib
import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from problem import batch_of, collate_fn, loss_fn, make_examples

import redcoast as rc

OPTIMIZER = optax.adam(1e-2)
DATA = {"collate_fn": collate_fn, "batch_size": 16}
EXAMPLES = make_examples(40)


def init_fn(key):
    return eqx.nn.MLP(16, 8, 32, depth=2, key=key)


def mesh_of(kind, shape=(2, 1, 4)):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "fsdp", "model"), axis_types=(kind,) * 3)


def predict_fn(model, batch, key):
    return jax.vmap(model)(batch["x"])


def fit(mesh, model=init_fn, **options):
    settings = {"loss_fn": loss_fn, "steps": 3, "log": False, **DATA, **options}
    return rc.fit(model, OPTIMIZER, EXAMPLES, mesh=mesh, **settings)


def own_loop(mesh):
    batch, key = batch_of(16), jax.random.key(0)
    state, step, plan = rc.prepare(init_fn, OPTIMIZER, loss_fn, batch, key=key, mesh=mesh)
    assert mesh is None or plan.mesh == mesh
    # A second step takes what the first returned, and a batch that is on the mesh.
    shardings = rc.batch_shardings(batch, mesh)
    for data in (batch, jax.device_put(batch, shardings), batch):
        state, metrics = step(state, data)
    assert metrics["loss"].sharding.mesh == jax.tree.leaves(state.model)[0].sharding.mesh
    jax.block_until_ready(step.lower(state, batch))
    return state


def by_hand(mesh):
    create = ft.partial(rc.init_state, init_fn, OPTIMIZER, key=jax.random.key(0))
    shardings = rc.infer_shardings(eqx.filter_eval_shape(create), mesh)
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER, accumulate=2)
    step = rc.compile_step(step, shardings)
    return step(create(shardings=shardings), batch_of(16))[0]


def again(mesh):
    state = fit(mesh)
    plan = rc.plan_step(state, loss_fn, batch_of(16), mesh)
    assert mesh is None or plan.mesh == mesh
    return fit(None, state, steps=5, plan=plan)


def evaluated(mesh):
    evaluation = rc.Evaluation(
        EXAMPLES, predict_fn=predict_fn, metric_fn=lambda examples, outputs: {"n": len(outputs)}
    )
    return fit(mesh, evaluation=evaluation, plan="verify", compute_dtype=jnp.float32)


STATES = [fit, own_loop, by_hand, again, evaluated]


def same(a, b, **options):
    for x, y in zip(*(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (a, b)), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, **options)


@contextlib.contextmanager
def given_or_ambient(how, mesh):
    with jax.set_mesh(mesh) if how == "ambient" else contextlib.nullcontext():
        yield None if how == "ambient" else mesh


@pytest.mark.thorough
@pytest.mark.parametrize("shape", few_of([(2, 1, 4), (1, 8, 1), (1, 1, 1)], (2, 1, 4)))
@pytest.mark.parametrize("how", few_of(["given", "ambient"], "ambient"))
@pytest.mark.parametrize("run", few_of(STATES, by_hand))
def test_states_are_the_same_and_on_the_mesh_that_was_given(run, how, shape):
    explicit = mesh_of(AxisType.Explicit, shape)
    expected = run(mesh_of(AxisType.Auto, shape))
    with given_or_ambient(how, explicit) as mesh:
        state = run(mesh)
        for x in jax.tree.leaves(eqx.filter(state, eqx.is_array)):
            assert x.sharding.mesh == explicit
    same(state, expected)


@pytest.mark.parametrize("how", few_of(["given", "ambient"], "given"))
@pytest.mark.thorough
def test_results_are_the_same(how):
    explicit, auto = mesh_of(AxisType.Explicit), mesh_of(AxisType.Auto)
    model = fit(explicit).model

    def results(mesh, model):
        loss = rc.evaluate(model, EXAMPLES, loss_fn=loss_fn, mesh=mesh, **DATA)
        settings = {"predict_fn": predict_fn, "mesh": mesh}
        rows = rc.predict_examples(model, EXAMPLES, **settings, **DATA)
        plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(batch_of(16), jax.random.key(0)))
        evaluation = rc.Evaluation(EXAMPLES, loss_fn=loss_fn, **DATA)
        metrics = rc.compile_evaluation(evaluation, plan)(model)
        errors = plan.verify(loss_fn, model, batch_of(16), jax.random.key(0))
        assert max(errors.values()) < 1e-4
        return [np.asarray(loss["loss"]), np.stack(rows), np.asarray(metrics["loss"])]

    with given_or_ambient(how, explicit) as mesh:
        actual = results(mesh, model)
    same(actual, results(auto, fit(auto).model), atol=1e-6)


def test_an_array_of_the_loss_on_a_mesh_with_explicit_axes_is_refused():
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        scale = jnp.float32(2)
        loss = lambda model, batch, key: loss_fn(model, batch, key)[0] * scale
        with pytest.raises(ValueError, match="aval mesh") as error:
            fit(None, loss_fn=loss)
    assert "`loss_fn` closes over an array" in "".join(error.value.__notes__)


@pytest.mark.thorough
def test_checkpoints_and_generation(tmp_path):
    explicit, auto = mesh_of(AxisType.Explicit), mesh_of(AxisType.Auto)
    where = rc.Checkpoints(tmp_path / "run")
    fit(explicit, checkpoints=where)
    resumed = fit(explicit, checkpoints=where, steps=5)
    same(resumed, fit(auto, steps=5))
    path = rc.save_checkpoint(tmp_path / "tree", resumed) or tmp_path / "tree"
    plan = rc.plan_shardings(resumed, explicit)
    loaded = rc.load_checkpoint(path, resumed, shardings=plan.shardings)
    same(loaded, resumed)
    rc.save_plan(plan, tmp_path / "plan.json")
    assert rc.load_plan(tmp_path / "plan.json", resumed, explicit).mesh == explicit


@pytest.mark.parametrize("how", few_of(["greedy", "stream"], "greedy"))
@pytest.mark.thorough
def test_generation_from_a_model_on_a_mesh_with_explicit_axes(how):
    config = rc.models.LlamaConfig(vocab=32, width=16, layers=1, heads=4, kv_heads=4, hidden=32)
    model = rc.models.Llama(config, key=jax.random.key(0))
    prompts = np.array([[5, 3, 8], [7, 1, 2]])
    options: Any = {"stream": lambda tokens: None} if how == "stream" else {}
    expected = rc.generate(model, prompts, max_new_tokens=4, **options)
    explicit = mesh_of(AxisType.Explicit)
    shardings = rc.infer_shardings(model, explicit)
    place = lambda x, where: x if where is None else jax.device_put(x, where)
    placed = jax.tree.map(place, model, shardings)
    with jax.set_mesh(explicit):
        new = rc.generate(placed, prompts, max_new_tokens=4, **options)
    np.testing.assert_array_equal(new, expected)


def test_an_array_on_a_mesh_with_explicit_axes_may_be_the_examples():
    """Indexing such an array needs a sharding; its rows are read as those of a NumPy array."""
    mesh = jax.make_mesh((8,), ("data",))
    rows = np.arange(64, dtype=np.float32).reshape(16, 4)
    on_mesh = jax.device_put(rows, NamedSharding(mesh, P("data")))
    loss = lambda model, batch, key: jnp.mean(batch * model)
    for examples in (on_mesh, jnp.asarray(rows)):
        actual = rc.evaluate(jnp.float32(2), examples, loss_fn=loss, batch_size=8)
        assert actual["loss"] == pytest.approx(2 * rows.mean())


def test_the_batches_of_a_loop_are_on_the_mesh_that_was_given():
    explicit = mesh_of(AxisType.Explicit, (8, 1, 1))
    settings = {"key": jax.random.key(0), "steps": 1, "mesh": explicit}
    (batch,) = rc.batches(EXAMPLES, collate_fn, batch_size=16, **settings)
    where = NamedSharding(explicit, P(("data", "fsdp")))
    assert all(x.sharding == where for x in batch.arrays.values())


@pytest.mark.parametrize("how", ["given", "ambient"])
@pytest.mark.few("ambient")
def test_a_plan_constrains_a_jitted_function_of_the_user(how):
    model, batch, key = init_fn(jax.random.key(0)), batch_of(16), jax.random.key(1)
    explicit = mesh_of(AxisType.Explicit)
    plan = rc.plan_shardings(model, explicit, fn=loss_fn, args=(batch, key))
    arrays, static = eqx.partition(model, eqx.is_array)
    placed = eqx.combine(jax.device_put(arrays, plan.shardings), static)
    rows = jax.device_put(batch, NamedSharding(explicit, P("data")))

    def outputs(predict, differentiate, model, batch):
        predictions = eqx.filter_jit(predict)(model, batch, key)
        gradients, _ = eqx.filter_jit(eqx.filter_grad(differentiate, has_aux=True))(
            model, batch, key
        )
        return predictions, gradients

    with given_or_ambient(how, explicit):
        actual = outputs(plan.constrain(predict_fn), plan.constrain(loss_fn), placed, rows)
    assert actual[0].sharding == NamedSharding(explicit, P(("data", "fsdp"), None))
    weight, gradient = placed.layers[0].weight, actual[1].layers[0].weight
    assert gradient.sharding.is_equivalent_to(weight.sharding, 2)
    same(actual, outputs(predict_fn, loss_fn, model, batch), atol=1e-6)


def test_a_jitted_step_of_the_user_takes_a_mesh_with_axes_of_both_types():
    """JAX refuses constraints that name an Explicit axis, as of the gradients of what is stored."""
    devices = np.array(jax.devices()).reshape(2, 4)
    mixed = Mesh(devices, ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Explicit))
    model = {"up": jnp.ones((64, 256))}
    loss = lambda model, batch, key: jnp.mean(model["up"] ** 2)

    def step(model):
        state = rc.init_state(model, OPTIMIZER, key=jax.random.key(0))
        jitted = jax.jit(ft.partial(rc.train_step, loss_fn=loss, optimizer=OPTIMIZER))
        return jitted(state, jnp.ones(8))[0]

    with jax.set_mesh(mixed):
        actual = step(jax.device_put(model, NamedSharding(mixed, P(None, "fsdp"))))
    same(actual, step(model))
