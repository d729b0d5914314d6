import json
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from redcoast._sharding import infer_shardings, plan_shardings

AXES = ("data", "fsdp", "model")


def mesh_of(data=1, fsdp=1, model=1):
    return AbstractMesh((data, fsdp, model), AXES)


def real_mesh(data, fsdp, model):
    return jax.make_mesh((data, fsdp, model), AXES, axis_types=(AxisType.Auto,) * 3)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def stock(layer, *args, **kwargs):
    """A layer whose arrays are shapes only."""
    return eqx.filter_eval_shape(lambda key: layer(*args, **kwargs, key=key), jax.random.key(0))


def specs(tree, overrides=(), **axes):
    rows = plan_shardings(tree, mesh_of(**axes), overrides=overrides).report["rows"]
    return {
        row["path"]: P(*(tuple(e) if isinstance(e, list) else e for e in row["spec"]))
        for row in rows
    }


def reasons(tree, **axes):
    rows = plan_shardings(tree, mesh_of(**axes)).report["rows"]
    return {row["path"]: row["reason"] for row in rows}


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, use_query_bias=True, use_output_bias=True, key=keys[0]
        )
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(lambda v: self.down(jax.nn.gelu(self.up(v))))(y)


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, layers=2, width=64, heads=8, vocab=512, seq=16, *, key):
        keys = jax.random.split(key, layers + 3)
        self.embed = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.positions = eqx.nn.Embedding(seq, width, key=keys[1])
        self.blocks = [Block(width, heads, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocab, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


# Megatron's split of a stock Equinox transformer, which stores matrices as (out, in).
BLOCK = {
    "attention/query_proj/weight": P("model"),
    "attention/query_proj/bias": P("model"),
    "attention/key_proj/weight": P("model"),
    "attention/value_proj/weight": P("model"),
    "attention/output_proj/weight": P(None, "model"),
    "attention/output_proj/bias": P(),
    "norm1/weight": P(),
    "norm1/bias": P(),
    "norm2/weight": P(),
    "norm2/bias": P(),
    "up/weight": P("model"),
    "up/bias": P("model"),
    "down/weight": P(None, "model"),
    "down/bias": P(),
}
ENDS = {
    "embed/weight": P("model"),
    "positions/weight": P(),
    "norm/weight": P(),
    "norm/bias": P(),
    "head/weight": P("model"),
    "head/bias": P("model"),
}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_stock_transformer_is_split_as_megatron_does(n):
    model = stock(Transformer)
    blocks = {f"blocks/{i}/{name}": spec for i in range(2) for name, spec in BLOCK.items()}
    assert specs(model, model=n) == ENDS | blocks


def test_stacked_blocks_keep_their_leading_dimension_whole():
    keys = jax.random.split(jax.random.key(0), 12)
    blocks = eqx.filter_eval_shape(eqx.filter_vmap(lambda key: Block(64, 8, key)), keys)
    expected = {name: P(None, *spec) if len(spec) else spec for name, spec in BLOCK.items()}
    assert specs(blocks, model=4) == expected
    for spec in specs(blocks, fsdp=2, model=2).values():
        assert not spec or spec[0] is None


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_mlp_alternates_column_and_row(depth):
    model = stock(eqx.nn.MLP, 32, 16, 64, depth)
    found = specs(model, model=4)
    for i in range(depth + 1):
        column = i % 2 == 0
        assert found[f"layers/{i}/weight"] == (P("model") if column else P(None, "model"))
        assert found[f"layers/{i}/bias"] == (P("model") if column else P())


def test_narrow_or_indivisible_output_of_a_chain_is_whole_with_the_reason():
    model = stock(eqx.nn.MLP, 784, 10, 512, 2)
    assert specs(model, model=2)["layers/2/weight"] == P()
    assert "narrow" in reasons(model, model=2)["layers/2/weight"]
    model = stock(eqx.nn.MLP, 784, 50, 128, 2)
    assert "50 is not a multiple of model=4 (48 or 52" in reasons(model, model=4)["layers/2/weight"]


def test_gated_mlp_splits_its_inner_size_in_any_order_of_keys():
    for names in (("gate", "up", "down"), ("b", "c", "a"), ("a", "b", "c")):
        gate, up, down = names
        tree = {
            "norm": {"scale": array(64)},
            "mlp": {gate: array(64, 160), up: array(64, 160), down: array(160, 64)},
        }
        found = specs(tree, model=4)
        assert found[f"mlp/{gate}"] == found[f"mlp/{up}"] == P(None, "model")
        assert found[f"mlp/{down}"] == P("model")


def llama(layers=12, width=256, heads=12, kv_heads=4, head_dim=32, hidden=640, vocab=512):
    return {
        "embed": array(vocab, width),
        "head": array(width, vocab),
        "norm": array(width),
        "layers": {
            "attention": {
                "wq": array(layers, width, heads, head_dim),
                "wk": array(layers, width, kv_heads, head_dim),
                "wv": array(layers, width, kv_heads, head_dim),
                "wo": array(layers, heads, head_dim, width),
            },
            "mlp": {
                "gate": array(layers, width, hidden),
                "up": array(layers, width, hidden),
                "down": array(layers, hidden, width),
            },
            "attention_norm": array(layers, width),
            "mlp_norm": array(layers, width),
        },
    }


def test_heads_as_a_dimension_are_split_and_never_their_size():
    found = specs(llama(), model=4)
    inner = {name: spec for name, spec in found.items() if name.startswith("layers/")}
    assert inner == {
        "layers/attention/wq": P(None, None, "model"),
        "layers/attention/wk": P(None, None, "model"),
        "layers/attention/wv": P(None, None, "model"),
        "layers/attention/wo": P(None, "model"),
        "layers/mlp/gate": P(None, None, "model"),
        "layers/mlp/up": P(None, None, "model"),
        "layers/mlp/down": P(None, "model"),
        "layers/attention_norm": P(),
        "layers/mlp_norm": P(),
    }
    assert found["embed"] == P("model")
    assert found["head"] == P(None, "model")


@pytest.mark.parametrize("sizes", [(12, 64, 12, 4, 64), (4, 64, 4, 4, 16), (32, 128, 32, 32, 4)])
def test_heads_are_found_where_sizes_coincide(sizes):
    """As many layers as heads, heads as wide as the model, as many key heads as heads."""
    layers, width, heads, kv_heads, head_dim = sizes
    found = specs(llama(layers, width, heads, kv_heads, head_dim), model=4)
    assert found["layers/attention/wq"] == P(None, None, "model")
    assert found["layers/attention/wo"] == P(None, "model")


def test_few_key_heads_are_whole_with_the_reason_and_queries_are_split():
    found = reasons(llama(kv_heads=2), model=4)
    assert found["layers/attention/wk"].startswith("whole: number of heads 2 is not a multiple of")
    assert specs(llama(kv_heads=2), model=4)["layers/attention/wq"] == P(None, None, "model")


def test_heads_of_a_module_that_do_not_divide_leave_its_attention_whole():
    attention = stock(eqx.nn.MultiheadAttention, 6, 96)
    assert set(specs(attention, model=4).values()) == {P()}
    reason = reasons(attention, model=4)["query_proj/weight"]
    assert "heads 6 is not a multiple of model=4 (4 or 8 would be)" in reason


def test_attention_is_recognised_by_shapes_alone():
    square, narrow = {"weight": array(64, 64)}, {"weight": array(32, 64)}
    both = {"x": {"one": square, "three": narrow, "two": narrow, "zz": square}, "n": array(64)}
    found = specs(both, model=4)
    assert [found[f"x/{name}/weight"] for name in ("one", "three", "two")] == [P("model")] * 3
    assert found["x/zz/weight"] == P(None, "model")
    beside = {"x": {"a": square, "b": square, "c": square}, "y": {"d": square}, "n": array(64)}
    found = specs(beside, model=4)
    assert [found[f"x/{name}/weight"] for name in "abc"] == [P("model")] * 3
    assert found["y/d/weight"] == P(None, "model")


def test_names_decide_where_all_matrices_are_square():
    names = ("out_proj", "v_proj", "k_proj", "q_proj")
    found = specs({name: {"weight": array(64, 64)} for name in names}, model=4)
    assert found["out_proj/weight"] == P(None, "model")
    assert {found[f"{name}/weight"] for name in names[1:]} == {P("model")}


def test_squares_are_stored_as_the_other_matrices_of_the_tree_are():
    wide = {"weight": array(64, 256), "bias": array(256)}  # (in, out), as the bias shows
    square = {"weight": array(64, 64), "bias": array(64)}
    tree = {"mlp": {"up": wide, "down": {"weight": array(256, 64), "bias": array(64)}}}
    tree["attention"] = dict.fromkeys(("q", "k", "v", "o"), square)
    found = specs(tree, model=4)
    assert found["attention/q/weight"] == P(None, "model")
    assert found["attention/o/weight"] == P("model")


def test_lists_of_weights_and_biases_alternate_in_either_order_of_storage():
    sizes = [(784, 512), (512, 256)]
    found = specs([(array(i, o), array(o)) for i, o in sizes], model=4)
    assert list(found.values()) == [P(None, "model"), P("model"), P("model"), P()]
    found = specs([(array(o, i), array(o)) for i, o in sizes], model=4)
    assert list(found.values()) == [P("model"), P("model"), P(None, "model"), P()]


def test_vocabulary_that_does_not_divide_is_whole_and_says_what_would():
    tree = {"wte": {"weight": array(50257, 64)}, "ln_f": {"weight": array(64)}}
    assert specs(tree, model=4)["wte/weight"] == P()
    expected = "whole: vocabulary 50257 is not a multiple of model=4 (50256 or 50260 would be)"
    assert reasons(tree, model=4)["wte/weight"] == expected


def convolutional():
    key = jax.random.key(0)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 32, 4, key=key),
            eqx.nn.BatchNorm(32, "batch", mode="ema"),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(32, 64, 4, key=key),
            eqx.nn.Conv2d(64, 64, 4, groups=64, key=key),
            eqx.nn.Conv2d(64, 128, 4, key=key),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(128 * 4, 256, key=key),
        ]
    )


def test_convolutions_alternate_over_channels_and_never_over_their_windows():
    model = eqx.filter_eval_shape(convolutional)
    found = specs(model, fsdp=2, model=4)
    assert found["layers/0/weight"] == P("model")
    assert found["layers/0/bias"] == P("model")
    assert found["layers/3/weight"] == P("fsdp", "model")
    assert "64 groups" in reasons(model, model=4)["layers/4/weight"]
    assert found["layers/5/weight"] == P("model", "fsdp")
    assert found["layers/7/weight"] == P("fsdp", "model")
    flax = {"Conv_0": {"kernel": array(4, 4, 3, 32)}, "Conv_1": {"kernel": array(4, 4, 32, 64)}}
    assert list(specs(flax, model=4).values()) == [
        P(None, None, None, "model"),
        P(None, None, "model"),
    ]


def test_recurrent_cells_are_whole_over_model_with_the_reason():
    cell = stock(eqx.nn.LSTMCell, 64, 128)
    assert set(specs(cell, model=4).values()) == {P()}
    assert "recurrent" in reasons(cell, model=4)["weight_hh"]
    assert specs(cell, fsdp=4)["weight_hh"] == P("fsdp")


def test_fsdp_splits_the_largest_remaining_dimension_of_large_arrays():
    tree = {"a": array(64, 128), "b": array(6, 1024), "c": array(8, 8), "d": array(67, 67)}
    found = specs(tree, fsdp=4)
    assert found == {"a": P(None, "fsdp"), "b": P(None, "fsdp"), "c": P(), "d": P()}
    why = reasons(tree, fsdp=4)
    assert why["a"] == "fsdp: largest remaining dimension"
    assert why["c"] == "whole: small, 64 elements"
    assert why["d"] == "whole: no other dimension is a multiple of fsdp=4"
    found = specs(stock(eqx.nn.MLP, 64, 64, 256, 1), fsdp=2, model=4)
    assert found["layers/0/weight"] == P("model", "fsdp")
    assert found["layers/1/weight"] == P("fsdp", "model")


def test_one_device_on_fsdp_and_model_leaves_everything_whole():
    plan = plan_shardings(stock(Transformer), mesh_of(data=8))
    arrays = jax.tree.leaves(plan.shardings, is_leaf=lambda x: isinstance(x, NamedSharding))
    assert {sharding.spec for sharding in arrays} == {P()}
    assert "fsdp and model have one device each" in str(plan)


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


@settings(max_examples=200, deadline=None)
@given(tree=trees, fsdp=st.sampled_from([1, 2, 3]), model=st.sampled_from([1, 2, 4]))
def test_any_tree_has_a_plan_whose_splits_divide(tree, fsdp, model):
    plan = plan_shardings(tree, mesh_of(1, fsdp, model))
    assert jax.tree.structure(plan.shardings) == jax.tree.structure(tree)
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(plan.shardings), strict=True):
        sharding.shard_shape(leaf.shape)  # raises where a size does not divide
        used = [axis for axis in sharding.spec if axis is not None]
        assert len(used) == len(set(used)) <= len(leaf.shape)
        assert all({"fsdp": fsdp, "model": model}[axis] > 1 for axis in used)
    for row in plan.report["rows"]:
        assert row["reason"]
    assert max(map(len, str(plan).splitlines())) <= 100


def test_a_plan_never_changes_loss_and_gradients():
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

    expected = jax.tree.leaves(loss_and_grads(params))
    for sizes in ((2, 1, 4), (2, 2, 2), (1, 8, 1)):
        shardings = infer_shardings(params, real_mesh(*sizes))
        found = jax.tree.leaves(loss_and_grads(jax.device_put(params, shardings)))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def train_state(model, optimizer):
    """A training state of shapes, laid out as `TrainState` is."""
    params = eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    opt_state = eqx.filter_eval_shape(optimizer.init, params)
    return {"key": jax.random.key(0), "model": model, "opt_state": opt_state, "step": array()}


ALIASES = [
    name
    for name in dir(optax)
    if getattr(getattr(optax, name), "__module__", "") == "optax._src.alias" and name[0].islower()
]
OPTIMIZERS = {name: lambda name=name: getattr(optax, name)(1e-3) for name in ALIASES} | {
    "noisy_sgd": lambda: optax.noisy_sgd(1e-3, key=0),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
    "masked": lambda: optax.masked(optax.adam(1e-3), large),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "multi_transform": lambda: optax.multi_transform(
        {True: optax.adam(1e-3), False: optax.sgd(0.1, momentum=0.9)}, large
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    "muon": lambda: optax.contrib.muon(1e-3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
}


def large(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def wide_model():
    key = jax.random.key(0)
    return {
        "embed": eqx.nn.Embedding(512, 128, key=key),
        "attention": eqx.nn.MultiheadAttention(4, 128, use_query_bias=True, key=key),
        "mlp": eqx.nn.MLP(128, 128, 256, 2, key=key),
    }


# optax.tree_map_params fails on these.
NO_MAP = ("lbfgs", "masked", "multi_transform", "muon", "schedule_free", "sm3")


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_follows_its_parameters(name):
    model, optimizer = eqx.filter_eval_shape(wide_model), OPTIMIZERS[name]()
    state = train_state(model, optimizer)
    shardings = infer_shardings(state, mesh_of(1, 2, 4))
    alone = infer_shardings(model, mesh_of(1, 2, 4))
    assert jax.tree.leaves(shardings["model"]) == jax.tree.leaves(alone)
    arrays = jax.tree.leaves(state["opt_state"])
    found = jax.tree.leaves(shardings["opt_state"])
    for array, sharding in zip(arrays, found, strict=True):
        if array.shape == (512, 128):  # only copies of the embedding are
            assert sharding == alone["embed"].weight
        if array.size >= 128 * 128:
            assert np.prod(sharding.shard_shape(array.shape)) * 8 == array.size
    if name not in NO_MAP:
        check_with_optax(optimizer, state, alone, found)


def check_with_optax(optimizer, state, alone, found):
    """The parameter that optax itself tells for an array of the state has the same sharding."""
    params = eqx.filter(state["model"], lambda x: isinstance(x, jax.ShapeDtypeStruct))
    expected = optax.tree_map_params(
        optimizer,
        lambda array, param, sharding: sharding if array.shape == param.shape else "other",
        state["opt_state"],
        params,
        eqx.filter(alone, lambda x: isinstance(x, NamedSharding)),
        transform_non_params=lambda _: "other",
    )
    pairs = list(zip(jax.tree.leaves(expected), found, strict=True))
    assert all(a == b for a, b in pairs if isinstance(a, NamedSharding))


def test_factored_state_keeps_the_entries_of_the_dimensions_it_keeps():
    model = {"up": {"kernel": array(128, 512)}, "down": {"kernel": array(512, 128)}}
    model["square"] = {"kernel": array(256, 256)}
    state = train_state(model, optax.adafactor(1e-3))
    found = specs(state, overrides=[("kernel", ("fsdp", "model"))], fsdp=2, model=4)
    rows = {path: spec for path, spec in found.items() if "/v_row/" in path or "/v_col/" in path}
    assert {path.split("/", 2)[2]: spec for path, spec in rows.items()} == {
        "v_row/up/kernel": P("fsdp"),  # the larger dimension is averaged away
        "v_row/down/kernel": P("model"),
        "v_row/square/kernel": P("fsdp"),
        "v_col/up/kernel": P("model"),
        "v_col/down/kernel": P("fsdp"),
        "v_col/square/kernel": P("model"),
    }


def test_memory_of_several_steps_keeps_its_leading_dimension_whole():
    model = {"up": {"kernel": array(128, 512)}}
    state = train_state(model, optax.lbfgs(1e-3, memory_size=4))
    found = specs(state, overrides=[("kernel", ("fsdp", "model"))], fsdp=2, model=4)
    memory = [spec for path, spec in found.items() if "memory/up" in path]
    assert memory == [P(None, "fsdp", "model")] * 2


def test_state_of_another_shape_is_whole_with_the_reason():
    model = {"w": {"kernel": array(128, 512)}}
    state = {"model": model, "opt_state": {"w": {"kernel": array(7, 9)}, "z": array(512)}}
    found = reasons(state, model=4)
    assert found["opt_state/w/kernel"] == "shape does not tell how it follows w/kernel"
    assert found["opt_state/z"] == "belongs to no parameter"
    assert "does not tell how it follows" in str(plan_shardings(state, mesh_of(model=4)))


def test_overrides_are_taken_as_given_and_the_first_wins():
    tree = {"a": {"kernel": array(64, 128)}, "b": {"kernel": array(128, 64)}}
    overrides = [("^a/", P(None, "fsdp")), ("kernel", (("fsdp", "model"), None)), ("b", None)]
    found = specs(tree, overrides, fsdp=2, model=4)
    assert found == {"a/kernel": P(None, "fsdp"), "b/kernel": P(("fsdp", "model"), None)}
    assert specs(tree, [("b", None)], fsdp=2, model=4)["b/kernel"] == P()


def test_overrides_in_a_training_state_take_paths_of_the_model_and_the_state_follows():
    state = train_state({"w": {"kernel": array(128, 512)}}, optax.adam(1e-3))
    found = specs(state, [("^w/kernel$", ("model", "fsdp"))], fsdp=2, model=4)
    assert found["w/kernel"] == P("model", "fsdp")
    assert (
        found["opt_state/0/mu/w/kernel"] == found["opt_state/0/nu/w/kernel"] == P("model", "fsdp")
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("wz", None), r"'wz' matches no array's path. Among the 2 paths are: a/wq, a/wk"),
        (("(", None), r"'\(' is not a regular expression"),
        (("wq", ("tensor",)), r"'tensor'; the mesh has 'data', 'fsdp', 'model'"),
        (("wq", ("model", "model")), r"uses the mesh axis 'model' twice"),
        (("wq", (None, None, "model")), r"3 entries, but a/wq has shape \(64, 6\)"),
        (("wq", (None, "model")), r"a/wq, shape \(64, 6\), over model=4; 6 is not a multiple of 4"),
        (("wq", (None, "model")), r"A size of 4 or 8 would divide, or splitting dimension 0"),
        (("wq", (None, ("fsdp", "model"))), r"fsdp=2 x model=4; 6 is not a multiple of 8"),
    ],
)
def test_wrong_overrides_say_what_would_work(override, message):
    tree = {"a": {"wq": array(64, 6), "wk": array(64, 6)}}
    with pytest.raises(ValueError, match=message):
        infer_shardings(tree, mesh_of(1, 2, 4), overrides=[override])


def test_the_ambient_mesh_is_the_default():
    mesh = real_mesh(2, 1, 4)
    with jax.set_mesh(mesh):
        found = infer_shardings(np.zeros((512, 512), np.float32))
    assert found == NamedSharding(mesh, P(None, "model"))


def test_no_mesh_and_a_mesh_without_the_three_axes_are_errors():
    with pytest.raises(ValueError, match=r"pass mesh=rc\.make_mesh\(\)"):
        infer_shardings(array(4, 4))
    with pytest.raises(ValueError, match=r"axes \('data', 'tensor'\) and lacks fsdp, model"):
        infer_shardings(array(4, 4), AbstractMesh((2, 4), ("data", "tensor")))


def test_report_is_plain_data_that_adds_up():
    state = train_state(stock(Transformer), optax.adamw(1e-3))
    report = plan_shardings(state, mesh_of(1, 2, 4)).report
    assert json.loads(json.dumps(report)) == report
    totals = report["totals"]
    size = sum(x.size for x in jax.tree.leaves(state["model"]) if hasattr(x, "size"))
    assert totals["parameter"]["bytes"] == 4 * size
    assert totals["optimizer state"]["bytes"] == 8 * size + 4
    for key in ("bytes", "bytes_per_device", "arrays"):
        assert totals["all"][key] == sum(
            totals[role][key] for role in ("parameter", "optimizer state", "other")
        )
    rows = {row["path"]: row for row in report["rows"]}
    assert rows["embed/weight"]["bytes_per_device"] == 512 * 64 * 4 // 8
    whole = {row["path"] for row in report["replicated"]}
    assert whole == {path for path, row in rows.items() if not any(row["spec"])}
    assert {"norm/weight", "step", "key", "opt_state/0/count"} <= whole


def test_table_groups_repeated_layers_and_says_what_is_whole():
    state = train_state(stock(Transformer, layers=12, seq=128), optax.adamw(1e-3))
    text = str(plan_shardings(state, mesh_of(2, 2, 4)))
    lines = text.splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if line.startswith("blocks/{0..11}/up/weight"))
    assert row.split()[1:] == ["(256,", "64)", "(model,", "fsdp)", *row.split()[5:]]
    assert "column-split: pairs with" in row
    whole = text[text.index("Whole on every device:") :]
    assert "norm scale: blocks/{0..11}/norm{1..2}/weight" in whole
    assert "follows its parameters: 2.0 x" in text
    assert len(str(plan_shardings(llama(), mesh_of(2, 2, 4))).splitlines()) < 40


def test_planning_a_hundred_layers_is_fast():
    state = train_state(stock(Transformer, layers=100), optax.adamw(1e-3))
    start = time.perf_counter()
    str(plan_shardings(state, mesh_of(2, 2, 4)))
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("name", ["adam", "adafactor", "sm3"])
def test_state_of_a_model_that_is_one_array_follows_it(name):
    found = specs(train_state(array(256, 512), OPTIMIZERS[name]()), fsdp=2, model=4)
    whole = {path for path, spec in found.items() if spec == P()}
    assert found[""] == P("fsdp", "model")
    assert whole - {"key", "step"} <= {"opt_state/0/count", "opt_state/0/v", "opt_state/2/count"}
