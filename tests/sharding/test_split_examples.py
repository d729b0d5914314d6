"""Batches with fewer rows than devices are split along dimensions of their examples."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.distributed._arrays import place_batch
from redcoast.dryrun.hlo import collectives

TIGHT = rc.Hardware(memory=1e5)
ENOUGH = rc.Hardware(memory=1e12)
MESHES = [(8, 1, 1), (2, 1, 4), (2, 2, 2), (1, 8, 1)]


def mesh_of(sizes):
    return rc.make_mesh(**dict(zip(("data", "fsdp", "model"), sizes, strict=True)))


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def plan_of(loss, params, batch, mesh, hardware=TIGHT):
    return rc.plan_shardings(params, mesh, fn=loss, args=(batch, None), hardware=hardware)


def convolve(x, kernel, **options):
    """`x` is (rows, channels, height, width)."""
    settings = {"window_strides": (1, 1), "padding": "SAME"} | options
    return jax.lax.conv_general_dilated(x, kernel, **settings)


def pooled(x):
    window = (1, 1, 2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


UNET = {
    "into": normal(8, 2, 3, 3) / 4,
    "down": normal(8, 8, 3, 3) / 8,
    "grouped": normal(8, 2, 3, 3) / 4,
    "depthwise": normal(8, 1, 3, 3) / 3,
    "up": normal(8, 8, 3, 3) / 8,
    "out": normal(2, 8, 3, 3) / 8,
}


def unet(params, batch, key):
    """Strides, groups, pooling, interpolation, an overlapping transposed convolution and skips."""
    fine = jnp.tanh(convolve(batch, params["into"]))
    coarse = jnp.tanh(convolve(fine, params["down"], window_strides=(2, 2), padding=[(1, 1)] * 2))
    h = jnp.tanh(convolve(coarse, params["grouped"], feature_group_count=4))
    h = jnp.tanh(convolve(pooled(h), params["depthwise"], feature_group_count=8))
    h = jax.image.resize(h, coarse.shape, "bilinear") + coarse
    h = convolve(h, params["up"], lhs_dilation=(2, 2), padding=[(1, 2)] * 2)
    return jnp.mean((convolve(jnp.tanh(h) + fine, params["out"]) - batch) ** 2)


def pair(params, batch, key):
    """A triangle update and attention along the rows of a pair matrix, rematerialised."""

    @jax.checkpoint
    def block(w, z):
        z = z + jnp.einsum("bikc,bjkc->bijc", jnp.tanh(z @ w), z) / 4
        scores = jnp.einsum("bijc,bikc->bijk", z @ w, z)
        return z + jnp.einsum("bijk,bikc->bijc", jax.nn.softmax(scores), z)

    z = block(params["w"], batch)
    return jnp.mean((jnp.swapaxes(block(params["v"], z), 1, 2) - batch) ** 2)


PAIR = {"w": normal(8, 8) / 8, "v": normal(8, 8) / 9}


def spectral(params, batch, key):
    """Two layers of a Fourier neural operator."""
    h = jnp.einsum("bcxy,ck->bkxy", batch, params["lift"])
    for name in ("first", "second"):
        low = jnp.fft.rfft2(h)[:, :, :8, :4] * params[name][None].astype(jnp.complex64)
        spectrum = jnp.zeros((*h.shape[:3], h.shape[3] // 2 + 1), low.dtype)
        h = h + jnp.tanh(jnp.fft.irfft2(spectrum.at[:, :, :8, :4].set(low)))
    return jnp.mean(h**2)


SPECTRAL = {"lift": normal(2, 8), "first": normal(8, 8, 4), "second": normal(8, 8, 4) / 2}


def mixed(params, batch, key):
    """All frequencies of all channels are mixed, and the loss has a power spectrum."""
    h = jnp.einsum("bcxy,ck->bkxy", batch, params["lift"])
    spectrum = jnp.fft.fft2(h.astype(jnp.complex64))
    spectrum = jnp.einsum("bkxy,kl->blxy", spectrum, params["mix"].astype(jnp.complex64))
    h = jnp.tanh(jnp.fft.ifft2(spectrum).real)
    return jnp.mean(h**2) + jnp.mean(jnp.abs(jnp.fft.rfft(h, axis=2)) ** 2) / 100


MIXED = {"lift": normal(2, 8), "mix": normal(8, 8) / 4}
NODES, EDGES = 64, 256
SENT, RECEIVED = np.random.default_rng(1).integers(0, NODES, (2, EDGES))


def messages(params, batch, key):
    """Two rounds of messages between nodes, along edges that the loss closes over."""

    def rounds(x):
        for _ in range(2):
            sent = jnp.tanh(jnp.concatenate([x[SENT], x[RECEIVED]], -1) @ params["message"])
            x = x + jax.ops.segment_sum(sent, RECEIVED, NODES)
        return x

    return jnp.mean((jax.vmap(rounds)(batch) - batch[:, ::-1]) ** 2)


MESSAGES = {"message": normal(16, 8) / 8}
CASES: dict[str, Any] = {
    "unet": (unet, UNET, lambda rows: normal(rows, 2, 64, 24)),
    "uneven": (unet, UNET, lambda rows: normal(rows, 2, 72, 40)),
    "pair": (pair, PAIR, lambda rows: normal(rows, 16, 16, 8)),
    "spectral": (spectral, SPECTRAL, lambda rows: normal(rows, 2, 32, 16)),
    "mixed": (mixed, MIXED, lambda rows: normal(rows, 2, 32, 16)),
    "messages": (messages, MESSAGES, lambda rows: normal(rows, NODES, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.thorough
def test_loss_and_gradients_are_those_of_one_device(name, rows, sizes):
    loss, params, make = CASES[name]
    plan = plan_of(loss, params, make(rows), mesh_of(sizes), rc.Hardware(memory=1e4))
    assert max(plan.verify(loss, params, make(rows)).values()) < 1e-5


def compiled(loss, params, batch, mesh):
    """The compiled gradient of the constrained loss, and its plan."""
    plan = plan_of(loss, params, batch, mesh)
    lowered = jax.jit(jax.grad(plan.constrain(loss))).lower(params, batch, None)
    return plan, lowered.compile()


def planned_and_sent(loss, params, batch, mesh):
    """The plan of a loss, its bytes by their cause, and the collectives of the compiled program."""
    plan, program = compiled(loss, params, batch, mesh)
    priced = {traffic.cause: traffic.bytes for traffic in plan.report.program.traffic}
    return plan, priced, collectives(program.as_text(), mesh)


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.thorough
def test_a_field_is_split_along_its_height():
    mesh, batch = mesh_of((8, 1, 1)), normal(1, 2, 128, 32)
    plan, program = compiled(unet, UNET, batch, mesh)
    assert plan.compute.split == ((("data",), ((0, 2),)),)
    assert "A batch of 1 is split along dimension 2 (128) over data" in plan.report.program.batch
    assert "8-way domain parallel" in str(plan)
    alone = jax.jit(jax.grad(unet)).lower(UNET, batch, None).compile()
    assert temporaries(program) < temporaries(alone) / 4
    # Convolutions and interpolations exchange halos, and no activation is gathered.
    sent = collectives(program.as_text(), mesh)
    assert not any(x.kind == "all-gather" for x in sent)
    np.testing.assert_allclose(
        program(UNET, batch, None)["up"], alone(UNET, batch, None)["up"], atol=1e-6
    )


def test_halos_are_priced_as_they_are_sent():
    def loss(params, batch, key):
        h = jnp.tanh(convolve(batch, params["a"]))
        return jnp.mean(convolve(jnp.tanh(convolve(h, params["b"])), params["c"]) ** 2)

    params = {"a": normal(8, 2, 3, 3), "b": normal(8, 8, 5, 5), "c": normal(2, 8, 3, 3)}
    mesh = mesh_of((8, 1, 1))
    plan, program = compiled(loss, params, normal(1, 2, 64, 32), mesh)
    priced = {x.cause: x.bytes for x in plan.report.program.traffic}
    actual = collectives(program.as_text(), mesh)
    permuted = sum(x.sent_bytes for x in actual if x.kind == "collective-permute")
    assert priced["halos of convolutions and windows"] == pytest.approx(permuted, rel=0.25)


def penalised(energy):
    """The energy of a field, and the mean square of its gradient with respect to the field."""

    def loss(params, batch, key):
        value, slope = jax.value_and_grad(energy, argnums=1)(params, batch)
        return value + 10 * jnp.mean(slope**2)

    return loss


def curvature(energy):
    """The Hessian of an energy with respect to the field, times a vector."""

    def loss(params, batch, key):
        slope = lambda x: jax.grad(energy, argnums=1)(params, x)
        return jnp.mean(jax.jvp(slope, (batch,), (jnp.sin(batch),))[1] ** 2)

    return loss


def convolved(params, x):
    h = jnp.tanh(convolve(x, params["a"]))
    return jnp.sum(jnp.tanh(convolve(h, params["b"], window_strides=(2, 2))) ** 2)


def convolved_and_pooled(params, x):
    h = jnp.tanh(convolve(x, params["a"]))
    window, strides = (1, 1, 3, 3), (1, 1, 2, 2)
    h = jax.lax.reduce_window(h, -np.inf, jax.lax.max, window, strides, "SAME")
    return jnp.sum(jnp.tanh(h) ** 2) + jnp.mean(params["b"] ** 2)


@pytest.mark.thorough
@pytest.mark.few("penalised-convolved_and_pooled")
@pytest.mark.parametrize("energy", [convolved, convolved_and_pooled])
@pytest.mark.parametrize("of", [penalised, curvature])
def test_halos_of_second_derivatives_are_priced_as_they_are_sent(of, energy):
    loss, mesh = of(energy), mesh_of((8, 1, 1))
    params, batch = {"a": normal(8, 2, 3, 3) / 3, "b": normal(8, 8, 3, 3) / 3}, normal(1, 2, 32, 32)
    plan, priced, sent = planned_and_sent(loss, params, batch, mesh)
    permuted = sum(x.sent_bytes for x in sent if x.kind == "collective-permute")
    assert priced["halos of convolutions and windows"] == permuted
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
def test_positions_that_are_looked_up_leave_a_sequence_to_be_split():
    """A table that is added as a whole has the dimension itself, which belongs to the model."""

    def loss_of(positions):
        def loss(params, batch, key):
            h = batch + positions(params["table"])
            scores = jax.nn.softmax(h @ params["w"] @ jnp.swapaxes(h, 1, 2) / 8)
            return jnp.mean(jnp.tanh(scores @ (h @ params["v"])) ** 2)

        return loss

    params = {"table": normal(256, 32), "w": normal(32, 32) / 6, "v": normal(32, 32) / 5}
    batch = normal(1, 256, 32)
    mesh = mesh_of((8, 1, 1))
    added = plan_of(loss_of(lambda table: table[None]), params, batch, mesh)
    assert "`table[jnp.arange(size)]`" in added.report.program.batch
    loss = loss_of(lambda table: table[jnp.arange(256)][None])
    hardware = replace(TIGHT, adds_first=False, scatters=False, compiler="cpu")
    plan = plan_of(loss, params, batch, mesh, hardware)
    assert plan.compute.split == ((("data",), ((0, 1),)),)
    step = jax.jit(jax.grad(plan.constrain(loss)), out_shardings=plan.shardings)
    sent = collectives(step.lower(params, batch, None).compile().as_text(), mesh)
    priced = sum(traffic.bytes for traffic in plan.report.program.traffic)
    assert priced == pytest.approx(sum(x.sent_bytes for x in sent), rel=0.01)
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.few("False")
def test_windows_reach_over_several_parts(pooled):
    """Of two rows, by three before and three after. The image is not gathered for them."""

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, P(None, None, ("data",)))
        h = jnp.tanh(convolve(x, params["a"]))
        if pooled:
            h = jax.lax.reduce_window(h, -np.inf, jax.lax.max, (1, 1, 7, 1), (1, 1, 1, 1), "SAME")
        return jnp.mean(jnp.tanh(convolve(h, params["b"])) ** 2)

    params, batch = {"a": normal(4, 2, 7, 3), "b": normal(2, 4, 7, 1)}, normal(1, 2, 16, 64)
    mesh = mesh_of((8, 1, 1))
    plan, priced, sent = planned_and_sent(loss, params, batch, mesh)
    assert not [x for x in sent if x.kind == "all-gather"]
    permuted = sum(x.sent_bytes for x in sent if x.kind == "collective-permute")
    assert priced["halos of convolutions and windows"] == pytest.approx(permuted, rel=0.25)
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
def test_spectra_are_split_along_another_dimension_until_the_inverse_transform():
    """Two layers are four transforms, with one all-to-all each, forward and backward."""
    mesh = mesh_of((8, 1, 1))
    plan, program = compiled(spectral, SPECTRAL, normal(1, 2, 64, 32), mesh)
    sent = collectives(program.as_text(), mesh)
    turned = [x for x in sent if x.kind == "all-to-all"]
    assert len(turned) == 2 * 4
    of_turned = sum(x.sent_bytes for x in turned)
    # What selects low frequencies sends next to nothing.
    assert sum(x.sent_bytes for x in sent) < 1.15 * of_turned
    priced = {x.cause: x.bytes for x in plan.report.program.traffic}
    assert priced["all-to-alls around Fourier transforms"] == pytest.approx(of_turned, rel=0.1)


@pytest.mark.thorough
def test_products_of_pairs_stay_split_along_the_rows():
    """`jnp.einsum` transposes them. An operand is gathered for each pass, and a sum of parts, whose
    cotangent is gathered, is not turned."""

    @jax.checkpoint
    def block(p, z):
        n = jnp.tanh(z)
        product = jnp.einsum("bikc,bjkc->bijc", n @ p["a"], n @ p["b"])
        # Another array of its rank, which does not make a turn of the transpose either.
        centred = product - jnp.mean(product, -1, keepdims=True)
        z = z + jnp.tanh(centred @ p["c"])
        n = jnp.tanh(z)
        return z + jnp.tanh(jnp.einsum("bkic,bkjc->bijc", n @ p["a"], n @ p["b"]) @ p["c"])

    def loss(params, batch, key):
        z = batch @ params["c"]
        return jnp.mean((block(params, block(params, z)) - batch) ** 2)

    params = {name: normal(16, 16) / 16 for name in "abc"}
    mesh, batch = mesh_of((8, 1, 1)), normal(1, 32, 32, 16)
    plan = plan_of(loss, params, batch, mesh, replace(TIGHT, adds_first=False, scatters=False))
    assert plan.compute.split == ((("data",), ((0, 1),)),)
    program = jax.jit(jax.grad(plan.constrain(loss))).lower(params, batch, None).compile()
    sent = collectives(program.as_text(), mesh)
    # Of each of two blocks: three times an operand, and the cotangent of the sum.
    assert sum(x.operand_bytes for x in sent if x.kind == "all-gather") == batch.nbytes
    assert not [x for x in sent if x.kind == "all-to-all"]
    priced = {x.cause: x.bytes for x in plan.report.program.traffic}
    assert sum(priced.values()) == pytest.approx(sum(x.sent_bytes for x in sent), rel=0.05)
    assert not any("transposed" in cause for cause in priced)
    assert max(plan.verify(loss, params, batch).values()) < 1e-5
    # GPUs and TPUs scatter the sums, which are split along another dimension: half as many bytes.
    scattered = plan_of(loss, params, batch, mesh, replace(TIGHT, adds_first=False))
    assert sums_of(scattered) == pytest.approx(sums_of(plan) / 2, rel=1e-3)


def sums_of(plan):
    traffic = plan.report.program.traffic
    return sum(x.bytes for x in traffic if x.cause.startswith("sums over"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["symmetric", "pair"])
def test_weights_of_pairs_whose_rows_are_split_too(name):
    """XLA gave gradients that were wrong by half of their size."""

    def symmetric(params, z, key):
        return jnp.mean(jnp.tanh((z + jnp.swapaxes(z, 1, 2)) @ params["w"]) ** 2)

    of_pairs = {"symmetric": symmetric, "pair": pair}[name]

    def loss(params, z, key):
        z = jax.lax.with_sharding_constraint(z, P("data", None, "fsdp"))
        return of_pairs(params, z, key)

    batch = normal(2, 16, 16, 8)
    plan = plan_of(loss, PAIR, batch, mesh_of((2, 2, 2)))
    assert max(plan.verify(loss, PAIR, batch).values()) < 1e-5


@pytest.mark.thorough
def test_operands_that_are_transposed_later_are_not_gathered():
    """Attention along columns is one along rows between two transposes, each an all-to-all."""

    def loss(params, batch, key):
        z = jnp.tanh(batch @ params["a"])
        columns = jnp.swapaxes(jnp.tanh(jnp.swapaxes(z, 1, 2) @ params["a"]) @ params["c"], 1, 2)
        return jnp.mean(jnp.einsum("bikc,bjkc->bijc", columns, z) ** 2)

    params, batch = {name: normal(16, 16) / 16 for name in "ac"}, normal(1, 32, 32, 16)
    mesh = mesh_of((8, 1, 1))
    _, program = compiled(loss, params, batch, mesh)
    sent = collectives(program.as_text(), mesh)
    # The operand of the last product alone is gathered, forward and backward.
    assert sum(x.count for x in sent if x.kind == "all-gather") == 2


@pytest.mark.thorough
def test_rolls_are_priced_in_layers_that_share_a_program():
    """As in shifted windows: every second layer rolls by no element."""

    def block(w, z, shift):
        n = jnp.roll(jnp.tanh(z @ w), (-shift, -shift), (1, 2))
        return z + jnp.roll(jnp.tanh(n @ w), (shift, shift), (1, 2))

    def loss(params, batch, key):
        z = batch
        for layer, w in enumerate(params):
            z = jax.checkpoint(block, static_argnums=2)(w, z, 2 * (layer % 2))
        return jnp.mean(z**2)

    params, batch = [normal(8, 8) / 8] * 4, normal(1, 32, 32, 8)
    mesh = mesh_of((8, 1, 1))
    plan, program = compiled(loss, params, batch, mesh)
    sent = sum(x.sent_bytes for x in collectives(program.as_text(), mesh))
    priced = sum(x.bytes for x in plan.report.program.traffic)
    assert priced == pytest.approx(sent, rel=0.25)


@pytest.mark.thorough
def test_nodes_are_gathered_once_for_all_lookups_and_their_cotangents_added_first():
    """Each round looks up the senders and the receivers of its edges."""
    mesh, params = mesh_of((8, 1, 1)), {"message": normal(128, 64) / 32}
    batch = normal(1, NODES, 64)
    # The compiler for CPUs adds no cotangents by itself.
    hardware = replace(TIGHT, adds_first=False, scatters=False)
    plan = plan_of(messages, params, batch, mesh, hardware)
    program = jax.jit(jax.grad(plan.constrain(messages))).lower(params, batch, None).compile()
    sent = collectives(program.as_text(), mesh)
    nodes = batch.size * batch.itemsize
    # The nodes of two rounds, and the cotangents of the messages that are added to them.
    gathered = [x for x in sent if x.kind == "all-gather"]
    assert sum(x.operand_bytes * 8 for x in gathered) == 4 * nodes
    # The messages of two rounds, the cotangent of the nodes in between, and those of the matrix.
    summed = sum(x.operand_bytes for x in sent if x.kind == "all-reduce")
    assert summed == pytest.approx(3 * nodes + 2 * 128 * 64 * 4, rel=0.01)
    priced = sum(x.bytes for x in plan.report.program.traffic)
    assert priced == pytest.approx(sum(x.sent_bytes for x in sent), rel=0.1)


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"feature_group_count": 2},
    "depthwise, wide": {"feature_group_count": 4, "rhs_dilation": (2, 1)},
    "grouped, stride": {
        "feature_group_count": 2,
        "window_strides": (2, 1),
        "padding": [(1, 1), (0, 0)],
    },
    "transposed": {"lhs_dilation": (2, 2), "padding": [(1, 2), (1, 2)]},
    "transposed, shifted": {"lhs_dilation": (2, 1), "padding": [(2, 1), (1, 1)]},
    "transposed by 3": {"lhs_dilation": (3, 1), "padding": [(2, 2), (1, 1)]},
    "grouped and transposed": {
        "feature_group_count": 2,
        "lhs_dilation": (2, 1),
        "padding": [(1, 2), (0, 1)],
    },
    "of parts that do not begin together": {"feature_group_count": 2, "padding": "VALID"},
}


@pytest.mark.few("transposed, shifted")
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_on_parts_with_halos(options):
    params = {"k": normal(4, 4 // options.get("feature_group_count", 1), 3, 3)}
    batch = normal(1, 4, 32, 6)
    loss = lambda params, x, key: jnp.mean(jnp.tanh(convolve(x, params["k"], **options)) ** 2)

    def constrained(params, x, key):
        x = jax.lax.with_sharding_constraint(x, P(None, None, ("data", "fsdp")))
        return loss(params, x, key)

    plan = plan_of(constrained, params, batch, mesh_of((2, 2, 2)))
    assert plan.compute.split == ((("data", "fsdp"), ((0, 2),)),)
    assert max(plan.verify(constrained, params, batch).values()) < 1e-5


SPLIT_SPACE = {
    "height": P(None, None, "data"),
    "height and width": P(None, None, "data", "fsdp"),
    "rows and height": P("data", None, "fsdp"),
}


@pytest.mark.thorough
@pytest.mark.few("rows and height")
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
def test_a_field_is_padded_at_its_end_before_a_convolution_with_a_stride(spec):
    """XLA refused to compile it."""

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, spec)
        x = jnp.pad(jnp.tanh(convolve(x, params["a"])), ((0, 0), (0, 0), (0, 1), (0, 1)))
        x = convolve(x, params["b"], window_strides=(2, 2), padding="VALID")
        return jnp.mean(jnp.tanh(x) ** 2)

    params, batch = {"a": normal(4, 2, 3, 3) / 4, "b": normal(4, 4, 3, 3) / 6}, normal(2, 2, 64, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


NEIGHBOURS = np.clip(np.arange(64)[:, None] + np.arange(-1, 2), 0, 63)  # (height, 3)
INTERPOLATIONS: dict[str, Any] = {
    "nearest": lambda x: jax.image.resize(x, (*x.shape[:2], 128, 32), "nearest"),
    "bilinear": lambda x: jax.image.resize(x, (*x.shape[:2], 96, 20), "bilinear"),
    "bicubic, coarser": lambda x: jax.image.resize(x, (*x.shape[:2], 32, 8), "bicubic"),
    "Lanczos, odd": lambda x: jax.image.resize(x, (*x.shape[:2], 64, 9), "lanczos3"),
    "neighbours": lambda x: x[:, :, NEIGHBOURS].mean(3),
    "mapped": jax.vmap(lambda x: jax.image.resize(x, (len(x), 128, 32), "bilinear")),
}


@pytest.mark.thorough
@pytest.mark.few("nearest")
@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolations_exchange_halos_alone(name):
    """As large as the array would be a gather for a lookup, or a sum for a product."""

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, P(None, None, ("data",)))
        x = INTERPOLATIONS[name](jnp.tanh(convolve(x, params["a"])))
        return jnp.mean(jnp.tanh(convolve(x, params["b"])) ** 2)

    params, batch = {"a": normal(4, 2, 3, 3), "b": normal(2, 4, 3, 3)}, normal(1, 2, 64, 16)
    mesh = mesh_of((8, 1, 1))
    plan, priced, sent = planned_and_sent(loss, params, batch, mesh)
    assert {x.kind for x in sent} <= {"all-reduce", "collective-permute"}
    permuted = sum(x.sent_bytes for x in sent if x.kind == "collective-permute")
    assert priced["halos of convolutions and windows"] == pytest.approx(permuted, rel=0.25)
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolations_are_right_where_devices_have_the_same_part(name, spec):
    def loss(params, x, key):
        x = jnp.tanh(convolve(jax.lax.with_sharding_constraint(x, spec), params["a"]))
        x = convolve(INTERPOLATIONS[name](x), params["b"], padding="VALID")
        x = jax.image.resize(x, (*x.shape[:2], 32, 16), "linear")
        return jnp.mean(x**2)

    params, batch = {"a": normal(4, 2, 3, 3) / 4, "b": normal(4, 4, 3, 3) / 6}, normal(2, 2, 64, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
def test_pixels_that_are_looked_up_along_two_split_dimensions():
    """As those of a field that moves. XLA ended the process."""

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, SPLIT_SPACE["height and width"])
        x = jnp.tanh(convolve(x, params["a"]))
        at = jnp.arange(32)[:, None], jnp.arange(16)[None]
        rows = jnp.clip((8 * x).astype(int) + at[0][None, None], 0, 31)
        columns = jnp.clip((4 * x).astype(int) + at[1][None, None], 0, 15)
        move = lambda field, rows, columns: field[rows, columns]
        return jnp.mean(jax.vmap(jax.vmap(move))(x, rows, columns) ** 2)

    params, batch = {"a": normal(4, 2, 3, 3) / 4}, normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
@pytest.mark.few("SAME-rows and height")
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
@pytest.mark.parametrize("padding", ["SAME", "circular"])
def test_convolutions_are_right_where_devices_have_the_same_part(spec, padding):
    """Left alone, XLA adds what these devices have once for each of them."""
    params = {"a": normal(8, 2, 3, 3) / 4, "b": normal(8, 8, 3, 3) / 8}

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, spec)
        for kernel in (params["a"], params["b"]):
            if padding == "circular":
                x = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="wrap")
                x = convolve(x, kernel, padding="VALID")
            else:
                x = convolve(x, kernel)
            x = jnp.tanh(x)
        return jnp.mean(x**2)

    batch = normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)))
    assert plan.compute.splits_examples
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
def test_a_field_may_divide_where_its_spectrum_does_not():
    """16 columns have 9 frequencies, along which the second of two transforms cannot be split."""

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, P(None, None, "data", "fsdp"))
        spectrum = jnp.fft.rfft2(convolve(x, params["k"]))
        return jnp.mean(jnp.tanh(jnp.fft.irfft2(1.5 * spectrum, s=x.shape[2:])) ** 2)

    params, batch = {"k": normal(2, 2, 3, 3) / 4}, normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)), rc.Hardware(memory=1e4))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


# Of a kernel and the options of `convolve`: sizes at which XLA's partitioner, where it divides
# these convolutions itself, ends the process or gives another gradient.
UNEVEN_CONVOLUTIONS = {
    "1 by 1 with a stride and padding": (
        (1, 1),
        {"window_strides": (2, 2), "padding": ((1, 0), (0, 0))},
    ),
    "seventeen rows": ((3, 4), {"window_strides": (2, 1), "padding": ((2, 1), (1, 2))}),
    "padding larger than the kernel": (
        (3, 3),
        {"window_strides": (2, 2), "padding": ((4, 4), (4, 3))},
    ),
}


@pytest.mark.thorough
@pytest.mark.few("rows and height-seventeen rows")
@pytest.mark.parametrize("case", UNEVEN_CONVOLUTIONS.values(), ids=UNEVEN_CONVOLUTIONS)
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
def test_convolutions_whose_results_do_not_divide(spec, case):
    kernel, options = case

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, spec)
        h = jnp.tanh(convolve(x, params["a"]))
        return jnp.mean(jnp.tanh(convolve(h, params["b"], **options)) ** 2)

    params = {"a": normal(4, 2, 3, 3) / 4, "b": normal(4, 4, *kernel) / 4}
    batch = normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


POOLING: dict[str, Any] = {
    "3 by 3": ((3, 3), (1, 1), "SAME", jax.lax.max, -np.inf),
    "3 by 3, without padding": ((3, 3), (1, 1), "VALID", jax.lax.max, -np.inf),
    "of different sizes": ((4, 3), (2, 1), [(0, 0)] * 2 + [(1, 1)] * 2, jax.lax.max, -np.inf),
    "of every second": ((3, 3), (2, 2), [(0, 0)] * 2 + [(0, 1)] * 2, jax.lax.max, -np.inf),
    "of minima": ((3, 5), (1, 1), "SAME", jax.lax.min, np.inf),
}


@pytest.mark.thorough
@pytest.mark.few("rows and height-3 by 3")
@pytest.mark.parametrize("options", POOLING.values(), ids=POOLING)
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
def test_gradients_of_pooling_whose_windows_overlap(spec, options):
    """XLA loses parts of them."""
    window, strides, padding, chosen, outside = options

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, spec)
        h = jnp.tanh(convolve(x, params["k"]))
        h = jax.lax.reduce_window(h, outside, chosen, (1, 1, *window), (1, 1, *strides), padding)
        return jnp.mean(h**2)

    params, batch = {"k": normal(4, 2, 3, 3) / 4}, normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)), rc.Hardware(memory=1e4))
    assert plan.compute.splits_examples
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


INNER_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"window_strides": (2, 1), "padding": [(1, 1), (1, 1)]},
    "dilated": {"rhs_dilation": (2, 1)},
    "transposed": {"lhs_dilation": (2, 1), "padding": [(1, 2), (1, 1)]},
    "stride and dilated": {"window_strides": (2, 1), "rhs_dilation": (2, 1)},
}


@pytest.mark.thorough
@pytest.mark.parametrize("options", INNER_CONVOLUTIONS.values(), ids=INNER_CONVOLUTIONS)
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
def test_a_step_of_gradient_descent_inside_of_a_loss(spec, options):
    """As in meta-learning: the gradients of kernels are sums over the parts of the space."""

    def inner(params, x):
        h = jnp.tanh(convolve(jnp.tanh(convolve(x, params["a"])), params["b"], **options))
        return jnp.mean((h - 0.1) ** 2)

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, spec)
        gradients = jax.grad(inner)(params, x)
        return inner(jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), x)

    params = {"a": normal(4, 2, 3, 3) / 4, "b": normal(2, 4, 3, 3) / 6}
    batch = normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)), rc.Hardware(memory=1e4))
    assert plan.compute.splits_examples
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
@pytest.mark.few("rows and height-1")
def test_gradients_of_each_example_inside_of_a_loss(spec, groups):
    """Each example has kernels of its own, which JAX convolves as groups of one image."""

    def inner(params, x):
        h = jnp.tanh(convolve(jnp.tanh(convolve(x[None], params["a"])), params["b"], **options))
        return jnp.mean((h - 0.1) ** 2)

    def after_a_step(params, x):
        gradients = jax.grad(inner)(params, x)
        return inner(jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), x)

    def loss(params, x, key):
        x = jax.lax.with_sharding_constraint(x, spec)
        return jnp.mean(jax.vmap(after_a_step, in_axes=(None, 0))(params, x))

    options = {"feature_group_count": groups}
    params = {"a": normal(4, 2, 3, 3) / 4, "b": normal(2, 4 // groups, 3, 3) / 6}
    batch = normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)), rc.Hardware(memory=1e4))
    assert plan.compute.splits_examples
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


TRANSFORMS = {
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "rfft2": lambda x: jnp.abs(jnp.fft.rfft2(x)),
    "rfft, of height": lambda x: jnp.abs(jnp.fft.rfft(x, axis=2)),
    "irfft": lambda x: jnp.fft.irfft(1.5 * jnp.fft.rfft(x)),
    "irfft2": lambda x: jnp.fft.irfft2(1.5 * jnp.fft.rfft2(x)),
    "ifftn": lambda x: jnp.fft.ifftn(1.5 * jnp.fft.fftn(x, axes=(1, 2, 3)), axes=(1, 2, 3)).real,
}


@pytest.mark.thorough
@pytest.mark.few("rows and height-False-rfft2")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("spec", SPLIT_SPACE.values(), ids=SPLIT_SPACE)
def test_transforms_beside_convolutions(spec, remat, transform):
    """XLA for CPUs would give some of them operands in a layout that it refuses to run."""

    def loss(params, x, key):
        h = jax.lax.with_sharding_constraint(x, spec)
        layer = lambda h: jnp.tanh(transform(convolve(h, params["k"])))
        if remat:
            layer = jax.checkpoint(layer)
        return jnp.mean(layer(h) ** 2)

    params, batch = {"k": normal(2, 2, 3, 3) / 4}, normal(2, 2, 32, 16)
    plan = plan_of(loss, params, batch, mesh_of((2, 2, 2)), rc.Hardware(memory=1e4))
    assert max(plan.verify(loss, params, batch).values()) < 1e-5


@pytest.mark.thorough
def test_pairs_are_split_only_where_memory_is_short():
    mesh = AbstractMesh((1, 8, 1), ("data", "fsdp", "model"))
    batch = normal(1, 32, 32, 8)
    roomy = plan_of(pair, PAIR, batch, mesh, ENOUGH)
    assert not roomy.compute.splits_examples
    assert "it would cost more" in roomy.report.program.batch
    plan = plan_of(pair, PAIR, batch, mesh)
    assert plan.compute.split == ((("fsdp",), ((0, 1),)),)


@pytest.mark.thorough
def test_rows_and_a_dimension_of_examples_share_the_devices():
    mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "model"))
    plan = plan_of(unet, UNET, normal(2, 2, 64, 24), mesh)
    assert plan.compute.split == ((("data",), ((0, 0),)), (("fsdp",), ((0, 2),)))
    assert dict(plan.report.program.split_examples) == {"fsdp": "domain parallel"}
    arithmetic = plan.report.program.arithmetic
    assert arithmetic.per_device == pytest.approx(arithmetic.flops / 8)


@pytest.mark.thorough
def test_two_dimensions_are_split_where_one_does_not_divide():
    mesh = AbstractMesh((8, 8, 1), ("data", "fsdp", "model"))
    plan = plan_of(unet, UNET, normal(1, 2, 32, 32), mesh, rc.Hardware(memory=1e4))
    assert [axes for axes, _ in plan.compute.split] == [("data",), ("fsdp",)]
    assert {places for _, places in plan.compute.split} == {((0, 2),), ((0, 3),)}


@pytest.mark.thorough
def test_a_batch_that_divides_and_does_not_fit_uses_model_too():
    mesh = AbstractMesh((2, 1, 4), ("data", "fsdp", "model"))
    batch = normal(2, 2, 64, 24)
    assert plan_of(unet, UNET, batch, mesh, ENOUGH).compute.split == ()
    plan = plan_of(unet, UNET, batch, mesh, rc.Hardware(memory=1e5))
    assert plan.compute.split == ((("data",), ((0, 0),)), (("model",), ((0, 2),)))


def constrained_to(spec):
    def loss(params, batch, key):
        return unet(params, jax.lax.with_sharding_constraint(batch, spec), key)

    return loss


@pytest.mark.thorough
def test_a_constraint_of_the_batch_decides():
    mesh, batch = AbstractMesh((2, 4, 1), ("data", "fsdp", "model")), normal(1, 2, 64, 32)
    plan = plan_of(constrained_to(P(None, None, "data", "fsdp")), UNET, batch, mesh, ENOUGH)
    assert plan.compute.split == ((("data",), ((0, 2),)), (("fsdp",), ((0, 3),)))
    with pytest.raises(ValueError, match="dimension 1 of array 0, of size 2, over fsdp = 4"):
        plan_of(constrained_to(P(None, "fsdp")), UNET, batch, mesh)


@pytest.mark.thorough
def test_a_constraint_of_the_batch_decides_where_rows_divide_too():
    mesh, batch = mesh_of((8, 1, 1)), normal(8, 2, 64, 24)
    loss = constrained_to(NamedSharding(mesh, P(None, None, "data")))
    plan = plan_of(loss, UNET, batch, mesh, ENOUGH)
    assert plan.compute.split == ((("data",), ((0, 2),)),)
    constrained = plan.constrain(loss)
    text = jax.jit(lambda params, x: constrained(params, x, None)).lower(UNET, batch).as_text()
    of_batch = re.search(r"sharding_constraint %arg\d+ <@mesh, (.*?)> :", text)
    assert of_batch is not None
    assert of_batch[1] == '[{}, {}, {"data"}, {}]'
    assert max(plan.verify(loss, UNET, batch).values()) < 1e-5


@pytest.mark.thorough
def test_saved_plans_split_examples_alike(tmp_path):
    mesh, batch = mesh_of((8, 1, 1)), normal(1, 2, 64, 16)
    plan = plan_of(unet, UNET, batch, mesh)
    rc.save_plan(plan, tmp_path / "plan.json")
    loaded = rc.load_plan(tmp_path / "plan.json", UNET, mesh)
    assert loaded.compute == plan.compute
    assert loaded.report.program == plan.report.program
    # A function of the inputs alone is split along the same dimensions.
    assert loaded.constrain(unet) == plan.constrain(unet)


def test_batches_whose_parts_are_on_the_devices_are_left_there():
    mesh = mesh_of((8, 1, 1))
    sharding = NamedSharding(mesh, P(None, "data"))
    field = np.arange(64.0, dtype=np.float32).reshape(1, 16, 4)
    read = jax.make_array_from_callback(field.shape, sharding, lambda index: field[index])
    placed = place_batch({"x": read, "y": field}, mesh, kinds=(np.ndarray, jax.Array))
    assert placed["x"] is read
    assert placed["y"].is_fully_replicated
