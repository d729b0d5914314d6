import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, mesh_of, reasons, specs, train_state

import redcoast as rc
from redcoast.sharding import infer_shardings, plan_shardings

ALIASES = [
    name
    for name in dir(optax)
    if getattr(getattr(optax, name), "__module__", "") == "optax._src.alias" and name[0].islower()
]
OPTIMIZERS = {name: lambda name=name: getattr(optax, name)(1e-3) for name in ALIASES} | {
    "noisy_sgd": lambda: optax.noisy_sgd(1e-3, key=0),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
    "masked": lambda: optax.masked(optax.adam(1e-3), large),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "multi_transform": lambda: optax.multi_transform(
        {True: optax.adam(1e-3), False: optax.sgd(0.1, momentum=0.9)}, large
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    "muon": lambda: optax.contrib.muon(1e-3),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
}


def large(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def wide_model():
    key = jax.random.key(0)
    return {
        "embed": eqx.nn.Embedding(512, 128, key=key),
        "attention": eqx.nn.MultiheadAttention(4, 128, use_query_bias=True, key=key),
        "mlp": eqx.nn.MLP(128, 128, 256, 2, key=key),
    }


# optax.tree_map_params fails on these.
NO_MAP = ("lbfgs", "masked", "multi_transform", "muon", "schedule_free", "sm3")


@pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_follows_its_parameters(name):
    model, optimizer = eqx.filter_eval_shape(wide_model), OPTIMIZERS[name]()
    state = train_state(model, optimizer)
    shardings = infer_shardings(state, mesh_of(1, 2, 4))
    alone = infer_shardings(model, mesh_of(1, 2, 4))
    assert jax.tree.leaves(shardings.model) == jax.tree.leaves(alone)
    arrays = jax.tree.leaves(state.opt_state)
    found = jax.tree.leaves(shardings.opt_state)
    for state_array, sharding in zip(arrays, found, strict=True):
        if state_array.shape == (512, 128):  # only copies of the embedding are
            assert sharding == alone["embed"].weight
        if state_array.size >= 128 * 128:
            assert np.prod(sharding.shard_shape(state_array.shape)) * 8 == state_array.size
    if name not in NO_MAP:
        check_with_optax(optimizer, state, alone, found)


def check_with_optax(optimizer, state, alone, found):
    """The parameter that optax itself tells for an array of the state has the same sharding."""
    params = eqx.filter(state.model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    expected = optax.tree_map_params(
        optimizer,
        lambda array, param, sharding: sharding if array.shape == param.shape else "other",
        state.opt_state,
        params,
        eqx.filter(alone, lambda x: isinstance(x, NamedSharding)),
        transform_non_params=lambda _: "other",
    )
    pairs = list(zip(jax.tree.leaves(expected), found, strict=True))
    assert all(a == b for a, b in pairs if isinstance(a, NamedSharding))


def test_factored_state_keeps_the_entries_of_the_dimensions_it_keeps():
    model = {"up": {"kernel": array(128, 512)}, "down": {"kernel": array(512, 128)}}
    model["square"] = {"kernel": array(256, 256)}
    state = train_state(model, optax.adafactor(1e-3))
    found = specs(state, overrides=[("kernel", ("fsdp", "model"))], fsdp=2, model=4)
    rows = {path: spec for path, spec in found.items() if "/v_row/" in path or "/v_col/" in path}
    assert {path.split("/", 2)[2]: spec for path, spec in rows.items()} == {
        "v_row/up/kernel": P("fsdp"),  # the larger dimension is averaged away
        "v_row/down/kernel": P("model"),
        "v_row/square/kernel": P("fsdp"),
        "v_col/up/kernel": P("model"),
        "v_col/down/kernel": P("fsdp"),
        "v_col/square/kernel": P("model"),
    }


def test_memory_of_several_steps_keeps_its_leading_dimension_whole():
    model = {"up": {"kernel": array(128, 512)}}
    state = train_state(model, optax.lbfgs(1e-3, memory_size=4))
    found = specs(state, overrides=[("kernel", ("fsdp", "model"))], fsdp=2, model=4)
    memory = [spec for path, spec in found.items() if "memory/up" in path]
    assert memory == [P(None, "fsdp", "model")] * 2


def test_state_of_another_shape_is_whole_with_the_reason():
    model = {"w": {"kernel": array(128, 512)}}
    opt_state = {"w": {"kernel": array(7, 9)}, "z": array(512)}
    state = rc.TrainState(model, opt_state, jnp.zeros((), jnp.int32), jax.random.key(0))
    found = reasons(state, model=4)
    why = "its sharding cannot be inferred from that of w/kernel"
    assert found["opt_state/w/kernel"] == f"replicated: {why}"
    assert found["opt_state/z"] == "replicated: belongs to no parameter"
    assert why in plan_shardings(state, mesh_of(model=4)).table()


@pytest.mark.parametrize("name", ["adam", "adafactor", "sm3"])
def test_state_of_a_model_that_is_one_array_follows_it(name):
    found = specs(train_state(array(256, 512), OPTIMIZERS[name]()), fsdp=2, model=4)
    whole = {path for path, spec in found.items() if spec == P()}
    assert found[""] == P("fsdp", "model")
    assert whole - {"key", "step"} <= {"opt_state/0/count", "opt_state/0/v", "opt_state/2/count"}
