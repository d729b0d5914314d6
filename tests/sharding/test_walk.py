"""Dimensions followed through calls, loops, branches and derivatives."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flow_helpers import Followed, costs, integers, keys, links, unknown
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from sharding_helpers import real_mesh

ZERO = jnp.int32(0)


sine = jax.custom_jvp(jnp.sin)
sine.defjvp(lambda x, t: (sine(x[0]), jnp.cos(x[0]) * t[0]))
product = jax.custom_vjp(jnp.dot)
product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


def doubled_in_place(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


def by_device(x):
    mesh = real_mesh(2, 2, 2)
    double = lambda x: x * 2
    return jax.shard_map(double, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
powers = lambda c, w: (jnp.tanh(c @ w), c)


def equinox_loop(kind):
    body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[2]), c[2])
    loop = eqx.internal.while_loop
    return lambda x, w: loop(lambda c: c[0] < 3, body, (ZERO, x, w), kind=kind, max_steps=4)[1]


def inner_step(w, x):
    """One step of gradient descent for each task, and the loss behind it (MAML)."""
    return jax.vmap(lambda x: loss(w - jax.grad(loss)(w, x), x))(x)


LINKS = {
    "jit": (jax.jit(jnp.dot), [(4, 6), (6, 8)], "ab,bc->ac"),
    "filter_jit": (eqx.filter_jit(jnp.dot), [(4, 6), (6, 8)], "ab,bc->ac"),
    "remat": (jax.checkpoint(jnp.dot), [(4, 6), (6, 8)], "ab,bc->ac"),
    "custom_jvp": (sine, [(4, 6)], "ab->ab"),
    "custom_vjp": (product, [(4, 6), (6, 8)], "ab,bc->ac"),
    "closed over": (lambda x: x @ jnp.ones((6, 8)), [(4, 6)], "ab->ac"),
    "scanned layers": (
        lambda x, w: lax.scan(powers, x, w),
        [(4, 6), (2, 6, 6)],
        "ab,#bb->ab,#ab",
    ),
    "scanned inputs": (
        lambda x, w: lax.scan(lambda c, x: (c, x @ w), 0.0, x)[1],
        [(2, 4, 6), (6, 8)],
        "#ab,bc->#ac",
    ),
    "constants of a scan": (
        lambda x, w: lax.scan(lambda c, _: powers(c, w), x, None, length=2)[0],
        [(4, 6), (6, 6)],
        "ab,bb->ab",
    ),
    "carry that starts fresh": (
        lambda x: lax.scan(lambda c, x: (c + x, c), jnp.zeros((4,)), x, reverse=True),
        [(2, 4)],
        "#a->a,#a",
    ),
    "carries that trade places": (
        lambda x, y: lax.scan(lambda c, _: ((c[1], c[0]), None), (x, y), None, length=3)[0],
        [(4, 6), (4, 6)],
        "ab,ab->ab,ab",
    ),
    "scan in a scan": (
        lambda x, w: lax.scan(lambda c, w: (lax.scan(powers, c, w)[0], None), x, w)[0],
        [(4, 6), (2, 2, 6, 6)],
        "ab,##bb->ab",
    ),
    "while": (
        lambda x, w: lax.while_loop(lambda c: jnp.max(c) < 9, lambda c: c @ w, x),
        [(4, 6), (6, 6)],
        "ab,bb->ab",
    ),
    "fori_loop": (
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: c @ w, x),
        [(4, 6), (6, 6)],
        "ab,bb->ab",
    ),
    "equinox bounded": (equinox_loop("bounded"), [(4, 6), (6, 6)], "ab,bb->ab"),
    "equinox checkpointed": (equinox_loop("checkpointed"), [(4, 6), (6, 6)], "ab,bb->ab"),
    "map": (lambda x, w: lax.map(lambda x: x @ w, x), [(2, 4, 6), (6, 8)], "#ab,bc->#ac"),
    "cond": (
        lambda p, x, w: lax.cond(p > 0, lambda w: x @ w, lambda w: x @ (2 * w), w),
        [(), (4, 6), (6, 8)],
        ",ab,bc->ac",
    ),
    "one branch or the other": (
        lambda p, x, y: lax.cond(p > 0, lambda: x, lambda: y),
        [(), (4, 6), (4, 6)],
        ",ab,ab->ab",
    ),
    "switch": (
        lambda i, x, y: lax.switch(i, [lambda: jnp.zeros((4, 6)), lambda: x, lambda: x * y]),
        [integers(), (4, 6), (4, 6)],
        ",ab,ab->ab",
    ),
    "vmap": (jax.vmap(jnp.dot, in_axes=(0, None)), [(2, 4, 6), (6, 8)], "abc,cd->abd"),
    "vmap of layers": (jax.vmap(jnp.dot), [(2, 4, 6), (2, 6, 8)], "abc,acd->abd"),
    "vmap of cond": (
        jax.vmap(lambda x: lax.cond(x[0] > 0, lambda x: x, lambda x: 2 * x, x)),
        [(4, 6)],
        "ab->ab",
    ),
    "keys by row": (
        jax.vmap(lambda x, k: eqx.nn.Dropout()(x, key=k)),
        [(4, 6), keys(4)],
        "ab,a->ab",
    ),
    "gradient": (jax.grad(loss), [(6, 8), (4, 6)], "ab,ca->ab"),
    "gradients by row": (
        jax.vmap(jax.grad(loss), in_axes=(None, 0)),
        [(6, 8), (2, 4, 6)],
        "ab,cda->cab",
    ),
    "Hessian times vector": (
        lambda w, v, x: jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (v,))[1],
        [(6, 8), (6, 8), (4, 6)],
        "ab,ab,ca->ab",
    ),
    "inner step": (inner_step, [(6, 8), (2, 4, 6)], "ab,cda->c"),
    "linear solve": (
        lambda b: lax.custom_linear_solve(lambda v: 2 * v, b, lambda m, b: b / 2, symmetric=True),
        [(4, 6)],
        "ab->ab",
    ),
    "root": (
        lambda a: lax.custom_root(
            lambda z: 2 * z - a, jnp.zeros((4, 6)), lambda f, z: z - f(z) / 2, lambda g, y: y / 2
        ),
        [(4, 6)],
        "ab->ab",
    ),
    "print": (lambda x: (jax.debug.print("{}", x), x)[1], [(4, 6)], "ab->ab"),
    "references": (doubled_in_place, [(4, 6)], "ab->cd"),
    "by device": (by_device, [(4, 6)], "ab->cd"),
    "heads": (lambda x, w: (x @ w).reshape(2, 6, 4), [(2, 8), (8, 24)], "ab,bc->acd"),
}


@pytest.mark.parametrize("name", LINKS)
def test_dimensions_that_are_split_together(name):
    fn, shapes, expected = LINKS[name]
    assert links(fn, *shapes) == expected


OPAQUE = {
    "references": (doubled_in_place, {"new_ref": 1, "get": 2, "swap": 1}),
    "by device": (by_device, {"shard_map": 1}),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_what_is_opaque_is_said_and_gathered(name):
    fn, expected = OPAQUE[name]
    assert unknown(fn, (4, 6)) == expected
    assert {"gather a", "gather b"} <= costs(fn, (4, 6)).keys()


def repeated(step, length):
    return lambda x, w: lax.scan(lambda c, _: (step(c, w), None), x, None, length=length)[0]


def test_loops_count_every_iteration_and_sum_what_they_multiply_by_once():
    step = lambda x, w: jnp.tanh(x @ w)
    once = costs(step, (4, 6), (6, 6))
    assert once == {"sum b": 24, "back a": 36, "back c": 24}
    looped = lambda step, length: costs(repeated(step, length), (4, 6), (6, 6))
    assert looped(step, 5) == {"sum b": 5 * 24, "back a": 36, "back b": 5 * 24}
    # What is computed from the weight first is another weight at each iteration.
    assert looped(lambda x, w: x @ jnp.tanh(w), 5)["back a"] == 5 * 36
    nested = looped(repeated(step, 2), 3)
    assert nested["sum b"] == nested["back b"] == 6 * 24


def test_rematerialised_sums_run_twice_forward_and_once_backward():
    fn = lambda x, w: jnp.tanh(x @ w)
    plain = costs(fn, (4, 6), (6, 8))
    again = costs(jax.checkpoint(fn), (4, 6), (6, 8))
    assert again == plain | {"sum b": 2 * plain["sum b"]}


def added(x, w):
    """The product is added, which no derivative needs to know."""
    return x + jnp.tanh(x) @ w


def kept(fn, policy):
    return jax.checkpoint(lambda x, w: jnp.tanh(fn(x, w)), policy=policy)


TWICE = {
    "added": (added, 0),
    "added, and then a function of it": (lambda x, w: jnp.tanh(added(x, w)), 1),
    "in a call": (jax.jit(lambda x, w: jax.jit(added)(x, w)), 0),
    "a function in a call": (lambda x, w: jax.jit(lambda x: jnp.tanh(x) + x)(x @ w), 1),
    "without a gradient": (lambda x, w: x * lax.stop_gradient(x @ w), 1),
    "relu": (lambda x, w: jax.nn.relu(x @ w), 1),
    "branches": (lambda x, w: lax.cond(x[0, 0] > 0, added, lambda x, w: jnp.tanh(x @ w), x, w), 1),
    "carried": (lambda x, w: lax.scan(lambda c, _: (c + w, None), x @ w, length=3)[0], 0),
    "carried through a function": (
        lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c), None), x @ w, length=3)[0],
        1,
    ),
    "for a region inside": (lambda x, w: jax.checkpoint(jnp.tanh)(x @ w), 1),
    "in a region inside": (jax.checkpoint(lambda x, w: jnp.tanh(x @ w)), 0),
    "in both regions": (lambda x, w: jnp.tanh(jax.checkpoint(jnp.tanh)(jnp.tanh(x @ w))), 1),
}


@pytest.mark.few("relu", "carried")
@pytest.mark.parametrize("name", TWICE)
def test_only_what_derivatives_need_is_computed_again(name):
    """As often as a program that JAX differentiates multiplies, when it is compiled."""
    fn, again = TWICE[name]

    def loop(fn):
        return lambda x, w: lax.scan(lambda x, _: (fn(x, w), None), x, length=3)[0]

    def priced(fn):
        sums = Followed(loop(fn), (4, 4), (4, 4)).graph.partial_sums.values()
        return sum(
            partial_sum.times / 3
            for partial_sum in sums
            if not partial_sum.backward and len(partial_sum.value.nodes) == 2
        )

    def compiled(fn):
        # In a loop, where the compiler cannot find that it has been computed before.
        step = jax.value_and_grad(lambda x, w: jnp.sum(loop(fn)(x, w) ** 2), (0, 1))
        compiled = jax.jit(step).lower(*[jnp.ones((4, 4))] * 2).compile()
        return str(compiled.as_text()).count(" dot(")

    region = jax.checkpoint(fn)
    assert priced(region) - priced(fn) == compiled(region) - compiled(fn) == again


def test_what_a_policy_keeps_is_not_computed_again():
    policies = jax.checkpoint_policies
    named = lambda x, w: checkpoint_name(x @ w, "product")
    sums = lambda fn, policy: costs(kept(fn, policy), (4, 6), (6, 8))["sum b"] / 32
    assert sums(jnp.dot, policies.nothing_saveable) == 2
    assert sums(jnp.dot, policies.dots_saveable) == 1
    assert sums(jax.jit(jnp.dot), policies.dots_with_no_batch_dims_saveable) == 1
    assert sums(named, policies.save_only_these_names("product")) == 1
    assert sums(named, policies.save_only_these_names("sum")) == 2


def test_arithmetic_of_loops_is_counted_every_iteration():
    flops = lambda fn: sum(work.flops for work in Followed(fn, (4, 6), (6, 6)).graph.works)
    scanned = lambda x, w: lax.scan(lambda c, _: powers(c, w), x, None, length=5)[0]
    # Once forward and once for each of the two cotangents.
    assert flops(jnp.dot) == 3 * 2 * 4 * 6 * 6
    assert flops(scanned) == 5 * flops(jnp.dot)
