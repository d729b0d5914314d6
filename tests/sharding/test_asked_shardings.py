"""What plans say of shardings that a program asks for itself, against compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, real_mesh

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes

ROWS = ("data", "fsdp")
FREE = P.UNCONSTRAINED


def two_layers(inputs=None, hidden=None, result=None, weights=None):
    """A loss with constraints of its activations, or of its weights."""

    def make(constrain):
        def loss(model, batch, key):
            up, down = model["up"], model["down"]
            up, down = constrain(up, weights), constrain(down, weights)
            h = constrain(jnp.tanh(constrain(batch, inputs) @ up), hidden)
            return jnp.mean(constrain(h @ down, result) ** 2)

        return loss, {"up": array(64, 256), "down": array(256, 64)}

    return make


def layers(residual, hidden):
    """Residual layers with constraints of what goes from layer to layer, and of what is inside."""

    def make(constrain):
        def layer(x, weights):
            x = constrain(x, residual)
            h = jnp.tanh(constrain(x, (ROWS, None, None)) @ weights["up"])
            return x + constrain(constrain(h, hidden) @ weights["down"], residual), None

        def loss(model, batch, key):
            return jnp.mean(jax.lax.scan(layer, batch, model)[0] ** 2)

        return loss, {"up": array(3, 64, 256), "down": array(3, 256, 64)}

    return make


PROGRAMS = {
    "hidden units gathered": two_layers(hidden=(ROWS, None, None)),
    "positions over model": two_layers(hidden=(ROWS, "model", None)),
    "positions over model, the rest free": two_layers(hidden=(FREE, "model", FREE)),
    "positions of inputs over model": two_layers(inputs=(ROWS, "model", None)),
    "all replicated": two_layers(hidden=(None, None, None)),
    "rows gathered": two_layers(hidden=(None, None, "model")),
    "results split further": two_layers(result=(ROWS, "model", None)),
    "results replicated": two_layers(result=(None, None, None)),
    "weights replicated": two_layers(weights=(None, None)),
    "sequence parallelism": layers((ROWS, "model", None), (FREE, FREE, "model")),
    "hidden units gathered in layers": layers((ROWS, None, None), (ROWS, None, None)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", few_of([(2, 1, 4), (8, 1, 1)], (2, 1, 4)))
@pytest.mark.parametrize("name", few_of(PROGRAMS, "positions of inputs over model"))
def test_shardings_that_the_program_asks_for_are_priced_as_compiled(name, sizes):
    """Forward, in the derivative, and in the products that read such an array."""
    mesh = real_mesh(*sizes)

    def constrain(x, spec):
        if spec is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    loss, model = PROGRAMS[name](constrain)
    batch = array(32, 16, 64)
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(batch, None))
    step = jax.jit(
        jax.value_and_grad(plan.constrain(loss)),
        in_shardings=(plan.shardings, rc.batch_shardings(batch, mesh), None),
        out_shardings=(None, plan.shardings),
    )
    actual = collectives(step.lower(model, batch, None).compile().as_text(), mesh)
    planned = sum(line.bytes for line in plan.report.program.traffic)
    assert planned == pytest.approx(sent_bytes(actual), rel=0.05)
