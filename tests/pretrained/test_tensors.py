"""Patterns between published tensors and arrays, against transpositions written out in NumPy."""

import itertools as it

import jax.numpy as jnp
import numpy as np
import pytest

from redcoast.pretrained._slices import insert, locate, reading_order
from redcoast.pretrained._tensors import Tensor, factor_sizes, tensor_names, tensor_shape

# The pattern, its fixed factors, the shape of the leaf behind its two layers, the shape of a
# tensor, and how the one comes out of the other.
CASES = {
    "as it is": ("width -> width", {}, (6,), (6,), lambda x: x),
    "turned": ("out into -> into out", {}, (3, 5), (5, 3), lambda x: x.T),
    "heads": (
        "(heads head_dim) width -> width heads head_dim",
        {"heads": 4},
        (6, 4, 2),
        (8, 6),
        lambda x: x.reshape(4, 2, 6).transpose(2, 0, 1),
    ),
    "from heads": (
        "width (heads head_dim) -> heads head_dim width",
        {},
        (4, 2, 6),
        (6, 8),
        lambda x: x.T.reshape(4, 2, 6),
    ),
    "a third, slowest": (
        "width (qkv heads head_dim) -> width heads head_dim",
        {"qkv": (1, 3)},
        (6, 4, 2),
        (6, 24),
        lambda x: x[:, 8:16].reshape(6, 4, 2),
    ),
    "a third, inside of heads": (
        "(heads qkv head_dim) width -> width heads head_dim",
        {"qkv": (2, 3)},
        (6, 4, 2),
        (24, 6),
        lambda x: x.reshape(4, 3, 2, 6)[:, 2].transpose(2, 0, 1),
    ),
    "some of the heads": (
        "(heads head_dim) width -> width heads head_dim",
        {"heads": (3, 8)},
        (6, 4, 2),
        (16, 6),
        lambda x: x.reshape(8, 2, 6)[3:7].transpose(2, 0, 1),
    ),
    "pairs": (
        "(heads half 2) width -> width heads (2 half)",
        {},
        (3, 2, 6),
        (12, 3),
        lambda x: (
            np.concatenate([x[0::2], x[1::2]])
            .reshape(2, 2, 3, 3)
            .transpose(3, 1, 0, 2)
            .reshape(3, 2, 6)
        ),
    ),
    "ones": ("1 rows 1 width -> rows width", {}, (3, 5), (1, 3, 1, 5), lambda x: x[0, :, 0]),
    "a new one": ("width -> 1 width", {}, (1, 5), (5,), lambda x: x[None]),
    "merged": ("a b -> (a b)", {"b": 4}, (12,), (3, 4), lambda x: x.reshape(12)),
    "a number": ("-> ", {}, (), (), lambda x: x),
    "a kernel": (
        "width channels rows columns -> channels rows columns width",
        {},
        (3, 2, 4, 6),
        (6, 3, 2, 4),
        lambda x: x.transpose(1, 2, 3, 0),
    ),
}


def make(case):
    """The tensor's description, the published tensors, and the leaf made of them."""
    pattern, fixed, _, shape, fn = CASES[case]
    rng = np.random.default_rng(0)
    published = {f"layers.{i}.w": rng.normal(size=shape) for i in range(2)}
    leaf = np.stack([fn(x) for x in published.values()])
    return Tensor("layers.{layer}.w", pattern, **fixed), published, leaf


def boxes(shape):
    """All, and some parts: every slice of each dimension, the others whole or in part."""
    yield tuple(slice(0, n) for n in shape)
    for d, n in enumerate(shape):
        for start, stop in it.combinations(range(n + 1), 2):
            for others in (0, 1):
                whole = [slice(min(others, m - 1), m) for m in shape]
                yield (*whole[:d], slice(start, stop), *whole[d + 1 :])


@pytest.mark.parametrize("case", CASES)
def test_any_part_of_an_array_is_read_from_its_tensors(case):
    tensor, published, leaf = make(case)
    assert leaf.shape[1:] == CASES[case][2]
    for box in boxes(leaf.shape):
        window = locate(tensor, leaf.shape, box)
        read = np.stack([published[name][window.slices] for name in window.names])
        np.testing.assert_array_equal(window.place(read), leaf[box])


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes(case):
    tensor, published, leaf = make(case)
    assert tensor_names(tensor, leaf.shape) == {(0,): "layers.0.w", (1,): "layers.1.w"}
    assert tensor_shape(tensor, leaf.shape) == published["layers.0.w"].shape


def test_each_field_of_a_name_is_a_leading_dimension():
    tensor = Tensor("l.{layer}.e.{expert}.w", "out into -> into out")
    names = tensor_names(tensor, (2, 3, 5, 7))
    assert names[1, 2] == "l.1.e.2.w"
    assert list(names) == list(it.product(range(2), range(3)))
    later = Tensor("l.{layer+1}.w", "out into -> into out")
    assert list(tensor_names(later, (2, 5, 7)).values()) == ["l.1.w", "l.2.w"]
    window = locate(tensor, (2, 3, 5, 7), (slice(1, 2), slice(0, 2), slice(None), slice(None)))
    assert window.names == ("l.1.e.0.w", "l.1.e.1.w")
    assert window.place(np.zeros((2, 7, 5))).shape == (1, 2, 5, 7)


@pytest.mark.parametrize(
    ("case", "box", "slices"),
    [
        ("heads", np.s_[0:1, 2:5, 1:3, 0:2], np.s_[2:6, 2:5]),  # just the rows of two heads
        ("a third, slowest", np.s_[0:1, 0:6, 1:3, 0:2], np.s_[0:6, 10:14]),
        ("a third, slowest", np.s_[0:1, 0:6, 2:3, 1:2], np.s_[0:6, 13:14]),
        ("heads", np.s_[0:1, 0:6, 1:3, 1:2], np.s_[2:6, 0:6]),  # minor factors are cut afterwards
        ("pairs", np.s_[0:1, 0:3, 1:2, 0:3], np.s_[6:12, 0:3]),
    ],
)
def test_no_more_is_read_than_a_slice_must(case, box, slices):
    tensor, _, leaf = make(case)
    assert locate(tensor, leaf.shape, box).slices == slices


def test_accelerators_bring_parts_into_place_as_numpy_does():
    tensor, published, leaf = make("heads")
    window = locate(tensor, leaf.shape, np.s_[0:2, 0:6, 1:3, 1:2])
    read = np.stack([published[name][window.slices] for name in window.names])
    assert hash(window.place) == hash(locate(tensor, leaf.shape, np.s_[:, :, 1:3, 1:2]).place)
    placed = window.place(jnp.asarray(read, jnp.float32))
    np.testing.assert_array_equal(placed, leaf[:, :, 1:3, 1:2].astype(np.float32))


@pytest.mark.parametrize("case", CASES)
def test_an_array_goes_back_into_its_tensors(case):
    tensor, published, leaf = make(case)
    for part, whole in zip(leaf, published.values(), strict=True):
        out = np.full(whole.shape, np.nan)
        insert(tensor, np.asarray(part), out)
        filled = ~np.isnan(out)
        np.testing.assert_array_equal(out[filled], whole[filled])
        assert filled.sum() == part.size


def test_a_fused_tensor_is_put_together_from_all_arrays_that_name_it():
    whole = np.arange(6 * 24.0).reshape(6, 24)
    out = np.full_like(whole, np.nan)
    for i in range(3):
        pattern = "width (qkv heads head_dim) -> width heads head_dim"
        part = whole[:, 8 * i : 8 * i + 8].reshape(6, 4, 2)
        insert(Tensor("c_attn", pattern, qkv=(i, 3)), part, out)
    np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize(
    ("case", "order"),
    [("heads", (0, 2, 3, 1)), ("turned", (0, 2, 1)), ("from heads", (0, 3, 1, 2))],
)
def test_order_in_which_files_store_an_array(case, order):
    assert reading_order(make(case)[0]) == order


@pytest.mark.parametrize(
    ("pattern", "fixed", "words"),
    [
        ("a b", {}, "exactly one `->`"),
        ("a -> b -> c", {}, "exactly one `->`"),
        ("(a b -> a b", {}, r"'\(' where a factor"),
        ("((a b) c) -> a b c", {}, r"'\(' where a factor"),
        ("a-b -> a", {}, "'-' where a factor"),
        ("() a -> a", {}, "where a factor"),
        ("a a -> a", {}, "`a` more than once"),
        ("2 a 2 -> a 2 2", {}, "`2` more than once"),
        ("0 a -> a 0", {}, "neither a name nor a size"),
        ("3x -> 3x", {}, "neither a name nor a size"),
        ("a b -> a", {}, "`b` on one side only"),
        ("a 2 -> a", {}, "`2` on one side only"),
        ("a -> a b", {"b": (0, 3)}, "`b` on one side only"),
        ("a -> a", {"b": 3}, "has no `b`"),
        ("a b -> a", {"b": (3, 3)}, "fixes b at 3 of 3"),
        ("a b c -> (a b c)", {"c": 2}, "size of `a`"),
    ],
)
def test_patterns_that_make_no_sense(pattern, fixed, words):
    with pytest.raises(ValueError, match=words):
        Tensor("the.name", pattern, **fixed)


@pytest.mark.parametrize("name", ["layers.{}.w", "{layer}.{layer}", "{0}.w", "{layer+x}.w"])
def test_names_that_make_no_sense(name):
    with pytest.raises(ValueError, match="must be distinct names"):
        Tensor(name, "a -> a")


@pytest.mark.parametrize(
    ("pattern", "fixed", "shape", "words"),
    [
        ("a b -> b a", {}, (2, 3, 4), "has 2 dimensions, but the array"),
        ("a b -> (a b)", {"b": 5}, (12,), "product cannot be 12"),
        ("(a b) -> a b", {"b": 5}, (3, 4), "product cannot be 4"),
        ("a -> a", {"a": (2, 4)}, (3,), r"has 4 of a, of which .* would hold 2 to 5"),
    ],
)
def test_arrays_that_do_not_fit_a_pattern(pattern, fixed, shape, words):
    with pytest.raises(ValueError, match=words):
        factor_sizes(Tensor("the.name", pattern, **fixed), shape)
