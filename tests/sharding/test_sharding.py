import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import Block, Transformer, array, llama, reasons, specs, stock

import redcoast as rc

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
    actual = specs(model, model=4)
    for i in range(depth + 1):
        column = i % 2 == 0
        assert actual[f"layers/{i}/weight"] == (P("model") if column else P(None, "model"))
        assert actual[f"layers/{i}/bias"] == (P("model") if column else P())


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
        actual = specs(tree, model=4)
        assert actual[f"mlp/{gate}"] == actual[f"mlp/{up}"] == P(None, "model")
        assert actual[f"mlp/{down}"] == P("model")


def test_heads_as_a_dimension_are_split_and_never_their_size():
    actual = specs(llama(), model=4)
    inner = {name: spec for name, spec in actual.items() if name.startswith("layers/")}
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
    assert actual["embed"] == P("model")
    assert actual["head"] == P(None, "model")


@pytest.mark.parametrize("sizes", [(12, 64, 12, 4, 64), (4, 64, 4, 4, 16), (32, 128, 32, 32, 4)])
def test_heads_are_found_where_sizes_coincide(sizes):
    """As many layers as heads, heads as wide as the model, as many key heads as heads."""
    layers, width, heads, kv_heads, head_dim = sizes
    actual = specs(llama(layers, width, heads, kv_heads, head_dim), model=4)
    assert actual["layers/attention/wq"] == P(None, None, "model")
    assert actual["layers/attention/wo"] == P(None, "model")


def test_few_key_heads_are_whole_with_the_reason_and_queries_are_split():
    actual = reasons(llama(kv_heads=2), model=4)
    assert actual["layers/attention/wk"].startswith(
        "replicated: number of heads 2 is not a multiple of"
    )
    assert specs(llama(kv_heads=2), model=4)["layers/attention/wq"] == P(None, None, "model")


def test_heads_of_a_module_that_do_not_divide_leave_its_attention_whole():
    attention = stock(eqx.nn.MultiheadAttention, 6, 96)
    assert set(specs(attention, model=4).values()) == {P()}
    reason = reasons(attention, model=4)["query_proj/weight"]
    assert "heads 6 is not a multiple of model=4 (4 or 8 would be)" in reason


def test_attention_is_recognised_by_shapes_alone():
    square, narrow = {"weight": array(64, 64)}, {"weight": array(32, 64)}
    both = {"x": {"one": square, "three": narrow, "two": narrow, "zz": square}, "n": array(64)}
    actual = specs(both, model=4)
    assert [actual[f"x/{name}/weight"] for name in ("one", "three", "two")] == [P("model")] * 3
    assert actual["x/zz/weight"] == P(None, "model")
    beside = {"x": {"a": square, "b": square, "c": square}, "y": {"d": square}, "n": array(64)}
    actual = specs(beside, model=4)
    assert [actual[f"x/{name}/weight"] for name in "abc"] == [P("model")] * 3
    assert actual["y/d/weight"] == P(None, "model")


def test_names_decide_where_all_matrices_are_square():
    names = ("out_proj", "v_proj", "k_proj", "q_proj")
    actual = specs({name: {"weight": array(64, 64)} for name in names}, model=4)
    assert actual["out_proj/weight"] == P(None, "model")
    assert {actual[f"{name}/weight"] for name in names[1:]} == {P("model")}


def test_squares_are_stored_as_the_other_matrices_of_the_tree_are():
    wide = {"weight": array(64, 256), "bias": array(256)}  # (in, out), as the bias shows
    square = {"weight": array(64, 64), "bias": array(64)}
    tree = {"mlp": {"up": wide, "down": {"weight": array(256, 64), "bias": array(64)}}}
    tree["attention"] = dict.fromkeys(("q", "k", "v", "o"), square)
    actual = specs(tree, model=4)
    assert actual["attention/q/weight"] == P(None, "model")
    assert actual["attention/o/weight"] == P("model")


def test_lists_of_weights_and_biases_alternate_in_either_order_of_storage():
    sizes = [(784, 512), (512, 256)]
    actual = specs([(array(i, o), array(o)) for i, o in sizes], model=4)
    assert list(actual.values()) == [P(None, "model"), P("model"), P("model"), P()]
    actual = specs([(array(o, i), array(o)) for i, o in sizes], model=4)
    assert list(actual.values()) == [P("model"), P("model"), P(None, "model"), P()]


def test_vocabulary_that_does_not_divide_is_whole_and_says_what_would():
    tree = {"wte": {"weight": array(50257, 64)}, "ln_f": {"weight": array(64)}}
    assert specs(tree, model=4)["wte/weight"] == P()
    expected = "replicated: vocabulary 50257 is not a multiple of model=4 (50256 or 50260 would be)"
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
    actual = specs(model, fsdp=2, model=4)
    assert actual["layers/0/weight"] == P("model")
    assert actual["layers/0/bias"] == P("model")
    assert actual["layers/3/weight"] == P("fsdp", "model")
    assert "64 groups" in reasons(model, model=4)["layers/4/weight"]
    assert actual["layers/5/weight"] == P("model", "fsdp")
    assert actual["layers/7/weight"] == P("fsdp", "model")
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
    actual = specs(tree, fsdp=4)
    assert actual == {"a": P(None, "fsdp"), "b": P(None, "fsdp"), "c": P(), "d": P()}
    why = reasons(tree, fsdp=4)
    assert why["a"] == "fsdp: all-gathered where used"
    assert why["c"] == "replicated: small, 64 elements"
    assert why["d"] == "replicated: no other dimension is a multiple of fsdp=4"
    actual = specs(stock(eqx.nn.MLP, 64, 64, 256, 1), fsdp=2, model=4)
    assert actual["layers/0/weight"] == P("model", "fsdp")
    assert actual["layers/1/weight"] == P("fsdp", "model")


def test_a_byte_level_vocabulary_as_wide_as_the_model_is_still_split():
    tree = llama(width=256, vocab=256)
    assert specs(tree, model=4)["embed"] == P("model")
    assert specs(tree, model=4)["head"] == P(None, "model")


def test_an_mlp_as_wide_inside_as_the_vocabulary_keeps_its_split():
    tree = {"embed": stock(eqx.nn.Embedding, 256, 64), "mlp": stock(eqx.nn.MLP, 64, 64, 256, 1)}
    actual = specs(tree, model=4)
    assert actual["mlp/layers/1/weight"] == P(None, "model")
    assert actual["mlp/layers/1/bias"] == P()


def test_attention_with_values_of_another_size_is_closed_by_its_output():
    attention = stock(eqx.nn.MultiheadAttention, 4, 64, vo_size=32, output_size=96)
    actual = specs(attention, model=4)
    assert actual["value_proj/weight"] == P("model")
    assert actual["output_proj/weight"] == P(None, "model")


def test_heads_in_the_fields_of_a_module_decide_what_divides():
    class Attention(eqx.Module):
        q: eqx.nn.Linear
        k: eqx.nn.Linear
        v: eqx.nn.Linear
        o: eqx.nn.Linear
        num_heads: int = 8
        num_kv_heads: int = 2

    wide, narrow = stock(eqx.nn.Linear, 64, 64), stock(eqx.nn.Linear, 64, 16)
    attention = Attention(wide, narrow, narrow, wide)
    actual = specs(attention, model=4)
    assert actual["q/weight"] == P("model")
    assert actual["o/weight"] == P(None, "model")
    assert actual["k/weight"] == actual["v/weight"] == P()
    assert "heads 2 is not a multiple" in reasons(attention, model=4)["k/weight"]


def test_a_residual_block_of_convolutions_is_split_inside():
    class Residual(eqx.Module):
        first: eqx.nn.Conv2d
        norm: eqx.nn.GroupNorm
        second: eqx.nn.Conv2d
        skip: eqx.nn.Conv2d

    conv = eqx.nn.Conv2d
    block = Residual(
        stock(conv, 64, 128, 3),
        eqx.nn.GroupNorm(8, 128),
        stock(conv, 128, 128, 3),
        stock(conv, 64, 128, 1),
    )
    actual = specs(block, model=4)
    assert actual["first/weight"] == P("model")
    assert actual["second/weight"] == P(None, "model")
    assert actual["skip/weight"] == P()


def test_a_stock_layer_with_more_arrays():
    """Of a subclass, or with a module for its bias."""

    class Scaled(eqx.nn.Linear):
        scale: jax.Array

        def __init__(self, size, *, key):
            super().__init__(size, size, key=key)
            self.scale = jnp.ones(size)

    key = jax.random.key(0)
    normed = eqx.tree_at(lambda x: x.bias, eqx.nn.Linear(64, 64, key=key), eqx.nn.LayerNorm(64))
    mesh = rc.make_mesh(fsdp=8)
    for layer in (Scaled(64, key=key), normed):
        actual = rc.infer_shardings({"layer": layer}, mesh)
        assert not actual["layer"].weight.is_fully_replicated


def test_arrays_that_an_override_shards_over_data_are_not_said_to_be_replicated():
    plan = rc.plan_shardings(
        {"w": jnp.zeros((64, 64)), "v": jnp.zeros((64, 64))},
        rc.make_mesh(data=8),
        overrides=[("w", P("data"))],
    )
    assert "All arrays are replicated" not in plan.table()
    assert "Override" in plan.table()


def latent_attention(q_rank, kv_rank):
    """Layers of DeepSeek's attention, whose queries, keys and values are made of latent ones."""
    width, heads = 128, 8
    return {
        "q_down": array(2, width, q_rank),
        "wq": array(2, q_rank, heads, 32),
        "kv_down": array(2, width, kv_rank),
        "wk": array(2, kv_rank, heads, 16),
        "wv": array(2, kv_rank, heads, 16),
        "wo": array(2, heads, 16, width),
        "norm": array(2, width),
    }


@pytest.mark.parametrize("ranks", [(96, 64), (64, 64)])
def test_latents_are_whole_and_the_heads_that_are_made_of_them_split(ranks):
    actual = specs({"layers": latent_attention(*ranks)}, model=4)
    assert {actual[f"layers/{name}"] for name in ("wq", "wk", "wv")} == {P(None, None, "model")}
    assert actual["layers/wo"] == P(None, "model")


def test_a_window_is_not_the_size_between_two_matrices():
    """Four taps of a convolution over each channel, beside a projection to as many features."""
    tree = {"norm": array(4096), "taps": array(4, 4096), "steps": array(4096, 8)}
    actual = specs({"layers": [tree, tree]}, model=4)["layers/0/taps"]
    assert actual in (P(), P(None, "model"))


def test_the_output_of_an_attention_that_is_not_square_is_told_by_its_name():
    """Queries and keys are square, and neither of the two is the output."""
    sizes = {"wq": (64, 64), "wk": (64, 64), "wv": (64, 128), "wz": (64, 128), "wo": (128, 64)}
    layer = {name: array(*shape) for name, shape in sizes.items()} | {"norm": array(64)}
    actual = specs({"layers": [layer, layer]}, model=4)
    columns = {actual[f"layers/0/{name}"] for name in ("wq", "wk", "wv", "wz")}
    assert columns == {P(None, "model")}
    assert actual["layers/0/wo"] == P("model")


def test_stages_whose_widths_are_inner_sizes_of_other_stages_are_split_on_their_own():
    def block(width):
        inner = 4 * width
        return {
            "expand": array(width, inner),
            "scale": array(inner),
            "project": array(inner, width),
        }

    actual = specs({"stages": [[block(64), block(64)], [block(256)], [block(1024)]]}, model=4)
    for name in ("0/0", "0/1", "1/0", "2/0"):
        assert actual[f"stages/{name}/expand"] == P(None, "model")
        assert actual[f"stages/{name}/project"] == P("model")


@pytest.mark.parametrize("names", [("first", "second"), ("up", "down")])
def test_a_pair_in_a_dict_is_split_between_its_matrices_in_either_order(names):
    """JAX sorts the keys of a dict, so that their order is not that of the layers."""
    before, after = names
    actual = specs({before: array(96, 160), after: array(160, 200)}, model=4)
    assert actual == {before: P(None, "model"), after: P("model")}
