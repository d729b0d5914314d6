"""Collectives read from compiled HLO, for programs whose communication is known.

Programs for CPU are compiled here, on a mesh of data=2, fsdp=2, model=2. `test_hlo_stored.py` has
those of compilers for GPU and TPU, `test_hlo_text.py` has hand-written ones.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes

AXES = ("data", "fsdp", "model")


def cube():
    return rc.make_mesh(data=2, fsdp=2, model=2)


def shape(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(cube(), P(*spec)))


def compiled(fn, *args):
    return collectives(jax.jit(fn).lower(*args).compile().as_text(), cube())


def manual(fn, *more):
    """The collectives of a function of f32[8,32] on each device: 1024 bytes."""
    spec = P(AXES)
    over = partial(jax.shard_map, mesh=cube(), out_specs=spec, check_vma=False)
    args = (shape((64, 32), AXES), *more)
    return compiled(over(fn, in_specs=(spec, *(P() for _ in more))), *args)


def brief(found):
    return [(each.kind, each.axes, each.count, each.operand_bytes) for each in found]


@pytest.mark.parametrize(
    "axes", [("data",), ("fsdp",), ("model",), ("data", "model"), ("fsdp", "model"), AXES]
)
def test_a_sum_over_each_set_of_axes(axes):
    (found,) = manual(lambda x: jax.lax.psum(x, axes))
    n = 2 ** len(axes)
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", axes, n)
    assert (found.count, found.operand_bytes) == (1, 1024)
    assert found.sent_bytes == 2 * 1024 * (n - 1) // n
    assert found.exact
    assert found.source == "jit(<lambda>)/shard_map/psum"


gather = lambda x: jax.lax.all_gather(x, ("fsdp", "model"), tiled=True)
scatter = lambda x: jax.lax.psum_scatter(x, ("fsdp", "model"), tiled=True)
exchange = lambda x: jax.lax.all_to_all(x, ("fsdp", "model"), 0, 1, tiled=True)
shift = lambda x: jax.lax.ppermute(x, ("fsdp", "model"), [(i, (i + 1) % 4) for i in range(4)])


@pytest.mark.parametrize(
    ("fn", "kind", "sent"),
    [
        (gather, "all-gather", 3 * 1024),
        (scatter, "reduce-scatter", 768),
        (exchange, "all-to-all", 768),
        (shift, "collective-permute", 1024),
    ],
)
def test_bytes_of_each_kind_of_collective(fn, kind, sent):
    (found,) = manual(fn)
    assert brief([found]) == [(kind, ("fsdp", "model"), 1, 1024)]
    assert (found.group_size, found.sent_bytes) == (4, sent)


def test_several_arrays_in_one_collective():
    both = lambda x: jax.lax.psum((x, x[0, :4]), "model")
    (found,) = manual(lambda x: jnp.outer(both(x)[0].sum(1), both(x)[1]))
    assert brief([found]) == [("all-reduce", ("model",), 1, 1024 + 16)]


def test_groups_that_are_not_a_product_of_axes():
    over = jax.shard_map(
        lambda x: jax.lax.psum(x, "x", axis_index_groups=[[0, 3], [1, 2], [4, 7], [5, 6]]),
        mesh=Mesh(jax.devices(), "x", axis_types=(AxisType.Auto,)),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    (found,) = compiled(over, jax.ShapeDtypeStruct((64, 32), jnp.float32))
    # 0 and 3 differ in fsdp and in model, and still only two devices exchange data.
    assert (found.axes, found.group_size) == (("fsdp", "model"), 2)


def looped(x):
    inner = lambda c, _: (jnp.tanh(jax.lax.psum(c, "model")), None)
    outer = lambda c, _: (jnp.sin(jax.lax.psum(jax.lax.scan(inner, c, length=3)[0], "data")), None)
    return jax.lax.scan(outer, x, length=5)[0]


def test_scans_multiply():
    assert brief(manual(looped)) == [
        ("all-reduce", ("model",), 15, 1024),
        ("all-reduce", ("data",), 5, 1024),
    ]
    assert sent_bytes(manual(looped)) == 20 * 1024


def test_a_loop_over_a_range():
    body = lambda i, c: jnp.tanh(jax.lax.psum(c, "fsdp")) + i.astype(jnp.float32)
    (found,) = manual(lambda x: jax.lax.fori_loop(2, 9, body, x))
    assert (found.count, found.exact) == (7, True)


def test_data_dependent_loops_count_once_and_are_marked():
    body = lambda c: jnp.tanh(jax.lax.psum(c, "model"))
    (found,) = manual(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, body, x))
    assert (found.count, found.exact) == (1, False)
    (found,) = manual(
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, c: body(c), x), shape((), dtype=jnp.int32)
    )
    assert (found.count, found.exact) == (1, False)


def test_a_condition_runs_once_more_than_its_body():
    going_on = lambda c: jax.lax.psum(c.sum(), "model") < 9
    (found,) = manual(lambda x: jax.lax.while_loop(going_on, lambda c: c * 2, x))
    assert (found.count, found.operand_bytes, found.exact) == (2, 4, False)


def test_the_branch_with_the_most_communication_counts():
    once = lambda x: jax.lax.psum(x, "model")
    twice = lambda x: jax.lax.psum(jnp.sin(jax.lax.psum(x, "fsdp")), "data")
    found = manual(
        lambda x, i: jax.lax.switch(i, [once, twice, lambda x: x], x), shape((), dtype=jnp.int32)
    )
    assert [each.axes for each in found] == [("fsdp",), ("data",)]


def feed_forward(weights, x):
    up, down = weights
    return jnp.mean((jnp.tanh(x @ up) @ down) ** 2)


def megatron(fsdp=None):
    """16 of 64 rows and half of 512 hidden units on each device."""
    weights = (shape((256, 512), fsdp, "model"), shape((512, 256), "model", fsdp))
    return weights, shape((64, 256), ("data", "fsdp"))


def test_two_matrices_sharded_as_in_megatron():
    output = ("all-reduce", ("model",), 1, 16 * 256 * 4)
    assert brief(compiled(feed_forward, *megatron())) == [
        output,
        ("all-reduce", ("data", "fsdp"), 1, 4),
    ]
    gradients = compiled(jax.grad(feed_forward), *megatron())
    assert output in brief(gradients)
    rest = [each for each in gradients if each.axes != ("model",)]
    assert {each.axes for each in rest} == {("data", "fsdp")}
    # Of each of the two gradients a device holds half.
    assert sum(each.operand_bytes for each in rest) == 2 * 256 * 256 * 4


def test_fsdp_sharded_weights_are_gathered_in_each_layer():
    def loss(weights, x):
        whole = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(cube(), P()))
        step = lambda x, w: (x + jnp.tanh(x @ whole(w)), None)
        return jnp.mean(jax.lax.scan(step, x, weights)[0] ** 2)

    rows = shape((16, 512), ("data", "fsdp"))
    found = compiled(jax.grad(loss), shape((6, 512, 512), None, "fsdp"), rows)
    # Half a matrix is gathered, and kept for the gradient, of which the whole is summed.
    assert brief(found) == [
        ("all-gather", ("fsdp",), 6, 256 * 512 * 4),
        ("all-reduce", ("data", "fsdp"), 6, 512 * 512 * 4),
    ]


def test_data_parallelism_communicates_the_gradients_once():
    weights = [shape((48, 48)) for _ in range(3)]
    loss = lambda weights, x: jnp.mean(jnp.tanh(x @ weights[0] @ weights[1]) @ weights[2])
    found = compiled(jax.grad(loss), weights, shape((64, 48), AXES))
    assert {(each.kind, each.axes) for each in found} == {("all-reduce", AXES)}
    assert sum(each.operand_bytes for each in found) == 3 * 48 * 48 * 4
    assert sent_bytes(found) == 3 * 48 * 48 * 4 * 2 * 7 // 8


def test_programs_without_communication():
    assert compiled(lambda x: x * 2, shape((64, 32), AXES)) == []
    assert compiled(lambda x: x.sum(), jax.ShapeDtypeStruct((64, 32), jnp.float32)) == []


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (P(("model", "data")), [("data", "model")]),
        (P(("fsdp", "data"), "model"), [("model",), ("data", "fsdp")]),
        (P("model", ("data", "fsdp")), [("data", "fsdp"), ("model",)]),
    ],
)
def test_gathering_over_axes_in_another_order(spec, axes):
    """The compiler writes these groups with the order of the devices."""
    whole = NamedSharding(cube(), P())
    found = compiled(
        lambda x: jax.lax.with_sharding_constraint(x * 2, whole), shape((64, 32), *spec)
    )
    assert sorted(each.axes for each in found) == sorted(axes)


def test_names_in_the_program_are_ignored():
    def tricky(x):
        with jax.named_scope('calls=%x, replica_groups={{7,9}} chain_id="1" (('):
            return jax.lax.psum(x, "model")

    assert brief(manual(tricky)) == [("all-reduce", ("model",), 1, 1024)]
