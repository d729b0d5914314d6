"""Counts of contractions, compared with formulas and with the compiler's own count."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.dryrun._flops import contractions
from redcoast.losses import cross_entropy
from redcoast.models import GPT2, GPT2Config, Llama, LlamaConfig
from redcoast.sharding.solver._figures import Arithmetic

BATCH, SEQ, VOCAB, WIDTH, LAYERS, HIDDEN, HEADS = 4, 32, 192, 64, 3, 176, 4
SIZES: dict[str, Any] = {
    "vocab": VOCAB,
    "width": WIDTH,
    "layers": LAYERS,
    "heads": HEADS,
    "hidden": HIDDEN,
}
TOKENS = BATCH * SEQ
# Operations of all layers forward: 2 * parameters * tokens, and scores and what they weigh.
ATTENTION = 2 * LAYERS * 2 * TOKENS * SEQ * WIDTH
HEAD = 2 * TOKENS * WIDTH * VOCAB
PROJECTIONS = LAYERS * 2 * TOKENS * 4 * WIDTH**2
FEED_FORWARD = LAYERS * 2 * TOKENS * WIDTH * HIDDEN  # of each matrix
MATRICES = {"gpt2": 2, "llama": 3}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def count(fn, *args):
    return contractions(jax.make_jaxpr(fn)(*args)).flops


def make(name, remat: Any = "none"):
    if name == "gpt2":
        return lambda key: GPT2(GPT2Config(**SIZES, positions=SEQ, remat=remat), key=key)
    return lambda key: Llama(LlamaConfig(**SIZES, kv_heads=HEADS, remat=remat), key=key)


def loss_fn(model, batch, key):
    return cross_entropy(model(batch, key=key), batch)


def count_step(name, *, remat="none", **options):
    optimizer = optax.adamw(1e-3)
    init = lambda key: rc.init_state(make(name, remat), optimizer, key=key)
    arrays, static = abstract(init)
    step = partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer, **options)
    run = lambda arrays, batch: eqx.filter(step(eqx.combine(arrays, static), batch), eqx.is_array)
    return count(run, arrays, array(BATCH, SEQ, dtype=jnp.int32))


def abstract(init):
    """The arrays of the result of `init(key)`, and everything else."""
    tree = eqx.filter_eval_shape(init, jax.random.key(0))
    return eqx.partition(tree, lambda x: isinstance(x, jax.ShapeDtypeStruct))


def forward(name):
    return ATTENTION + HEAD + PROJECTIONS + MATRICES[name] * FEED_FORWARD


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_forward(name):
    arrays, static = abstract(make(name))
    tokens = array(BATCH, SEQ, dtype=jnp.int32)
    actual = count(lambda arrays, tokens: eqx.combine(arrays, static)(tokens), arrays, tokens)
    assert actual == {"float32": pytest.approx(forward(name), rel=0.01)}


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.few("llama-none")
def test_training_steps(name, remat):
    # All layers are recomputed except their last product, which the backward pass does not need, or
    # only scores and what they weigh.
    again = {"none": 0, "full": forward(name) - HEAD - FEED_FORWARD, "dots": ATTENTION}[remat]
    actual = count_step(name, remat=remat)
    assert actual == {"float32": pytest.approx(3 * forward(name) + again, rel=0.01)}


@pytest.mark.thorough
def test_accumulation_does_not_change_the_count():
    assert count_step("gpt2", accumulate=2) == count_step("gpt2")


def test_dtypes_are_those_of_the_operands():
    (dtype, flops), *rest = count_step("gpt2", compute_dtype=jnp.bfloat16).items()
    assert (dtype, rest) == ("bfloat16", [])
    assert flops == pytest.approx(3 * forward("gpt2"), rel=0.01)
    assert count(jnp.dot, array(2, 3, dtype=jnp.complex64), array(3, dtype=jnp.complex64)) == {
        "complex64": 8 * 2 * 3
    }
    wide = lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.float32)
    half = array(8, 8, dtype=jnp.bfloat16)
    assert count(wide, half, half) == {"bfloat16": 2 * 8**3}


def test_a_mixture_of_experts():
    """All experts for all tokens, weighted, and the gate that weighs them."""

    def mix(x, gate, up, down):
        scores = jax.nn.softmax(x @ gate)
        hidden = jax.nn.relu(jnp.einsum("td,edh->eth", x, up))
        return jnp.einsum("te,eth,ehd->td", scores, hidden, down)

    tokens, width, hidden, experts = 24, 16, 40, 4
    shapes = (tokens, width), (width, experts), (experts, width, hidden), (experts, hidden, width)
    expected = 2 * tokens * width * (experts + 2 * experts * hidden)
    assert count(mix, *(array(*s) for s in shapes))["float32"] == pytest.approx(expected, rel=0.05)


def of_compiler(fn, *args):
    """The compiler's own count, which has elementwise operations as well."""
    actual: Any = jax.jit(fn).lower(*args).cost_analysis()
    return actual["flops"]


def convolve(x, kernel, *, stride=1, groups=1, padding="VALID", dilation=1):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"groups": 4}, {"groups": 16}, {"dilation": 2}]
)
def test_convolutions(options):
    x, kernel = array(2, 17, 17, 16), array(3, 3, 16 // options.get("groups", 1), 32)
    fn = partial(convolve, **options)
    assert count(fn, x, kernel)["float32"] == of_compiler(fn, x, kernel)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 4])
def test_gradients_of_convolutions_take_twice_as_much(groups, stride):
    x, kernel = array(2, 32, 32, 16), array(3, 3, 16 // groups, 32)
    fn = partial(convolve, stride=stride, groups=groups, padding="SAME")
    loss = lambda x, kernel: jnp.sum(jnp.square(fn(x, kernel)))
    once = count(fn, x, kernel)["float32"]
    assert once == 2 * (2 * (32 // stride) ** 2 * 32) * (9 * 16 // groups)
    actual = count(jax.grad(loss, argnums=(0, 1)), x, kernel)["float32"]
    assert actual == pytest.approx(3 * once, rel=0.01)


def test_a_convolutional_network():
    """Strided, plain and depthwise convolutions, and a head: forward and backward."""

    def net(params, x):
        x = jax.nn.relu(convolve(x, params["stem"], stride=2, padding="SAME"))
        x = jax.nn.relu(convolve(x, params["depth"], groups=32, padding="SAME"))
        x = jax.nn.relu(convolve(x, params["point"]))
        return jnp.sum(jnp.square(jnp.mean(x, axis=(1, 2)) @ params["head"]))

    params = {
        "stem": array(3, 3, 3, 32),
        "depth": array(3, 3, 1, 32),
        "point": array(1, 1, 32, 64),
        "head": array(64, 10),
    }
    pixels = 8 * 16 * 16
    stem = 2 * pixels * 32 * 27
    rest = 2 * pixels * (32 * 9 + 32 * 64) + 2 * 8 * 64 * 10
    # Of the stem there is no gradient for the pictures.
    actual = count(jax.grad(net), params, array(8, 32, 32, 3))
    assert actual["float32"] == pytest.approx(2 * stem + 3 * rest, rel=0.01)


SQUARE = array(8, 8)
ONE = 2 * 8**3


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (lambda x: jax.lax.fori_loop(0, 5, lambda i, x: x @ x, x), 5),
        (lambda x: jax.lax.fori_loop(2, jnp.asarray(7), lambda i, x: x @ x, x), 5),
        (lambda x: jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: x @ x, x))(x, 6), 6),
        (lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=4)[0], 4),
        (lambda x: jax.lax.map(lambda x: x @ x, jnp.stack([x, x, x])), 3),
    ],
    ids=["fori", "fori_while", "bound_of_a_call", "scan", "map"],
)
def test_loops_count_as_often_as_they_run(loop, trips):
    assert count(loop, SQUARE) == {"float32": trips * ONE}


@pytest.mark.parametrize(
    ("start", "step", "test"),
    [
        (0, 1, lambda i: i < 9),
        (12, -2, lambda i: i > 0),
        (1, 3, lambda i: i <= 12),
        (10, -3, lambda i: jnp.less_equal(1, i)),
        (3, 4, lambda i: i != 23),
        (5, 1, lambda i: i < 5),
        (0, 1, lambda i: jnp.greater(7, i + 2)),
    ],
)
def test_while_loops_with_a_counter(start, step, test):
    trips = len(list(_counted(start, step, test)))
    loop = lambda x: jax.lax.while_loop(
        lambda c: test(c[0]), lambda c: (c[0] + step, c[1] @ c[1]), (start, x)
    )
    assert count(loop, SQUARE).get("float32", 0) == trips * ONE
    assert contractions(jax.make_jaxpr(loop)(SQUARE)).open_loops == 0


def _counted(i, step, test):
    while test(i):
        yield i
        i += step


def test_trip_count_of_an_inner_loop_from_the_outer_carry():
    def outer(carry, _):
        n, x = carry
        return (n, jax.lax.fori_loop(0, n, lambda i, x: x @ x, x)), None

    actual = count(lambda x: jax.lax.scan(outer, (jnp.asarray(3), x), length=2)[0][1], SQUARE)
    assert actual == {"float32": 6 * ONE}


def test_data_dependent_loops_count_once_and_are_reported():
    loop = lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ x, x)
    actual = contractions(jax.make_jaxpr(lambda x: loop(x) @ x)(SQUARE))
    assert (actual.flops, actual.open_loops) == ({"float32": 2 * ONE}, 1)
    changing = lambda x: jax.lax.while_loop(
        lambda c: c[0] < 100, lambda c: (c[0] * 2, c[1] @ c[1]), (1, x)
    )
    assert contractions(jax.make_jaxpr(changing)(SQUARE)).open_loops == 1
    empty = lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x + 1, x)
    assert contractions(jax.make_jaxpr(empty)(SQUARE)).open_loops == 0


def test_the_most_expensive_branch_counts():
    branches = [lambda x: x, lambda x: x @ x @ x, lambda x: x @ x]
    actual = count(lambda i, x: jax.lax.switch(i, branches, x), array(dtype=jnp.int32), SQUARE)
    assert actual == {"float32": 2 * ONE}


def test_unused_results_do_not_count():
    assert count(lambda x: (x @ x, x + 1)[1], SQUARE) == {}


def test_vmap_and_custom_derivatives():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))
    assert count(square, SQUARE) == {"float32": ONE}
    loss = lambda x: jnp.sum(jax.vmap(square)(x))
    assert count(jax.value_and_grad(loss), array(5, 8, 8)) == {"float32": 5 * 3 * ONE}
    smooth = jax.custom_jvp(lambda x: x @ x)
    smooth.defjvp(lambda primals, tangents: (smooth(*primals), tangents[0] @ primals[0]))
    assert count(jax.remat(smooth), SQUARE) == {"float32": ONE}


def test_solvers_count_their_contractions():
    solve = lambda a, b: jax.lax.custom_linear_solve(
        lambda x: a @ x, b, lambda matvec, b: matvec(matvec(b)), symmetric=True
    )
    assert count(solve, SQUARE, array(8)) == {"float32": 2 * 2 * 8**2}


@pytest.mark.parametrize("axes", [{"model"}, {"data", "model"}])
def test_shard_map_counts_every_device(axes):
    mesh = rc.make_mesh(data=2, model=4)
    spec = P(tuple(sorted(axes)))
    fn = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(spec, P()), out_specs=spec, axis_names=axes
    )
    actual = count(jax.jit(fn), array(64, 8), SQUARE)
    assert actual == {"float32": 2 * 64 * 8 * 8}


def test_replicated_work_counts_once():
    mesh = rc.make_mesh(data=2, model=4)
    fn = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    assert count(fn, array(64, 8), SQUARE) == {"float32": 2 * 64 * 8 * 8}


def test_constraints_do_not_change_the_count():
    """Also for grouped convolutions, all of which each device computes."""

    def loss(params, x, key):
        x = convolve(x, params["depth"], groups=16, padding="SAME")
        return jnp.mean(jnp.square(convolve(x, params["point"])))

    params = {"depth": array(3, 3, 1, 16), "point": array(1, 1, 16, 32)}
    args = (array(8, 16, 16, 16), None)
    plan = rc.plan_shardings(params, rc.make_mesh(data=2, model=4), fn=loss, args=args)
    expected = count(jax.grad(loss), params, *args)
    assert count(jax.grad(plan.constrain(loss)), params, *args) == expected


def test_kernels_count_for_each_point_of_their_grid():
    from jax.experimental import pallas as pl

    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    rows = pl.BlockSpec((16, 8), lambda i: (i, 0))
    fn = pl.pallas_call(
        kernel,
        grid=(4,),
        in_specs=[rows, pl.BlockSpec((8, 8), lambda i: (0, 0))],
        out_specs=rows,
        out_shape=array(64, 8),
    )
    assert count(fn, array(64, 8), SQUARE) == {"float32": 2 * 64 * 8 * 8}


def test_ragged_products_count_each_row_once():
    """The count is the same for the forward pass and for both gradients."""
    groups = jnp.array([5, 3, 4])
    loss = lambda x, w: jnp.sum(jnp.square(jax.lax.ragged_dot(x, w, groups)))
    actual = count(jax.value_and_grad(loss, argnums=(0, 1)), array(12, 8), array(3, 8, 16))
    assert actual == {"float32": 3 * 2 * 12 * 8 * 16}


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"data": 8}, 8),
        ({"fsdp": 8}, 8),
        ({"data": 2, "model": 4}, 8),
    ],
)
def test_a_plan_reports_the_arithmetic_of_each_device(sizes, parts):
    model = {"up": array(64, 256), "down": array(256, 64)}
    loss = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
    mesh = rc.make_mesh(**sizes)
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(array(32, 64), None))
    # Three passes of two products, less the gradient for the batch.
    flops = 2 * 32 * 64 * 256 * 5
    assert plan.report.program.arithmetic == Arithmetic(flops, flops / parts)


def test_replicated_arithmetic_is_done_by_every_device():
    """A batch of 30 does not divide over `data`; nor 9 columns over `model`."""
    loss = lambda w, x, key: jnp.sum(x @ w)
    mesh = rc.make_mesh(data=4, model=2)
    plan = rc.plan_shardings(array(7, 9), mesh, fn=loss, args=(array(30, 7), None))
    flops = 2 * 30 * 7 * 9 * 2
    assert plan.report.program.arithmetic == Arithmetic(flops, flops)
