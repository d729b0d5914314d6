"""Layers that are a scan run as a pipeline, with the results of one device."""

import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from jax.sharding import AbstractMesh
from processes import run_processes

import redcoast as rc
from redcoast.dryrun._devices import target_place
from redcoast.dryrun._job import make_job
from redcoast.dryrun._mesh_search import likely
from redcoast.dryrun.hlo import collectives, peak_bytes, sent_bytes
from redcoast.losses import cross_entropy
from redcoast.models import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mixtral,
    MixtralConfig,
    T5Config,
)
from redcoast.sharding.pipeline._draws import RandomBits, _counters, draw_rows
from redcoast.sharding.pipeline._stages import NoPipeline, count_microbatches

KEY = jax.random.key(0)
ROWS = 16
SIZES: dict[str, Any] = {"vocab": 64, "width": 32, "layers": 4, "heads": 4}
MESHES = [{"pipe": 4, "data": 2}, {"pipe": 2, "fsdp": 2, "model": 2}, {"pipe": 2, "fsdp": 4}]


def tokens():
    return jax.random.randint(KEY, (ROWS, 12), 0, 64)


def batch():
    return {"tokens": tokens(), "mask": jax.random.bernoulli(KEY, 0.8, (ROWS, 12))}


def next_token(model, batch, key):
    logits = model(batch["tokens"], mask=batch["mask"], key=key)
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:], mask=batch["mask"][:, 1:])


def with_router(model, batch, key):
    hidden, router = model.hidden_and_router_loss(batch["tokens"], mask=batch["mask"], key=key)
    logits = model.unembed(hidden)
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:]) + 0.1 * router


def encoded(model, batch, key):
    return jnp.mean(jnp.tanh(model(batch["tokens"], mask=batch["mask"], key=key)))


def translated(model, batch, key):
    source, mask = batch["tokens"], batch["mask"]
    logits = model(source, source, mask=mask, key=key)
    return cross_entropy(logits[:, :-1], source[:, 1:])


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    dropout: eqx.nn.Dropout

    def __init__(self, *, key):
        self.norm, self.dropout = eqx.nn.LayerNorm(32), eqx.nn.Dropout(0.2)
        self.attention = eqx.nn.MultiheadAttention(4, 32, key=key)

    def __call__(self, x, key):
        y = jax.vmap(self.norm)(x)
        return x + self.dropout(self.attention(y, y, y), key=key)


class Stranger(eqx.Module):
    """A model in the way of Equinox: of one example, with blocks that `filter_vmap` stacks."""

    embed: eqx.nn.Embedding
    blocks: Block

    def __init__(self, *, key):
        self.embed = eqx.nn.Embedding(64, 32, key=key)
        self.blocks = eqx.filter_vmap(lambda key: Block(key=key))(jax.random.split(key, 4))

    def __call__(self, tokens, key):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def run(carry, layer):
            x, key = carry
            key, own = jax.random.split(key)
            return (eqx.combine(layer, static)(x, own), key), None

        (x, _), _ = jax.lax.scan(run, (jax.vmap(self.embed)(tokens), key), arrays)
        return x @ self.embed.weight.T


def of_examples(model, batch, key):
    keys = jax.random.split(key, batch["tokens"].shape[0])
    logits = jax.vmap(model)(batch["tokens"], keys)
    return cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])


# Dropout is on in all that have it.
MODELS = {
    "gpt2": (lambda key: GPT2(GPT2Config(**SIZES, hidden=64, positions=16), key=key), next_token),
    "llama, remat": (
        lambda key: Llama(LlamaConfig(**SIZES, kv_heads=2, hidden=64, remat="full"), key=key),
        next_token,
    ),
    "t5": (
        lambda key: T5(T5Config(**SIZES, decoder_layers=4, hidden=64, dropout=0.1), key=key),
        translated,
    ),
    "bert": (lambda key: Bert(BertConfig(**SIZES, hidden=64, positions=16), key=key), encoded),
    "mixtral": (
        lambda key: Mixtral(
            MixtralConfig(
                **SIZES, kv_heads=2, hidden=64, experts=4, chosen=2, attention_dropout=0.1
            ),
            key=key,
        ),
        with_router,
    ),
    "stranger": (lambda key: Stranger(key=key), of_examples),
}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thorough
def test_losses_and_gradients_of_models_are_those_of_one_device(name, sizes):
    """With dropout, masks and rematerialisation."""
    init_fn, loss_fn = MODELS[name]
    plan = rc.plan_shardings(init_fn(KEY), rc.make_mesh(**sizes), fn=loss_fn, args=(batch(), KEY))
    assert pipeline_of(plan).stages == sizes["pipe"]
    plan.verify(loss_fn, init_fn(KEY), batch(), KEY, tolerance=1e-5)


def pipeline_of(plan):
    assert plan.report.program.pipeline is not None
    return plan.report.program.pipeline


# A program of a few operations, which compiles in a second.
SMALL = {"embed": jax.random.normal(KEY, (64, 8)), "w": jax.random.normal(KEY, (4, 8, 8))}


def small(model, batch, key):
    """Layers with dropout, a sum over rows in the carry, and one in what is stacked."""
    x = model["embed"][batch]

    def run(carry, inputs):
        x, total = carry
        w, key = inputs
        y = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), jnp.tanh(x @ w), 0)
        return (x + y, total + jnp.sum(y * y, (0, 1))), jnp.sum(jnp.abs(y))

    (x, total), sums = jax.lax.scan(run, (x, jnp.ones(8)), (model["w"], jax.random.split(key, 4)))
    return jnp.mean(x**2) + jnp.mean(total) / 100 + jnp.mean(sums) / 100


def plan_small(mesh, fn=small, **options):
    return rc.plan_shardings(SMALL, mesh, fn=fn, args=(tokens(), KEY), **options)


@pytest.mark.parametrize("sizes", few_of([*MESHES, {"pipe": 4, "data": 1, "model": 2}], MESHES[0]))
def test_a_pipeline_is_exact_and_sends_what_the_plan_says(sizes):
    """Losses, gradients, sums and random numbers of one device; bytes of the compiled program."""
    mesh = rc.make_mesh(**sizes)
    plan = plan_small(mesh)
    model = jax.device_put(SMALL, plan.shardings)
    step = jax.jit(jax.value_and_grad(plan.constrain(small)), out_shardings=(None, plan.shardings))
    compiled = step.lower(model, tokens(), KEY).compile()
    actual = compiled(model, tokens(), KEY)
    expected = jax.jit(jax.value_and_grad(small))(SMALL, tokens(), KEY)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        *[jax.device_get(one) for one in (actual, expected)],
    )
    sent = collectives(compiled.as_text(), mesh)
    estimated = sum(one.bytes for one in plan.report.program.traffic)
    # Emulated devices have no reduce-scatter, and sums of scalars are not estimated.
    assert 0.7 * sent_bytes(sent) < estimated < 1.1 * sent_bytes(sent)
    next_stage = [one.bytes for one in plan.report.program.traffic if "next" in one.cause]
    assert next_stage == [pipeline_of(plan).bytes]


def abstract(**sizes):
    sizes = {"pipe": 1, "data": 1, "fsdp": 1, "model": 1} | sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def test_the_plan_says_how_layers_are_divided(tmp_path):
    plan = plan_small(abstract(pipe=4, data=2), microbatches=4)
    actual = pipeline_of(plan)
    assert (actual.stages, actual.layers, actual.microbatches) == (4, (1,), 4)
    assert actual.bubble == pytest.approx(3 / 7)
    assert "4-way pipeline parallel x 2-way data parallel" in str(plan)
    assert "4 stages of 1 layer, 4 microbatches, bubble 43%" in str(plan)
    assert plan.shardings["w"].spec == jax.sharding.PartitionSpec("pipe")
    assert plan.shardings["embed"].spec == jax.sharding.PartitionSpec()
    (array,) = [one for one in plan.report.arrays if one.path == "w"]
    assert array.reason.kind == "pipeline"
    assert "on its stage" in str(plan)
    assert "divided over the stages" in plan.table()
    # A stage does a quarter of the work in the layers, and waits for 3 of 7 ticks.
    flops = plan.report.program.arithmetic
    assert flops.per_device == pytest.approx(flops.flops / 2 / 4 * 7 / 4)
    rc.save_plan(plan, tmp_path / "plan.json")
    loaded = rc.load_plan(tmp_path / "plan.json", SMALL, abstract(pipe=4, data=2))
    assert loaded.report.program.pipeline == actual
    assert loaded.compute.microbatches == 4
    assert json.dumps(plan.report.to_json())


def test_stages_of_a_plan_hold_their_layers_memory():
    one, four = (plan_small(abstract(pipe=n, data=2)) for n in (1, 4))
    arrays = lambda plan: {one.path: one.bytes_per_device for one in plan.report.arrays}
    assert arrays(four)["w"] == arrays(one)["w"] // 4
    assert four.report.program.memory.gradients < one.report.program.memory.gradients


def test_the_gradients_of_ticks_and_of_microbatches_are_both_in_memory():
    """With `accumulate`, the sum over the ticks of a pipeline is added to another sum."""
    weights = {"w": jnp.zeros((8, 256, 256)), "v": jnp.zeros((8, 256, 256))}

    def loss_fn(model, batch, key):
        layer = lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None)
        return jnp.mean(jax.lax.scan(layer, batch, model)[0] ** 2)

    mesh = rc.make_mesh(pipe=2, data=2, devices=jax.devices()[:4])
    batch = jnp.ones((32, 256))
    state, step, plan = rc.prepare(
        weights, optax.sgd(0.1), loss_fn, batch, mesh=mesh, accumulate=2, key=KEY
    )
    compiled = step.lower(state, batch).compile()
    measured = peak_bytes(compiled.memory_analysis(), "cpu")
    assert plan.report.program.memory.total == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("rows", "stages", "count"), [(64, 4, 32), (16, 4, 16), (27 * 2, 4, 27), (18, 2, 9), (7, 2, 7)]
)
def test_as_many_microbatches_as_keep_the_bubble_under_a_tenth(rows, stages, count):
    """The fewest that do, of those that divide; all rows if none does."""
    assert count_microbatches(rows, 1, stages, None) == count
    bubble = (stages - 1) / (count + stages - 1)
    assert bubble <= 0.1 or count == rows


def test_microbatches_that_do_not_divide_are_refused():
    with pytest.raises(NoPipeline, match="`microbatches=3` does not divide the 8 rows"):
        count_microbatches(16, 2, 4, 3)
    with pytest.raises(ValueError, match="`microbatches=3` does not divide"):
        plan_small(abstract(pipe=4, data=2), microbatches=3)
    with pytest.raises(ValueError, match="the mesh has none"):
        plan_small(abstract(data=2), microbatches=2)


def scanned(body, init=None):
    """A loss whose layers are `body`."""

    def loss(model, batch, key):
        x = model["embed"][batch]
        x = jax.lax.scan(body, x if init is None else init(x), model["w"])[0]
        return jnp.mean(x**2)

    return loss


def normalised(x, w):
    y = x @ w
    return (y - jnp.mean(y, (0, 1), keepdims=True)) / 2, None


def rolled(x, w):
    return x @ w + jnp.roll(x, 1, axis=0), None


def across(x, w):
    return x + jnp.einsum("bsd,csd,cse->bse", x, x, x @ w), None


def first(x, w):
    return x @ w + x[:1], None


def numbered(x, w):
    return x @ w + jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None], None


def ordered(x, w):
    return jnp.sort(x @ w, axis=0), None


def rounded(x, w):
    return x @ w + jnp.tanh(jnp.sum(x, (0, 1), keepdims=True)), None


def slow_noise(x, w):
    key = jax.random.key(0, impl="rbg")
    return x @ w + jax.random.normal(key, x.shape), None


def until_small(x, w):
    return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x @ w), None


def until_rows_are_small(x, w):
    return jax.lax.while_loop(lambda x: x[0, 0, 0] > 1, lambda x: x / 2, x @ w), None


def plain(x, w):
    return jnp.tanh(x @ w), None


def flat(x):
    return x.reshape(-1, x.shape[-1])


def flat_dropout(x, w):
    kept = jax.random.bernoulli(jax.random.key(0), 0.8, x.shape)
    return x + jnp.where(kept, jnp.tanh(x @ w), 0.0), None


def written(x, w):
    y = x @ w
    swapped = jnp.swapaxes(y[:, :, 1], 0, 1).reshape(-1)
    return x + flat(y).at[:, 0].set(swapped).reshape(x.shape), None


def counted(x, w):
    y = jnp.tanh(x @ w)
    return y, (jnp.sum((y > 0.1).astype(jnp.uint32)) // jnp.uint32(7)).astype(x.dtype)


def unrolled(model, batch, key):
    x = model["embed"][batch]
    for w in model["w"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


REFUSED = {
    "batch norm": (scanned(normalised), {}, "depends on the number of rows, as in a mean"),
    "roll": (scanned(rolled), {}, "`slice` depends on the number of rows"),
    "attention between rows": (scanned(across), {}, "rows"),
    "first row": (scanned(first), {}, "rows"),
    "numbers of rows": (scanned(numbered), {}, "`iota` numbers the rows"),
    "sort": (scanned(ordered), {}, "`sort` is applied along rows"),
    "statistic": (scanned(rounded), {}, "`tanh` is applied to a sum over rows"),
    "dropout of tokens": (scanned(flat_dropout, flat), {}, "a dimension that joins rows"),
    "places of tokens": (scanned(written), {}, "`scatter` combines rows with other rows"),
    "rounded sum": (scanned(counted), {}, "`div` is applied to a sum over rows"),
    "loop until all rows": (scanned(until_small), {}, "`reduce_max` reduces over rows"),
    "loop until one row": (scanned(until_rows_are_small), {}, "rows"),
    "generator": (scanned(slow_noise), {}, "another generator"),
    "no batch": (scanned(plain, lambda x: jnp.mean(x, (0, 1))), {}, "no batch dimension"),
    "no scan": (unrolled, {}, "Its layers are not a scan"),
    "layers": (scanned(plain), {"pipe": 3}, "4 layers do not divide over pipe=3; 2 or 4 stages"),
    "rows": (scanned(plain), {"data": 3}, "16 rows, which do not divide over 3"),
    "reverse": (
        lambda model, batch, key: jnp.mean(
            jax.lax.scan(plain, model["embed"][batch], model["w"], reverse=True)[0]
        ),
        {},
        "reversed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_pipeline_is_refused_with_the_reason(name):
    fn, sizes, why = REFUSED[name]
    with pytest.raises(ValueError, match=why) as error:
        plan_small(abstract(**{"pipe": 4, "data": 2} | sizes), fn=fn)
    assert "A mesh without `pipe` has no such requirement" in str(error.value)


@pytest.mark.thorough
def test_a_prediction_needs_no_pipeline():
    """On such a mesh it is computed by all devices, and layers stay where they are."""
    mesh = rc.make_mesh(pipe=4, data=2)
    plan = plan_small(mesh)
    predict = lambda model, batch: jax.lax.scan(plain, model["embed"][batch], model["w"])[0]
    actual = jax.jit(plan.constrain(predict))(jax.device_put(SMALL, plan.shardings), tokens())
    np.testing.assert_allclose(actual, predict(SMALL, tokens()), rtol=1e-5)


@pytest.mark.thorough
def test_a_batch_that_cannot_be_a_pipeline_is_computed_with_a_warning():
    """Such as the last one of an evaluation."""
    plan = plan_small(rc.make_mesh(pipe=4, data=2), microbatches=4)
    few = tokens()[:3]
    with pytest.warns(UserWarning, match="3 rows; a pipeline needs four or more"):
        actual = jax.jit(plan.constrain(small))(jax.device_put(SMALL, plan.shardings), few, KEY)
    np.testing.assert_allclose(actual, small(SMALL, few, KEY), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("width", [8, 32])
def test_rows_draw_the_numbers_of_one_device(width):
    draw = RandomBits(1, (3, 8, 5))
    rows = jnp.asarray([1, 6])
    expected = jax.random.bits(KEY, draw.shape, f"uint{width}")[:, rows]
    np.testing.assert_array_equal(draw_rows(KEY, draw, rows, width), expected)


@pytest.mark.thorough
def test_places_beyond_32_bits_are_counted():
    """Of an array whose numbers could not be drawn here."""
    shape = (2**20, 3, 2**17 + 5)
    high, low = _counters(RandomBits(0, shape), jnp.asarray([2**20 - 1, 12345]))
    at = lambda i, j, k: (i * shape[1] + j) * shape[2] + k
    for place, row in enumerate([2**20 - 1, 12345]):
        number = int(high[place, 2, 77]) << 32 | int(low[place, 2, 77])
        assert number == at(row, 2, 77)


@pytest.mark.thorough
@pytest.mark.parametrize("beams", [1, 2])
def test_text_that_is_generated_is_that_of_one_device(beams):
    """Each layer stays on its stage."""
    model = Llama(LlamaConfig(**SIZES, kv_heads=2, hidden=64), key=KEY)
    mesh = rc.make_mesh(pipe=2, data=2, model=2)
    plan = rc.plan_shardings(model, mesh, fn=next_token, args=(batch(), KEY))
    placed = jax.device_put(model, plan.shardings)
    assert placed.layers.wq.sharding.spec[0] == "pipe"
    options: Any = {"max_new_tokens": 6, "decoding": rc.Decoding(beams=beams)}
    expected = rc.generate(model, tokens(), **options)
    np.testing.assert_array_equal(rc.generate(placed, tokens(), **options), expected)


@pytest.mark.thorough
def test_a_run_is_that_of_one_device_and_resumes_on_another_mesh(tmp_path):
    """With accumulation, evaluation and checkpoints."""
    examples = np.asarray(jax.random.randint(KEY, (64, 12), 0, 64))
    options = {
        "collate_fn": np.stack,
        "loss_fn": small,
        "batch_size": 32,
        "accumulate": 2,
        "log": False,
    }
    train = lambda steps, mesh, **more: rc.fit(
        SMALL, optax.adam(1e-2), examples, steps=steps, mesh=mesh, **options, **more
    )
    expected = train(4, rc.make_mesh(devices=jax.devices()[:1]))
    kept = rc.Checkpoints(tmp_path)
    evaluation = rc.Evaluation(examples[:24], every=2)
    train(2, rc.make_mesh(pipe=4, data=2), checkpoints=kept, evaluation=evaluation)
    actual = train(4, rc.make_mesh(fsdp=8), checkpoints=kept)
    again = train(4, rc.make_mesh(pipe=2, fsdp=2, model=2))
    for one in (actual, again):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), one.model, expected.model
        )


# Two stages, each of one process.
PROCESS = """
import sys
import jax, numpy as np, optax
import redcoast as rc
rc.initialize()
sys.path.insert(0, sys.argv[1])
from test_pipeline import SMALL, KEY, small
examples = np.asarray(jax.random.randint(KEY, (64, 12), 0, 64))
mesh = rc.make_mesh(pipe=2, data=2, fsdp=2)
assert {d.process_index for d in mesh.devices[0].flat} == {0}
losses = []
rc.fit(SMALL, optax.adam(1e-2), examples, collate_fn=np.stack, loss_fn=small, batch_size=32,
       steps=4, mesh=mesh, log=lambda values, step: losses.append(float(values["loss"])))
print("losses", *losses)
"""


@pytest.mark.integration
def test_stages_in_two_processes_train_as_one_device():
    losses = []
    rc.fit(
        SMALL,
        optax.adam(1e-2),
        np.asarray(jax.random.randint(KEY, (64, 12), 0, 64)),
        collate_fn=np.stack,
        loss_fn=small,
        batch_size=32,
        steps=4,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        log=lambda values, step: losses.append(float(values["loss"])),
    )
    finished = run_processes(PROCESS, Path(__file__).parent, processes=2, devices=4)
    assert [code for code, _ in finished] == [0, 0], finished
    # The first process logs.
    (line,) = [line for line in finished[0][1].splitlines() if line.startswith("losses")]
    np.testing.assert_allclose([*map(float, line.split()[1:])], losses, rtol=1e-5)


@pytest.mark.few("4096-a100-80gb:4-False")
@pytest.mark.parametrize(
    ("rows", "target", "staged"), [(256, "a100-80gb:4x1", True), (4096, "a100-80gb:4", False)]
)
def test_stages_are_chosen_where_they_save_time(rows, target, staged):
    """With large weights for a small batch over a network, not with a large batch in a machine."""
    init = lambda key: {"embed": jnp.zeros((64, 2048)), "w": jnp.zeros((32, 2048, 2048))}
    batch = jax.ShapeDtypeStruct((rows, 8), jnp.int32)
    job = make_job(init, scanned(plain), batch, optax.sgd(0.1))
    assert ("pipe" in likely(job, target_place(target))[0]) == staged
