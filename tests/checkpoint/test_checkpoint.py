import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problem import arrays, make_model

import redcoast as rc

OPTIMIZER = optax.adamw(1e-3)


@eqx.filter_jit
def make_state():
    init_fn = lambda key: eqx.nn.MLP(16, 8, 64, depth=2, key=key)
    return rc.init_state(init_fn, OPTIMIZER, key=jax.random.key(0))


def split_state(state, **sizes):
    shardings = rc.infer_shardings(state, rc.make_mesh(**sizes))
    place = lambda x, s: x if s is None else jax.device_put(x, s)
    return jax.tree.map(place, state, shardings, is_leaf=lambda x: x is None)


def assert_same(a, b):
    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.few("sizes3")
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 8},
        {"data": 1, "model": 8},
        {"data": 2, "fsdp": 2, "model": 2},
        {"devices": jax.devices()[:1]},
    ],
)
def test_a_checkpoint_of_one_mesh_restores_on_any_other(tmp_path_factory, sizes):
    state = split_state(make_state(), data=2, model=4)
    path = tmp_path_factory.mktemp("checkpoints") / "2x4"
    rc.save_checkpoint(path, state)
    shardings = rc.infer_shardings(state, rc.make_mesh(**sizes))
    abstract = eqx.filter_eval_shape(make_state)
    actual = rc.load_checkpoint(path, abstract, shardings=shardings)
    assert_same(actual, state)
    ours, theirs = (np.asarray(jax.random.key_data(x.key)) for x in (actual, state))
    np.testing.assert_array_equal(ours, theirs)
    assert actual.model.activation is state.model.activation
    for x, sharding in zip(
        jax.tree.leaves(eqx.filter(actual, eqx.is_array)), jax.tree.leaves(shardings), strict=True
    ):
        assert x.sharding == sharding


def test_arrays_have_the_shardings_of_like(tmp_path):
    state = split_state(make_state(), data=2, model=4)
    rc.save_checkpoint(tmp_path / "a", state)
    actual = rc.load_checkpoint(tmp_path / "a", state)
    weight = actual.model.layers[0].weight
    assert weight.sharding == state.model.layers[0].weight.sharding
    assert not weight.is_fully_replicated
    numpy = jax.tree.map(np.asarray, {"w": weight})
    rc.save_checkpoint(tmp_path / "b", numpy)
    assert type(rc.load_checkpoint(tmp_path / "b", numpy)["w"]) is np.ndarray


def test_shardings_of_another_tree_are_refused(tmp_path):
    """They would place none of the arrays, which would all be loaded to one device."""
    state, mesh = make_state(), rc.make_mesh(model=4)
    rc.save_checkpoint(tmp_path / "a", state)
    shardings = rc.infer_shardings(state, mesh)
    with pytest.raises(
        ValueError, match="no array: key, model/layers/0/bias.*plan.shardings.model"
    ):
        rc.load_checkpoint(tmp_path / "a", state.model, shardings=shardings, subtree="model")
    replicated = NamedSharding(mesh, P())
    with pytest.raises(ValueError, match="no array: its root"):
        rc.load_checkpoint(tmp_path / "a", state, shardings=replicated)


def test_part_of_a_checkpoint(tmp_path):
    state = make_state()
    rc.save_checkpoint(tmp_path / "a", state)
    model = rc.load_checkpoint(tmp_path / "a", make_model(seed=5, width=64), subtree="model")
    assert_same(model, state.model)
    weight = rc.load_checkpoint(tmp_path / "a", subtree="model/layers/0/weight")
    np.testing.assert_array_equal(weight, state.model.layers[0].weight)
    layer = rc.load_checkpoint(tmp_path / "a", state.model.layers[1], subtree="model/layers/1")
    assert_same(layer, state.model.layers[1])
    with pytest.raises(ValueError, match="its top level has key, model, opt_state, step"):
        rc.load_checkpoint(tmp_path / "a", subtree="modell")


def test_without_like_it_is_a_nested_dict_of_numpy_arrays(tmp_path):
    state = make_state()
    rc.save_checkpoint(tmp_path / "a", state)
    nested = rc.load_checkpoint(tmp_path / "a")
    assert sorted(nested) == ["key", "model", "opt_state", "step"]
    weight = nested["model"]["layers"]["0"]["weight"]
    assert type(weight) is np.ndarray
    np.testing.assert_array_equal(weight, state.model.layers[0].weight)
    np.testing.assert_array_equal(
        nested["opt_state"]["0"]["mu"]["layers"]["1"]["bias"], state.opt_state[0].mu.layers[1].bias
    )


def test_arrays_without_elements(tmp_path):
    """Orbax saves none of them."""
    tree = {
        "weights": jnp.ones(3),
        "none": {"left": jnp.zeros((0, 8), jnp.bfloat16), "keys": jax.random.key(0)[None][:0]},
    }
    rc.save_checkpoint(tmp_path / "saved", tree)
    sharded = NamedSharding(rc.make_mesh(data=2, model=4), P(None, "model"))
    like = tree | {"none": tree["none"] | {"left": jax.device_put(tree["none"]["left"], sharded)}}
    loaded = rc.load_checkpoint(tmp_path / "saved", like)
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    left, keys = loaded["none"]["left"], loaded["none"]["keys"]
    assert (left.shape, left.dtype, left.sharding) == ((0, 8), jnp.bfloat16, sharded)
    assert (keys.shape, keys.dtype) == ((0,), tree["none"]["keys"].dtype)
    plain = rc.load_checkpoint(tmp_path / "saved", subtree="none")
    assert plain["left"].shape == (0, 8)
    other = tree | {"none": tree["none"] | {"left": jnp.zeros((0, 9), jnp.bfloat16)}}
    with pytest.raises(ValueError, match=r"none/left is bfloat16\[0, 8\] in the checkpoint"):
        rc.load_checkpoint(tmp_path / "saved", other)
    with pytest.raises(ValueError, match="no arrays with elements"):
        rc.save_checkpoint(tmp_path / "other", tree["none"])


@pytest.mark.thorough
def test_orbax_alone_reads_it(tmp_path):
    state = split_state(make_state(), data=2, model=4)
    rc.save_checkpoint(tmp_path / "a", state)
    np.save(tmp_path / "weight.npy", state.model.layers[0].weight)
    program = """
        import sys
        sys.modules["redcoast"] = None
        import numpy as np, orbax.checkpoint as ocp
        path = sys.argv[1]
        handler = ocp.PyTreeCheckpointer()
        tree = handler.metadata(f"{path}/a/state").item_metadata.tree
        numpy = ocp.checkpoint_utils.construct_restore_args(tree)
        import jax
        numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = handler.restore(f"{path}/a/state", restore_args=numpy)
        weight = state["model"]["layers"]["0"]["weight"]
        assert type(weight) is np.ndarray
        assert (weight == np.load(f"{path}/weight.npy")).all()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    subprocess.run(command, check=True, timeout=900)


def test_metadata_and_no_pickle(tmp_path):
    metadata = {"perplexity": 12.5, "loss": np.float32(0.5), "step": jnp.int32(3)}
    rc.save_checkpoint(tmp_path / "a", make_state(), metadata=metadata)
    document = json.loads((tmp_path / "a" / "metadata" / "metadata").read_text())
    assert document["format"] == 1
    assert document["metadata"] == {"perplexity": 12.5, "loss": 0.5, "step": 3}
    assert document["versions"]["jax"] == jax.__version__
    assert document["prng_keys"] == {"key": "threefry2x32"}
    for file in (tmp_path / "a").rglob("*"):
        assert file.is_dir() or not file.read_bytes().startswith(b"\x80\x04")


def test_metadata_that_is_not_json_raises_and_writes_nothing(tmp_path):
    with pytest.raises(TypeError, match="`metadata` contains a set"):
        rc.save_checkpoint(tmp_path / "a", make_state(), metadata={"tags": {1}})
    assert not list(tmp_path.iterdir())


def test_home_directories_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    rc.save_checkpoint("~/a", {"x": jnp.ones(3)})
    assert (tmp_path / "a" / "state").is_dir()
    assert rc.load_checkpoint("~/a")["x"].sum() == 3
    assert rc.Checkpoints("~/runs").path == tmp_path / "runs" / "checkpoints"


def test_checkpoints_are_never_overwritten(tmp_path):
    rc.save_checkpoint(tmp_path / "a", {"x": jnp.ones(3)})
    with pytest.raises(ValueError, match="exists already"):
        rc.save_checkpoint(tmp_path / "a", {"x": jnp.zeros(3)})
    np.testing.assert_array_equal(rc.load_checkpoint(tmp_path / "a")["x"], np.ones(3))


@pytest.mark.few("tree0", "tree3", "tree6")
@pytest.mark.parametrize(
    "tree",
    [
        {"a": jnp.arange(3), "b": [jnp.ones((2, 2), jnp.bfloat16), (jnp.zeros(()),)]},
        {"a/b": jnp.arange(3), "a": {"b": jnp.arange(4)}},
        {1: jnp.ones(2), 2: {"": jnp.zeros(3)}},
        {"layers.0.weight": jnp.ones(2), "scale": np.float32(2.0)},
        {"é %": jnp.ones(2), "keys": jax.random.split(jax.random.key(0), 3)},
        jnp.arange(5),
        (jnp.array(True), np.arange(3, dtype=np.uint8)),
    ],
)
def test_all_kinds_of_trees(tmp_path, tree):
    rc.save_checkpoint(tmp_path / "a", tree)
    actual = rc.load_checkpoint(tmp_path / "a", tree)
    assert jax.tree.structure(actual) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(tree), strict=True):
        assert x.dtype == y.dtype
        assert bool(jnp.all(x == y))


def test_paths_that_collide(tmp_path):
    with pytest.raises(ValueError, match="Two arrays would be saved as"):
        rc.save_checkpoint(tmp_path / "a", {"a/b": jnp.ones(2), "a%2Fb": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"saved as a\.b"):
        rc.save_checkpoint(tmp_path / "a", {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}})
    # The first was saved and could not be loaded; the second failed with the first save of a run.
    for name in ("a\0b", "a\udcff"):
        with pytest.raises(ValueError, match="cannot have these letters. Rename the dict key"):
            rc.save_checkpoint(tmp_path / "a", {name: jnp.ones(2)})
    with pytest.raises(ValueError, match="no array"):
        rc.save_checkpoint(tmp_path / "a", {"x": 1.0})


def test_a_different_structure_is_described_on_both_sides(tmp_path):
    rc.save_checkpoint(tmp_path / "a", make_state())
    like = rc.init_state(
        lambda k: make_model(width=64), optax.sgd(1e-3, momentum=0.9), key=jax.random.key(0)
    )
    with pytest.raises(
        ValueError,
        match=r"Only in `like`: opt_state/0/trace.*Only in the checkpoint: opt_state/0/count",
    ):
        rc.load_checkpoint(tmp_path / "a", like)
    with pytest.raises(
        ValueError, match=r"layers/0/bias is float32\[64\] in the checkpoint and float32\[32\]"
    ):
        rc.load_checkpoint(tmp_path / "a", make_model(width=32), subtree="model")
    half = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, make_model(width=64)
    )
    with pytest.raises(ValueError, match="bfloat16"):
        rc.load_checkpoint(tmp_path / "a", half, subtree="model")


def test_a_missing_optimizer_state_raises(tmp_path):
    state = make_state()
    rc.save_checkpoint(tmp_path / "a", {"model": state.model, "step": state.step, "key": state.key})
    with pytest.raises(ValueError, match="Only in `like`: opt_state/0/count"):
        rc.load_checkpoint(tmp_path / "a", state)


def test_missing_and_newer_checkpoints_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no checkpoint at"):
        rc.load_checkpoint(tmp_path / "none")
    rc.save_checkpoint(tmp_path / "a", {"x": jnp.ones(3)})
    file = tmp_path / "a" / "metadata" / "metadata"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format 2"):
        rc.load_checkpoint(tmp_path / "a")


STORABLE = [
    "int2",
    "int4",
    "float4_e2m1fn",
    "float8_e4m3fn",
    "float8_e3m4",
    "float8_e8m0fnu",
    "bfloat16",
    "bool",
]
OTHERS = ["uint2", "uint4", "float8_e4m3"]


@pytest.mark.few("int4", "bfloat16")
@pytest.mark.parametrize("name", STORABLE)
def test_narrow_dtypes_are_saved(tmp_path, name):
    tree = {"w": jnp.ones(4), "layer": {"q": jnp.ones((8, 16), getattr(jnp, name))}}
    rc.save_checkpoint(tmp_path / "c", tree)
    assert eqx.tree_equal(rc.load_checkpoint(tmp_path / "c", tree), tree)


@pytest.mark.parametrize("dtype", [*OTHERS, "datetime64[s]", "U3", "V4", "longdouble"])
def test_dtypes_that_cannot_be_stored_are_refused_with_the_name_of_the_leaf(tmp_path, dtype):
    dtype = getattr(jnp, dtype) if dtype in OTHERS else np.dtype(dtype)
    tree = {"w": jnp.ones(4), "layer": {"q": np.zeros((8, 16), dtype)}}
    with pytest.raises(TypeError, match="layer/q is an array of .*cannot store"):
        rc.save_checkpoint(tmp_path / "c", tree)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_state_cannot_be_saved_does_not_begin(tmp_path):
    model = {"w": jnp.ones(4), "q": jnp.ones(4, jnp.uint4)}
    steps = []
    with pytest.raises(TypeError, match="model/q is an array of uint4"):
        rc.fit(
            model,
            optax.sgd(0.1),
            np.ones((8, 4), np.float32),
            collate_fn=np.stack,
            loss_fn=lambda m, b, k: jnp.mean((b @ m["w"]) ** 2),
            batch_size=8,
            steps=2,
            checkpoints=rc.Checkpoints(tmp_path, every=1),
            log=[rc.progress_logger(False), lambda metrics, step: steps.append(step)],
        )
    assert not steps


def test_the_order_of_bytes_is_no_difference(tmp_path):
    tree = {"w": np.arange(4, dtype=">f4")}
    rc.save_checkpoint(tmp_path / "c", tree)
    np.testing.assert_array_equal(rc.load_checkpoint(tmp_path / "c", tree)["w"], tree["w"])


def test_of_several_writers_to_one_path_one_succeeds(tmp_path):
    """They would remove and mix each other's temporary files."""
    trees = [{f"a{i}": jnp.full((100,), number) for i in range(3)} for number in (1.0, 2.0, 3.0)]

    def save(tree):
        try:
            rc.save_checkpoint(tmp_path / "parent" / "one", tree)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(trees)) as pool:
        answers = list(pool.map(save, trees))
    winner = answers.index(None)
    for i, answer in enumerate(answers):
        assert i == winner or "one exists already" in str(answer)
    saved = rc.load_checkpoint(tmp_path / "parent" / "one")
    assert [*map(float, np.stack([*saved.values()]).ravel())] == [float(winner + 1)] * 300
