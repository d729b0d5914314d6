import json
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import Block, array, mesh_of, real_mesh, train_state

import redcoast as rc


def model(hidden=256):
    return {"up": array(64, hidden), "down": array(hidden, 64), "head": array(64, 6), "n": 3}


def loss_fn(model, batch, key):
    x = batch + jax.nn.relu(batch @ model["up"]) @ model["down"]
    return jnp.mean((x @ model["head"]) ** 2)


def plan_model(mesh, tree=None, batch=256, **options):
    tree = model() if tree is None else tree
    return rc.plan_shardings(tree, mesh, fn=loss_fn, args=(array(batch, 64), None), **options)


def check_equal(found, plan):
    assert found.report == plan.report
    assert found.compute == plan.compute
    assert found.mesh == plan.mesh
    assert str(found) == str(plan)
    assert found.table() == plan.table()
    assert jax.tree.structure(found.shardings) == jax.tree.structure(plan.shardings)
    assert jax.tree.leaves(found.shardings) == jax.tree.leaves(plan.shardings)


@pytest.mark.parametrize("sizes", [(2, 1, 4), (1, 8, 1), (2, 2, 2)])
def test_a_plan_reads_back_equal(sizes, tmp_path):
    plan = plan_model(mesh_of(*sizes))
    rc.save_plan(plan, tmp_path / "plan.json")
    found = rc.load_plan(tmp_path / "plan.json", model(), mesh_of(*sizes))
    check_equal(found, plan)
    assert found.report.program.traffic
    assert found.report.program.memory.total > 0


@pytest.mark.parametrize(
    ("tree", "options"),
    [
        (train_state(model(), optax.adamw(1e-3)), {}),
        (model(), {"overrides": [("up", P(None, ("fsdp", "model"))), ("down", None)]}),
        (model(), {"budget": 10**9}),
        (model(), {"sequence": True}),
    ],
)
def test_plans_of_all_kinds_read_back_equal(tree, options, tmp_path):
    mesh = mesh_of(2, 2, 2)
    plan = plan_model(mesh, tree, **options)
    rc.save_plan(plan, tmp_path / "plan.json")
    check_equal(rc.load_plan(tmp_path / "plan.json", tree, mesh), plan)


def test_plans_without_a_function_and_of_one_array_read_back_equal(tmp_path):
    module = eqx.filter_eval_shape(Block, 32, 4, jax.random.key(0))
    for i, tree in enumerate((module, array(512, 512), {"key": jax.random.key(0), "none": None})):
        plan = rc.plan_shardings(tree, mesh_of(2, 2, 2))
        rc.save_plan(plan, tmp_path / f"{i}.json")
        check_equal(rc.load_plan(tmp_path / f"{i}.json", tree, mesh_of(2, 2, 2)), plan)


@pytest.mark.thorough
def test_a_plan_of_shapes_holds_for_arrays_on_devices(tmp_path):
    rc.save_plan(plan_model(mesh_of(2, 1, 4)), tmp_path / "plan.json")
    key = jax.random.key(0)
    concrete = jax.tree.map(
        lambda x: jax.random.normal(key, x.shape) if hasattr(x, "shape") else x, model()
    )
    mesh = real_mesh(2, 1, 4)
    with jax.set_mesh(mesh):
        plan = rc.load_plan(tmp_path / "plan.json", concrete)
    assert plan.mesh == mesh
    batch = jax.random.normal(jax.random.key(1), (256, 64))
    params, rest = eqx.partition(concrete, eqx.is_array)
    placed = eqx.combine(jax.device_put(params, plan.shardings | {"n": None}), rest)
    found = eqx.filter_jit(plan.constrain(loss_fn))(placed, batch, None)
    np.testing.assert_allclose(found, loss_fn(concrete, batch, None), rtol=1e-5)
    assert placed["up"].sharding.spec == plan.shardings["up"].spec != P()


def test_the_file_is_json_that_can_be_read(tmp_path):
    path = tmp_path / "plan.json"
    rc.save_plan(plan_model(mesh_of(2, 1, 4)), path)
    document = json.loads(path.read_text())
    assert document["format"] == 2
    assert document["mesh"] == {"data": 2, "fsdp": 1, "model": 4}
    rows = {row["path"]: row for row in document["rows"]}
    assert set(rows) == {"up", "down", "head"}
    assert rows["up"]["shape"] == [64, 256]
    assert rows["up"]["dtype"] == "float32"
    assert rows["up"]["reason"]["kind"] == "tensor-parallel"
    assert set(rows["up"]) == {"path", "shape", "dtype", "spec", "reason", "role"}
    assert document["compute"]["batch_axes"] == ["data", "fsdp"]
    assert {"traffic", "unknown", "memory", "batch"} <= set(document["report"])


def test_directories_are_made_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "a" / "b" / "plan.json"
    plan = plan_model(mesh_of(2))
    rc.save_plan(plan, path)
    rc.save_plan(plan, str(path))  # the same plan: nothing to be done
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_another_plan_is_not_overwritten(tmp_path):
    path = tmp_path / "plan.json"
    rc.save_plan(plan_model(mesh_of(2)), path)
    before = path.read_text()
    with pytest.raises(ValueError, match=r"plan\.json already exists and is not this plan"):
        rc.save_plan(plan_model(mesh_of(4)), path)
    assert path.read_text() == before
    with pytest.raises(ValueError, match="already exists"):
        rc.save_plan(plan_model(mesh_of(4)), tmp_path)


def test_a_plan_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        rc.save_plan(plan_model(mesh_of(2)), tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


class Turned(eqx.Module):
    up: jax.ShapeDtypeStruct
    head: jax.ShapeDtypeStruct
    down: jax.ShapeDtypeStruct


# Trees that are not the one planned, and what is said of them.
OTHERS = [
    (model(512), r"down was planned with shape \(256, 64\) and dtype float32, but has \(512"),
    (
        model() | {"head": jax.ShapeDtypeStruct((64, 6), jnp.bfloat16)},
        r"head was planned with .* dtype float32, but has \(64, 6\) and bfloat16",
    ),
    ({"up": array(64, 256)}, r"for another tree: the tree lacks 'down', 'head'\.$"),
    (model() | {"b": array(6)}, r"another tree: the plan does not have 'b'\.$"),
    ({"layer": model()}, r"lacks 'down', 'head', 'up', and the plan does not have 'layer/down'"),
    (
        model() | {f"w{i}": array(2) for i in range(5)},
        r"the plan does not have 'w0', 'w1', 'w2' and 2 more",
    ),
    (
        Turned(array(64, 256), array(64, 6), array(256, 64)),
        "the paths are in another order",
    ),
]


@pytest.mark.parametrize(("tree", "message"), OTHERS)
def test_other_trees_are_refused(tree, message, tmp_path):
    rc.save_plan(plan_model(mesh_of(2, 1, 4)), tmp_path / "plan.json")
    with pytest.raises(ValueError, match=message):
        rc.load_plan(tmp_path / "plan.json", tree, mesh_of(2, 1, 4))


def test_a_row_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    mesh = mesh_of(2, 1, 4)
    rc.save_plan(plan_model(mesh), path)
    document = json.loads(path.read_text())
    document["rows"].append(document["rows"][-1])
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="or come several times"):
        rc.load_plan(path, model(), mesh)


def test_other_meshes_are_refused(tmp_path):
    rc.save_plan(plan_model(mesh_of(2, 1, 4)), tmp_path / "plan.json")
    message = (
        r"is for a mesh of data=2, fsdp=1, model=4, but the given mesh has data=1, fsdp=2, model=4"
        r"\. Use rc\.make_mesh\(data=2, fsdp=1, model=4\)"
    )
    with pytest.raises(ValueError, match=message):
        rc.load_plan(tmp_path / "plan.json", model(), mesh_of(1, 2, 4))
    with pytest.raises(ValueError, match="The mesh is missing"):
        rc.load_plan(tmp_path / "plan.json", model())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"plan\.json is not a plan\. .* is damaged or is not JSON: Expecting"),
        ("[1, 2]", "must contain a JSON object, but contains a list"),
        ('{"rows": []}', "is not a plan: it has no `format`"),
        ('{"format": 7}', "format 7, but this version of redcoast reads format 2"),
        ('{"format": 1, "rows": []}', "format 1, but this version of redcoast reads format 2"),
        ('{"format": 2, "rows": [], "mesh": {}}', "complete plan: compute, report must be present"),
        (
            '{"format": 2, "mesh": {}, "compute": {"dims": []}, "report": null, '
            '"rows": [{"path": "a"}]}',
            "complete plan: dtype, reason, role, shape, spec must be present",
        ),
        (
            '{"format": 2, "mesh": {}, "compute": {"dims": []}, "report": null, "rows": [{"path": '
            '"a", "shape": [], "dtype": "float32", "spec": [], "role": "other", "reason": '
            '{"kind": "thing", "text": ""}}]}',
            "complete plan: kind must be present",
        ),
    ],
)
def test_what_is_no_plan_is_refused(text, message, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        rc.load_plan(path, model(), mesh_of(2, 1, 4))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a plan from .*no\.json: No such file"):
        rc.load_plan(tmp_path / "no.json", model(), mesh_of(2, 1, 4))


@pytest.mark.parametrize(
    "spec", [["tensor"], ["model", "model"], [None, None, "model"], [None, "model"], ["data", None]]
)
def test_an_edited_spec_has_to_fit(spec, tmp_path):
    path = tmp_path / "plan.json"
    rc.save_plan(plan_model(mesh_of(3, 1, 4)), path)
    document = json.loads(path.read_text())
    next(row for row in document["rows"] if row["path"] == "head")["spec"] = spec
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"of head does not fit its shape \[64, 6\]"):
        rc.load_plan(path, model(), mesh_of(3, 1, 4))


def test_a_report_without_its_figures_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    rc.save_plan(plan_model(mesh_of(2, 1, 4)), path)
    document = json.loads(path.read_text())
    del document["report"]["memory"]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"is not a complete plan: memory must be present"):
        rc.load_plan(path, model(), mesh_of(2, 1, 4))


def test_a_plan_of_a_state_without_a_function_constrains_functions_of_its_model():
    state = train_state(model(), optax.adam(1e-3))
    inside = rc.plan_shardings(model(), mesh_of(2, 1, 4)).compute
    assert rc.plan_shardings(state, mesh_of(2, 1, 4)).compute == inside
    assert len(inside.dims) == 3
