import json

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from counting import count_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import (
    Block,
    Transformer,
    array,
    llama,
    mesh_of,
    real_mesh,
    specs,
    stock,
    train_state,
)

from redcoast.sharding import infer_shardings, plan_shardings


def test_one_device_on_fsdp_and_model_leaves_everything_whole():
    plan = plan_shardings(stock(Transformer), mesh_of(data=8))
    arrays = jax.tree.leaves(plan.shardings, is_leaf=lambda x: isinstance(x, NamedSharding))
    assert {sharding.spec for sharding in arrays} == {P()}
    assert "fsdp and model have one device each" in plan.table()


def test_leaves_that_are_no_arrays_get_none():
    tree = {
        "a": np.zeros((4, 4)),
        "f": jax.nn.relu,
        "n": 3,
        "s": "x",
        "none": None,
        "k": jax.random.key(0),
    }
    mesh = mesh_of(model=2)
    shardings = infer_shardings(tree, mesh)
    assert shardings["f"] is shardings["n"] is shardings["s"] is shardings["none"] is None
    assert shardings["k"] == NamedSharding(mesh, P())
    assert isinstance(shardings["a"], NamedSharding)
    assert infer_shardings(np.zeros((512, 512)), mesh).spec == P(None, "model")


def test_abstract_and_concrete_trees_have_the_same_plan():
    concrete = Block(32, 4, jax.random.key(0))
    abstract = eqx.filter_eval_shape(Block, 32, 4, jax.random.key(0))
    mesh = mesh_of(2, 2, 2)
    assert plan_shardings(concrete, mesh).report == plan_shardings(abstract, mesh).report


shapes = st.lists(st.integers(1, 24), min_size=0, max_size=4).map(lambda sizes: array(*sizes))
keys = st.sampled_from(["weight", "kernel", "bias", "q", "k", "v", "o", "embed", "a", "norm", "0"])
trees = st.recursive(
    shapes,
    lambda below: (
        st.lists(below, min_size=1, max_size=4)
        | st.dictionaries(keys, below, min_size=1, max_size=5)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(tree=trees, fsdp=st.sampled_from([1, 2, 3]), model=st.sampled_from([1, 2, 4]))
def test_any_tree_has_a_plan_whose_splits_divide(tree, fsdp, model):
    plan = plan_shardings(tree, mesh_of(1, fsdp, model))
    assert jax.tree.structure(plan.shardings) == jax.tree.structure(tree)
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(plan.shardings), strict=True):
        sharding.shard_shape(leaf.shape)  # raises where a size does not divide
        used = [axis for axis in sharding.spec if axis is not None]
        assert len(used) == len(set(used)) <= len(leaf.shape)
        assert all({"fsdp": fsdp, "model": model}[axis] > 1 for axis in used)
    for row in plan.report.arrays:
        assert row.reason.text
    for text in (str(plan), plan.table()):
        assert max(map(len, text.splitlines())) <= 80


def test_an_array_after_an_array_that_looks_like_a_bias_has_a_plan():
    assert specs([array(4, 6, 8), array(6, 8), array(8)], model=2).keys() == {"0", "1", "2"}


def test_a_bias_of_another_size_than_its_matrix_is_replicated():
    tree = {"a": {"weight": array(2, 3), "bias": array()}, "embed": array(512, 64)}
    tree["head"] = {"kernel": array(64, 512), "bias": array(6)}
    actual = specs(tree, model=4)
    assert actual["a/bias"] == actual["head/bias"] == P()


def assert_same_with_a_plan(function, params, sizes):
    expected = jax.tree.leaves(function(params))
    shardings = infer_shardings(params, real_mesh(*sizes))
    actual = jax.tree.leaves(function(jax.device_put(params, shardings)))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_plan_of_two_matrices_never_changes_loss_and_gradients():
    rng = np.random.default_rng(0)
    sizes = {"up": (32, 64), "down": (64, 32)}
    params = {name: rng.normal(0, 0.1, size).astype(np.float32) for name, size in sizes.items()}
    x = rng.normal(size=(8, 32)).astype(np.float32)
    loss = lambda p: ((jax.nn.gelu(x @ p["up"]) @ p["down"] - x) ** 2).mean()
    assert_same_with_a_plan(jax.jit(jax.value_and_grad(loss)), params, (2, 2, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(2, 1, 4), (2, 2, 2), (1, 8, 1)])
def test_a_plan_of_a_transformer_never_changes_loss_and_gradients(sizes):
    make = eqx.filter_jit(lambda key: Transformer(1, 32, 8, 128, 8, key=key))
    model = make(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 8), 0, 128)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.jit
    def loss_and_grads(params):
        def loss(params):
            logits = jax.vmap(eqx.combine(params, static))(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        return jax.value_and_grad(loss)(params)

    assert_same_with_a_plan(loss_and_grads, params, sizes)


def test_overrides_are_taken_as_given_and_the_first_wins():
    tree = {"a": {"kernel": array(64, 128)}, "b": {"kernel": array(128, 64)}}
    overrides = [("^a/", P(None, "fsdp")), ("kernel", (("fsdp", "model"), None)), ("b", None)]
    actual = specs(tree, overrides, fsdp=2, model=4)
    assert actual == {"a/kernel": P(None, "fsdp"), "b/kernel": P(("fsdp", "model"), None)}
    assert specs(tree, [("b", None)], fsdp=2, model=4)["b/kernel"] == P()


def test_overrides_in_a_training_state_take_paths_of_the_model_and_the_state_follows():
    state = train_state({"w": {"kernel": array(128, 512)}}, optax.adam(1e-3))
    actual = specs(state, [("^w/kernel$", ("model", "fsdp"))], fsdp=2, model=4)
    assert actual["w/kernel"] == P("model", "fsdp")
    assert (
        actual["opt_state/0/mu/w/kernel"] == actual["opt_state/0/nu/w/kernel"] == P("model", "fsdp")
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("wz", None), r"'wz' matches no array's path. Among the 2 paths are: a/wq, a/wk"),
        (("(", None), r"'\(' is not a regular expression"),
        (("wq", ("tensor",)), r"'tensor', but the mesh has 'data', 'fsdp', 'model'"),
        (("wq", ("model", "model")), r"uses the mesh axis 'model' twice"),
        (("wq", (None, None, "model")), r"3 entries, but a/wq has shape \(64, 6\)"),
        (("wq", (None, "model")), r"shape \(64, 6\), over model=4, but 6 is not a multiple of 4"),
        (("wq", (None, "model")), r"\(4 or 8 would be\)\. Dimension 0 is divisible"),
        (("wq", (None, ("fsdp", "model"))), r"fsdp=2 x model=4, but 6 is not a multiple of 8"),
    ],
)
def test_wrong_overrides_say_what_would_work(override, message):
    tree = {"a": {"wq": array(64, 6), "wk": array(64, 6)}}
    with pytest.raises(ValueError, match=message):
        infer_shardings(tree, mesh_of(1, 2, 4), overrides=[override])


def test_the_ambient_mesh_is_the_default():
    mesh = real_mesh(2, 1, 4)
    with jax.set_mesh(mesh):
        actual = infer_shardings(np.zeros((512, 512), np.float32))
    assert actual == NamedSharding(mesh, P(None, "model"))


def test_no_mesh_and_a_mesh_without_the_three_axes_are_errors():
    with pytest.raises(ValueError, match=r"pass mesh=rc\.make_mesh\(\)"):
        infer_shardings(array(4, 4))
    with pytest.raises(ValueError, match=r"axes \('data', 'tensor'\) and lacks fsdp, model"):
        infer_shardings(array(4, 4), AbstractMesh((2, 4), ("data", "tensor")))


def test_report_is_plain_data_that_adds_up():
    state = train_state(stock(Transformer), optax.adamw(1e-3))
    report = plan_shardings(state, mesh_of(1, 2, 4)).report
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    totals = report.totals
    size = sum(x.size for x in jax.tree.leaves(state.model) if hasattr(x, "size"))
    assert totals.parameters.bytes == 4 * size
    assert totals.optimizer_state.bytes == 8 * size + 4
    for key in ("bytes", "bytes_per_device", "arrays"):
        assert getattr(totals.all, key) == sum(
            getattr(total, key)
            for total in (totals.parameters, totals.optimizer_state, totals.other)
        )
    rows = {row.path: row for row in report.arrays}
    assert rows["embed/weight"].bytes_per_device == 512 * 64 * 4 // 8
    whole = {row.path for row in report.replicated}
    assert whole == {path for path, row in rows.items() if not any(row.spec)}
    assert {"norm/weight", "step", "key", "opt_state/0/count"} <= whole


def test_table_groups_repeated_layers_and_says_what_is_whole():
    state = train_state(stock(Transformer, layers=12, seq=128), optax.adamw(1e-3))
    text = plan_shardings(state, mesh_of(2, 2, 4)).table()
    lines = text.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 80
    place = lines.index("Tensor-parallel: column-parallel")
    end = lines.index("", place)
    rows = [line.split()[:5] for line in lines[place + 1 : end]]
    assert ["blocks/{0..11}/up/weight", "(256,", "64)", "(model,", "fsdp)"] in rows
    place = lines.index("Replicated: norm scale")
    assert lines[place + 1].split()[0] == "blocks/{0..11}/norm{1..2}/{weight,bias}"
    assert "sharded like the parameters; 2.0x their size" in text
    assert len(plan_shardings(llama(), mesh_of(2, 2, 4)).table().splitlines()) < 40


@pytest.mark.thorough
def test_the_work_of_planning_is_linear_in_the_number_of_layers():
    def work(layers):
        state = train_state(stock(Transformer, layers=layers), optax.adamw(1e-3))
        return count_calls(lambda: plan_shardings(state, mesh_of(2, 2, 4)).table())

    work(2)  # what is done only once
    assert work(24) < 1.25 * 4 * work(6)
