"""What a plan says is sent, against what its compiled program sends."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, real_mesh

import redcoast as rc
from redcoast.core._jaxpr import iter_equations, struct_of
from redcoast.dryrun.hlo import collectives, sent_bytes
from redcoast.sharding.program._batch_dims import batch_dims
from redcoast.sharding.program._classes import Classes
from redcoast.sharding.program._program import follow_program
from redcoast.sharding.program._trace import trace
from redcoast.sharding.solver._cost import price


def planned_and_sent(fn, model, batch, mesh, used=None, hardware=None):
    """The bytes that each device sends in a step as priced, and those of the compiled program.

    `used` is what is compiled: what a step uses of `fn`.
    """
    plan = rc.plan_shardings(model, mesh, fn=fn, args=(batch, None), hardware=hardware)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    given = jax.tree.map(place, model, plan.shardings)
    placed = jax.tree.map(place, batch, rc.batch_shardings(batch, mesh))
    loss_fn = plan.constrain(used or fn)
    has_aux = isinstance(jax.eval_shape(loss_fn, given, placed, None), tuple)
    step = jax.value_and_grad(loss_fn, has_aux=has_aux)
    compiled = jax.jit(step, out_shardings=(None, plan.shardings)).lower(given, placed, None)
    sent = sent_bytes(collectives(compiled.compile().as_text(), mesh))
    return sum(entry.bytes for entry in plan.report.program.traffic), sent, plan


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x**2, axis=-1, keepdims=True))


def towers(model, batch):
    return (unit(jnp.tanh(batch[name] @ model[name]) @ model["out"]) for name in ("a", "b"))


def contrastive(model, batch, key):
    """Each row of one kind is told from the others by its row of the other kind."""
    a, b = towers(model, batch)
    scores = jax.nn.log_softmax(a @ b.T, axis=-1)
    return -jnp.mean(jnp.sum(scores * jnp.eye(len(scores)), axis=-1))


def distances(model, batch, key):
    a, b = towers(model, batch)
    return jnp.mean(jnp.sqrt(jnp.sum((a[:, None] - b[None, :]) ** 2, axis=-1) + 1.0))


def of_itself(model, batch, key):
    a = unit(jnp.tanh(batch["a"] @ model["a"]) @ model["out"])
    return jnp.mean(jnp.tanh(a @ a.T)) + jnp.sum(model["b"])


@pytest.mark.few("sizes0-of_itself")
@pytest.mark.parametrize("fn", [contrastive, distances, of_itself])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 1, 4)])
def test_a_batch_against_itself_is_gathered_and_its_gradient_summed(fn, sizes):
    model = {"a": array(16, 64), "b": array(16, 64), "out": array(64, 256)}
    batch = {"a": array(256, 16), "b": array(256, 16)}
    priced, sent, plan = planned_and_sent(fn, model, batch, real_mesh(*sizes))
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def labelled(model, batch, key):
    """The probabilities of labels, looked up by the number of the row as well."""
    hidden = jnp.tanh(batch["x"] @ model["into"])
    actual = jax.nn.log_softmax(hidden @ model["out"])
    return -jnp.mean(actual[jnp.arange(len(actual)), batch["y"]])


def written(model, batch, key):
    """The logits of labels, written over by the number of the row as well."""
    logits = jnp.tanh(batch["x"] @ model["into"]) @ model["out"]
    rows = jnp.arange(len(logits))
    return jnp.mean(jax.nn.logsumexp(logits.at[rows, batch["y"]].add(1.0), axis=-1))


@pytest.mark.few("sizes0-labelled")
@pytest.mark.parametrize("fn", [labelled, written])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 1, 4)])
def test_rows_that_look_up_in_themselves_send_nothing(fn, sizes):
    model = {"into": array(64, 128), "out": array(128, 1024)}
    batch = {"x": array(256, 64), "y": jax.ShapeDtypeStruct((256,), jnp.int32)}
    priced, sent, plan = planned_and_sent(fn, model, batch, real_mesh(*sizes))
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def gated(model, batch, key):
    """What is summed forward over the hidden dimension is multiplied into it again."""
    hidden = jnp.tanh(batch["x"] @ model["up"])
    output = hidden @ model["down"]
    return jnp.mean((hidden * jnp.tanh(output @ model["gate"])) @ model["last"])


def test_a_value_that_is_summed_both_ways_along_a_dimension_has_two_sums():
    """The forward sum and that of the cotangent are priced apart, although both are sums of one
    value over one class."""
    model = {"up": array(32, 512), "down": array(512, 32), "gate": array(32, 512)}
    model["last"] = array(512, 32)
    mesh, hardware = real_mesh(2, 1, 4), rc.Hardware(scatters=False)
    priced, sent, plan = planned_and_sent(
        gated, model, {"x": array(64, 32)}, mesh, hardware=hardware
    )
    assert plan.shardings["gate"].spec == P(None, "model")
    assert priced == pytest.approx(sent, rel=0.01), str(plan)


def tied(model, batch, key):
    """The table of the vocabulary is both ends of a language model."""
    logits = jnp.tanh(model["table"][batch["x"]]) @ model["table"].T
    return -jnp.mean(jax.nn.log_softmax(logits)[..., :1])


def tied_cast(model, batch, key):
    """The same with the products and lookups of a table that is cast once."""
    return tied({"table": model["table"].astype(jnp.bfloat16)}, batch, key)


@pytest.mark.parametrize(("fn", "sizes"), [(tied, (1, 8, 1)), (tied_cast, (8, 1, 1))])
def test_lookups_in_a_tied_table_have_a_constraint_of_their_own(fn, sizes):
    """The gathered table has a constraint for lookups and one for products. Without, compilers for
    accelerators sum its gradient twice; `odd_vocabulary.check_tied` compiles that."""
    model = {"table": array(1024, 64)}
    batch = {"x": jax.ShapeDtypeStruct((16, 128), jnp.int32)}
    plan = rc.plan_shardings(model, real_mesh(*sizes), fn=fn, args=(batch, None))
    loss_fn = plan.constrain(fn)
    # Of the table, and of the cotangent of each.
    for traced, count in ((loss_fn, 2), (jax.value_and_grad(loss_fn), 4)):
        gathered = 0
        for equation in iter_equations(jax.make_jaxpr(traced)(model, batch, None)):
            is_constraint = equation.primitive.name == "sharding_constraint"
            if is_constraint and struct_of(equation.outvars[0]).shape == (1024, 64):
                gathered += equation.params["sharding"].spec == P(None, None)
        assert gathered == count


def kept(model, batch, key):
    """Writes over a row of a table for each example, as clients do that keep their own state."""
    new = jnp.tanh(batch["x"] @ model["out"])
    rows, new_rows = jax.lax.stop_gradient((model["rows"], new))
    return jnp.mean(new**2) + jnp.mean(rows.at[batch["client"]].set(new_rows))


def differentiated(model, batch, key):
    """The same with a gradient, which flows to the example that wrote an element."""
    new = batch["x"] @ model["out"]
    return jnp.mean(jnp.tanh(model["rows"].at[batch["client"]].set(new)) ** 2)


@pytest.mark.few("sizes1-kept")
@pytest.mark.parametrize("fn", [kept, differentiated])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_rows_that_are_written_over_are_gathered(fn, sizes):
    """They cannot be summed, as those that are added to a table are."""
    model = {"rows": array(64, 4096), "out": array(32, 4096)}
    batch = {"client": jax.ShapeDtypeStruct((16,), jnp.int32), "x": array(16, 32)}
    priced, sent, plan = planned_and_sent(fn, model, batch, real_mesh(*sizes))
    assert priced == sent, str(plan)
    assert "all-gathers of the batch, written by index" in plan.table()


def repeated(step, length=6):
    """A loop that closes over weights, and in which each iteration may be the last."""
    one = lambda x: jax.lax.cond(jnp.sum(x) < 1e9, step, lambda x: x, x)
    return lambda x: jax.lax.scan(lambda x, _: (one(x), None), x, length=length)[0]


def solved(model, batch, key):
    """As a differential equation's solver, which stops when it is done."""
    step = lambda x: x + jnp.tanh(x @ model["up"]) @ model["down"] @ model["last"]
    return jnp.mean(repeated(step)(batch) ** 2)


@pytest.mark.thorough
def test_weights_that_a_loop_closes_over_are_gathered_once():
    """Each is stored split, since the batch is over all devices, and whole inside of the loop."""
    model = {"up": array(16, 512), "down": array(512, 64), "last": array(64, 16)}
    mesh = real_mesh(1, 8, 1)
    priced, sent, plan = planned_and_sent(solved, model, array(512, 16), mesh)
    assert plan.report.program.batch_axes == ("fsdp",)
    assert plan.shardings["up"].spec
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def regression(model, x, y):
    return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"] - y) ** 2)


def averaged(model, batch, key):
    """A round of federated averaging: the loss of all clients, and the mean of their models."""

    def client(x, y):
        def step(local, _):
            loss, grads = jax.value_and_grad(regression)(local, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, local, grads), loss

        return jax.lax.scan(step, model, length=2)

    local, losses = jax.vmap(client)(batch["x"], batch["y"])
    return jnp.mean(losses), {}, jax.tree.map(lambda x: jnp.mean(x, axis=0), local)


def observed(model, batch, key):
    """A metric of the gradient beside the loss, which is itself not differentiated."""
    x, y = batch["x"][:, 0], batch["y"][:, 0]
    loss, grads = jax.value_and_grad(regression)(model, x, y)
    return loss, {"largest": jnp.max(grads["up"])}


def unused(model, batch, key):
    """A head whose result nobody uses."""
    x, y = batch["x"][:, 0], batch["y"][:, 0]
    _ = jnp.tanh(x @ model["up"]) @ model["down"]
    return regression(model, x, y)


@pytest.mark.thorough
@pytest.mark.parametrize("fn", [averaged, observed, unused])
def test_what_nobody_uses_costs_nothing(fn):
    """The results of `(loss, aux, model)` that are trained are not used, by any step."""

    def loss_fn(model, batch, key):
        actual = fn(model, batch, key)
        return actual[:2] if isinstance(actual, tuple) else actual

    model = {"up": array(64, 256), "down": array(256, 64)}
    batch = {"x": array(16, 4, 64), "y": array(16, 4, 64)}
    priced, sent, plan = planned_and_sent(fn, model, batch, real_mesh(2, 1, 4), loss_fn)
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def stacked(model, batch, key):
    """Layers in a scan, of which only the inputs are kept."""

    def layer(x, p):
        y = unit(x)
        x = x + jnp.tanh(y @ p["first"]) @ p["second"]
        return x + jnp.tanh(unit(x) @ p["up"]) @ p["down"], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), batch, model)[0] ** 2)


@pytest.mark.thorough
def test_rematerialised_layers_are_priced_as_they_run():
    """The sum in the middle of a layer is computed again, and the one at its end is not."""
    inner, outer = (3, 64, 256), (3, 256, 64)
    model = {"first": array(*inner), "second": array(*outer)}
    model |= {"up": array(*inner), "down": array(*outer)}
    priced, sent, plan = planned_and_sent(stacked, model, array(16, 8, 64), real_mesh(2, 1, 4))
    assert plan.report.program.batch_axes == ("data",)
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def table(model, batch, key):
    """Looks up a row of a table for each example, as clients do that keep their own state."""
    rows = model["rows"][batch["client"]]
    return jnp.mean((batch["x"] @ model["out"] * rows) ** 2)


@pytest.mark.few("sizes1")
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 1), (2, 2, 2)])
def test_a_batch_that_is_not_split_over_fsdp_is_gathered(sizes):
    """It is given split over data and fsdp, since that does not depend on the plan."""
    model = {"rows": array(64, 4096), "out": array(512, 4096)}
    batch = {"client": jax.ShapeDtypeStruct((16,), jnp.int32), "x": array(16, 512)}
    # So little that FSDP does not fit.
    small = rc.Hardware(memory=8e6, adds_first=False, scatters=False, overlaps=False)
    mesh = real_mesh(*sizes)
    priced, sent, plan = planned_and_sent(table, model, batch, mesh, hardware=small)
    assert "fsdp" not in plan.report.program.batch_axes
    (cause,) = (x for x in plan.report.program.traffic if "the batch, which is given" in x.cause)
    assert cause.axes == ("fsdp",)
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def spectral(model, batch, key):
    """A layer in the frequencies of each row, as in a Fourier neural operator."""
    modes = jnp.einsum("btd,tde->bte", jnp.fft.rfft(batch, axis=1), model["modes"])
    return jnp.mean((jnp.fft.irfft(modes, n=batch.shape[1], axis=1) @ model["out"]) ** 2)


def images(model, batch, key):
    """A transform of two dimensions of each row, under `vmap`."""
    row = lambda x: jnp.abs(jnp.fft.fft2(x @ model["out"], axes=(0, 1)))
    return jnp.mean(jax.vmap(row)(batch.reshape(len(batch), 4, 4, -1)))


@pytest.mark.few("images-sizes1")
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 1, 4)])
@pytest.mark.parametrize("fn", [spectral, images])
def test_fourier_transforms_gather_nothing(fn, sizes):
    """Neither the rows of the batch, nor channels that are tensor-parallel."""
    shape = jax.ShapeDtypeStruct((9, 64, 64), jnp.complex64)
    model = {"modes": shape, "out": array(64, 64)}
    if fn is images:
        del model["modes"]
    priced, sent, plan = planned_and_sent(fn, model, array(32, 16, 64), real_mesh(*sizes))
    assert plan.report.program.batch_axes == ("data",)
    assert abs(priced - sent) < 0.02 * sent, str(plan)


def test_rows_that_are_looked_up_and_added_elsewhere_are_priced_as_compiled():
    """Nodes at the edges of a graph are all-gathered, and messages all-reduced at the nodes."""
    nodes, edges = 256, 2048

    def loss(model, graph, key):
        x = graph["x"] @ model
        messages = jnp.tanh(x[graph["senders"]])
        inbox = jax.ops.segment_sum(messages, graph["receivers"], nodes)
        return jnp.mean((x + inbox) ** 2)

    ends = jax.ShapeDtypeStruct((edges,), jnp.int32)
    graph = {"x": array(nodes, 64), "senders": ends, "receivers": ends}
    mesh = rc.make_mesh()
    plan = rc.plan_shardings(array(64, 64), mesh, fn=loss, args=(graph, None))
    rows = NamedSharding(mesh, P("data"))
    step = jax.jit(
        jax.value_and_grad(plan.constrain(loss)),
        in_shardings=(plan.shardings, rows, None),
        out_shardings=(None, plan.shardings),
    )
    text = step.lower(array(64, 64), graph, None).compile().as_text()
    planned = sum(line.bytes for line in plan.report.program.traffic)
    assert planned == pytest.approx(sent_bytes(collectives(text, mesh)), rel=0.1)


def seconds_of(fn, model, batch, *, model_parallel):
    """The parts of a step's time on 8 devices of FSDP or tensor parallelism."""
    traced, _ = trace(fn, model, (batch, None))
    program = follow_program(traced, [True] * traced.arrays)
    sizes = {"data": 1, "fsdp": 8, "model": 1}
    if model_parallel:
        sizes = {"data": 1, "fsdp": 1, "model": 8}
    classes = Classes(program.graph, sizes["model"])
    rows = batch_dims(program, sizes["fsdp"])
    hidden = classes[program.parameters[0].nodes[0]]  # the first array is `down`
    problem = price(
        program.graph,
        classes,
        rows,
        {hidden: set()},
        program.parameters,
        rc.Hardware(),
        model=sizes["model"],
        fsdp=sizes["fsdp"],
        gradient_shards=sizes["fsdp"],
    )
    return problem.seconds(frozenset([hidden] * model_parallel))


def looked_up(model, batch, key):
    return jnp.mean(jnp.tanh(model["table"][batch]) ** 2)


def test_gathers_of_weights_hide_and_sums_of_activations_do_not():
    """Gathers of a table do not either, since a step begins with them."""
    layer = lambda model, x, key: jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)
    model, batch = {"down": array(4096, 512), "up": array(512, 4096)}, array(8192, 512)
    fsdp = seconds_of(layer, model, batch, model_parallel=False)
    weights = 2 * 512 * 4096 * 4
    # One gather, since there is no loop, and a scatter of the gradient.
    assert fsdp.hideable == pytest.approx(2 * 7 / 8 * weights / rc.Hardware().batch_bandwidth)
    assert fsdp.exposed < 0.01 * fsdp.hideable
    tensor = seconds_of(layer, model, batch, model_parallel=True)
    assert tensor.hideable == 0
    sums = 2 * 7 / 8 * 8192 * 512 * 4  # the input has no gradient
    assert tensor.exposed == pytest.approx(sums / rc.Hardware().model_bandwidth)
    assert tensor.of_step(overlaps=False) == tensor.arithmetic + tensor.exposed
    hidden = min(fsdp.arithmetic, fsdp.hideable)
    saved = fsdp.of_step(overlaps=False) - fsdp.of_step(overlaps=True)
    assert saved == pytest.approx(0.9 * hidden)
    ids = jax.ShapeDtypeStruct((8192,), jnp.int32)
    table = seconds_of(looked_up, {"table": array(4096, 512)}, ids, model_parallel=False)
    assert table.hideable == 0
    assert table.exposed > 0


@pytest.mark.parametrize(("has_residual", "sums"), [(False, 1), (True, 3)])
def test_cotangents_around_a_residual_connection_are_summed_one_by_one(has_residual, sums):
    """The compilers for A100 and TPU v4 add those of projections alone before they are summed, and
    not those of BERT's layers, where a residual connection reads the same value afterwards."""

    def loss(model, x, key):
        x = jnp.tanh(x @ model["in"])
        q, k, v = (jnp.tanh(x @ model[name]) for name in "qkv")
        y = (q * k * v) @ model["out"]
        if has_residual:
            y = x + y
        return jnp.mean(y**2)

    model = dict.fromkeys("qkv", array(64, 256)) | {"in": array(64, 64), "out": array(256, 64)}
    mesh = rc.make_mesh(model=4)
    overrides = [("in", P()), ("[qkv]", P(None, "model")), ("out", P("model"))]
    plan = rc.plan_shardings(
        model,
        mesh,
        fn=loss,
        args=(array(32, 64), None),
        overrides=overrides,
        hardware=rc.Hardware(),
    )
    sent = 0
    for entry in plan.report.program.traffic:
        if entry.axes == ("model",) and "backward" in entry.cause:
            sent += entry.bytes
    assert sent == sums * 2 * 3 / 4 * 16 * 64 * 4  # two groups of devices have 16 rows each


def test_weights_are_gathered_in_bfloat16_on_tpus():
    """The compiler for TPUs converts what products of default precision alone read before it
    gathers it, and not a table that is looked up in."""

    def loss(model, tokens, key):
        x = model["table"][tokens]
        return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"]) ** 2)

    model = {"table": array(256, 64), "up": array(64, 256), "down": array(256, 64)}
    tokens, planned = jax.ShapeDtypeStruct((64,), jnp.int32), {}
    for compiler in ("gpu", "tpu"):
        plan = rc.plan_shardings(
            model,
            rc.make_mesh(fsdp=8),
            fn=loss,
            args=(tokens, None),
            hardware=rc.Hardware(compiler=compiler),
        )
        traffic = plan.report.program.traffic
        planned[compiler] = sum(entry.bytes for entry in traffic if entry.kind == "parameters")
    of_table, of_matrices = 7 / 8 * 256 * 64 * 4, 7 / 8 * 2 * 256 * 64 * 4
    assert planned["gpu"] == of_table + of_matrices
    assert planned["tpu"] == of_table + of_matrices / 2


def test_rows_that_are_added_at_sorted_places_are_looked_up_backwards():
    """As by a mixture of experts: each device computes with sorted rows of all devices."""

    def loss(model, batch, key):
        order = jnp.argsort(batch[:, 0])
        x = batch @ model["in"]
        rows = jnp.tanh(x[order] @ model["out"])
        return jnp.mean((jnp.zeros_like(x).at[order].add(rows) * x) ** 2)

    model = {"in": array(32, 64), "out": array(64, 64)}
    planned, sent, _ = planned_and_sent(loss, model, array(512, 32), rc.make_mesh(data=8))
    assert planned == pytest.approx(sent, rel=0.05)


def test_messages_of_a_graph_are_scattered_on_gpus():
    """Compilers for GPUs sum messages at their nodes, and cotangents of nodes that are looked up,
    by reduce-scatters: five parts of what eight of them are for CPUs."""

    def loss(model, batch, key):
        x, sent, received = batch
        x = jnp.tanh(x @ model["in"])
        messages = jnp.tanh(jnp.concatenate([x[sent], x[received]], -1) @ model["edge"])
        return jnp.mean(jax.ops.segment_sum(messages, received, len(x)) ** 2)

    model = {"in": array(32, 64), "edge": array(128, 64)}
    edges = jax.ShapeDtypeStruct((1024,), jnp.int32)
    priced = {}
    for compiler in ("cpu", "gpu"):
        plan = rc.plan_shardings(
            model,
            rc.make_mesh(data=8),
            fn=loss,
            args=((array(512, 32), edges, edges), None),
            hardware=rc.Hardware(compiler=compiler, scatters=compiler == "gpu"),
        )
        traffic = plan.report.program.traffic
        priced[compiler] = sum(entry.bytes for entry in traffic if "by index" in entry.cause)
    of_nodes = 7 / 8 * 512 * 64 * 4
    assert priced == {"cpu": 8 * of_nodes, "gpu": 5 * of_nodes}


@pytest.mark.parametrize(("data", "model"), [(1, 8), (2, 4)])
def test_a_loop_over_examples_sends_what_all_of_its_iterations_send(data, model):
    """`jax.lax.map` makes one product for each example of a device: what they gather was priced as
    for one example, and what they sum as for those of all devices."""

    def layer(params, x):
        x = x / jnp.sqrt(1e-5 + jnp.mean(x**2, axis=-1, keepdims=True))
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    params, batch = [{"up": array(256, 512), "down": array(512, 256)}] * 2, array(8, 64, 256)
    overrides = [(".*up", P(None, "model")), (".*down", P("model", None))]
    sent = []
    for over_rows in (jax.vmap, lambda fn: lambda rows: jax.lax.map(fn, rows)):

        def loss_fn(params, x, key, over_rows=over_rows):
            for of_layer in params:
                x = over_rows(ft.partial(layer, of_layer))(x)
            return jnp.mean(x**2)

        mesh, args = rc.make_mesh(data=data, model=model), (batch, None)
        plan = rc.plan_shardings(
            params, mesh, fn=loss_fn, args=args, overrides=overrides, sequence=True
        )
        over_model = {}
        for entry in plan.report.program.traffic:
            if entry.axes == ("model",):
                over_model[entry.cause] = entry.bytes
        sent.append(over_model)
    by_vmap, by_map = sent
    assert len(by_vmap) == 4
    assert by_map == by_vmap


OVER_EXAMPLES = {
    "order along a tensor-parallel dimension": (
        P(),
        lambda params, x: jnp.flip(jnp.tanh(x @ params["up"]), -1) @ params["down"],
    ),
    "halos": (P("data", "fsdp"), lambda params, x: jnp.convolve(x[:, 0], params["up"][0, :3])),
    "rolled rows": (
        P("data", "fsdp"),
        lambda params, x: jnp.roll(x * params["up"][:1, :64], 3, axis=0),
    ),
    "sorted rows": (
        P("data", "fsdp"),
        lambda params, x: jnp.sort(x * params["up"][:1, :64], axis=0),
    ),
    "rows by index": (
        P("data", "fsdp"),
        lambda params, x: (x * params["up"][:1, :64])[jnp.arange(64) // 2],
    ),
}


@pytest.mark.parametrize("name", OVER_EXAMPLES)
def test_a_loop_over_examples_moves_what_is_on_a_device(name):
    """What is gathered, exchanged or looked up in each iteration is that of a device's examples:
    it was priced as for those of all devices."""
    spec, layer = OVER_EXAMPLES[name]
    params = {"up": array(64, 128), "down": array(128, 64)}
    mesh, overrides = rc.make_mesh(data=2, fsdp=4), []
    if spec == P():
        mesh, overrides = rc.make_mesh(data=2, model=4), [(".*up", P(None, "model"))]
        overrides.append((".*down", P("model", None)))
    moved = []
    for over_rows in (jax.vmap, lambda fn: lambda rows: jax.lax.map(fn, rows)):

        def loss_fn(params, x, key, over_rows=over_rows):
            if spec != P():
                x = jax.lax.with_sharding_constraint(x, spec)
            return jnp.mean(over_rows(ft.partial(layer, params))(x) ** 2)

        args = array(4, 64, 64), None
        plan = rc.plan_shardings(params, mesh, fn=loss_fn, args=args, overrides=overrides)
        by_cause = {}
        for entry in plan.report.program.traffic:
            if "summed" not in entry.cause and "sums" not in entry.cause:
                by_cause[entry.cause] = entry.bytes
        moved.append(by_cause)
    by_vmap, by_map = moved
    assert by_vmap
    assert by_map == by_vmap


def in_loop(layer):
    def run(x, model):
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, model)[0]

    return run


def one_by_one(layer):
    return lambda x, model: ft.reduce(layer, model, x)


CASTING = {
    "layers": one_by_one,
    "in jit": lambda layer: one_by_one(jax.jit(layer)),
    "rematerialised": lambda layer: one_by_one(jax.checkpoint(layer)),
    "in a loop": in_loop,
    "rematerialised in a loop": lambda layer: in_loop(jax.checkpoint(layer)),
}


@pytest.mark.parametrize("name", CASTING)
def test_what_is_cast_is_gathered_in_the_dtype_of_the_cast(name):
    """As the constrained program gathers it, whose only whole weights are cast ones."""
    mesh = rc.make_mesh(data=1, fsdp=8)
    model = [array(1024, 1024) for _ in range(2)]
    if "loop" in name:
        model = array(2, 1024, 1024)

    def gathered(dtype):
        layer = lambda x, w: jax.nn.relu(x.astype(dtype) @ w.astype(dtype)).astype(x.dtype)

        def loss_fn(model, x, key):
            return jnp.mean(CASTING[name](layer)(x, model) ** 2)

        args = array(64, 1024), None
        plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=args)
        whole = set()
        for equation in iter_equations(jax.make_jaxpr(plan.constrain(loss_fn))(model, *args)):
            if equation.primitive.name == "sharding_constraint":
                result = struct_of(equation.outvars[0])
                if result.shape == (1024, 1024) and not any(equation.params["sharding"].spec):
                    whole.add(result.dtype)
        assert whole == {jnp.dtype(dtype)}
        traffic = plan.report.program.traffic
        return sum(t.bytes for t in traffic if t.cause.startswith("all-gathers of parameters"))

    assert gathered(jnp.float32) == 2 * gathered(jnp.bfloat16) > 0
