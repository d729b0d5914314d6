"""What the planner decides for models whose best splits are known."""

import gc
import inspect
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grammar import Sizes, attend, program
from grids import few_of
from jax import lax
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, mesh_of, real_mesh, train_state

import redcoast as rc
from redcoast.sharding.solver._hardware import DEFAULT_MEMORY, FILLED


def plan_of(fn, model, batch, shape=(1, 1, 8), **options):
    return rc.plan_shardings(model, mesh_of(*shape), fn=fn, args=(batch, None), **options)


def specs(plan):
    return {row.path: tuple(row.spec) for row in plan.report.arrays}


def computed(plan):  # the dimension of each array that is computed split, or None
    return dict(zip(specs(plan), plan.compute.dims, strict=True))


def causes(plan):
    return {entry.cause: entry.bytes for entry in plan.report.program.traffic}


def mlp_loss(p, x, key):
    return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)


def mlp(width=512, hidden=2048):
    return {"down": array(hidden, width), "up": array(width, hidden)}


SMALL = Sizes(batch=8, time=512, width=1024, hidden=4096, heads=16, experts=8, vocabulary=32_000)
SHAPES = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2)]


@pytest.mark.parametrize("shape", few_of(SHAPES, (1, 1, 8)))
def test_transformers_are_split_as_megatron_does(shape):
    # For twice as many tokens, it is cheaper to gather the weights.
    sizes = replace(SMALL, time=256)
    fn, model, batch = program(["norm", "attention", "norm", "gated"] * 2, sizes)
    actual = computed(plan_of(fn, model, batch, shape))
    for first in (0, 4):
        layer = {path.split("/")[1]: d for path, d in actual.items() if path[0] in f"{first + 1}"}
        assert layer == {"q": 1, "k": 1, "v": 1, "o": 0}
        layer = {path.split("/")[1]: d for path, d in actual.items() if path[0] in f"{first + 3}"}
        assert layer == {"gate": 1, "up": 1, "down": 0}
    assert actual["embed"] == 0
    assert actual["0 norm/scale"] is None


def test_layers_behind_each_other_alternate():
    def loss(model, x, key):
        for w in model:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    plan = plan_of(loss, [array(1024, 1024)] * 6, array(64, 1024))
    assert list(plan.compute.dims) == [1, 0] * 3


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_experts_are_split_among_devices(shape):
    plan = plan_of(*program(["experts"], SMALL), shape)
    actual = computed(plan)
    assert [actual[f"0 experts/{name}"] for name in ("up", "down", "router")] == [0, 0, 1]


def test_an_inner_gradient_step_is_split_as_the_model_is():
    def loss(params, tasks, key):
        def adapted(x):
            grads = jax.grad(mlp_loss)(params, x, None)
            return mlp_loss(jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x, None)

        return jnp.mean(jax.vmap(adapted)(tasks))

    assert computed(plan_of(loss, mlp(), array(4, 16, 512))) == {"down": 0, "up": 1}


LOGICAL = {
    "embed": (8192, 512),
    **dict.fromkeys("qkv", (512, 8, 64)),
    "o": (8, 64, 512),
    "up": (512, 2048),
    "down": (2048, 512),
}


class Model(eqx.Module):
    """Fields in another order than they are computed with."""

    down: jax.ShapeDtypeStruct
    embed: jax.ShapeDtypeStruct
    k: jax.ShapeDtypeStruct
    q: jax.ShapeDtypeStruct
    o: jax.ShapeDtypeStruct
    v: jax.ShapeDtypeStruct
    up: jax.ShapeDtypeStruct


def decoder_loss(p, tokens, key):
    x = p["embed"][tokens]
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
    x = x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), p["o"])
    x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    logits = x @ p["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens))


# For each way to store the arrays: the tree, and how to find an array by its name.
arrays = {name: array(*shape) for name, shape in LOGICAL.items()}
by_number = {name: f"b{(5 * i) % 7}" for i, name in enumerate(LOGICAL)}
STORED = {
    "dict": (arrays, lambda tree, name: tree[name]),
    "module": (Model(**arrays), getattr),
    "list": (list(arrays.values()), lambda tree, name: tree[list(LOGICAL).index(name)]),
    "names": ({by_number[n]: x for n, x in arrays.items()}, lambda t, n: t[by_number[n]]),
    "nested": ({"x": [arrays, {}], "y": None}, lambda tree, name: tree["x"][0][name]),
}


@pytest.mark.parametrize("shape", few_of(SHAPES, *list(SHAPES)[:1]))
@pytest.mark.parametrize("transposed", few_of([False, True], True))
@pytest.mark.parametrize("stored", few_of(STORED, "module", "nested"))
def test_the_same_plan_however_the_model_is_stored(stored, transposed, shape):
    tree, get = STORED[stored]
    if transposed:
        tree = jax.tree.map(lambda x: array(*x.shape[::-1]), tree)

    def loss(tree, tokens, key):
        p = {name: get(tree, name) for name in LOGICAL}
        return decoder_loss(jax.tree.map(jnp.transpose, p) if transposed else p, tokens, key)

    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    expected = plan_of(decoder_loss, arrays, tokens, shape).shardings
    actual = plan_of(loss, tree, tokens, shape).shardings
    for name, size in LOGICAL.items():
        # Specs leave out what is whole at the end.
        mine, theirs = (
            [*spec, *[None] * (len(size) - len(spec))]
            for spec in (get(actual, name).spec, expected[name].spec)
        )
        assert (mine[::-1] if transposed else mine) == theirs, name


def filtered(p, x, key):
    """A convolution, a filter of frequencies, and a stack of layers."""
    x = lax.conv_general_dilated(
        x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    spectrum = jnp.fft.rfft2(x, axes=(1, 2)) * p["filter"].astype(jnp.complex64)[None]
    x = jnp.fft.irfft2(spectrum, axes=(1, 2))
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])
    return jnp.mean(x**2)


def plan_filtered(shape):
    """What must not be split is the largest dimension, and divides."""
    model = {
        "kernel": array(64, 64, 8, 64),
        "filter": array(64, 33, 64),
        "stack": array(512, 64, 64),
    }
    return plan_of(filtered, model, array(8, 64, 64, 8), shape)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 8, 1)])
def test_space_and_stacked_layers_are_never_split(shape):
    plan = plan_filtered(shape)
    actual = specs(plan)
    assert not any(actual["kernel"][:2])
    assert not any(actual["stack"][:1])
    assert any(actual["kernel"])
    assert plan.report.program.unknown == {}


def test_spectra_are_never_split():
    assert not any(specs(plan_filtered((1, 1, 8)))["filter"][:2])


def test_heads_and_vocabularies_that_do_not_divide_say_what_would():
    sizes = Sizes(batch=8, time=512, width=768, hidden=3072, heads=12, vocabulary=50_257)
    plan = plan_of(*program(["attention", "mlp"], sizes))
    rows = {row.path: row for row in plan.report.arrays}
    query = rows["0 attention/q"]
    assert query.parts == 8
    assert computed(plan)["0 attention/q"] is None
    assert query.reason.kind == "fsdp"
    assert all(text in query.reason.text for text in ("12", "8 or 16"))
    assert rows["embed"].spec == P(None, "model")
    assert all(text in rows["embed"].reason.text for text in ("50257", "50256 or 50264"))
    for size in ("8 or 16", "50256 or 50264"):
        assert size in " ".join(plan.table().split())


def test_frozen_arrays_have_no_gradients_to_send():
    fn, x = mlp_loss, array(64, 512)
    every = plan_of(fn, mlp(), x, (8, 1, 1))
    part = plan_of(fn, mlp(), x, (8, 1, 1), trainable={"down": True, "up": False})
    gradients = "gradients, summed over the batch"
    assert causes(every)[gradients] == 2 * causes(part)[gradients] == 2 * 7 * 512 * 2048
    assert every.report.program.memory.gradients == 2 * part.report.program.memory.gradients
    none = plan_of(fn, mlp(), x, (8, 1, 1), trainable=lambda leaf: False)
    assert gradients not in causes(none)


def test_what_is_computed_together_follows_an_override():
    x = array(64, 512)
    assert computed(plan_of(mlp_loss, mlp(), x)) == {"down": 0, "up": 1}
    plan = plan_of(mlp_loss, mlp(), x, overrides=[("up", P("model"))])
    assert computed(plan)["up"] == 0
    assert specs(plan)["up"] == ("model",)
    rows = {row.path: row.reason.kind for row in plan.report.arrays}
    assert rows["up"] == "override"
    plan = plan_of(mlp_loss, mlp(), x, overrides=[("down", P("model"))])
    assert computed(plan) == {"down": 0, "up": 1}
    assert "down" in {row.path: row.reason.together for row in plan.report.arrays}["up"]


def test_a_training_state_has_its_optimizers_state_split_as_its_model():
    state = train_state(mlp(), optax.adam(1e-3))
    x = array(4096, 512)
    plan = plan_of(mlp_loss, state, x, (1, 2, 4))
    inside = plan_of(mlp_loss, mlp(), x, (1, 2, 4))
    assert specs(inside) == {"down": ("model", "fsdp"), "up": ("fsdp", "model")}
    assert plan.shardings.model == inside.shardings
    assert plan.shardings.opt_state[0].mu == plan.shardings.opt_state[0].nu == inside.shardings
    assert plan.compute == inside.compute


def test_a_budget_splits_only_what_is_needed():
    def loss(p, x, key):
        for name in ("large", "medium", "small"):
            x = jnp.tanh(x @ p[name]) @ p[name].T
        return jnp.mean(x**2)

    sizes = {"large": 4096, "medium": 2048, "small": 1024}
    model, x = {name: array(256, size) for name, size in sizes.items()}, array(8192, 256)
    plan = lambda budget: plan_of(loss, model, x, (1, 8, 1), budget=budget)
    whole = plan(10**12)
    assert set(specs(whole).values()) == {()}
    # An array that is split makes room for seven eighths of itself and of its gradient.
    room = {name: 2 * 7 * 256 * size * 4 // 8 for name, size in sizes.items()}
    needed = whole.report.program.memory.total
    split = lambda plan: {name for name, spec in specs(plan).items() if spec}
    assert split(plan(needed)) == set()
    assert split(plan(needed - 1)) == {"large"}
    assert split(plan(needed - room["large"])) == {"large"}
    assert split(plan(needed - room["large"] - 1)) == {"large", "medium"}
    assert split(plan(needed - sum(room.values()))) == set(sizes)
    with pytest.raises(
        ValueError, match=r"budget of [\d.,]+ MB for each device is too small.*fsdp=8"
    ):
        plan(needed - sum(room.values()) - 1)


def test_the_batch_goes_over_model_where_nothing_is_worth_computing_split():
    few, many = (plan_of(mlp_loss, mlp(64, 64), array(n, 64)) for n in (7, 2**16))
    assert few.report.program.batch_axes == ()
    assert many.report.program.batch_axes == ("model",)
    assert set(many.compute.dims) == {None}
    assert "tensor parallelism would cost more" in many.report.program.batch


def test_fsdp_that_is_asked_for_is_tensor_parallelism_only_where_it_does_not_fit():
    """Few examples for so many parameters: FSDP sends more, and fewer gathers hide."""
    mesh = rc.make_mesh(fsdp=8, data=1)
    params = {"up": array(1024, 4096), "down": array(4096, 1024)}
    batch = array(8, 1024)

    def plan(memory, fn=mlp_loss):
        hardware = rc.Hardware(memory=memory)
        options = {"fn": fn, "args": (batch, None), "hardware": hardware}
        return rc.plan_shardings(params, mesh, **options).report.program

    free = plan(80e9)
    assert (free.batch_axes, free.model_axes) == (("fsdp",), ())
    assert plan(free.memory.total / 0.84).batch_axes == ("fsdp",)
    tight = plan(free.memory.total / 0.86)
    assert (tight.batch_axes, tight.model_axes) == ((), ("fsdp",))
    assert tight.memory.total < free.memory.total
    # A function without gradients is not trained, so that its weights need not be gathered.
    predicted = plan(80e9, lambda params, x, key: jnp.tanh(x @ params["up"]) @ params["down"])
    assert predicted.model_axes == ("fsdp",)


def test_fsdp_stays_where_nothing_fits_and_it_needs_less_memory():
    params = {"layers": array(4, 1024, 1024)}

    def loss(params, x, key):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)

    plan = plan_of(loss, params, array(8, 16, 1024), (1, 8, 1), hardware=rc.Hardware(memory=1e6))
    assert plan.report.program.batch_axes == ("fsdp",)


def test_devices_decide_whether_splitting_pays():
    """Arrays so small that nothing is gained by storing them split, and a batch of one."""
    plan = lambda **constants: plan_of(
        mlp_loss, mlp(32, 64), array(1, 32), hardware=rc.Hardware(**constants)
    )
    assert computed(plan(flops=1e9, memory_bandwidth=1e9)) == {"down": 0, "up": 1}
    assert computed(plan(model_bandwidth=1e6)) == {"down": None, "up": None}


def test_abstract_arguments_are_as_good_as_arrays():
    full = lambda tree: jax.tree.map(lambda x: np.ones(x.shape, x.dtype), tree)
    abstract = plan_of(mlp_loss, mlp(), array(64, 512))
    concrete = plan_of(mlp_loss, full(mlp()), full(array(64, 512)))
    assert abstract.report == concrete.report
    assert abstract.shardings == concrete.shardings
    args = (array(64, 512), None)
    assert rc.infer_shardings(mlp(), mesh_of(1, 1, 8), fn=mlp_loss, args=args) == abstract.shardings


def test_a_value_with_several_uses_has_its_cotangent_reduced_once():
    def loss(p, x, key):
        x = x @ p["in"]
        return jnp.mean(((x @ p["gate"]) * (x @ p["up"]) @ p["down"]) ** 2)

    model = {"in": array(512, 512), "gate": array(512, 2048), **mlp()}
    plan = plan_of(loss, model, array(64, 512))
    backward = [size for cause, size in causes(plan).items() if "backward" in cause]
    assert computed(plan) == {"down": 0, "gate": 1, "in": 0, "up": 1}
    assert backward == [2 * 7 * 64 * 512 * 4 // 8]


@pytest.mark.parametrize("given", [{"args": (1,)}, {"budget": 1}, {"accumulate": 2}])
def test_what_belongs_to_a_function_needs_one(given):
    name = next(iter(given))
    with pytest.raises(ValueError, match=f"`{name}` needs a function.* pass `fn` too"):
        rc.plan_shardings(mlp(), mesh_of(1, 1, 8), **given)


def test_errors_of_the_function_are_its_own():
    with pytest.raises(KeyError, match="up"):
        plan_of(mlp_loss, {"w": array(8, 8)}, array(8, 8))


@pytest.fixture
def verified():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 4
    model, x = {"down": draw(32, 16), "up": draw(16, 32)}, draw(8, 16)
    slow = rc.Hardware(flops=1e6, memory_bandwidth=1e7)
    args = (x, None)
    plan = rc.plan_shardings(model, real_mesh(2, 2, 2), fn=mlp_loss, args=args, hardware=slow)
    assert set(plan.compute.dims) == {0, 1}
    return plan, model, x


def test_verify_gives_the_difference_of_each_array(verified):
    plan, model, x = verified
    errors = plan.verify(mlp_loss, model, x, tolerance=1e-5)
    assert set(errors) == {"loss", "down", "up"}
    assert max(errors.values()) < 1e-5


def test_verify_names_what_is_wrong(verified, monkeypatch):
    plan, model, x = verified

    def wrong(self, fn):
        """The loss is right, and one gradient is not."""
        extra = lambda p: jnp.sum(p["down"]) - lax.stop_gradient(jnp.sum(p["down"]))
        return lambda p, x, key: fn(p, x, key) + extra(p)

    monkeypatch.setattr(rc.Plan, "constrain", wrong)
    with pytest.raises(ValueError, match=r"and one device give different results") as error:
        plan.verify(mlp_loss, model, x)
    assert "down (by" in str(error.value)
    assert "up (by" not in str(error.value)
    assert "loss (by" not in str(error.value)


def test_docstrings_state_the_memory_that_plans_assume_and_fill():
    part = f"{100 * FILLED:.0f} %"
    for function in (rc.plan_shardings, rc.fit, rc.dry_run):
        assert part in (inspect.getdoc(function) or "")
    assert f"{DEFAULT_MEMORY / 1e9:.0f} GB" in (inspect.getdoc(rc.Hardware) or "")


@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_are_not_collected_while_a_plan_is_made_and_then_as_before(enabled):
    """The collector would go through all that a plan of a large model consists of, many times."""
    during = []

    def loss(p, x, key):
        during.append(gc.isenabled())
        if len(x) == 1:
            raise ValueError("no rows")
        return mlp_loss(p, x, key)

    model = {"up": array(64, 256), "down": array(256, 64)}
    try:
        if not enabled:
            gc.disable()
        plan_of(loss, model, array(16, 64))
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="no rows"):
            plan_of(loss, model, array(1, 64))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert not any(during)
    assert during
