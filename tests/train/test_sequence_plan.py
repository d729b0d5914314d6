"""Plans of training steps that also split what is between their tensor-parallel parts."""

import jax
import jax.numpy as jnp
import optax
import pytest

import redcoast as rc
from redcoast.losses import cross_entropy


def loss_fn(model, batch, key):
    return cross_entropy(model(batch), batch)


@pytest.mark.thorough
@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_is_planned_with_or_without_its_sequence_split(sequence):
    """The option reaches the plan of a step, and with it the residual stream of its program."""
    config = rc.models.LlamaConfig(vocab=64, width=32, layers=1, heads=4, kv_heads=4, hidden=64)
    make = lambda key: rc.models.Llama(config, key=key)
    state = jax.eval_shape(lambda: rc.init_state(make, optax.sgd(0.1), key=jax.random.key(0)))
    batch = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    # Two sequences cannot be split over more than `data`.
    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_step(state, loss_fn, batch, mesh, sequence=sequence)
    assert plan.compute.sequence_parallel == sequence
    loss = plan.constrain(loss_fn)
    text = (
        jax.jit(lambda model, batch: loss(model, batch, None)).lower(state.model, batch).as_text()
    )
    residual = '[{"data", "fsdp"}, {"model"}, {}]> : tensor<2x16x32xf32>'
    assert (residual in text) == sequence
