"""Constrained programs compute what they computed before, on one device and on many."""

import functools as ft
import re
import warnings
from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grammar import LAYERS, Sizes, program
from grids import few_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, real_mesh

import redcoast as rc
from redcoast.core._jaxpr import iter_equations
from redcoast.dryrun.hlo import collectives
from redcoast.sharding.constrain._interpreter import CannotRebind
from redcoast.sharding.solver import _layout as layout

SIZES = Sizes(batch=8, time=4, width=8, hidden=16, heads=4, experts=4, vocabulary=16)


@pytest.fixture(autouse=True)
def _every_array_is_large(monkeypatch):
    monkeypatch.setattr(layout, "LARGE", 16)


def values(tree, seed=0):
    """Arrays for shapes: tokens, or normal numbers of a size that keeps activations about one."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if x.dtype == np.int32:
            return rng.integers(SIZES.vocabulary, size=x.shape).astype(np.int32)
        noise = rng.normal(size=x.shape).astype(np.float32)
        return 1 + noise / 4 if len(x.shape) < 2 else noise / np.sqrt(np.prod(x.shape[:-1]))

    return jax.tree.map(fill, tree)


def difference(found, expected):
    """The largest difference, relative to the largest element of each array.

    Gradients that vanish but for rounding have no scale of their own.
    """
    found, expected = (list(map(np.asarray, jax.tree.leaves(x))) for x in (found, expected))
    floor = 0.01 * max(np.max(np.abs(x)) for x in expected)
    return max(
        np.max(np.abs(a - b)) / max(np.max(np.abs(b)), floor)
        for a, b in zip(found, expected, strict=True)
    )


def constraints(jaxpr):
    """All shardings that a program is constrained to, with the shapes of the arrays."""
    for equation in iter_equations(jaxpr):
        if equation.primitive.name == "sharding_constraint":
            operand: Any = equation.invars[0]
            yield equation.params["sharding"], operand.aval.shape


def check_specs(fn, plan, *args):
    """Every constraint divides and uses each axis once; returns how many split something."""
    split = 0
    for sharding, shape in constraints(eqx.filter_make_jaxpr(plan.constrain(fn))(*args)[0].jaxpr):
        used = [a for entry in sharding.spec for a in np.atleast_1d(entry) if a is not None]
        assert len(used) == len(set(used))
        split += sharding.shard_shape(shape) != shape
    return split


def check(fn, model, batch, plan):
    arrays, data = values(model), values(batch)
    assert check_specs(fn, plan, arrays, data, None)
    expected = jax.jit(jax.value_and_grad(fn))(arrays, data, None)
    placed = jax.device_put(arrays, plan.shardings)
    spread = jax.device_put(data, NamedSharding(plan.mesh, P(("data", "fsdp"))))
    for each, batch in ((fn, data), (plan.constrain(fn), spread)):
        assert difference(jax.jit(jax.value_and_grad(each))(placed, batch, None), expected) < 1e-5


def slow():
    """Devices on which it pays to split even small programs."""
    return rc.Hardware(flops=1e6, memory_bandwidth=1e7, scatters=False)


def plan_of(fn, model, batch, shape=(2, 2, 2), **options):
    args = (batch, None)
    return rc.plan_shardings(model, real_mesh(*shape), fn=fn, args=args, hardware=slow(), **options)


layers = st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=4)
meshes = st.sampled_from([(2, 2, 2), (1, 2, 4)])


# Programs take seconds to compile, and are short enough to be understood as they are.
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
@given(names=layers, shape=meshes, leaf=st.integers(0, 99), override=st.booleans())
@pytest.mark.thorough
def test_random_programs_compute_the_same(names, shape, leaf, override):
    fn, model, batch = program(names, SIZES)
    paths = jax.tree_util.tree_leaves_with_path(model)
    path, x = paths[leaf % len(paths)]
    fits = [d for d, size in enumerate(x.shape) if size % shape[2] == 0]
    overrides = []
    if override and fits:
        # A dimension that is split whatever it costs leads to programs that no search would choose.
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        overrides = [(f"^{name}$", P(*[None] * fits[leaf % len(fits)], "model"))]
    check(fn, model, batch, plan_of(fn, model, batch, shape, overrides=overrides))


@pytest.mark.parametrize("shape", few_of([(2, 2, 2), (1, 2, 4), (1, 1, 8), (1, 8, 1)], (2, 2, 2)))
@pytest.mark.parametrize("name", few_of(sorted(LAYERS), *sorted(LAYERS)[::5]))
def test_every_constraint_divides_and_uses_an_axis_once(name, shape):
    fn, model, batch = program([name, name], SIZES)
    plan = plan_of(fn, model, batch, shape)
    assert check_specs(fn, plan, values(model), values(batch), None)
    for x, sharding in zip(jax.tree.leaves(model), jax.tree.leaves(plan.shardings), strict=True):
        used = [a for entry in sharding.spec for a in np.atleast_1d(entry) if a is not None]
        assert len(used) == len(set(used))
        sharding.shard_shape(x.shape)  # raises where a size does not divide


@pytest.mark.thorough
def test_grouped_convolutions_with_their_channels_split():
    fn, model, batch = program(["depthwise"], SIZES)
    overrides = [("depthwise/kernel", P(None, None, "model"))]
    plan = plan_of(fn, model, batch, (2, 1, 4), overrides=overrides)
    assert plan.compute.dims == (2, 1)
    check(fn, model, batch, plan)


@pytest.fixture(scope="module")
def case():
    """A loss, its model and batch, a plan that splits it, and loss and gradients of one device."""
    fn, model, batch = program(["attention", "mlp"], SIZES)
    plan = plan_of(fn, model, batch)
    assert sum(d is not None for d in plan.compute.dims) > 4
    arrays, data = values(model), values(batch)
    return fn, arrays, data, plan, jax.jit(jax.value_and_grad(fn))(arrays, data, None)


@pytest.mark.thorough
def test_under_transformations(case):
    fn, arrays, data, plan, (loss, grads) = case
    constrained = plan.constrain(fn)
    placed = jax.device_put(arrays, plan.shardings)
    close = lambda found, expected: difference(found, expected) < 1e-5
    assert close(eqx.filter_jit(eqx.filter_grad(constrained))(placed, data, None), grads)

    twice = jax.tree.map(lambda x: np.stack([x, x]), data)
    each = jax.vmap(jax.value_and_grad(constrained), in_axes=(None, 0, None))
    found = jax.jit(each)(placed, twice, None)
    for i in range(2):
        assert close(jax.tree.map(lambda x, i=i: x[i], found), (loss, grads))

    def summed(params, batches):
        step = lambda total, batch: (total + constrained(params, batch, None), None)
        return jax.lax.scan(step, jnp.float32(0), batches)[0]

    assert close(jax.jit(jax.grad(summed))(placed, twice), jax.tree.map(lambda g: 2 * g, grads))


@pytest.mark.thorough
def test_derivatives_forward_and_twice(case):
    fn, arrays, data, plan, _ = case

    def derivatives(fn, params):
        loss = lambda p: fn(p, data, None)
        tangent = jax.tree.map(jnp.sin, params)
        _, slope = jax.jvp(loss, (params,), (tangent,))
        _, curved = jax.jvp(jax.grad(loss), (params,), (tangent,))
        return slope, curved

    run = jax.jit(derivatives, static_argnums=0)
    expected = run(fn, arrays)
    found = run(plan.constrain(fn), jax.device_put(arrays, plan.shardings))
    assert difference(found, expected) < 1e-5


@pytest.mark.thorough
def test_bfloat16(case):
    fn, arrays, data, plan, (loss, grads) = case
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    run = jax.jit(jax.value_and_grad(plan.constrain(fn)))
    found = run(jax.device_put(half, plan.shardings), data, None)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), found)
    assert difference(wide, (loss, grads)) < 0.1


@pytest.mark.thorough
@pytest.mark.parametrize("rows", few_of([8, 4, 6, 3, 1], 3))
def test_batches_of_any_size(case, rows):
    fn, arrays, data, plan, _ = case
    part = jax.tree.map(lambda x: x[:rows], data)
    specs = check_specs(fn, plan, arrays, part, None)
    assert specs
    expected = jax.jit(fn)(arrays, part, None)
    found = jax.jit(plan.constrain(fn))(jax.device_put(arrays, plan.shardings), part, None)
    assert difference(found, expected) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", few_of([1, 2], 2))
def test_training_with_donated_state_and_microbatches(case, accumulate):
    fn, arrays, data, plan, _ = case
    optimizer = optax.sgd(0.1)

    def losses(loss_fn, make_step):
        params = jax.tree.map(jnp.asarray, arrays)
        state = rc.init_state(lambda key: params, optimizer, key=jax.random.key(0))
        options = {"loss_fn": loss_fn, "optimizer": optimizer, "accumulate": accumulate}
        step = make_step(ft.partial(rc.train_step, **options), state)
        found = []
        for _ in range(3):
            state, metrics = step(state, data)
            found.append(metrics["loss"])
        return found

    def on_mesh(step, state):
        planned = rc.plan_shardings(state, plan.mesh, fn=fn, args=(data, None), hardware=slow())
        return rc.compile_step(step, planned.shardings)

    expected = losses(fn, lambda step, state: jax.jit(step))
    assert expected[2] < expected[0]
    assert difference(losses(plan.constrain(fn), on_mesh), expected) < 1e-5


class Noisy(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="ema")
        self.dropout = eqx.nn.Dropout()
        self.last = eqx.nn.Linear(16, 8, key=key)

    def __call__(self, x, key, state):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


@pytest.mark.thorough
def test_state_dropout_and_prints(capfd):
    def loss_fn(model, x, key):
        net, state = model
        keys = jax.random.split(key, len(x))
        axes = {"in_axes": (0, 0, None), "out_axes": (0, None)}
        y, state = jax.vmap(net, axis_name="batch", **axes)(x, keys, state)
        jax.debug.print("mean {}", jnp.round(jnp.mean(y), 3))
        return jnp.mean(y**2), {"mean": jnp.mean(y)}, (net, state)

    key, x = jax.random.key(1), np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    model = eqx.filter_jit(eqx.nn.make_with_state(Noisy))(jax.random.key(0))
    plan = rc.plan_shardings(model, real_mesh(2, 2, 2), fn=loss_fn, args=(x, key), hardware=slow())
    assert check_specs(loss_fn, plan, model, x, key)
    results, printed = [], []
    for fn in (loss_fn, plan.constrain(loss_fn)):
        loss, aux, (_, state) = eqx.filter_jit(fn)(model, x, key)
        jax.effects_barrier()
        results.append((loss, aux, eqx.filter(state, eqx.is_inexact_array)))
        printed.append(capfd.readouterr().out)
    assert difference(results[1], results[0]) < 1e-5
    assert printed[0] == printed[1] != ""


def test_functions_that_cannot_be_traced_run_as_they_are():
    def branching(model, batch, key):
        return model["w"] * (2 if batch[0] > 0 else 3)

    model, batch = {"w": jnp.float32(1)}, np.ones(8, np.float32)
    plan = rc.plan_shardings(model, real_mesh(2, 2, 2))
    with pytest.warns(
        UserWarning, match=r"branching are not constrained.*cannot be traced"
    ) as all_:
        assert plan.constrain(branching)(model, batch, None) == 2
    assert len(all_) == 1
    assert "on the mesh data=2, fsdp=2, model=2" in str(all_[0].message)


def test_nothing_is_said_where_only_the_batch_is_split():
    """Users of diffrax, whose derivatives cannot be re-evaluated, can do nothing about it."""
    branching = lambda model, batch, key: model["w"] * (2 if batch[0] > 0 else 3)
    model, batch = {"w": jnp.float32(1)}, np.ones(8, np.float32)
    plan = rc.plan_shardings(model, real_mesh(8, 1, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan.constrain(branching)(model, batch, None) == 2


@pytest.mark.parametrize("primitive", ["custom_vjp_call", "while"])
def test_what_is_not_constrained_says_which_mesh_and_method_would_be(primitive, monkeypatch):
    """Derivatives of a library's own, as diffrax's, can be exchanged for those of JAX."""

    def fail(*args, **specs):
        raise CannotRebind(primitive)

    monkeypatch.setattr("redcoast.sharding.constrain._function.run_constrained", fail)
    loss = lambda model, batch, key: jnp.mean(batch * model["w"])
    model, batch = {"w": jnp.float32(1)}, np.ones(8, np.float32)
    plan = rc.plan_shardings(model, real_mesh(2, 2, 2))
    with pytest.warns(UserWarning, match="`data` alone is not affected: use it if") as all_:
        assert plan.constrain(loss)(model, batch, None) == 1
    assert len(all_) == 1
    method = "compare the time of a step with that of a method that JAX differentiates itself"
    assert (method in str(all_[0].message)) == (primitive == "custom_vjp_call")


def test_a_tree_that_was_not_planned_is_refused(case):
    plan = case[3]
    with pytest.raises(ValueError, match=r"was called with a tree of 1"):
        plan.constrain(lambda model, batch, key: model["w"])({"w": jnp.ones(8)}, np.ones(8), None)


def test_called_without_a_compiler():
    def loss(model, x, key):
        return jnp.mean(jnp.tanh(x @ model["w"]) ** 2)

    model, x = {"w": array(8, 16)}, array(16, 8)
    plan = plan_of(loss, model, x)
    arrays, data = values(model), values(x)
    placed = jax.device_put(arrays, plan.shardings)
    assert difference(plan.constrain(loss)(placed, data, None), loss(arrays, data, None)) < 1e-5


def test_one_device_runs_the_function_itself(case):
    fn, arrays, data, _, _ = case
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    assert rc.plan_shardings(arrays, mesh, fn=fn, args=(data, None)).constrain(fn) is fn


def attended(model, x, key):
    """Attention with a residual sum and a norm, as in a transformer."""
    normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("bsw,whd->bshd", normed, model[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd,hdw->bqw", scores, v, model["o"])
    return jnp.mean((x + jax.nn.gelu(x @ model["up"]) @ model["down"]) ** 2)


@pytest.mark.thorough
def test_constraints_add_no_operations():
    """Where there is nothing to choose, programs with and without them are the same."""
    shapes = {"q": (16, 4, 8), "k": (16, 4, 8), "v": (16, 4, 8), "o": (4, 8, 16)}
    shapes |= {"up": (16, 64), "down": (64, 16)}
    model = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((16, 8, 16), jnp.float32)
    mesh = rc.make_mesh()
    plan = rc.plan_shardings(model, mesh, fn=attended, args=(x, None))
    rows = NamedSharding(mesh, P("data"))

    def operations(fn):
        step = jax.jit(jax.value_and_grad(fn), in_shardings=(plan.shardings, rows, None))
        text = step.lower(model, x, None).compile().as_text()
        return Counter(re.findall(r" = \S+ ([\w-]+)\(", str(text)))

    plain = operations(attended)
    assert plain["dot"] > 0
    assert operations(plan.constrain(attended)) == plain


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_scattered_before_anything_reads_them(dtype):
    """A step reads their norm, for which each device would sum whole gradients otherwise. Arrays
    that the program casts are cast before they are gathered."""
    mesh = rc.make_mesh(fsdp=8)
    model = {"up": array(64, 256), "down": array(256, 64)}

    def loss_fn(model, x, key):
        up, down = model["up"].astype(dtype), model["down"].astype(dtype)
        y = jax.nn.relu(x.astype(dtype) @ up) @ down
        return jnp.mean(y.astype(jnp.float32) ** 2)

    batch = array(16, 64)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(batch, None))
    jaxpr = jax.make_jaxpr(jax.grad(plan.constrain(loss_fn)))(model, batch, None)
    asked = [x for x in iter_equations(jaxpr) if x.primitive.name == "sharding_constraint"]
    stored = [x.outvars[0] for x in asked if "fsdp" in str(x.params["sharding"].spec)]
    assert set(jaxpr.jaxpr.outvars) <= set(stored)
    gathered: list[Any] = [x.outvars[0].aval for x in asked if x.outvars[0] not in stored]
    # Two weights and their gradients.
    assert [aval.dtype for aval in gathered if aval.size == 64 * 256] == [dtype] * 4
    if dtype == jnp.float32:
        check(loss_fn, model, batch, plan)


def test_constraints_are_in_the_same_order_in_every_trace():
    """All processes of a job must compile the same program."""
    params, x = [array(8, n) for n in range(1, 9)], array(16, 8)
    loss_fn = lambda params, x, key: jnp.mean((x @ jnp.concatenate(params, 1)) ** 2)
    plan = rc.plan_shardings(params, real_mesh(2, 2, 2), fn=loss_fn, args=(x, None))
    trace = lambda: str(
        jax.make_jaxpr(lambda *args: plan.constrain(loss_fn)(*args))(params, x, None)
    )
    assert len({trace() for _ in range(4)}) == 1


def test_a_layout_is_given_to_each_part_of_an_array():
    """XLA gathers the operand of a layout that it is not given so."""
    mesh = rc.make_mesh(data=8)
    weights, rows = jnp.ones((16, 16)), jnp.ones((8, 4, 16))
    fixed = lambda x: with_layout_constraint(x, Layout((0, 1, 2)))
    loss_fn = lambda w, x, key: jnp.mean(jnp.sin(fixed(x @ w)))
    plan = rc.plan_shardings(weights, mesh, fn=loss_fn, args=(rows, None))
    step = jax.jit(
        jax.grad(plan.constrain(loss_fn)), in_shardings=(None, NamedSharding(mesh, P("data")), None)
    )
    assert "all-gather" not in str(step.lower(weights, rows, None).compile().as_text())
    rows = jnp.linspace(-1.0, 1.0, rows.size).reshape(rows.shape)
    expected = jax.grad(jax.jit(loss_fn))(weights, rows, None)
    np.testing.assert_allclose(step(weights, rows, None), expected, atol=1e-6)


@pytest.mark.thorough
def test_what_is_concatenated_for_a_split_product_stays_whole():
    """XLA would split cotangents of all tokens as that of the concatenation, and gather them."""

    def loss_fn(model, x, key):
        x = x + jnp.tanh(x @ model["up"]) @ model["down"]
        x = x / (1 + jnp.abs(x))
        read = jnp.concatenate([x[:, 0], jnp.mean(x, axis=1)], axis=-1)
        return jnp.mean((read @ model["head"]) ** 2)

    shapes = {"up": (64, 128), "down": (128, 64), "head": (128, 10)}
    model, x = {name: array(*shape) for name, shape in shapes.items()}, array(8, 16, 64)
    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(x, None))
    assert plan.shardings["head"].spec == P("model")
    rows = NamedSharding(mesh, P("data"))
    step = jax.jit(jax.grad(plan.constrain(loss_fn)), in_shardings=(plan.shardings, rows, None))
    found = collectives(step.lower(model, x, None).compile().as_text(), mesh)
    gathered = sum(one.sent_bytes for one in found if one.kind == "all-gather")
    of_tokens = 3 * (8 // 2 * 16 * 64 // 4) * 4  # what each device would send
    assert gathered < of_tokens / 4


def test_no_sequence_is_split_over_model_if_the_batch_is_split_over_it():
    """Positions that are looked up for all rows are no part of a tensor-parallel layer: nothing is
    tensor-parallel, and every device needs them for its rows."""

    def loss_fn(model, tokens, key):
        positions = model["positions"][jnp.arange(tokens.shape[1])]
        x = model["tokens"][tokens] + positions[None]
        x = x / (1 + jnp.abs(x))
        return jnp.mean((x + jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)

    shapes = {"tokens": (64, 32), "positions": (16, 32), "up": (32, 128), "down": (128, 32)}
    model = {name: array(*shape) for name, shape in shapes.items()}
    tokens = jax.ShapeDtypeStruct((64, 16), jnp.int32)
    mesh = rc.make_mesh(data=4, model=2)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=(tokens, None), sequence=True)
    assert "model" in plan.compute.batch_axes
    jaxpr = eqx.filter_make_jaxpr(plan.constrain(loss_fn))(model, tokens, None)[0].jaxpr
    specs = {shape: sharding.spec for sharding, shape in constraints(jaxpr)}
    assert specs[16, 32] == P(None, None)
