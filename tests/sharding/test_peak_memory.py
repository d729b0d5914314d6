"""The estimated peak of memory against the compiled program's."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, mesh_of

import redcoast as rc
from redcoast import models
from redcoast.dryrun.hlo import collectives, sent_bytes
from redcoast.losses import cross_entropy
from redcoast.sharding.solver import _layout, _peak

# As in a dry run that stands in for an accelerator.
OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}


def norm(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def pair_block(p, z):
    """What is alive inside of the block is far more than the operand that it keeps."""
    x = norm(z)
    product = jnp.einsum("bikc,bjkc->bijc", x @ p["left"], x @ p["right"])
    z = z + jax.nn.sigmoid(x @ p["gate"]) * (norm(product) @ p["out"])
    return z + jax.nn.relu(norm(z) @ p["up"]) @ p["down"]


def rematerialised(model, batch, key):
    for p in model:
        batch = jax.checkpoint(pair_block)(p, batch)
    return jnp.mean(batch**2)


def attention(model, x, key):
    for p in model:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        scores = jnp.einsum("bqhk,bthk->bhqt", q, k) / 4
        mixed = jnp.einsum("bhqt,bthk->bqhk", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, p["o"])
    return jnp.mean(x**2)


def recurrence(model, x, key):
    def step(h, x):
        h = jnp.tanh(x @ model["in"] + h @ model["h"])
        return h, h

    start = jnp.zeros((x.shape[0], model["h"].shape[0]))
    _, hs = jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))
    return jnp.mean(hs**2)


def gelus(model, x, key):
    """Layers in a loop, which stacks five arrays of each `gelu`."""
    layer = lambda x, p: (x + jax.nn.gelu(x @ p["up"]) @ p["down"], None)
    return jnp.mean(jax.lax.scan(layer, x, model)[0] ** 2)


def clipped(model, x, key):
    """Gradients of single examples, which are outer products and have no buffers of their own."""

    def error(model, x):
        for w in model:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    errors, grads = jax.vmap(jax.value_and_grad(error), (None, 0))(model, x)
    norms = sum(jnp.sum(g**2, axis=(1, 2)) for g in grads)
    factor = jnp.minimum(1.0, 0.1 * jax.lax.rsqrt(norms))
    means = [jnp.tensordot(factor, g, axes=1) for g in grads]
    return jnp.mean(errors) + sum(jnp.sum(mean**2) for mean in means)


def branches(model, x, key):
    """Rematerialised loops of branches, as of a bounded `while`; branches keep the weights too."""

    def step(x, _):
        run = lambda x: x + jnp.tanh(x @ model["up"]) @ model["down"]
        return jax.lax.cond(x[0, 0] < 9, run, lambda x: x, x), None

    several = lambda x: jax.lax.scan(step, x, None, length=8)[0]
    outer = jax.checkpoint(lambda x, _: (jax.lax.cond(x[0, 0] < 9, several, lambda x: x, x), None))
    return jnp.mean(jax.lax.scan(outer, x, None, length=8)[0] ** 2)


def turns(model, x, key):
    """Branches that take turns share what they return for their derivatives."""

    def step(x, i):
        apply = lambda factor, x: x + jnp.tanh(factor * x @ model["up"]) @ model["down"]
        branches = [ft.partial(apply, factor) for factor in (1.0, 2.0, 3.0, 4.0)]
        return jax.lax.switch(i % 4, branches, x), None

    return jnp.mean(jax.lax.scan(step, x, jnp.arange(8))[0] ** 2)


def one_turn(model, x, key):
    """The same branches without a loop."""
    place = jnp.int32(x[0, 0])
    apply = lambda factor, x: x + jnp.tanh(factor * x @ model["up"]) @ model["down"]
    branches = [ft.partial(apply, factor) for factor in (1.0, 2.0, 3.0, 4.0)]
    return jnp.mean(jax.lax.switch(place, branches, x) ** 2)


def skipped(model, x, key):
    """Rematerialised chunks that may be skipped, as those of experts: before JAX 0.12, a branch
    returns the weights of its layer again for the derivative, and not of all layers at once."""

    def chunk(layer, limit, y, i):
        run = jax.checkpoint(lambda y: y + jnp.tanh(y @ layer["up"]) @ layer["down"])
        return jax.lax.cond(i < limit, run, lambda y: y, y), None

    for layer in model:
        skips = jax.checkpoint(ft.partial(chunk, layer, x[0, 0]))
        x = x + jax.lax.scan(skips, x, jnp.arange(2.0))[0]
    return jnp.mean(x**2)


def unrolled(model, x, key):
    layer = lambda x, p: (x + jnp.tanh(x @ p["up"]) @ p["down"], None)
    return jnp.mean(jax.lax.scan(layer, x, model, unroll=8)[0] ** 2)


def local_steps(model, x, key):
    """Weights that a loop carries and updates, of a copy for each example."""

    def train(x):
        error = lambda w: jnp.mean((x @ w) ** 2)
        return jax.lax.scan(lambda w, _: (w - 0.1 * jax.grad(error)(w), None), model, None, 4)[0]

    return jnp.mean((jnp.mean(jax.vmap(train)(x), 0) - jax.lax.stop_gradient(model)) ** 2)


def averaged(model, x, key):
    """As above, compared with the weights themselves, which are read again after the loop."""

    def train(x):
        error = lambda w: jnp.mean((x @ w) ** 2)
        step = lambda w, _: (w - 0.1 * jax.grad(error)(w), None)
        return jax.lax.scan(step, jax.lax.stop_gradient(model), None, 4)[0]

    return jnp.mean((model - jnp.mean(jax.vmap(train)(x), 0)) ** 2)


def adapted(model, x, key):
    """The loss after a gradient step of each example, with a sum over devices for each use."""

    def task(x):
        error = lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2)
        return error([p - 0.1 * g for p, g in zip(model, jax.grad(error)(model), strict=True)])

    return jnp.mean(jax.vmap(task)(x))


def depthwise(model, x, key):
    """The compiler computes the gradient of all channels with all others."""
    spaces = ("NHWC", "HWIO", "NHWC")
    convolve = jax.lax.conv_general_dilated
    x = convolve(x, model, (1, 1), "SAME", dimension_numbers=spaces, feature_group_count=64)
    return jnp.mean(jnp.tanh(x) ** 2)


def gates(model, x, key):
    """A GRU, whose gates are cut out of two products, which are tensor-parallel."""

    def step(h, x):
        (r, z, n), (r2, z2, n2) = (jnp.split(y, 3, -1) for y in (x, h @ model["h"]))
        r, z = jax.nn.sigmoid(r + r2), jax.nn.sigmoid(z + z2)
        h = (1 - z) * jnp.tanh(n + r * n2) + z * h
        return h, h

    start = jnp.zeros((x.shape[0], model["h"].shape[0]))
    _, hs = jax.lax.scan(step, start, jnp.swapaxes(x @ model["in"], 0, 1))
    return jnp.mean(hs**2)


def triangle(model, x, key):
    """A product of one example with itself, of which each device gathers one operand."""
    product = jnp.einsum("bikc,bjkc->bijc", x @ model["left"], x @ model["right"])
    return jnp.mean((product @ model["out"]) ** 2)


def momentum(model, x, key):
    """A copy of the network that is not trained, whose gradient is no sum over devices."""
    run = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    fixed = jax.lax.stop_gradient(run(model["slow"], 0.9 * x))
    return jnp.mean((run(model["fast"], x) - fixed) ** 2)


def grids(model, x, key):
    """Lookups of several corners in each level of a table, whose gradients are summed apart."""
    encoded = 0.0
    for level, place in enumerate(jnp.int32(9 * x[:, :4]).T):
        for corner in range(8):
            encoded += model["tables"][level][(place + corner * 31) % 512]
    return jnp.mean(jnp.tanh(encoded @ model["out"]) ** 2)


def tokens(model, x, key):
    """The cotangents of rows and tokens are copied for the gradients of the weights."""
    x = jnp.tanh(x @ model["up"] + model["bias"]) @ model["down"]
    return jnp.mean(x**2)


def messages(model, batch, key):
    """Edges look up nodes of other devices, and each device adds its messages to all nodes."""
    source, target = batch["edges"].T
    messages = jnp.tanh(batch["nodes"][source] @ model["in"])
    nodes = batch["nodes"] + jax.ops.segment_sum(messages, target, len(batch["nodes"]))
    messages = jnp.tanh(nodes[source] @ model["out"])
    return jnp.mean(jax.ops.segment_sum(messages, target, len(nodes)) ** 2)


NETWORK = {"up": array(64, 512), "down": array(512, 64)}
SQUARE = dict.fromkeys(("left", "right", "gate", "out"), array(16, 16))
PAIR = [SQUARE | {"up": array(16, 64), "down": array(64, 16)}] * 2
HEADS = [dict.fromkeys("qkv", array(64, 4, 16)) | {"o": array(4, 16, 64)}] * 2
CASES = {
    "remat": (rematerialised, PAIR, array(1, 48, 48, 16), {}),
    "attention": (attention, HEADS, array(16, 64, 64), {}),
    "attention, FSDP": (attention, HEADS, array(16, 64, 64), {"data": 1, "fsdp": 8}),
    "layers in a loop": (
        gelus,
        {"up": array(4, 16, 64), "down": array(4, 64, 16)},
        array(1024, 16),
        {},
    ),
    "clipped": (clipped, [array(64, 256), array(256, 256), array(256, 64)], array(64, 64), {}),
    "branches": (branches, {"up": array(64, 256), "down": array(256, 64)}, array(256, 64), {}),
    "turns": (turns, {"up": array(64, 256), "down": array(256, 64)}, array(256, 64), {}),
    "one turn": (one_turn, {"up": array(64, 256), "down": array(256, 64)}, array(256, 64), {}),
    "skipped": (skipped, [NETWORK] * 4, array(64, 64), {}),
    "layers without a loop, FSDP": (
        unrolled,
        {"up": array(8, 128, 512), "down": array(8, 512, 128)},
        array(1024, 128),
        {"data": 1, "fsdp": 8},
    ),
    "local steps": (local_steps, array(64, 512), array(8, 32, 64), {}),
    "averaged, FSDP": (averaged, array(256, 512), array(8, 32, 256), {"data": 1, "fsdp": 8}),
    "adapted": (adapted, [array(256, 512), array(512, 256)], array(8, 4, 256), {}),
    "adapted, tensor-parallel": (
        adapted,
        [array(256, 512), array(512, 256)],
        array(16, 4, 256),
        {"data": 2, "model": 4},
    ),
    "gates": (
        gates,
        {"in": array(64, 192), "h": array(64, 192)},
        array(16, 16, 64),
        {"data": 2, "model": 4},
    ),
    "triangle": (triangle, SQUARE, array(1, 64, 64, 16), {"data": 2, "model": 4}),
    "momentum": (
        momentum,
        {"fast": NETWORK, "slow": NETWORK},
        array(64, 64),
        {},
    ),
    "grids": (grids, {"tables": array(4, 512, 4), "out": array(4, 4)}, array(64, 8), {}),
    "tokens": (tokens, NETWORK | {"bias": array(1, 1, 512)}, array(64, 64, 64), {}),
    "messages": (
        messages,
        {"in": array(64, 64), "out": array(64, 64)},
        {"nodes": array(256, 64), "edges": jax.ShapeDtypeStruct((1024, 2), jnp.int32)},
        {},
    ),
    "depthwise": (depthwise, array(7, 7, 1, 64), array(16, 8, 8, 64), {}),
    "a loop": (recurrence, {"in": array(32, 64), "h": array(64, 64)}, array(16, 64, 32), {}),
}


@pytest.mark.few("attention")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_the_compiled_program(name):
    """Within 25 %, for values that a block, a loop and a gather need beside what is kept."""
    fn, model, batch, sizes = CASES[name]
    mesh = rc.make_mesh(**sizes)
    plan = rc.plan_shardings(model, mesh, fn=fn, args=(batch, None))
    count = jax.tree.leaves(batch)[0].shape[0]
    rows = P(("data", "fsdp")) if count > 1 else P()
    step = jax.jit(
        jax.value_and_grad(plan.constrain(fn)),
        in_shardings=(plan.shardings, NamedSharding(mesh, rows), None),
        out_shardings=(None, plan.shardings),
    )
    memory = step.lower(model, batch, None).compile(compiler_options=OPTIONS).memory_analysis()
    assert memory is not None
    real = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    assert plan.report.program.memory.total == pytest.approx(real, rel=0.25)


@pytest.mark.thorough
def test_gates_are_gathered_once_in_each_iteration():
    """Those of the input and of the state, whose cotangent is summed; all of it as planned."""
    fn, model, batch, sizes = CASES["gates"]
    mesh = rc.make_mesh(**sizes)
    plan = rc.plan_shardings(model, mesh, fn=fn, args=(batch, None))
    assert plan.shardings["h"].spec == P(None, "model")
    step = jax.jit(
        jax.value_and_grad(plan.constrain(fn)),
        in_shardings=(plan.shardings, NamedSharding(mesh, P(("data", "fsdp"))), None),
        out_shardings=(None, plan.shardings),
    )
    of_program = collectives(step.lower(model, batch, None).compile().as_text(), mesh)
    steps = batch.shape[1]
    assert sum(each.count for each in of_program) == 3 * steps + 1  # and the gradients together
    planned = sum(traffic.bytes for traffic in plan.report.program.traffic)
    assert planned == pytest.approx(sent_bytes(of_program), rel=0.01)


def decoder(model, x, key):
    """Rematerialised layers, with values between the products that are as large as these."""

    @jax.checkpoint
    def layer(p, x):
        n = norm(x)
        q, k, v = (jnp.einsum("btd,dhk->bthk", n, p[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k) / 4)
        mixed = jnp.einsum("bhqt,bthk->bqhk", scores, v)
        x = x + jnp.einsum("bqhk,hkd->bqd", mixed, p["o"])
        x = x + jnp.tanh(norm(x)) * jnp.sin(x)
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    for p in model:
        x = layer(p, x)
    return jnp.mean(x**2)


LAYER = dict.fromkeys("qkv", array(256, 8, 16)) | {"o": array(8, 16, 256)}
DECODER = [LAYER | {"up": array(256, 512), "down": array(512, 256)}] * 2


@pytest.mark.thorough
def test_sequence_parallelism_needs_less_memory():
    """Within 25 % of the compiled program. The estimate was the same as without it, 1.4 times as
    much, so that the plan split sequences in other ways for want of memory. What is gathered along
    the sequence, and again for rematerialised blocks, is part of what devices send."""
    mesh, batch = rc.make_mesh(model=4), array(2, 256, 256)
    planned = []
    for sequence in (False, True):
        args = (batch, None)
        plan = rc.plan_shardings(DECODER, mesh, fn=decoder, args=args, sequence=sequence)
        planned.append(plan.report.program.memory.total)
    step = jax.jit(
        jax.value_and_grad(plan.constrain(decoder)),
        in_shardings=(plan.shardings, NamedSharding(mesh, P("data")), None),
        out_shardings=(None, plan.shardings),
    )
    compiled = step.lower(DECODER, batch, None).compile(compiler_options=OPTIONS)
    memory = compiled.memory_analysis()
    real = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    assert planned[1] < 0.8 * planned[0]
    assert planned[1] == pytest.approx(real, rel=0.25)
    sent = sum(traffic.bytes for traffic in plan.report.program.traffic)
    assert sent == pytest.approx(sent_bytes(collectives(compiled.as_text(), mesh)), rel=0.01)


@pytest.mark.few("True-7600000.0")
@pytest.mark.parametrize(("sequence", "compiled"), [(False, 8.65e6), (True, 7.60e6)])
def test_the_peak_of_rematerialised_blocks_on_gpus(sequence, compiled):
    """What the compiler for A100s needs. A block's cotangent is one buffer before the block runs
    again, and that of a product is gathered along the sequence."""
    mesh, args = rc.make_mesh(data=2, model=4), (array(4, 256, 256), None)
    plan = rc.plan_shardings(
        DECODER, mesh, fn=decoder, args=args, sequence=sequence, hardware=rc.Hardware()
    )
    assert plan.report.program.memory.total == pytest.approx(compiled, rel=0.08)


@pytest.mark.few("4-float32-bfloat16-212400000.0")
@pytest.mark.parametrize(
    ("accumulate", "stored", "dtype", "compiled"),
    [
        (1, jnp.float32, None, 104.0e6),
        (4, jnp.float32, None, 108.0e6),
        (1, jnp.float32, jnp.bfloat16, 169.9e6),
        (4, jnp.float32, jnp.bfloat16, 212.4e6),
        (1, jnp.bfloat16, None, 51.7e6),
    ],
)
def test_gradients_of_a_step_on_gpus(accumulate, stored, dtype, compiled):
    """The plan's peak is within 7.5 % of what the compiler for H100s needs (jax 0.12.0.1), of AdamW
    with unrolled layers and data parallelism.

    Gradients are kept in the precision in which they are summed over devices, in parts if each
    device updates a part, and those of several microbatches are added up in float32.
    """
    config = models.LlamaConfig(
        vocab=4096, width=512, hidden=1408, heads=8, kv_heads=8, layers=2, unroll=2
    )
    cast = lambda x: x.astype(stored)
    init_fn = lambda key: jax.tree.map(cast, models.Llama(config, key=key))
    create = ft.partial(rc.init_state, init_fn, optax.adamw(1e-4), key=jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((8 * accumulate, 128), jnp.int32)
    plan = rc.plan_step(
        eqx.filter_eval_shape(create),
        lambda model, batch, key: cross_entropy(model(batch), batch),
        tokens,
        rc.make_mesh(data=8),
        accumulate=accumulate,
        compute_dtype=dtype,
        hardware=rc.Hardware(),
    )
    assert plan.report.program.memory.total == pytest.approx(compiled, rel=0.075)


def test_what_is_alive_at_the_peak_belongs_to_the_block():
    """A block keeps one operand, and the plan says what runs inside of it."""
    fn, model, batch, _ = CASES["remat"]
    plan = rc.plan_shardings(model, rc.make_mesh(), fn=fn, args=(batch, None))
    memory = plan.report.program.memory
    kept = batch.size * 4
    assert memory.activations > 5 * kept
    assert sum(line.memory_bytes for line in plan.report.program.lines) == pytest.approx(
        memory.activations, rel=1e-3
    )


def doubled(x):
    return 2 * x


def summed_over_time(x):
    return jax.lax.scan(lambda total, row: (total + row, None), x[0], x)[0]


@pytest.mark.parametrize("linear", [jax.jit(doubled), summed_over_time])
def test_calls_that_a_rematerialised_block_need_not_compute_again(linear):
    """Their derivatives need none of their values."""

    def loss(model, batch, key):
        block = jax.checkpoint(lambda w, x: linear(jnp.tanh(x @ w)))
        return jnp.mean(block(model, batch) ** 2)

    mesh = rc.make_mesh(data=8)
    batch = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = rc.plan_shardings(array(32, 32), mesh, fn=loss, args=(batch, None))
    assert plan.report is not None


def activations(fn, model, batch, **hardware):
    """Those planned for one device."""
    return activations_on((1, 1, 1), fn, model, batch, **hardware)


def activations_on(sizes, fn, model, batch, **hardware):
    """Those planned for each device of a mesh."""
    mesh, args = AbstractMesh(sizes, ("data", "fsdp", "model")), (batch, None)
    plan = rc.plan_shardings(model, mesh, fn=fn, args=args, hardware=rc.Hardware(**hardware))
    return plan.report.program.memory.activations


@pytest.mark.thorough
@pytest.mark.few("tpu")
@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_a_further_rematerialised_block_keeps_its_operand_alone(compiler):
    """The cotangent of a residual connection does not keep what later blocks compute."""
    batch = array(1, 128, 128, 16)
    few, many = (
        activations(rematerialised, PAIR[:1] * blocks, batch, compiler=compiler)
        for blocks in (3, 7)
    )
    assert many - few == pytest.approx(4 * batch.size * 4, rel=0.1)


def products(precision):
    def loss(model, x, key):
        for weight in model:
            x = jnp.matmul(x, weight, precision=precision)
        return jnp.sum(x)

    return loss


def test_a_tpu_keeps_in_bfloat16_what_products_of_default_precision_read():
    model, batch = [array(64, 64)] * 8, array(4096, 64)
    kept = {
        (compiler, precision): activations(products(precision), model, batch, compiler=compiler)
        for compiler in ("gpu", "tpu")
        for precision in (None, "highest")
    }
    assert kept["tpu", "highest"] == kept["gpu", "highest"] == kept["gpu", None]
    assert kept["tpu", None] == pytest.approx(kept["gpu", None] / 2, rel=0.2)


def test_small_dimensions_are_padded_on_a_tpu():
    model, batch = [array(16, 16)] * 8, array(64, 64, 16)
    on_gpu, on_tpu = (
        activations(products("highest"), model, batch, compiler=compiler)
        for compiler in ("gpu", "tpu")
    )
    assert on_tpu == pytest.approx(2 * on_gpu, rel=0.1)


def looped(model, x, key):
    x, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, model)
    return jnp.sum(x)


def test_a_tpu_copies_the_matrices_of_a_loop():
    """In bfloat16, once for the loop and its derivative; the rows need next to nothing."""
    model = array(8, 256, 256)
    on_gpu, on_tpu = (
        activations(looped, model, array(1, 256), compiler=compiler) for compiler in ("gpu", "tpu")
    )
    assert on_tpu - on_gpu == pytest.approx(model.size * 2, rel=0.1)


def test_numbers_keep_no_array_that_the_program_makes_in_memory():
    """The square reads the number 2, which was taken for the array that is made of zeros."""
    zeros = lambda: jnp.zeros((512, 512))  # 1 MB
    loss = lambda w, x, key: jnp.mean((x @ w @ zeros()) ** 2)
    args = (array(8, 64), None)
    plan = rc.plan_shardings(array(64, 512), mesh_of(1, 1, 1), fn=loss, args=args)
    memory = plan.report.program.memory
    # The array is no longer in memory when the gradient is written.
    assert memory.activations + memory.gradients < 1.05 * 512 * 512 * 4


def test_an_unknown_compiler_is_named():
    with pytest.raises(ValueError, match="`compiler` is 'rocm'"):
        rc.Hardware(compiler="rocm")


def test_the_activations_of_a_layout_are_followed_once(monkeypatch):
    """They are asked for by the choice of a strategy, by what fits, and by the report."""
    followed = []
    find_peak = _peak.find_peak
    counted = lambda *args, **options: followed.append(1) or find_peak(*args, **options)
    monkeypatch.setattr(_layout, "find_peak", counted)
    fn, model, batch, _ = CASES["a loop"]
    rc.plan_shardings(model, mesh_of(2, 2, 2), fn=fn, args=(batch, None))
    assert 1 <= len(followed) <= 3  # the ways to use a mesh


def test_a_loop_that_gathers_weights_again_computes_activations_again():
    """Its policy keeps nothing of small rematerialised regions, such as what they return."""

    def loss(model, x, key):
        def layer(x, p):
            up = jax.checkpoint(jax.nn.silu, prevent_cse=False)(x @ p["up"])
            return x + up @ p["down"], None

        return jnp.mean(jax.lax.scan(layer, x, model)[0] ** 2)

    mesh, batch = rc.make_mesh(data=1, fsdp=8), array(2048, 256)
    planned: dict[int, int] = {}
    for layers in (4, 8):
        model = {"up": array(layers, 256, 1024), "down": array(layers, 1024, 256)}
        plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None), hardware=rc.Hardware())
        planned[layers] = plan.report.program.memory.activations
    # A further layer keeps its input and what `silu` is applied to.
    rows = 2048 // 8
    assert planned[8] - planned[4] == pytest.approx(4 * 4 * rows * (256 + 1024), rel=0.1)


def test_a_tpu_casts_stacks_before_they_are_gathered():
    """Each device copies its own part in bfloat16, and the gathered layers are half as large."""
    model, batch = array(64, 256, 256), array(8, 256)
    on_gpu, on_tpu = (
        activations_on((1, 8, 1), looped, model, batch, compiler=compiler)
        for compiler in ("gpu", "tpu")
    )
    layer = 256 * 256 * 4
    copies = model.size * 2 / 8
    assert on_tpu == pytest.approx(on_gpu - layer / 2 + copies, rel=0.1)


def taking_turns(hands_on):
    """The layers of a group run in each iteration, in regions that hand the group on or not."""

    def run(x, group, place):
        return jnp.tanh(x @ group[place]), group

    def iterate(x, group):
        for place in range(4):
            run_again = jax.checkpoint(run, static_argnums=2)
            x, passed = run_again(x, group, place)
            if hands_on:
                group = passed
        return x, None

    def loss(model, x, key):
        x, _ = jax.lax.scan(iterate, x, model)
        return jnp.sum(x)

    return loss


@pytest.mark.few("tpu")
@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_a_group_of_layers_that_is_handed_on_has_one_gradient(compiler):
    """The gradients of its layers are those of the program, and not written once more."""
    model, batch = array(8, 4, 256, 256), array(8, 256)
    handed_on, read = (
        activations_on((1, 8, 1), taking_turns(hands_on), model, batch, compiler=compiler)
        for hands_on in (True, False)
    )
    group = 4 * 256 * 256 * 4
    assert handed_on < read + group / 4
